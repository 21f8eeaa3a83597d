// Checks of one value, for validate() of configurations.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "megatron/base/check.h"
#include "megatron/base/fields.h"

namespace megatron {

// Adds a violation unless `legal`.
inline void check_range(const char* flag, double value, bool legal, const char* expected,
                        Violations& v) {
  if (!legal) v.add(cat(flag, " is ", value), expected);
}

// Adds a violation for a value that is below `least`.
inline void at_least(Violations& v, std::string_view flag, std::optional<int64_t> value,
                     int64_t least) {
  if (value && *value < least)
    v.add(cat(flag, " is ", *value), cat("give an integer of at least ", least));
}

}  // namespace megatron
