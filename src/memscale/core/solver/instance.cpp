#include "memscale/core/solver/instance.h"

#include <algorithm>
#include <limits>
#include <tuple>

namespace memscale::solver {
namespace {

constexpr std::int64_t kLowest = std::numeric_limits<std::int64_t>::min() / 4;

bool beats(const Item& a, const Item& b) {
  return a.held <= b.held && a.need <= b.need && a.host <= b.host &&
         a.nanoseconds <= b.nanoseconds;
}

// Of equal ones, the first stays.
std::vector<Item> without_beaten(const std::vector<Item>& items) {
  std::vector<Item> rest;
  for (std::size_t i = 0; i < items.size(); ++i) {
    bool is_beaten = false;
    for (std::size_t j = 0; j < items.size() && !is_beaten; ++j) {
      is_beaten = i != j && beats(items[j], items[i]) &&
                  (j < i || !beats(items[i], items[j]));
    }
    if (!is_beaten) rest.push_back(items[i]);
  }
  return rest;
}

}  // namespace

Instance::Instance(const Problem& problem)
    : other_peak(problem.other_peak.count()),
      device_budget(problem.device_budget.count()),
      host_budget(problem.host_budget.count()) {
  for (const ProblemLayer& layer : problem.layers) {
    std::vector<Item> items;
    for (const Option& option : problem.options[layer.options]) {
      const Bytes need = std::max(layer.forward_base + option.forward_peak,
                                  layer.backward_base + option.backward_peak);
      items.push_back({.held = option.held.count(),
                       .need = need.count(),
                       .host = option.host.count(),
                       .nanoseconds = option.nanoseconds,
                       .option = items.size()});
    }
    layers.push_back(without_beaten(items));
    lists.push_back(layer.options);
  }
}

std::vector<std::int64_t> tails(const Instance& instance) {
  const std::size_t n = instance.layers.size();
  std::vector<std::int64_t> tail(n + 1, kLowest);
  for (std::size_t k = n; k-- > 0;) {
    std::int64_t best = std::numeric_limits<std::int64_t>::max();
    for (const Item& item : instance.layers[k]) {
      best = std::min(best, item.held + std::max(item.need, tail[k + 1]));
    }
    tail[k] = best;
  }
  return tail;
}

std::vector<std::int64_t> host_tails(const Instance& instance) {
  const std::size_t n = instance.layers.size();
  std::vector<std::int64_t> tail(n + 1, 0);
  for (std::size_t k = n; k-- > 0;) {
    const auto least =
        std::ranges::min_element(instance.layers[k], {}, &Item::host);
    tail[k] = tail[k + 1] + least->host;
  }
  return tail;
}

namespace {

// As tails(), but of pairs: so much device, and so much host memory.
struct TailState {
  std::int64_t tail;
  std::int64_t host;
  std::uint32_t next;  // of the layer after it
  std::uint32_t item;
};

// Less host memory for more device memory, in that order; at most so many.
void keep_best(std::vector<TailState>& states, std::size_t max_states) {
  std::ranges::sort(states, [](const TailState& a, const TailState& b) {
    return std::tie(a.tail, a.host, a.item, a.next) <
           std::tie(b.tail, b.host, b.item, b.next);
  });
  std::size_t num_kept = 0;
  for (const TailState& state : states) {
    if (num_kept > 0 && states[num_kept - 1].host <= state.host) continue;
    states[num_kept++] = state;
  }
  states.resize(num_kept);
  if (num_kept <= max_states) return;
  // Both ends stay, so that what can be found is found.
  for (std::size_t i = 0; i < max_states; ++i) {
    states[i] = states[i * (num_kept - 1) / (max_states - 1)];
  }
  states.resize(max_states);
}

}  // namespace

std::optional<SmallestBudget> smallest_budget(const Instance& instance,
                                              std::size_t max_states) {
  const std::size_t n = instance.layers.size();
  std::vector<std::vector<TailState>> states(n + 1);
  states[n] = {{.tail = kLowest, .host = 0, .next = 0, .item = 0}};
  for (std::size_t k = n; k-- > 0;) {
    const std::vector<Item>& items = instance.layers[k];
    for (std::uint32_t c = 0; c < items.size(); ++c) {
      for (std::uint32_t s = 0; s < states[k + 1].size(); ++s) {
        const TailState& next = states[k + 1][s];
        const std::int64_t host = next.host + items[c].host;
        if (host > instance.host_budget) continue;
        states[k].push_back(
            {items[c].held + std::max(items[c].need, next.tail), host, s, c});
      }
    }
    keep_best(states[k], std::max<std::size_t>(max_states, 2));
  }
  if (states[0].empty()) return std::nullopt;
  SmallestBudget result{std::max(states[0][0].tail, instance.other_peak), {}};
  std::uint32_t at = 0;
  for (std::size_t k = 0; k < n; ++k) {
    result.choice.push_back(states[k][at].item);
    at = states[k][at].next;
  }
  return result;
}

}  // namespace memscale::solver
