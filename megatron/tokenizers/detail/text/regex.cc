#include "megatron/tokenizers/detail/text/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <string>

#include "megatron/base/check.h"

namespace megatron {
namespace {

// White space as defined by Oniguruma; PCRE2's \s adds U+180E.
constexpr std::string_view kSpaceSet =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
constexpr std::string_view kNotSpaceSet =
    R"(\x{0}-\x{8}\x{e}-\x{1f}\x{21}-\x{84}\x{86}-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027})"
    R"(\x{202a}-\x{202e}\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{d7ff}\x{e000}-\x{10ffff})";

// Rewrites constructs that Oniguruma (the engine of the `tokenizers` package) and PCRE2 interpret
// differently; refuses those without an equivalent.
std::string to_pcre2(std::string_view pattern, std::string_view where) {
  std::string out;
  int class_depth = 0;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\' && i + 1 < pattern.size()) {
      const char next = pattern[++i];
      MEGATRON_CHECK(
          next != 'h' && next != 'H' && next != 'R' && next != 'X' && next != 'K' && next != 'G',
          where, ": \\", next, " is not supported in regular expressions");
      if (next == 's' || next == 'S') {
        const std::string_view set = next == 's' ? kSpaceSet : kNotSpaceSet;
        out += class_depth > 0 ? std::string(set) : "[" + std::string(set) + "]";
      } else {
        out += c;
        out += next;
      }
      continue;
    }
    if (class_depth > 0) {
      MEGATRON_CHECK(!(c == '&' && pattern.substr(i, 2) == "&&"), where,
                     ": && in a character class is not supported in regular expressions");
      MEGATRON_CHECK(
          !(c == '[' && pattern.substr(i, 2) != "[:"), where,
          ": a character class inside a character class is not supported in regular expressions");
    }
    if (c == '[') ++class_depth;
    if (c == ']' && class_depth > 0) --class_depth;
    out += c;
  }
  return out;
}

}  // namespace

struct Regex::Impl {
  pcre2_code* code = nullptr;
  std::string where;
  ~Impl() { pcre2_code_free(code); }
};

Regex::Regex(std::string_view pattern, std::string_view where) : impl_(std::make_unique<Impl>()) {
  impl_->where = where;
  const std::string translated = to_pcre2(pattern, where);
  int error = 0;
  PCRE2_SIZE offset = 0;
  impl_->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                              PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &error, &offset, nullptr);
  if (impl_->code == nullptr) {
    PCRE2_UCHAR reason[256] = {};
    pcre2_get_error_message(error, reason, sizeof(reason));
    throw_error(cat(where, ": regular expression \"", pattern,
                    "\" cannot be compiled: ", reinterpret_cast<const char*>(reason)));
  }
  // Without JIT the interpreter is used; both give the same matches.
  pcre2_jit_compile(impl_->code, PCRE2_JIT_COMPLETE);
}

// Memory for a match; one per thread, usable with every expression.
struct MatchState {
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = pcre2_jit_stack_create(32 << 10, 16 << 20, nullptr);
  MatchState() {
    if (context != nullptr && stack != nullptr) pcre2_jit_stack_assign(context, nullptr, stack);
  }
  MatchState(const MatchState&) = delete;
  ~MatchState() {
    pcre2_jit_stack_free(stack);
    pcre2_match_context_free(context);
    pcre2_match_data_free(data);
  }
};

Regex::~Regex() = default;
Regex::Regex(Regex&&) noexcept = default;

bool Regex::find(std::string_view text, size_t from, size_t& begin, size_t& end) const {
  thread_local const MatchState state;
  MEGATRON_CHECK(state.data != nullptr && state.context != nullptr,
                 "out of memory for a regular expression");
  const int count = pcre2_match(impl_->code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                                from, PCRE2_NO_UTF_CHECK, state.data, state.context);
  if (count == PCRE2_ERROR_NOMATCH) return false;
  if (count < 0) {
    PCRE2_UCHAR reason[256] = {};
    pcre2_get_error_message(count, reason, sizeof(reason));
    throw_error(cat(impl_->where, ": the regular expression failed on ", text.size(),
                    " bytes of text: ", reinterpret_cast<const char*>(reason)));
  }
  const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(state.data);
  begin = offsets[0];
  end = offsets[1];
  return true;
}

}  // namespace megatron
