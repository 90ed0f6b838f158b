#include "memscale/runtime/replay/recorded_state.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <mutex>

namespace memscale {
namespace {

enum class Known : std::uint8_t { NotYet, Yes, No };

// Found out once for each type of device: the error it is told by is slow.
at::Generator shared_state(const at::Generator& generator) {
  static std::array<std::atomic<Known>, c10::COMPILE_TIME_MAX_DEVICE_TYPES>
      graphsafe{};
  auto& known =
      graphsafe.at(static_cast<std::size_t>(generator.device().type()));
  if (known == Known::No || generator.device().is_cpu()) return {};
  try {
    at::Generator shared = generator.graphsafe_get_state();
    known = Known::Yes;
    return shared;
  } catch (const c10::NotImplementedError&) {
    known = Known::No;
    return {};
  }
}

at::Tensor read(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void write(at::Generator& generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

void exchange(at::Generator& generator, const at::Generator& state) {
  const std::lock_guard lock(generator.mutex());
  generator.graphsafe_set_state(state);
}

}  // namespace

RecordedState::RecordedState(const at::Generator& recorded)
    : generator_(at::globalContext().defaultGenerator(recorded.device())),
      shared_before_(shared_state(generator_)) {
  if (shared_before_.defined()) {
    exchange(generator_, recorded.clone());
  } else {
    before_ = read(generator_);
    write(generator_, read(recorded));
  }
}

RecordedState::~RecordedState() {
  if (shared_before_.defined()) {
    exchange(generator_, shared_before_);
  } else {
    write(generator_, before_);
  }
}

}  // namespace memscale
