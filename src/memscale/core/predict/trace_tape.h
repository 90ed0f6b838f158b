#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "memscale/base/ids.h"
#include "memscale/core/predict/storage_holders.h"
#include "memscale/core/predict/trace_uses.h"
#include "memscale/core/tape/tape.h"
#include "memscale/core/trace/trace.h"

namespace memscale {

class TraceTape;

// Where a save that was dropped is to be had.
struct Lineage {
  TraceTape* tape = nullptr;  // null: the save is held
  StateId state = 0;
};

// What all tapes of a predicted step share. By index of `plain`.
struct PredictedStep {
  const Trace& plain;
  Trace& trace;  // that is being written
  StorageHolders& holders;
  TraceVersions versions;
  std::vector<Lineage> lineages;  // by save
  std::vector<bool> ended;        // by save: autograd let go of it
};

// TapeBytes over a trace: what is copied, packed and called again is written
// into another trace, and who holds which storage is counted.
class TraceBytes final : public TapeBytes {
 public:
  TraceBytes(PredictedStep& step, TraceTape& tape) : step_(step), tape_(tape) {}

  // The op that a tape begins now.
  void set_op(OpId op) { op_ = op; }
  // The storage that has the bytes of a state that is held.
  StorageId held(StateId state) const { return states_[state].held; }

  std::int64_t add_state(StateId state, const TensorUse& tensor) override;
  bool is_current(StateId state) const override;
  bool is_alive(StateId state) const override;
  bool has_original(StateId state) const override;
  bool is_whole(StateId /*state*/) const override { return true; }
  bool hold(StateId state) override;
  void let_go(StateId state) override;
  void lose_original(StateId /*state*/) override {}
  bool copy_out(StateId state) override;
  void show_writes(StateId /*state*/) override {}
  void end_state(StateId /*state*/) override {}
  void add_node(NodeId node) override;
  void clear_node(NodeId node) override;
  bool pack(NodeId node, StateId result, Packing packing) override;
  void run(NodeId node, std::span<const Destination> targets,
           std::span<const Made> written,
           std::span<const Made> results) override;
  void unpack(NodeId node, StateId result) override;
  bool is_waiting(SaveKey save) const override;
  void drop_save(SaveKey save, StateId state) override;
  void keep_save(SaveKey /*save*/, StateId /*state*/, Why /*why*/) override {}
  [[noreturn]] void fail(StateId state, Failure failure) const override;

 private:
  struct State {
    StorageId storage;  // of the plain step
    std::uint32_t version;
    StorageId held;
    std::uint8_t float_bytes;
  };
  struct Node {
    OpId op;
    StorageId packed;  // invalid: it is called again
  };

  const Storage& storage_of(StateId state) const {
    return step_.plain.at(states_[state].storage);
  }
  // A new storage in place of that of the state, with one holder.
  StorageId make_like(StorageId storage, Category category);
  ValueId value_over(ValueId value, StorageId storage);
  // The storage is held as the state's.
  void adopt(StateId state, StorageId storage);

  PredictedStep& step_;
  TraceTape& tape_;
  OpId op_;
  std::vector<State> states_;
  std::vector<Node> nodes_;
};

// A tape over a trace, as Claims and ModelCall use it.
class TraceTape final {
 public:
  using Claimed = Tape::Claim;

  TraceTape(const TapeRules& rules, PredictedStep& step)
      : bytes_(step, *this), tape_(rules, bytes_) {}

  Tape& tape() { return tape_; }
  TraceBytes& bytes() { return bytes_; }

  ReplayPolicy policy() const { return tape_.policy(); }
  bool spans_layers() const { return tape_.spans_layers(); }
  void cross_border() { tape_.cross_border(); }
  void add_output(StorageKey storage) { tape_.add_output(storage); }
  void decide_again() { tape_.decide_again(); }
  std::vector<Claimed> close() { return tape_.close(); }
  void before_write(StateId state) { tape_.before_write(state); }
  void write_aside(StorageKey storage) { tape_.write_aside(storage); }
  bool needs_original(StateId state) const {
    return tape_.needs_original(state);
  }
  void offer(StateId state) { tape_.offer(state); }

  // The storage that has its bytes from now on.
  StorageId materialise(StateId state) {
    tape_.ensure(state);
    return bytes_.held(state);
  }

 private:
  TraceBytes bytes_;
  Tape tape_;
};

}  // namespace memscale
