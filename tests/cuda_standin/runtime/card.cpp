#include "card.h"

#include <array>
#include <cstdio>
#include <cstdlib>

namespace standin {
namespace {

struct Limits {
  int capability;  // ten times major, plus minor
  std::size_t shared_kib;
  int threads, blocks;
};

// From the table of technical specifications in CUDA's programming guide. torch
// chooses attention kernels and launch shapes by them.
constexpr std::array kLimits = {
    Limits{70, 96, 2048, 32},   Limits{75, 64, 1024, 16},
    Limits{80, 163, 2048, 32},  Limits{86, 99, 1536, 16},
    Limits{89, 99, 1536, 24},   Limits{90, 227, 2048, 32},
    Limits{100, 227, 2048, 32}, Limits{120, 99, 1536, 24},
};

[[noreturn]] void refuse(const std::string& text) {
  std::fprintf(stderr,
               "stand-in CUDA runtime: STANDIN_CARD is \"%s\", not "
               "name;capability;bytes;multiprocessors of a known capability "
               "(see tests/cuda_standin/cards.py)\n",
               text.c_str());
  std::exit(2);
}

Card parse(const std::string& text) {
  Card card;
  std::array<char, 200> name{};
  if (std::sscanf(text.c_str(), "%199[^;];%d.%d;%zu;%d", name.data(),
                  &card.major, &card.minor, &card.memory_bytes,
                  &card.num_multiprocessors) != 5) {
    refuse(text);
  }
  card.name = name.data();
  for (const Limits& limits : kLimits) {
    if (limits.capability != card.major * 10 + card.minor) continue;
    card.shared_bytes_per_block = limits.shared_kib << 10;
    card.threads_per_multiprocessor = limits.threads;
    card.blocks_per_multiprocessor = limits.blocks;
    return card;
  }
  refuse(text);
}

std::string variable(const char* name, const char* otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? text : otherwise;
}

}  // namespace

const Card& card() {
  static const Card instance =
      parse(variable("STANDIN_CARD", "NVIDIA RTX 3090;8.6;25769803776;82"));
  return instance;
}

int num_devices() {
  static const int count = std::atoi(variable("STANDIN_DEVICES", "1").c_str());
  return count;
}

}  // namespace standin
