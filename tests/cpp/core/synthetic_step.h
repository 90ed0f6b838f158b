#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "memscale/core/trace/repeat.h"
#include "memscale/core/trace/trace_builder.h"

namespace memscale {

// What an op of a synthetic layer returns: a new storage, a view of its first
// input, that input itself, written to, or a tensor of unknown storage.
enum class Returns { New, View, Written, Unknown };

// Who holds a new result beside the ops that read it: nobody, something that is
// let go at the end of forward (autocast's weights), or after the step.
enum class Kept { No, ForForward, ForStep };

// It reads the result of the op before, or the layer's input.
struct LayerOp {
  Returns returns = Returns::New;
  std::int64_t numel = 1;
  std::size_t reads = 0;  // and this: 0 is the layer's input, i the i-th result
  bool parameter = false;  // and its own parameter; saves it; has its gradient
  bool buffer = false;     // and writes into its own buffer
  bool mask = false;       // and what all layers share; saves it
  bool saves_input = false;
  bool saves_output = false;
  bool scratch = false;            // a second result that dies at once
  bool gradient_in_place = false;  // backward writes into the gradient
  Kept kept = Kept::No;
  Bytes workspace{};
};

// The last op's result is the layer's, and must be new.
struct LayerSpec {
  std::vector<LayerOp> ops;
  bool residual = false;  // backward adds the gradient that came in
};

// A training step through equal layers, told to a TraceBuilder as the recorder
// tells it: storages die with the last tensor or save that holds them. With
// `copies`, all layers but two at each end are copied, in the order of calls
// that python/memscale/trace/repeated_layers.py makes.
class SyntheticStep final {
 public:
  SyntheticStep(LayerSpec spec, std::size_t num_layers, bool copies);

  // Once. Without copies, all layers' backward is found.
  Trace run();
  const std::vector<LayerCall>& calls() const { return calls_; }
  // Between the second layer and the last but one, as seen at the end of run.
  const std::optional<std::string>& difference() const { return difference_; }

 private:
  struct Holders {
    int tensors = 0;
    int saves = 0;
    OpId last_needed;
  };

  void add_residents(std::size_t layer);
  Value trace_forward(std::size_t layer, const Value& input);
  Value copy_forward(std::size_t layer);
  Value trace_backward(std::size_t layer, const Value& gradient);
  Value copy_backward(std::size_t layer, const Value& gradient);
  void close();

  std::int64_t gradient_numel() const;
  bool is_copied(std::size_t layer) const;
  Value resident(std::int64_t numel, Category category, LayerId layer);
  Value make(std::int64_t numel);
  void begin(std::string name, const std::vector<Value>& inputs,
             OpId forward = {});
  void set_uses(const LayerOp& spec, const Value& before, const Value& buffer);
  void end(const std::vector<Value>& outputs);
  void hold(StorageId storage);
  void drop(StorageId storage);
  void maybe_free(StorageId storage);
  std::size_t save(const Value& value);
  void release(std::size_t save);
  void unpin(const LayerCall& call);

  const LayerSpec spec_;
  const bool copies_;
  TraceBuilder builder_;
  std::unordered_map<StorageId, Holders> holders_;
  std::vector<LayerCall> calls_;
  std::optional<std::string> difference_;
  Value mask_;
  std::vector<std::vector<std::vector<std::size_t>>> saves_;  // by layer and op
  std::vector<StorageId> held_for_forward_;
  // Of the second layer.
  Value result_;
  std::vector<std::size_t> kept_places_;
  // Of the last layer but one.
  Value gradient_;
};

}  // namespace memscale
