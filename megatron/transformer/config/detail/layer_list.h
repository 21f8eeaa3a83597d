// Lists with one integer per layer, as Megatron's flags take them: Python expressions of integers,
// lists, + and *, such as "([0]+[1]*2)*2". Nothing else is evaluated.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace megatron {

// The list, or nothing if the text is no such expression, or is a plain number.
std::optional<std::vector<int64_t>> parse_layer_list(std::string_view text);

// A plain positive integer of at most nine digits.
std::optional<int64_t> parse_layer_period(std::string_view text);

}  // namespace megatron
