// Built instead of kernels.cu when CUDA is off.
#include <stdexcept>

#include "memscale/kernels/cuda/kernels.h"

namespace memscale::kernels::cuda {
namespace {

[[noreturn]] void fail() {
  throw std::runtime_error("this build of the kernels has no CUDA");
}

}  // namespace

bool available() { return false; }

void quantise(Map, const float*, std::size_t, std::uint8_t*, float*, void*) {
  fail();
}

void dequantise(Map, const std::uint8_t*, const float*, std::size_t, float*,
                void*) {
  fail();
}

template <typename P>
void adam8(const AdamStep&, P*, const P*, const State8&, std::size_t,
           std::uint64_t, void*) {
  fail();
}

template <typename P, typename S>
void adam(const AdamStep&, P*, const P*, const State<S>&, std::size_t,
          std::uint64_t, void*) {
  fail();
}

template <typename G>
void unscale(G*, std::size_t, float, float*, void*) {
  fail();
}

#include "memscale/kernels/cuda/instances.inc"

}  // namespace memscale::kernels::cuda
