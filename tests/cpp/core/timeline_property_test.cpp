#include "memscale/core/trace/timeline.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "memscale/core/trace/trace_json.h"

namespace memscale {
namespace {

// An index below `count`, or now and then (or if there is none) no id.
template <typename Id>
Id maybe_id(std::size_t first, std::size_t count) {
  if (first >= count || *rc::gen::inRange(0, 4) == 0) return Id();
  return Id(*rc::gen::inRange(first, count));
}

template <NamedEnum E>
E any_of() {
  return *rc::gen::map(rc::gen::inRange<std::size_t>(0, enum_table<E>().size()),
                       [](std::size_t i) { return static_cast<E>(i); });
}

// Any text that JSON can hold: all of ASCII, and some from beyond.
std::string text() {
  std::string result;
  for (const int code :
       *rc::gen::container<std::vector<int>>(rc::gen::inRange(0, 131))) {
    constexpr std::string_view kLong[] = {"\xc3\xa9", "\xe2\x82\xac",
                                          "\xf0\x9f\x98\x80"};
    if (code < 128) {
      result += static_cast<char>(code);
    } else {
      result += kLong[code - 128];
    }
  }
  return result;
}

std::vector<ValueId> value_ids(std::size_t num_values) {
  if (num_values == 0) return {};
  return *rc::gen::container<std::vector<ValueId>>(
      rc::gen::map(rc::gen::inRange<std::size_t>(0, num_values),
                   [](std::size_t i) { return ValueId(i); }));
}

// A sound trace that means nothing. Few distinct sizes, so that ties happen.
Trace any_trace() {
  Trace trace;
  const auto num = [](std::size_t most) {
    return *rc::gen::inRange<std::size_t>(0, most + 1);
  };
  const auto bytes = [] {
    return Bytes(*rc::gen::element<std::int64_t>(0, 1, 2, 100, 511, 512, 513,
                                                 1024, 7000));
  };
  trace.layers.resize(num(3));
  trace.ops.resize(num(8));
  trace.values.resize(num(4));
  trace.storages.resize(num(10));
  if (!trace.ops.empty() && !trace.values.empty()) trace.saves.resize(num(3));
  const std::size_t num_layers = trace.layers.size();
  const std::size_t num_ops = trace.ops.size();

  for (Layer& layer : trace.layers) {
    layer = {text()};
  }
  for (std::size_t i = 0; i < num_ops; ++i) {
    Op& op = trace.ops[i];
    op.name = text();
    op.phase = any_of<Phase>();
    op.layer = maybe_id<LayerId>(0, num_layers);
    op.forward = maybe_id<OpId>(0, i);
    op.inputs = value_ids(trace.values.size());
    op.outputs = value_ids(trace.values.size());
    for (bool* flag : {&op.random, &op.mutates, &op.view, &op.opaque,
                       &op.in_function, &op.workspace_known}) {
      *flag = *rc::gen::arbitrary<bool>();
    }
    op.flops = *rc::gen::positive<std::int64_t>();
    op.moved = bytes();
    if (op.workspace_known) op.workspace = bytes();
  }
  for (Value& value : trace.values) {
    value.storage = maybe_id<StorageId>(0, trace.storages.size());
    value.dtype = any_of<Dtype>();
    value.sizes = *rc::gen::container<std::vector<std::int64_t>>(
        num(4), rc::gen::inRange<std::int64_t>(0, 99));
    value.strides = value.sizes;
    value.offset = *rc::gen::nonNegative<std::int64_t>();
    value.version = *rc::gen::arbitrary<std::uint32_t>();
  }
  for (Storage& storage : trace.storages) {
    storage.bytes = bytes();
    storage.count = *rc::gen::inRange<std::int64_t>(1, 4);
    storage.place = any_of<Place>();
    storage.category = any_of<Category>();
    storage.layer = maybe_id<LayerId>(0, num_layers);
    storage.born = maybe_id<OpId>(0, num_ops);
    storage.freed = maybe_id<OpId>(
        storage.born.valid() ? storage.born.index() : 0, num_ops);
  }
  for (Save& save : trace.saves) {
    save.op = OpId(*rc::gen::inRange<std::size_t>(0, num_ops));
    save.value =
        ValueId(*rc::gen::inRange<std::size_t>(0, trace.values.size()));
    save.released = maybe_id<OpId>(save.op.index(), num_ops);
  }
  trace.saves_known = *rc::gen::arbitrary<bool>();
  trace.notes.resize(num(2));
  for (std::string& note : trace.notes) note = text();
  return trace;
}

// One block that is held while an op runs.
struct Block {
  LayerId layer;
  Category category;
  std::int64_t bytes;
};

std::int64_t rounded(Bytes bytes, std::int64_t granularity) {
  return (bytes.count() + granularity - 1) / granularity * granularity;
}

std::int64_t charged(const Storage& storage, std::int64_t granularity) {
  return storage.count * rounded(storage.bytes, granularity);
}

bool is_alive(const Storage& storage, Place place, std::size_t op) {
  return storage.place == place &&
         (!storage.born.valid() || storage.born.index() <= op) &&
         (!storage.freed.valid() || storage.freed.index() >= op);
}

// The obvious way: look at each storage for each op.
std::vector<Block> blocks_at(const Trace& trace, Place place,
                             std::int64_t granularity, std::size_t op) {
  std::vector<Block> blocks;
  for (const Storage& storage : trace.storages) {
    if (!is_alive(storage, place, op)) continue;
    blocks.push_back(
        {storage.layer, storage.category, charged(storage, granularity)});
  }
  if (place == Place::Device) {
    blocks.push_back({trace.ops[op].layer, Category::Transient,
                      rounded(trace.ops[op].workspace, granularity)});
  }
  return blocks;
}

template <typename Matches>
Bytes sum_of(const std::vector<Block>& blocks, const Matches& matches) {
  std::int64_t sum = 0;
  for (const Block& block : blocks) {
    if (matches(block)) sum += block.bytes;
  }
  return Bytes(sum);
}

void check_categories(const BytesByCategory& by_category,
                      const std::vector<Block>& blocks) {
  for (std::size_t c = 0; c < kNumCategories; ++c) {
    RC_ASSERT(by_category[c] == sum_of(blocks, [&](const Block& block) {
                return block.category == static_cast<Category>(c);
              }));
  }
}

void check_layers(const std::vector<LayerShare>& shares,
                  const std::vector<Block>& blocks) {
  std::map<LayerId, std::vector<Block>> by_layer;
  for (const Block& block : blocks) {
    if (block.bytes > 0) by_layer[block.layer].push_back(block);
  }
  RC_ASSERT(shares.size() == by_layer.size());
  for (std::size_t i = 0; i < shares.size(); ++i) {
    const LayerShare& share = shares[i];
    RC_ASSERT(by_layer.contains(share.layer));
    check_categories(share.by_category, by_layer[share.layer]);
    RC_ASSERT(share.bytes ==
              sum_of(by_layer[share.layer], [](const Block&) { return true; }));
    if (i == 0) continue;
    const LayerShare& before = shares[i - 1];
    RC_ASSERT(before.bytes > share.bytes ||
              (before.bytes == share.bytes && before.layer < share.layer));
  }
}

// Strictly in order means each once; as many as are alive means all of them.
void check_held(const Trace& trace, const std::vector<StorageId>& held,
                Place place, std::int64_t granularity, std::size_t op) {
  const auto alive = std::ranges::count_if(
      trace.storages, [&](const Storage& s) { return is_alive(s, place, op); });
  RC_ASSERT(std::ssize(held) == alive);
  for (std::size_t i = 0; i < held.size(); ++i) {
    RC_ASSERT(is_alive(trace.at(held[i]), place, op));
    if (i == 0) continue;
    const auto before = charged(trace.at(held[i - 1]), granularity);
    const auto here = charged(trace.at(held[i]), granularity);
    RC_ASSERT(before > here || (before == here && held[i - 1] < held[i]));
  }
}

TEST(TimelineProperty, EqualsCountingEachOpAlone) {
  ASSERT_TRUE(rc::check("instants, by_layer and held", [] {
    const Trace trace = any_trace();
    const Place place = any_of<Place>();
    const auto granularity = *rc::gen::element<std::int64_t>(1, 512, 1000);
    const Timeline timeline(trace, place, Bytes(granularity));
    RC_ASSERT(timeline.instants().size() == trace.ops.size());
    for (std::size_t i = 0; i < trace.ops.size(); ++i) {
      const auto blocks = blocks_at(trace, place, granularity, i);
      const Instant& instant = timeline.instants()[i];
      RC_ASSERT(instant.op == OpId(i));
      RC_ASSERT(instant.bytes ==
                sum_of(blocks, [](const Block&) { return true; }));
      check_categories(instant.by_category, blocks);
      check_layers(timeline.by_layer(OpId(i)), blocks);
      check_held(trace, timeline.held(OpId(i)), place, granularity, i);
    }
  }));
}

TEST(TimelineProperty, PeakIsTheFirstMaximum) {
  ASSERT_TRUE(rc::check("peak of all and of each phase", [] {
    const Trace trace = any_trace();
    const Timeline timeline(trace, Place::Device, 512_B);
    const auto check = [&](const std::optional<Instant>& peak,
                           const std::vector<std::size_t>& ops) {
      RC_ASSERT(peak.has_value() == !ops.empty());
      for (const std::size_t i : ops) {
        const Bytes here = sum_of(blocks_at(trace, Place::Device, 512, i),
                                  [](const Block&) { return true; });
        RC_ASSERT(here <= peak->bytes);
        if (OpId(i) < peak->op) RC_ASSERT(here < peak->bytes);
        if (peak->op == OpId(i)) RC_ASSERT(here == peak->bytes);
      }
    };
    std::vector<std::size_t> all(trace.ops.size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    check(timeline.peak(), all);
    for (const auto& entry : enum_table<Phase>()) {
      std::vector<std::size_t> some = all;
      std::erase_if(some, [&](std::size_t i) {
        return trace.ops[i].phase != entry.value;
      });
      check(timeline.peak(entry.value), some);
    }
  }));
}

TEST(TimelineProperty, ResidentIsHeldAfterTheLastOp) {
  ASSERT_TRUE(rc::check("resident", [] {
    const Trace trace = any_trace();
    const Place place = any_of<Place>();
    std::int64_t sum = 0;
    for (const Storage& storage : trace.storages) {
      const Category category = storage.category;
      const bool stays =
          category == Category::Parameter || category == Category::Buffer ||
          category == Category::Input || category == Category::OptimizerState ||
          // From the step before, while gradients are accumulated.
          (category == Category::Gradient && !storage.born.valid());
      if (storage.place == place && !storage.freed.valid() && stays) {
        sum += charged(storage, 512);
      }
    }
    RC_ASSERT(Timeline(trace, place, 512_B).resident() == Bytes(sum));
  }));
}

TEST(TraceJsonProperty, RoundTripIsExact) {
  ASSERT_TRUE(rc::check("trace_from_json(to_json(t)) == t", [] {
    const Trace trace = any_trace();
    const std::string json = to_json(trace);
    RC_ASSERT(json.find('\n') == std::string::npos);
    RC_ASSERT(trace_from_json(json) == trace);
  }));
}

TEST(TraceJsonProperty, ADamagedTextIsATraceOrATraceError) {
  ASSERT_TRUE(rc::check("no other exception", [] {
    std::string json = to_json(any_trace());
    const auto at = *rc::gen::inRange<std::size_t>(0, json.size());
    const auto size = *rc::gen::inRange<std::size_t>(0, 3);
    json.replace(
        at, size,
        *rc::gen::element<std::string>("", "0", "-", "9", "\"", "[", "}",
                                       "null", ",", "1e5", "\xff", "{}", ":"));
    try {
      trace_from_json(json).check();
    } catch (const TraceError&) {
      RC_SUCCEED("rejected");
    }
  }));
}

}  // namespace
}  // namespace memscale
