#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "memscale/base/ids.h"
#include "memscale/core/replay_rules.h"
#include "memscale/core/storage_holders.h"
#include "memscale/core/trace.h"

namespace memscale {

class PredictedTape;

// Where a save that was dropped is to be had.
struct Lineage {
  PredictedTape* tape = nullptr;  // null: the save is held
  std::uint32_t state = 0;
};

// What all tapes of a step share. By index of `plain`.
struct PredictedStep {
  const Trace& plain;
  Trace& trace;  // that is being written
  StorageHolders& holders;
  bool on_cpu;
  ReplayTarget target;
  std::vector<const ReplayRules*> rules;  // by op
  std::vector<std::uint32_t> versions;    // by storage, as of now
  std::vector<bool> has_history;          // by storage: autograd made it
  std::vector<Lineage> lineages;          // by save
};

// runtime/tape.h without tensors: which states of storages one call of a layer
// holds, drops and makes again, as that decides it. Same names, same order, and
// the notes are there. What it does not know: arguments that are not tensors,
// memory that is not torch's, writes through .data.
class PredictedTape final {
 public:
  using StateId = std::uint32_t;

  PredictedTape(const TapeRules& rules, PredictedStep& step);

  ReplayPolicy policy() const { return rules_.policy; }

  // ---- forward ----
  void begin_op(OpId op);
  void end_op();
  // True: it stays held, and came from outside of this tape.
  bool decide(std::size_t save);
  void add_output(StorageId storage);
  void decide_again();
  void cross_border();
  bool spans_layers() const;
  // The states whose original bytes are there and needed.
  std::vector<std::pair<StorageId, StateId>> close();

  // ---- between tapes ----
  void before_write(StateId state) { copy_out(states_[state]); }
  void offer(StateId state);

  // ---- backward ----
  // The storage that has its bytes from now on. Writes ops into the trace.
  StorageId materialise(StateId state);
  void release(StateId state) { unclaim_all({state}); }

 private:
  using NodeId = std::uint32_t;
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  enum class Why : std::uint8_t {
    Replayed,  // it is not held
    Outside,
    Border,
    Small,
    Chosen,
    Never
  };
  struct State {
    StorageId storage;  // of the plain step
    std::uint32_t version = 0;
    NodeId maker = kNone;
    std::uint32_t readers = 0;
    StorageId held;  // invalid: not held by us
    Why why = Why::Replayed;
    std::uint32_t section = 0;
    std::uint32_t depth = 0;
    bool has_original = true;  // the storage has these bytes, while it lives
    bool ours = false;
    bool by_maker = false;
    bool lost = false;
    bool is_saved = false;
    bool is_output = false;
    bool is_leaf = false;
  };
  enum class Access : std::uint8_t { Read, Update, Overwrite, Scratch };
  struct Reference {
    ValueId value;
    Access access;
    StateId state;
  };
  struct Made {
    std::uint32_t place;  // among the results, or among the references
    StateId state;
  };
  struct Node {
    OpId op;
    std::vector<Reference> references;
    std::vector<StateId> reads;  // distinct
    std::vector<Made> results;
    std::vector<Made> writes;
    StorageId packed;  // invalid: it is called again
    std::uint32_t num_needed = 0;
    bool done = false;
    std::uint32_t search = 0;
  };
  struct Written {
    StorageId storage;
    StateId old;
    Access access;
    std::uint32_t reference;
  };
  struct Running {
    Node node;
    std::vector<Written> written;
    Why why = Why::Replayed;
    bool expensive = false;
    std::uint32_t depth = 0;
  };

  const Op& op_of(const Node& node) const { return step_.plain.at(node.op); }
  const ReplayRules& rules_of(OpId op) const {
    return *step_.rules[op.index()];
  }
  Bytes bytes_of(const State& state) const {
    return step_.plain.at(state.storage).bytes;
  }
  bool is_on_cpu(StorageId storage) const {
    return step_.on_cpu || step_.plain.at(storage).place == Place::Host;
  }

  // Recording.
  Why why_not(const Op& op, const ReplayRules& rules) const;
  bool is_expensive(const Op& op, const ReplayRules& rules) const;
  Access access_of(const Op& op, const Value& value,
                   const ReplayRules& rules) const;
  void add_tensor(Running& running, ValueId value, Access access, bool is_view);
  StateId find_state(const Value& value);
  StateId new_state(StorageId storage, std::uint32_t version, NodeId maker,
                    Why why);
  StateId read_state(Running& running, const Value& value);
  void hold_here(StateId state);
  Why why_keep(const Running& running, StorageId storage, std::size_t output);
  void end_write(const Written& written, Running& running);
  void follow_keep_set(const Op& op);
  bool is_written_now(StorageId storage) const;
  bool is_current(const State& state) const {
    return step_.versions[state.storage.index()] == state.version;
  }
  bool has_original(const State& state) const {
    return state.has_original && step_.holders.is_held(state.storage);
  }
  void settle(std::size_t save, StateId state);
  void drop(std::size_t save, StateId state);
  void copy_out(State& state);
  void keep_packed(Node& node);
  void pack(Node& node, Bytes bytes);

  // Who needs what: predicted_tape_claims.cpp.
  bool is_there(const State& state) const;
  bool can_claim(StateId state);
  bool is_worth_dropping(StateId state);
  void claim(StateId state);
  void unclaim_all(std::vector<StateId> states);
  void forget_maker(State& state);
  void hold(State& state, StorageId storage);
  void bury(State& state);
  void clear(Node& node);

  // Replay: predicted_tape_replay.cpp.
  void ensure(StateId state);
  bool use_original(State& state);
  void run(Node& node);
  void unpack(Node& node);
  void adopt(StateId state, StorageId storage);
  void finish(Node& node);
  std::vector<StorageId> make_targets(const Node& node);
  ValueId value_over(ValueId value, StorageId storage);

  const TapeRules& rules_;
  PredictedStep& step_;
  std::vector<State> states_;
  std::vector<Node> nodes_;
  std::unordered_map<StorageId, StateId> current_;
  std::optional<Running> running_;
  std::vector<std::size_t> pending_;  // saves of the running op's results
  std::vector<std::pair<std::size_t, StateId>> undecided_;
  std::size_t num_ops_ = 0;
  bool follows_keep_set_ = false;
  bool open_ = true;
  bool holds_ = true;
  std::uint32_t section_ = 0;
  StateId first_of_section_ = 0;
  std::vector<StateId> crossing_;
  std::vector<StateId> held_here_;
  std::uint32_t num_searches_ = 0;
};

}  // namespace memscale
