#pragma once

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "memscale/core/solver/solver.h"

namespace memscale {

// So many layers of each list, one list after the other.
inline Problem problem_of(std::vector<std::vector<Option>> options,
                          std::size_t num_each) {
  Problem problem;
  problem.options = std::move(options);
  for (std::size_t i = 0; i < problem.options.size(); ++i) {
    for (std::size_t k = 0; k < num_each; ++k) {
      problem.layers.push_back({.options = i});
    }
  }
  return problem;
}

inline Problem with_budget(Problem problem, Bytes budget) {
  problem.device_budget = budget;
  return problem;
}

// A layer's options as cuts give them: the less is held, the more is made
// again, in backward and for time. Some may go to the host instead.
inline std::vector<Option> layer_options(std::mt19937& random,
                                         std::size_t num_options,
                                         bool offloads) {
  // Not a std distribution: those differ between libraries.
  const auto draw = [&](std::int64_t below) {
    return static_cast<std::int64_t>(random()) % below;
  };
  const std::int64_t all = 50'000'000 + draw(50'000'000);
  std::vector<Option> options;
  std::int64_t held = all;
  std::int64_t nanoseconds = 0;
  for (std::size_t i = 0; i < num_options; ++i) {
    options.push_back({.held = Bytes(held),
                       .forward_peak = Bytes(all - held / 2),
                       .backward_peak = Bytes(all - held),
                       .host = {},
                       .nanoseconds = nanoseconds});
    const std::int64_t less = held * (5 + draw(20)) / 100;
    if (offloads && i % 3 == 1) {
      Option moved = options.back();
      moved.held = Bytes(held - less);
      moved.host = Bytes(less);
      moved.nanoseconds += 1 + less / 20;
      options.push_back(moved);
    }
    held -= less;
    nanoseconds += less / (40 - static_cast<std::int64_t>(i)) + draw(10'000);
  }
  return options;
}

// Gradients come as parameters' backward has run: the first layer's last.
inline void set_bases(Problem& problem, bool offloads) {
  const auto n = static_cast<std::int64_t>(problem.layers.size());
  for (std::int64_t k = 0; k < n; ++k) {
    auto& layer = problem.layers[static_cast<std::size_t>(k)];
    layer.forward_base = Bytes(10'000'000 * n);
    layer.backward_base = Bytes(10'000'000 * n + 3'000'000 * (n - k));
  }
  if (offloads) problem.host_budget = Bytes(8'000'000 * n);
}

inline Problem equal_layers(std::mt19937& random, std::size_t num_layers,
                            std::size_t num_options, bool offloads) {
  Problem problem =
      problem_of({layer_options(random, num_options, offloads)}, num_layers);
  set_bases(problem, offloads);
  return problem;
}

inline Problem different_layers(std::mt19937& random, std::size_t num_layers,
                                std::size_t num_options, bool offloads) {
  Problem problem;
  for (std::size_t k = 0; k < num_layers; ++k) {
    problem.options.push_back(layer_options(random, num_options, offloads));
    problem.layers.push_back({.options = k});
  }
  set_bases(problem, offloads);
  return problem;
}

}  // namespace memscale
