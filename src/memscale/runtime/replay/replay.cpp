#include "memscale/runtime/replay/replay.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <optional>
#include <utility>

#include "memscale/core/tape/claims.h"
#include "memscale/core/tape/model_call.h"
#include "memscale/runtime/observe/op_info.h"
#include "memscale/runtime/observe/tensor_kinds.h"
#include "memscale/runtime/observe/unobserved.h"
#include "memscale/runtime/observe/unseen_writes.h"

namespace memscale {

namespace {

// Of the process. Never destroyed: threads of autograd may outlive static
// objects.
Claims<TensorTape>& claims = *new Claims<TensorTape>();

}  // namespace

// One call of a model, in one thread.
struct Replay::Call {
  explicit Call(std::shared_ptr<Replay> of)
      : replay(std::move(of)),
        settings(replay->settings()),
        layers(*settings.layers, claims) {
    if (settings.recorder != nullptr && settings.recorder->observes_here()) {
      recorder = settings.recorder;
    }
  }

  // The tape of the innermost layer; null if that keeps everything.
  TensorTape* open_tape();
  // What a dispatch mode does inside of an op, beside what the op is given.
  void before_hidden_writes(const at::RecordFunction& fn);

  const std::shared_ptr<Replay> replay;
  const Replay::Settings settings;
  std::shared_ptr<Recorder> recorder;  // null: nobody records this call
  ModelCall<TensorTape> layers;
  int leaf_depth = 0;
  bool is_in_mode = false;  // the op that runs is under a dispatch mode
  int function_depth = 0;
  std::vector<OpSpan> timed;
};

namespace {

// Raw, so that reading it needs no check whether it was initialised: every op
// does. Made by enter(), ended by leave().
constinit thread_local Replay::Call* current_call = nullptr;
constinit thread_local bool is_resting = true;  // no call since rest()

// Our observer of this thread, asked of torch itself: backward restores what
// there was when it began, whatever was added or removed inside of it.
std::optional<at::CallbackHandle> find_observer(
    at::RecordFunctionCallback::StartCallback start) {
  for (const auto& entry :
       at::get_record_function_tls_().sorted_tls_callbacks_) {
    if (entry.callback_.start() == start) return entry.handle_;
  }
  return std::nullopt;
}

// What nothing needs is not paid for: torch boxes all arguments for an
// observer.
void stop_observing(at::RecordFunctionCallback::StartCallback start) {
  if (const auto observer = find_observer(start)) {
    at::removeCallback(*observer);
  }
}

}  // namespace

struct Replay::OpContext final : at::ObserverContext {
  // `op`: null for a custom autograd.Function.
  explicit OpContext(const OpInfo* op) : info(op) {}
  const OpInfo* const info;
  bool is_mere_view = false;  // the tape has seen all of it
  Moment start;
  std::vector<at::Tensor> arguments;  // of a Function: aliases
  // Ours, off while a Function runs.
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> hooks;
};

Replay::Replay(c10::Device device, std::vector<TapeRules> layers)
    : leaf_ops_(device, nullptr),
      timer_(device),
      settings_{
          std::make_shared<const std::vector<TapeRules>>(std::move(layers)),
          nullptr, nullptr},
      stats_(std::make_shared<ReplayStats>()) {}

Replay::~Replay() = default;

void Replay::set_layers(std::vector<TapeRules> layers) {
  auto made = std::make_shared<const std::vector<TapeRules>>(std::move(layers));
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_VALUE(made->size() == settings_.layers->size(), "layers must be ",
                    settings_.layers->size(), ", got ", made->size());
  settings_.layers.swap(made);
}

void Replay::time_ops(std::shared_ptr<OpTimes> times) {
  timer_.settle();
  stats_->times_devices = times != nullptr;
  const std::lock_guard lock(mutex_);
  settings_.times = std::move(times);
}

void Replay::record(std::shared_ptr<Recorder> recorder) {
  const std::lock_guard lock(mutex_);
  settings_.recorder = std::move(recorder);
}

Replay::Settings Replay::settings() const {
  const std::lock_guard lock(mutex_);
  return settings_;
}

bool Replay::enter() {
  if (current_call != nullptr || !c10::GradMode::is_enabled() ||
      c10::InferenceMode::is_enabled()) {
    return false;
  }
  claims.forget_some();
  is_resting = false;
  current_call = new Call(shared_from_this());
  if (current_call->recorder != nullptr) {
    current_call->recorder->enter_layer(LayerId(0));
  }
  if (!find_observer(&Replay::on_start)) {
    at::addThreadLocalCallback(
        at::RecordFunctionCallback(&Replay::on_start, &Replay::on_end)
            .needsInputs(true)
            .needsOutputs(true)
            .scopes({at::RecordScope::FUNCTION}));
  }
  return true;
}

void Replay::leave(const std::vector<at::Tensor>& outputs) {
  if (!is_entered()) return;
  std::vector<StorageKey> returned;
  for (const at::Tensor& output : outputs) {
    if (is_plain(*output.unsafeGetTensorImpl())) {
      returned.push_back(key_of(storage_of(output)));
    }
  }
  current_call->layers.leave(returned);
  if (Recorder* const recorder = current_call->recorder.get()) {
    for (const at::Tensor& output : outputs) recorder->set_returned(output);
    recorder->leave_layer();
  }
  timer_.add_call(std::move(current_call->timed), current_call->settings.times);
  // The last owner of this object may be the call.
  const std::unique_ptr<Call> ended(std::exchange(current_call, nullptr));
  if (!claims.forget_some()) stop_observing(&Replay::on_start);
}

void Replay::rest() {
  if (is_resting || current_call != nullptr) return;
  is_resting = true;
  if (!claims.forget_unneeded()) stop_observing(&Replay::on_start);
}

bool Replay::is_entered() const {
  return current_call != nullptr && current_call->replay.get() == this;
}

void Replay::enter_layer(std::size_t layer) {
  if (!is_entered()) return;
  const bool in_compiled = current_call->layers.is_compiled();
  current_call->layers.enter_layer(layer);
  if (current_call->recorder != nullptr && !in_compiled) {
    current_call->recorder->enter_layer(LayerId(layer));
  }
}

void Replay::leave_layer() {
  if (!is_entered() || !current_call->layers.leave_layer()) return;
  const bool in_compiled = current_call->layers.is_compiled();
  if (current_call->recorder != nullptr && !in_compiled) {
    current_call->recorder->leave_layer();
  }
}

void Replay::enter_compiled() {
  if (is_entered()) current_call->layers.enter_compiled();
}

void Replay::leave_compiled() {
  if (is_entered()) current_call->layers.leave_layer();
}

void Replay::before_resize(const StoragePtr& storage) {
  if (Unobserved::is_on()) return;
  claims.before_write(key_of(storage.get()));
  if (current_call == nullptr) return;
  if (TensorTape* const tape = current_call->layers.tape()) {
    tape->write_aside(key_of(storage.get()));
  }
}

std::shared_ptr<SavedTensor> Replay::pack(const at::Tensor& tensor) {
  auto save = std::make_shared<SavedTensor>(tensor);
  if (is_entered() && current_call->recorder != nullptr) {
    save->record(current_call->recorder);
  }
  if (!is_entered() || !is_plain(*tensor.unsafeGetTensorImpl())) {
    ++stats_->saves_kept;
    return save;
  }
  TensorTape* const tape = current_call->layers.tape();
  if (tape == nullptr) ++stats_->saves_kept;  // the layer keeps all
  if (tape == nullptr || tape->decide(tensor, save)) {
    claims.offer(key_of(storage_of(tensor)));
  }
  return save;
}

TensorTape* Replay::Call::open_tape() {
  return layers.open_tape([&](const TapeRules& rules) {
    return std::make_shared<TensorTape>(rules, replay->stats_);
  });
}

namespace {

// What tapes need of this is copied, but for this thread's own open one.
void before_write(const at::Tensor& tensor) {
  if (!is_plain(*tensor.unsafeGetTensorImpl())) return;
  const StorageKey storage = key_of(storage_of(tensor));
  claims.before_write(storage);
  if (current_call == nullptr) claims.write_aside(storage);
}

void before_writes(const OpInfo& info, const at::RecordFunction& fn) {
  if (is_in_dispatch_mode()) {
    for (const c10::IValue& input : fn.inputs()) {
      for_each_tensor(input, before_write);
    }
    return;
  }
  for_each_written(info, fn, before_write);
  for (const std::size_t index : info.statistics) {
    if (index < fn.inputs().size()) {
      for_each_tensor(fn.inputs()[index], before_write);
    }
  }
}

}  // namespace

void Replay::Call::before_hidden_writes(const at::RecordFunction& fn) {
  const OpInfo* const info = find_op_info(fn);
  if (info == nullptr || (!info->mutates && !info->may_write)) return;
  for_each_written(*info, fn, [&](const at::Tensor& tensor) {
    if (!is_plain(*tensor.unsafeGetTensorImpl())) return;
    before_resize(own_storage(tensor));
  });
}

// A custom Function begins: Note [Unseen writes].
std::unique_ptr<at::ObserverContext> Replay::begin_function(
    const at::RecordFunction& fn) {
  auto context = std::make_unique<OpContext>(nullptr);
  Call* const call = current_call;
  for_each_unseen_write(fn, [&](const at::Tensor& tensor) {
    before_write(tensor);
    if (call != nullptr && is_plain(*tensor.unsafeGetTensorImpl())) {
      context->arguments.push_back(alias_of(tensor));
    }
  });
  if (call == nullptr) return nullptr;
  try {
    if (TensorTape* const tape = call->layers.tape()) {
      tape->begin_function(context->arguments);
    }
  } catch (const std::exception&) {  // no memory
    call->layers.close_tape();
  }
  if (++call->function_depth > 1) return context;
  // Autograd holds what a Function saves, as without us: even the parameters
  // that its backward is given are the user's own objects. Hooks that the
  // Function itself brings are its own.
  const auto hooks = at::SavedTensorDefaultHooks::get_hooks();
  if (hooks && hooks->first.ptr(&hooks->first.pyinterpreter()) ==
                   call->replay->pack_hook_) {
    context->hooks.emplace(at::SavedTensorDefaultHooks::pop_hooks());
  }
  return context;
}

// The backward of a node begins, perhaps a custom Function's.
void Replay::before_function_backward() {
  for_each_unseen_write_in_backward([](const at::Tensor& tensor) {
    before_write(tensor);
    // A backward inside of forward.
    if (current_call == nullptr || !is_plain(*tensor.unsafeGetTensorImpl())) {
      return;
    }
    if (TensorTape* const tape = current_call->layers.tape()) {
      tape->write_aside(key_of(storage_of(tensor)));
    }
  });
}

void Replay::end_function(OpContext& context) {
  Call* const call = current_call;
  if (call == nullptr) return;  // it was left inside of the Function
  if (context.hooks) {
    at::SavedTensorDefaultHooks::push_hooks(std::move(context.hooks->first),
                                            std::move(context.hooks->second));
  }
  --call->function_depth;
  try {
    if (TensorTape* const tape = call->layers.tape()) {
      tape->end_function(context.arguments);
    }
  } catch (const std::exception&) {
    call->layers.close_tape();
  }
}

std::unique_ptr<at::ObserverContext> Replay::on_start(
    const at::RecordFunction& fn) {
  Call* const call = current_call;
  if ((call == nullptr && claims.empty()) || Unobserved::is_on()) {
    return nullptr;
  }
  if (call != nullptr && call->leaf_depth > 0) {
    if (call->is_in_mode) call->before_hidden_writes(fn);
    return nullptr;
  }
  const OpInfo* info = find_op_info(fn);
  if (info == nullptr) {
    if (is_custom_function(fn)) return begin_function(fn);
    if (is_backward_of_node(fn)) before_function_backward();
    return nullptr;
  }
  if (!claims.empty() &&
      (info->mutates || info->may_write || info->rules.updates_statistics ||
       is_in_dispatch_mode())) {
    before_writes(*info, fn);
  }
  if (call == nullptr || info->ignored || call->layers.is_compiled()) {
    return nullptr;
  }
  TensorTape* const tape = call->open_tape();
  const bool timed = call->settings.times != nullptr;
  if ((tape == nullptr && !timed) ||
      !call->replay->leaf_ops_.contain(*info, fn)) {
    return nullptr;
  }
  const bool in_mode = is_in_dispatch_mode();
  // Half of a transformer's ops are views: they need no more than this.
  const bool is_mere_view =
      info->is_mere_view && call->function_depth == 0 && !in_mode && !timed;
  try {
    if (is_mere_view) {
      tape->add_view(fn.inputs());
    } else if (tape != nullptr) {
      tape->begin_op(*info, fn.inputs(), call->function_depth > 0);
    }
  } catch (const std::exception&) {  // no memory
    call->layers.close_tape();
    return nullptr;
  }
  ++call->leaf_depth;
  call->is_in_mode = in_mode;
  auto context = std::make_unique<OpContext>(info);
  context->is_mere_view = is_mere_view;
  if (timed) context->start = call->replay->timer_.now();
  return context;
}

void Replay::on_end(const at::RecordFunction& fn,
                    at::ObserverContext* context) {
  auto* const ours = static_cast<OpContext*>(context);
  Call* const call = current_call;
  if (ours == nullptr) return;
  if (ours->info == nullptr) return end_function(*ours);
  if (call == nullptr) return;
  --call->leaf_depth;
  if (ours->is_mere_view) return;
  try {
    if (call->settings.times != nullptr) {
      call->timed.push_back({call->layers.layer(), ours->info,
                             std::move(ours->start),
                             call->replay->timer_.now()});
    }
    if (TensorTape* const tape = call->layers.tape()) {
      tape->end_op(fn.outputs(), ours->info->handle.schema().returns().size());
    }
  } catch (const std::exception&) {
    call->layers.close_tape();
  }
}

}  // namespace memscale
