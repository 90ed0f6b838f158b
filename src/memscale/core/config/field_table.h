#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "memscale/base/ascii.h"
#include "memscale/base/error.h"
#include "memscale/base/suggest.h"
#include "memscale/core/config/field.h"
#include "memscale/core/config/field_traits.h"
#include "memscale/core/config/setting.h"

// The inside of a FieldSet: a table whose rows are made from the members
// themselves, so that a member's type and default are written once, in the
// header, and its name, rule and sentence once, in the table.

namespace memscale::detail {

template <typename Owner>
struct FieldRow {
  FieldSpec spec;
  FieldValue (*read)(const Owner&);
  void (*write)(Owner&, const FieldSpec&, const FieldValue& checked);
  bool (*is_set)(const Owner&);
  std::string (*repr)(const Owner&, const FieldSpec&);
};

// The row of one member. `by_mode`: see FieldSpec.
template <auto Member, typename Owner, typename T>
FieldRow<Owner> row_of(Setting<T> Owner::*, std::string_view name,
                       Bounds bounds, bool by_mode, std::string_view doc) {
  using Traits = FieldTraits<T>;
  const FieldSpec spec{name,
                       Traits::kKind,
                       kNullable<T>,
                       bounds,
                       choices_of<T>(),
                       by_mode,
                       Traits::to_value(*(Owner().*Member)),
                       doc};
  return {spec,
          [](const Owner& owner) { return Traits::to_value(*(owner.*Member)); },
          [](Owner& owner, const FieldSpec& s, const FieldValue& value) {
            owner.*Member = Traits::from_value(s, value);
          },
          [](const Owner& owner) { return (owner.*Member).is_set(); },
          [](const Owner& owner, const FieldSpec& s) -> std::string {
            const T& value = *(owner.*Member);
            if constexpr (Traits::kKind == FieldKind::Record) {
              if (value) return value->repr();
            }
            return s.text(Traits::to_value(value));
          }};
}

template <typename Owner>
struct FieldTable {
  std::string_view what;  // "Config": how messages call the owner
  std::vector<FieldRow<Owner>> rows;
  std::vector<FieldSpec> specs;

  FieldTable(std::string_view owner_name, std::vector<FieldRow<Owner>> all)
      : what(owner_name), rows(std::move(all)) {
    for (const auto& row : rows) specs.push_back(row.spec);
  }

  std::size_t index(std::string_view name) const {
    std::vector<std::string_view> names;
    for (std::size_t i = 0; i < specs.size(); ++i) {
      if (specs[i].name == name) return i;
      names.push_back(specs[i].name);
    }
    const auto near = nearest_name(name, names);
    throw ConfigError(str("unknown ", what, " field ", ascii::quoted(name),
                          near ? str("; did you mean '", *near, "'?") : ""));
  }
  const FieldRow<Owner>& at(std::string_view name) const {
    return rows[index(name)];
  }
};

// Specialised in the owner's .cpp.
template <typename Owner>
const FieldTable<Owner>& field_table();

}  // namespace memscale::detail
