// Flags that only one row of a table knows: of a type of models, or of a task.
#pragma once

#include <algorithm>
#include <any>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/fields.h"

namespace megatron {

// A Config of any type, copied by value; or none.
class OwnConfig {
 public:
  OwnConfig() = default;
  template <class C>
  explicit OwnConfig(C config)
      : value_(std::move(config)),
        config_([](std::any& value) -> Config* { return std::any_cast<C>(&value); }) {}

  Config* config() { return config_ == nullptr ? nullptr : config_(value_); }  // null: none
  // Null: it is of another type.
  template <class C>
  C* as() {
    return std::any_cast<C>(&value_);
  }
  template <class C>
  const C* as() const {
    return std::any_cast<C>(&value_);
  }
  // The defaults of C, if it is of another type.
  template <class C>
  const C& as_or_default() const {
    static const C kDefaults;
    const C* own = as<C>();
    return own != nullptr ? *own : kDefaults;
  }
  // Becomes the defaults of C first, if it is of another type.
  template <class C>
  C& ensure() {
    if (as<C>() == nullptr) *this = OwnConfig(C());
    return *as<C>();
  }
  bool same_type(const OwnConfig& other) const { return value_.type() == other.value_.type(); }

 private:
  std::any value_;
  Config* (*config_)(std::any&) = nullptr;
};

// The one of type C among them.
template <class C, class Configs>
auto& own_config(Configs& all) {
  const auto found = std::find_if(all.begin(), all.end(),
                                  [](const OwnConfig& one) { return one.as<C>() != nullptr; });
  MEGATRON_ASSERT(found != all.end(), "no row of a table has these flags");
  return *found->template as<C>();
}

}  // namespace megatron
