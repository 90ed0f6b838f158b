#include "memscale/core/trace/trace.h"

#include <algorithm>
#include <limits>
#include <ostream>

#include "memscale/base/error.h"

namespace memscale {
namespace {

// What a step may hold in sum. Half of what Bytes can count, so that sums over
// a checked trace do not overflow, an allocator's rounding included.
constexpr Bytes kMaxBytes{std::numeric_limits<std::int64_t>::max() / 2};
constexpr std::int64_t kMaxBlocks = 2'147'483'648;

// A place in the trace, for messages: "ops[3].inputs[1]".
struct Spot {
  std::string_view array;
  std::size_t index;
  std::string_view field;
  std::optional<std::size_t> item = std::nullopt;

  friend std::ostream& operator<<(std::ostream& out, const Spot& spot) {
    out << spot.array << '[' << spot.index << "]." << spot.field;
    return spot.item ? out << '[' << *spot.item << ']' : out;
  }
};

// Nothing if there are more than int64 counts.
std::optional<std::int64_t> count_of(std::span<const std::int64_t> sizes) {
  // A zero first: torch allows [2^40, 2^40, 0], which has no elements.
  if (std::ranges::find(sizes, 0) != sizes.end()) return 0;
  std::int64_t count = 1;
  for (const std::int64_t extent : sizes) {
    if (__builtin_mul_overflow(count, extent, &count)) return std::nullopt;
  }
  return count;
}

template <typename Tag, typename T>
void check_optional_id(const Spot& spot, StrongId<Tag> id,
                       std::string_view array, const std::vector<T>& items) {
  if (!id.valid() || id.index() < items.size()) return;
  throw TraceError(str(spot, " must point into ", array, ", which has ",
                       items.size(), ", got ", id));
}

template <typename Tag, typename T>
void check_id(const Spot& spot, StrongId<Tag> id, std::string_view array,
              const std::vector<T>& items) {
  if (!id.valid()) {
    throw TraceError(str(spot, " must point into ", array, ", got no id"));
  }
  check_optional_id(spot, id, array, items);
}

void check_not_negative(const Spot& spot, std::int64_t number) {
  if (number < 0) throw TraceError(str(spot, " must be >= 0, got ", number));
}

void check_op(const Trace& trace, std::size_t i) {
  const Op& op = trace.ops[i];
  check_optional_id({"ops", i, "layer"}, op.layer, "layers", trace.layers);
  check_optional_id({"ops", i, "forward"}, op.forward, "ops", trace.ops);
  if (op.forward.valid() && op.forward.index() >= i) {
    throw TraceError(str(Spot{"ops", i, "forward"},
                         " must come before the op itself, got ", op.forward));
  }
  for (std::size_t k = 0; k < op.inputs.size(); ++k) {
    check_id({"ops", i, "inputs", k}, op.inputs[k], "values", trace.values);
  }
  for (std::size_t k = 0; k < op.outputs.size(); ++k) {
    check_id({"ops", i, "outputs", k}, op.outputs[k], "values", trace.values);
  }
  if (!op.uses.empty() && op.uses.size() != op.inputs.size()) {
    throw TraceError(str(Spot{"ops", i, "uses"},
                         " must be as many as the inputs, ", op.inputs.size(),
                         ", or none, got ", op.uses.size()));
  }
  check_not_negative({"ops", i, "flops"}, op.flops);
  check_not_negative({"ops", i, "moved"}, op.moved.count());
  check_not_negative({"ops", i, "workspace"}, op.workspace.count());
  check_not_negative({"ops", i, "nanoseconds"}, op.nanoseconds);
  if (!op.workspace_known && op.workspace != Bytes()) {
    throw TraceError(str(Spot{"ops", i, "workspace"},
                         " must be 0 where it is not known, got ",
                         op.workspace.count()));
  }
}

void check_event(const Trace& trace, std::size_t i) {
  const Event& event = trace.events[i];
  const std::size_t first = i == 0 ? 0 : trace.events[i - 1].op;
  if (event.op < first || event.op > trace.ops.size()) {
    throw TraceError(str(Spot{"events", i, "op"}, " must be from ", first,
                         " to ", trace.ops.size(), ", got ", event.op));
  }
  const bool of_layer = event.kind == Event::Kind::EnterLayer ||
                        event.kind == Event::Kind::LeaveLayer;
  if (of_layer) {
    check_id({"events", i, "layer"}, event.layer, "layers", trace.layers);
  } else {
    check_optional_id({"events", i, "layer"}, event.layer, "layers",
                      trace.layers);
  }
  for (std::size_t k = 0; k < event.values.size(); ++k) {
    check_id({"events", i, "values", k}, event.values[k], "values",
             trace.values);
  }
}

void check_value(const Trace& trace, std::size_t i) {
  const Value& value = trace.values[i];
  check_optional_id({"values", i, "storage"}, value.storage, "storages",
                    trace.storages);
  for (std::size_t k = 0; k < value.sizes.size(); ++k) {
    check_not_negative({"values", i, "sizes", k}, value.sizes[k]);
  }
  for (std::size_t k = 0; k < value.strides.size(); ++k) {
    check_not_negative({"values", i, "strides", k}, value.strides[k]);
  }
  // A value without strides (sparse, say) is fine; half of them are not.
  if (!value.strides.empty() && value.strides.size() != value.sizes.size()) {
    throw TraceError(str(Spot{"values", i, "strides"},
                         " must be as many as the sizes, ", value.sizes.size(),
                         ", or none, got ", value.strides.size()));
  }
  if (!count_of(value.sizes)) {
    throw TraceError(
        str(Spot{"values", i, "sizes"}, " must multiply to less than 2^63"));
  }
  check_not_negative({"values", i, "offset"}, value.offset);
}

void check_storage(const Trace& trace, std::size_t i) {
  const Storage& storage = trace.storages[i];
  check_not_negative({"storages", i, "bytes"}, storage.bytes.count());
  if (storage.count < 1) {
    throw TraceError(str(Spot{"storages", i, "count"}, " must be >= 1, got ",
                         storage.count));
  }
  check_optional_id({"storages", i, "layer"}, storage.layer, "layers",
                    trace.layers);
  check_optional_id({"storages", i, "born"}, storage.born, "ops", trace.ops);
  check_optional_id({"storages", i, "freed"}, storage.freed, "ops", trace.ops);
  if (storage.born.valid() && storage.freed < storage.born) {
    throw TraceError(str(Spot{"storages", i, "freed"},
                         " must not come before born, op ", storage.born,
                         ", got ", storage.freed));
  }
  check_optional_id({"storages", i, "let_go"}, storage.let_go, "ops",
                    trace.ops);
  if (storage.let_go.valid() && storage.freed < storage.let_go) {
    throw TraceError(str(Spot{"storages", i, "let_go"},
                         " must not come after freed, op ", storage.freed,
                         ", got ", storage.let_go));
  }
  check_optional_id({"storages", i, "plain_freed"}, storage.plain_freed, "ops",
                    trace.ops);
}

void check_save(const Trace& trace, std::size_t i) {
  const Save& save = trace.saves[i];
  check_optional_id({"saves", i, "op"}, save.op, "ops", trace.ops);
  check_id({"saves", i, "value"}, save.value, "values", trace.values);
  check_optional_id({"saves", i, "released"}, save.released, "ops", trace.ops);
  if (save.op.valid() && save.released < save.op) {
    throw TraceError(str(Spot{"saves", i, "released"},
                         " must not come before the op that saves, ", save.op,
                         ", got ", save.released));
  }
}

// Needs all sizes to be checked.
void check_sum(const Trace& trace) {
  Bytes sum;
  std::int64_t blocks = 0;
  for (std::size_t i = 0; i < trace.storages.size(); ++i) {
    const Bytes bytes = trace.storages[i].bytes;
    const std::int64_t count = trace.storages[i].count;
    if (count > kMaxBlocks - blocks) {
      throw TraceError(str(Spot{"storages", i, "count"},
                           " must keep the sum of all counts within ",
                           kMaxBlocks, ", got ", count));
    }
    if (bytes > (kMaxBytes - sum) / count) {
      throw TraceError(str(Spot{"storages", i, "bytes"},
                           " must keep the sum of all storages within ",
                           kMaxBytes.count(), ", got ", bytes.count()));
    }
    blocks += count;
    sum += bytes * count;
  }
  for (std::size_t i = 0; i < trace.ops.size(); ++i) {
    const Bytes bytes = trace.ops[i].workspace;
    if (bytes > kMaxBytes - sum) {
      throw TraceError(str(Spot{"ops", i, "workspace"},
                           " must stay, with all storages, within ",
                           kMaxBytes.count(), ", got ", bytes.count()));
    }
  }
}

}  // namespace

std::int64_t Value::numel() const {
  if (const auto count = count_of(sizes)) return *count;
  throw TraceError("a value's sizes must multiply to less than 2^63");
}

void Trace::check() const {
  for (std::size_t i = 0; i < ops.size(); ++i) check_op(*this, i);
  for (std::size_t i = 0; i < events.size(); ++i) check_event(*this, i);
  for (std::size_t i = 0; i < values.size(); ++i) check_value(*this, i);
  for (std::size_t i = 0; i < storages.size(); ++i) check_storage(*this, i);
  for (std::size_t i = 0; i < saves.size(); ++i) check_save(*this, i);
  check_sum(*this);
}

}  // namespace memscale
