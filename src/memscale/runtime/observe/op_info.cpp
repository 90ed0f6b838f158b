#include "memscale/runtime/observe/op_info.h"

#include <ATen/core/enum_tag.h>
#include <ATen/core/function_schema.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace memscale {
namespace {

bool is_alias(const c10::Argument& result) {
  return result.alias_info() != nullptr;
}

// Whether a foreign operator's schema says what it writes. That of a collective
// does not; who tags an operator as fit for torch.compile (torch.library does
// so for custom_op and triton_op) has promised that it does.
bool is_vouched_for(const c10::OperatorHandle& handle) {
  const std::string& name = handle.schema().name();
  return name.starts_with("aten::") || name.starts_with("torchvision::") ||
         name.starts_with("memscale::") || name.starts_with("profiler::") ||
         handle.hasTag(at::Tag::pt2_compliant_tag);
}

std::unique_ptr<const OpInfo> make_op_info(const c10::OperatorHandle& handle) {
  const c10::FunctionSchema& schema = handle.schema();
  const std::string& overload = schema.overload_name();
  auto info = std::make_unique<OpInfo>(OpInfo{
      .name = overload.empty() ? schema.name() : schema.name() + "." + overload,
      .random = handle.hasTag(at::Tag::nondeterministic_seeded),
      .mutates = schema.is_mutable(),
      .opaque = !schema.name().starts_with("aten::"),
      .may_write = !is_vouched_for(handle),
      .ignored = schema.name().starts_with("profiler::"),
      .is_view = !schema.is_mutable() && !schema.returns().empty() &&
                 std::ranges::all_of(schema.returns(), is_alias),
      .is_mere_view = false,
      .written = {},
      .rules = {},
      .statistics = {},
      .training = {},
      .generator = {},
      .accumulate = {},
      .transposed = {},
      .non_blocking = {},
      .handle = handle});
  info->rules = find_replay_rules(info->name);
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const auto* alias = argument.alias_info();
    if (alias != nullptr && alias->isWrite()) info->written.push_back(i);
    if (argument.name() == "generator") info->generator = i;
    if (argument.name() == "accumulate") info->accumulate = i;
    if (argument.name() == "transposed") info->transposed = i;
    if (argument.name() == "non_blocking") info->non_blocking = i;
    if (!info->rules.updates_statistics) continue;
    if (argument.name() == "training") info->training = i;
    if (argument.name().starts_with("running_")) info->statistics.push_back(i);
  }
  info->may_differ = info->accumulate || info->non_blocking ||
                     info->rules.unordered || info->rules.unordered_on_cuda ||
                     info->rules.is_convolution;
  info->is_mere_view = info->is_view && !info->may_write && !info->opaque &&
                       !info->random && !info->may_differ && !info->ignored &&
                       info->rules.never.empty() &&
                       find_op_row(info->name).makes_nothing;
  return info;
}

}  // namespace

bool OpInfo::decomposes(c10::DispatchKey backend) const {
  if (!handle.hasKernelForDispatchKey(
          c10::DispatchKey::CompositeImplicitAutograd)) {
    return false;
  }
  // A kernel for the backend's autograd is another composite one.
  return !handle.hasKernelForDispatchKey(backend) ||
         handle.hasKernelForDispatchKey(
             c10::getAutogradKeyFromBackend(c10::toBackendComponent(backend)));
}

namespace {

// The last operators of a thread, by the address of their names: most calls
// need no lock.
struct Recent {
  const char* name = nullptr;
  const OpInfo* info = nullptr;
};
thread_local std::array<Recent, 256> recent;

Recent& recent_of(const char* name) {
  return recent[(reinterpret_cast<std::uintptr_t>(name) >> 4U) % recent.size()];
}

}  // namespace

const OpInfo* find_op_info(const at::RecordFunction& fn) {
  Recent& known = recent_of(fn.name());
  if (known.name == fn.name() && known.info != nullptr) return known.info;
  // Each node of backward comes with a name of its own, made for us.
  if (std::string_view(fn.name()).starts_with("autograd::engine::")) {
    return nullptr;
  }
  // Keyed by the address of the schema's name, which is stable and its own for
  // each overload; names that are not of a schema are never entered.
  static std::shared_mutex mutex;
  static auto& table =
      *new std::unordered_map<const char*, std::unique_ptr<const OpInfo>>();
  {
    const std::shared_lock lock(mutex);
    const auto found = table.find(fn.name());
    if (found != table.end()) {
      known = {fn.name(), found->second.get()};
      return known.info;
    }
  }
  const auto name = fn.operator_name();
  if (!name) return nullptr;
  const auto handle = c10::Dispatcher::singleton().findOp(*name);
  if (!handle || !handle->hasSchema()) return nullptr;
  const std::unique_lock lock(mutex);
  auto& entry = table[fn.name()];
  if (entry == nullptr) entry = make_op_info(*handle);
  return entry.get();
}

}  // namespace memscale
