#include "memscale/simdev/generator.h"

#include <atomic>
#include <mutex>

#include "memscale/simdev/device.h"

namespace memscale::sim {
namespace {

std::atomic<std::size_t> set_states{0};

}  // namespace

SimGenerator::SimGenerator(uint64_t seed)
    : GeneratorImpl(kDevice,
                    c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      host_(at::detail::createCPUGenerator(seed)) {}

void SimGenerator::set_current_seed(uint64_t seed) {
  host_.set_current_seed(seed);
}
void SimGenerator::set_offset(uint64_t offset) { host_.set_offset(offset); }
uint64_t SimGenerator::get_offset() const { return host_.get_offset(); }
uint64_t SimGenerator::current_seed() const { return host_.current_seed(); }
uint64_t SimGenerator::seed() { return host_.seed(); }
// Kernels lock the CPU generator, not this one: so do readers of its state.
void SimGenerator::set_state(const c10::TensorImpl& state) {
  ++set_states;
  const std::lock_guard lock(host_.unsafeGetGeneratorImpl()->mutex_);
  host_.unsafeGetGeneratorImpl()->set_state(state);
}
c10::intrusive_ptr<c10::TensorImpl> SimGenerator::get_state() const {
  const std::lock_guard lock(host_.unsafeGetGeneratorImpl()->mutex_);
  return host_.unsafeGetGeneratorImpl()->get_state();
}

void SimGenerator::graphsafe_set_state(
    const c10::intrusive_ptr<c10::GeneratorImpl>& state) {
  auto* other = dynamic_cast<SimGenerator*>(state.get());
  TORCH_CHECK(other != nullptr, "Expected a 'sim' device type for generator");
  host_ = other->host_;
}
c10::intrusive_ptr<c10::GeneratorImpl> SimGenerator::graphsafe_get_state()
    const {
  auto shared = c10::make_intrusive<SimGenerator>();
  shared->host_ = host_;
  return shared;
}

std::size_t num_set_states() { return set_states; }

SimGenerator* SimGenerator::clone_impl() const {
  auto* copy = new SimGenerator;
  copy->host_ = host_.clone();
  return copy;
}

const at::Generator& default_generator() {
  static auto* generator =
      new at::Generator(at::make_generator<SimGenerator>());
  return *generator;
}

at::Generator host_generator(const std::optional<at::Generator>& generator) {
  const at::Generator& chosen = generator.has_value() && generator->defined()
                                    ? *generator
                                    : default_generator();
  if (auto* sim =
          dynamic_cast<SimGenerator*>(chosen.unsafeGetGeneratorImpl())) {
    return sim->host();
  }
  TORCH_CHECK(false, "Expected a 'sim' device type for generator but found '",
              chosen.device().type(), "'");
}

}  // namespace memscale::sim
