// libcudnn: convolutions and batch norms, with one engine for each and no
// workspace. What a card's cuDNN would take as workspace is not known here.
#include <cstddef>
#include <cstdint>

#include "../runtime/runtime.h"

namespace {

// Of cudnnBackendAttributeName_t and cudnnBackendAttributeType_t.
constexpr int kEngineHeuristicResults = 202;
constexpr int kEngineConfigWorkspaceBytes = 303;
constexpr int kPlanWorkspaceBytes = 402;
constexpr int kNumEngines = 802;
constexpr int kTypeDescriptor = 15;

int answer(int64_t* count, void* data, int64_t num_wanted, int64_t value) {
  if (count != nullptr) *count = 1;
  if (data != nullptr && num_wanted > 0) *static_cast<int64_t*>(data) = value;
  return 0;
}

int no_bytes(std::size_t* bytes) {
  *bytes = 0;
  return 0;
}

}  // namespace

extern "C" {

std::size_t cudnnGetVersion() { return 92000; }
std::size_t cudnnGetCudartVersion() { return 13000; }
int cudnnGetProperty(int type, int* value) {
  constexpr int kVersion[] = {9, 20, 0};
  *value = kVersion[type];
  return 0;
}
const char* cudnnGetErrorString(int) {
  return "an error of the stand-in cuDNN";
}
void cudnnGetLastErrorString(char* out, std::size_t length) {
  if (length > 0) *out = '\0';
}
int cudnnGetStream(void*, void** stream) {
  *stream = nullptr;
  return 0;
}

int cudnnBackendCreateDescriptor(int, void** out) {
  *out = standin_new_handle();
  return 0;
}
// One engine, found by the heuristic; descriptors are asked for as they were
// made, so that there is nothing to fill in; of notes and knobs there are none.
int cudnnBackendGetAttribute(void*, int name, int type, int64_t num_wanted,
                             int64_t* count, void* data) {
  switch (name) {
    case kEngineHeuristicResults:
      return answer(count, nullptr, 0, 0);
    case kEngineConfigWorkspaceBytes:
    case kPlanWorkspaceBytes:
      return answer(count, data, num_wanted, 0);
    case kNumEngines:
      return answer(count, data, num_wanted, 1);
    default:
      if (count != nullptr) *count = type == kTypeDescriptor ? 1 : 0;
      return 0;
  }
}

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    void*, int, int, void*, void*, void*, void*, void*, std::size_t* bytes) {
  return no_bytes(bytes);
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void*, int, int, void*,
                                                      void*, void*, void*,
                                                      void*, void*, void*,
                                                      std::size_t* bytes) {
  return no_bytes(bytes);
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void*, int, int, void*,
                                                         void*,
                                                         std::size_t* bytes) {
  return no_bytes(bytes);
}

}  // extern "C"
