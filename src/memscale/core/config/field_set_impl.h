#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "memscale/core/config/field_set.h"
#include "memscale/core/config/field_table.h"

// The members of FieldSet, for the one .cpp that defines a config's table and
// instantiates its FieldSet.

namespace memscale {

template <typename Owner>
std::span<const FieldSpec> FieldSet<Owner>::fields() {
  return detail::field_table<Owner>().specs;
}

template <typename Owner>
const FieldSpec& FieldSet<Owner>::field(std::string_view name) {
  const auto& table = detail::field_table<Owner>();
  return table.specs[table.index(name)];
}

template <typename Owner>
void FieldSet<Owner>::set(std::string_view name, FieldValue value) {
  const auto& row = detail::field_table<Owner>().at(name);
  row.write(self(), row.spec, checked(row.spec, std::move(value)));
}

template <typename Owner>
FieldValue FieldSet<Owner>::get(std::string_view name) const {
  return detail::field_table<Owner>().at(name).read(self());
}

template <typename Owner>
bool FieldSet<Owner>::is_set(std::string_view name) const {
  return detail::field_table<Owner>().at(name).is_set(self());
}

template <typename Owner>
void FieldSet<Owner>::validate() const {
  Owner scratch;
  for (const auto& row : detail::field_table<Owner>().rows) {
    row.write(scratch, row.spec, checked(row.spec, row.read(self())));
  }
}

template <typename Owner>
FieldMap FieldSet<Owner>::to_map(bool include_defaults) const {
  FieldMap map;
  for (const auto& row : detail::field_table<Owner>().rows) {
    if (include_defaults || row.is_set(self())) {
      map.emplace_back(row.spec.name, row.read(self()));
    }
  }
  return map;
}

template <typename Owner>
Owner FieldSet<Owner>::from_map(const FieldMap& map) {
  Owner result;
  for (const auto& [name, value] : map) result.set(name, value);
  return result;
}

template <typename Owner>
std::string FieldSet<Owner>::repr() const {
  const auto& table = detail::field_table<Owner>();
  std::string text;
  for (const auto& row : table.rows) {
    const bool differs = row.read(self()) != row.spec.default_value ||
                         (row.spec.by_mode && row.is_set(self()));
    if (!differs && row.spec.kind != FieldKind::Choice) continue;
    text += str(text.empty() ? "" : ", ", row.spec.name, "=",
                row.repr(self(), row.spec));
  }
  return str(table.what, "(", text, ")");
}

template <typename Owner>
bool FieldSet<Owner>::equal(const Owner& a, const Owner& b) {
  for (const auto& row : detail::field_table<Owner>().rows) {
    if (row.read(a) != row.read(b)) return false;
    if (row.spec.by_mode && row.is_set(a) != row.is_set(b)) return false;
  }
  return true;
}

}  // namespace memscale
