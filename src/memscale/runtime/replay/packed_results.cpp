// Results held in fewer bits, without loss: Tape::keep_packed says which.

#include <ATen/Parallel.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <bit>
#include <cstdint>

#include "memscale/kernels/bits.h"
#include "memscale/runtime/observe/op_info.h"
#include "memscale/runtime/replay/tensor_bytes.h"

namespace memscale {
namespace {

constexpr std::int64_t kGrain = 4096;  // bytes of bits

template <typename T>
T one_of(c10::ScalarType type) {
  switch (type) {
    case c10::kHalf:
      return static_cast<T>(0x3C00);
    case c10::kBFloat16:
      return static_cast<T>(0x3F80);
    case c10::kFloat:
      return static_cast<T>(std::bit_cast<std::uint32_t>(1.0F));
    default:
      return static_cast<T>(std::bit_cast<std::uint64_t>(1.0));
  }
}

// Calls work(T{}) with the unsigned type of that width.
template <typename F>
void with_type(std::size_t width, const F& work) {
  if (width == 2) return work(std::uint16_t{});
  if (width == 4) return work(std::uint32_t{});
  work(std::uint64_t{});
}

// Splits so many elements among torch's threads, at whole bytes of bits.
template <typename F>
void for_each_part(std::int64_t count, const F& work) {
  at::parallel_for(
      0, (count + 7) / 8, kGrain, [&](std::int64_t begin, std::int64_t end) {
        work(begin * 8,
             static_cast<std::size_t>(std::min(end * 8, count) - begin * 8));
      });
}

}  // namespace

bool TensorBytes::pack(NodeId node, StateId result, Packing packing) {
  TensorCall& call = nodes_[node];
  const State& state = states_[result];
  const StoragePtr storage = state.original.lock();
  if (!storage) return false;
  try {
    if (packing == Packing::Bits) {
      pack_bits(call, state, storage);
    } else {
      pack_indices(call, state, storage);
    }
  } catch (const std::exception&) {  // no memory for it
    call.packed.reset();
    return false;
  }
  call.generator = at::Generator();
  return true;
}

// The tensor that is drawn is the first that the op is given.
void TensorBytes::pack_bits(TensorCall& call, const State& state,
                            const StoragePtr& storage) {
  const c10::ScalarType type = call.references.front().geometry.type();
  const std::size_t width = c10::elementSize(type);
  const auto count = static_cast<std::int64_t>(state.bytes / width);
  call.packed =
      empty_storage(static_cast<std::size_t>(count + 7) / 8, c10::kCPU);
  auto* const bits = static_cast<std::uint8_t*>(call.packed->mutable_data());
  with_type(width, [&]<typename T>(T) {
    const auto* elements = static_cast<const T*>(storage->data());
    for_each_part(count, [&](std::int64_t begin, std::size_t length) {
      kernels::pack_bits(elements + begin, length, bits + begin / 8);
    });
  });
}

void TensorBytes::pack_indices(TensorCall& call, const State& state,
                               const StoragePtr& storage) {
  const auto count =
      static_cast<std::int64_t>(state.bytes / sizeof(std::int64_t));
  call.packed = empty_storage(state.bytes / 2, c10::kCPU);
  auto* const packed = static_cast<std::int32_t*>(call.packed->mutable_data());
  const auto* elements = static_cast<const std::int64_t*>(storage->data());
  for_each_part(count, [&](std::int64_t begin, std::size_t length) {
    kernels::narrow(elements + begin, length, packed + begin);
  });
}

void TensorBytes::unpack(NodeId node, StateId result) {
  const TensorCall& call = nodes_[node];
  const State& state = states_[result];
  StoragePtr storage = empty_storage(state.bytes, state.device);
  if (call.op->rules.indices) {
    const auto* packed = static_cast<const std::int32_t*>(call.packed->data());
    auto* const elements = static_cast<std::int64_t*>(storage->mutable_data());
    for_each_part(static_cast<std::int64_t>(state.bytes / sizeof(std::int64_t)),
                  [&](std::int64_t begin, std::size_t length) {
                    kernels::widen(packed + begin, length, elements + begin);
                  });
    return adopt(result, storage, call);
  }
  const c10::ScalarType type = call.references.front().geometry.type();
  const std::size_t width = c10::elementSize(type);
  const auto* bits = static_cast<const std::uint8_t*>(call.packed->data());
  with_type(width, [&]<typename T>(T) {
    auto* const elements = static_cast<T*>(storage->mutable_data());
    const T one = one_of<T>(type);
    for_each_part(static_cast<std::int64_t>(state.bytes / width),
                  [&](std::int64_t begin, std::size_t length) {
                    kernels::unpack_bits(bits + begin / 8, length, one,
                                         elements + begin);
                  });
  });
  adopt(result, storage, call);
}

}  // namespace memscale
