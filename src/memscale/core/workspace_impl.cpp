#include "memscale/core/workspace_impl.h"

#include <algorithm>
#include <array>

namespace memscale::scratch {
namespace {

constexpr std::array kDtypes = {
    Dtype{"float32", 4, Kind::Floating},
    Dtype{"bfloat16", 2, Kind::Floating},
    Dtype{"float16", 2, Kind::Floating},
    Dtype{"float64", 8, Kind::Floating},
    Dtype{"int64", 8, Kind::Integer},
    Dtype{"int32", 4, Kind::Integer},
    Dtype{"bool", 1, Kind::Bool},
    Dtype{"uint8", 1, Kind::Integer},
    Dtype{"int8", 1, Kind::Integer},
    Dtype{"int16", 2, Kind::Integer},
    Dtype{"complex64", 8, Kind::Complex},
    Dtype{"complex128", 16, Kind::Complex},
    Dtype{"float8_e4m3fn", 1, Kind::Floating},
    Dtype{"float8_e5m2", 1, Kind::Floating},
};

}  // namespace

const Dtype* find_dtype(std::string_view name) {
  const auto* found = std::ranges::find(kDtypes, name, &Dtype::name);
  return found == kDtypes.end() ? nullptr : found;
}

Int Tensor::product(Int first) const {
  Int result = 1;
  for (Int d = first; d < dim(); ++d) result *= size(d);
  return result;
}

bool Tensor::contiguous() const {
  Int expected = 1;
  for (Int d = dim(); d-- > 0;) {
    if (size(d) == 0) return true;
    if (size(d) != 1 && stride(d) != expected) return false;
    expected *= size(d);
  }
  return true;
}

bool Tensor::channels_last() const {
  if (dim() != 4 && dim() != 5) return false;
  Int expected = 1;
  const auto fits = [&](Int d) {
    if (size(d) != 1 && stride(d) != expected) return false;
    expected *= size(d);
    return true;
  };
  if (!fits(1)) return false;
  for (Int d = dim() - 1; d >= 2; --d) {
    if (!fits(d)) return false;
  }
  return fits(0);
}

std::optional<Call> call_of(const Trace& trace, const Op& op, int num_threads) {
  Call call;
  call.name = std::string_view(op.name).substr(op.name.find("::") + 2);
  call.mutates = op.mutates;
  call.threads = num_threads;
  for (const ValueId id : op.inputs) call.in.emplace_back(trace.at(id));
  for (const ValueId id : op.outputs) call.out.emplace_back(trace.at(id));
  const bool known = std::ranges::all_of(call.in, &Tensor::known) &&
                     std::ranges::all_of(call.out, &Tensor::known);
  return known ? std::optional(std::move(call)) : std::nullopt;
}

}  // namespace memscale::scratch
