#pragma once

#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>

// Note [Streams]
// A device that computes on its own does so in streams: an op waits for the
// earlier ops of its stream only, and memory that is let go is given out again
// to the stream that it was made for, at once. Autograd runs each backward op
// on the stream of its forward op, and so does replay, which may then read
// bytes that were made on another. It waits for them, and tells the allocator.
// Nothing of it happens on the CPU, and next to nothing where all streams are
// one.

namespace memscale {

// That this thread's ops on the device go to; 0 where there are none.
c10::StreamId current_stream(c10::Device device);

// This thread is about to read or write these bytes, which were made on the
// stream `made_on`. `foreign`: the memory may be of yet another stream.
void use_on_current_stream(const c10::StorageImpl& storage,
                           c10::StreamId made_on, bool foreign);

}  // namespace memscale
