#pragma once

#include <cstddef>
#include <vector>

#include "memscale/base/ids.h"
#include "memscale/core/trace.h"

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
  // Whether backward computes something for the op.
  std::vector<bool> has_gradient;

 private:
  void find_let_go(const Trace& trace);
  void find_saves(const Trace& trace);
  void find_asked(const Trace& trace);
};

// Which layer calls which, as far as names and ops tell: around a layer is the
// innermost one that its name is inside of and that has ops of its own (a list
// of modules is never called), else the model.
class LayerTree final {
 public:
  explicit LayerTree(const Trace& trace);

  // The layer that runs between two that neither calls the other: the one that
  // calls both. Invalid if one of them is around the other.
  LayerId between(LayerId a, LayerId b) const;

 private:
  std::vector<LayerId> around_;  // by layer; invalid: the model
};

}  // namespace memscale
