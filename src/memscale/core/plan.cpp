#include "memscale/core/plan.h"

#include <algorithm>
#include <cmath>
#include <ranges>
#include <set>
#include <sstream>

#include "memscale/base/ascii.h"
#include "memscale/base/error.h"

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

// Of a name, which may come from a file, so much as a message needs; not cut
// inside of a character.
std::string quoted_start(std::string_view name) {
  constexpr std::size_t kMost = 100;
  if (name.size() <= kMost) return ascii::quoted(name);
  std::size_t end = kMost;
  while (end > 0 && (static_cast<unsigned char>(name[end]) & 0xC0U) == 0x80U) {
    --end;
  }
  return ascii::quoted(name.substr(0, end)) + "...";
}

std::string name_of(const LayerPlan& layer) {
  return layer.layer.empty() ? "(the model itself)" : layer.layer;
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

std::string LayerPlan::technique() const {
  if (keep_set) {
    return str("recompute (keeps ", keep_set->kept.size(), " results of ",
               keep_set->ops.size(), " ops)");
  }
  if (policy == ReplayPolicy::Keep) return "keep";
  return str("recompute (", to_string(policy), ")");
}

double Plan::slowdown() const {
  if (plain_nanoseconds == 0) return 0;
  return (static_cast<double>(nanoseconds) +
          static_cast<double>(optimizer_nanoseconds)) /
         static_cast<double>(plain_nanoseconds);
}

void Plan::check() const {
  check_not_negative("plain_peak", plain_peak.count());
  check_not_negative("peak", peak.count());
  check_not_negative("host_peak", host_peak.count());
  check_not_negative("plain_nanoseconds", plain_nanoseconds);
  check_not_negative("nanoseconds", nanoseconds);
  check_not_negative("optimizer_nanoseconds", optimizer_nanoseconds);
  if (budget && *budget <= 0_B) {
    throw PlanError(str("budget must be > 0, got ", budget->count()));
  }
  if (optimizer_bits != 8 && optimizer_bits != 32) {
    throw PlanError(
        str("optimizer_bits must be 8 or 32, got ", optimizer_bits));
  }
  if (layers.empty()) throw PlanError("layers must not be empty");
  std::set<std::string_view> names;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const LayerPlan& layer = layers[i];
    if (!names.insert(layer.layer).second) {
      throw PlanError(str("layers[", i, "].layer must not be there twice, got ",
                          quoted_start(layer.layer)));
    }
    const std::string place = str("layers[", i, "].");
    check_not_negative(place + "plain_bytes", layer.plain_bytes.count());
    if (layer.parameter_bytes) {
      check_not_negative(place + "parameter_bytes",
                         layer.parameter_bytes->count());
    }
    check_not_negative(place + "held_bytes", layer.held_bytes.count());
    check_not_negative(place + "nanoseconds", layer.nanoseconds);
    if (!layer.keep_set) continue;
    try {
      layer.keep_set->check();
    } catch (const PlanError& error) {
      throw PlanError(place + error.what());
    }
  }
}

void Plan::check_fits(const std::vector<std::string>& layer_names,
                      const std::vector<Bytes>& parameter_bytes) const {
  const std::string head =
      str("the plan must be of this model, but it is of ", quoted_start(model));
  if (layer_names.size() != layers.size()) {
    throw PlanError(str(head, " with ", layers.size(), " layers instead of ",
                        layer_names.size()));
  }
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (layers[i].layer == layer_names[i]) continue;
    throw PlanError(str(head, " whose layer ", i, " is ",
                        quoted_start(layers[i].layer), " instead of ",
                        quoted_start(layer_names[i])));
  }
  const std::size_t known = std::min(parameter_bytes.size(), layers.size());
  for (std::size_t i = 0; i < known; ++i) {
    const std::optional<Bytes> made_for = layers[i].parameter_bytes;
    if (!made_for || *made_for == parameter_bytes[i]) continue;
    throw PlanError(str(
        head, " whose layer ", i, ", ", quoted_start(layers[i].layer), ", has ",
        *made_for, " of parameters (layers[", i, "].parameter_bytes is ",
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
    if (layer.plain_bytes == 0_B && !layer.recomputes()) continue;
    out << name_of(layer) << ": " << layer.technique() << ", "
        << layer.plain_bytes << " -> " << layer.held_bytes;
    if (layer.nanoseconds > 0) {
      // In this order: nothing overflows.
      out << ", "
          << layer.nanoseconds / 1000 + (layer.nanoseconds % 1000 + 500) / 1000
          << " us";
    }
    if (!layer.reason.empty()) out << ": " << layer.reason;
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
  line("bits of optimizer state", optimizer_bits, other.optimizer_bits);
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
        layer.keep_set != found->keep_set) {
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
