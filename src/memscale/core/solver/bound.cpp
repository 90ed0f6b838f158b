#include "memscale/core/solver/bound.h"

#include <algorithm>
#include <cmath>
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

// Of one layer's options: what it costs at least to hold less. Base and start
// are those of the fastest option; the curve is read from there.
Curve hull_of(const std::vector<Item>& items, Wide host_price) {
  struct Corner {
    std::int64_t held;
    Wide cost;
  };
  std::vector<Corner> corners;
  for (const Item& item : items) {
    corners.push_back({item.held, (Wide{item.nanoseconds} << kTimeShift) +
                                      host_price * item.host});
  }
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
  Curve curve{hull.front().cost, -hull.front().held, {}};
  for (std::size_t i = 1; i < hull.size(); ++i) {
    const std::int64_t run = hull[i - 1].held - hull[i].held;
    curve.segments.push_back({run, hull[i].cost - hull[i - 1].cost, run});
  }
  return curve;
}

}  // namespace

Wide CurveReader::at(std::int64_t place) {
  const auto& segments = curve_.segments;
  while (segment_ < segments.size() &&
         place > begin_ + segments[segment_].length) {
    const auto& segment = segments[segment_++];
    value_ += segment.rise * segment.length / segment.run;
    begin_ += segment.length;
  }
  if (place <= begin_ || segment_ == segments.size()) return value_;
  const auto& segment = segments[segment_];
  return value_ + segment.rise * (place - begin_) / segment.run;
}

Bound::Bound(const Instance& instance, Wide host_price)
    : instance_(instance), host_price_(host_price), open_block_(kNone) {
  const std::size_t n = instance.layers.size();
  room_ = tails(instance);
  for (std::int64_t& room : room_) room = instance.device_budget - room;
  std::vector<bool> is_done;
  for (std::size_t k = 0; k < n; ++k) {
    const std::size_t list = instance.lists[k];
    if (hulls_.size() <= list) hulls_.resize(list + 1);
    is_done.resize(hulls_.size());
    // Which options are beaten may differ by layer, but not what they cost.
    if (!is_done[list]) {
      hulls_[list] = hull_of(instance.layers[k], host_price);
    }
    is_done[list] = true;
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

const Curve& Bound::after(std::size_t k) {
  const std::size_t n = instance_.layers.size();
  const std::size_t block = k / block_;
  if (block != open_block_) {
    const std::size_t first = block * block_;
    const std::size_t end = std::min(first + block_, n + 1);
    open_.assign(end - first, Curve());
    Curve curve;
    curve.start = room_[n];
    std::size_t at = n;
    if (end <= n) {
      at = end;
      curve = marks_[at / block_];
    }
    for (;; --at) {
      if (at < end) open_[at - first] = curve;
      if (at == first) break;
      curve = before(at - 1, curve);
    }
    open_block_ = block;
  }
  return open_[k % block_];
}

Wide Bound::root() { return total(0, 0, CurveReader(after(0)).at(0)); }

Bound best_bound(const Instance& instance) {
  std::int64_t most_host = 0;
  std::int64_t most_time = 1;
  for (const std::vector<Item>& items : instance.layers) {
    most_host += std::ranges::max_element(items, {}, &Item::host)->host;
    most_time +=
        std::ranges::max_element(items, {}, &Item::nanoseconds)->nanoseconds;
  }
  Bound best(instance, 0);
  if (most_host <= instance.host_budget) return best;
  // The root's bound is concave in the price: up in large steps for as long as
  // that helps, then in ever smaller ones around the best.
  Wide best_root = best.root();
  const auto attempt = [&](Wide price) {
    Bound bound(instance, price);
    const Wide root = bound.root();
    if (root <= best_root) return false;
    best_root = root;
    return true;
  };
  Wide price = 0;
  // Above this, a byte would cost more than all that could be won.
  const Wide highest = Wide{most_time} << kTimeShift;
  for (Wide p = 1; p <= highest && p * most_host < (Wide{1} << 72); p *= 4) {
    if (!attempt(p)) break;
    price = p;
  }
  for (Wide step = price; step > price / 256 && step > 0; step /= 2) {
    if (attempt(price + step)) {
      price += step;
    } else if (step < price && attempt(price - step)) {
      price -= step;
    }
  }
  return Bound(instance, price);
}

}  // namespace memscale::solver
