#include "memscale/hostmem/host_allocator.h"

#include <c10/core/CPUAllocator.h>

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

}  // namespace

void install() {
  if (installed != nullptr) return;
  c10::Allocator* below = c10::GetCPUAllocator();
  TORCH_CHECK(below->raw_deleter() != nullptr,
              "memscale: the CPU allocator in use has no raw interface and "
              "cannot be measured");
  installed = new HostAllocator(below);
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
