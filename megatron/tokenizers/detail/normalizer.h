// Unicode normalisation form C, skipped for text that is surely in that form already.
#pragma once

#include <string>
#include <string_view>

namespace megatron {

// Returns well-formed `text` in form C: `text` itself when nothing changes, else a view of
// `buffer`.
std::string_view to_nfc(std::string_view text, std::string& buffer);

}  // namespace megatron
