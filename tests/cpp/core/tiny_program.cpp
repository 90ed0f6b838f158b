#include "tiny_program.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "memscale/core/tape/op_use.h"

namespace memscale {
namespace {

Value dense(StorageId storage, std::vector<std::int64_t> sizes) {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    strides[i] = std::exchange(stride, stride * sizes[i]);
  }
  return {.storage = storage,
          .dtype = Dtype::Float32,
          .sizes = std::move(sizes),
          .strides = std::move(strides)};
}

Bytes bytes_of(const std::vector<std::int64_t>& sizes) {
  return Bytes(4 * std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1},
                                   std::multiplies<>()));
}

}  // namespace

LayerId TinyProgram::layer(std::string name) {
  return builder_.add_layer(std::move(name));
}

void TinyProgram::enter(LayerId layer) {
  if (num_entered_ == 2) {
    builder_.leave_layer();
    --num_entered_;
  }
  if (num_entered_ == 0) {
    builder_.enter_layer(LayerId(0));
    ++num_entered_;
  }
  if (layer == LayerId(0)) return;
  builder_.enter_layer(layer);
  ++num_entered_;
}

Value TinyProgram::resident(std::vector<std::int64_t> sizes,
                            Category category) {
  const StorageId id = builder_.add_resident(bytes_of(sizes), Place::Device,
                                             category, builder_.layer());
  holders_[id].program = true;
  return dense(id, std::move(sizes));
}

Value TinyProgram::parameter(std::vector<std::int64_t> sizes) {
  return resident(std::move(sizes), Category::Parameter);
}

Value TinyProgram::batch(std::vector<std::int64_t> sizes) {
  return resident(std::move(sizes), Category::Input);
}

Value TinyProgram::make(std::vector<std::int64_t> sizes) {
  const StorageId id = builder_.add_storage(bytes_of(sizes), Place::Device);
  holders_[id].program = true;
  return dense(id, std::move(sizes));
}

void TinyProgram::begin(std::string name, const std::vector<Value>& inputs,
                        bool mutates, OpId forward) {
  Op op;
  op.name = std::move(name);
  op.mutates = mutates;
  op.forward = forward;
  op.flops = 1;
  op.in_function = in_function_;
  const ReplayRules rules = find_replay_rules(op.name);
  const Trace& trace = builder_.trace();
  for (const Value& input : inputs) {
    op.inputs.push_back(builder_.add_value(input));
    const Storage& storage = trace.at(input.storage);
    Use use{.is_leaf = !storage.born.valid()};
    if (mutates && op.inputs.size() == 1) {
      const bool overwrites =
          rules.overwrites &&
          covers(input.sizes, input.strides, input.offset,
                 itemsize_of(input.dtype), storage.bytes.count());
      use.access = overwrites ? Access::Overwrite : Access::Update;
    } else if (rules.updates_statistics &&
               storage.category == Category::Buffer) {
      use.access = Access::Scratch;
    }
    op.uses.push_back(use);
  }
  builder_.begin_op(std::move(op));
}

void TinyProgram::end(const Value& result) {
  builder_.end_op({builder_.add_value(result)});
}

Value TinyProgram::call(std::string name, const std::vector<Value>& inputs,
                        std::vector<std::int64_t> sizes) {
  begin(std::move(name), inputs, false);
  Value result = make(std::move(sizes));
  end(result);
  return result;
}

Value TinyProgram::write(std::string name, const std::vector<Value>& inputs) {
  begin(std::move(name), inputs, true);
  Value result = inputs.front();
  builder_.bump_version(result.storage);
  end(result);
  return result;
}

Value TinyProgram::view(std::string name, const Value& input,
                        std::vector<std::int64_t> sizes) {
  begin(std::move(name), {input}, false);
  builder_.mutable_trace().ops.back().view = true;
  builder_.mutable_trace().ops.back().aliases = true;
  Value result = dense(input.storage, std::move(sizes));
  end(result);
  return result;
}

void TinyProgram::save(const Value& value) {
  ++holders_[value.storage].saves;
  const std::size_t index = builder_.add_save(builder_.add_value(value));
  saves_.push_back({builder_.last_op(), index, value});
}

void TinyProgram::let_go(const Value& value) {
  holders_[value.storage].program = false;
  if (holders_[value.storage].saves > 0) builder_.let_go(value.storage);
  maybe_free(value.storage);
}

void TinyProgram::maybe_free(StorageId storage) {
  const Holders& held = holders_[storage];
  if (!held.program && held.saves == 0) builder_.free(storage);
}

std::vector<ValueId> TinyProgram::ids_of(const std::vector<Value>& values) {
  std::vector<ValueId> ids;
  for (const Value& value : values) ids.push_back(builder_.add_value(value));
  return ids;
}

void TinyProgram::begin_function(const std::vector<Value>& values) {
  builder_.add_function(Event::Kind::EnterFunction, ids_of(values));
  in_function_ = true;
}

void TinyProgram::end_function(const std::vector<Value>& values) {
  builder_.add_function(Event::Kind::LeaveFunction, ids_of(values));
  for (const Value& value : values) builder_.bump_version(value.storage);
  in_function_ = false;
}

Trace TinyProgram::finish(const std::vector<std::size_t>& swaps) {
  while (num_entered_ > 0) {
    builder_.leave_layer();
    --num_entered_;
  }
  builder_.set_phase(Phase::Backward);
  begin("aten::ones_like", {}, false);
  Value gradient = make({1});
  end(gradient);
  std::vector<std::vector<Saved>> nodes;  // saves by op
  for (std::size_t i = saves_.size(); i-- > 0;) {
    if (nodes.empty() || nodes.back().front().op != saves_[i].op) {
      nodes.emplace_back();
    }
    nodes.back().push_back(saves_[i]);
  }
  for (std::size_t i = 0; i < std::min(swaps.size(), nodes.size()); ++i) {
    std::swap(nodes[i], nodes[swaps[i] % nodes.size()]);
  }
  for (const std::vector<Saved>& node : nodes) {
    const OpId op = node.front().op;
    std::vector<Value> inputs = {gradient};
    for (const Saved& saved : node) inputs.push_back(saved.value);
    builder_.set_layer(builder_.trace().at(op).layer);
    begin(builder_.trace().at(op).name + "_backward", inputs, false, op);
    Value next = make({1});
    end(next);
    for (const Saved& saved : node) {
      builder_.release_save(saved.save);
      --holders_[saved.value.storage].saves;
      maybe_free(saved.value.storage);
    }
    let_go(gradient);
    gradient = std::move(next);
  }
  return builder_.finish();
}

}  // namespace memscale
