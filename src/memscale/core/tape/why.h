#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "memscale/base/enum_names.h"

namespace memscale {

// Why the bytes of a state are held, and not computed again in backward.
enum class Why : std::uint8_t {
  Replayed,  // they are not held
  Outside,
  Border,
  Small,
  Chosen,
  Statistics,
  NoGain,
  // From here on users are told.
  Factory,
  InFunction,
  GivenToFunction,
  Mode,
  Foreign,
  Special,
  Arguments,
  NotWaitedFor,
  Raised,
  Lost,
  Unordered,
  Benchmarked,
  Never,
};

// The texts are shown to users. That of Never is the operator's own, if it has
// one: ReplayRules::never.
template <>
struct EnumNames<Why> {
  static constexpr std::string_view kWhat = "reason to keep";
  static constexpr Why kLast = Why::Never;
  static constexpr std::array kTable = {
      EnumName{Why::Replayed, "is computed again"},
      EnumName{Why::Outside, "comes from outside of the layer"},
      EnumName{Why::Border, "its lineage crosses too many layers"},
      EnumName{Why::Small, "smaller than min_bytes"},
      EnumName{Why::Chosen, "kept by the layer's policy"},
      EnumName{Why::Statistics, "a running statistic"},
      EnumName{Why::NoGain, "as large as what it is made from"},
      EnumName{Why::Factory, "may be filled by what torch cannot see"},
      EnumName{Why::InFunction, "made inside a custom autograd Function"},
      EnumName{
          Why::GivenToFunction,
          "given to a custom autograd Function, which may have written it"},
      EnumName{Why::Mode, "a TorchDispatchMode may have changed its result"},
      EnumName{Why::Foreign, "reads memory that is not torch's own"},
      EnumName{Why::Special, "has an argument that is not a plain tensor"},
      EnumName{Why::Arguments, "its arguments cannot be seen"},
      EnumName{Why::NotWaitedFor,
               "a copy to the host that nobody has waited for"},
      EnumName{Why::Raised, "raised an exception"},
      EnumName{Why::Lost, "what it was made from was changed in place"},
      EnumName{Why::Unordered, "sums in no fixed order"},
      EnumName{Why::Benchmarked,
               "cudnn.benchmark may choose another algorithm in backward"},
      EnumName{Why::Never, "cannot be called a second time"},
  };
};

// Whether it is something that a user may want to know.
constexpr bool is_notable(Why why) { return why >= Why::Factory; }

}  // namespace memscale
