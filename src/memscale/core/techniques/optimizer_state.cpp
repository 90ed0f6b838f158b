#include "memscale/core/techniques/optimizer_state.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "memscale/base/error.h"
#include "memscale/core/ops/workspace/adam.h"
#include "memscale/core/plan/frontier.h"
#include "memscale/core/plan/question.h"
#include "memscale/core/plan/rules/rule.h"
#include "memscale/core/techniques/table.h"

namespace memscale {
namespace {

constexpr std::string_view kName = "optimizer_state";
constexpr std::array<std::string_view, 1> kChoices = {"8bit"};

constexpr std::int64_t kFloat = 4;  // bytes

// A step over elements of two moments: by a kernel of ours (or bitsandbytes'),
// and by torch's operators, so many pieces. As measured on one core, and from
// what runtime/optimizer/optimizer_generic.cpp calls: two moments of a byte, a
// parameter and its gradient once, or about eighty passes of ten bytes.
ElementPass kernel_step(std::int64_t elements) {
  return {.elements = elements,
          .cpu_picoseconds = 1'310,
          .cpu_calls = 1,
          .card_bytes = 16,
          .card_calls = 1};
}
ElementPass step_in_pieces(std::int64_t elements, std::int64_t pieces) {
  return {.elements = elements,
          .cpu_picoseconds = 88'000,
          .cpu_calls = 0,
          .card_bytes = 800,
          .card_calls = 80.0 * static_cast<double>(pieces)};
}

// 0: not a type that can be held in 8 bits; it stays as it is.
std::int64_t width_of(Dtype dtype) {
  if (dtype == Dtype::Float32) return kFloat;
  return is_half(dtype) ? 2 : 0;
}

// What a state's elements take now, by its bytes: a state that stands for the
// others of its kind has values, the others have none. Of several that it may
// be, the one that leaves most bytes.
std::map<Bytes, std::int64_t> widths_of_states(const Trace& trace) {
  std::map<Bytes, std::int64_t> widths;
  for (const Value& value : trace.values) {
    if (!value.storage.valid()) continue;
    const Storage& storage = trace.at(value.storage);
    if (storage.category == Category::OptimizerState) {
      const std::int64_t width = width_of(value.dtype);
      const auto [known, is_new] = widths.emplace(storage.bytes, width);
      if (!is_new) known->second = std::min(known->second, width);
    }
  }
  return widths;
}

// The trace up to its optimizer's step, and the states that this made.
Trace without_optimizer_ops(const Trace& trace) {
  const auto first_op =
      std::ranges::find(trace.ops, Phase::Optimizer, &Op::phase);
  const OpId end(static_cast<std::size_t>(first_op - trace.ops.begin()));
  const auto is_gone = [&](const Storage& storage) {
    return storage.born.valid() && storage.born >= end;
  };
  Trace result = trace;
  result.ops.assign(trace.ops.begin(), first_op);
  result.storages.clear();
  result.values.clear();
  std::vector<StorageId> storage_now(trace.storages.size());
  for (std::size_t i = 0; i < trace.storages.size(); ++i) {
    if (is_gone(trace.storages[i])) continue;
    storage_now[i] = StorageId(result.storages.size());
    Storage& storage = result.storages.emplace_back(trace.storages[i]);
    for (OpId* last : {&storage.freed, &storage.let_go, &storage.plain_freed}) {
      if (!last->valid()) continue;
      // The one op that follows; but what goes with the optimizer's first one,
      // which only makes a counter, is gone before it.
      *last = *last == end && end.index() > 0 ? OpId(end.index() - 1)
                                              : std::min(*last, end);
    }
  }
  std::vector<ValueId> value_now(trace.values.size());
  for (std::size_t i = 0; i < trace.values.size(); ++i) {
    const Value& value = trace.values[i];
    if (value.storage.valid() && is_gone(trace.at(value.storage))) continue;
    value_now[i] = ValueId(result.values.size());
    Value& now = result.values.emplace_back(value);
    if (value.storage.valid()) {
      now.storage = storage_now[value.storage.index()];
    }
  }
  const auto renumber = [&](std::vector<ValueId>& ids) {
    for (ValueId& id : ids) id = value_now[id.index()];
  };
  for (Op& op : result.ops) {
    renumber(op.inputs);
    renumber(op.outputs);
  }
  for (Save& save : result.saves) {
    save.value = value_now[save.value.index()];
    if (save.released.valid()) save.released = std::min(save.released, end);
  }
  return result;
}

}  // namespace

Trace with_8bit_state(const Trace& trace, bool on_cpu) {
  const std::map<Bytes, std::int64_t> widths = widths_of_states(trace);
  Trace result = without_optimizer_ops(trace);
  Bytes moved;
  std::int64_t most = 0;  // elements of the largest state
  std::int64_t narrowest = kFloat;
  std::vector<Storage> scales;
  for (Storage& storage : result.storages) {
    if (storage.category != Category::OptimizerState) continue;
    const auto known = widths.find(storage.bytes);
    const std::int64_t width = known == widths.end() ? kFloat : known->second;
    if (width == 0) continue;
    const std::int64_t elements = storage.bytes.count() / width;
    if (elements < kMin8BitElements) {
      storage.bytes = Bytes(elements * kFloat);
    } else {
      storage.bytes = Bytes(elements);
      scales.push_back(storage);
      scales.back().bytes =
          Bytes((elements + kStateBlock - 1) / kStateBlock * kFloat);
    }
    most = std::max(most, elements);
    narrowest = std::min(narrowest, width);
    // Read and written; of the parameter and its gradient, half each.
    moved +=
        (storage.bytes * 2 + Bytes(elements * 3 * width / 2)) * storage.count;
  }
  result.storages.insert(result.storages.end(), scales.begin(), scales.end());
  Op& step = result.ops.emplace_back();
  step.name = "memscale::adam8_";
  step.phase = Phase::Optimizer;
  step.moved = moved;
  step.workspace_known = true;
  step.workspace = adam_workspace(most, narrowest, 8, on_cpu);
  return result;
}

std::int64_t StepTimes::extra() const {
  return std::max<std::int64_t>(with_8bit - plain, 0);
}

std::int64_t StepTimes::times() const {
  const std::int64_t base = std::max<std::int64_t>(plain, 1);
  return std::max<std::int64_t>((with_8bit + base / 2) / base, 1);
}

StepTimes optimizer_step_times(const Trace& plain, const CostModel& cost,
                               bool in_pieces) {
  const std::map<Bytes, std::int64_t> widths = widths_of_states(plain);
  std::vector<bool> is_traced(plain.storages.size());
  for (const Value& value : plain.values) {
    if (value.storage.valid()) is_traced[value.storage.index()] = true;
  }
  // Of both moments.
  std::int64_t elements = 0;
  std::int64_t pieces = 0;
  std::int64_t traced = 0;
  for (std::size_t i = 0; i < plain.storages.size(); ++i) {
    const Storage& storage = plain.storages[i];
    if (storage.category != Category::OptimizerState) continue;
    const auto known = widths.find(storage.bytes);
    const std::int64_t width = known == widths.end() ? kFloat : known->second;
    if (width == 0) continue;
    const std::int64_t each = storage.bytes.count() / width;
    if (each <= 1) continue;  // counters of steps
    elements += each * storage.count;
    pieces += (each + kStatePiece - 1) / kStatePiece * storage.count;
    if (is_traced[i]) traced += each;
  }
  StepTimes times;
  for (const Op& op : plain.ops) {
    if (op.phase == Phase::Optimizer)
      times.plain += cost.nanoseconds(plain, op);
  }
  // One parameter of each kind was traced, for all of its kind.
  if (traced > 0) {
    times.plain = static_cast<std::int64_t>(static_cast<double>(times.plain) *
                                            static_cast<double>(elements) /
                                            static_cast<double>(traced));
  }
  times.with_8bit =
      cost.nanoseconds(in_pieces ? step_in_pieces(elements / 2, pieces / 2)
                                 : kernel_step(elements / 2));
  return times;
}

Bytes optimizer_state_bytes(const Trace& trace) {
  Bytes sum;
  for (const Storage& storage : trace.storages) {
    if (storage.category == Category::OptimizerState &&
        storage.place == Place::Device) {
      sum += storage.bytes * storage.count;
    }
  }
  return sum;
}

std::int64_t state_bits(std::span<const Choice> choices) {
  return find_choice(choices, kName) != nullptr ? 8 : 32;
}

namespace {

Choice eight_bit_choice(std::int64_t nanoseconds) {
  Choice choice;
  choice.technique = kName;
  choice.choice = kChoices[0];
  choice.nanoseconds = nanoseconds;
  return choice;
}

std::optional<std::string> why_not(const Question& question) {
  if (question.step.optimizer_is_adam) return std::nullopt;
  return str("the state of ", question.step.optimizer, " stays as it is");
}

// "about 60 times as long as ..."; empty if a kernel steps, which takes no
// longer than torch's own step, as it moves fewer bytes.
std::string price_of(const StepTimes& times, const Question& question) {
  if (question.has_state_kernel || times.extra() == 0) return "";
  return str("about ", times.times(),
             " times as long as the optimizer's own step, as this device "
             "has no kernel for it here; on CUDA, install bitsandbytes or "
             "build with CUDA kernels");
}

// Why the state stays as it is although the mode allows to change it; empty:
// it does not stay.
std::string reason_to_stay(const Question& question, const std::string& price) {
  if (question.config.budget &&
      fits_budget(question, *question.config.budget - question.margin)) {
    return "the budget can be met with the optimizer's state as it is";
  }
  if (price.empty()) return "";
  const auto limit = question.limit();
  if (limit && !fits_budget(question, *limit - question.margin)) return "";
  return str(
      "the optimizer's state stays in 32 bits: a step with 8 would take ",
      price, "; use_8bit_optimizer=True asks for it");
}

// Holds Adam's moments in 8 bits: always if that was asked for; if the mode
// allows it, for the smallest peak, or under a budget that no exact plan meets.
// It is lossy. Where it takes long, no mode alone chooses it, only a budget, or
// a device, that is too small for every exact plan.
bool quantise_optimizer(RuleContext& context) {
  const Question& question = context.question;
  const bool is_asked_for =
      question.wish(*find_technique(kName)) == Wish::Asked;
  if (!is_asked_for && is_tiny(context)) return true;
  const StepTimes times = optimizer_step_times(*question.trace, question.cost,
                                               !question.has_state_kernel);
  const std::string price = price_of(times, question);
  if (!is_asked_for) {
    std::string reason = reason_to_stay(question, price);
    if (!reason.empty()) {
      context.say(std::move(reason));
      return true;
    }
  }
  auto made = std::make_shared<const Trace>(
      with_8bit_state(*question.trace, question.on_cpu));
  const Bytes before = optimizer_state_bytes(*question.trace);
  const Bytes after = optimizer_state_bytes(*made);
  if (!is_asked_for && after >= before) {
    context.say(
        "optimizer state in 8 bits would gain nothing: all of it is small");
    return true;
  }
  Choice choice = eight_bit_choice(times.extra());
  choice.bytes = std::max(before - after, Bytes());
  choice.reason = str("optimizer state in 8 bits: ", before, " -> ", after,
                      price.empty() ? "" : "; a step takes ", price);
  context.say(choice.reason);
  context.plan().choices.push_back(std::move(choice));
  context.set_step(std::move(made));
  return true;
}

Trace predict(const Trace& step, const Plan& plan, const Question& question) {
  if (state_bits(plan.choices) != 8) return step;
  return with_8bit_state(step, question.on_cpu);
}

// Where it takes long, it has to be asked for.
std::optional<Choice> fallback(const Question& question) {
  const bool is_asked_for =
      question.wish(*find_technique(kName)) == Wish::Asked;
  if (!is_asked_for && !question.has_state_kernel) return std::nullopt;
  return eight_bit_choice(0);
}

std::string describe(const Choice&) { return "8 bits"; }

}  // namespace

Technique optimizer_state_technique() {
  return {.name = kName,
          .rule = "quantise_optimizer",
          .stage = Stage::Step,
          .field = "use_8bit_optimizer",
          .is_on = &EffectiveConfig::use_8bit_optimizer,
          .off = {},
          .choices = kChoices,
          .with_keep_set = {},
          .why_not = &why_not,
          .decide = &quantise_optimizer,
          .predict = &predict,
          .fallback = &fallback,
          .describe = &describe};
}

}  // namespace memscale
