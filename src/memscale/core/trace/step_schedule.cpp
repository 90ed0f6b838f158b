#include "memscale/core/trace/step_schedule.h"

#include <algorithm>

namespace memscale {
namespace {

bool is_forward(const Trace& trace, OpId op) {
  return trace.at(op).phase == Phase::Forward;
}

// The last forward op that reads or writes a storage, by storage.
std::vector<OpId> last_uses(const Trace& trace) {
  std::vector<OpId> last(trace.storages.size());
  for (std::size_t i = 0; i < trace.ops.size(); ++i) {
    const Op& op = trace.ops[i];
    if (op.phase != Phase::Forward) continue;
    for (const auto* values : {&op.inputs, &op.outputs}) {
      for (const ValueId value : *values) {
        const StorageId id = trace.at(value).storage;
        if (id.valid()) last[id.index()] = OpId(i);
      }
    }
  }
  return last;
}

}  // namespace

StepSchedule::StepSchedule(const Trace& trace)
    : saves(trace.ops.size()),
      asked(trace.ops.size()),
      released(trace.ops.size()),
      let_go(trace.ops.size()) {
  find_let_go(trace);
  find_saves(trace);
  find_asked(trace);
}

void StepSchedule::find_let_go(const Trace& trace) {
  const std::vector<OpId> last = last_uses(trace);
  for (std::size_t i = 0; i < trace.storages.size(); ++i) {
    const Storage& storage = trace.storages[i];
    if (!storage.born.valid()) continue;
    OpId end = storage.freed;
    if (is_forward(trace, storage.born)) {
      if (storage.let_go.valid()) {
        end = storage.let_go;
      } else if (end.valid() && last[i].valid()) {
        // Nobody looked: as if no variable outlived its last use.
        end = std::clamp(last[i], storage.born, end);
      }
    }
    if (end.valid()) let_go[end.index()].push_back(i);
  }
}

void StepSchedule::find_saves(const Trace& trace) {
  for (std::size_t i = 0; i < trace.saves.size(); ++i) {
    const Save& save = trace.saves[i];
    if (save.op.valid()) saves[save.op.index()].push_back(i);
    if (save.released.valid()) released[save.released.index()].push_back(i);
  }
}

// Autograd's node asks for all that it saved before its first op. A node that
// cannot be told by its op (a custom Function's) is the one that ran just
// before the save was let go.
void StepSchedule::find_asked(const Trace& trace) {
  std::vector<OpId> first_of(trace.ops.size());
  for (std::size_t i = trace.ops.size(); i-- > 0;) {
    const Op& op = trace.ops[i];
    if (op.phase == Phase::Backward && op.forward.valid()) {
      first_of[op.forward.index()] = OpId(i);
    }
  }
  for (std::size_t i = 0; i < trace.saves.size(); ++i) {
    const Save& save = trace.saves[i];
    if (!save.op.valid() || !is_forward(trace, save.op)) continue;
    OpId first = first_of[save.op.index()];
    if (!first.valid() || save.released < first) {
      // One that never ran asks for nothing.
      if (!save.released.valid() || is_forward(trace, save.released)) continue;
      std::size_t begin = save.released.index();
      const Op& last = trace.ops[begin];
      const auto is_of_node = [&](const Op& op) {
        return op.phase == last.phase && op.layer == last.layer &&
               op.forward == last.forward;
      };
      while (begin > 0 && is_of_node(trace.ops[begin - 1])) --begin;
      first = OpId(begin);
    }
    asked[first.index()].push_back(i);
  }
}

}  // namespace memscale
