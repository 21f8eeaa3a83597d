// Unicode normalisation forms with the tables of the `tokenizers` package; skipped for text that is
// certainly normalised already.
#pragma once

#include <string>
#include <string_view>

namespace megatron {

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };

// Returns well-formed `text` in the form: `text` itself if nothing changes, else a view of
// `buffer`.
std::string_view to_normal_form(NormalForm form, std::string_view text, std::string& buffer);

}  // namespace megatron
