// What planning costs: cuts of one layer, and the choice for all of them. The
// budget is so many twentieths of the way from the smallest to that of the
// fastest plan.
#include <benchmark/benchmark.h>

#include <string>

#include "memscale/core/cuts/cuts.h"
#include "memscale/core/solver/solver.h"
#include "solver_problems.h"

namespace memscale {
namespace {

// A transformer's block: norms, projections, attention, feed-forward, dropout
// and residuals; most results are saved.
LayerGraph blocks(std::size_t num_blocks) {
  LayerGraph graph;
  std::mt19937 random(1);
  graph.states.push_back({.bytes = 1_MiB, .cost = 1_MiB});
  for (std::size_t i = 0; i < 60 * num_blocks; ++i) {
    const std::size_t last = graph.states.size() - 1;
    LineageOp& op = graph.ops.emplace_back();
    op.name = "aten::add.Tensor";
    op.nanoseconds = static_cast<std::int64_t>(random() % 1'000'000);
    op.reads = {last};
    const std::size_t back = 2 + random() % 12;
    if (i % 4 == 0 && back <= last) op.reads.push_back(last - back);
    const Bytes bytes(static_cast<std::int64_t>(1 + random() % (1 << 22)));
    graph.states.push_back({.bytes = bytes,
                            .cost = bytes,
                            .maker = i,
                            .place = std::pair(i, std::size_t{0}),
                            .is_saved = random() % 3 != 0});
  }
  return graph;
}

void cuts(benchmark::State& state) {
  const LayerGraph graph = blocks(static_cast<std::size_t>(state.range(0)));
  std::size_t num_cuts = 0;
  for (auto _ : state) num_cuts = pareto_cuts(graph).size();
  state.SetLabel(std::to_string(num_cuts) + " cuts");
}
BENCHMARK(cuts)->Arg(1)->Arg(10)->Arg(42)->Unit(benchmark::kMillisecond);

using MakeLayers = Problem (*)(std::mt19937&, std::size_t, std::size_t, bool);

void solve_layers(benchmark::State& state, MakeLayers make,
                  std::size_t num_options, bool offloads) {
  std::mt19937 random(1);
  const auto num_layers = static_cast<std::size_t>(state.range(0));
  Problem problem = make(random, num_layers, num_options, offloads);
  problem.device_budget = Bytes();
  const Bytes least = *solve(problem).smallest_budget;
  const Bytes most =
      evaluate(problem, std::vector<std::size_t>(problem.layers.size())).peak;
  problem.device_budget = least + (most - least) * state.range(1) / 20;
  SolveResult result;
  for (auto _ : state) result = solve(problem);
  state.SetLabel(std::string(to_string(result.status)) + ", gap " +
                 std::to_string(result.gap()));
}
#define MEMSCALE_SIZES \
  ArgsProduct({{12, 48, 1000}, {1, 5, 10, 15}})->Unit(benchmark::kMillisecond)
BENCHMARK_CAPTURE(solve_layers, equal, equal_layers, 20, false)->MEMSCALE_SIZES;
BENCHMARK_CAPTURE(solve_layers, equal_with_host, equal_layers, 14, true)
    ->MEMSCALE_SIZES;
BENCHMARK_CAPTURE(solve_layers, different, different_layers, 20, false)
    ->MEMSCALE_SIZES;
BENCHMARK_CAPTURE(solve_layers, different_with_host, different_layers, 14, true)
    ->MEMSCALE_SIZES;

}  // namespace
}  // namespace memscale

BENCHMARK_MAIN();
