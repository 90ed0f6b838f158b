#pragma once

// Why a state is held and not replayed. One pointer each: they are compared,
// and the notable ones are shown to users.

namespace memscale {

inline constexpr const char* kOutside = "comes from outside of the layer";
inline constexpr const char* kBorder = "its lineage crosses too many layers";
inline constexpr const char* kSmall = "smaller than min_bytes";
inline constexpr const char* kChosen = "kept by the layer's policy";
inline constexpr const char* kFactory =
    "may be filled by what torch cannot see";
inline constexpr const char* kInFunction =
    "made inside a custom autograd Function";
inline constexpr const char* kGivenToFunction =
    "given to a custom autograd Function, which may have written it";
inline constexpr const char* kMode =
    "a TorchDispatchMode may have changed its result";
inline constexpr const char* kForeign = "reads memory that is not torch's own";
inline constexpr const char* kSpecial =
    "has an argument that is not a plain tensor";
inline constexpr const char* kArguments = "its arguments cannot be seen";
inline constexpr const char* kNotWaitedFor =
    "a copy to the host that nobody has waited for";
inline constexpr const char* kStatistics = "a running statistic";
inline constexpr const char* kRaised = "raised an exception";
inline constexpr const char* kNoGain = "as large as what it is made from";
inline constexpr const char* kLost =
    "what it was made from was changed in place";

// Something that a user may want to know.
inline bool is_notable(const char* why) {
  return why != kOutside && why != kSmall && why != kChosen &&
         why != kStatistics && why != kNoGain && why != kBorder;
}

}  // namespace memscale
