#pragma once

#include <span>

#include "memscale/kernels/kernel_table.h"

// The kernels of this machine: one table of functions, picked once.
//
//   const KernelTable& k = kernels();
//   k.adam8_f32(step, params, grads, state, count, first);
//
// Functions are pure: pointers and counts, no threads, no allocation, one
// block of scratch on the stack (below 8 KiB). 64-byte aligned memory, as
// torch gives, is quickest. Callers split ranges at multiples of
// kBlock. All implementations give the same bits, NaN payloads apart, if
// denormals are not flushed.

namespace memscale::kernels {

// The fastest table this CPU can run. Thread-safe; static storage.
const KernelTable& kernels();

// Every table this CPU can run, slowest first: for tests and benchmarks.
std::span<const KernelTable* const> all_kernels();

// The obvious scalar version, which the others are held to.
const KernelTable& reference_kernels();

}  // namespace memscale::kernels
