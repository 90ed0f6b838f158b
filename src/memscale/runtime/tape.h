#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "memscale/core/replay_rules.h"
#include "memscale/runtime/geometry.h"
#include "memscale/runtime/kernel_flags.h"
#include "memscale/runtime/replay_stats.h"
#include "memscale/runtime/streams.h"

namespace memscale {

struct OpInfo;
class SavedTensor;

// The ops of one call of one layer (or of what runs between two of them), and
// from them the values that backward asks for.
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
// Note [Whole storages]
// A program may free a storage by hand (resize_(0), as reversible layers and
// sharded parameters do) and fill it again. So a state knows where its bytes
// were and how many: what has moved or shrunk since is neither read nor copied.
//
// Note [Why replay is bit-equal]
// The same kernel is called on the same bytes at the same strides, with the
// same arguments, generator state, kernel flags and grad mode, below autograd
// and autocast, which had their say when it was recorded. Nothing is replayed
// from bytes whose version differs from the recorded one, and nothing is
// written but memory of our own. What backward is given shares one version
// counter for each state: who writes into it makes every later use raise.
//
// Note [Borders]
// Where one layer ends and the next begins, its input is held: otherwise the
// first replay of backward would bring back every layer's. Under
// ReplayPolicy::Cheap a lineage may cross a few borders: a CNN's block inputs
// come from convolutions that are kept anyway, through batch norm and relu.
//
// Recorded by one thread, then asked by any: methods lock, as Note [Waiting for
// a tape] says. decide() and release() never wait.
class Tape final : public std::enable_shared_from_this<Tape> {
 public:
  using StateId = std::uint32_t;

  Tape(TapeRules rules, std::shared_ptr<ReplayStats> stats);
  ~Tape();

  ReplayPolicy policy() const { return rules_.policy; }

  // ---- forward: one thread, until close() ----
  void begin_op(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs,
                bool in_function);
  void end_op(c10::ArrayRef<c10::IValue> outputs, std::size_t num_expected);
  // Around a custom Function, with the plain tensors that it may write: Note
  // [Unseen writes].
  void begin_function(c10::ArrayRef<at::Tensor> arguments);
  void end_function(c10::ArrayRef<at::Tensor> arguments);
  // Decides for one save: `save` holds the tensor, and may be made to drop it.
  // True: it stays held, and came from outside of this tape. Never waits: while
  // another thread replays, it stays held.
  bool decide(const at::Tensor& tensor,
              const std::shared_ptr<SavedTensor>& save);
  // A state that others must be asked about before its storage is written.
  struct Claim {
    StoragePtr storage;
    StateId state;
  };
  // The call returns this tensor: the caller has its bytes from now on.
  void add_output(const at::Tensor& tensor);
  // Saves that were kept because dropping them would have gained nothing.
  void decide_again();
  // Another layer begins. What nobody reads is not held any longer, but can be
  // read for as long as somebody else holds it.
  void cross_border();
  // Whether lineages may cross borders. See Note [Borders].
  bool spans_layers();
  // No more ops. What nobody reads is let go.
  std::vector<Claim> close();

  // ---- between tapes: their storages may be the same ----
  // The original bytes of this state are about to change.
  void before_write(StateId state, const StoragePtr& storage);
  // The same for whatever state the storage has, where no op of the tape tells:
  // it is about to be resized, or written from inside of an op.
  void write_aside(const StoragePtr& storage);
  // Whether its original bytes are there and needed, and so must not be
  // written.
  bool needs_original(StateId state);
  // Somebody holds the bytes of this state anyway: no need to replay it.
  void offer(StateId state, const StoragePtr& storage);

  // ---- backward: any thread ----
  at::Tensor materialise(StateId state, const Geometry& geometry);
  c10::Device device_of(StateId state);
  void release(StateId state) noexcept;

 private:
  using NodeId = std::uint32_t;
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  struct State {
    NodeId maker = kNone;
    std::uint32_t readers = 0;
    std::size_t bytes = 0;
    c10::Device device = c10::kCPU;
    c10::StreamId stream = 0;  // on which it was made: see Note [Streams]
    StoragePtr held;
    // The original storage, for as long as it has these bytes.
    WeakStoragePtr original{StoragePtr()};
    const void* data = nullptr;  // where its bytes were
    c10::VariableVersion counter;
    std::uint32_t version = 0;
    // Of the tensors over memory of our own that backward was given.
    c10::VariableVersion handed_out{c10::VariableVersion::DISABLED};
    std::uint32_t num_saves = 0;  // among the readers
    // The storage, once it was written: autograd's saves see that, unless the
    // write gave them a new version, and then they raise.
    StoragePtr changed;
    const OpInfo* op = nullptr;  // that made it, if that is known
    const char* why = nullptr;   // it is held; nullptr: it is replayed
    std::uint32_t section = 0;   // in which it was made
    std::uint32_t depth = 0;     // borders that its lineage crosses
    bool ours = false;           // held is memory of our own
    bool by_maker = false;       // its readers rely on the maker
    bool lost = false;           // the bytes were overwritten
    bool is_saved = false;       // autograd holds it for another save
    bool is_output = false;      // the call returns it
    bool is_leaf = false;        // a parameter, a buffer, the batch
    bool counted = false;
  };
  enum class Access : std::uint8_t { Read, Update, Overwrite, Scratch };
  struct Reference {
    std::uint32_t argument;
    std::int32_t element;  // of a list; -1: not a list
    Access access;
    StateId state;  // before the op
    Geometry geometry;
  };
  struct List {
    std::uint32_t argument;
    std::uint32_t length;
    bool of_optional;
  };
  struct Made {
    std::uint32_t place;  // among the results, or among the references
    StateId state;
  };
  struct Node {
    const OpInfo* op = nullptr;
    std::vector<c10::IValue> arguments;  // tensors are left out
    std::vector<Reference> references;
    std::vector<List> lists;
    std::vector<StateId> reads;  // distinct
    std::vector<Made> results;
    std::vector<Made> writes;
    at::Generator generator;  // as it was; undefined: not random
    // What it made, in fewer bits; then it is not called again. Host memory.
    StoragePtr packed;
    std::uint32_t num_needed = 0;
    caffe2::TypeMeta default_type;  // some results' dtypes depend on it
    KernelFlags kernel_flags = 0;
    bool grad_mode = false;
    bool done = false;
    std::uint32_t search = 0;  // the last one that came by
  };
  struct Written {
    at::Tensor tensor;  // an alias
    StateId old;
    Access access;
    std::uint32_t reference;
  };
  // The op that runs now.
  struct Running {
    Node node;
    std::vector<Written> written;
    const char* why = nullptr;  // it cannot be replayed
    bool expensive = false;     // its results are worth keeping, for their work
    std::uint32_t depth = 0;    // of what it reads
    // What a view op got, if a keep set is followed.
    std::vector<std::pair<const c10::StorageImpl*, Geometry>> viewed;
  };
  class Locked;

  // Recording.
  const char* why_not(const OpInfo& info,
                      c10::ArrayRef<const c10::IValue> inputs,
                      bool in_function) const;
  void add_argument(std::size_t place, const c10::IValue& input, Access access);
  void add_tensor(const at::Tensor& tensor, std::size_t argument,
                  std::int32_t element, Access access);
  void begin_write(const at::Tensor& tensor, Access access);
  StateId leave_state(const at::Tensor& written);
  StateId find_state(const at::Tensor& tensor);
  StateId new_state(const at::Tensor& tensor, const OpInfo* op, NodeId maker,
                    const char* why);
  const char* why_keep(const Running& running, std::size_t bytes,
                       std::size_t output);
  void end_write(const Written& written, const OpInfo& info, Running& running);
  bool is_identity(const Running& running,
                   c10::ArrayRef<c10::IValue> outputs) const;
  bool is_written_now(const c10::StorageImpl* storage) const;
  bool is_current(const State& state) const;
  static bool is_whole(const State& state, const c10::StorageImpl& storage);
  bool has_bytes(const State& state) const;
  StateId read_state(const at::Tensor& tensor);
  void hold_here(StateId state, const at::Tensor& tensor);
  void follow_keep_set(const OpInfo& info);
  void settle(const std::shared_ptr<SavedTensor>& save, StateId state);
  void change(State& state, const StoragePtr& written);
  void copy_out(State& state);
  // In fewer bits, to the bit: tape_packed.cpp.
  void keep_packed(Node& node);
  void pack_draws(Node& node);
  void pack_indices(Node& node);
  StoragePtr unpack(const Node& node) const;

  // Who needs what: tape_claims.cpp.
  bool can_claim(StateId state);
  bool is_there(const State& state) const;
  bool is_worth_dropping(StateId state);
  void claim(StateId state);
  void unclaim_all(std::vector<StateId> states);
  void forget_maker(State& state);
  void bury(StoragePtr& storage);

  // Replay: tape_replay.cpp.
  void replay(StateId state);
  void ensure(StateId state);
  void run_all();
  bool use_original(State& state);
  void run(Node& node);
  void adopt(StateId state, const StoragePtr& storage, const Node& node);
  void finish(Node& node);
  std::vector<StoragePtr> make_targets(const Node& node);
  std::vector<c10::IValue> make_stack(const Node& node,
                                      const std::vector<StoragePtr>& targets);
  void check(const State& state, const Geometry& geometry) const;
  // Before this thread reads what is held of it, on the device.
  static void use_here(const State& state);
  void drain() noexcept;

  const TapeRules rules_;
  const std::shared_ptr<ReplayStats> stats_;

  std::mutex mutex_;
  std::atomic<std::thread::id> owner_;  // of mutex_
  std::vector<State> states_;
  std::vector<Node> nodes_;
  ska::flat_hash_map<const c10::StorageImpl*, StateId> current_;
  std::optional<Running> running_;
  std::vector<std::shared_ptr<SavedTensor>>
      pending_;  // of the running op's results
  std::vector<std::pair<std::weak_ptr<SavedTensor>, StateId>> undecided_;
  std::size_t num_ops_ = 0;  // of the keep set, followed so far
  bool follows_keep_set_ = false;
  bool open_ = true;
  bool holds_ = true;  // what is new: Note [Held when read]
  std::uint32_t section_ = 0;
  StateId first_of_section_ = 0;
  // Read in this section, from earlier ones: to be replayed, and held.
  std::vector<StateId> crossing_;
  std::vector<StateId> held_here_;
  std::uint32_t num_searches_ = 0;
  // A parameter is changed as soon as it has its gradient: replay all first.
  bool at_once_ = false;

  // Note [Foreign storages]
  // Bytes that are not ours may belong to numpy, whose deleter wants the GIL:
  // they are let go after the lock.
  std::vector<StoragePtr> buried_;

  std::mutex queue_mutex_;
  std::vector<StateId> queue_;  // to be released
  std::atomic<std::size_t> num_queued_{0};
};

}  // namespace memscale
