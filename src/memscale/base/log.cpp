#include "memscale/base/log.h"

#include <cxxabi.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <mutex>
#include <utility>

namespace memscale::log {
namespace {

// shared_ptr: a thread inside the sink keeps it alive while another replaces
// it, and no lock is held during the call.
struct State {
  std::mutex mutex;
  std::shared_ptr<Sink> sink;
  std::atomic<Level> threshold{Level::Info};
};

State& state() {
  // Never destroyed: threads may log until the very end of the process.
  static State* const instance = new State();
  return *instance;
}

void write_to_stderr(const Record& record) {
  if (record.level < Level::Warning) return;
  const std::string line = str("memscale.", record.component, ": ",
                               to_string(record.level), ": ", record.message);
  std::fprintf(stderr, "%s\n", line.c_str());
}

}  // namespace

Sink set_sink(Sink sink) {
  std::shared_ptr<Sink> next;
  if (sink) next = std::make_shared<Sink>(std::move(sink));
  {
    const std::lock_guard lock(state().mutex);
    std::swap(state().sink, next);
  }
  return next ? *next : Sink();
}

void set_threshold(Level level) { state().threshold.store(level); }

Level threshold() { return state().threshold.load(); }

bool enabled(Level level) noexcept { return level >= threshold(); }

void emit(const Record& record) {
  try {
    std::shared_ptr<Sink> sink;
    {
      const std::lock_guard lock(state().mutex);
      sink = state().sink;
    }
    sink ? (*sink)(record) : write_to_stderr(record);
  } catch (abi::__forced_unwind&) {
    // Not an exception but the end of this thread: Python ends threads so when
    // it exits while they wait for the GIL. Holding it up aborts the process.
    throw;
  } catch (...) {  // NOLINT(bugprone-empty-catch): see log.h
  }
}

}  // namespace memscale::log
