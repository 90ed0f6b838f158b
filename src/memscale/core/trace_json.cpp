#include "memscale/core/trace_json.h"

#include <algorithm>
#include <concepts>
#include <limits>
#include <set>
#include <type_traits>
#include <utility>

#include <nlohmann/json.hpp>

#include "memscale/base/ascii.h"
#include "memscale/base/error.h"

namespace memscale {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kFormat = "memscale-trace";
constexpr std::int64_t kVersion = 1;
// Ours is 4: trace, array, object, array. Anything deeper is not a trace.
constexpr std::size_t kMaxDepth = 8;
// Of a foreign text within a message.
constexpr std::size_t kMaxQuoted = 60;

// The fields of each struct, in the order they are written. Each is taken
// apart, so that a member that is not listed here does not compile.
template <typename S, typename T>
concept Is = std::same_as<std::remove_const_t<S>, T>;

void each_field(Is<Layer> auto& layer, auto&& field) {
  auto& [name] = layer;
  field("name", name);
}

void each_field(Is<Op> auto& op, auto&& field) {
  auto& [name, phase, layer, forward, inputs, outputs, random, mutates, view,
         opaque, in_function, flops, moved, workspace, workspace_known] = op;
  field("name", name);
  field("phase", phase);
  field("layer", layer);
  field("forward", forward);
  field("inputs", inputs);
  field("outputs", outputs);
  field("random", random);
  field("mutates", mutates);
  field("view", view);
  field("opaque", opaque);
  field("in_function", in_function);
  field("flops", flops);
  field("moved", moved);
  field("workspace", workspace);
  field("workspace_known", workspace_known);
}

void each_field(Is<Value> auto& value, auto&& field) {
  auto& [storage, dtype, sizes, strides, offset, version] = value;
  field("storage", storage);
  field("dtype", dtype);
  field("sizes", sizes);
  field("strides", strides);
  field("offset", offset);
  field("version", version);
}

void each_field(Is<Storage> auto& storage, auto&& field) {
  auto& [bytes, count, place, category, layer, born, freed, let_go, returned] =
      storage;
  field("bytes", bytes);
  field("count", count);
  field("place", place);
  field("category", category);
  field("layer", layer);
  field("born", born);
  field("freed", freed);
  field("let_go", let_go);
  field("returned", returned);
}

void each_field(Is<Save> auto& save, auto&& field) {
  auto& [op, value, released] = save;
  field("op", op);
  field("value", value);
  field("released", released);
}

void each_field(Is<Trace> auto& trace, auto&& field) {
  auto& [layers, ops, values, storages, saves, saves_known, notes] = trace;
  field("layers", layers);
  field("ops", ops);
  field("values", values);
  field("storages", storages);
  field("saves", saves);
  field("saves_known", saves_known);
  field("notes", notes);
}

// Where we are, as a chain to the root: paths become text only when needed.
struct Path {
  const Path* parent = nullptr;
  std::string_view key;
  std::size_t index = 0;

  std::string text() const {
    if (parent == nullptr) return "";
    const std::string above = parent->text();
    if (key.empty()) return str(above, "[", index, "]");
    return str(above, above.empty() ? "" : ".", key);
  }
};

class Writer final {
 public:
  std::string take() && { return std::move(out_); }

  void write(const Path&, bool flag) { out_ += flag ? "true" : "false"; }
  void write(const Path&, std::int64_t number) {
    out_ += std::to_string(number);
  }
  void write(const Path&, std::uint32_t number) {
    out_ += std::to_string(number);
  }
  void write(const Path& path, Bytes bytes) { write(path, bytes.count()); }
  void write(const Path& path, const std::string& text) {
    try {
      out_ += Json(text).dump();
    } catch (const Json::type_error&) {
      throw TraceError(str(path.text(), " must be UTF-8 to be written"));
    }
  }
  template <NamedEnum E>
  void write(const Path&, const E& value) {
    // No name of ours needs an escape.
    out_ += str('"', to_string(value), '"');
  }
  template <typename Tag>
  void write(const Path&, StrongId<Tag> id) {
    out_ += id.valid() ? std::to_string(id.index()) : "null";
  }
  template <typename T>
  void write(const Path& path, const std::vector<T>& items) {
    out_ += '[';
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out_ += ',';
      write(Path{&path, "", i}, items[i]);
    }
    out_ += ']';
  }
  void write(const Path& path, const Trace& trace) {
    out_ += str(R"({"format":")", kFormat, R"(","version":)", kVersion);
    write_fields(path, trace, ',');
  }
  template <typename S>
  void write(const Path& path, const S& object) {
    write_fields(path, object, '{');
  }

 private:
  template <typename S>
  void write_fields(const Path& path, const S& object, char before) {
    each_field(object, [&](std::string_view name, const auto& member) {
      out_ += before;
      before = ',';
      out_ += '"';
      out_ += name;
      out_ += "\":";
      write(Path{&path, name}, member);
    });
    out_ += '}';
  }

  std::string out_;
};

// The text in quotes, cut where it is long, but not inside of a character.
std::string shortened(std::string_view text) {
  if (text.size() <= kMaxQuoted) return ascii::quoted(text);
  std::size_t end = kMaxQuoted;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) {
    --end;
  }
  return ascii::quoted(text.substr(0, end)) + "...";
}

std::string described(const Json& node) {
  if (node.is_object()) return "an object";
  if (node.is_array()) return "an array";
  if (node.is_string()) return shortened(node.get_ref<const std::string&>());
  return node.dump();
}

[[noreturn]] void refuse(const Path& path, std::string_view rule,
                         const Json& node) {
  const std::string place = path.text();
  throw TraceError(str(place.empty() ? "a trace" : place, " must be ", rule,
                       ", got ", described(node)));
}

void read(const Path& path, const Json& node, bool& flag) {
  if (!node.is_boolean()) refuse(path, "true or false", node);
  flag = node.get<bool>();
}

void read(const Path& path, const Json& node, std::int64_t& number) {
  // The library has two kinds of integers; one of them may be too large.
  constexpr std::uint64_t kMax = std::numeric_limits<std::int64_t>::max();
  const bool fits =
      node.is_number_integer() &&
      (!node.is_number_unsigned() || node.get<std::uint64_t>() <= kMax);
  if (!fits) refuse(path, "an integer of 64 bits", node);
  number = node.get<std::int64_t>();
}

void read(const Path& path, const Json& node, std::uint32_t& number) {
  constexpr std::uint64_t kMax = std::numeric_limits<std::uint32_t>::max();
  if (!node.is_number_unsigned() || node.get<std::uint64_t>() > kMax) {
    refuse(path, "an integer from 0 to 2^32 - 1", node);
  }
  number = node.get<std::uint32_t>();
}

void read(const Path& path, const Json& node, Bytes& bytes) {
  std::int64_t count = 0;
  read(path, node, count);
  bytes = Bytes(count);
}

void read(const Path& path, const Json& node, std::string& text) {
  if (!node.is_string()) refuse(path, "a text", node);
  text = node.get_ref<const std::string&>();
}

template <NamedEnum E>
void read(const Path& path, const Json& node, E& value) {
  const auto found =
      node.is_string() ? try_from_string<E>(node.get_ref<const std::string&>())
                       : std::nullopt;
  if (!found) refuse(path, str("one of ", names_of<E>()), node);
  value = *found;
}

template <typename Tag>
void read(const Path& path, const Json& node, StrongId<Tag>& id) {
  if (node.is_null()) return;  // as it was made
  constexpr std::uint64_t kEnd = std::numeric_limits<std::uint32_t>::max();
  if (!node.is_number_unsigned() || node.get<std::uint64_t>() >= kEnd) {
    refuse(path, "null or an integer from 0 to 2^32 - 2", node);
  }
  id = StrongId<Tag>(node.get<std::size_t>());
}

template <typename S>
void read(const Path& path, const Json& node, S& object);

template <typename T>
void read(const Path& path, const Json& node, std::vector<T>& items) {
  if (!node.is_array()) refuse(path, "an array", node);
  items.resize(node.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    read(Path{&path, "", i}, node[i], items[i]);
  }
}

// Reads the fields of `object` out of `node`, which may hold `others` besides.
template <typename S>
void read_fields(const Path& path, const Json& node, S& object,
                 std::span<const std::string_view> others) {
  std::vector<std::string_view> names(others.begin(), others.end());
  each_field(object, [&](std::string_view name, auto& member) {
    const Path here{&path, name};
    const auto found = node.find(name);
    if (found == node.end()) throw TraceError(here.text() + " is missing");
    read(here, *found, member);
    names.push_back(name);
  });
  if (node.size() == names.size()) return;
  for (const auto& entry : node.items()) {
    if (std::ranges::find(names, entry.key()) != names.end()) continue;
    const std::string place = path.text();
    throw TraceError(str(place.empty() ? "a trace" : place, " has no field ",
                         shortened(entry.key())));
  }
}

template <typename S>
void read(const Path& path, const Json& node, S& object) {
  if (!node.is_object()) refuse(path, "an object", node);
  read_fields(path, node, object, {});
}

// Walks the text before anything is built from it. The library's own parser
// builds whatever nesting it meets and lets the last of equal keys win, and its
// parser with a callback takes quadratic time over long arrays.
class Guard final : public nlohmann::json_sax<Json> {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(std::int64_t) override { return true; }
  bool number_unsigned(std::uint64_t) override { return true; }
  bool number_float(double, const std::string&) override { return true; }
  bool string(std::string&) override { return true; }
  bool binary(Json::binary_t&) override { return true; }

  bool start_object(std::size_t) override { return enter(); }
  bool start_array(std::size_t) override { return enter(); }
  bool end_object() override { return leave(); }
  bool end_array() override { return leave(); }

  bool key(std::string& name) override {
    if (keys_.back().insert(name).second) return true;
    throw TraceError(
        str("a trace must not name a field twice, got ", shortened(name)));
  }

  // Without the library's own text, which quotes the input at any length.
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    throw TraceError(
        str("a trace must be JSON, got an error at byte ", position));
  }

 private:
  bool enter() {
    if (keys_.size() == kMaxDepth) {
      throw TraceError(
          str("a trace must not nest deeper than ", kMaxDepth, " levels"));
    }
    keys_.emplace_back();
    return true;
  }
  bool leave() {
    keys_.pop_back();
    return true;
  }

  std::vector<std::set<std::string>> keys_;  // of each level that is open
};

}  // namespace

std::string to_json(const Trace& trace) {
  Writer writer;
  writer.write(Path(), trace);
  return std::move(writer).take();
}

Trace trace_from_json(std::string_view text) {
  Guard guard;
  Json::sax_parse(text, &guard);
  const Json root = Json::parse(text);

  const Path path;
  if (!root.is_object()) refuse(path, "an object", root);
  if (const auto format = root.find("format");
      format == root.end() || *format != kFormat) {
    refuse(Path{&path, "format"}, ascii::quoted(kFormat),
           format == root.end() ? Json() : *format);
  }
  if (const auto version = root.find("version");
      version == root.end() || *version != kVersion) {
    refuse(Path{&path, "version"}, str(kVersion),
           version == root.end() ? Json() : *version);
  }
  Trace trace;
  constexpr std::string_view kOthers[] = {"format", "version"};
  read_fields(path, root, trace, kOthers);
  trace.check();
  return trace;
}

}  // namespace memscale
