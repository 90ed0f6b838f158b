#include "memscale/core/solver/bound.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>

namespace memscale::solver {
namespace {

constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

bool is_flatter(const Curve::Segment& a, const Curve::Segment& b) {
  return a.rise * b.run < b.rise * a.run;
}

void append(std::vector<Curve::Segment>& segments,
            const Curve::Segment& segment) {
  if (!segments.empty() && !is_flatter(segments.back(), segment)) {
    segments.back().length += segment.length;
  } else {
    segments.push_back(segment);
  }
}

struct Corner {
  std::int64_t held;
  Wide cost;
};

// The corners of the lower convex hull, from the cheapest on, as less is held.
std::vector<Corner> hull_of(std::vector<Corner> corners) {
  std::ranges::sort(corners, [](const Corner& a, const Corner& b) {
    return a.cost != b.cost ? a.cost < b.cost : a.held < b.held;
  });
  std::vector<Corner> hull;
  for (const Corner& corner : corners) {
    if (!hull.empty() && corner.held >= hull.back().held) continue;
    // Drop corners above the line from the one before them to this.
    while (hull.size() >= 2) {
      const Corner& a = hull[hull.size() - 2];
      const Corner& b = hull.back();
      if ((b.cost - a.cost) * (a.held - corner.held) <
          (corner.cost - a.cost) * (a.held - b.held)) {
        break;
      }
      hull.pop_back();
    }
    hull.push_back(corner);
  }
  return hull;
}

// As a curve over what is held before, from the place of the first corner on.
Curve curve_of(const std::vector<Corner>& hull) {
  Curve curve{hull.front().cost, -hull.front().held, {}};
  for (std::size_t i = 1; i < hull.size(); ++i) {
    const std::int64_t run = hull[i - 1].held - hull[i].held;
    curve.segments.emplace_back(run, hull[i].cost - hull[i - 1].cost);
  }
  return curve;
}

}  // namespace

CurveTable::CurveTable(const Curve& curve) {
  rows_.reserve(curve.segments.size() + 1);
  std::int64_t place = curve.start;
  Wide value = curve.base;
  for (const Curve::Segment& segment : curve.segments) {
    rows_.push_back({place, value, segment.steepness});
    place += segment.length;
    value += Curve::rise_over(segment.length, segment.steepness);
  }
  rows_.push_back({place, value, 0});
}

CurveReader::CurveReader(const CurveTable& table, std::int64_t first)
    : rest_(table.rows()) {
  const auto row = std::ranges::partition_point(
      rest_, [&](const auto& each) { return each.place < first; });
  if (row != rest_.begin()) rest_ = {std::prev(row), rest_.end()};
}

Bound::Bound(const Instance& instance, Wide host_price, std::vector<bool> tight)
    : instance_(instance),
      host_price_(host_price),
      tight_(std::move(tight)),
      open_block_(kNone) {
  const std::size_t n = instance.layers.size();
  room_ = tails(instance);
  for (std::int64_t& room : room_) room = instance.device_budget - room;
  std::vector<bool> is_done;
  for (std::size_t k = 0; k < n; ++k) {
    const std::size_t list = instance.lists[k];
    if (hulls_.size() <= list) hulls_.resize(list + 1);
    is_done.resize(hulls_.size());
    // Which options are beaten may differ by layer, but not what they cost.
    if (is_done[list]) continue;
    is_done[list] = true;
    std::vector<Corner> corners;
    for (const Item& item : instance.layers[k]) {
      corners.push_back({item.held, cost(item)});
    }
    hulls_[list] = curve_of(hull_of(std::move(corners)));
  }
  block_ = static_cast<std::size_t>(std::sqrt(static_cast<double>(n))) + 1;
  marks_.resize(n / block_ + 1);
  Curve curve;
  curve.start = room_[n];
  for (std::size_t k = n;; --k) {
    if (k % block_ == 0) marks_[k / block_] = curve;
    if (k == 0) break;
    curve = before(k - 1, curve);
  }
}

Curve Bound::before(std::size_t layer, const Curve& after) const {
  return !tight_.empty() && tight_[layer] ? before_tight(layer, after)
                                          : before_loose(layer, after);
}

Curve Bound::before_loose(std::size_t layer, const Curve& after) const {
  const Curve& hull = hulls_[instance_.lists[layer]];
  Curve curve{after.base + hull.base,
              std::min(after.start + hull.start, room_[layer]),
              {}};
  curve.segments.reserve(after.segments.size() + hull.segments.size());
  auto a = after.segments.begin();
  auto b = hull.segments.begin();
  std::int64_t left = room_[layer] - curve.start;
  while (left > 0) {
    const bool has_a = a != after.segments.end();
    const bool has_b = b != hull.segments.end();
    if (!has_a && !has_b) break;
    const bool takes_b = has_b && (!has_a || is_flatter(*b, *a));
    Curve::Segment segment = takes_b ? *b++ : *a++;
    segment.length = std::min(segment.length, left);
    left -= segment.length;
    append(curve.segments, segment);
  }
  return curve;
}

Curve Bound::before_tight(std::size_t layer, const Curve& after) const {
  const CurveTable table(after);
  std::vector<Corner> corners;
  for (const Item& item : instance_.layers[layer]) {
    // All that is held before this layer, and with it (places of `after`).
    const std::int64_t most =
        std::min(instance_.device_budget - item.need, room_[layer + 1]);
    const auto add = [&](std::int64_t place, Wide rest) {
      corners.push_back({item.held - place, rest + cost(item)});
    };
    for (const CurveTable::Row& row : table.rows()) {
      if (row.place >= most) {
        add(most, CurveReader(table, most).at(most));
        break;
      }
      add(row.place, row.value);
    }
  }
  return curve_of(hull_of(std::move(corners)));
}

const CurveTable& Bound::after(std::size_t k) {
  const std::size_t n = instance_.layers.size();
  const std::size_t block = k / block_;
  if (block != open_block_) {
    const std::size_t first = block * block_;
    const std::size_t end = std::min(first + block_, n + 1);
    open_.assign(end - first, CurveTable());
    Curve curve;
    curve.start = room_[n];
    std::size_t at = n;
    if (end <= n) {
      at = end;
      curve = marks_[at / block_];
    }
    for (;; --at) {
      if (at < end) open_[at - first] = CurveTable(curve);
      if (at == first) break;
      curve = before(at - 1, curve);
    }
    open_block_ = block;
  }
  return open_[k % block_];
}

Wide Bound::root() const {
  return total(0, 0, CurveReader(CurveTable(marks_.front()), 0).at(0));
}

Wide best_host_price(const Instance& instance) {
  std::int64_t most_host = 0;
  std::int64_t most_time = 1;
  for (const std::vector<Item>& items : instance.layers) {
    most_host += std::ranges::max_element(items, {}, &Item::host)->host;
    most_time +=
        std::ranges::max_element(items, {}, &Item::nanoseconds)->nanoseconds;
  }
  if (most_host <= instance.host_budget) return 0;
  // The root's bound is concave in the price: up in large steps for as long as
  // that helps, then in ever smaller ones around the best.
  Wide price = 0;
  Wide best = Bound(instance, price, {}).root();
  const auto attempt = [&](Wide other) {
    const Wide root = Bound(instance, other, {}).root();
    if (root <= best) return false;
    best = root;
    price = other;
    return true;
  };
  // Above this, a byte would cost more than all that could be won.
  const Wide highest = kTimeUnit * most_time;
  for (Wide p = 1; p <= highest && p * most_host < power_of_two(72); p *= 4) {
    if (!attempt(p)) break;
  }
  for (Wide step = price; step > price / 256 && step > 0; step /= 2) {
    if (!attempt(price + step) && step < price) attempt(price - step);
  }
  return price;
}

std::vector<bool> tight_layers(const Instance& instance,
                               std::span<const std::size_t> choice) {
  std::vector<bool> tight;
  std::int64_t held = 0;
  for (std::size_t k = 0; k < instance.layers.size(); ++k) {
    const std::vector<Item>& items = instance.layers[k];
    tight.push_back(std::ranges::any_of(items, [&](const Item& item) {
      return held + item.held + item.need > instance.device_budget;
    }));
    held += items[choice[k]].held;
  }
  return tight;
}

}  // namespace memscale::solver
