#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace memscale {

// For random ops without a generator argument: the default generator of their
// device has the recorded state while one lives.
//
// Note [Generators are not seeded]
// set_state() on a CUDA generator is a new seed: cuDNN then makes its dropout
// state anew, and the user's next LSTM draws other numbers than without us.
// Graph-safe calls exchange the state itself, and what the generator has beside
// it stays; so the user's ends as it was. Not all devices have them.
class RecordedState final {
 public:
  explicit RecordedState(const at::Generator& recorded);
  ~RecordedState();
  RecordedState(const RecordedState&) = delete;
  RecordedState& operator=(const RecordedState&) = delete;

 private:
  at::Generator generator_;
  at::Generator shared_before_;  // undefined: not graph-safe
  at::Tensor before_;
};

}  // namespace memscale
