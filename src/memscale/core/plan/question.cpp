#include "memscale/core/plan/question.h"

#include <algorithm>
#include <utility>

#include "memscale/core/plan/technique.h"
#include "memscale/core/trace/accumulation.h"

namespace memscale {

Bytes granularity_of(std::string_view device_type) {
  return device_type == "cpu" ? 1_B : 512_B;
}

bool Target::on_cuda() const {
  return type == "cuda" ||
         (card && (card->vendor == "NVIDIA" || card->vendor == "AMD"));
}

Question Question::of(std::shared_ptr<const Trace> trace, const Config& config,
                      const Target& target, StepFacts facts) {
  Question question;
  question.trace = std::move(trace);
  if (facts.has_gradients) {
    facts.call += ", onto gradients that are there";
    if (question.trace != nullptr) {
      question.trace =
          std::make_shared<const Trace>(accumulating_step(*question.trace));
    }
  }
  question.config = config.resolve();
  for (const Technique& technique : techniques()) {
    if (!technique.field.empty() && config.is_set(technique.field) &&
        question.config.*technique.is_on) {
      question.fields_set.emplace_back(technique.field);
    }
  }
  question.force = *config.force_optimize;
  question.utilization = *config.target_gpu_utilization;
  question.on_cpu = target.on_cpu();
  question.target = {.on_cuda = target.on_cuda(),
                     .benchmarks = target.benchmarks};
  question.granularity = granularity_of(target.type);
  question.device_memory = target.memory;
  if (target.card) {
    question.cost = CostModel::of(*target.card, target.tf32);
    question.device_memory.reset();
    if (target.card->memory.known()) {
      question.device_memory = target.card->memory.value;
    }
  }
  question.min_bytes = kDefaultMinBytes;
  question.has_state_kernel = target.has_state_kernel;
  question.device = target.name;
  question.step = std::move(facts);
  // A recorded step may have met layers that were not there before.
  if (question.trace != nullptr &&
      question.step.parameter_bytes.size() != question.trace->layers.size()) {
    question.step.parameter_bytes.clear();
  }
  return question;
}

Wish Question::wish(const Technique& technique) const {
  if (technique.is_on == nullptr) return Wish::Allowed;
  if (!(config.*technique.is_on)) return Wish::Off;
  return std::ranges::find(fields_set, technique.field) != fields_set.end()
             ? Wish::Asked
             : Wish::Allowed;
}

std::optional<Bytes> Question::limit() const {
  if (config.budget) return config.budget;
  if (!device_memory) return std::nullopt;
  return Bytes(static_cast<std::int64_t>(
      static_cast<double>(device_memory->count()) * utilization));
}

Trace plain_step(const Trace& recorded) {
  Trace plain = recorded;
  for (Storage& storage : plain.storages) {
    if (!storage.plain_freed.valid()) continue;
    for (OpId* last : {&storage.freed, &storage.let_go}) {
      if (last->valid()) *last = std::max(*last, storage.plain_freed);
    }
    storage.plain_freed = OpId();
  }
  return plain;
}

}  // namespace memscale
