#include "memscale/core/trace/timeline.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "memscale/base/error.h"

namespace memscale {
namespace {

// Far above any allocator's; with what Trace::check allows, no sum overflows.
constexpr Bytes kMaxGranularity = 1_GiB;

bool lives_between_steps(const Storage& storage) {
  if (storage.freed.valid()) return false;
  switch (storage.category) {
    case Category::Parameter:
    case Category::Buffer:
    case Category::Input:
    case Category::OptimizerState:
      return true;
    case Category::Gradient:
      return !storage.born.valid();  // from the step before
    case Category::Activation:
    case Category::Recompute:
    case Category::Transient:
      return false;
  }
  return false;
}

Bytes& of(BytesByCategory& by_category, Category category) {
  return by_category[static_cast<std::size_t>(category)];
}

Bytes sum(const BytesByCategory& by_category) {
  return std::accumulate(by_category.begin(), by_category.end(), Bytes());
}

// The first with the most bytes of those that `counts` is true for.
template <typename Counts>
std::optional<Instant> first_peak(std::span<const Instant> instants,
                                  const Counts& counts) {
  const Instant* best = nullptr;
  for (const Instant& instant : instants) {
    if (!counts(instant)) continue;
    if (best == nullptr || instant.bytes > best->bytes) best = &instant;
  }
  return best == nullptr ? std::nullopt : std::optional(*best);
}

}  // namespace

Timeline::Timeline(const Trace& trace, Place place, Bytes granularity)
    : trace_(&trace), place_(place), granularity_(granularity) {
  if (granularity < 1_B || granularity > kMaxGranularity) {
    throw TraceError(str("granularity must be from 1 to ",
                         kMaxGranularity.count(), " bytes, got ",
                         granularity.count()));
  }
  trace.check();

  // At first an instant holds only the change against the one before: what is
  // born at its op, less what was freed at the last. Then they are summed up.
  const std::size_t num_ops = trace.ops.size();
  instants_.resize(num_ops);
  for (const Storage& storage : trace.storages) {
    if (storage.place != place_) continue;
    const Bytes bytes = charged(storage);
    if (lives_between_steps(storage)) resident_ += bytes;
    const std::size_t first = storage.born.valid() ? storage.born.index() : 0;
    const std::size_t end =
        storage.freed.valid() ? storage.freed.index() + 1 : num_ops;
    if (first < num_ops) {
      of(instants_[first].by_category, storage.category) += bytes;
    }
    if (end < num_ops) {
      of(instants_[end].by_category, storage.category) -= bytes;
    }
  }

  BytesByCategory now;
  for (std::size_t i = 0; i < num_ops; ++i) {
    Instant& instant = instants_[i];
    std::ranges::transform(now, instant.by_category, now.begin(),
                           std::plus<Bytes>());
    instant.op = OpId(i);
    instant.by_category = now;
    of(instant.by_category, Category::Transient) += workspace(trace.ops[i]);
    instant.bytes = sum(instant.by_category);
  }
}

std::optional<Instant> Timeline::peak() const {
  return first_peak(instants_, [](const Instant&) { return true; });
}

std::optional<Instant> Timeline::peak(Phase phase) const {
  return first_peak(instants_, [&](const Instant& instant) {
    return trace_->at(instant.op).phase == phase;
  });
}

std::vector<LayerShare> Timeline::by_layer(OpId op) const {
  // The last one is for what is outside of all layers.
  std::vector<LayerShare> shares(trace_->layers.size() + 1);
  const auto share_of = [&](LayerId layer) -> LayerShare& {
    return layer.valid() ? shares[layer.index()] : shares.back();
  };
  const Op& running = trace_->at(op);
  for (std::size_t i = 0; i + 1 < shares.size(); ++i) {
    shares[i].layer = LayerId(i);
  }
  for (const Storage& storage : trace_->storages) {
    if (!is_held(storage, op)) continue;
    of(share_of(storage.layer).by_category, storage.category) +=
        charged(storage);
  }
  of(share_of(running.layer).by_category, Category::Transient) +=
      workspace(running);

  for (LayerShare& share : shares) share.bytes = sum(share.by_category);
  std::erase_if(shares, [](const auto& share) { return share.bytes == 0_B; });
  // Stable, and invalid ids stand last: ties stay in the order of layers.
  std::ranges::stable_sort(shares, std::greater(), &LayerShare::bytes);
  return shares;
}

std::vector<StorageId> Timeline::held(OpId op) const {
  std::vector<StorageId> ids;
  trace_->at(op);  // throws if there is no such op
  for (std::size_t i = 0; i < trace_->storages.size(); ++i) {
    if (is_held(trace_->storages[i], op)) ids.emplace_back(i);
  }
  std::ranges::stable_sort(ids, std::greater(), [&](StorageId id) {
    return charged(trace_->at(id));
  });
  return ids;
}

bool Timeline::is_held(const Storage& storage, OpId op) const {
  // An invalid id compares after every valid one: freed never.
  return storage.place == place_ &&
         (!storage.born.valid() || storage.born <= op) && op <= storage.freed;
}

Bytes Timeline::charged(const Storage& storage) const {
  return rounded(storage.bytes) * storage.count;
}

Bytes Timeline::workspace(const Op& op) const {
  return place_ == Place::Device ? rounded(op.workspace) : Bytes();
}

}  // namespace memscale
