#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "memscale/base/bytes.h"
#include "memscale/core/plan/forecast.h"
#include "memscale/core/plan/question.h"
#include "memscale/core/solver/solver.h"
#include "memscale/core/tape/tape_rules.h"

namespace memscale {

// What each layer can do, and what that comes to, as a problem for the solver.
//
// Note [Layers add up]
// A layer's choice changes what is held from its forward to its backward, and
// what its own backward takes beside; nothing else. So each kind of choice is
// predicted once, for all layers at a time (their first choices, their second
// ones, ...), and taken apart by layer. What is not so (a lineage that crosses
// a border, branches whose backwards overlap) shows in the forecast of the
// mixture, which is what counts: see Note [A larger budget is never slower].
class LayerChoices final {
 public:
  explicit LayerChoices(const Question& question);

  // Bytes and times by layer; budgets are for the caller to set.
  const Problem& problem() const { return problem_; }

  // Rules by LayerId, for a choice by the problem's layers.
  std::vector<TapeRules> rules(std::span<const std::size_t> choice) const;

 private:
  struct Chooser {
    LayerId layer;
    std::vector<TapeRules> options;  // fewest bytes first; the last keeps all
  };

  void find_choosers();
  void measure();
  std::vector<TapeRules> at_level(std::size_t level) const;

  const Question& question_;
  std::vector<Chooser> choosers_;  // in the order of forward
  TapeRules others_;               // of layers without a choice
  Problem problem_;
};

}  // namespace memscale
