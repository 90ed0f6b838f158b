#pragma once

#include <string>
#include <string_view>

#include "memscale/core/trace/trace.h"

namespace memscale {

// The trace as one line of JSON, the same bytes for equal traces:
//   {"format":"memscale-trace","version":3,"layers":[...],"ops":[...],
//    "events":[...],"values":[...],"storages":[...],"saves":[...],"saves_known":true,
//    "notes":[...]}
// Every field of trace.h stands there under its own name; enums by name, bytes
// as numbers, an invalid id as null. Throws TraceError, naming the place, if a
// text is not UTF-8.
std::string to_json(const Trace& trace);

// Reads what to_json wrote back as an equal trace; other versions are refused
// (they do not tell how ops use their inputs). The text may come from
// anywhere: TraceError names the place ("ops[3].phase") of whatever is missing,
// unknown, there twice, of the wrong type or out of range, and of what
// Trace::check refuses.
Trace trace_from_json(std::string_view text);

}  // namespace memscale
