#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "memscale/core/ops/op_name.h"

// All that MemScale knows of an operator by its name is in one row of one
// table. To teach it a new operator, add a row to op_table.cpp.

namespace memscale {

namespace flops {
class Shapes;
}
namespace scratch {
struct Call;
}
// Nothing where the call does not fit the formula: see flops.h and
// workspace/formulas.h.
using FlopsFormula = std::optional<std::int64_t> (*)(const flops::Shapes&);
using WorkspaceFormula = std::optional<std::int64_t> (*)(const scratch::Call&);

// How much work is in an element of an op's results, by kind of op.
enum class Work : std::uint8_t {
  Little,       // a few passes over the bytes
  Much,         // much, whatever the arguments are
  Matmul,       // as the inner dimension: the last of the argument `factor`
  Convolution,  // as the size of a filter of the weight, the argument `factor`
};

// Which of a card's libraries torch gives the op to. Their settings apply to
// it: TF32, and whether cuDNN may time its algorithms.
enum class Library : std::uint8_t { Other, Blas, Convolution, Recurrence };

// Whether sums, and writes to one place, have a fixed order.
enum class Order : std::uint8_t {
  Fixed,
  OpenOnCuda,  // not on CUDA
  Open,        // on no device with several threads
};

// What an op draws from a random generator.
enum class Draws : std::uint8_t { Nothing, Numbers, Bits };

// What is known of an operator. A fact holds for all overloads, in place or
// not, unless its comment says otherwise: see Note [Names of operators].
struct OpRow {
  std::string_view name;  // the base name in namespace aten

  Work work = Work::Little;
  std::uint8_t factor = 0;
  // The time on one core of a CPU, for each element of the largest result,
  // where that is more than reading and writing the bytes takes; else 0.
  std::int32_t cpu_picoseconds = 0;
  Library library = Library::Other;
  Order order = Order::Fixed;
  Draws draws = Draws::Nothing;

  // Why it must not be called a second time, for users. Empty if it may be.
  std::string_view never{};
  // The same for the operator in place only.
  std::string_view never_in_place{};
  // It makes memory that something the dispatcher cannot see may fill: raw
  // pointers, kernels of other libraries.
  bool factory = false;
  // In place, it writes every element of its tensors and reads none of them. So
  // does every overload with `out`, which needs no row for that.
  bool overwrites = false;
  // It updates running statistics that its other results do not depend on, if
  // its argument "training" is true or absent. The schema does not always say.
  bool updates_statistics = false;
  // The result that holds indices into a plane of the first argument.
  std::optional<std::uint8_t> indices{};
  // Its results are views of its arguments, or no tensors at all.
  bool makes_nothing = false;
  // A scalar result without an overload keeps the bytes of all elements'
  // losses.
  bool keeps_unreduced = false;
  // The overload with which gradient formulas fill new zeros: in place, except
  // for tensors with a Python subclass.
  std::optional<std::string_view> fills_zeros{};

  // The formulas. Without one, an op counts as one flop for each element of its
  // largest result, and its workspace is unknown.
  FlopsFormula flops = nullptr;
  WorkspaceFormula workspace = nullptr;
  // What an output, the last one, holds for backward, though a fake tensor
  // reports it as empty.
  WorkspaceFormula reserve = nullptr;

  // Whether its CPU kernel is so slow that its results are worth keeping, where
  // a matrix product of a hundred factors takes as long. Random numbers are
  // not: they are drawn again, or kept as bits.
  constexpr bool is_slow_on_cpu() const {
    return cpu_picoseconds >= 2400 && draws == Draws::Nothing;
  }
};

// The row of an operator, or that of its family ("_foreach_*"), or an empty
// row. An operator of another namespace gets a row that forbids to call it
// again; torchvision's ones get an empty row.
const OpRow& find_op_row(const OpName& name);
inline const OpRow& find_op_row(std::string_view name) {
  return find_op_row(OpName::of(name));
}

// All rows, sorted by name.
std::span<const OpRow> op_rows();

// What the row of an operator says, in words: "addmm: matmul by argument 1,
// BLAS, flops, workspace".
std::string describe(const OpRow& row);

}  // namespace memscale
