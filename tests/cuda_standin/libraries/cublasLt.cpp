// libcublasLt: one algorithm for everything, without workspace.
#include <cstddef>
#include <cstring>

namespace {
// sizeof(cublasLtMatmulHeuristicResult_t): the algorithm (64 bytes), the bytes
// of its workspace, its status, waves and reserved words. All zeros: it works.
constexpr std::size_t kResultBytes = 64 + 8 + 4 + 4 + 4 * 4;
}  // namespace

extern "C" {

std::size_t cublasLtGetVersion() { return 130000; }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*,
                                   void*, int num_wanted, void* results,
                                   int* num_found) {
  *num_found = num_wanted > 0 ? 1 : 0;
  if (num_wanted > 0) std::memset(results, 0, kResultBytes);
  return 0;
}

}  // extern "C"
