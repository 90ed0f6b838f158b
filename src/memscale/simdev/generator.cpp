#include "memscale/simdev/generator.h"

#include <utility>

#include "memscale/simdev/device.h"

namespace memscale::sim {

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
void SimGenerator::set_state(const c10::TensorImpl& state) {
  host_.unsafeGetGeneratorImpl()->set_state(state);
}
c10::intrusive_ptr<c10::TensorImpl> SimGenerator::get_state() const {
  return host_.unsafeGetGeneratorImpl()->get_state();
}

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

namespace {
std::recursive_mutex& borrow_mutex() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}
}  // namespace

BorrowDefaultGenerator::BorrowDefaultGenerator()
    : one_at_a_time_(borrow_mutex()) {
  swap();
}
BorrowDefaultGenerator::~BorrowDefaultGenerator() { swap(); }

void BorrowDefaultGenerator::swap() {
  auto* host = default_generator()
                   .get<SimGenerator>()
                   ->host()
                   .get<at::CPUGeneratorImpl>();
  auto* cpu = at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>();
  const std::scoped_lock lock(host->mutex_, cpu->mutex_);
  const auto engine = host->engine();
  const auto next_float = host->next_float_normal_sample();
  const auto next_double = host->next_double_normal_sample();
  host->set_engine(cpu->engine());
  host->set_next_float_normal_sample(cpu->next_float_normal_sample());
  host->set_next_double_normal_sample(cpu->next_double_normal_sample());
  cpu->set_engine(engine);
  cpu->set_next_float_normal_sample(next_float);
  cpu->set_next_double_normal_sample(next_double);
}

}  // namespace memscale::sim
