#pragma once

namespace memscale::sim {

// Told by the device's guard: autograd's engine sets the device in each thread
// that it starts for it. Any thread; a thread of the user's counts as well.
void note_device_set() noexcept;

// Returns when autograd's device thread has let go of every backward so far.
// A process that begins to exit while it does so would have that thread wait
// for a Python interpreter that is going away, and abort. The caller must not
// hold the GIL, which the thread may need. False: there was nothing to wait
// for, as no thread of the engine was started, or no way to.
bool wait_for_backward() noexcept;

}  // namespace memscale::sim
