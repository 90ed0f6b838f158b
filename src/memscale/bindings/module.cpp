#include <torch/csrc/utils/pybind.h>

#include "memscale/bindings/bindings.h"

PYBIND11_MODULE(_C, m) {
  memscale::bind_errors(m);
  memscale::bind_core(m);
  memscale::bind_runtime(m);
  memscale::bind_trace(m);
  memscale::bind_recorder(m);
  memscale::bind_replay(m);
  memscale::bind_plan(m);
  memscale::bind_decision(m);
  memscale::bind_session(m);
  memscale::bind_solver(m);
  memscale::bind_copies(m);
  memscale::bind_modules(m);
}
