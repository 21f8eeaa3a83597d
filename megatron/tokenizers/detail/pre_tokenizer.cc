#include "megatron/tokenizers/detail/pre_tokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <utility>

#include "megatron/base/check.h"

namespace megatron {
namespace {

using Piece = PreTokenizer::Scratch::Piece;

constexpr std::string_view kGpt2 =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr std::string_view kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// White space as Oniguruma has it; PCRE2's \s adds U+180E.
constexpr std::string_view kSpaceSet =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
constexpr std::string_view kNotSpaceSet =
    R"(\x{0}-\x{8}\x{e}-\x{1f}\x{21}-\x{84}\x{86}-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027})"
    R"(\x{202a}-\x{202e}\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{d7ff}\x{e000}-\x{10ffff})";

// Rewrites what Oniguruma (the engine of the `tokenizers` package) and PCRE2 read differently;
// refuses what has no twin.
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

// Adds [begin, end) unless it is empty.
void add(std::vector<Piece>& pieces, size_t begin, size_t end, bool matched) {
  if (begin < end) pieces.push_back({begin, end, matched});
}

void split_by_regex(const Regex& regex, std::string_view text, const Piece& piece,
                    std::vector<Piece>& out) {
  const std::string_view inside = text.substr(piece.begin, piece.end - piece.begin);
  size_t from = 0, begin, end, done = 0;
  while (from <= inside.size() && regex.find(inside, from, begin, end)) {
    add(out, piece.begin + done, piece.begin + begin, false);
    add(out, piece.begin + begin, piece.begin + end, true);
    done = end;
    from = end;
    if (begin == end) {  // an empty match: look on behind the next character
      if (end == inside.size()) break;
      size_t length;
      decode_utf8(inside.data() + end, length);
      from = end + length;
    }
  }
  add(out, piece.begin + done, piece.end, false);
}

void split_by_scanner(KnownPattern known, std::string_view text, const Piece& piece,
                      std::vector<Piece>& out) {
  const char* base = text.data();
  Scanner scanner(base + piece.begin, base + piece.end);
  const auto emit = [&](const char* begin, const char* end) {
    out.push_back({static_cast<size_t>(begin - base), static_cast<size_t>(end - base), true});
  };
  if (known == KnownPattern::kGpt2) scanner.gpt2(emit);
  if (known == KnownPattern::kLlama3) scanner.llama3<3>(emit);
  if (known == KnownPattern::kQwen2) scanner.llama3<1>(emit);
}

void split_by_string(std::string_view delimiter, std::string_view text, const Piece& piece,
                     std::vector<Piece>& out) {
  const std::string_view inside = text.substr(piece.begin, piece.end - piece.begin);
  size_t done = 0;
  for (size_t at = 0; (at = inside.find(delimiter, done)) != inside.npos;) {
    add(out, piece.begin + done, piece.begin + at, false);
    done = at + delimiter.size();
    add(out, piece.begin + at, piece.begin + done, true);
  }
  add(out, piece.begin + done, piece.end, false);
}

void split_digits(std::string_view text, const Piece& piece, std::vector<Piece>& out) {
  const uint8_t* classes = unicode_classes();
  size_t done = piece.begin, length;
  for (size_t at = piece.begin; at < piece.end; at += length) {
    if ((classes[decode_utf8(text.data() + at, length)] & 7) != kNumber) continue;
    add(out, done, at, false);
    done = at + length;
    add(out, at, done, true);
  }
  add(out, done, piece.end, false);
}

// Removes or joins the pieces from `first` on as `behavior` says. `matched` marks the delimiters.
void apply_behavior(SplitBehavior behavior, std::vector<Piece>& pieces, size_t first) {
  if (behavior == SplitBehavior::kIsolated) return;
  size_t kept = first;
  for (size_t i = first; i < pieces.size(); ++i) {
    const Piece piece = pieces[i];
    if (behavior == SplitBehavior::kRemoved && piece.matched) continue;
    bool join = false;
    if (kept > first) {
      const bool before = pieces[kept - 1].matched;
      join = (behavior == SplitBehavior::kContiguous && before == piece.matched) ||
             (behavior == SplitBehavior::kMergedWithPrevious && piece.matched && !before) ||
             (behavior == SplitBehavior::kMergedWithNext && before && !piece.matched);
    }
    if (join) {
      pieces[kept - 1].end = piece.end;
      pieces[kept - 1].matched = behavior == SplitBehavior::kContiguous
                                     ? piece.matched
                                     : behavior == SplitBehavior::kMergedWithPrevious;
    } else {
      pieces[kept++] = piece;
    }
  }
  pieces.resize(kept);
}

// Copies the pieces into `out`, a space in front of each that does not start with one.
void prefix_spaces(std::string_view text, std::vector<Piece>& pieces, std::string& out) {
  out.clear();
  for (Piece& piece : pieces) {
    const size_t begin = out.size();
    if (text[piece.begin] != ' ') out += ' ';
    out.append(text.substr(piece.begin, piece.end - piece.begin));
    piece.begin = begin;
    piece.end = out.size();
  }
}

}  // namespace

std::string_view pattern_text(KnownPattern pattern) {
  switch (pattern) {
    case KnownPattern::kGpt2:
      return kGpt2;
    case KnownPattern::kLlama3:
      return kLlama3;
    case KnownPattern::kQwen2:
      return kQwen2;
    case KnownPattern::kNone:
      break;
  }
  return {};
}

KnownPattern find_known_pattern(std::string_view regex) {
  for (const KnownPattern pattern :
       {KnownPattern::kGpt2, KnownPattern::kLlama3, KnownPattern::kQwen2}) {
    if (regex == pattern_text(pattern)) return pattern;
  }
  return KnownPattern::kNone;
}

struct Regex::Impl {
  pcre2_code* code = nullptr;
  ~Impl() { pcre2_code_free(code); }
};

Regex::Regex(std::string_view pattern, std::string_view where) : impl_(std::make_unique<Impl>()) {
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

// What a match needs besides the expression; one per thread, fit for every expression.
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
  MEGATRON_CHECK(count >= 0, "a regular expression of the tokenizer failed on ", text.size(),
                 " bytes of text (PCRE2 error ", count, ")");
  const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(state.data);
  begin = offsets[0];
  end = offsets[1];
  return true;
}

PreTokenizer::PreTokenizer(std::vector<PreTokenizerStep> steps, std::string_view where)
    : steps_(std::move(steps)) {
  for (const PreTokenizerStep& step : steps_) {
    const bool regex = step.kind == PreTokenizerStep::Kind::kSplitRegex;
    known_.push_back(regex ? find_known_pattern(step.pattern) : KnownPattern::kNone);
    compiled_.push_back(regex && known_.back() == KnownPattern::kNone
                            ? std::make_unique<Regex>(step.pattern, where)
                            : nullptr);
  }
  // The known patterns leave no gaps: isolating the matches and removing the gaps are the same.
  if (steps_.size() == 1 && steps_[0].kind == PreTokenizerStep::Kind::kSplitRegex &&
      ((steps_[0].behavior == SplitBehavior::kIsolated) ||
       (steps_[0].behavior == SplitBehavior::kRemoved && steps_[0].invert))) {
    scanner_ = known_[0];
  }
}

const char* PreTokenizer::split_by_steps(std::string_view text, Scratch& scratch) const {
  std::vector<Piece>& pieces = scratch.pieces;
  pieces.assign(1, {0, text.size(), false});
  for (size_t i = 0; i < steps_.size(); ++i) {
    const PreTokenizerStep& step = steps_[i];
    if (step.kind == PreTokenizerStep::Kind::kPrefixSpace) {
      prefix_spaces(text, pieces, scratch.next_text);
      scratch.text.swap(scratch.next_text);
      text = scratch.text;
      continue;
    }
    std::vector<Piece>& next = scratch.next;
    next.clear();
    for (const Piece& piece : pieces) {
      const size_t first = next.size();
      if (step.kind == PreTokenizerStep::Kind::kDigits) {
        split_digits(text, piece, next);
      } else if (step.kind == PreTokenizerStep::Kind::kSplitString) {
        split_by_string(step.pattern, text, piece, next);
      } else if (known_[i] != KnownPattern::kNone) {
        split_by_scanner(known_[i], text, piece, next);
      } else {
        split_by_regex(*compiled_[i], text, piece, next);
      }
      if (step.invert) {
        for (size_t j = first; j < next.size(); ++j) next[j].matched = !next[j].matched;
      }
      apply_behavior(step.behavior, next, first);
    }
    pieces.swap(next);
  }
  return text.data();
}

}  // namespace megatron
