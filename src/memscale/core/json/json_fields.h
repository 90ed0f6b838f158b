#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "memscale/base/ascii.h"
#include "memscale/base/bytes.h"
#include "memscale/base/enum_names.h"
#include "memscale/base/error.h"
#include "memscale/base/ids.h"

// Structs to and from JSON, field by field, for the *_json.cpp files alone.
//
// Each struct has a function each_field(object, field) that calls
// field(name, member) for every member in the order they are written. Files may
// come from anywhere: whatever is missing, unknown, there twice, of the wrong
// type or out of range is refused, naming the place.

namespace memscale::json {

using Json = nlohmann::json;

// What a document is: its error is E, its messages call it `noun`.
template <typename E>
struct Form {
  std::string_view name;  // of the field "format"
  std::int64_t version;
  std::string_view noun;  // "a trace"
  std::size_t max_depth;  // what is nested deeper is refused, unread
};

// As field(name, member, kMayBeMissing): of a field that files of an earlier
// version do not have; the member then stays as it was made.
struct MayBeMissing {};
inline constexpr MayBeMissing kMayBeMissing{};

// Of a foreign text within a message.
inline constexpr std::size_t kMaxQuoted = 60;

// S is T or const T: each_field serves writing and reading.
template <typename S, typename T>
concept Is = std::same_as<std::remove_const_t<S>, T>;

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

template <typename E>
class Writer final {
 public:
  std::string take() && { return std::move(out_); }

  // The outermost object: the form's name and version stand first.
  template <typename S>
  void write_document(const Form<E>& form, const S& object) {
    out_ += str(R"({"format":")", form.name, R"(","version":)", form.version);
    write_fields(Path(), object, ',');
  }

 private:
  void write(const Path&, bool flag) { out_ += flag ? "true" : "false"; }
  void write(const Path&, std::int64_t number) {
    out_ += std::to_string(number);
  }
  void write(const Path&, std::uint32_t number) {
    out_ += std::to_string(number);
  }
  void write(const Path&, std::size_t number) {
    out_ += std::to_string(number);
  }
  void write(const Path& path, Bytes bytes) { write(path, bytes.count()); }
  void write(const Path& path, const std::string& text) {
    try {
      out_ += Json(text).dump();
    } catch (const Json::type_error&) {
      throw E(str(path.text(), " must be UTF-8 to be written"));
    }
  }
  template <NamedEnum N>
  void write(const Path&, const N& value) {
    // No name of ours needs an escape.
    out_ += str('"', to_string(value), '"');
  }
  template <typename Tag>
  void write(const Path&, StrongId<Tag> id) {
    out_ += id.valid() ? std::to_string(id.index()) : "null";
  }
  template <typename T>
  void write(const Path& path, const std::optional<T>& item) {
    if (item) return write(path, *item);
    out_ += "null";
  }
  template <typename A, typename B>
  void write(const Path& path, const std::pair<A, B>& pair) {
    out_ += '[';
    write(path, pair.first);
    out_ += ',';
    write(path, pair.second);
    out_ += ']';
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
  template <typename S>
  void write(const Path& path, const S& object) {
    write_fields(path, object, '{');
  }
  template <typename S>
  void write_fields(const Path& path, const S& object, char before) {
    each_field(object, [&](std::string_view name, const auto& member,
                           auto... /*MayBeMissing*/) {
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

// The text in quotes, cut where it is long.
inline std::string shortened(std::string_view text) {
  return ascii::quoted_start(text, kMaxQuoted);
}

inline std::string described(const Json& node) {
  if (node.is_object()) return "an object";
  if (node.is_array()) return "an array";
  if (node.is_string()) return shortened(node.get_ref<const std::string&>());
  return node.dump();
}

template <typename E>
class Reader final {
 public:
  explicit Reader(const Form<E>& form) : form_(form) {}

  // The whole document; throws E.
  template <typename S>
  void read_document(std::string_view text, S& object) const;
  // The same of a document that may be of an earlier version, which is read
  // into `earlier`. True: it was of the form's own version.
  template <typename S, typename Earlier>
  bool read_document(std::string_view text, S& object,
                     std::int64_t earlier_version, Earlier& earlier) const;

 private:
  class Guard;
  static constexpr std::string_view kOthers[] = {"format", "version"};

  // The document as a tree, if it says that it is of this format.
  Json parse(std::string_view text) const;

  [[noreturn]] void refuse(const Path& path, std::string_view rule,
                           const Json& node) const {
    throw E(str(place(path), " must be ", rule, ", got ", described(node)));
  }
  std::string place(const Path& path) const {
    std::string text = path.text();
    return text.empty() ? std::string(form_.noun) : text;
  }

  void read(const Path& path, const Json& node, bool& flag) const {
    if (!node.is_boolean()) refuse(path, "true or false", node);
    flag = node.get<bool>();
  }
  void read(const Path& path, const Json& node, std::int64_t& number) const {
    // The library has two kinds of integers; one of them may be too large.
    constexpr std::uint64_t kMax = std::numeric_limits<std::int64_t>::max();
    const bool fits =
        node.is_number_integer() &&
        (!node.is_number_unsigned() || node.get<std::uint64_t>() <= kMax);
    if (!fits) refuse(path, "an integer of 64 bits", node);
    number = node.get<std::int64_t>();
  }
  void read(const Path& path, const Json& node, std::uint32_t& number) const {
    number = read_index(path, node);
  }
  void read(const Path& path, const Json& node, std::size_t& number) const {
    number = read_index(path, node);
  }
  std::uint32_t read_index(const Path& path, const Json& node) const {
    constexpr std::uint64_t kMax = std::numeric_limits<std::uint32_t>::max();
    if (!node.is_number_unsigned() || node.get<std::uint64_t>() > kMax) {
      refuse(path, "an integer from 0 to 2^32 - 1", node);
    }
    return node.get<std::uint32_t>();
  }
  void read(const Path& path, const Json& node, Bytes& bytes) const {
    std::int64_t count = 0;
    read(path, node, count);
    bytes = Bytes(count);
  }
  void read(const Path& path, const Json& node, std::string& text) const {
    if (!node.is_string()) refuse(path, "a text", node);
    text = node.get_ref<const std::string&>();
  }
  template <NamedEnum N>
  void read(const Path& path, const Json& node, N& value) const {
    const auto found =
        node.is_string()
            ? try_from_string<N>(node.get_ref<const std::string&>())
            : std::nullopt;
    if (!found) refuse(path, str("one of ", names_of<N>()), node);
    value = *found;
  }
  template <typename Tag>
  void read(const Path& path, const Json& node, StrongId<Tag>& id) const {
    if (node.is_null()) return;  // as it was made
    constexpr std::uint64_t kEnd = std::numeric_limits<std::uint32_t>::max();
    if (!node.is_number_unsigned() || node.get<std::uint64_t>() >= kEnd) {
      refuse(path, "null or an integer from 0 to 2^32 - 2", node);
    }
    id = StrongId<Tag>(node.get<std::size_t>());
  }
  template <typename T>
  void read(const Path& path, const Json& node, std::optional<T>& item) const {
    if (node.is_null()) return;
    read(path, node, item.emplace());
  }
  template <typename A, typename B>
  void read(const Path& path, const Json& node, std::pair<A, B>& pair) const {
    if (!node.is_array() || node.size() != 2) refuse(path, "a pair", node);
    read(Path{&path, "", 0}, node[0], pair.first);
    read(Path{&path, "", 1}, node[1], pair.second);
  }
  template <typename T>
  void read(const Path& path, const Json& node, std::vector<T>& items) const {
    if (!node.is_array()) refuse(path, "an array", node);
    items.resize(node.size());
    for (std::size_t i = 0; i < items.size(); ++i) {
      read(Path{&path, "", i}, node[i], items[i]);
    }
  }
  template <typename S>
  void read(const Path& path, const Json& node, S& object) const {
    if (!node.is_object()) refuse(path, "an object", node);
    read_fields(path, node, object, {});
  }

  // Reads the fields of `object` out of `node`, which may hold `others`
  // besides.
  template <typename S>
  void read_fields(const Path& path, const Json& node, S& object,
                   std::span<const std::string_view> others) const {
    std::vector<std::string_view> names(others.begin(), others.end());
    each_field(object, [&](std::string_view name, auto& member,
                           auto... may_be_missing) {
      const Path here{&path, name};
      const auto found = node.find(name);
      if (found == node.end()) {
        if (sizeof...(may_be_missing) > 0) return;
        throw E(here.text() + " is missing");
      }
      read(here, *found, member);
      names.push_back(name);
    });
    if (node.size() == names.size()) return;
    for (const auto& entry : node.items()) {
      if (std::ranges::find(names, entry.key()) != names.end()) continue;
      throw E(str(place(path), " has no field ", shortened(entry.key())));
    }
  }

  const Form<E>& form_;
};

// Walks the text before anything is built from it. The library's own parser
// builds whatever nesting it meets and lets the last of equal keys win, and its
// parser with a callback takes quadratic time over long arrays.
template <typename E>
class Reader<E>::Guard final : public nlohmann::json_sax<Json> {
 public:
  explicit Guard(const Form<E>& form) : form_(form) {}

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
    throw E(
        str(form_.noun, " must not name a field twice, got ", shortened(name)));
  }

  // Without the library's own text, which quotes the input at any length.
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    throw E(str(form_.noun, " must be JSON, got an error at byte ", position));
  }

 private:
  bool enter() {
    if (keys_.size() == form_.max_depth) {
      throw E(str(form_.noun, " must not nest deeper than ", form_.max_depth,
                  " levels"));
    }
    keys_.emplace_back();
    return true;
  }
  bool leave() {
    keys_.pop_back();
    return true;
  }

  const Form<E>& form_;
  std::vector<std::set<std::string>> keys_;  // of each level that is open
};

template <typename E>
Json Reader<E>::parse(std::string_view text) const {
  Guard guard(form_);
  Json::sax_parse(text, &guard);
  Json root = Json::parse(text);

  const Path path;
  if (!root.is_object()) refuse(path, "an object", root);
  if (const auto format = root.find("format");
      format == root.end() || *format != form_.name) {
    refuse(Path{&path, "format"}, ascii::quoted(form_.name),
           format == root.end() ? Json() : *format);
  }
  return root;
}

template <typename E>
template <typename S>
void Reader<E>::read_document(std::string_view text, S& object) const {
  const Json root = parse(text);
  const Json version = root.value("version", Json());
  const Path path;
  if (version != form_.version) {
    refuse(Path{&path, "version"}, str(form_.version), version);
  }
  read_fields(path, root, object, kOthers);
}

template <typename E>
template <typename S, typename Earlier>
bool Reader<E>::read_document(std::string_view text, S& object,
                              std::int64_t earlier_version,
                              Earlier& earlier) const {
  const Json root = parse(text);
  const Json version = root.value("version", Json());
  const Path path;
  if (version == form_.version) {
    read_fields(path, root, object, kOthers);
    return true;
  }
  if (version != earlier_version) {
    refuse(Path{&path, "version"}, str(earlier_version, " or ", form_.version),
           version);
  }
  read_fields(path, root, earlier, kOthers);
  return false;
}

}  // namespace memscale::json
