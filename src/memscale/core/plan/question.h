#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memscale/base/bytes.h"
#include "memscale/core/config/config.h"
#include "memscale/core/hardware/hardware.h"
#include "memscale/core/tape/tape_rules.h"
#include "memscale/core/time/cost_model.h"
#include "memscale/core/trace/trace.h"

// What a plan is asked for: a traced step, what the user wants, and what the
// step is to run on. Plain values, but for the trace, which is shared and never
// changed.

namespace memscale {

struct Technique;

// Whether a technique may be used.
enum class Wish : std::uint8_t {
  Off,      // no
  Allowed,  // the mode lets the rules choose it
  Asked,    // the user has set its field
};

// Storages below this size are kept: they are not worth an op.
inline constexpr Bytes kDefaultMinBytes = 64_KiB;

// What an allocator's blocks are multiples of, on a device of this type
// ("cpu", "cuda"): the caching allocators of accelerators round to 512 bytes.
Bytes granularity_of(std::string_view device_type);

// What the step is to run on.
struct Target {
  std::string name;  // for people: "cuda:0", "RTX 3090"
  std::string type;  // torch's name for the device whose tensors were traced
  // The accelerator. None: the host's cores, or the simulated device, which
  // computes on them.
  std::optional<DeviceSpec> card;
  std::optional<Bytes> memory;  // of the device, if there is no card
  Tf32 tf32;
  bool benchmarks = false;  // torch.backends.cudnn.benchmark
  // Whether there is a kernel for steps over compressed optimizer state. If
  // not, such a step goes piece by piece through torch's operators, and takes
  // long.
  bool has_state_kernel = true;

  bool on_cpu() const { return type == "cpu"; }
  // Torch calls AMD's cards "cuda", too.
  bool on_cuda() const;
};

// What is known of the step beside its trace.
struct StepFacts {
  std::string model;      // its class
  std::string call;       // "input_ids=int64[2, 32]"
  std::string optimizer;  // its class
  // It is torch's own Adam or AdamW, with options that allow its state to be
  // held in another form.
  bool optimizer_is_adam = false;
  // Parameters have gradients when it begins: see accumulating_step().
  bool has_gradients = false;
  // A compiled model's graphs hold what the compiler chose.
  bool is_compiled = false;
  // By layer, in the model's order; not used unless the trace has as many.
  std::vector<Bytes> parameter_bytes;
};

struct Question {
  // The question that this config puts about this step. Throws ConfigError.
  // Without a trace (null) it can only be asked for fallbacks.
  static Question of(std::shared_ptr<const Trace> trace, const Config& config,
                     const Target& target, StepFacts facts);

  // The step as it was recorded, see plain_step().
  std::shared_ptr<const Trace> trace;
  EffectiveConfig config{};
  std::vector<std::string> fields_set;  // of the config, by the user, to true
  bool force = false;                   // plan even for a tiny model
  double utilization = 1;  // share of the device's memory to plan for
  CostModel cost = CostModel::of_cpu();
  bool on_cpu = false;           // the device is the CPU itself
  ReplayTarget target{};         // what can be replayed there
  Bytes granularity = Bytes(1);  // of the device's allocator
  std::optional<Bytes> device_memory;
  Bytes min_bytes;  // smaller storages are kept
  // By how much predictions were too low, as the first steps showed.
  Bytes margin;
  bool has_state_kernel = true;  // see Target
  std::vector<std::string> disabled_rules;
  std::string device;  // Target::name
  StepFacts step;

  Wish wish(const Technique& technique) const;
  // What the plan has to stay below, if anything: the budget, else the device's
  // memory times its utilization.
  std::optional<Bytes> limit() const;
};

// The step as the program runs it by itself. A step is recorded as a wrapped
// model runs it, which forgets what training does not read
// (Storage::plain_freed); the plain program holds that for longer.
Trace plain_step(const Trace& recorded);

}  // namespace memscale
