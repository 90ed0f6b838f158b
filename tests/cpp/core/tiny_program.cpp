#include "tiny_program.h"

#include <numeric>
#include <utility>

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
  for (const Value& input : inputs) {
    op.inputs.push_back(builder_.add_value(input));
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

Trace TinyProgram::finish() {
  builder_.set_phase(Phase::Backward);
  begin("aten::ones_like", {}, false);
  Value gradient = make({1});
  end(gradient);
  for (std::size_t last = saves_.size(); last > 0;) {
    std::size_t first = last;
    const OpId op = saves_[last - 1].op;
    std::vector<Value> inputs = {gradient};
    while (first > 0 && saves_[first - 1].op == op) {
      inputs.push_back(saves_[--first].value);
    }
    builder_.set_layer(builder_.trace().at(op).layer);
    begin(builder_.trace().at(op).name + "_backward", inputs, false, op);
    Value next = make({1});
    end(next);
    for (std::size_t i = first; i < last; ++i) {
      builder_.release_save(saves_[i].save);
      --holders_[saves_[i].value.storage].saves;
      maybe_free(saves_[i].value.storage);
    }
    let_go(gradient);
    gradient = std::move(next);
    last = first;
  }
  return builder_.finish();
}

}  // namespace memscale
