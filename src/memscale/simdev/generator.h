#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include <cstddef>

namespace memscale::sim {

// The device's random stream. It draws from a CPU generator of its own, so
// that a CPU run and a device run with the same seed see the same numbers.
class SimGenerator final : public c10::GeneratorImpl {
 public:
  explicit SimGenerator(uint64_t seed = c10::default_rng_seed_val);

  // What CPU kernels are called with instead of this generator.
  const at::Generator& host() const { return host_; }

  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  // As on CUDA: states are exchanged, not copied.
  void graphsafe_set_state(
      const c10::intrusive_ptr<c10::GeneratorImpl>& state) override;
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override;

 private:
  SimGenerator* clone_impl() const override;
  at::Generator host_;
};

const at::Generator& default_generator();

// How often set_state() was called on any of them: on CUDA that seeds anew.
std::size_t num_set_states();

// The CPU generator behind `generator`; of the default one where undefined.
at::Generator host_generator(const std::optional<at::Generator>& generator);

}  // namespace memscale::sim
