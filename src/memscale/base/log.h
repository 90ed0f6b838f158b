#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "memscale/base/enum_names.h"
#include "memscale/base/error.h"

// The one way MemScale speaks: records go to one sink. In Python that sink is
// logging.getLogger("memscale"); a C++ program sets its own.
//
// Thread-safe. What a sink throws is dropped: a sink that fails does not take
// the training step with it. The sink runs on the thread that logs, outside any
// lock of ours, and may log itself.
// Python's sink takes the GIL: do not log while holding a lock for which a
// thread that holds the GIL may be waiting.

namespace memscale::log {

enum class Level { Debug, Info, Warning, Error };

struct Record {
  Level level;
  std::string_view component;  // "offload": the part that speaks
  std::string_view message;    // both live only as long as the sink's call
};

using Sink = std::function<void(const Record&)>;

// Replaces the sink and returns the one before it. An empty sink stands for the
// default: warnings and errors to stderr, the rest nowhere. Another thread may
// still be inside the old sink when this returns.
Sink set_sink(Sink sink);

// Records below the threshold cost one atomic load and reach no sink. Info at
// the start.
void set_threshold(Level level);
Level threshold();

// Hands the record to the sink, whatever the threshold.
void emit(const Record& record);

// True if a record of that level would be handed on.
bool enabled(Level level) noexcept;

// log::warning("offload", "pool is full: ", n, " saves stay on the device")
template <typename... Parts>
void write(Level level, std::string_view component, const Parts&... parts) {
  if (enabled(level)) emit({level, component, str(parts...)});
}
template <typename... Parts>
void debug(std::string_view component, const Parts&... parts) {
  write(Level::Debug, component, parts...);
}
template <typename... Parts>
void info(std::string_view component, const Parts&... parts) {
  write(Level::Info, component, parts...);
}
template <typename... Parts>
void warning(std::string_view component, const Parts&... parts) {
  write(Level::Warning, component, parts...);
}
template <typename... Parts>
void error(std::string_view component, const Parts&... parts) {
  write(Level::Error, component, parts...);
}

}  // namespace memscale::log

namespace memscale {

template <>
struct EnumNames<log::Level> {
  static constexpr std::string_view kWhat = "log level";
  static constexpr log::Level kLast = log::Level::Error;
  static constexpr std::array kTable = {
      EnumName{log::Level::Debug, "debug"},
      EnumName{log::Level::Info, "info"},
      EnumName{log::Level::Warning, "warning"},
      EnumName{log::Level::Error, "error"},
  };
};

}  // namespace memscale
