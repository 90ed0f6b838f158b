// Kernels: registered by the objects that hold them, launched into nothing, and
// recorded when a test asks for it.
#include <cxxabi.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "card.h"
#include "runtime.h"

namespace standin {
namespace {

struct Configuration {
  dim3 grid, block;
  std::size_t shared_bytes;
  cudaStream_t stream;
};
// Between __cudaPushCallConfiguration and the launch that pops it.
thread_local std::vector<Configuration> configurations;

struct Launch {
  const std::string* kernel;
  std::uintptr_t stream;
  int device;
  std::vector<char> argument;
};

// An argument to copy when a kernel is launched whose name contains `kernel`.
// CUDA hands over pointers without sizes: who asks knows the type.
struct Watch {
  std::string kernel;
  std::size_t index = 0;
  std::size_t bytes = 0;
};

struct Variable {
  void* address = nullptr;  // on first use
  std::size_t bytes = 0;
};

// Made on first use and never destroyed: objects register their kernels before
// main, and torch's threads launch until the process ends.
struct State {
  std::mutex mutex;                                      // guards all below
  std::unordered_map<const void*, std::string> kernels;  // mangled
  std::map<std::string, std::string> demangled;
  std::map<const void*, Variable> variables;
  std::map<std::string, std::size_t> unsupported_calls;
  std::string listed_calls;  // what standin_unsupported_calls returned last
  bool is_recording = false;
  Watch watch;
  std::deque<Launch> launches;
};

State& state() {
  static State* const instance = new State;
  return *instance;
}

// The lock is held. The result lives for ever.
const std::string& name_of(const void* kernel) {
  const std::string& mangled = state().kernels[kernel];
  const auto [at, is_new] = state().demangled.try_emplace(mangled);
  if (is_new) {
    int status = 0;
    char* text =
        abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
    at->second = text != nullptr ? text : mangled;
    std::free(text);
  }
  return at->second;
}

void record(const void* kernel, void** arguments, cudaStream_t stream) {
  const std::lock_guard lock(state().mutex);
  if (!state().is_recording) return;
  Launch launch{&name_of(kernel),
                reinterpret_cast<std::uintptr_t>(stream),
                current_device(),
                {}};
  const Watch& watch = state().watch;
  if (watch.bytes != 0 && arguments != nullptr &&
      launch.kernel->find(watch.kernel) != std::string::npos) {
    const auto* from = static_cast<const char*>(arguments[watch.index]);
    launch.argument.assign(from, from + watch.bytes);
  }
  state().launches.push_back(std::move(launch));
}

// As on a card, a stream of one device takes no kernel while another device is
// the current one.
cudaError_t launch(const void* kernel, void** arguments, cudaStream_t stream) {
  if (device_of(stream) != current_device()) {
    return fail(cudaErrorInvalidResourceHandle);
  }
  record(kernel, arguments, stream);
  return cudaSuccess;
}

}  // namespace
}  // namespace standin

using namespace standin;

extern "C" {

void standin_called(const char* function, int supported) {
  if (supported != 0) return;
  const std::lock_guard lock(state().mutex);
  ++state().unsupported_calls[function];
}

void* standin_new_handle() { return std::calloc(1, 64); }

void* standin_named_kernel(const char* name) {
  void* const kernel = standin_new_handle();
  const std::lock_guard lock(state().mutex);
  state().kernels[kernel] = name;
  return kernel;
}

void standin_launched(const void* kernel, void** arguments, void* stream) {
  record(kernel, arguments, static_cast<cudaStream_t>(stream));
}

// For tests. Functions that only answered "not supported" and how often, as
// lines "count name"; valid until the next call.
const char* standin_unsupported_calls() {
  const std::lock_guard lock(state().mutex);
  state().listed_calls.clear();
  for (const auto& [name, count] : state().unsupported_calls) {
    state().listed_calls += std::to_string(count) + " " + name + "\n";
  }
  return state().listed_calls.c_str();
}

// For tests. Begins a new record; of kernels whose name contains `kernel`, the
// first `bytes` of argument number `index` are kept. bytes 0: of none.
void standin_begin_record(const char* kernel, std::size_t index,
                          std::size_t bytes) {
  const std::lock_guard lock(state().mutex);
  state().launches.clear();
  state().watch = {kernel, index, bytes};
  state().is_recording = true;
}

// Ends it; the number of launches.
std::size_t standin_end_record() {
  const std::lock_guard lock(state().mutex);
  state().is_recording = false;
  return state().launches.size();
}

// Launch number i of the record; valid until the next record begins.
void standin_launch(std::size_t i, const char** kernel, std::uintptr_t* stream,
                    int* device, const char** argument,
                    std::size_t* argument_bytes) {
  const std::lock_guard lock(state().mutex);
  const Launch& it = state().launches[i];
  *kernel = it.kernel->c_str();
  *stream = it.stream;
  *device = it.device;
  *argument = it.argument.data();
  *argument_bytes = it.argument.size();
}

// What nvcc's generated code calls.
void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* name,
                            int, uint3*, uint3*, dim3*, dim3*, int*) {
  const std::lock_guard lock(state().mutex);
  state().kernels[host] = name;
}
void __cudaRegisterVar(void**, char* host, char*, const char*, int,
                       size_t bytes, int, int) {
  const std::lock_guard lock(state().mutex);
  state().variables[host] = {nullptr, bytes};
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                     struct CUstream_st* stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block,
                                       size_t* shared_bytes, void* stream) {
  if (configurations.empty()) return fail(cudaErrorMissingConfiguration);
  const Configuration top = configurations.back();
  configurations.pop_back();
  *grid = top.grid;
  *block = top.block;
  *shared_bytes = top.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = top.stream;
  return cudaSuccess;
}
// The handle of a kernel is the address of its function on the host.
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3,
                               void** arguments, size_t, cudaStream_t stream) {
  return launch(kernel, arguments, stream);
}

cudaError_t cudaLaunchKernel(const void* host, dim3, dim3, void** arguments,
                             size_t, cudaStream_t stream) {
  return launch(host, arguments, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration,
                                const void* host, void** arguments) {
  return launch(host, arguments, configuration->stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void* host, dim3, dim3,
                                        void** arguments, size_t,
                                        cudaStream_t stream) {
  return launch(host, arguments, stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  *out = {};
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  out->ptxVersion = out->binaryVersion = card().major * 10 + card().minor;
  out->maxDynamicSharedSizeBytes =
      static_cast<int>(card().shared_bytes_per_block);
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count,
                                                          const void*,
                                                          int threads, size_t) {
  *count = std::clamp(card().threads_per_multiprocessor / std::max(threads, 1),
                      1, card().blocks_per_multiprocessor);
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* count, const void* host, int threads, size_t shared_bytes, unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(count, host, threads,
                                                       shared_bytes);
}

cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void*,
                                cudaJitOption*, void**, unsigned,
                                cudaLibraryOption*, void**, unsigned) {
  *library = static_cast<cudaLibrary_t>(standin_new_handle());
  return cudaSuccess;
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t,
                                 const char* name) {
  *kernel = static_cast<cudaKernel_t>(standin_named_kernel(name));
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void** out, const void* symbol) {
  const std::lock_guard lock(state().mutex);
  const auto found = state().variables.find(symbol);
  if (found == state().variables.end()) return fail(cudaErrorInvalidSymbol);
  Variable& variable = found->second;
  if (variable.address == nullptr) {
    variable.address = std::calloc(1, std::max<size_t>(variable.bytes, 1));
  }
  *out = variable.address;
  return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from,
                               size_t bytes, size_t offset, cudaMemcpyKind) {
  void* to = nullptr;
  if (const cudaError_t error = cudaGetSymbolAddress(&to, symbol)) {
    return error;
  }
  std::memcpy(static_cast<char*>(to) + offset, from, bytes);
  return cudaSuccess;
}

}  // extern "C"
