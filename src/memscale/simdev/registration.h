#pragma once

namespace torch {
class Library;
}

namespace memscale::sim {

// Where the device's kernels for torch's own operators are registered.
torch::Library& device_kernels();

// Each file registers its own part with torch's dispatcher. The order
// matters: the fallback takes what the others left.
void register_guard();
void register_hooks();
void register_memory_ops();
void register_attention();
void register_dropout();
void register_rnn();
void register_autocast();
void register_beyond_cpu();
void register_fallback();

// All of the above, once per process; also names the device "sim".
void register_device();

}  // namespace memscale::sim
