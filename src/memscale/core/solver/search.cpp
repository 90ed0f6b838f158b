#include "memscale/core/solver/search.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace memscale::solver {
namespace {

struct State {
  std::int64_t held;
  std::int64_t host;
  std::int64_t nanoseconds;
  std::int64_t bound;  // of plans that begin with it, in ns
  std::uint32_t before;
  std::uint32_t item;
};

// What is needed to find the way back.
struct Step {
  std::uint32_t before;
  std::uint32_t item;
};

std::int64_t to_nanoseconds(Wide time) {
  // A plan takes whole nanoseconds: up. Division is towards zero.
  return static_cast<std::int64_t>(time > 0 ? (time + kTimeUnit - 1) / kTimeUnit
                                            : time / kTimeUnit);
}

// The order in which a state can only be beaten by one before it.
bool comes_before(const State& a, const State& b) {
  return std::tie(a.held, a.host, a.nanoseconds, a.item, a.before) <
         std::tie(b.held, b.host, b.nanoseconds, b.item, b.before);
}

class Pass {
 public:
  Pass(const Instance& instance, Bound& bound, std::int64_t faster_than,
       std::size_t max_states)
      : instance_(instance),
        bound_(bound),
        faster_than_(faster_than),
        slowest_(kTimeUnit * (faster_than - 1)),
        max_states_(max_states),
        tails_(tails(instance)),
        host_tails_(host_tails(instance)) {
    for (const std::vector<Item>& items : instance.layers) {
      for (const Item& item : items) uses_host_ |= item.host > 0;
    }
  }

  Found run() {
    states_ = {{.held = 0,
                .host = 0,
                .nanoseconds = 0,
                .bound = 0,
                .before = 0,
                .item = 0}};
    for (std::size_t k = 0; k < instance_.layers.size(); ++k) {
      add_layer(k);
      merge_runs();
      if (uses_host_) drop_beaten();
      give_up_worst();
      std::vector<Step> steps;
      steps.reserve(states_.size());
      for (const State& state : states_) {
        steps.push_back({state.before, state.item});
      }
      steps_.push_back(std::move(steps));
      if (states_.empty()) break;
    }
    return result();
  }

 private:
  void add_layer(std::size_t k) {
    const CurveTable& rest = bound_.after(k + 1);
    const std::int64_t room = instance_.device_budget - tails_[k + 1];
    const std::int64_t host_room = instance_.host_budget - host_tails_[k + 1];
    next_.clear();
    runs_.assign(1, 0);
    const std::vector<Item>& items = instance_.layers[k];
    for (std::uint32_t c = 0; c < items.size(); ++c) {
      const Item& item = items[c];
      const std::int64_t most =
          std::min(room, instance_.device_budget - item.need);
      CurveReader reader(rest, states_.front().held + item.held);
      for (std::uint32_t s = 0; s < states_.size(); ++s) {
        const State& state = states_[s];
        const std::int64_t held = state.held + item.held;
        if (held > most) break;  // states are sorted by held
        const std::int64_t host = state.host + item.host;
        if (host > host_room) continue;
        const std::int64_t ns = state.nanoseconds + item.nanoseconds;
        // The bound counts unused host memory as time won: it can be below the
        // time that is spent already.
        if (ns >= faster_than_) continue;
        const Wide least = bound_.total(ns, host, reader.at(held));
        if (least > slowest_) continue;
        next_.push_back({held, host, ns,
                         std::max(to_nanoseconds(least), state.bound), s, c});
      }
      if (next_.size() > runs_.back()) runs_.push_back(next_.size());
    }
    std::swap(states_, next_);
  }

  // Each item's states come in order; so do all, when these runs are merged.
  // Without host memory, those that are beaten are left out at once.
  void merge_runs() {
    while (runs_.size() > 2) {
      next_.clear();
      std::size_t num_runs = 0;
      for (std::size_t r = 0; r + 1 < runs_.size(); r += 2) {
        const std::size_t middle = runs_[r + 1];
        const std::size_t end = r + 2 < runs_.size() ? runs_[r + 2] : middle;
        merge(runs_[r], middle, end);
        runs_[++num_runs] = next_.size();
      }
      runs_.resize(num_runs + 1);
      std::swap(states_, next_);
    }
  }

  // Appends two neighbouring runs of states_ to next_, as one.
  void merge(std::size_t a, std::size_t b, std::size_t end_b) {
    const std::size_t first = next_.size();
    const std::size_t end_a = b;
    while (a < end_a || b < end_b) {
      const bool takes_a =
          b == end_b || (a < end_a && comes_before(states_[a], states_[b]));
      const State& state = states_[takes_a ? a++ : b++];
      if (!uses_host_ && next_.size() > first &&
          next_.back().nanoseconds <= state.nanoseconds) {
        continue;
      }
      next_.push_back(state);
    }
  }

  void drop_beaten() {
    std::size_t num_kept = 0;
    // Of those so far: less time for more host memory.
    std::map<std::int64_t, std::int64_t> fastest;
    for (const State& state : states_) {
      auto after = fastest.upper_bound(state.host);
      if (after != fastest.begin() &&
          std::prev(after)->second <= state.nanoseconds) {
        continue;
      }
      while (after != fastest.end() && after->second >= state.nanoseconds) {
        after = fastest.erase(after);
      }
      fastest[state.host] = state.nanoseconds;
      states_[num_kept++] = state;
    }
    states_.resize(num_kept);
  }

  void give_up_worst() {
    if (states_.size() <= max_states_) return;
    const auto first_lost =
        states_.begin() + static_cast<std::ptrdiff_t>(max_states_);
    std::ranges::nth_element(
        states_, first_lost, [](const State& a, const State& b) {
          return a.bound != b.bound ? a.bound < b.bound : comes_before(a, b);
        });
    given_up_ = std::min(given_up_, first_lost->bound);
    states_.erase(first_lost, states_.end());
    std::ranges::sort(states_, comes_before);
  }

  Found result() const {
    Found found;
    found.lower_bound = given_up_;
    if (states_.empty()) return found;
    const auto best =
        std::ranges::min_element(states_, {}, &State::nanoseconds);
    found.nanoseconds = best->nanoseconds;
    found.lower_bound = std::min(given_up_, found.nanoseconds);
    auto at = static_cast<std::size_t>(best - states_.begin());
    std::vector<std::size_t> choice(steps_.size());
    for (std::size_t k = steps_.size(); k-- > 0;) {
      choice[k] = steps_[k][at].item;
      at = steps_[k][at].before;
    }
    found.choice = std::move(choice);
    return found;
  }

  const Instance& instance_;
  Bound& bound_;
  const std::int64_t faster_than_;
  const Wide slowest_;
  const std::size_t max_states_;
  const std::vector<std::int64_t> tails_;
  const std::vector<std::int64_t> host_tails_;
  bool uses_host_ = false;
  std::vector<State> states_;  // sorted by held
  std::vector<State> next_;
  std::vector<std::size_t> runs_;  // of states_: where they begin and end
  std::vector<std::vector<Step>> steps_;  // by layer and state
  std::int64_t given_up_ = kNever;        // the least bound of these
};

}  // namespace

Found search(const Instance& instance, Bound& bound, std::int64_t faster_than,
             std::size_t max_states) {
  return Pass(instance, bound, faster_than, max_states).run();
}

}  // namespace memscale::solver
