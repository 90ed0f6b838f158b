#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "memscale/core/solver/instance.h"
#include "memscale/core/wide.h"

namespace memscale::solver {

// Times in bounds are in 2^-20 ns, so that a price of host bytes is an integer.
inline constexpr int kTimeShift = 20;

// Convex, never falling: a base, and from `start` on segments that rise ever
// more steeply.
struct Curve {
  struct Segment {
    std::int64_t length;  // bytes
    Wide rise;            // for each `run` bytes
    std::int64_t run;
  };
  Wide base = 0;
  std::int64_t start = 0;
  std::vector<Segment> segments;
};

// Reads a curve at ever larger places.
class CurveReader final {
 public:
  explicit CurveReader(const Curve& curve)
      : curve_(curve), begin_(curve.start), value_(curve.base) {}

  // Not above the curve, by less than one for each segment.
  Wide at(std::int64_t place);

 private:
  const Curve& curve_;
  std::size_t segment_ = 0;
  std::int64_t begin_;  // of the segment
  Wide value_;          // there
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
class Bound final {
 public:
  // `host_price`: of a byte, in 2^-20 ns. The instance must outlive it.
  Bound(const Instance& instance, Wide host_price);

  // Of the layers after the first k. Costs least in the order k = 0, 1, ...
  const Curve& after(std::size_t k);

  // What a plan takes at least, if `ns` and `host` are spent so far, and
  // `rest` is from the curve.
  Wide total(std::int64_t ns, std::int64_t host, Wide rest) const {
    return (Wide{ns} << kTimeShift) + rest +
           host_price_ * (host - instance_.host_budget);
  }
  // Of all plans.
  Wide root();

 private:
  Curve before(std::size_t layer, const Curve& after) const;

  const Instance& instance_;
  const Wide host_price_;
  std::vector<std::int64_t> room_;  // by k: the most that may be held
  std::vector<Curve> hulls_;        // by list
  // Curves at multiples of block_, and all those of one block.
  std::size_t block_;
  std::vector<Curve> marks_;
  std::vector<Curve> open_;
  std::size_t open_block_;
};

// The bound with the price of host memory that makes it the largest, nearly.
Bound best_bound(const Instance& instance);

}  // namespace memscale::solver
