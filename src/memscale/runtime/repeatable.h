#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include "memscale/runtime/op_info.h"

namespace memscale {

// Why a call with these arguments may give other bits the second time, on the
// device that it is for; null: it does not. `as_cuda`: see TapeRules. There
// must be as many arguments as the schema has.
const char* why_not_repeatable(const OpInfo& info,
                               c10::ArrayRef<const c10::IValue> inputs,
                               bool as_cuda);

}  // namespace memscale
