#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "memscale/core/tape/op_use.h"
#include "memscale/core/tape/why.h"

namespace memscale {

// Numbers of a tape's own, counting up from 0.
using StateId = std::uint32_t;
using NodeId = std::uint32_t;
inline constexpr std::uint32_t kNone = ~std::uint32_t{0};

// Of a layer: arrays of an open tape have room for so many. A closed one lives
// until backward, so most of what it does not need is given back.
inline constexpr std::size_t kExpectedOps = 64;
template <typename T>
void drop_spare_room(std::vector<T>& array) {
  if (2 * array.size() < array.capacity()) array.shrink_to_fit();
}

// Which save: a number that only TapeBytes understands.
using SaveKey = std::uint64_t;

// How a result is held in fewer bits, without loss.
enum class Packing : std::uint8_t {
  Bits,         // zeros and ones: a bit each
  HalfIndices,  // indices of 64 bits: 32 each
};

// Memory for a tensor that a repeated op is given, which was a state.
struct Destination {
  enum class Kind : std::uint8_t {
    AsHeld,    // it reads what is held of the state
    Fresh,     // memory that the op fills
    Zeros,     // memory that nobody reads afterwards
    Copy,      // of what is held of the state, which stays
    TakeOver,  // what is held of the state, which has no other reader
    Share,     // the target of the reference `with`
  };
  StateId state = 0;
  Kind kind = Kind::AsHeld;
  std::uint32_t with = 0;
};

// A state that an op made, as its result or by writing into an argument.
struct Made {
  std::uint32_t place;  // among the results, or among the tensors it was given
  StateId state;
};

// Why a state cannot be had any more.
enum class Failure : std::uint8_t {
  Changed,  // what it is made from was changed in place
  Freed,    // its memory was freed, resized or moved by hand
};

// What a tape does to memory. Over tensors when a model trains, over a trace
// when a step is predicted. States and nodes are added in order, so
// implementations keep them in arrays. Calls come one at a time: who uses a
// tape from several threads locks it (LockedTape).
//
// A fate of a save that is neither kept nor dropped (sent to the host) joins
// here: one more call beside drop_save, and one that brings the state back.
class TapeBytes {
 public:
  virtual ~TapeBytes() = default;

  // ---- states: the bytes of a storage between two writes ----
  // The next state begins: the bytes of this tensor's storage as they are now.
  // Returns how many there are.
  virtual std::int64_t add_state(StateId state, const TensorUse& tensor) = 0;
  // Asked while the storage is alive: nobody has written, moved or resized it.
  virtual bool is_current(StateId state) const = 0;
  // Whether somebody holds the storage, whatever is in it.
  virtual bool is_alive(StateId state) const = 0;
  // Whether somebody holds the storage, and it certainly has these bytes.
  virtual bool has_original(StateId state) const = 0;
  // Of an original that is held: whether it was not moved or resized by hand.
  virtual bool is_whole(StateId state) const = 0;
  // Holds the original. False: somebody has just let it go.
  virtual bool hold(StateId state) = 0;
  // Lets go of what is held: the original, or memory of our own.
  virtual void let_go(StateId state) = 0;
  // The original is about to be written, or nobody will ask for it.
  virtual void lose_original(StateId state) = 0;
  // Holds a copy in place of the original. False: there is no memory for it,
  // and nothing is held any more.
  virtual bool copy_out(StateId state) = 0;
  // Saves were dropped that see what is written into the storage, as autograd's
  // own would. Comes before lose_original.
  virtual void show_writes(StateId state) = 0;
  // Its last reader is gone.
  virtual void end_state(StateId state) = 0;

  // ---- nodes: ops that can be repeated ----
  // The op that has just run becomes the next node.
  virtual void add_node(NodeId node) = 0;
  // It will not run (again).
  virtual void clear_node(NodeId node) = 0;
  // From now on its one result is held packed, and unpack() stands for run().
  // False: it cannot be.
  virtual bool pack(NodeId node, StateId result, Packing packing) = 0;
  // Repeats the op, with targets by the tensors that it was given, and holds
  // these of the states that it makes, as memory of our own. Throws if it
  // cannot; what was taken over is then lost.
  virtual void run(NodeId node, std::span<const Destination> targets,
                   std::span<const Made> written,
                   std::span<const Made> results) = 0;
  virtual void unpack(NodeId node, StateId result) = 0;

  // ---- saves ----
  // Whether autograd still has it.
  virtual bool is_waiting(SaveKey save) const = 0;
  // The save is to be had from this state, until Tape::release.
  virtual void drop_save(SaveKey save, StateId state) = 0;
  // Autograd holds the tensor. The state is kNone if it is not known.
  virtual void keep_save(SaveKey save, StateId state, Why why) = 0;

  // Throws what tells the user.
  [[noreturn]] virtual void fail(StateId state, Failure failure) const = 0;

  // What was let go and has to be freed outside of any lock: null, mostly.
  virtual std::shared_ptr<void> take_dead() { return nullptr; }
};

}  // namespace memscale
