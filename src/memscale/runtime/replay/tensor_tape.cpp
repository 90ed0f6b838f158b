#include "memscale/runtime/replay/tensor_tape.h"

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <mutex>
#include <optional>

#include "memscale/runtime/observe/autograd_facts.h"
#include "memscale/runtime/observe/call_facts.h"
#include "memscale/runtime/observe/op_info.h"
#include "memscale/runtime/observe/tensor_kinds.h"
#include "memscale/runtime/observe/unobserved.h"
#include "memscale/runtime/observe/unseen_writes.h"
#include "memscale/runtime/replay/op_timer.h"
#include "memscale/runtime/replay/saved_tensor.h"

namespace memscale {
namespace {

// Keys of what stands between a call and its kernel: dispatch modes and vmap.
constexpr c10::DispatchKeySet kModes =
    c10::python_ks |
    c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                         c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                         c10::DispatchKey::FuncTorchVmapMode,
                         c10::DispatchKey::VmapMode});

std::uint8_t float_bytes(const c10::TensorImpl& tensor) {
  switch (c10::typeMetaToScalarType(tensor.dtype())) {
    case c10::kHalf:
    case c10::kBFloat16:
      return 2;
    case c10::kFloat:
      return 4;
    case c10::kDouble:
      return 8;
    default:
      return 0;
  }
}

// Of a plain tensor.
TensorUse use_of(const c10::TensorImpl& tensor) {
  const c10::StorageImpl* storage =
      tensor.unsafe_storage().unsafeGetStorageImpl();
  return {.storage = key_of(storage),
          .tensor = reinterpret_cast<TensorKey>(&tensor),
          .bytes = static_cast<std::int64_t>(storage->nbytes()),
          .is_foreign = storage->allocator() == nullptr,
          .on_cpu = storage->device().is_cpu(),
          .float_bytes = float_bytes(tensor)};
}

std::vector<TensorUse> uses_of(c10::ArrayRef<at::Tensor> tensors) {
  std::vector<TensorUse> uses;
  for (const at::Tensor& tensor : tensors) {
    uses.push_back(use_of(*tensor.unsafeGetTensorImpl()));
    uses.back().is_leaf = !has_history(tensor);
    uses.back().changes_in_backward = is_changed_in_backward(tensor);
  }
  return uses;
}

bool is_work_worth_keeping(const OpInfo& info,
                           c10::ArrayRef<const c10::IValue> inputs) {
  const ReplayRules& rules = info.rules;
  if (rules.work == Work::Little && !rules.slow_on_cpu) return false;
  const bool on_cpu = !inputs.empty() && inputs[0].isTensor() &&
                      inputs[0].toTensor().defined() &&
                      inputs[0].toTensor().is_cpu();
  std::optional<Factor> factor;
  if (rules.factor < inputs.size() && inputs[rules.factor].isTensor() &&
      inputs[rules.factor].toTensor().defined()) {
    const at::Tensor& tensor = inputs[rules.factor].toTensor();
    const c10::IntArrayRef sizes =
        tensor.unsafeGetTensorImpl()->sizes_default();
    factor = Factor{{sizes.data(), sizes.size()},
                    static_cast<std::int64_t>(tensor.element_size())};
  }
  return is_expensive(rules, on_cpu, factor);
}

std::optional<at::Generator> find_generator(
    const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs) {
  if (info.generator && inputs[*info.generator].isGenerator()) {
    const at::Generator given = inputs[*info.generator].toGenerator();
    if (given.defined()) return given;
  }
  c10::Device device = c10::kCPU;
  bool found = false;
  for (const c10::IValue& input : inputs) {
    for_each_tensor(input, [&](const at::Tensor& tensor) {
      if (!found) device = tensor.device();
      found = true;
    });
    if (!found && input.isDevice()) device = input.toDevice();
  }
  if (device.type() == c10::kMeta) return std::nullopt;
  return at::globalContext().defaultGenerator(device);
}

}  // namespace

// Has the tape for itself; ops called meanwhile are our own, and no mode that
// is on, in backward say, sees or changes them.
class TensorTape::Scope final {
 public:
  explicit Scope(TensorTape& tape) : access_(tape.locked_) {}
  Scope(TensorTape& tape, std::try_to_lock_t dont_wait)
      : access_(tape.locked_, dont_wait) {}
  explicit operator bool() const { return static_cast<bool>(access_); }
  Tape* operator->() const { return access_.operator->(); }

 private:
  const Unobserved unobserved_;
  const c10::impl::ExcludeDispatchKeyGuard without_modes_{kModes};
  const LockedTape::Access access_;
};

TensorTape::TensorTape(TapeRules rules, std::shared_ptr<ReplayStats> stats)
    : rules_(std::move(rules)),
      stats_(std::move(stats)),
      bytes_(*this, stats_),
      locked_(rules_, bytes_) {}

TensorTape::~TensorTape() = default;

// ---- forward ----

OpUse TensorTape::describe(const OpInfo& info,
                           c10::ArrayRef<const c10::IValue> inputs,
                           bool in_function) {
  CallFacts facts = call_facts(info, inputs);
  facts.in_function = in_function;
  facts.in_mode = is_in_dispatch_mode();
  uses_.clear();
  written_.clear();
  std::vector<TensorCall::Reference>& references = bytes_.call().references;
  const bool writes_all = info.may_write || facts.in_mode;
  for_each_use(info, inputs, writes_all,
               [&](const at::Tensor& tensor, std::size_t argument,
                   std::int32_t element, Access access) {
                 const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
                 if (!is_plain(*impl)) {
                   facts.all_plain = false;
                   return;
                 }
                 if (!info.is_view) {
                   references.push_back({static_cast<std::uint32_t>(argument),
                                         element, Geometry(*impl)});
                 }
                 if (access != Access::Read) {
                   written_.push_back(alias_of(tensor));
                   impl = written_.back().unsafeGetTensorImpl();
                 }
                 TensorUse& use = uses_.emplace_back(use_of(*impl));
                 use.access = access;
                 use.is_leaf = !has_history(tensor);
                 use.changes_in_backward = is_changed_in_backward(tensor);
               });
  return {.name = info.name,
          .rules = &info.rules,
          .why = why_not(info.rules, facts,
                         target_of(info, inputs, rules_.as_cuda)),
          .expensive = is_work_worth_keeping(info, inputs),
          .is_view = info.is_view,
          .holds = c10::GradMode::is_enabled() && !in_function,
          .tensors = uses_};
}

// All that is not a tensor.
void TensorTape::fill_call(const OpInfo& info,
                           c10::ArrayRef<const c10::IValue> inputs) {
  TensorCall& call = bytes_.call();
  call.op = &info;
  call.arguments.resize(inputs.size());
  call.grad_mode = c10::GradMode::is_enabled();
  call.default_type = c10::get_default_dtype();
  call.kernel_flags = kernel_flags();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const c10::IValue& input = inputs[i];
    if (input.isTensor()) {
      if (!input.toTensor().defined()) call.arguments[i] = input;
      continue;
    }
    if (input.isList()) {
      const c10::ArrayRef<c10::IValue> elements = input.toListRef();
      const bool of_tensors =
          std::ranges::any_of(elements, [](const c10::IValue& element) {
            return element.isTensor() || element.isNone();
          });
      if (of_tensors) {
        call.lists.push_back({static_cast<std::uint32_t>(i),
                              static_cast<std::uint32_t>(elements.size()),
                              !input.isTensorList()});
        continue;
      }
    }
    // A generator is given anew, in the state of its own.
    if (!input.isGenerator()) call.arguments[i] = input;
  }
}

void TensorTape::begin_op(const OpInfo& info,
                          c10::ArrayRef<const c10::IValue> inputs,
                          bool in_function) {
  const Scope tape(*this);
  op_ = &info;
  bytes_.call().clear();
  OpUse use = describe(info, inputs, in_function);
  if (use.why == Why::Replayed && !info.is_view) {
    fill_call(info, inputs);
    if (info.random) {
      std::optional<at::Generator> generator = find_generator(info, inputs);
      if (generator) {
        // Cloning reads the state: not while another thread draws from it.
        const std::lock_guard guard(generator->mutex());
        bytes_.call().generator = generator->clone();
      } else {
        use.why = Why::Arguments;
      }
    }
  }
  bytes_.set_maker(nullptr);
  tape->begin_op(use);
}

void TensorTape::end_op(c10::ArrayRef<c10::IValue> outputs,
                        std::size_t num_expected) {
  const Scope tape(*this);
  if (!tape->op_is_running()) return;
  ++stats_->ops_recorded;
  uses_.clear();
  for (const c10::IValue& output : outputs) {
    for_each_result(output, [&](const at::Tensor& tensor) {
      const bool plain =
          tensor.defined() && is_plain(*tensor.unsafeGetTensorImpl());
      uses_.push_back(plain ? use_of(*tensor.unsafeGetTensorImpl())
                            : TensorUse());
    });
  }
  const bool followed = tape->follows_keep_set();
  bytes_.set_maker(op_);
  tape->end_op(uses_, outputs.size() != num_expected);
  if (followed && !tape->follows_keep_set()) ++stats_->calls_unlike_keep_set;
  bytes_.set_maker(nullptr);
  bytes_.call().clear();
  written_.clear();
}

void TensorTape::add_view(c10::ArrayRef<const c10::IValue> inputs) {
  const Scope tape(*this);
  ++stats_->ops_recorded;
  bytes_.set_maker(nullptr);
  for (const c10::IValue& input : inputs) {
    for_each_tensor(input, [&](const at::Tensor& tensor) {
      const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
      if (!is_plain(impl)) return;
      TensorUse base = use_of(impl);
      base.is_leaf = !has_history(tensor);
      base.changes_in_backward = is_changed_in_backward(tensor);
      tape->add_view(base, c10::GradMode::is_enabled());
    });
  }
}

void TensorTape::begin_function(c10::ArrayRef<at::Tensor> arguments) {
  const Scope tape(*this);
  bytes_.set_maker(nullptr);
  tape->begin_function(uses_of(arguments));
}

void TensorTape::end_function(c10::ArrayRef<at::Tensor> arguments) {
  const Scope tape(*this);
  bytes_.set_maker(nullptr);
  tape->end_function(uses_of(arguments));
}

bool TensorTape::decide(const at::Tensor& tensor,
                        const std::shared_ptr<SavedTensor>& save) {
  const Scope tape(*this, std::try_to_lock);
  if (!tape) {
    ++stats_->saves_kept;
    return false;
  }
  return tape->decide(bytes_.add_save(save), key_of(storage_of(tensor)));
}

void TensorTape::add_output(StorageKey storage) {
  Scope(*this)->add_output(storage);
}

void TensorTape::decide_again() { Scope(*this)->decide_again(); }

void TensorTape::cross_border() { Scope(*this)->cross_border(); }

bool TensorTape::spans_layers() { return Scope(*this)->spans_layers(); }

std::vector<TensorTape::Claimed> TensorTape::close() {
  const Scope tape(*this);
  std::vector<Claimed> claims;
  for (const Tape::Claim& claim : tape->close()) {
    claims.push_back(
        {claim.storage, claim.state, bytes_.original(claim.state)});
  }
  written_.clear();
  bytes_.close();
  return claims;
}

// ---- between tapes ----

void TensorTape::before_write(StateId state) {
  Scope(*this)->before_write(state);
}

void TensorTape::write_aside(StorageKey storage) {
  Scope(*this)->write_aside(storage);
}

bool TensorTape::needs_original(StateId state) {
  const Scope tape(*this, std::try_to_lock);
  return !tape || tape->needs_original(state);  // false: it is being replayed
}

void TensorTape::offer(StateId state) {
  if (const Scope tape(*this, std::try_to_lock); tape) tape->offer(state);
}

// ---- backward ----

at::Tensor TensorTape::materialise(StateId state, const Geometry& geometry) {
  const Scope tape(*this);
  if (!bytes_.is_changed(state) && !tape->has_bytes(state)) {
    const ReplayClock clock(*stats_, bytes_.device(state));
    tape->ensure(state);
  }
  return bytes_.tensor(state, geometry);
}

c10::Device TensorTape::device_of(StateId state) {
  const Scope tape(*this);
  return bytes_.device(state);
}

}  // namespace memscale
