#include "counted_step.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "memscale/base/error.h"
#include "memscale/core/predict/trace_uses.h"
#include "memscale/core/tape/model_call.h"
#include "memscale/core/tape/tape.h"
#include "memscale/core/trace/step_schedule.h"

namespace memscale {
namespace {

class CountingTape;

struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {
  a ^= b + 0x9E3779B97F4A7C15ULL + (a << 6U) + (a >> 2U);
  return a * 0xBF58476D1CE4E5B9ULL;
}

// A block of memory, of the program or of a tape.
struct Block {
  std::int64_t bytes = 0;
  int holders = 0;
  bool is_resident = false;
  std::uint64_t content = 0;
  std::uint32_t version = 0;
};

struct Memory {
  std::vector<Block> blocks;  // first those of the plain step
  std::int64_t live = 0;
  std::int64_t freed = 0;  // since the op that runs began
  std::int64_t of_tapes = 0;

  std::size_t make(std::int64_t bytes, std::uint64_t content) {
    blocks.push_back({.bytes = bytes, .content = content});
    hold(blocks.size() - 1);
    return blocks.size() - 1;
  }
  void hold(std::size_t block) {
    if (blocks[block].holders++ == 0 && !blocks[block].is_resident) {
      live += blocks[block].bytes;
    }
  }
  void drop(std::size_t block) {
    if (--blocks[block].holders > 0 || blocks[block].is_resident) return;
    live -= blocks[block].bytes;
    freed += blocks[block].bytes;
  }
  bool is_alive(std::size_t block) const {
    return blocks[block].holders > 0 || blocks[block].is_resident;
  }
};

struct Saved {
  CountingTape* tape = nullptr;
  StateId state = 0;
  bool ended = false;
};

struct World {
  const Trace& plain;
  const Trouble& trouble;
  Memory memory{};
  std::vector<Saved> saves{};
  std::vector<int> runs{};  // by op
  CountedStep result{};
  bool has_raised = false;
  bool has_begun = false;

  void fault(std::string text) { result.faults.push_back(std::move(text)); }
  // What is made or freed until the next op begins is told of this one.
  void begin_op() {
    if (has_begun) result.bytes.push_back(memory.live + memory.freed);
    memory.freed = 0;
    has_begun = true;
  }
};

// What an op makes: by place among its results.
std::uint64_t content_of(OpId op, std::uint64_t seed, std::size_t place) {
  return mixed(mixed(seed, op.index() + 1), place);
}

class CountingBytes final : public TapeBytes {
 public:
  CountingBytes(World& world, CountingTape& tape)
      : world_(world), memory_(world.memory), tape_(tape) {}

  void set_op(OpId op) { op_ = op; }
  std::uint64_t content(StateId state) const {
    return memory_.blocks[*states_[state].held].content;
  }

  std::int64_t add_state(StateId /*state*/, const TensorUse& tensor) override {
    const Block& block = memory_.blocks[tensor.storage - 1];
    states_.push_back({.block = tensor.storage - 1,
                       .version = block.version,
                       .content = block.content,
                       .float_bytes = tensor.float_bytes});
    return block.bytes;
  }
  bool is_current(StateId id) const override {
    return memory_.blocks[states_[id].block].version == states_[id].version;
  }
  bool is_alive(StateId id) const override {
    return memory_.is_alive(states_[id].block);
  }
  bool has_original(StateId id) const override {
    return is_alive(id) && is_current(id);
  }
  bool is_whole(StateId /*state*/) const override { return true; }
  bool hold(StateId id) override {
    if (!is_alive(id)) world_.fault("a storage is held after its end");
    take(id, states_[id].block);
    return true;
  }
  void let_go(StateId id) override {
    const std::size_t block = *std::exchange(states_[id].held, {});
    memory_.of_tapes -= memory_.blocks[block].bytes;
    memory_.drop(block);
  }
  void lose_original(StateId /*state*/) override {}
  bool copy_out(StateId id) override {
    if (world_.trouble.no_memory_for_copies) return false;
    check(id, "is copied");
    const std::size_t copy = memory_.make(
        memory_.blocks[*states_[id].held].bytes, states_[id].content);
    let_go(id);
    take(id, copy);
    memory_.drop(copy);
    return true;
  }
  void show_writes(StateId /*state*/) override {}
  void end_state(StateId /*state*/) override {}

  void add_node(NodeId /*node*/) override { nodes_.push_back({op_, {}}); }
  void clear_node(NodeId node) override {
    if (const auto packed = std::exchange(nodes_[node].packed, {})) {
      memory_.of_tapes -= memory_.blocks[*packed].bytes;
      memory_.drop(*packed);
    }
  }
  bool pack(NodeId node, StateId result, Packing packing) override {
    const State& state = states_[result];
    const std::int64_t bytes = memory_.blocks[state.block].bytes;
    const std::int64_t packed = packing == Packing::HalfIndices
                                    ? bytes / 2
                                    : (bytes / state.float_bytes + 7) / 8;
    nodes_[node].packed = memory_.make(packed, state.content);
    memory_.of_tapes += packed;
    return true;
  }

  void run(NodeId node, std::span<const Destination> targets,
           std::span<const Made> written,
           std::span<const Made> results) override {
    using Kind = Destination::Kind;
    const OpId id = nodes_[node].op;
    const Op& op = world_.plain.at(id);
    begin_repeat(id);
    std::vector<std::size_t> blocks(targets.size());  // by argument
    std::vector<std::size_t> made;
    for (std::size_t i = 0; i < targets.size(); ++i) {
      State& state = states_[targets[i].state];
      const std::int64_t bytes = memory_.blocks[state.block].bytes;
      switch (targets[i].kind) {
        case Kind::Share:
          break;
        case Kind::AsHeld:
          check(targets[i].state, "is read");
          blocks[i] = *state.held;
          break;
        case Kind::Copy:
          check(targets[i].state, "is copied to be written");
          blocks[i] = memory_.make(bytes, state.content);
          made.push_back(blocks[i]);
          break;
        case Kind::TakeOver:
          check(targets[i].state, "is taken over");
          blocks[i] = *std::exchange(state.held, {});
          memory_.of_tapes -= bytes;
          made.push_back(blocks[i]);
          break;
        case Kind::Fresh:
        case Kind::Zeros:
          blocks[i] = memory_.make(bytes, 0);
          made.push_back(blocks[i]);
          break;
      }
    }
    std::uint64_t seed = 0;
    for (std::size_t i = 0; i < targets.size(); ++i) {
      if (targets[i].kind == Kind::Share) blocks[i] = blocks[targets[i].with];
      const Access access = op.use(i).access;
      if (access == Access::Read || access == Access::Update) {
        seed = mixed(seed, memory_.blocks[blocks[i]].content);
      }
    }
    if (world_.trouble.raises == id &&
        !std::exchange(world_.has_raised, true)) {
      for (const std::size_t block : made) memory_.drop(block);
      throw Refused("the op raises");
    }
    for (std::size_t i = 0; i < targets.size(); ++i) {
      if (op.use(i).access == Access::Update ||
          op.use(i).access == Access::Overwrite) {
        memory_.blocks[blocks[i]].content = content_of(id, seed, 0);
      }
    }
    for (const Made& each : written) adopt(each.state, blocks[each.place]);
    // New results that nobody needs are made all the same.
    for (std::size_t place = 0; place < op.outputs.size(); ++place) {
      const StorageId storage = world_.plain.at(op.outputs[place]).storage;
      if (!storage.valid() || world_.plain.at(storage).born != id) continue;
      made.push_back(memory_.make(world_.plain.at(storage).bytes.count(),
                                  content_of(id, seed, place)));
      const auto needed = std::ranges::find(
          results, place, [](const Made& m) { return std::size_t{m.place}; });
      if (needed != results.end()) adopt(needed->state, made.back());
    }
    for (const std::size_t block : made) memory_.drop(block);
  }
  void unpack(NodeId node, StateId result) override {
    world_.begin_op();
    if (++world_.runs[nodes_[node].op.index()] > 1) {
      world_.fault("an op is unpacked twice");
    }
    const State& state = states_[result];
    const std::size_t block =
        memory_.make(memory_.blocks[state.block].bytes,
                     memory_.blocks[*nodes_[node].packed].content);
    adopt(result, block);
    memory_.drop(block);
  }

  bool is_waiting(SaveKey save) const override {
    return !world_.saves[save].ended;
  }
  void drop_save(SaveKey save, StateId state) override {
    world_.saves[save].tape = &tape_;
    world_.saves[save].state = state;
    memory_.drop(states_[state].block);
  }
  void keep_save(SaveKey, StateId, Why) override {}
  [[noreturn]] void fail(StateId /*state*/, Failure) const override {
    throw Refused("it cannot be had any more");
  }

 private:
  struct State {
    std::size_t block;
    std::uint32_t version;
    std::uint64_t content;
    std::uint8_t float_bytes;
    std::optional<std::size_t> held{};
  };
  struct Node {
    OpId op;
    std::optional<std::size_t> packed;
  };

  void begin_repeat(OpId op) {
    world_.begin_op();
    ++world_.result.num_repeated;
    if (++world_.runs[op.index()] > 1 && world_.trouble.raises != op) {
      world_.fault(str("op ", op, " is repeated twice"));
    }
  }
  void take(StateId id, std::size_t block) {
    memory_.hold(block);
    states_[id].held = block;
    memory_.of_tapes += memory_.blocks[block].bytes;
  }
  void adopt(StateId id, std::size_t block) {
    if (memory_.blocks[block].content != states_[id].content) {
      world_.fault(str("state ", id, " is not what it was"));
    }
    take(id, block);
  }
  // What is held of a state has to be the state.
  void check(StateId id, std::string_view what) {
    const State& state = states_[id];
    if (!state.held) throw Refused("its memory is gone");
    if (memory_.blocks[*state.held].content != state.content) {
      world_.fault(str("other bytes than state ", id, "'s: ", what));
    }
  }

  World& world_;
  Memory& memory_;
  CountingTape& tape_;
  OpId op_;
  std::vector<State> states_;
  std::vector<Node> nodes_;
};

class CountingTape final {
 public:
  using Claimed = Tape::Claim;

  CountingTape(const TapeRules& rules, World& world)
      : bytes_(world, *this), tape_(rules, bytes_) {}

  Tape& tape() { return tape_; }
  CountingBytes& bytes() { return bytes_; }
  ReplayPolicy policy() const { return tape_.policy(); }
  bool spans_layers() const { return tape_.spans_layers(); }
  void cross_border() { tape_.cross_border(); }
  void add_output(StorageKey storage) { tape_.add_output(storage); }
  void decide_again() { tape_.decide_again(); }
  std::vector<Claimed> close() { return tape_.close(); }
  void before_write(StateId state) { tape_.before_write(state); }
  void write_aside(StorageKey storage) { tape_.write_aside(storage); }
  bool needs_original(StateId id) const { return tape_.needs_original(id); }
  void offer(StateId state) { tape_.offer(state); }

 private:
  CountingBytes bytes_;
  Tape tape_;
};

class Walk final {
 public:
  Walk(const Trace& plain, const std::vector<TapeRules>& layers, bool on_cpu,
       const Trouble& trouble)
      : plain_(plain),
        schedule_(plain),
        layers_(layers),
        uses_(plain, on_cpu, {}),
        world_{.plain = plain, .trouble = trouble} {
    world_.saves.resize(plain.saves.size());
    world_.runs.resize(plain.ops.size());
    for (const Storage& storage : plain.storages) {
      const bool resident = !storage.born.valid();
      world_.memory.blocks.push_back(
          {.bytes = storage.bytes.count(),
           .is_resident = resident,
           .content = mixed(world_.memory.blocks.size(), 77)});
      if (resident) world_.memory.live += storage.bytes.count();
    }
  }

  CountedStep run() {
    for (std::size_t i = 0; i < plain_.ops.size(); ++i) {
      if (i == 0) tell_events(0);
      const bool forward = plain_.ops[i].phase == Phase::Forward;
      for (const std::size_t save : schedule_.asked[i]) ask(save);
      world_.begin_op();
      if (forward) {
        run_forward(i);
      } else {
        for (const ValueId output : plain_.ops[i].outputs) make(output, i);
      }
      end(i);
    }
    world_.begin_op();
    world_.result.held_by_tapes = world_.memory.of_tapes;
    return std::move(world_.result);
  }

 private:
  std::size_t block_of(ValueId value) const {
    return plain_.at(value).storage.index();
  }
  // The program holds what it makes.
  void make(ValueId output, std::size_t op) {
    const StorageId storage = plain_.at(output).storage;
    if (!storage.valid() || plain_.at(storage).born != OpId(op)) return;
    if (world_.memory.blocks[storage.index()].holders == 0) {
      world_.memory.hold(storage.index());
    }
  }

  void ask(std::size_t save) {
    const Saved& saved = world_.saves[save];
    const std::uint64_t expected =
        world_.memory.blocks[block_of(plain_.saves[save].value)].content;
    if (saved.tape == nullptr) return;
    std::optional<std::uint64_t> found;
    for (int attempt = 0; attempt < 2 && !found; ++attempt) {
      try {
        saved.tape->tape().ensure(saved.state);
        found = saved.tape->bytes().content(saved.state);
      } catch (const Refused&) {
      }
    }
    if (!found) {
      ++world_.result.num_failed;
    } else if (*found != expected) {
      world_.fault(str("save ", save, " is given other bytes"));
    }
  }

  void run_forward(std::size_t index) {
    const OpId id(index);
    const Op& op = plain_.ops[index];
    const OpUse use = uses_.of(id);
    for (const TensorUse& tensor : use.tensors) {
      if (tensor.access != Access::Read) claims_.before_write(tensor.storage);
    }
    CountingTape* const tape = open_tape();
    if (tape != nullptr) {
      tape->bytes().set_op(id);
      tape->tape().begin_op(use);
    }
    // The op runs.
    std::uint64_t seed = 0;
    for (const TensorUse& tensor : use.tensors) {
      if (tensor.access == Access::Read || tensor.access == Access::Update) {
        seed = mixed(seed, world_.memory.blocks[tensor.storage - 1].content);
      }
    }
    for (const ValueId output : op.outputs) make(output, index);
    if (!op.in_function) decide_all(index);
    for (const TensorUse& tensor : use.tensors) {
      Block& block = world_.memory.blocks[tensor.storage - 1];
      if (tensor.access == Access::Update ||
          tensor.access == Access::Overwrite) {
        block.content = content_of(id, seed, 0);
        ++block.version;
      }
    }
    for (std::size_t place = 0; place < op.outputs.size(); ++place) {
      const StorageId storage = plain_.at(op.outputs[place]).storage;
      if (!storage.valid()) continue;
      Block& block = world_.memory.blocks[storage.index()];
      block.version = plain_.at(op.outputs[place]).version;
      if (plain_.at(storage).born == id) {
        block.content = content_of(id, seed, place);
      }
    }
    if (tape != nullptr) tape->tape().end_op(uses_.results_of(id));
    if (op.in_function) decide_all(index);
  }

  CountingTape* open_tape() {
    if (!call_) return nullptr;
    return call_->open_tape([&](const TapeRules& rules) {
      return tapes_.emplace_back(std::make_shared<CountingTape>(rules, world_));
    });
  }

  void decide_all(std::size_t op) {
    for (const std::size_t save : schedule_.saves[op]) {
      const std::size_t block = block_of(plain_.saves[save].value);
      world_.memory.hold(block);
      if (!call_) continue;
      CountingTape* const tape = call_->tape();
      if (tape == nullptr || tape->tape().decide(save, block + 1)) {
        claims_.offer(block + 1);
      }
    }
  }

  void end(std::size_t op) {
    tell_events(op + 1);
    for (const std::size_t i : schedule_.let_go[op]) world_.memory.drop(i);
    for (const std::size_t save : schedule_.released[op]) {
      Saved& saved = world_.saves[save];
      saved.ended = true;
      if (saved.tape == nullptr) {
        world_.memory.drop(block_of(plain_.saves[save].value));
      } else {
        saved.tape->tape().release({&saved.state, 1});
      }
    }
  }

  void tell_events(std::size_t op) {
    while (next_event_ < plain_.events.size() &&
           plain_.events[next_event_].op <= op) {
      tell(plain_.events[next_event_++]);
    }
  }
  void tell(const Event& event) {
    using Kind = Event::Kind;
    CountingTape* const tape = call_ ? call_->tape() : nullptr;
    switch (event.kind) {
      case Kind::EnterLayer:
        if (depth_++ == 0) {
          call_.emplace(layers_, claims_);
        } else {
          call_->enter_layer(event.layer.index());
        }
        return;
      case Kind::LeaveLayer:
        if (--depth_ > 0) {
          call_->leave_layer();
          return;
        }
        call_->leave({});
        call_.reset();
        return;
      case Kind::EnterFunction: {
        const auto tensors = uses_.values(event.values);
        for (const TensorUse& tensor : tensors) {
          claims_.before_write(tensor.storage);
        }
        if (tape != nullptr) tape->tape().begin_function(tensors);
        return;
      }
      case Kind::LeaveFunction: {
        const auto tensors = uses_.values(event.values);
        for (const TensorUse& tensor : tensors) {
          Block& block = world_.memory.blocks[tensor.storage - 1];
          block.content = mixed(block.content, 1234);
          ++block.version;
        }
        if (tape != nullptr) tape->tape().end_function(tensors);
        return;
      }
    }
  }

  const Trace& plain_;
  const StepSchedule schedule_;
  const std::vector<TapeRules>& layers_;
  TraceUses uses_;
  World world_;
  std::vector<std::shared_ptr<CountingTape>> tapes_;
  Claims<CountingTape> claims_;
  std::optional<ModelCall<CountingTape>> call_;
  std::size_t depth_ = 0;
  std::size_t next_event_ = 0;
};

}  // namespace

CountedStep counted_step(const Trace& plain,
                         const std::vector<TapeRules>& layers, bool on_cpu,
                         const Trouble& trouble) {
  return Walk(plain, layers, on_cpu, trouble).run();
}

}  // namespace memscale
