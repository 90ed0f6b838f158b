#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "memscale/core/trace/trace_builder.h"

namespace memscale {

// A training step written by hand, op by op, as the recorder would have told
// it: storages of float32 die with the program's last hold and the last save.
class TinyProgram final {
 public:
  LayerId layer(std::string name);
  // The layer of the ops that follow. The first layer of all is the model, in
  // whose call the others are entered and left.
  void enter(LayerId layer);
  // Two calls of a layer, one after the other.
  void enter_again() { enter(builder_.layer()); }

  Value parameter(std::vector<std::int64_t> sizes);
  Value batch(std::vector<std::int64_t> sizes);
  // An op with one new result, one written input, or a view of its first.
  Value call(std::string name, const std::vector<Value>& inputs,
             std::vector<std::int64_t> sizes);
  Value write(std::string name, const std::vector<Value>& inputs);
  Value view(std::string name, const Value& input,
             std::vector<std::int64_t> sizes);
  // For the gradient of the last op.
  void save(const Value& value);
  // The program's variables of it are gone.
  void let_go(const Value& value);

  // Around a custom Function, which may write these.
  void begin_function(const std::vector<Value>& values);
  void end_function(const std::vector<Value>& values);

  // Backward of all ops that saved something, last first: each reads its saves.
  // `swaps`: before, the i-th of them changes places with the swaps[i]-th.
  Trace finish(const std::vector<std::size_t>& swaps = {});

 private:
  struct Holders {
    bool program = false;
    int saves = 0;
  };
  struct Saved {
    OpId op;
    std::size_t save;
    Value value;
  };

  Value resident(std::vector<std::int64_t> sizes, Category category);
  Value make(std::vector<std::int64_t> sizes);
  void begin(std::string name, const std::vector<Value>& inputs, bool mutates,
             OpId forward = {});
  void end(const Value& result);
  void maybe_free(StorageId storage);
  std::vector<ValueId> ids_of(const std::vector<Value>& values);

  TraceBuilder builder_;
  bool in_function_ = false;
  std::size_t num_entered_ = 0;  // the model, and a layer inside of it
  std::vector<Saved> saves_;
  std::unordered_map<StorageId, Holders> holders_;
};

}  // namespace memscale
