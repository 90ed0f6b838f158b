// libnvidia-ml: whose memory it is when a card runs out, for torch's message.

extern "C" {

int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** out) {
  static int device = 0;
  *out = &device;
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return 0;
}

}  // extern "C"
