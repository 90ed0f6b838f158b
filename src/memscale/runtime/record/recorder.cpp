#include "memscale/runtime/record/recorder.h"

#include <ATen/Parallel.h>
#include <ATen/SequenceNumber.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "memscale/base/error.h"
#include "memscale/core/ops/op_facts.h"
#include "memscale/runtime/observe/autograd_facts.h"
#include "memscale/runtime/observe/call_facts.h"
#include "memscale/runtime/observe/memory_tracker.h"
#include "memscale/runtime/observe/tensor_kinds.h"
#include "memscale/runtime/observe/unobserved.h"
#include "memscale/runtime/observe/unseen_writes.h"

namespace memscale {
namespace {

constexpr std::string_view kSlotName = "MEMSCALE_RECORDER";
const c10::DebugInfoKind kSlot(&kSlotName);

// How deep this thread is inside recorded ops, backward nodes and custom
// Functions. They are of the thread, not of a recorder: a recorder starts and
// stops at depth zero.
thread_local int leaf_depth = 0;
thread_local int node_depth = 0;
thread_local int function_depth = 0;

Recorder* current_recorder() {
  return static_cast<Recorder*>(c10::ThreadLocalDebugInfo::get(kSlot));
}

}  // namespace

bool Recorder::is_in_function() { return function_depth > 0; }

struct Recorder::OpContext final : at::ObserverContext {
  enum class Kind { Op, Recomputed, Node, Function };
  explicit OpContext(Kind what) : kind(what) {}
  const Kind kind;
  const OpInfo* info = nullptr;
  std::vector<StorageId> written;
  std::unique_ptr<MemoryTracker> tracker;
  std::vector<at::Tensor> arguments;  // of a recomputed op, or of a Function
  StorageId accumulated;  // the op adds to this storage in place of a new one
};

std::shared_ptr<Recorder> Recorder::make(c10::Device device, IsFake is_fake,
                                         bool fake_run) {
  return std::shared_ptr<Recorder>(new Recorder(device, is_fake, fake_run));
}

Recorder::Recorder(c10::Device device, IsFake is_fake, bool fake_run)
    : device_(device),
      leaf_ops_(device, is_fake),
      is_fake_(is_fake),
      is_fake_run_(fake_run) {}

Recorder::~Recorder() = default;

void Recorder::start() {
  const Recorder* const other = current_recorder();
  if (other != nullptr && !other->is_abandoned_) {
    throw TraceError("this thread is being recorded already");
  }
  forward_thread_ = std::this_thread::get_id();
  c10::ThreadLocalDebugInfo::_push(kSlot, shared_from_this());
  handle_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&Recorder::on_start, &Recorder::on_end)
          .needsInputs(true)
          .needsOutputs(true)
          .scopes(
              {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
}

bool Recorder::observes_here() const { return current_recorder() == this; }

void Recorder::set_replayed() {
  const std::lock_guard lock(mutex_);
  replayed_ = true;
}

void Recorder::stop() {
  if (!handle_) return;
  at::removeCallback(*handle_);
  handle_.reset();
  c10::ThreadLocalDebugInfo::_pop(kSlot);
  const std::lock_guard lock(mutex_);
  find_dead();
}

void Recorder::abandon() {
  is_abandoned_ = true;
  pause();
  const std::lock_guard lock(mutex_);
  finished_ = true;
  let_go_of_all();
}

// Saves may outlive the recording, and they hold the recorder.
void Recorder::let_go_of_all() {
  storage_ids_.clear();
  watched_.clear();
  parked_.clear();
  residents_.clear();
}

bool Recorder::has_saves() {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(
      holders_, [](const Holders& held) { return held.saves > 0; });
}

// ---- observing ----

// Callbacks run inside torch's dispatcher: what goes wrong in them must not get
// out. The recording ends there, and finish() tells why.
template <typename F>
void Recorder::guarded(const F& work) noexcept {
  try {
    work();
  } catch (const std::exception& error) {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = error.what();
    pause();
  }
}

std::unique_ptr<at::ObserverContext> Recorder::on_start(
    const at::RecordFunction& fn) {
  using Kind = OpContext::Kind;
  if (leaf_depth > 0 || Unobserved::is_on()) return nullptr;
  Recorder* recorder = current_recorder();
  if (recorder == nullptr || recorder->paused_ > 0) return nullptr;
  if (fn.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    ++node_depth;
    recorder->guarded([&] { recorder->begin_node(fn.seqNr()); });
    return std::make_unique<OpContext>(Kind::Node);
  }
  const OpInfo* info = find_op_info(fn);
  if (info == nullptr) {
    if (!is_custom_function(fn)) return nullptr;
    ++function_depth;
    auto context = std::make_unique<OpContext>(Kind::Function);
    for_each_unseen_write(fn, [&](const at::Tensor& tensor) {
      context->arguments.push_back(tensor);
    });
    recorder->guarded([&] { recorder->begin_function(context->arguments); });
    return context;
  }
  if (info->ignored || !recorder->leaf_ops_.contain(*info, fn)) return nullptr;
  const bool recomputed = recorder->recomputed_.has_value();
  auto context =
      std::make_unique<OpContext>(recomputed ? Kind::Recomputed : Kind::Op);
  context->info = info;
  if (recomputed) {
    // A RecordFunction's inputs are gone when its end is called.
    for (const c10::IValue& input : fn.inputs()) {
      for_each_tensor(input, [&](const at::Tensor& tensor) {
        context->arguments.push_back(tensor);
      });
    }
  } else {
    recorder->guarded([&] { recorder->begin_op(*info, fn, *context); });
  }
  ++leaf_depth;
  return context;
}

void Recorder::on_end(const at::RecordFunction& fn,
                      at::ObserverContext* context) {
  auto* const ours = static_cast<OpContext*>(context);
  if (ours == nullptr) return;
  Recorder* recorder = current_recorder();
  switch (ours->kind) {
    case OpContext::Kind::Node:
      --node_depth;
      return;
    case OpContext::Kind::Function:
      --function_depth;
      if (recorder == nullptr) return;
      recorder->guarded([&] { recorder->end_function(ours->arguments); });
      return;
    case OpContext::Kind::Op:
      --leaf_depth;
      if (recorder == nullptr) return;
      recorder->guarded([&] { recorder->end_op(fn, *ours); });
      return;
    case OpContext::Kind::Recomputed:
      --leaf_depth;
      if (recorder == nullptr) return;
      recorder->guarded([&] {
        recorder->end_recomputed_op(fn, *ours->info, ours->arguments);
      });
      return;
  }
}

void Recorder::begin_op(const OpInfo& info, const at::RecordFunction& fn,
                        OpContext& context) {
  const std::lock_guard lock(mutex_);
  find_dead();
  const c10::ArrayRef<const c10::IValue> inputs = fn.inputs();
  const bool is_forward = builder_.phase() == Phase::Forward;
  const CallFacts facts = call_facts(info, inputs);
  Op op;
  op.name = info.name;
  op.random = info.random;
  op.mutates = info.mutates;
  op.opaque = info.opaque;
  op.in_function = function_depth > 0;
  // A fake run is under a dispatch mode of our own.
  op.may_write = info.may_write || (!is_fake_run_ && is_in_dispatch_mode());
  op.no_grad = is_forward && !c10::GradMode::is_enabled();
  op.aliases = info.is_view;
  op.accumulates = facts.accumulates;
  op.transposed = facts.transposed;
  op.not_waited_for = facts.not_waited_for;
  for_each_use(
      info, inputs, op.may_write,
      [&](const at::Tensor& tensor, std::size_t, std::int32_t, Access access) {
        op.inputs.push_back(value_id(tensor));
        if (is_forward) {
          op.uses.push_back({access, !has_history(tensor)});
        }
      });
  // Nobody can tell a foreign kernel's workspace; where it really runs, see it.
  if (info.opaque && !is_fake_run_) {
    context.tracker = std::make_unique<MemoryTracker>(device_);
    context.tracker->start();
  }
  for_each_written(info, fn, [&](const at::Tensor& tensor) {
    const StorageId id = storage_id(*tensor.unsafeGetTensorImpl());
    if (id.valid()) context.written.push_back(id);
  });
  if (builder_.phase() == Phase::Backward) {
    op.forward = node_op_;
    if ((node_depth == 0 && accumulates_in_place(fn)) ||
        fills_new_zeros(info, op)) {
      context.accumulated = builder_.trace().at(op.inputs[0]).storage;
      op.mutates = true;
    }
  }
  const OpId id = builder_.begin_op(std::move(op));
  if (builder_.phase() == Phase::Forward &&
      std::this_thread::get_id() == forward_thread_) {
    numbered_.push_back({at::sequence_number::peek(), builder_.layer(), id});
  }
}

// See Note [Unseen writes].
void Recorder::end_function(const std::vector<at::Tensor>& arguments) {
  const std::lock_guard lock(mutex_);
  if (builder_.phase() != Phase::Forward) return;
  add_function(Event::Kind::LeaveFunction, arguments);
  for (const at::Tensor& tensor : arguments) {
    const StorageId id = storage_id(*tensor.unsafeGetTensorImpl());
    if (id.valid()) builder_.bump_version(id);
  }
}

void Recorder::begin_function(const std::vector<at::Tensor>& arguments) {
  const std::lock_guard lock(mutex_);
  if (builder_.phase() != Phase::Forward) return;
  find_dead();
  add_function(Event::Kind::EnterFunction, arguments);
}

void Recorder::add_function(Event::Kind kind,
                            const std::vector<at::Tensor>& arguments) {
  if (recomputed_ || builder_.op_is_running()) return;
  std::vector<ValueId> values;
  for (const at::Tensor& tensor : arguments) {
    values.push_back(value_id(tensor));
  }
  builder_.add_function(kind, std::move(values));
}

void Recorder::end_op(const at::RecordFunction& fn, OpContext& context) {
  const std::lock_guard lock(mutex_);
  if (!builder_.op_is_running()) return;  // its begin failed
  bool bare_meta = false;
  for (const c10::IValue& output : fn.outputs()) {
    for_each_tensor(output, [&](const at::Tensor& tensor) {
      bare_meta |= is_bare_meta(*tensor.unsafeGetTensorImpl());
    });
  }
  if (bare_meta) return cancel_op();
  for (const StorageId storage : context.written) {
    builder_.bump_version(storage);
  }
  if (context.accumulated.valid() && !fn.outputs().empty()) {
    builder_.bump_version(context.accumulated);
    for_each_tensor(fn.outputs().front(), [&](const at::Tensor& tensor) {
      watch(tensor.storage().unsafeGetStorageImpl(), context.accumulated);
    });
  }
  if (is_fake_run_ && builder_.phase() == Phase::Forward &&
      builder_.trace().ops.back().name == "aten::lift_fresh") {
    bind_lifted(fn);
  }
  std::vector<ValueId> outputs = value_ids(fn.outputs());
  // detach and the like: what comes out is, to us, what went in.
  const auto& inputs = builder_.trace().ops.back().inputs;
  const bool is_identity =
      !outputs.empty() && context.written.empty() &&
      !context.accumulated.valid() &&
      std::ranges::all_of(outputs, [&](ValueId output) {
        return builder_.trace().at(output).storage.valid() &&
               std::ranges::find(inputs, output) != inputs.end();
      });
  if (is_identity) return cancel_op();
  if (context.tracker != nullptr) {
    context.tracker->stop();
    builder_.set_workspace(
        Bytes(context.tracker->peak() -
              std::max(context.tracker->before(), context.tracker->current())));
  }
  builder_.end_op(std::move(outputs));
}

// What torch.tensor() made becomes a fake here, with a storage of its own. In a
// real run it stays as it is, and that is no op.
void Recorder::bind_lifted(const at::RecordFunction& fn) {
  const auto& inputs = builder_.trace().ops.back().inputs;
  if (inputs.size() != 1 || fn.outputs().size() != 1) return;
  const StorageId same = builder_.trace().at(inputs.front()).storage;
  if (!same.valid()) return;
  for_each_tensor(fn.outputs().front(), [&](const at::Tensor& tensor) {
    c10::StorageImpl* const impl = tensor.storage().unsafeGetStorageImpl();
    if (!storage_ids_.contains(impl)) watch(impl, same);
  });
}

void Recorder::end_recomputed_op(const at::RecordFunction& fn,
                                 const OpInfo& info,
                                 const std::vector<at::Tensor>& arguments) {
  const std::lock_guard lock(mutex_);
  find_dead();
  if (!recomputed_ || recomputed_->size() == 0 ||
      (!info.mutates && are_all_among(fn.outputs(), arguments))) {
    return;
  }
  const Op& first = builder_.trace().ops[recomputed_->begin];
  if (first.name != info.name) return;  // such as a bare meta tensor's
  ++recomputed_->begin;
  std::size_t place = 0;
  for (const c10::IValue& output : fn.outputs()) {
    for_each_tensor(output, [&](const at::Tensor& tensor) {
      if (place >= first.outputs.size()) return;
      const StorageId storage =
          builder_.trace().at(first.outputs[place++]).storage;
      c10::StorageImpl* impl = tensor.has_storage()
                                   ? tensor.storage().unsafeGetStorageImpl()
                                   : nullptr;
      if (impl == nullptr || !storage.valid() || storage_ids_.contains(impl)) {
        return;
      }
      watch(impl, storage);
    });
  }
}

void Recorder::begin_recompute(const LayerCall& call) {
  const std::lock_guard lock(mutex_);
  find_dead();
  recomputed_ = call.forward.ops;
}

void Recorder::end_recompute() {
  const std::lock_guard lock(mutex_);
  recomputed_.reset();
}

void Recorder::bind_same(const at::Tensor& stand_in, const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  const StorageId id = storage_id(*tensor.unsafeGetTensorImpl());
  if (id.valid()) watch(stand_in.storage().unsafeGetStorageImpl(), id);
}

void Recorder::cancel_op() {
  if (!numbered_.empty() && numbered_.back().op == builder_.last_op()) {
    numbered_.pop_back();
  }
  builder_.cancel_op();
}

void Recorder::begin_node(std::int64_t sequence_number) {
  const std::lock_guard lock(mutex_);
  builder_.set_phase(Phase::Backward);
  node_op_ = {};
  if (sequence_number < 0) return;  // AccumulateGrad: of the last one's layer
  const auto number = static_cast<std::uint64_t>(sequence_number);
  const auto after =
      std::ranges::upper_bound(numbered_, number, {}, &Numbered::number);
  if (after == numbered_.begin()) return;
  const Numbered& entry = *std::prev(after);
  builder_.set_layer(entry.layer);
  if (entry.number == number) node_op_ = entry.op;
}

Trace Recorder::finish() {
  if (handle_) throw TraceError("stop recording before reading the trace");
  const std::lock_guard lock(mutex_);
  if (!failure_.empty()) throw TraceError("recording failed: " + failure_);
  find_dead();
  finished_ = true;
  let_go_of_all();
  Trace trace = builder_.finish();
  add_op_facts(trace, at::get_num_threads(), device_.is_cpu());
  return trace;
}

}  // namespace memscale
