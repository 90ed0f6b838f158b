// Streams, events and captures. All work is done when the call returns, so that
// waiting is nothing; what is real is which stream and which device a call
// names.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <utility>

#include "runtime.h"

namespace standin {
namespace {

struct Stream {
  int device = 0;
  int priority = 0;
  bool is_capturing = false;
  unsigned long long capture = 0;
};

struct Event {
  std::chrono::steady_clock::time_point when{};
};

std::atomic<unsigned long long> num_captures{0};
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

// The handles 0, 1 and 2 are CUDA's default streams.
bool is_default(cudaStream_t stream) {
  return reinterpret_cast<std::uintptr_t>(stream) <= 2;
}

Stream& of(cudaStream_t stream) {
  static thread_local Stream by_default;
  return is_default(stream) ? by_default : *reinterpret_cast<Stream*>(stream);
}

Event& of(cudaEvent_t event) { return *reinterpret_cast<Event*>(event); }

}  // namespace

int device_of(cudaStream_t stream) {
  return is_default(stream) ? current_device() : of(stream).device;
}

}  // namespace standin

using namespace standin;

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned,
                                         int priority) {
  *out = reinterpret_cast<cudaStream_t>(new Stream{current_device(), priority});
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* out) {
  return cudaStreamCreateWithPriority(out, 0, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (is_default(stream)) return fail(cudaErrorInvalidResourceHandle);
  delete &of(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = of(stream).priority;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) {
  *out = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* out) {
  return cudaEventCreateWithFlags(out, 0);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &of(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  of(event).when = std::chrono::steady_clock::now();
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream,
                                     unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin,
                                 cudaEvent_t end) {
  *milliseconds =
      std::chrono::duration<float, std::milli>(of(end).when - of(begin).when)
          .count();
  return cudaSuccess;
}

// A graph holds nothing, since the kernels in it would do nothing; the states
// that torch asks for while it captures are kept.
cudaError_t cudaStreamIsCapturing(cudaStream_t stream,
                                  cudaStreamCaptureStatus* status) {
  *status = of(stream).is_capturing ? cudaStreamCaptureStatusActive
                                    : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream,
                                     cudaStreamCaptureStatus* status,
                                     unsigned long long* capture,
                                     cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges,
                                     size_t* num_dependencies) {
  cudaStreamIsCapturing(stream, status);
  if (capture != nullptr) *capture = of(stream).capture;
  if (graph != nullptr) *graph = nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (num_dependencies != nullptr) *num_dependencies = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  of(stream).is_capturing = true;
  of(stream).capture = ++num_captures;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  of(stream).is_capturing = false;
  *graph = static_cast<cudaGraph_t>(standin_new_handle());
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t,
                                          unsigned long long) {
  *out = static_cast<cudaGraphExec_t>(standin_new_handle());
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
// One node, since torch warns of graphs without any.
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function,
                               void* data) {
  function(data);
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream,
                                  cudaStreamCallback_t function, void* data,
                                  unsigned) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

}  // extern "C"
