#include "memscale/runtime/replay/saved_tensor.h"

#include <ATen/SequenceNumber.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "memscale/base/error.h"
#include "memscale/runtime/replay/tensor_tape.h"

namespace memscale {

at::Tensor without_cycle(const at::Tensor& tensor) {
  // Its own node is the newest.
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  const bool is_newest =
      meta != nullptr && meta->grad_fn_ &&
      meta->grad_fn_->sequence_nr() + 1 >= at::sequence_number::peek();
  return is_newest ? alias_of(tensor) : tensor;
}

SavedTensor::SavedTensor(const at::Tensor& tensor)
    : counter_(tensor.unsafeGetTensorImpl()->version_counter()) {
  if (counter_.enabled()) version_ = counter_.current_version();
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  kept_ = without_cycle(tensor);
  if (meta != nullptr && meta->grad_fn_) {
    const torch::autograd::Node& maker = *meta->grad_fn_;
    maker_ = &typeid(maker);
    output_nr_ = meta->output_nr_;
  }
}

SavedTensor::~SavedTensor() {
  if (tape_ != nullptr) tape_->release(state_);
}

void SavedTensor::record(const std::shared_ptr<Recorder>& recorder) {
  recorded_ = std::make_unique<RecordedSave>(recorder, kept_, /*hold=*/false);
}

void SavedTensor::drop(std::shared_ptr<TensorTape> tape, StateId state) {
  geometry_.emplace(*kept_.unsafeGetTensorImpl());
  tape_ = std::move(tape);
  state_ = state;
  kept_ = at::Tensor();
}

at::Tensor SavedTensor::unpack() const {
  if (counter_.enabled() && counter_.current_version() != version_) {
    std::string maker;
    if (maker_ != nullptr) {
      maker = c10::demangle(maker_->name());
      maker = maker.substr(maker.rfind(':') + 1);
      maker = str("output ", output_nr_, " of ", maker);
    }
    const std::string what =
        kept_.defined()
            ? Geometry(*kept_.unsafeGetTensorImpl()).describe(kept_.device())
            : geometry_->describe(tape_->device_of(state_));
    throw_modified(what, maker, counter_.current_version(), version_);
  }
  if (kept_.defined()) return kept_;
  at::Tensor tensor = tape_->materialise(state_, *geometry_);
  if (recorded_ != nullptr) recorded_->bind(tensor);
  return tensor;
}

void throw_modified(const std::string& what, const std::string& maker,
                    std::uint32_t found, std::uint32_t expected) {
  const bool anomaly = torch::autograd::AnomalyMode::is_enabled();
  TORCH_CHECK(
      false,
      "one of the variables needed for gradient computation has been modified "
      "by an inplace operation: [",
      what, "]", maker.empty() ? "" : ", which is ", maker,
      maker.empty() ? "" : ",", " is at version ", found, "; expected version ",
      expected, " instead.",
      anomaly ? " Hint: the backtrace further above shows the operation that "
                "failed to compute its gradient. The variable in question was "
                "changed in there or anywhere later. Good luck!"
              : " Hint: enable anomaly detection to find the operation that "
                "failed to compute its gradient, with "
                "torch.autograd.set_detect_anomaly(True, check_nan=False).");
}

}  // namespace memscale
