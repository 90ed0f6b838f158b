#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "memscale/base/bytes.h"
#include "memscale/base/dtype.h"
#include "memscale/base/enum_names.h"
#include "memscale/base/ids.h"

// A training step as data: every op in the order it ran, what it read and
// wrote, which bytes stood behind that, and when each of them was let go.
// Plain values: copyable, comparable, no torch, no threads.

namespace memscale {

enum class Phase : std::uint8_t { Forward, Backward, Optimizer };

template <>
struct EnumNames<Phase> {
  static constexpr std::string_view kWhat = "phase";
  static constexpr Phase kLast = Phase::Optimizer;
  static constexpr std::array kTable = {
      EnumName{Phase::Forward, "forward"},
      EnumName{Phase::Backward, "backward"},
      EnumName{Phase::Optimizer, "optimizer"}};
};

// Whose memory: that of the device the step runs on, or the host's beside it.
// If the step runs on the CPU, that is the device, and nothing is on the host.
enum class Place : std::uint8_t { Device, Host };

template <>
struct EnumNames<Place> {
  static constexpr std::string_view kWhat = "place";
  static constexpr Place kLast = Place::Host;
  static constexpr std::array kTable = {EnumName{Place::Device, "device"},
                                        EnumName{Place::Host, "host"}};
};

// Why bytes are held.
enum class Category : std::uint8_t {
  Parameter,
  Buffer,
  Input,
  Gradient,        // of a parameter, kept for the optimizer
  OptimizerState,  // lives from step to step
  Activation,      // made in forward, still held when backward begins
  Recompute,       // made again in backward, by replay
  Transient,       // everything else, kernels' workspaces included
};

template <>
struct EnumNames<Category> {
  static constexpr std::string_view kWhat = "category";
  static constexpr Category kLast = Category::Transient;
  static constexpr std::array kTable = {
      EnumName{Category::Parameter, "parameters"},
      EnumName{Category::Buffer, "buffers"},
      EnumName{Category::Input, "inputs"},
      EnumName{Category::Gradient, "gradients"},
      EnumName{Category::OptimizerState, "optimizer_state"},
      EnumName{Category::Activation, "activations"},
      EnumName{Category::Recompute, "recompute"},
      EnumName{Category::Transient, "transients"}};
};

inline constexpr std::size_t kNumCategories =
    EnumNames<Category>::kTable.size();

// The bytes behind values. Lifetimes are in ops: a storage is held while every
// op from `born` to `freed` runs, both included; it is let go before the next
// op begins.
struct Storage {
  Bytes bytes;             // as asked for, before an allocator's rounding
  std::int64_t count = 1;  // stands for so many alike (optimizer steps)
  Place place = Place::Device;
  Category category = Category::Transient;
  LayerId layer{};  // that made it or owns it; invalid: outside of all layers
  OpId born{};      // invalid: there before the step
  OpId freed{};     // invalid: there after the step
  // The last op at which the program itself held it: from then on it was only
  // saved for backward. Invalid: as `freed`, or nobody looked.
  OpId let_go{};
  bool returned = false;  // among what the model's call returns
  // What `freed` would be at least if the program did not forget it sooner
  // (keys and values in a cache that nobody reads). Invalid: it is not
  // forgotten.
  OpId plain_freed{};

  bool operator==(const Storage&) const = default;
};

// A tensor that an op read or returned: a view of a storage, at one version.
struct Value {
  StorageId storage;  // invalid: unknown (sparse, nested, a wrapper of others)
  Dtype dtype = Dtype::Float32;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  std::int64_t offset = 0;    // in elements
  std::uint32_t version = 0;  // counts in-place writes of the storage

  std::int64_t numel() const;
  bool operator==(const Value&) const = default;
};

// How an op uses the storage of a tensor that it is given.
enum class Access : std::uint8_t {
  Read,
  Update,     // reads it, and writes into it
  Overwrite,  // writes all of it, whatever was there
  Scratch,    // writes into it what none of its results depends on
};

template <>
struct EnumNames<Access> {
  static constexpr std::string_view kWhat = "access";
  static constexpr Access kLast = Access::Scratch;
  static constexpr std::array kTable = {
      EnumName{Access::Read, "read"}, EnumName{Access::Update, "update"},
      EnumName{Access::Overwrite, "overwrite"},
      EnumName{Access::Scratch, "scratch"}};
};

struct Use {
  Access access = Access::Read;
  bool is_leaf = false;  // no op that autograd knows made the tensor

  bool operator==(const Use&) const = default;
};

// One call of the dispatcher, at the level of autograd.
struct Op {
  std::string name;  // "aten::addmm", with the overload: "aten::add.Tensor"
  Phase phase = Phase::Forward;
  LayerId layer;  // invalid: outside of all layers
  OpId forward;   // of a backward op: the op whose gradient it computes
  std::vector<ValueId> inputs;   // tensors only; absent ones are left out
  std::vector<ValueId> outputs;  // of an in-place op: the new version
  // Of a forward op: by input, how it is used. Empty: all are read, and
  // autograd made them.
  std::vector<Use> uses;
  bool random = false;       // draws from a generator
  bool mutates = false;      // writes into an input
  bool view = false;         // returns its input's bytes, computes nothing
  bool opaque = false;       // a kernel that torch does not know from inside
  bool in_function = false;  // inside a custom autograd.Function
  // It may have written every tensor that it was given, whatever its schema
  // says: see Note [Unseen writes].
  bool may_write = false;
  // It ran in forward with gradients switched off.
  bool no_grad = false;
  // By its schema all its results are views of its inputs, and it writes none.
  bool aliases = false;
  bool accumulates = false;  // its argument `accumulate` is true
  bool transposed = false;   // its argument `transposed` is true
  // A copy from the device to the host that nobody has waited for.
  bool not_waited_for = false;

  Use use(std::size_t input) const {
    return uses.empty() ? Use() : uses[input];
  }
  std::int64_t flops = 0;  // multiply and add are two
  Bytes moved;             // read and written, at least
  Bytes workspace;  // a kernel's own scratch while it runs, on its device
  // False: nobody knows the workspace; `workspace` is then zero.
  bool workspace_known = false;
  // How long it takes, if that was measured; 0: not known.
  std::int64_t nanoseconds = 0;

  bool operator==(const Op&) const = default;
};

// "The gradient of `op` needs `value`", until the op `released` has run.
struct Save {
  OpId op{};  // invalid: saved before the first op
  ValueId value;
  OpId released{};  // invalid: held beyond the step
  // A custom autograd.Function saved it: autograd itself holds it, always.
  bool by_function = false;

  bool operator==(const Save&) const = default;
};

struct Layer {
  std::string name;  // as named_modules() has it: "transformer.h.0"

  bool operator==(const Layer&) const = default;
};

// What happens in forward between two ops.
struct Event {
  enum class Kind : std::uint8_t {
    EnterLayer,
    LeaveLayer,
    EnterFunction,  // a custom autograd.Function begins
    LeaveFunction,
  };
  Kind kind = Kind::EnterLayer;
  std::size_t op = 0;    // so many ops ran before
  LayerId layer{};       // that is entered or left
  bool no_grad = false;  // gradients are off where a layer is entered
  // The tensors that a Function may write: see Note [Unseen writes].
  std::vector<ValueId> values{};

  bool operator==(const Event&) const = default;
};

template <>
struct EnumNames<Event::Kind> {
  static constexpr std::string_view kWhat = "kind of event";
  static constexpr Event::Kind kLast = Event::Kind::LeaveFunction;
  static constexpr std::array kTable = {
      EnumName{Event::Kind::EnterLayer, "enter_layer"},
      EnumName{Event::Kind::LeaveLayer, "leave_layer"},
      EnumName{Event::Kind::EnterFunction, "enter_function"},
      EnumName{Event::Kind::LeaveFunction, "leave_function"}};
};

struct Trace {
  std::vector<Layer> layers;
  std::vector<Op> ops;
  std::vector<Event> events;  // in the order of their ops
  std::vector<Value> values;
  std::vector<Storage> storages;
  std::vector<Save> saves;
  bool saves_known = true;         // false: traced without saved-tensor hooks
  std::vector<std::string> notes;  // what is unknown or approximated, for users

  const Layer& at(LayerId id) const { return layers.at(id.index()); }
  const Op& at(OpId id) const { return ops.at(id.index()); }
  const Value& at(ValueId id) const { return values.at(id.index()); }
  const Storage& at(StorageId id) const { return storages.at(id.index()); }

  // Throws TraceError naming the first place where an id points nowhere, a
  // lifetime ends before it begins, or a size is negative.
  void check() const;

  bool operator==(const Trace&) const = default;
};

}  // namespace memscale
