// Results kept in fewer bits, without loss, where making them again is slow.
//
// On the CPU, drawing dropout's zeros and ones again costs as much as a matmul
// of that size (10 ns an element, against 0.5 for this), and a bit is 1/32 of
// the bytes; a max pooling's indices take half. On cards both are cheap to
// make: there they are replayed as any other result.

#include <ATen/Parallel.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "memscale/kernels/bits.h"
#include "memscale/runtime/op_info.h"
#include "memscale/runtime/tape.h"

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

bool is_packable(c10::ScalarType type) {
  return type == c10::kHalf || type == c10::kBFloat16 || type == c10::kFloat ||
         type == c10::kDouble;
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

void Tape::keep_packed(Node& node) {
  pack_draws(node);
  pack_indices(node);
}

void Tape::pack_draws(Node& node) {
  if (!node.op->rules.draws_bits || node.writes.size() != 1 ||
      !node.results.empty()) {
    return;
  }
  const Reference& reference = node.references[node.writes.front().place];
  const State& state = states_[node.writes.front().state];
  const StoragePtr storage = state.original.lock();
  if (reference.access != Access::Overwrite || !storage ||
      !state.device.is_cpu() || !is_packable(reference.geometry.type()) ||
      state.bytes == 0) {
    return;
  }
  const std::size_t width = c10::elementSize(reference.geometry.type());
  const auto count = static_cast<std::int64_t>(state.bytes / width);
  node.packed =
      empty_storage(static_cast<std::size_t>(count + 7) / 8, c10::kCPU);
  auto* const bits = static_cast<std::uint8_t*>(node.packed->mutable_data());
  with_type(width, [&]<typename T>(T) {
    const auto* elements = static_cast<const T*>(storage->data());
    for_each_part(count, [&](std::int64_t begin, std::size_t length) {
      kernels::pack_bits(elements + begin, length, bits + begin / 8);
    });
  });
  node.generator = at::Generator();
}

void Tape::pack_indices(Node& node) {
  // Alone: if its other result has to be replayed, so can be the indices.
  if (!node.op->rules.indices || node.results.size() != 1 ||
      node.results.front().place != *node.op->rules.indices) {
    return;
  }
  const State& state = states_[node.results.front().state];
  const StoragePtr storage = state.original.lock();
  const State& indexed = states_[node.references.front().state];
  // They index a part of the first argument, so they are less than its bytes.
  if (!storage || !state.device.is_cpu() || state.bytes == 0 ||
      indexed.bytes > std::numeric_limits<std::int32_t>::max()) {
    return;
  }
  const auto count =
      static_cast<std::int64_t>(state.bytes / sizeof(std::int64_t));
  node.packed = empty_storage(state.bytes / 2, c10::kCPU);
  auto* const packed = static_cast<std::int32_t*>(node.packed->mutable_data());
  const auto* elements = static_cast<const std::int64_t*>(storage->data());
  for_each_part(count, [&](std::int64_t begin, std::size_t length) {
    kernels::narrow(elements + begin, length, packed + begin);
  });
  node.reads.clear();
}

StoragePtr Tape::unpack(const Node& node) const {
  if (!node.results.empty()) {
    const State& state = states_[node.results.front().state];
    StoragePtr storage = empty_storage(state.bytes, state.device);
    const auto* packed = static_cast<const std::int32_t*>(node.packed->data());
    auto* const elements = static_cast<std::int64_t*>(storage->mutable_data());
    for_each_part(static_cast<std::int64_t>(state.bytes / sizeof(std::int64_t)),
                  [&](std::int64_t begin, std::size_t length) {
                    kernels::widen(packed + begin, length, elements + begin);
                  });
    return storage;
  }
  const Reference& reference = node.references[node.writes.front().place];
  const State& state = states_[node.writes.front().state];
  const c10::ScalarType type = reference.geometry.type();
  const std::size_t width = c10::elementSize(type);
  StoragePtr storage = empty_storage(state.bytes, state.device);
  const auto* bits = static_cast<const std::uint8_t*>(node.packed->data());
  with_type(width, [&]<typename T>(T) {
    auto* const elements = static_cast<T*>(storage->mutable_data());
    const T one = one_of<T>(type);
    for_each_part(static_cast<std::int64_t>(state.bytes / width),
                  [&](std::int64_t begin, std::size_t length) {
                    kernels::unpack_bits(bits + begin / 8, length, one,
                                         elements + begin);
                  });
  });
  return storage;
}

}  // namespace memscale
