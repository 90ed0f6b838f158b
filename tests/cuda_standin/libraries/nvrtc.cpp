// libnvrtc: programs that compile at once, to nothing. torch makes some of its
// elementwise kernels so.
#include <cstddef>

#include "../runtime/runtime.h"

extern "C" {

int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return 0;
}
const char* nvrtcGetErrorString(int) {
  return "an error of the stand-in nvrtc";
}
int nvrtcCreateProgram(void** out, const char*, const char*, int, const char**,
                       const char**) {
  *out = standin_new_handle();
  return 0;
}
int nvrtcGetCUBINSize(void*, std::size_t* bytes) {
  *bytes = 1;
  return 0;
}
int nvrtcGetPTXSize(void*, std::size_t* bytes) {
  *bytes = 1;
  return 0;
}
int nvrtcGetProgramLogSize(void*, std::size_t* bytes) {
  *bytes = 1;
  return 0;
}
int nvrtcGetProgramLog(void*, char* out) {
  *out = '\0';
  return 0;
}
int nvrtcGetLoweredName(void*, const char* expression, const char** out) {
  *out = expression;
  return 0;
}

}  // extern "C"
