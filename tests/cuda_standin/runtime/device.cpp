// Devices and their properties, and the calling thread's last error.
#include <dlfcn.h>

#include <cstdio>
#include <utility>

#include "card.h"
#include "runtime.h"

namespace standin {
namespace {

constexpr int kVersion = 13000;  // CUDA 13.0
thread_local int device = 0;
thread_local cudaError_t last_error = cudaSuccess;

bool exists(int index) { return index >= 0 && index < num_devices(); }

}  // namespace

int current_device() { return device; }
cudaError_t fail(cudaError_t error) { return last_error = error; }

}  // namespace standin

using namespace standin;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = num_devices();
  return *count > 0 ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* index) {
  *index = device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int index) {
  if (!exists(index)) return fail(cudaErrorInvalidDevice);
  device = index;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int index) {
  if (!exists(index)) return fail(cudaErrorInvalidDevice);
  const Card& it = card();
  *out = {};
  std::snprintf(out->name, sizeof out->name, "%s", it.name.c_str());
  out->uuid.bytes[0] = static_cast<char>(index + 1);
  out->totalGlobalMem = it.memory_bytes;
  out->major = it.major;
  out->minor = it.minor;
  out->multiProcessorCount = it.num_multiprocessors;
  out->maxThreadsPerMultiProcessor = it.threads_per_multiprocessor;
  out->maxBlocksPerMultiProcessor = it.blocks_per_multiprocessor;
  out->sharedMemPerBlock = 48 << 10;
  out->sharedMemPerBlockOptin = it.shared_bytes_per_block;
  out->sharedMemPerMultiprocessor = it.shared_bytes_per_block + (1 << 10);
  out->reservedSharedMemPerBlock = 1 << 10;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536;
  out->warpSize = 32;
  out->memPitch = 0x7fffffff;
  out->maxThreadsPerBlock = 1024;
  out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
  out->maxThreadsDim[2] = 64;
  out->maxGridSize[0] = 0x7fffffff;
  out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->totalConstMem = 64 << 10;
  out->textureAlignment = out->surfaceAlignment = 512;
  out->texturePitchAlignment = 32;
  out->l2CacheSize = 6 << 20;
  out->memoryBusWidth = 384;
  out->asyncEngineCount = 2;
  out->pciBusID = index + 1;
  out->canMapHostMemory = out->unifiedAddressing = out->managedMemory = 1;
  out->concurrentKernels = out->cooperativeLaunch = 1;
  out->memoryPoolsSupported = out->hostRegisterSupported = 1;
  out->canUseHostPointerForRegisteredMem = 1;
  out->streamPrioritiesSupported = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute,
                                   int index) {
  cudaDeviceProp it;
  if (const cudaError_t error = cudaGetDeviceProperties(&it, index)) {
    return error;
  }
  const auto answer = [&](auto number) {
    *value = static_cast<int>(number);
    return cudaSuccess;
  };
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      return answer(it.maxThreadsPerBlock);
    case cudaDevAttrMaxGridDimX:
      return answer(it.maxGridSize[0]);
    case cudaDevAttrMaxGridDimY:
      return answer(it.maxGridSize[1]);
    case cudaDevAttrMaxGridDimZ:
      return answer(it.maxGridSize[2]);
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return answer(it.sharedMemPerBlock);
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return answer(it.sharedMemPerBlockOptin);
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return answer(it.sharedMemPerMultiprocessor);
    case cudaDevAttrReservedSharedMemoryPerBlock:
      return answer(it.reservedSharedMemPerBlock);
    case cudaDevAttrWarpSize:
      return answer(it.warpSize);
    case cudaDevAttrMultiProcessorCount:
      return answer(it.multiProcessorCount);
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return answer(it.maxThreadsPerMultiProcessor);
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return answer(it.maxBlocksPerMultiProcessor);
    case cudaDevAttrMaxRegistersPerBlock:
      return answer(it.regsPerBlock);
    case cudaDevAttrComputeCapabilityMajor:
      return answer(it.major);
    case cudaDevAttrComputeCapabilityMinor:
      return answer(it.minor);
    case cudaDevAttrTextureAlignment:
      return answer(it.textureAlignment);
    case cudaDevAttrL2CacheSize:
      return answer(it.l2CacheSize);
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrMemoryPoolsSupported:
      return answer(1);
    default:  // features of which the stand-in has none
      return answer(0);
  }
}

cudaError_t cudaDeviceGetPCIBusId(char* out, int length, int index) {
  std::snprintf(out, static_cast<std::size_t>(length), "0000:%02x:00.0",
                static_cast<unsigned>(index + 1));
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

cudaError_t cudaGetLastError() {
  return std::exchange(last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorNotSupported:
      return "cudaErrorNotSupported";
    default:
      return "an error of the stand-in CUDA runtime";
  }
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorNotSupported:
      return "not supported by the stand-in CUDA runtime";
    default:
      return "an error of the stand-in CUDA runtime";
  }
}

// torch asks for the driver's functions by name.
cudaError_t cudaGetDriverEntryPointByVersion(
    const char* symbol, void** function, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* status) {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  *function = driver != nullptr ? dlsym(driver, symbol) : nullptr;
  const bool found = *function != nullptr;
  if (!found) standin_called(symbol, 0);
  if (status != nullptr) {
    *status = found ? cudaDriverEntryPointSuccess
                    : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}

}  // extern "C"
