#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "memscale/core/tape/key_map.h"
#include "memscale/core/tape/op_use.h"
#include "memscale/core/tape/tape_bytes.h"
#include "memscale/core/tape/tape_rules.h"
#include "memscale/core/tape/why.h"

namespace memscale {

// The ops of one call of one layer (or of what runs between two of them), and
// which of their results are held, dropped and computed again.
//
// This is all that decides it, when a model trains and when a step is
// predicted: memory is behind TapeBytes.
//
// Note [States of storages]
// What is kept or computed again is a *state*: the bytes of one storage between
// two writes. Tensors are geometries over states, so a view needs no op and a
// write in place makes a new state from an old one. A state is
//   held       by us: it came from outside, its policy says so, or it cannot be
//              made again; then its version is checked before it is used;
//   replayed   from the states that its op (its maker) read.
// A state's readers are the saves that were dropped and the ops that are to be
// replayed. With its first reader a state claims what it needs, with its last
// it lets go: so what is held is what backward still needs, and each op is
// replayed at most once.
//
// Note [Held when read]
// Bytes that cannot be made again are held as soon as they are there, since a
// lineage may come to rest on them. Not so where gradients are off, or inside
// of a custom Function: passes of a model that nobody differentiates leave
// nothing behind in eager, and leave nothing here. Such bytes are held when an
// op with gradients reads them; a lineage that rests on others is lost once
// they are gone, and what it leads to is kept.
//
// Note [Borders]
// Where one layer ends and the next begins, its input is held: otherwise the
// first replay of backward would bring back every layer's. Under
// ReplayPolicy::Cheap a lineage may cross a few borders: a CNN's block inputs
// come from convolutions that are kept anyway, through batch norm and relu.
//
// None of it recurses: lineages can be tens of thousands of ops deep. Not
// thread-safe: see LockedTape.
class Tape final {
 public:
  Tape(TapeRules rules, TapeBytes& bytes);
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  ReplayPolicy policy() const { return rules_.policy; }
  // Whether the call's ops have been those of the keep set so far.
  bool follows_keep_set() const { return follows_keep_set_; }

  // ---- forward, until close() ----
  // Before the op runs and after it did, ops do not nest. What it returned is
  // given by place, with key 0 where there is no plain tensor. `raised`: it
  // threw, or returned less than it should.
  void begin_op(const OpUse& op);
  void end_op(std::span<const TensorUse> results, bool raised = false);
  bool op_is_running() const { return op_is_running_; }
  // In place of both, for an op that returns views of `base` and does nothing
  // else. `holds`: as OpUse has it.
  void add_view(const TensorUse& base, bool holds);
  // Around a custom Function, with the tensors that it may write.
  void begin_function(std::span<const TensorUse> tensors);
  void end_function(std::span<const TensorUse> tensors);
  // Decides for one save of a tensor with this storage, now or when the op that
  // runs is through. True: it stays held, and came from outside of this tape.
  bool decide(SaveKey save, StorageKey storage);
  // The call returns a tensor with this storage: the caller has its bytes.
  void add_output(StorageKey storage);
  // Saves that were kept because dropping them would have gained nothing.
  void decide_again();
  // Another layer begins. What nobody reads is not held any longer, but can be
  // read for as long as somebody else holds it.
  void cross_border();
  // Whether lineages may cross borders.
  bool spans_layers() const;
  // No more ops. What nobody reads is let go. Returns the states whose storages
  // must not be written before this tape was asked.
  struct Claim {
    StorageKey storage;
    StateId state;
  };
  std::vector<Claim> close();

  // ---- what it has recorded, until close() ----
  // kNone: it knows no state of this storage.
  StateId state_of(StorageKey storage) const { return current_.find(storage); }
  // The op that makes the state again. kNone: none does.
  NodeId maker(StateId state) const { return states_[state].maker; }
  std::span<const StateId> reads(NodeId node) const {
    return nodes_[node].reads;
  }
  std::size_t num_writes(NodeId node) const {
    return nodes_[node].writes.size();
  }

  // ---- between tapes: their storages may be the same ----
  // The original bytes of this state are about to change.
  void before_write(StateId state);
  // The same for whatever state the storage has, where no op of the tape tells:
  // it is about to be resized, or written from inside of an op.
  void write_aside(StorageKey storage);
  // Whether its original bytes are there and needed, and so must not be
  // written.
  bool needs_original(StateId state) const;
  // Somebody holds the bytes of this state anyway: no need to replay it.
  void offer(StateId state);

  // ---- backward ----
  // Afterwards the state is held.
  void ensure(StateId state);
  // Whether it is held, as it was.
  bool has_bytes(StateId state) const;
  // A save that was dropped has ended.
  void release(std::span<const StateId> states);

 private:
  struct State {
    StorageKey storage = 0;
    std::int64_t bytes = 0;
    NodeId maker = kNone;
    std::uint32_t readers = 0;
    std::uint32_t num_saves = 0;  // among the readers
    std::uint32_t section = 0;    // in which it was made
    std::uint32_t depth = 0;      // borders that its lineage crosses
    Why why = Why::Replayed;
    std::uint8_t float_bytes = 0;
    bool on_cpu = false;
    bool held = false;
    bool ours = false;      // what is held is memory of our own
    bool original = true;   // the storage has these bytes, while it lives
    bool by_maker = false;  // its readers rely on the maker
    bool lost = false;      // the bytes were overwritten
    bool is_saved = false;  // autograd holds it for another save
    bool is_output = false;
    bool is_leaf = false;  // a parameter, a buffer, the batch
  };
  struct Reference {
    StateId state;  // before the op
    Access access;
  };
  struct Node {
    std::vector<Reference> references;
    std::vector<StateId> reads;  // distinct
    std::vector<Made> results;
    std::vector<Made> writes;
    std::uint32_t num_needed = 0;
    std::uint32_t search = 0;  // the last one that came by
    bool done = false;
    bool packed = false;

    // Before any of the above is used.
    void clear() {
      references.clear();
      reads.clear();
      results.clear();
      writes.clear();
    }
  };
  struct Written {
    TensorUse tensor;
    StateId old;
    std::uint32_t reference;
  };
  // The op that runs now.
  struct Running {
    Node node;
    std::vector<Written> written;
    const ReplayRules* rules = nullptr;
    std::string_view name;
    Why why = Why::Replayed;
    bool expensive = false;
    std::uint32_t depth = 0;  // of what it reads
    std::size_t place = 0;    // among the keep set's ops
  };

  // Recording: tape.cpp.
  void add_tensor(const TensorUse& tensor, bool is_view);
  void begin_write(const TensorUse& tensor);
  StateId leave_state(const TensorUse& written);
  StateId find_state(const TensorUse& tensor);
  StateId new_state(const TensorUse& tensor);
  void decide_state(StateId id, NodeId maker, Why why);
  StateId read_state(const TensorUse& tensor);
  void hold_here(StateId state);
  Why why_keep(const Running& running, std::int64_t bytes,
               std::size_t output) const;
  void end_write(const Written& written, Running& running);
  bool is_written_now(StorageKey storage) const;
  void follow_keep_set(std::span<const TensorUse> results);
  void keep_packed(NodeId id, const ReplayRules& rules);

  // Saves, and what a write or the end does to states: tape_saves.cpp.
  void settle(SaveKey save, StateId state);
  void drop(SaveKey save, StateId state);
  void change(StateId id);
  void copy_out(StateId id);
  void lose_original(StateId id);
  void lose_bytes(StateId id);

  // Who needs what: tape_claims.cpp.
  bool hold(StateId id);
  void let_go(StateId id);
  bool can_claim(StateId state);
  bool is_there(StateId id) const;
  bool is_worth_dropping(StateId state);
  void claim(StateId state);
  void unclaim_all(std::span<const StateId> states);
  std::vector<StateId>& start_path(StateId id);
  void forget_maker(StateId id);
  void clear(NodeId id);

  // Replay: tape_replay.cpp.
  void replay(StateId id);
  void run_all();
  bool use_original(StateId id);
  void run(NodeId id);
  std::vector<Destination> find_targets(const Node& node) const;
  void adopt(std::span<const Made> made);
  void finish(NodeId id);

  const TapeRules rules_;
  TapeBytes& bytes_;
  std::vector<State> states_;
  std::vector<Node> nodes_;
  KeyMap current_;
  Running running_;  // if one does; its arrays are used again for the next
  bool op_is_running_ = false;
  // Of the running op's results.
  std::vector<std::pair<SaveKey, StorageKey>> pending_;
  std::vector<std::pair<SaveKey, StateId>> undecided_;
  std::size_t next_op_ = 0;  // of the keep set: those before it have run
  bool follows_keep_set_ = false;
  bool open_ = true;
  bool holds_ = true;  // what is new: Note [Held when read]
  std::uint32_t section_ = 0;
  StateId first_of_section_ = 0;
  // Read in this section, from earlier ones: to be replayed, and held.
  std::vector<StateId> crossing_;
  std::vector<StateId> held_here_;
  std::uint32_t num_searches_ = 0;
  // Of the walk along lineages that goes on now; walks do not nest.
  std::vector<StateId> path_;
  // A parameter is changed as soon as it has its gradient: replay all first.
  bool at_once_ = false;
};

}  // namespace memscale
