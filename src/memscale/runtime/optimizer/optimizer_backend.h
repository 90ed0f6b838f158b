#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

#include "memscale/kernels/adam.h"
#include "memscale/kernels/blockwise.h"

// What computes the operators of optimizer.h on tensors.
//
// Note [Order of elements]
// A parameter's state is read flat, in the order in which the parameter lies in
// memory if it is dense there, whatever its strides (channels_last, transposed
// weights): so that blocks are read as they lie and nothing is copied. Of a
// parameter with gaps it is in the order of a contiguous copy.

namespace memscale {

struct Moments8 {
  at::Tensor m, v;  // uint8, dense
  at::Tensor m_absmax, v_absmax;
};

struct Moments {
  at::Tensor m, v;  // float32, of the parameter's layout
};

// A map on a device.
struct Codec {
  kernels::Map map;
  at::Tensor values, borders;
};

// The maps that one call of an operator has brought to its devices. Not kept
// longer: tensors on a device must not outlive its allocator.
class Codecs final {
 public:
  Codec of(kernels::Map map, c10::Device device);

 private:
  std::vector<Codec> made_;
};

// One way to compute. Parameters and gradients are dense and laid out alike,
// of one type: float32, bfloat16 or float16. Everything is on one device and
// has been checked.
struct OptimizerBackend {
  void (*adam8)(const kernels::AdamStep& step, const at::Tensor& param,
                const at::Tensor& grad, const Moments8& state, Codecs& codecs);
  void (*adam)(const kernels::AdamStep& step, const at::Tensor& param,
               const at::Tensor& grad, const Moments& state);
  void (*quantise)(const at::Tensor& values, kernels::Map map,
                   const at::Tensor& codes, const at::Tensor& absmax);
  // Codes of values that were dequantised with `absmax`: the codes they had
  // then, exactly (see docs/optimizer.md).
  void (*encode)(const at::Tensor& values, const at::Tensor& absmax,
                 kernels::Map map, const at::Tensor& codes);
  void (*dequantise)(const at::Tensor& codes, const at::Tensor& absmax,
                     kernels::Map map, const at::Tensor& values);
  bool (*unscale)(const at::Tensor& grads, float multiplier);
};

// The kernels of this CPU, on torch's threads; no tensors are allocated.
const OptimizerBackend& cpu_backend();

// Operators of torch in pieces of kStatePiece elements, for any device; the
// same bits as the kernels. Temporaries are at most 8 MiB at a time, however
// large the tensors.
const OptimizerBackend& generic_backend();

// The CUDA kernels, if this build has them, else the generic path. Once there
// is a CUDA tensor.
const OptimizerBackend& cuda_backend();

// For each code but the last the first float that is nearer to the next.
std::array<float, 255> code_borders(kernels::Map map);

// A type that no backend has.
[[noreturn]] void refuse_type(const at::Tensor& tensor);

// `tensor`'s elements as they lie in memory; it is dense.
at::Tensor flat(const at::Tensor& tensor);

}  // namespace memscale
