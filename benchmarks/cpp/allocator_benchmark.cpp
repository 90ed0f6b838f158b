// What counting costs: one allocation and its release through torch's own CPU
// allocator, through ours around it, and through the simulated device's heap.
#include <benchmark/benchmark.h>
#include <c10/core/CPUAllocator.h>

#include "memscale/hostmem/host_allocator.h"
#include "memscale/simdev/device.h"

namespace {

void run(benchmark::State& state, c10::Allocator* allocator) {
  const auto bytes = static_cast<size_t>(state.range(0));
  for (auto _ : state) {
    c10::DataPtr data = allocator->allocate(bytes);
    benchmark::DoNotOptimize(data.get());
  }
}

void plain(benchmark::State& state) {
  run(state, c10::GetDefaultCPUAllocator());
}
BENCHMARK(plain)->Arg(256)->Arg(64 << 10)->Arg(1 << 20);

void counted(benchmark::State& state) {
  memscale::hostmem::install();
  run(state, c10::GetCPUAllocator());
}
BENCHMARK(counted)->Arg(256)->Arg(64 << 10)->Arg(1 << 20);

void simulated(benchmark::State& state) {
  memscale::sim::set_capacity(int64_t{1} << 30);
  run(state, &memscale::sim::allocator());
}
BENCHMARK(simulated)->Arg(256)->Arg(64 << 10)->Arg(1 << 20);

}  // namespace

BENCHMARK_MAIN();
