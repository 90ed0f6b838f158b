#include <cstddef>
#include <cstdint>

#include "plan_json_target.h"

// `make fuzz`. An exception that leaves it is a finding.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  memscale::try_plan_json({reinterpret_cast<const char*>(data), size});
  return 0;
}
