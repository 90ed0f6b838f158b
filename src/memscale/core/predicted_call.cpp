#include "memscale/core/predicted_call.h"

#include <algorithm>
#include <utility>

namespace memscale {

PredictedCall::PredictedCall(std::span<const TapeRules> layers,
                             const StepSchedule& schedule, PredictedStep& step)
    : layers_(layers), schedule_(schedule), step_(step), tree_(step.plain) {}

void PredictedCall::enter(LayerId layer) {
  if (layer == layer_) return;
  const LayerId before = std::exchange(layer_, layer);
  if (tape_ == nullptr) return;
  const auto spans = [&](const TapeRules& rules) {
    return rules.policy == tape_->policy() && tape_->spans_layers();
  };
  const LayerId between = tree_.between(before, layer);
  if (spans(layers_[layer.index()]) &&
      (!between.valid() || spans(layers_[between.index()]))) {
    tape_->cross_border();
  } else {
    close_tape();
  }
}

PredictedTape* PredictedCall::open_tape() {
  if (!layer_.valid()) return nullptr;
  const TapeRules& rules = layers_[layer_.index()];
  if (rules.keeps_all()) return nullptr;
  if (tape_ == nullptr) {
    tapes_.push_back(std::make_unique<PredictedTape>(rules, step_));
    tape_ = tapes_.back().get();
  }
  return tape_;
}

void PredictedCall::close_tape() {
  PredictedTape* const tape = std::exchange(tape_, nullptr);
  if (tape == nullptr) return;
  for (const auto& [storage, state] : tape->close()) {
    claims_[storage].push_back({tape, state});
  }
}

void PredictedCall::leave(std::span<const StorageId> outputs) {
  if (tape_ != nullptr) {
    for (const StorageId storage : outputs) tape_->add_output(storage);
    tape_->decide_again();
  }
  close_tape();
  layer_ = LayerId();
}

void PredictedCall::run(OpId id) {
  const Op& op = step_.plain.at(id);
  for (const ValueId input : op.inputs) {
    const Value& value = step_.plain.at(input);
    if (!value.storage.valid()) continue;
    std::uint32_t& version = step_.versions[value.storage.index()];
    version = std::max(version, value.version);
  }
  before_writes(op);
  PredictedTape* const tape = open_tape();
  if (tape != nullptr) tape->begin_op(id);
  // A custom Function's saves come when it is through.
  if (!op.in_function) {
    for (const std::size_t saved : schedule_.saves[id.index()]) save(saved);
  }
  for (const ValueId output : op.outputs) {
    const Value& value = step_.plain.at(output);
    if (value.storage.valid()) {
      step_.versions[value.storage.index()] = value.version;
    }
  }
  add_history(id);
  if (tape != nullptr) tape->end_op();
  if (op.in_function) {
    for (const std::size_t saved : schedule_.saves[id.index()]) save(saved);
  }
}

void PredictedCall::before_writes(const Op& op) {
  if (claims_.empty()) return;
  const auto before_write = [&](StorageId storage) {
    const auto found = claims_.find(storage);
    if (found == claims_.end()) return;
    for (const Claim& claim : found->second) {
      claim.tape->before_write(claim.state);
    }
    claims_.erase(found);
  };
  for (const ValueId input : op.inputs) {
    if (op.may_write) before_write(step_.plain.at(input).storage);
  }
  for (const ValueId output : op.outputs) {
    const Value& value = step_.plain.at(output);
    if (op.mutates && value.storage.valid() &&
        value.version > step_.versions[value.storage.index()]) {
      before_write(value.storage);
    }
  }
}

// Whether autograd differentiates what the op made: backward computes something
// for the op itself, or for what it read. (Not of each parameter: some are
// frozen.)
void PredictedCall::add_history(OpId id) {
  const Op& op = step_.plain.at(id);
  const bool differentiates =
      schedule_.has_gradient[id.index()] ||
      std::ranges::any_of(op.inputs, [&](ValueId input) {
        const StorageId storage = step_.plain.at(input).storage;
        return storage.valid() && step_.has_history[storage.index()];
      });
  if (!differentiates) return;
  for (const ValueId output : op.outputs) {
    const Value& value = step_.plain.at(output);
    if (value.storage.valid() && step_.plain.at(value.storage).born.valid() &&
        is_differentiable(value.dtype)) {
      step_.has_history[value.storage.index()] = true;
    }
  }
}

void PredictedCall::save(std::size_t index) {
  const StorageId storage =
      step_.plain.at(step_.plain.saves[index].value).storage;
  if (!storage.valid()) return;
  step_.holders.hold(storage);
  if (step_.plain.saves[index].by_function) return;
  if (tape_ != nullptr && !tape_->decide(index)) return;
  const auto found = claims_.find(storage);
  if (found == claims_.end()) return;
  for (const Claim& claim : found->second) claim.tape->offer(claim.state);
}

}  // namespace memscale
