#pragma once

#include <cstddef>
#include <string_view>

namespace memscale {

// Note [Names of operators]
// A trace and the dispatcher name an operator "aten::add_.Tensor": a namespace,
// a name, and an overload. This is the one place that takes such a name apart.
//
//   "aten::add.Tensor"  base "add", overload "Tensor"
//   "aten::add_.Tensor" the same, in place
//   "aten::add.out"     the same; overload "out" writes into an argument
//   "aten::add"         the same, without an overload
//
// One trailing underscore means "in place" and is no part of the base name. Two
// of them belong to the name ("aten::__and__"). A gradient's operator
// ("aten::tanh_backward") is an operator of its own: what it costs and needs
// does not follow from its forward.
struct OpName {
  std::string_view space;     // "aten"; empty if the name has none
  std::string_view base;      // "add"
  std::string_view overload;  // "Tensor"; may be empty
  bool in_place = false;

  static constexpr OpName of(std::string_view name);

  // Whether this overload writes its result into a tensor that it is given.
  constexpr bool has_out() const {
    return overload.find("out") != overload.npos;
  }
};

constexpr OpName OpName::of(std::string_view name) {
  OpName result;
  const std::size_t colons = name.find("::");
  if (colons != name.npos) {
    result.space = name.substr(0, colons);
    name.remove_prefix(colons + 2);
  }
  const std::size_t dot = name.find('.');
  if (dot != name.npos) {
    result.overload = name.substr(dot + 1);
    name = name.substr(0, dot);
  }
  result.in_place =
      name.size() > 1 && name.ends_with('_') && !name.ends_with("__");
  if (result.in_place) name.remove_suffix(1);
  result.base = name;
  return result;
}

}  // namespace memscale
