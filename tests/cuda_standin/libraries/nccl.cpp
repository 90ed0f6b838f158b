// libnccl: the version only, which torch asks for when it is imported.

extern "C" {

int ncclGetVersion(int* version) {
  *version = 22907;
  return 0;
}
const char* ncclGetErrorString(int) { return "no NCCL in the stand-in"; }
const char* ncclGetLastError(void*) { return "no NCCL in the stand-in"; }

}  // extern "C"
