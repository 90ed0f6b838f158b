#pragma once

#include <cstddef>
#include <vector>

#include "memscale/base/ids.h"
#include "memscale/core/trace/trace.h"

namespace memscale {

// What happens around each op of a step, read off its trace once. Entries are
// indices, by op.
struct StepSchedule {
  using ByOp = std::vector<std::vector<std::size_t>>;

  explicit StepSchedule(const Trace& trace);

  ByOp saves;     // made by the op
  ByOp asked;     // saves that backward asks for before the op
  ByOp released;  // saves, after the op
  // Storages that the program lets go of after the op: from then on only saves
  // hold them. Of what backward makes: where they are freed.
  ByOp let_go;

 private:
  void find_let_go(const Trace& trace);
  void find_saves(const Trace& trace);
  void find_asked(const Trace& trace);
};

}  // namespace memscale
