#pragma once

#include <cstddef>
#include <string>

// The cards of the machine that the stand-in shows: all alike, and described by
// the environment when the first of them is asked for (cards.py writes it):
//   STANDIN_CARD     name;compute capability;bytes;multiprocessors,
//                    e.g. "NVIDIA RTX 3090;8.6;25769803776;82"
//   STANDIN_DEVICES  how many there are; 1 if not given

namespace standin {

struct Card {
  std::string name;
  int major = 0;
  int minor = 0;
  std::size_t memory_bytes = 0;
  int num_multiprocessors = 0;
  // What follows from the compute capability.
  std::size_t shared_bytes_per_block =
      0;  // the most that a kernel may opt into
  int threads_per_multiprocessor = 0;
  int blocks_per_multiprocessor = 0;
};

// Ends the process with a message if the environment describes no card.
const Card& card();
int num_devices();

}  // namespace standin
