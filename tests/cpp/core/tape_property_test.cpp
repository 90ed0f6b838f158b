// Whatever the program: what a tape must never do.

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <memory>
#include <set>
#include <vector>

#include "counted_step.h"
#include "memscale/core/predict/replayed_step.h"
#include "tiny_program.h"

namespace memscale {
namespace {

using Sizes = std::vector<std::int64_t>;

// Evenly, from the first test on.
std::size_t below(std::size_t end) {
  return *rc::gen::resize(rc::kNominalSize,
                          rc::gen::inRange<std::size_t>(0, end));
}

template <typename T>
T one_of(std::vector<T> values) {
  return values[below(values.size())];
}

bool maybe(std::size_t percent) { return below(100) < percent; }

// Writes, views, draws, ops that cannot be repeated, custom Functions, several
// layers and several calls of them, tensors that die early. No write into what
// is saved: torch refuses such a program in backward.
class AnyProgram final {
 public:
  Trace make() {
    program_.enter(layers_[0]);
    alive_.push_back(program_.batch({64, 16}));
    alive_.push_back(program_.parameter({256, 64}));
    residents_ = {alive_[0].storage, alive_[1].storage};
    const std::size_t length = 2 + below(30);
    call();
    for (std::size_t i = 0; i < length; ++i) act();
    std::vector<std::size_t> swaps;
    if (maybe(50)) {
      for (int i = 0; i < 4; ++i) swaps.push_back(below(8));
    }
    for (const Value& value : std::vector<Value>(alive_)) {
      if (maybe(80)) let_go(value);
    }
    return program_.finish(swaps);
  }

 private:
  Value any() { return one_of(alive_); }

  void act() {
    switch (below(12)) {
      case 0:
      case 1:
        return write();
      case 2: {
        const Value of = any();
        alive_.push_back(program_.view("aten::view", of, {of.numel()}));
        return;
      }
      case 3:
        return enter();
      case 4:
        return let_go(any());
      case 5:
        return function();
      case 6:
      case 7:
      case 8:
        return save(any());
      default:
        call();
        if (maybe(50)) save(alive_.back());
    }
  }

  void call() {
    const auto name = one_of<const char*>(
        {"aten::relu", "aten::exp", "aten::cat", "aten::mm", "aten::addmm",
         "aten::tanh", "other::kernel", "aten::empty_like"});
    std::vector<Value> inputs = {any()};
    while (maybe(40) && inputs.size() < 3) inputs.push_back(any());
    const Sizes sizes = one_of<Sizes>({{64, 16}, {64, 64}, {8, 8}, {128, 16}});
    alive_.push_back(program_.call(name, inputs, sizes));
  }

  void write() {
    std::vector<Value> writable;
    for (const Value& value : alive_) {
      if (!saved_.contains(value.storage)) writable.push_back(value);
    }
    if (writable.empty()) return;
    const auto name = one_of<const char*>({"aten::relu_", "aten::add_.Tensor",
                                           "aten::bernoulli_.float",
                                           "aten::zero_", "aten::mul_.Tensor"});
    std::vector<Value> inputs = {one_of(writable)};
    if (maybe(40)) inputs.push_back(any());
    alive_.push_back(program_.write(name, inputs));
  }

  void save(const Value& value) {
    program_.save(value);
    saved_.insert(value.storage);
  }

  void enter() {
    if (maybe(30)) return program_.enter_again();
    program_.enter(one_of(layers_));
  }

  void let_go(const Value& value) {
    const StorageId storage = value.storage;
    const auto is_of_it = [&](const Value& v) { return v.storage == storage; };
    if (residents_.contains(storage) ||
        std::ranges::none_of(alive_, is_of_it)) {
      return;
    }
    program_.let_go(value);
    std::erase_if(alive_, is_of_it);
  }

  void function() {
    const Value given = any();
    const bool writes = !saved_.contains(given.storage);
    const std::vector<Value> written =
        writes ? std::vector{given} : std::vector<Value>{};
    program_.begin_function(written);
    const Value inside = program_.call("aten::exp", {given}, {64, 16});
    program_.end_function(written);
    alive_.push_back(inside);
    call();  // what is saved next is saved by an op after it
  }

  TinyProgram program_;
  const std::vector<LayerId> layers_ = {program_.layer(""), program_.layer("a"),
                                        program_.layer("b"),
                                        program_.layer("c")};
  std::vector<Value> alive_;
  std::set<StorageId> residents_;  // there before the step and after it
  std::set<StorageId> saved_;
};

std::shared_ptr<const KeepSet> any_keep_set(const Trace& trace, LayerId layer) {
  KeepSet set;
  for (const Op& op : trace.ops) {
    if (op.phase != Phase::Forward || op.layer != layer) continue;
    if (maybe(40)) set.kept.emplace_back(set.ops.size(), 0);
    set.ops.push_back(maybe(95) ? op.name : "aten::other");
  }
  return std::make_shared<const KeepSet>(std::move(set));
}

std::vector<TapeRules> any_rules(const Trace& trace) {
  std::vector<TapeRules> rules;
  const auto policy =
      one_of<ReplayPolicy>({ReplayPolicy::Cheap, ReplayPolicy::Block});
  for (std::size_t i = 0; i < trace.layers.size(); ++i) {
    TapeRules& layer = rules.emplace_back(TapeRules{.policy = policy});
    if (maybe(30)) layer.policy = ReplayPolicy::Keep;
    if (maybe(20)) layer.keep_set = any_keep_set(trace, LayerId(i));
    if (maybe(20)) layer.min_bytes = 1024;
  }
  return rules;
}

std::vector<std::int64_t> bytes_by_op(const Trace& trace) {
  std::vector<std::int64_t> bytes(trace.ops.size());
  for (const Storage& storage : trace.storages) {
    const std::size_t begin = storage.born.valid() ? storage.born.index() : 0;
    const std::size_t end =
        storage.freed.valid() ? storage.freed.index() + 1 : bytes.size();
    for (std::size_t i = begin; i < end; ++i) bytes[i] += storage.bytes.count();
  }
  return bytes;
}

TEST(TapeProperty, NothingWrongIsReadAndNothingIsLeft) {
  RC_ASSERT(rc::check([] {
    const Trace plain = AnyProgram().make();
    const CountedStep step = counted_step(plain, any_rules(plain), maybe(50));
    for (const std::string& fault : step.faults) RC_LOG(fault + "\n");
    RC_ASSERT(step.faults.empty());
    RC_ASSERT(step.num_failed == 0U);
    RC_ASSERT(step.held_by_tapes == 0);
  }));
}

TEST(TapeProperty, ATraceAndCountingAgreeAtEveryOp) {
  RC_ASSERT(rc::check([] {
    const Trace plain = AnyProgram().make();
    const auto rules = any_rules(plain);
    const bool on_cpu = maybe(50);
    const CountedStep counted = counted_step(plain, rules, on_cpu);
    const ReplayedStep predicted = replayed_step(plain, rules, on_cpu);
    RC_ASSERT(counted.bytes == bytes_by_op(predicted.trace));
    RC_ASSERT(counted.num_repeated == predicted.num_replayed);
  }));
}

// A save that cannot be had is refused; never is it other bytes.
TEST(TapeProperty, WithoutMemoryForCopiesSavesAreRefused) {
  RC_ASSERT(rc::check([] {
    const Trace plain = AnyProgram().make();
    const CountedStep step = counted_step(plain, any_rules(plain), maybe(50),
                                          {.no_memory_for_copies = true});
    for (const std::string& fault : step.faults) RC_LOG(fault + "\n");
    RC_ASSERT(step.faults.empty());
    RC_ASSERT(step.held_by_tapes == 0);
  }));
}

TEST(TapeProperty, AnOpThatRaisesLeavesNothing) {
  RC_ASSERT(rc::check([] {
    const Trace plain = AnyProgram().make();
    const auto num_forward = static_cast<std::size_t>(
        std::ranges::count(plain.ops, Phase::Forward, &Op::phase));
    const OpId raises(below(num_forward));
    const CountedStep step =
        counted_step(plain, any_rules(plain), maybe(50), {.raises = raises});
    for (const std::string& fault : step.faults) RC_LOG(fault + "\n");
    RC_ASSERT(step.faults.empty());
    RC_ASSERT(step.held_by_tapes == 0);
  }));
}

}  // namespace
}  // namespace memscale
