// libcuda: the driver, as far as torch asks for it: contexts, kernels compiled
// at run time, and the virtual memory that expandable segments are made of.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "../runtime/runtime.h"

namespace {

// Physical memory: counted when created, given back when released.
struct Physical {
  std::size_t bytes;
  int device;
};

int any_context = 0;
thread_local CUcontext context = reinterpret_cast<CUcontext>(&any_context);

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory"
          : error == CUDA_ERROR_NOT_SUPPORTED
              ? "not supported by the stand-in CUDA driver"
              : "an error of the stand-in CUDA driver";
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* out) {
  *out = context;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext it) {
  context = it;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* out, int index) {
  *out = index;
  return CUDA_SUCCESS;
}
// The runtime numbers the attributes as the driver does.
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute,
                              CUdevice device) {
  return static_cast<CUresult>(cudaDeviceGetAttribute(
      value, static_cast<cudaDeviceAttr>(attribute), device));
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice) {
  *out = reinterpret_cast<CUcontext>(&any_context);
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* out, const void*) {
  *out = static_cast<CUmodule>(standin_new_handle());
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned,
                            CUjit_option*, void**) {
  return cuModuleLoadData(out, image);
}
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* out, CUmodule, const char* name) {
  *out = static_cast<CUfunction>(standin_named_kernel(name));
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction) {
  *value = 1024;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) {
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count,
                                                     CUfunction kernel,
                                                     int threads,
                                                     size_t shared_bytes) {
  return static_cast<CUresult>(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      count, kernel, threads, shared_bytes));
}
CUresult cuLaunchKernel(CUfunction kernel, unsigned, unsigned, unsigned,
                        unsigned, unsigned, unsigned, unsigned, CUstream stream,
                        void** arguments, void**) {
  standin_launched(kernel, arguments, stream);
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* out, size_t bytes, size_t,
                             CUdeviceptr, unsigned long long) {
  int device = 0;
  cudaGetDevice(&device);
  *out = reinterpret_cast<CUdeviceptr>(standin_reserve(bytes, device));
  return *out != 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t) {
  standin_unreserve(pointer(address));
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t bytes,
                     const CUmemAllocationProp* properties,
                     unsigned long long) {
  const int device = properties->location.id;
  if (standin_take(bytes, device) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = reinterpret_cast<CUmemGenericAllocationHandle>(
      new Physical{bytes, device});
  return CUDA_SUCCESS;
}
// torch releases a handle after it unmapped it, and never before.
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  const auto* physical = reinterpret_cast<Physical*>(handle);
  standin_give(physical->bytes, physical->device);
  delete physical;
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle,
                  unsigned long long) {
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  standin_discard(pointer(address), bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t* bytes,
                                       const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  *bytes = size_t{2} << 20;
  return CUDA_SUCCESS;
}

}  // extern "C"
