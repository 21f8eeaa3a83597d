#include "megatron/tokenizers/detail/pre_tokenizer.h"

#include <utility>

#include "megatron/tokenizers/detail/text/byte_level.h"

namespace megatron {
namespace {

using Piece = PreTokenizer::Scratch::Piece;

constexpr std::string_view kGpt2 =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr std::string_view kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kTiktokenV1 =
    R"([^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+)";
constexpr std::string_view kTiktokenV2 =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)"
    R"(|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kO200k =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)"
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)"
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// Adds [begin, end) unless it is empty.
void add(std::vector<Piece>& pieces, size_t begin, size_t end, bool matched) {
  if (begin < end) pieces.push_back({begin, end, matched});
}

void split_by_regex(const Regex& regex, std::string_view text, const Piece& piece,
                    std::vector<Piece>& out) {
  const std::string_view inside = text.substr(piece.begin, piece.end - piece.begin);
  size_t done = 0;
  regex.for_each_match(inside, [&](size_t begin, size_t end) {
    add(out, piece.begin + done, piece.begin + begin, false);
    add(out, piece.begin + begin, piece.begin + end, true);
    done = end;
  });
  add(out, piece.begin + done, piece.end, false);
}

void split_by_scanner(KnownPattern known, std::string_view text, const Piece& piece,
                      std::vector<Piece>& out) {
  const char* base = text.data();
  const auto emit = [&](const char* begin, const char* end) {
    out.push_back({static_cast<size_t>(begin - base), static_cast<size_t>(end - base), true});
  };
  scan(known, base + piece.begin, base + piece.end, emit);
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

// Each character for which is_delimiter() holds is a piece.
template <class IsDelimiter>
void split_at(IsDelimiter&& is_delimiter, std::string_view text, const Piece& piece,
              std::vector<Piece>& out) {
  size_t done = piece.begin, length;
  for (size_t at = piece.begin; at < piece.end; at += length) {
    if (!is_delimiter(decode_utf8(text.data() + at, length))) continue;
    add(out, done, at, false);
    done = at + length;
    add(out, at, done, true);
  }
  add(out, done, piece.end, false);
}

// Runs of word characters, and runs of characters that are neither word nor space.
void split_words(std::string_view text, const Piece& piece, std::vector<Piece>& out) {
  const uint8_t* classes = unicode_classes();
  const auto kind_at = [&](size_t at, size_t& length) {
    const uint32_t c = decode_utf8(text.data() + at, length);
    return (classes[c] & 8) != 0 ? 1 : is_space(c) ? 2 : 0;
  };
  size_t length;
  for (size_t at = piece.begin; at < piece.end;) {
    const int kind = kind_at(at, length);
    size_t end = at + length;
    while (end < piece.end && kind_at(end, length) == kind) end += length;
    if (kind != 2) out.push_back({at, end, false});
    at = end;
  }
}

// Removes or joins the pieces from `first` on according to `behavior`. `matched` marks delimiters.
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

// Copies the pieces into `out`, with a space before each that does not start with one.
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

// Converts the pieces to GPT-2's printable spelling.
void spell_bytes(std::string_view text, std::vector<Piece>& pieces, std::string& out) {
  out.clear();
  for (Piece& piece : pieces) {
    const size_t begin = out.size();
    append_byte_level(text.substr(piece.begin, piece.end - piece.begin), out);
    piece = {begin, out.size(), false};
  }
}

// Writes the mark for spaces and, per `prepend`, before pieces; splits before each mark.
void mark_spaces(const PreTokenizerStep& step, bool first, std::string_view text,
                 std::vector<Piece>& pieces, std::vector<Piece>& next, std::string& out) {
  using Prepend = PreTokenizerStep::Prepend;
  const std::string_view mark = step.pattern;
  out.clear();
  next.clear();
  for (size_t i = 0; i < pieces.size(); ++i) {
    const std::string_view inside = text.substr(pieces[i].begin, pieces[i].end - pieces[i].begin);
    size_t begin = out.size();
    const bool marked = inside.starts_with(' ') || inside.starts_with(mark);
    if (!marked && (step.prepend == Prepend::kAlways ||
                    (step.prepend == Prepend::kFirst && first && i == 0 && pieces[i].begin == 0))) {
      out += mark;
    }
    for (size_t at = 0; at < inside.size();) {
      const bool space = inside[at] == ' ';
      if (space || inside.substr(at).starts_with(mark)) {
        if (step.split) {
          add(next, begin, out.size(), false);
          begin = out.size();
        }
        out += mark;
        at += space ? 1 : mark.size();
        continue;
      }
      size_t end = at + 1;
      while (end < inside.size() && inside[end] != ' ' && inside[end] != mark[0]) ++end;
      out.append(inside.substr(at, end - at));
      at = end;
    }
    add(next, begin, out.size(), false);
  }
  pieces.swap(next);
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
    case KnownPattern::kTiktokenV1:
      return kTiktokenV1;
    case KnownPattern::kTiktokenV2:
      return kTiktokenV2;
    case KnownPattern::kO200k:
      return kO200k;
    case KnownPattern::kNone:
      break;
  }
  return {};
}

KnownPattern find_known_pattern(std::string_view regex) {
  for (const KnownPattern pattern :
       {KnownPattern::kGpt2, KnownPattern::kLlama3, KnownPattern::kQwen2, KnownPattern::kTiktokenV1,
        KnownPattern::kTiktokenV2, KnownPattern::kO200k}) {
    if (regex == pattern_text(pattern)) return pattern;
  }
  return KnownPattern::kNone;
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

const char* PreTokenizer::split_by_steps(std::string_view text, bool first,
                                         Scratch& scratch) const {
  using Kind = PreTokenizerStep::Kind;
  std::vector<Piece>& pieces = scratch.pieces;
  pieces.assign(1, {0, text.size(), false});
  for (size_t i = 0; i < steps_.size(); ++i) {
    const PreTokenizerStep& step = steps_[i];
    if (step.kind == Kind::kPrefixSpace || step.kind == Kind::kByteLevel ||
        step.kind == Kind::kMetaspace) {
      if (step.kind == Kind::kPrefixSpace) prefix_spaces(text, pieces, scratch.next_text);
      if (step.kind == Kind::kByteLevel) spell_bytes(text, pieces, scratch.next_text);
      if (step.kind == Kind::kMetaspace)
        mark_spaces(step, first, text, pieces, scratch.next, scratch.next_text);
      scratch.text.swap(scratch.next_text);
      text = scratch.text;
      continue;
    }
    std::vector<Piece>& next = scratch.next;
    next.clear();
    for (const Piece& piece : pieces) {
      const size_t begin = next.size();
      switch (step.kind) {
        case Kind::kDigits:
          split_at([&](uint32_t c) { return (unicode_classes()[c] & 7) == kNumber; }, text, piece,
                   next);
          break;
        case Kind::kWhitespace:
          split_at(is_space, text, piece, next);
          break;
        case Kind::kPunctuation:
          split_at([&](uint32_t c) { return (unicode_traits()[c] & kPunctuation) != 0; }, text,
                   piece, next);
          break;
        case Kind::kWords:
          split_words(text, piece, next);
          break;
        case Kind::kSplitString:
          split_by_string(step.pattern, text, piece, next);
          break;
        default:
          if (known_[i] != KnownPattern::kNone) {
            split_by_scanner(known_[i], text, piece, next);
          } else {
            split_by_regex(*compiled_[i], text, piece, next);
          }
      }
      if (step.invert) {
        for (size_t j = begin; j < next.size(); ++j) next[j].matched = !next[j].matched;
      }
      apply_behavior(step.behavior, next, begin);
    }
    pieces.swap(next);
  }
  return text.data();
}

}  // namespace megatron
