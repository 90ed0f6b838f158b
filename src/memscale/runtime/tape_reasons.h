#pragma once

// Why a state is held and not replayed. They are compared by address: as arrays
// they have one, in all files. The notable ones are shown to users.

namespace memscale {

inline constexpr char kOutside[] = "comes from outside of the layer";
inline constexpr char kBorder[] = "its lineage crosses too many layers";
inline constexpr char kSmall[] = "smaller than min_bytes";
inline constexpr char kChosen[] = "kept by the layer's policy";
inline constexpr char kFactory[] = "may be filled by what torch cannot see";
inline constexpr char kInFunction[] = "made inside a custom autograd Function";
inline constexpr char kGivenToFunction[] =
    "given to a custom autograd Function, which may have written it";
inline constexpr char kMode[] =
    "a TorchDispatchMode may have changed its result";
inline constexpr char kForeign[] = "reads memory that is not torch's own";
inline constexpr char kSpecial[] = "has an argument that is not a plain tensor";
inline constexpr char kArguments[] = "its arguments cannot be seen";
inline constexpr char kNotWaitedFor[] =
    "a copy to the host that nobody has waited for";
inline constexpr char kStatistics[] = "a running statistic";
inline constexpr char kRaised[] = "raised an exception";
inline constexpr char kNoGain[] = "as large as what it is made from";
inline constexpr char kLost[] = "what it was made from was changed in place";

// Something that a user may want to know.
inline bool is_notable(const char* why) {
  return why != kOutside && why != kSmall && why != kChosen &&
         why != kStatistics && why != kNoGain && why != kBorder;
}

}  // namespace memscale
