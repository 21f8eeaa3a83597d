// Python's pickle format, read without executing it, and written in its simplest form.
//
// A pickle is a program that builds objects by calling functions that it names. This reader
// executes only the building of data and calls nothing: a class or function is a name, and the
// result of a call is an object that stores the name, its arguments and its state. Names that the
// caller does not allow are refused, so that a file that is not what it claims to be is an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace megatron {

// A node. Nodes point to each other, possibly in cycles.
struct PickleValue {
  enum class Kind {
    kNone,
    kBool,
    kInt,
    kFloat,
    kText,
    kBytes,
    kList,
    kTuple,
    kDict,
    kName,
    kObject,
    kPersistent
  };
  Kind kind = Kind::kNone;
  int64_t integer = 0;  // kInt, kBool
  double number = 0.0;  // kFloat
  std::string text;     // kText, kBytes; kName and the class of kObject: "module.name"
  // Elements of kList and kTuple (sets are lists); arguments of kObject; kPersistent: a single
  // element, the reference.
  std::vector<const PickleValue*> items;
  // Entries of kDict, and of objects that are filled like one (OrderedDict).
  std::vector<std::pair<const PickleValue*, const PickleValue*>> entries;
  const PickleValue* state = nullptr;  // kObject: argument of its __setstate__; null: none

  bool is(Kind k) const { return kind == k; }
  bool is_object(std::string_view name) const { return kind == Kind::kObject && text == name; }
  bool is_sequence() const { return kind == Kind::kList || kind == Kind::kTuple; }
  // The value of a text key; null: none.
  const PickleValue* find(std::string_view key) const;
  // The attribute of an object whose state is a dict; null: none.
  const PickleValue* attribute(std::string_view name) const;
};

// Owns the nodes. Move-only.
class Pickle {
 public:
  // Whether a class or function may be named ("torch._utils._rebuild_tensor_v2").
  using Known = std::function<bool(std::string_view name)>;

  // `name` is used in errors. Throws Error for truncated or malformed input and for names that are
  // not known.
  Pickle(std::span<const std::byte> bytes, const std::string& name, const Known& known);
  const PickleValue& root() const { return *root_; }
  // If the root is a list of one element, makes that element the root.
  Pickle unwrapped() && {
    if (root_->is_sequence() && root_->items.size() == 1) root_ = root_->items[0];
    return std::move(*this);
  }

 private:
  friend class PickleMachine;
  std::unique_ptr<std::deque<PickleValue>> values_;
  const PickleValue* root_ = nullptr;
};

// Builds a pickle (protocol 2) by concatenating texts: none() + ... Values are not shared.
namespace pickle {

std::string none();
std::string boolean(bool value);
std::string integer(int64_t value);
std::string number(double value);
std::string text(std::string_view value);
std::string name(std::string_view module, std::string_view attribute);
std::string tuple(std::span<const std::string> items);
std::string list(std::span<const std::string> items);
std::string dict(std::span<const std::pair<std::string, std::string>> entries);
std::string call(const std::string& function, std::span<const std::string> arguments);
// An object of a class, constructed without arguments and then given its state.
std::string object(const std::string& type, const std::string& state);
std::string persistent(const std::string& reference);
std::string file(const std::string& root);

}  // namespace pickle

}  // namespace megatron
