#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "memscale/base/wide.h"
#include "memscale/core/solver/instance.h"

namespace memscale::solver {

// Times in bounds are in 2^-20 ns, so that a price of host bytes is an integer.
inline constexpr Wide kTimeUnit = power_of_two(20);

// Convex, never falling: a base, and from `start` on segments that rise ever
// more steeply.
struct Curve {
  // Divisions are slow; these are made once for each segment.
  static constexpr Wide kSteepnessUnit = power_of_two(20);
  // Rounded down.
  static Wide rise_over(std::int64_t bytes, Wide steepness) {
    return steepness * bytes / kSteepnessUnit;
  }

  struct Segment {
    std::int64_t length;  // bytes
    Wide rise;            // for each `run` bytes
    std::int64_t run;
    Wide steepness;  // rise for each byte, times kSteepnessUnit; down

    Segment(std::int64_t bytes, Wide rises)
        : length(bytes),
          rise(rises),
          run(bytes),
          steepness(rises * kSteepnessUnit / bytes) {}
  };
  Wide base = 0;
  std::int64_t start = 0;
  std::vector<Segment> segments;
};

// A curve's values where its segments begin, and one more where the last ends:
// added up once, for many readers. Not above the curve, by less than one for
// each segment.
class CurveTable final {
 public:
  struct Row {
    std::int64_t place;
    Wide value;
    Wide steepness;  // from there on, see Curve::Segment

    Wide at(std::int64_t other) const {
      if (other <= place) return value;
      return value + Curve::rise_over(other - place, steepness);
    }
  };
  CurveTable() = default;
  explicit CurveTable(const Curve& curve);

  std::span<const Row> rows() const { return rows_; }

 private:
  std::vector<Row> rows_;
};

// Reads a curve at ever larger places, from `first` on.
class CurveReader final {
 public:
  CurveReader(const CurveTable& table, std::int64_t first);

  Wide at(std::int64_t place) {
    while (rest_.size() > 1 && rest_[1].place < place) rest_ = rest_.subspan(1);
    return rest_.front().at(place);
  }

 private:
  std::span<const CurveTable::Row> rest_;  // from the row for the last place on
};

// Note [Bound of the rest]
// What the layers after the k-th take at least, given what is held before them:
// a curve for each k. Each layer may mix its options (their convex hull), and
// host memory has a price instead of a limit. From the last layer on, layer k's
// hull is added to the curve after it (an infimal convolution: segments of
// both, merged by steepness), and cut off where the rest would not fit, see
// Note [What fits after a layer]. So this is the linear relaxation, with the
// limit of every instant in it. Equal layers' segments are as steep, and merge
// to one: curves stay short.
//
// Options of one layer may need different amounts beyond what they hold. Where
// that matters, at the `tight` layers, each option's curve is cut off where it
// itself does not fit, and the convex hull of all these is taken: a better
// bound, for more work.
class Bound final {
 public:
  // `host_price`: of a byte, in 2^-20 ns; `tight`: by layer, or empty for none.
  // The instance must outlive it.
  Bound(const Instance& instance, Wide host_price, std::vector<bool> tight);

  // Of the layers after the first k. Costs least in the order k = 0, 1, ...
  const CurveTable& after(std::size_t k);

  // What a plan takes at least, if `ns` and `host` are spent so far, and
  // `rest` is from the curve.
  Wide total(std::int64_t ns, std::int64_t host, Wide rest) const {
    return kTimeUnit * ns + rest + host_price_ * (host - instance_.host_budget);
  }
  // Of all plans.
  Wide root() const;

 private:
  Curve before(std::size_t layer, const Curve& after) const;
  Curve before_loose(std::size_t layer, const Curve& after) const;
  Curve before_tight(std::size_t layer, const Curve& after) const;
  Wide cost(const Item& item) const {
    return kTimeUnit * item.nanoseconds + host_price_ * item.host;
  }

  const Instance& instance_;
  const Wide host_price_;
  const std::vector<bool> tight_;
  std::vector<std::int64_t> room_;  // by k: the most that may be held
  std::vector<Curve> hulls_;        // by list
  // Curves at multiples of block_, and all those of one block.
  std::size_t block_;
  std::vector<Curve> marks_;
  std::vector<CurveTable> open_;
  std::size_t open_block_;
};

// The price of host memory that makes the bound the largest, nearly.
Wide best_host_price(const Instance& instance);

// The layers where some option does not fit after what this choice (by Item)
// holds before them.
std::vector<bool> tight_layers(const Instance& instance,
                               std::span<const std::size_t> choice);

}  // namespace memscale::solver
