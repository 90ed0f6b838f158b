#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <typeinfo>

#include "memscale/core/tape/tape_bytes.h"
#include "memscale/runtime/observe/geometry.h"
#include "memscale/runtime/record/recorder.h"

namespace memscale {

class TensorTape;

// One tensor that autograd saved: held, or known to a tape that can make it
// again. Lives as long as autograd's node; its end releases what it needs.
// Not thread-safe but for what TensorTape does: autograd unpacks a node in one
// thread.
class SavedTensor final {
 public:
  explicit SavedTensor(const at::Tensor& tensor);
  ~SavedTensor();
  SavedTensor(const SavedTensor&) = delete;
  SavedTensor& operator=(const SavedTensor&) = delete;

  // From now on the tape's; called once, by the tape.
  void drop(std::shared_ptr<TensorTape> tape, StateId state);

  // A recorder is told of this save: Note [A replayed step, recorded].
  void record(const std::shared_ptr<Recorder>& recorder);

  const at::Tensor& kept() const { return kept_; }        // undefined: dropped
  const TensorTape* tape() const { return tape_.get(); }  // null: kept

  // The tensor. Throws torch's own error if it was changed since.
  at::Tensor unpack() const;

 private:
  at::Tensor kept_;
  std::shared_ptr<TensorTape> tape_;
  StateId state_ = 0;
  std::optional<Geometry> geometry_;
  std::unique_ptr<const RecordedSave> recorded_;  // null: nobody records
  // Torch does not check versions of tensors that hooks have packed.
  c10::VariableVersion counter_;
  std::uint32_t version_ = 0;
  const std::type_info* maker_ = nullptr;  // class of the node that made it
  std::uint32_t output_nr_ = 0;
};

// The tensor, to be held by a save. A result that its own node saves would hold
// that node, and so itself, until backward; if there is none (an exception),
// for ever: then it is an alias.
at::Tensor without_cycle(const at::Tensor& tensor);

// Torch's words for a tensor that was changed after it was saved.
[[noreturn]] void throw_modified(const std::string& what,
                                 const std::string& maker, std::uint32_t found,
                                 std::uint32_t expected);

}  // namespace memscale
