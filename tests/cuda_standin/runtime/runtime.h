#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

// What the files of the stand-in runtime share, and what it offers beside
// CUDA's own functions: to the other stand-in libraries, which link it, and to
// the tests, which call it through standin.py.

namespace standin {

// The calling thread's device.
int current_device();
// Keeps the error for cudaGetLastError and returns it.
cudaError_t fail(cudaError_t error);
// The device of a stream; a default stream is the current device's.
int device_of(cudaStream_t stream);

}  // namespace standin

extern "C" {

// Every generated function reports its name; `supported` is 0 if all that it
// does is to answer "not supported".
void standin_called(const char* function, int supported);
// A handle that no other call returned. Never freed: there are few.
void* standin_new_handle();
// The name of a kernel that was looked up by name (nvrtc, cuLibrary...).
void* standin_named_kernel(const char* name);
void standin_launched(const void* kernel, void** arguments, void* stream);

// Counts bytes of a device as used; nonzero, and counts nothing, if they would
// exceed its capacity.
int standin_take(std::size_t bytes, int device);
void standin_give(std::size_t bytes, int device);
// Address space of a device without memory of its own (see memory.cpp).
void* standin_reserve(std::size_t bytes, int device);
void standin_unreserve(void* address);
// The bytes there read as zeros, and no memory of the host is behind them.
void standin_discard(void* address, std::size_t bytes);

}  // extern "C"
