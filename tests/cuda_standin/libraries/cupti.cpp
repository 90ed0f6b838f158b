// libcupti: the profiler's, which finds nothing to profile.
#include <cstdint>

extern "C" {

int cuptiGetVersion(uint32_t* version) {
  *version = 130000;
  return 0;
}
int cuptiGetResultString(int, const char** text) {
  *text = "no CUPTI in the stand-in";
  return 0;
}

}  // extern "C"
