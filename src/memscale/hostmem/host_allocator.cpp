#include "memscale/hostmem/host_allocator.h"

#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <new>

#include "memscale/base/byte_counter.h"

namespace memscale::hostmem {
namespace {

thread_local BlockSource* redirect = nullptr;

// Wraps the allocator that was installed before it. Thread-safe; lives for
// ever, as SetAllocator demands.
class HostAllocator final : public c10::Allocator, public BlockOwner {
 public:
  explicit HostAllocator(c10::Allocator* below) : below_(below) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return wrap(nullptr);
    if (redirect != nullptr) return wrap(redirect->allocate(bytes));
    void* base = below_->raw_allocate(bytes + kBlockOverhead);
    const auto charged = static_cast<int64_t>(bytes);
    counter_.add(charged);
    return wrap(make_block(base, charged, charged, this));
  }

  void release(BlockHeader* block) noexcept override {
    counter_.subtract(block->charged);
    block->mark = 0;
    below_->raw_deallocate(block->base);
  }

  // See Note [Foreign raw pointers] in base/block.h.
  void release_foreign(void* data) { below_->raw_deallocate(data); }

  c10::DeleterFnPtr raw_deleter() const override { return &hostmem::release; }

  void copy_data(void* dest, const void* src, size_t count) const override {
    default_copy_data(dest, src, count);
  }

  Counters counters() const { return {counter_.current(), counter_.peak()}; }
  void reset_peak() { counter_.reset_peak(); }

 private:
  static c10::DataPtr wrap(void* data) {
    return {data, data, &hostmem::release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::Allocator* below_;
  ByteCounter counter_;
};

HostAllocator* installed = nullptr;

// Note [The default allocator]
// SetCPUAllocator does not reach all of torch: UntypedStorage(n), what
// storage.clone() and copy.deepcopy make of it, and buffers of Python's
// objects come from GetDefaultCPUAllocator(), a global object that cannot be
// registered anew. It has no members, so that another allocator without
// members can take its place in memory: its address, which storages hold to
// resize themselves, stays valid. A copy of it, made before, goes on to do
// what it did. Blocks that it handed out before carry its own deleter.
class DefaultAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    return installed->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &hostmem::release; }
  void copy_data(void* dest, const void* src, size_t count) const override {
    default_copy_data(dest, src, count);
  }
};
static_assert(sizeof(DefaultAllocator) == sizeof(c10::Allocator));

// torch's default allocator as it was, at another address, which is never
// freed. Its class is not public; it has no members.
c10::Allocator* move_default_away() {
  void* moved = ::operator new(sizeof(c10::Allocator));
  std::memcpy(moved, static_cast<void*>(c10::GetDefaultCPUAllocator()),
              sizeof(c10::Allocator));
  return static_cast<c10::Allocator*>(moved);
}

}  // namespace

void install() {
  if (installed != nullptr) return;
  c10::Allocator* below = c10::GetCPUAllocator();
  c10::Allocator* standard = c10::GetDefaultCPUAllocator();
  TORCH_CHECK(below->raw_deleter() != nullptr,
              "memscale: the CPU allocator in use has no raw interface and "
              "cannot be measured");
  // An allocator that somebody else has set may itself allocate from the
  // default one, which is then left as it is.
  if (below == standard) {
    below = move_default_away();
    installed = new HostAllocator(below);
    ::new (static_cast<void*>(standard)) DefaultAllocator();
  } else {
    installed = new HostAllocator(below);
  }
  // Above any priority that torch itself registers with.
  c10::SetCPUAllocator(installed, /*priority=*/255);
}

Counters counters() { return installed ? installed->counters() : Counters{}; }

void reset_peak() {
  if (installed) installed->reset_peak();
}

void release(void* data) {
  if (data == nullptr) return;
  if (BlockHeader* block = find_block(data)) {
    block->owner->release(block);
  } else {
    installed->release_foreign(data);
  }
}

RedirectGuard::RedirectGuard(BlockSource* source) noexcept
    : previous_(redirect) {
  redirect = source;
}

RedirectGuard::~RedirectGuard() { redirect = previous_; }

}  // namespace memscale::hostmem
