#include "memscale/core/tape/op_use.h"

namespace memscale {

Why why_not(const ReplayRules& rules, const CallFacts& facts,
            const ReplayTarget& target) {
  if (facts.in_function) return Why::InFunction;
  if (facts.in_mode) return Why::Mode;
  if (!rules.never.empty()) return Why::Never;
  if (!facts.has_all_arguments) return Why::Arguments;
  if (rules.is_factory) return Why::Factory;
  if (!facts.all_plain) return Why::Special;
  // On the CPU too, if it has several threads.
  if (facts.accumulates) return Why::Unordered;
  // Who reads the host's bytes has waited for the device before. We would not.
  if (facts.not_waited_for) return Why::NotWaitedFor;
  const char* const text = why_not_on(target, rules, facts.transposed);
  if (text == nullptr) return Why::Replayed;
  return std::string_view(text) == kBenchmarked ? Why::Benchmarked
                                                : Why::Unordered;
}

bool is_expensive(const ReplayRules& rules, bool on_cpu,
                  const std::optional<Factor>& factor) {
  if (rules.slow_on_cpu && on_cpu) return true;
  if (rules.work == Work::Little) return false;
  if (rules.work == Work::Much || !factor || factor->sizes.empty()) return true;
  std::int64_t numel = 1;
  for (const std::int64_t size : factor->sizes) numel *= size;
  if (numel == 0) return true;
  const std::int64_t multiplications = rules.work == Work::Matmul
                                           ? factor->sizes.back()
                                           : numel / factor->sizes.front();
  return is_worth_keeping(multiplications, factor->element_bytes);
}

bool covers(std::span<const std::int64_t> sizes,
            std::span<const std::int64_t> strides, std::int64_t offset,
            std::int64_t element_bytes, std::int64_t bytes) {
  if (offset != 0 || strides.size() != sizes.size()) return false;
  std::int64_t numel = 1;
  std::int64_t last = 0;  // the farthest element
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    numel *= sizes[i];
    last += (sizes[i] - 1) * strides[i];
  }
  // Dense, as many elements as there are bytes for: then each is reached once.
  return last + 1 == numel && numel * element_bytes == bytes;
}

}  // namespace memscale
