#include "synthetic_step.h"

#include <algorithm>
#include <utility>

#include "memscale/base/error.h"

namespace memscale {
namespace {

Value flat(StorageId storage, std::int64_t numel) {
  return {.storage = storage,
          .dtype = Dtype::Float32,
          .sizes = {numel},
          .strides = {1}};
}

}  // namespace

SyntheticStep::SyntheticStep(LayerSpec spec, std::size_t num_layers,
                             bool copies)
    : spec_(std::move(spec)), copies_(copies), calls_(num_layers) {
  saves_.assign(num_layers,
                std::vector<std::vector<std::size_t>>(spec_.ops.size()));
}

Trace SyntheticStep::run() {
  for (std::size_t i = 0; i < calls_.size(); ++i) add_residents(i);
  const Value input = resident(16, Category::Input, {});
  begin("embedding", {input});
  Value hidden = make(spec_.ops.back().numel);  // as from a layer
  end({hidden});
  begin("mask", {});
  mask_ = make(5);
  end({mask_});

  for (std::size_t i = 0; i < calls_.size(); ++i) {
    calls_[i].inputs = {hidden.storage, mask_.storage};
    Value next = is_copied(i) ? copy_forward(i) : trace_forward(i, hidden);
    drop(hidden.storage);
    hidden = std::move(next);
  }
  builder_.set_layer({});
  for (const StorageId storage : held_for_forward_) drop(storage);
  drop(mask_.storage);
  begin("loss", {hidden});
  const Value loss = make(1);
  end({loss});
  const std::size_t saved = save(hidden);
  drop(hidden.storage);

  builder_.set_phase(Phase::Backward);
  begin("loss_backward", {hidden});
  Value gradient = make(gradient_numel());
  end({gradient});
  release(saved);
  drop(loss.storage);
  for (std::size_t i = calls_.size(); i-- > 0;) {
    gradient =
        is_copied(i) ? copy_backward(i, gradient) : trace_backward(i, gradient);
    if (i + 2 == calls_.size()) gradient_ = gradient;
  }
  builder_.set_layer({});
  begin("embedding_backward", {gradient, input});
  end({});
  drop(gradient.storage);
  close();
  return builder_.finish();
}

void SyntheticStep::add_residents(std::size_t layer) {
  LayerCall& call = calls_[layer];
  call.layer = builder_.add_layer(str("layers.", layer));
  // Two for each op, so that they are easily found.
  for (const LayerOp& op : spec_.ops) {
    for (const Category category : {Category::Parameter, Category::Buffer}) {
      call.parameters.push_back(
          resident(op.numel, category, call.layer).storage);
    }
  }
  call.parameter_gradients.resize(call.parameters.size());
}

Value SyntheticStep::trace_forward(std::size_t layer, const Value& input) {
  LayerCall& call = calls_[layer];
  const Trace& trace = builder_.trace();
  builder_.set_layer(call.layer);
  call.forward = {{trace.ops.size(), 0},
                  {trace.storages.size(), 0},
                  {trace.saves.size(), 0}};
  if (layer == 1) kept_places_.clear();
  hold(input.storage);
  std::vector<Value> results = {input};
  std::vector<std::size_t> last_read = {0};
  for (std::size_t i = 0; i < spec_.ops.size(); ++i) {
    last_read.push_back(i + 1);
    last_read[spec_.ops[i].reads] = i;
  }
  for (std::size_t i = 0; i < spec_.ops.size(); ++i) {
    const LayerOp& op = spec_.ops[i];
    const Value before = results.back();
    std::vector<Value> inputs = {before, results[op.reads]};
    if (op.parameter) {
      inputs.push_back(flat(call.parameters[2 * i], op.numel));
    }
    const Value buffer = flat(call.parameters[2 * i + 1], op.numel);
    if (op.buffer) inputs.push_back(buffer);
    if (op.mask) inputs.push_back(mask_);
    begin(str("op", i), inputs);
    if (op.workspace > 0_B) builder_.set_workspace(op.workspace);
    if (op.buffer) builder_.bump_version(buffer.storage);

    Value result = before;
    if (op.returns == Returns::New) {
      result = make(op.numel);
    } else if (op.returns == Returns::Unknown) {
      result = flat({}, op.numel);
    } else {
      hold(result.storage);
      if (op.returns == Returns::View) ++result.offset;
      if (op.returns == Returns::Written && result.storage.valid()) {
        builder_.bump_version(result.storage);
      }
    }
    std::vector<Value> outputs = {result};
    if (op.scratch) outputs.push_back(make(3 * op.numel));
    end(outputs);
    if (op.scratch) drop(outputs.back().storage);

    auto& saves = saves_[layer][i];
    if (op.saves_input) saves.push_back(save(before));
    if (op.saves_output) saves.push_back(save(result));
    if (op.parameter) saves.push_back(save(inputs[2]));
    if (op.mask) saves.push_back(save(mask_));
    if (op.kept != Kept::No && op.returns == Returns::New) {
      hold(result.storage);
      if (op.kept == Kept::ForForward) {
        held_for_forward_.push_back(result.storage);
      } else if (layer == 1) {
        kept_places_.push_back(result.storage.index() -
                               call.forward.storages.begin);
      }
    }
    results.push_back(std::move(result));
    for (std::size_t k = 0; k <= i; ++k) {
      if (last_read[k] == i) drop(results[k].storage);
    }
  }
  call.forward.ops.end = trace.ops.size();
  call.forward.storages.end = trace.storages.size();
  call.forward.saves.end = trace.saves.size();
  if (layer == 1) result_ = results.back();
  return results.back();
}

Value SyntheticStep::copy_forward(std::size_t layer) {
  LayerCall& call = calls_[layer];
  repeat_forward(builder_, calls_[1], call);
  for (std::size_t i = call.forward.saves.begin; i < call.forward.saves.end;
       ++i) {
    const Trace& trace = builder_.trace();
    const StorageId storage = trace.at(trace.saves[i].value).storage;
    if (storage.valid()) ++holders_[storage].saves;
  }
  const std::size_t first = call.forward.storages.begin;
  for (const std::size_t place : kept_places_) hold(StorageId(first + place));
  Value result = result_;
  result.storage = StorageId(result_.storage.index() -
                             calls_[1].forward.storages.begin + first);
  hold(result.storage);
  // A result is the caller's, who keeps it of any layer; what the layer itself
  // keeps until the end of forward is close_repeat()'s.
  if (spec_.ops.back().kept == Kept::ForForward) {
    hold(result.storage);
    held_for_forward_.push_back(result.storage);
  }
  return result;
}

Value SyntheticStep::trace_backward(std::size_t layer, const Value& gradient) {
  LayerCall& call = calls_[layer];
  builder_.set_layer(call.layer);
  if (spec_.residual) hold(gradient.storage);
  Value current = gradient;
  for (std::size_t i = spec_.ops.size(); i-- > 0;) {
    const LayerOp& op = spec_.ops[i];
    std::vector<Value> inputs = {current};
    for (const std::size_t saved : saves_[layer][i]) {
      const Trace& trace = builder_.trace();
      inputs.push_back(trace.at(trace.saves[saved].value));
    }
    begin(str("op", i, "_backward"), inputs, OpId(call.forward.ops.begin + i));
    Value next = current;
    if (op.gradient_in_place) {
      hold(next.storage);
      builder_.bump_version(next.storage);
    } else {
      next = make(op.numel);
    }
    std::vector<Value> outputs = {next};
    if (op.parameter) {
      outputs.push_back(make(op.numel));
      call.parameter_gradients[2 * i] = outputs.back().storage;
      builder_.set_category(outputs.back().storage, Category::Gradient);
    }
    if (op.scratch) outputs.push_back(make(2 * op.numel));
    end(outputs);
    if (op.scratch) drop(outputs.back().storage);
    for (const std::size_t saved : saves_[layer][i]) release(saved);
    drop(current.storage);
    current = std::move(next);
  }
  if (spec_.residual) {
    begin("add", {current, gradient});
    Value sum = make(gradient_numel());
    end({sum});
    drop(current.storage);
    drop(gradient.storage);
    current = std::move(sum);
  }
  return current;
}

Value SyntheticStep::copy_backward(std::size_t layer, const Value& gradient) {
  LayerCall& model = calls_[calls_.size() - 2];
  LayerCall& call = calls_[layer];
  if (!model.backward) find_backward(builder_.trace(), model);
  const std::vector<LastNeed> needs =
      repeat_backward(builder_, model, call, gradient.storage);
  for (const LastNeed& need : needs) {
    holders_[need.storage].last_needed = need.op;
  }
  unpin(call);
  hold(call.gradient_out);
  Value onwards = gradient_;
  onwards.storage = call.gradient_out;
  drop(gradient.storage);
  for (const LastNeed& need : needs) holders_[need.storage].last_needed = {};
  return onwards;
}

void SyntheticStep::close() {
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    if (!calls_[i].backward) find_backward(builder_.trace(), calls_[i]);
  }
  difference_ = memscale::difference(builder_.trace(), calls_[1],
                                     calls_[calls_.size() - 2]);
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    if (is_copied(i)) close_repeat(builder_, calls_[1], calls_[i]);
  }
}

// What a layer's backward gives, and so takes.
std::int64_t SyntheticStep::gradient_numel() const {
  for (const LayerOp& op : spec_.ops) {
    if (!op.gradient_in_place) return op.numel;
  }
  return 7;
}

bool SyntheticStep::is_copied(std::size_t layer) const {
  return copies_ && 1 < layer && layer + 2 < calls_.size();
}

Value SyntheticStep::resident(std::int64_t numel, Category category,
                              LayerId layer) {
  const StorageId id =
      builder_.add_resident(Bytes(4 * numel), Place::Device, category, layer);
  hold(id);
  return flat(id, numel);
}

Value SyntheticStep::make(std::int64_t numel) {
  const StorageId id = builder_.add_storage(Bytes(4 * numel), Place::Device);
  hold(id);
  return flat(id, numel);
}

void SyntheticStep::begin(std::string name, const std::vector<Value>& inputs,
                          OpId forward) {
  Op op;
  op.name = std::move(name);
  op.forward = forward;
  for (const Value& input : inputs) {
    op.inputs.push_back(builder_.add_value(input));
  }
  builder_.begin_op(std::move(op));
}

void SyntheticStep::end(const std::vector<Value>& outputs) {
  std::vector<ValueId> ids;
  for (const Value& output : outputs) {
    ids.push_back(builder_.add_value(output));
  }
  builder_.end_op(std::move(ids));
}

void SyntheticStep::hold(StorageId storage) {
  if (storage.valid()) ++holders_[storage].tensors;
}

void SyntheticStep::drop(StorageId storage) {
  if (!storage.valid()) return;
  --holders_[storage].tensors;
  if (holders_[storage].tensors == 0 && holders_[storage].saves > 0) {
    builder_.let_go(storage);
  }
  maybe_free(storage);
}

void SyntheticStep::maybe_free(StorageId storage) {
  const Holders& held = holders_[storage];
  if (held.tensors == 0 && held.saves == 0) {
    builder_.free(storage, held.last_needed);
  }
}

std::size_t SyntheticStep::save(const Value& value) {
  if (value.storage.valid()) ++holders_[value.storage].saves;
  return builder_.add_save(builder_.add_value(value));
}

void SyntheticStep::release(std::size_t save) {
  const Trace& trace = builder_.trace();
  const StorageId storage = trace.at(trace.saves[save].value).storage;
  builder_.release_save(save);
  if (!storage.valid()) return;
  --holders_[storage].saves;
  maybe_free(storage);
}

void SyntheticStep::unpin(const LayerCall& call) {
  for (std::size_t i = call.forward.saves.begin; i < call.forward.saves.end;
       ++i) {
    const Trace& trace = builder_.trace();
    const StorageId storage = trace.at(trace.saves[i].value).storage;
    if (!storage.valid()) continue;
    --holders_[storage].saves;
    maybe_free(storage);
  }
}

}  // namespace memscale
