#pragma once

// Adam and AdamW over tensors, in one pass and with 8-bit state, as operators
// of torch's dispatcher, so that Python, fake tensors and C++ programs meet
// them as they meet torch's own:
//
//   memscale::adam8_       a step, state of one byte each (see blockwise.h)
//   memscale::adam_        a step, state in float32
//   memscale::quantise_    float32 -> codes and absmax
//   memscale::encode_      float32 and the absmax it once had -> codes
//   memscale::dequantise_  codes and absmax -> float32
//   memscale::unscale_     gradients times a number, inf and NaN found
//
// Their schemas are in optimizer.cpp; what computes them is in
// optimizer_backend.h.

namespace memscale {

// Makes the operators known to torch, once per process. Python's import does
// it.
void register_optimizer_ops();

// Whether 8-bit steps on CUDA run in kernels of ours; otherwise they go piece
// by piece through torch's operators. Asks CUDA for its devices.
bool has_cuda_step();

}  // namespace memscale
