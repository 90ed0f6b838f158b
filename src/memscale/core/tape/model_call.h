#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "memscale/core/tape/claims.h"
#include "memscale/core/tape/op_use.h"
#include "memscale/core/tape/tape_rules.h"

namespace memscale {

// One call of a model: which layer runs, and which tape its ops go to. A tape
// is of one call of one layer, but for Note [Borders]: the layer's inputs are
// held, so that what it needs in backward does not reach into another.
//
// T is a kind of tape: see Claims. It has policy(), spans_layers(),
// cross_border(), add_output(StorageKey) and decide_again(), too.
template <typename T>
class ModelCall final {
 public:
  // `rules`: by layer; the first is the model itself, outside of the others.
  ModelCall(const std::vector<TapeRules>& rules, Claims<T>& claims)
      : rules_(rules), claims_(claims) {}

  std::size_t layer() const { return layers_.back(); }
  void enter_layer(std::size_t layer) {
    layers_.push_back(is_compiled() ? kCompiled : layer);
    change_layer();
  }
  // A part that is compiled: until leave_layer(), nothing goes to a tape.
  void enter_compiled() { enter_layer(kCompiled); }
  bool is_compiled() const { return layers_.back() == kCompiled; }
  // False: there is none to leave.
  bool leave_layer() {
    if (layers_.size() == 1) return false;
    layers_.pop_back();
    change_layer();
    return true;
  }

  // The tape of the innermost layer, opened by make(rules) if need be; null if
  // the layer keeps everything.
  template <typename Make>
  T* open_tape(const Make& make) {
    const TapeRules& rules = layer_rules();
    if (rules.keeps_all()) return nullptr;
    if (tape_ == nullptr) {
      tape_ = make(rules);
      claims_.open(tape_);
    }
    return tape_.get();
  }
  // The one that is open; null: none is.
  T* tape() const { return tape_.get(); }
  void close_tape() {
    if (tape_ != nullptr) claims_.add(std::exchange(tape_, nullptr));
  }

  // The call is through, and returns tensors with these storages: its caller is
  // taken to hold them until backward.
  void leave(const std::vector<StorageKey>& outputs) {
    if (tape_ != nullptr) {
      for (const StorageKey output : outputs) tape_->add_output(output);
      tape_->decide_again();
    }
    close_tape();
  }

 private:
  // In the place of a layer's number.
  static constexpr std::size_t kCompiled = static_cast<std::size_t>(-1);
  static inline const TapeRules kKeep = {};

  const TapeRules& layer_rules() const {
    return is_compiled() ? kKeep : rules_.at(layers_.back());
  }

  void change_layer() {
    if (tape_ == nullptr) return;
    if (layer_rules().policy == tape_->policy() && tape_->spans_layers()) {
      tape_->cross_border();
    } else {
      close_tape();
    }
  }

  const std::vector<TapeRules>& rules_;
  Claims<T>& claims_;
  std::vector<std::size_t> layers_ = {0};
  std::shared_ptr<T> tape_;
};

}  // namespace memscale
