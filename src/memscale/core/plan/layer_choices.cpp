#include "memscale/core/plan/layer_choices.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "memscale/core/cuts/cuts.h"
#include "memscale/core/cuts/layer_graph.h"
#include "memscale/core/predict/replayed_step.h"
#include "memscale/core/trace/timeline.h"

namespace memscale {
namespace {

// Of a layer. Each is predicted once, so this is what a decision takes.
constexpr std::size_t kMaxOptions = 10;

// Forward ops that one layer runs without a break: what a tape records.
struct Run {
  LayerId layer;
  std::vector<OpId> ops;
};

std::vector<Run> runs_of(const Trace& trace) {
  std::vector<Run> runs;
  for (std::size_t i = 0; i < trace.ops.size(); ++i) {
    const Op& op = trace.ops[i];
    if (op.phase != Phase::Forward || !op.layer.valid()) continue;
    if (runs.empty() || runs.back().layer != op.layer) {
      runs.push_back({op.layer, {}});
    }
    runs.back().ops.emplace_back(i);
  }
  return runs;
}

bool are_alike(const Trace& trace, const Run& a, const Run& b) {
  return std::ranges::equal(
      a.ops, b.ops, {}, [&](OpId id) { return trace.at(id).name; },
      [&](OpId id) { return trace.at(id).name; });
}

// Evenly, both ends included.
std::vector<Cut> thinned(std::vector<Cut> cuts) {
  if (cuts.size() <= kMaxOptions) return cuts;
  std::vector<Cut> some;
  some.reserve(kMaxOptions);
  for (std::size_t i = 0; i < kMaxOptions; ++i) {
    some.push_back(std::move(cuts[i * (cuts.size() - 1) / (kMaxOptions - 1)]));
  }
  return some;
}

bool beats(const Option& a, const Option& b) {
  return a.held <= b.held &&
         a.forward_peak + a.held <= b.forward_peak + b.held &&
         a.backward_peak + a.held <= b.backward_peak + b.held &&
         a.nanoseconds <= b.nanoseconds;
}

// Those that a later one, which keeps more, is at least as good as.
void drop_beaten(std::vector<Option>& options, std::vector<TapeRules>& rules) {
  for (std::size_t i = options.size(); i-- > 0;) {
    const bool beaten = std::any_of(
        options.begin() + static_cast<std::ptrdiff_t>(i) + 1, options.end(),
        [&](const Option& later) { return beats(later, options[i]); });
    if (!beaten) continue;
    options.erase(options.begin() + static_cast<std::ptrdiff_t>(i));
    rules.erase(rules.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

}  // namespace

LayerChoices::LayerChoices(const Question& question) : question_(question) {
  others_ = uniform_rules(question, ReplayPolicy::Cheap).front();
  find_choosers();
  measure();
}

void LayerChoices::find_choosers() {
  const Trace& trace = *question_.trace;
  const std::vector<Run> runs = runs_of(trace);
  std::map<LayerId, std::vector<const Run*>> by_layer;
  for (const Run& run : runs) by_layer[run.layer].push_back(&run);

  const GraphRules graph_rules{.min_bytes = question_.min_bytes,
                               .on_cpu = question_.on_cpu,
                               .on_cuda = question_.target.on_cuda,
                               .benchmarks = question_.target.benchmarks,
                               .granularity = question_.granularity,
                               .held_elsewhere = {}};
  const std::size_t min_bytes = others_.min_bytes;
  std::vector<std::pair<LayerGraph, std::vector<TapeRules>>> known;
  for (const Run& run : runs) {
    const auto& calls = by_layer[run.layer];
    // A keep set is followed from the start of each run.
    if (calls.front() != &run ||
        !std::ranges::all_of(calls, [&](const Run* call) {
          return are_alike(trace, run, *call);
        })) {
      continue;
    }
    std::vector<std::int64_t> times;
    times.reserve(run.ops.size());
    for (const OpId id : run.ops) {
      times.push_back(question_.cost.nanoseconds(trace, trace.at(id)));
    }
    LayerGraph graph = layer_graph(trace, run.ops, times, graph_rules);
    auto found = std::ranges::find(
        known, graph, &std::pair<LayerGraph, std::vector<TapeRules>>::first);
    if (found == known.end()) {
      std::vector<TapeRules> options;
      for (Cut& cut : thinned(pareto_cuts(graph))) {
        if (cut.nanoseconds == 0) continue;  // keeping is as fast, untaped
        options.push_back(
            {ReplayPolicy::Keep,
             std::make_shared<const KeepSet>(std::move(cut.keep_set)),
             min_bytes});
      }
      options.push_back({ReplayPolicy::Keep, nullptr, min_bytes});
      known.emplace_back(std::move(graph), std::move(options));
      found = std::prev(known.end());
    }
    if (found->second.size() > 1) {
      choosers_.push_back({run.layer, found->second});
    }
  }
}

std::vector<TapeRules> LayerChoices::at_level(std::size_t level) const {
  std::vector<TapeRules> rules(question_.trace->layers.size(), others_);
  for (const Chooser& chooser : choosers_) {
    rules[chooser.layer.index()] =
        chooser.options[std::min(level, chooser.options.size() - 1)];
  }
  return rules;
}

// See Note [Layers add up]. The problem's layers are the choosers, and before,
// between and after them one each that has no choice: what runs outside.
void LayerChoices::measure() {
  const std::size_t count = choosers_.size();
  std::vector<std::size_t> place_of(question_.trace->layers.size(), count);
  std::size_t num_levels = 1;
  for (std::size_t i = 0; i < count; ++i) {
    place_of[choosers_[i].layer.index()] = i;
    num_levels = std::max(num_levels, choosers_[i].options.size());
  }
  std::vector<std::vector<Option>> options(count);
  std::vector<Bytes> outside(count + 1);

  for (std::size_t level = 0; level < num_levels; ++level) {
    const ReplayedStep step = replayed_step(*question_.trace, at_level(level),
                                            question_.on_cpu, question_.target);
    const Trace& trace = step.trace;
    const Timeline timeline(trace, Place::Device, question_.granularity);
    const auto before = times_by_layer(question_.cost, *question_.trace);
    const auto after = times_by_layer(question_.cost, trace);

    // held[i]: by the first i choosers. Where each of them begins and ends.
    std::vector<Bytes> held(count + 1);
    for (std::size_t i = 0; i < count; ++i) {
      held[i + 1] = held[i] + step.layers[choosers_[i].layer.index()].held;
    }
    std::vector<std::size_t> first(count, trace.ops.size());
    std::vector<std::size_t> last(count, 0);
    const auto place = [&](const Op& op) {
      return op.layer.valid() ? place_of[op.layer.index()] : count;
    };
    for (std::size_t t = 0; t < trace.ops.size(); ++t) {
      const std::size_t i = place(trace.ops[t]);
      if (i == count) continue;
      if (trace.ops[t].phase == Phase::Forward) {
        first[i] = std::min(first[i], t);
      } else {
        last[i] = t;
      }
    }

    std::vector<Bytes> forward(count);
    std::vector<Bytes> backward(count);
    std::size_t open = 0;  // choosers that hold something now
    for (std::size_t t = 0; t < trace.ops.size(); ++t) {
      const Op& op = trace.ops[t];
      const Bytes bytes = timeline.instants()[t].bytes;
      if (op.phase == Phase::Forward) {
        while (open < count && first[open] <= t) ++open;
      } else {
        while (open > 0 && last[open - 1] < t) --open;
      }
      const std::size_t i = place(op);
      if (i == count) {
        outside[open] = std::max(outside[open], bytes - held[open]);
      } else {
        Bytes& most = op.phase == Phase::Forward ? forward[i] : backward[i];
        most = std::max(most, bytes - held[i]);
      }
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (level >= choosers_[i].options.size()) continue;
      const std::size_t layer = choosers_[i].layer.index();
      const Bytes own = step.layers[layer].held;
      options[i].push_back(
          {.held = own,
           .forward_peak = std::max(forward[i] - own, Bytes()),
           .backward_peak = std::max(backward[i] - own, Bytes()),
           .host = Bytes(),
           .nanoseconds =
               std::max(after[layer] - before[layer], std::int64_t{0})});
    }
  }

  for (std::size_t i = 0; i < count; ++i) {
    drop_beaten(options[i], choosers_[i].options);
  }
  const auto add = [&](std::vector<Option> list) {
    problem_.layers.push_back({problem_.options.size(), Bytes(), Bytes()});
    problem_.options.push_back(std::move(list));
  };
  for (std::size_t i = 0; i <= count; ++i) {
    add({{.held = Bytes(),
          .forward_peak = Bytes(),
          .backward_peak = outside[i],
          .host = Bytes(),
          .nanoseconds = 0}});
    if (i < count) add(std::move(options[i]));
  }
}

std::vector<TapeRules> LayerChoices::rules(
    std::span<const std::size_t> choice) const {
  std::vector<TapeRules> rules(question_.trace->layers.size(), others_);
  bool all_keep = true;
  for (std::size_t i = 0; i < choosers_.size(); ++i) {
    const Chooser& chooser = choosers_[i];
    const TapeRules& chosen = chooser.options[choice[2 * i + 1]];
    rules[chooser.layer.index()] = chosen;
    all_keep &= chosen.keeps_all();
  }
  return all_keep ? uniform_rules(question_, ReplayPolicy::Keep) : rules;
}

}  // namespace memscale
