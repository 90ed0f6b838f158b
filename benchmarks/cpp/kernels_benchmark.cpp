// What an optimizer step costs for each parameter, on one thread: in cache
// (16 Ki parameters) and out of it (100 M), for each table of kernels that this
// CPU can run. `each` is the time for one element.
#include <benchmark/benchmark.h>

#include <bit>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "memscale/kernels/kernels.h"

namespace memscale::kernels {
namespace {

constexpr std::int64_t kInCache = 16 << 10;
constexpr std::int64_t kOutOfCache = 100'000'000;

// As torch allocates: a cache line's alignment matters out of cache.
template <typename T>
struct Aligned {
  using value_type = T;
  T* allocate(std::size_t count) {
    return static_cast<T*>(
        ::operator new(count * sizeof(T), std::align_val_t{64}));
  }
  void deallocate(T* place, std::size_t) {
    ::operator delete(place, std::align_val_t{64});
  }
  bool operator==(const Aligned&) const = default;
};
template <typename T>
using Vector = std::vector<T, Aligned<T>>;

Vector<float> normal_values(std::size_t count) {
  // A period is enough: what the loops cost does not depend on the values, but
  // that all maps' decades occur.
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  Vector<float> period(10'007);
  for (float& x : period) x = normal(random);
  Vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = period[i % 10'007];
  return values;
}

template <typename T>
Vector<T> of_type(const Vector<float>& values) {
  if constexpr (std::is_same_v<T, float>) {
    return values;
  } else {
    Vector<T> result(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      // Bf16: cut. Fp16: some number of about that size.
      result[i].bits = static_cast<std::uint16_t>(
          std::bit_cast<std::uint32_t>(values[i]) >> 16U);
    }
    return result;
  }
}

void report(benchmark::State& state, std::int64_t count) {
  state.counters["each"] =
      benchmark::Counter(static_cast<double>(count),
                         benchmark::Counter::kIsIterationInvariantRate |
                             benchmark::Counter::kInvert);
}

template <typename P>
void adam8(benchmark::State& state, Adam8<P>* kernel, bool stochastic) {
  const auto count = static_cast<std::size_t>(state.range(0));
  Vector<P> params = of_type<P>(normal_values(count));
  const Vector<P> grads = params;
  Vector<std::uint8_t> m(count, kSignedZero);
  Vector<std::uint8_t> v(count);
  Vector<float> m_absmax(num_blocks(count));
  Vector<float> v_absmax(num_blocks(count));
  const State8 moments{m.data(), v.data(), m_absmax.data(), v_absmax.data()};
  std::int64_t number = 0;
  for (auto _ : state) {
    AdamStep step = adam_step({}, ++number);
    step.stochastic_rounding = stochastic;
    kernel(step, params.data(), grads.data(), moments, count, 0);
  }
  report(state, state.range(0));
}

template <typename P, typename S>
void adam(benchmark::State& state, Adam<P, S>* kernel) {
  const auto count = static_cast<std::size_t>(state.range(0));
  Vector<P> params = of_type<P>(normal_values(count));
  const Vector<P> grads = params;
  Vector<S> m(count);
  Vector<S> v(count);
  std::int64_t number = 0;
  for (auto _ : state) {
    kernel(adam_step({}, ++number), params.data(), grads.data(),
           {m.data(), v.data()}, count, 0);
  }
  report(state, state.range(0));
}

void quantise(benchmark::State& state, Quantise* kernel) {
  const auto count = static_cast<std::size_t>(state.range(0));
  const Vector<float> values = normal_values(count);
  Vector<std::uint8_t> codes(count);
  Vector<float> absmax(num_blocks(count));
  for (auto _ : state) {
    kernel(values.data(), count, codes.data(), absmax.data());
  }
  report(state, state.range(0));
}

void dequantise(benchmark::State& state, Dequantise* kernel) {
  const auto count = static_cast<std::size_t>(state.range(0));
  Vector<std::uint8_t> codes(count);
  for (std::size_t i = 0; i < count; ++i) {
    codes[i] = static_cast<std::uint8_t>(i * 37);
  }
  const Vector<float> absmax(num_blocks(count), 1.0F);
  Vector<float> values(count);
  for (auto _ : state) {
    kernel(codes.data(), absmax.data(), count, values.data());
  }
  report(state, state.range(0));
}

template <typename G>
void unscale(benchmark::State& state, Unscale<G>* kernel) {
  const auto count = static_cast<std::size_t>(state.range(0));
  Vector<G> grads = of_type<G>(normal_values(count));
  for (auto _ : state) {
    benchmark::DoNotOptimize(kernel(grads.data(), count, 1.0F));
  }
  report(state, state.range(0));
}

void register_table(const KernelTable& k) {
  const auto add = [&k](const char* what, auto run, auto... arguments) {
    for (const std::int64_t count : {kInCache, kOutOfCache}) {
      const std::string name = std::string(what) + '/' + k.name;
      benchmark::RegisterBenchmark(name.c_str(), run, arguments...)
          ->Arg(count)
          ->Unit(benchmark::kMicrosecond);
    }
  };
  add("adam8_f32", adam8<float>, k.adam8_f32, false);
  add("adam8_bf16", adam8<Bf16>, k.adam8_bf16, false);
  add("adam8_bf16_stochastic", adam8<Bf16>, k.adam8_bf16, true);
  add("adam8_f16", adam8<Fp16>, k.adam8_f16, false);
  add("adam_f32", adam<float, float>, k.adam_f32);
  add("adam_bf16_state_f32", adam<Bf16, float>, k.adam_bf16_state_f32);
  add("adam_bf16_state_bf16", adam<Bf16, Bf16>, k.adam_bf16_state_bf16);
  add("quantise_signed", quantise, k.quantise_signed);
  add("quantise_unsigned", quantise, k.quantise_unsigned);
  add("dequantise_signed", dequantise, k.dequantise_signed);
  add("unscale_f32", unscale<float>, k.unscale_f32);
  add("unscale_bf16", unscale<Bf16>, k.unscale_bf16);
  add("unscale_f16", unscale<Fp16>, k.unscale_f16);
}

}  // namespace
}  // namespace memscale::kernels

int main(int argc, char** argv) {
  using namespace memscale::kernels;
  // The reference finds codes by search: minutes, and nobody's figure.
  for (const KernelTable* table : all_kernels()) {
    if (table != &reference_kernels()) register_table(*table);
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
