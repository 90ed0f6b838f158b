#include "memscale/core/plan/plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <ranges>
#include <set>
#include <span>
#include <sstream>

#include "memscale/base/ascii.h"
#include "memscale/base/error.h"
#include "memscale/core/plan/tape_choice.h"
#include "memscale/core/plan/technique.h"

namespace memscale {
namespace {

void check_not_negative(std::string_view field, std::int64_t value) {
  if (value < 0) throw PlanError(str(field, " must be >= 0, got ", value));
}

std::string percent(double share) {
  constexpr double kMost = 1e15;  // whatever numbers a file has
  return str(share < 0 ? "-" : "+",
             std::llround(std::min(std::abs(share) * 100, kMost)), " %");
}

double change(Bytes from, Bytes to) {
  if (from == 0_B) return 0;
  return static_cast<double>((to - from).count()) /
         static_cast<double>(from.count());
}

std::string name_of(const LayerPlan& layer) {
  return layer.layer.empty() ? "(the model itself)" : layer.layer;
}

// Of all of them; files may have any numbers.
std::int64_t price_of(std::span<const Choice> choices) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  std::int64_t sum = 0;
  for (const Choice& choice : choices) {
    sum = choice.nanoseconds > kMost - sum ? kMost : sum + choice.nanoseconds;
  }
  return sum;
}

// What a technique does to the whole step.
std::string described(std::span<const Choice> choices,
                      const Technique& technique) {
  const Choice* choice = find_choice(choices, technique.name);
  return choice == nullptr ? "not used" : technique.describe(*choice);
}

// 64-bit FNV-1a: no secret is kept, and equal on every host.
class Hash final {
 public:
  void add(std::string_view text) {
    for (const char c : text) step(static_cast<unsigned char>(c));
    step(0);
  }
  std::string hex() const {
    std::string text(16, '0');
    std::uint64_t rest = value_;
    for (char& digit : std::views::reverse(text)) {
      digit = "0123456789abcdef"[rest & 15U];
      rest >>= 4U;
    }
    return text;
  }

 private:
  void step(unsigned char byte) { value_ = (value_ ^ byte) * 0x100000001b3ULL; }
  std::uint64_t value_ = 0xcbf29ce484222325ULL;
};

}  // namespace

bool LayerPlan::recomputes() const {
  return find_choice(choices, kRecompute) != nullptr;
}

std::string LayerPlan::technique() const {
  return choices.empty() ? "keep" : describe(choices);
}

std::int64_t LayerPlan::nanoseconds() const { return price_of(choices); }

std::string LayerPlan::reason() const {
  if (choices.empty()) return plain_bytes == 0_B ? "holds nothing" : "";
  std::string text;
  for (const Choice& choice : choices) {
    if (choice.reason.empty()) continue;
    text += str(text.empty() ? "" : "; ", choice.reason);
  }
  return text;
}

std::int64_t Plan::step_nanoseconds() const { return price_of(choices); }

double Plan::slowdown() const {
  if (plain_nanoseconds == 0) return 0;
  return (static_cast<double>(nanoseconds) +
          static_cast<double>(step_nanoseconds())) /
         static_cast<double>(plain_nanoseconds);
}

void Plan::check() const {
  check_not_negative("plain_peak", plain_peak.count());
  check_not_negative("peak", peak.count());
  check_not_negative("host_peak", host_peak.count());
  check_not_negative("plain_nanoseconds", plain_nanoseconds);
  check_not_negative("nanoseconds", nanoseconds);
  if (budget && *budget <= 0_B) {
    throw PlanError(str("budget must be > 0, got ", budget->count()));
  }
  check_choices("", choices, false);
  if (layers.empty()) throw PlanError("layers must not be empty");
  std::set<std::string_view> names;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const LayerPlan& layer = layers[i];
    if (!names.insert(layer.layer).second) {
      throw PlanError(str("layers[", i, "].layer must not be there twice, got ",
                          ascii::quoted_start(layer.layer)));
    }
    const std::string place = str("layers[", i, "].");
    check_not_negative(place + "plain_bytes", layer.plain_bytes.count());
    if (layer.parameter_bytes) {
      check_not_negative(place + "parameter_bytes",
                         layer.parameter_bytes->count());
    }
    check_not_negative(place + "held_bytes", layer.held_bytes.count());
    check_choices(place, layer.choices, true);
  }
}

void Plan::check_fits(const std::vector<std::string>& layer_names,
                      const std::vector<Bytes>& parameter_bytes) const {
  const std::string head = str("the plan must be of this model, but it is of ",
                               ascii::quoted_start(model));
  if (layer_names.size() != layers.size()) {
    throw PlanError(str(head, " with ", layers.size(), " layers instead of ",
                        layer_names.size()));
  }
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].layer == layer_names[i]) continue;
    throw PlanError(str(head, " whose layer ", i, " is ",
                        ascii::quoted_start(layers[i].layer), " instead of ",
                        ascii::quoted_start(layer_names[i])));
  }
  const std::size_t known = std::min(parameter_bytes.size(), layers.size());
  for (std::size_t i = 0; i < known; ++i) {
    const std::optional<Bytes> made_for = layers[i].parameter_bytes;
    if (!made_for || *made_for == parameter_bytes[i]) continue;
    throw PlanError(
        str(head, " whose layer ", i, ", ",
            ascii::quoted_start(layers[i].layer), ", has ", *made_for,
            " of parameters (layers[", i, "].parameter_bytes is ",
            made_for->count(), ") instead of ", parameter_bytes[i], " (",
            parameter_bytes[i].count(), "): make a plan for this model"));
  }
}

std::string Plan::explain() const {
  std::ostringstream out;
  out << model << " with " << call << " for " << device << ", " << optimizer
      << ", mode " << to_string(mode);
  if (budget) out << ", budget " << *budget;
  out << "\npeak " << plain_peak << " -> " << peak << " ("
      << percent(change(plain_peak, peak)) << "), predicted slowdown "
      << percent(slowdown()) << "\n";
  for (const Verdict& verdict : verdicts) {
    out << "rule " << verdict.rule << ": " << verdict.text << "\n";
  }
  for (const LayerPlan& layer : layers) {
    if (layer.plain_bytes == 0_B && layer.choices.empty()) continue;
    out << name_of(layer) << ": " << layer.technique() << ", "
        << layer.plain_bytes << " -> " << layer.held_bytes;
    if (const std::int64_t time = layer.nanoseconds(); time > 0) {
      // In this order: nothing overflows.
      out << ", " << time / 1000 + (time % 1000 + 500) / 1000 << " us";
    }
    if (const std::string reason = layer.reason(); !reason.empty()) {
      out << ": " << reason;
    }
    out << "\n";
  }
  return std::move(out).str();
}

std::string Plan::diff(const Plan& other) const {
  std::ostringstream out;
  const auto line = [&](std::string_view what, const auto& ours,
                        const auto& theirs) {
    if (ours == theirs) return;
    out << what << ": " << ours << " -> " << theirs << "\n";
  };
  line("model", model, other.model);
  line("call", call, other.call);
  line("device", device, other.device);
  line("optimizer", optimizer, other.optimizer);
  line("mode", to_string(mode), to_string(other.mode));
  line("budget", budget ? budget->human() : "none",
       other.budget ? other.budget->human() : "none");
  for (const Technique& technique : techniques()) {
    line(technique.name, described(choices, technique),
         described(other.choices, technique));
  }
  line("predicted peak", peak, other.peak);
  line("predicted slowdown", percent(slowdown()), percent(other.slowdown()));
  const auto find = [](const Plan& plan, const std::string& name) {
    return std::ranges::find(plan.layers, name, &LayerPlan::layer);
  };
  for (const LayerPlan& layer : layers) {
    const auto found = find(other, layer.layer);
    if (found == other.layers.end()) {
      out << name_of(layer) << ": only in the first\n";
      continue;
    }
    line(name_of(layer), layer.technique(), found->technique());
    if (layer.technique() == found->technique() &&
        !std::ranges::equal(layer.choices, found->choices, {},
                            &Choice::keep_set, &Choice::keep_set)) {
      out << name_of(layer) << ": keeps other results\n";
    }
  }
  for (const LayerPlan& layer : other.layers) {
    if (find(*this, layer.layer) == layers.end()) {
      out << name_of(layer) << ": only in the second\n";
    }
  }
  return std::move(out).str();
}

std::string fingerprint_of(const Trace& trace) {
  Hash hash;
  for (const Layer& layer : trace.layers) hash.add(layer.name);
  for (const Op& op : trace.ops) {
    if (op.phase != Phase::Forward) break;
    hash.add(op.name);
    hash.add(op.layer.valid() ? trace.at(op.layer).name : "");
  }
  return hash.hex();
}

}  // namespace memscale
