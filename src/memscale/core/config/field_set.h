#pragma once

#include <span>
#include <string>
#include <string_view>

#include "memscale/core/config/field.h"

namespace memscale {

// What every config can do by name. `Owner` is a struct of Settings that
// derives from FieldSet<Owner>; its table of fields is in its .cpp.
// A value type: copy freely; no synchronisation of its own.
template <typename Owner>
class FieldSet {
 public:
  // The table, in the order of the docs. Lives for ever.
  static std::span<const FieldSpec> fields();

  // The spec of that field. Throws ConfigError, with the nearest name, if there
  // is none.
  static const FieldSpec& field(std::string_view name);

  // Sets from plain data. Throws ConfigError (unknown name, broken rule), and
  // then nothing has changed.
  void set(std::string_view name, FieldValue value);

  // The value as plain data: sizes in bytes, records as maps of all fields.
  FieldValue get(std::string_view name) const;

  // True if someone gave this field a value, even one equal to the default.
  bool is_set(std::string_view name) const;

  // Holds every field against its rule. Assigning to a member directly checks
  // nothing; whoever uses a config calls this first. Throws ConfigError.
  void validate() const;

  // The fields that are set, or all: from_map(to_map()) == *this.
  FieldMap to_map(bool include_defaults = false) const;
  static Owner from_map(const FieldMap& map);

  // "Config(mode='aggressive', budget='6GiB')": the fields that make a
  // difference, as a Python expression.
  std::string repr() const;

  // Equal values; and, where the mode would decide, set by the same fields.
  friend bool operator==(const Owner& a, const Owner& b) { return equal(a, b); }

 private:
  friend Owner;  // and nobody else may derive from it
  FieldSet() = default;

  static bool equal(const Owner& a, const Owner& b);
  const Owner& self() const { return static_cast<const Owner&>(*this); }
  Owner& self() { return static_cast<Owner&>(*this); }
};

}  // namespace memscale
