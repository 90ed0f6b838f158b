#pragma once

#include <charconv>
#include <concepts>
#include <sstream>
#include <stdexcept>
#include <string>

// What MemScale throws, and how it words it.
//
// Exceptions are for what stops the call; an expected outcome (no plan fits)
// is a return value. The text names the field, the rule and the value:
//   throw ConfigError(str("warmup_steps must be >= 0, got ", steps));

namespace memscale {

// The root: catching Error catches everything that MemScale throws on purpose.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A Config field is unknown, or its value breaks the field's rule.
class ConfigError final : public Error {
 public:
  using Error::Error;
};

// A text cannot be read: a size, an enum name, a file of the kernel.
class ParseError final : public Error {
 public:
  using Error::Error;
};

// A device is not known, or what the machine says about itself is unusable.
class HardwareError final : public Error {
 public:
  using Error::Error;
};

// A trace is malformed, or a model cannot be traced.
class TraceError final : public Error {
 public:
  using Error::Error;
};

// A sample input is missing or of a kind that no model takes.
class InputError final : public Error {
 public:
  using Error::Error;
};

// A plan is malformed or does not belong to the model it is attached to.
class PlanError final : public Error {
 public:
  using Error::Error;
};

// A bug in MemScale: no input should be able to cause it.
class InternalError final : public Error {
 public:
  using Error::Error;
};

namespace detail {

template <typename T>
void append(std::ostringstream& out, const T& part) {
  if constexpr (std::floating_point<T>) {
    // Shortest text that reads back as the same number: a stream's six digits
    // would turn 1.0000001 into "1", and the message into nonsense.
    char text[64];
    const auto end = std::to_chars(text, text + sizeof(text), part).ptr;
    out.write(text, end - text);
  } else if constexpr (std::same_as<T, bool>) {
    out << (part ? "true" : "false");
  } else {
    out << part;
  }
}

}  // namespace detail

// The parts, printed one after the other.
template <typename... Parts>
std::string str(const Parts&... parts) {
  std::ostringstream out;
  (detail::append(out, parts), ...);
  return std::move(out).str();
}

}  // namespace memscale
