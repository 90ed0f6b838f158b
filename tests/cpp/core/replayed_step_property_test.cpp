#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <vector>

#include "memscale/core/predict/replayed_step.h"
#include "synthetic_step.h"

namespace memscale {
namespace {

bool maybe() { return *rc::gen::arbitrary<bool>(); }

// `odd`: with ops that cannot be replayed, results that something else holds,
// and a mask that replay takes for the caller's: then it may hold a little more
// than it frees.
LayerOp any_op(std::size_t i, bool is_last, bool odd) {
  LayerOp op;
  op.returns = *rc::gen::element(Returns::New, Returns::View, Returns::Written);
  if (odd && maybe()) op.returns = Returns::Unknown;
  if (is_last) op.returns = Returns::New;
  op.numel = *rc::gen::element<std::int64_t>(1, 100, 128, 1000);
  op.reads = *rc::gen::inRange<std::size_t>(0, i + 1);
  if (odd) op.kept = *rc::gen::element(Kept::ForForward, Kept::ForStep);
  for (bool* flag : {&op.parameter, &op.buffer, &op.mask, &op.saves_input,
                     &op.saves_output, &op.scratch, &op.gradient_in_place}) {
    *flag = maybe();
  }
  op.mask &= odd;
  return op;
}

Trace any_step(bool odd) {
  LayerSpec spec;
  const auto num_ops = *rc::gen::inRange<std::size_t>(1, 8);
  for (std::size_t i = 0; i < num_ops; ++i) {
    spec.ops.push_back(any_op(i, i + 1 == num_ops, odd));
  }
  spec.residual = maybe();
  Trace trace = SyntheticStep(spec, 5, false).run();
  for (Op& op : trace.ops) {
    // The embedding is trained: the layers' input is not there anyway.
    if (op.name == "embedding_backward") op.forward = OpId(0);
    if (op.phase != Phase::Forward || !op.layer.valid()) continue;
    op.name = maybe() ? "aten::relu" : "aten::mm";
    if (odd && maybe()) op.name = maybe() ? "aten::empty" : "other::op";
  }
  return trace;
}

// A version of a storage that was written meanwhile is no longer to be had:
// torch refuses such a program, and so it is none.
bool reads_what_it_saved(const Trace& trace) {
  std::vector<std::uint32_t> last(trace.storages.size());
  for (const Value& value : trace.values) {
    if (!value.storage.valid()) continue;
    auto& version = last[value.storage.index()];
    version = std::max(version, value.version);
  }
  return std::ranges::all_of(trace.saves, [&](const Save& save) {
    const Value& value = trace.at(save.value);
    return !value.storage.valid() ||
           value.version == last[value.storage.index()];
  });
}

std::vector<TapeRules> all(const Trace& trace, ReplayPolicy policy) {
  return std::vector<TapeRules>(trace.layers.size(), {.policy = policy});
}

Bytes held_when_backward_begins(const Trace& trace) {
  const auto backward = std::ranges::find_if(
      trace.ops, [](const Op& op) { return op.phase == Phase::Backward; });
  const OpId first(static_cast<std::size_t>(backward - trace.ops.begin()));
  Bytes sum;
  for (const Storage& storage : trace.storages) {
    if (storage.born.valid() && storage.born < first &&
        first <= storage.freed) {
      sum += storage.bytes;
    }
  }
  return sum;
}

void check_reads_only_what_is_there(const Trace& trace) {
  for (std::size_t i = 0; i < trace.ops.size(); ++i) {
    const OpId op(i);
    for (const auto* values : {&trace.ops[i].inputs, &trace.ops[i].outputs}) {
      for (const ValueId value : *values) {
        const StorageId id = trace.at(value).storage;
        if (!id.valid()) continue;
        const Storage& storage = trace.at(id);
        RC_ASSERT(!storage.born.valid() || storage.born <= op);
        RC_ASSERT(op <= storage.freed);
      }
    }
  }
}

TEST(ReplayedStepProperty, WithKeepEverywhereTheStepIsTheSame) {
  RC_ASSERT(rc::check([] {
    const Trace plain = any_step(maybe());
    const auto rules = all(plain, ReplayPolicy::Keep);
    RC_ASSERT(replayed_step(plain, rules, maybe()).trace == plain);
  }));
}

TEST(ReplayedStepProperty, ReplayHoldsNoMoreAndReadsWhatIsThere) {
  RC_ASSERT(rc::check([] {
    const bool odd = maybe();
    const Trace plain = any_step(odd);
    RC_PRE(reads_what_it_saved(plain));
    const auto policy =
        *rc::gen::element(ReplayPolicy::Cheap, ReplayPolicy::Block);
    const ReplayedStep step = replayed_step(plain, all(plain, policy), false);
    RC_ASSERT(odd || held_when_backward_begins(step.trace) <=
                         held_when_backward_begins(plain));
    check_reads_only_what_is_there(step.trace);
    RC_ASSERT(step.trace.ops.size() == plain.ops.size() + step.num_replayed);
  }));
}

TEST(ReplayedStepProperty, EachOpIsRepeatedAtMostOnce) {
  RC_ASSERT(rc::check([] {
    const Trace plain = any_step(maybe());
    RC_PRE(reads_what_it_saved(plain));
    const Trace trace =
        replayed_step(plain, all(plain, ReplayPolicy::Block), false).trace;
    std::vector<int> times(plain.ops.size());
    for (const Op& op : trace.ops) {
      if (op.phase != Phase::Backward || !op.forward.valid()) continue;
      if (op.name == trace.at(op.forward).name) {
        RC_ASSERT(++times[op.forward.index()] == 1);
      }
    }
  }));
}

}  // namespace
}  // namespace memscale
