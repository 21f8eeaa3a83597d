#include "megatron/tokenizers/sentence_splitter.h"

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "megatron/tokenizers/detail/text/utf8.h"
#include "megatron/tokenizers/python_unicode.h"

namespace megatron {
namespace {

// Classes of bytes; the non-ASCII ones are those of the code point that they start.
enum ByteFlag : uint8_t {
  kSpaceByte = 1,
  kEnd = 2,       // may end a sentence: . ? !
  kNonWord = 4,   // cannot stand within a word
  kNotStart = 8,  // cannot start a word of several characters
  kDigitByte = 16,
  kLetterByte = 32,  // letters and _
  kCloser = 64,      // closing punctuation that belongs to the sentence before it
  kBeyondAscii = 128,
};

constexpr std::array<uint8_t, 256> kBytes = [] {
  std::array<uint8_t, 256> flags{};
  const auto set = [&](std::string_view characters, uint8_t flag) {
    for (const char c : characters) flags[static_cast<uint8_t>(c)] |= flag;
  };
  set(" \t\n\v\f\r\x1c\x1d\x1e\x1f", kSpaceByte);
  set(".?!", kEnd);
  set(")\";}]*:@'({[?!", kNonWord);
  set("(\"`{[:;&#*@)}]-,", kNotStart);
  set("0123456789", kDigitByte);
  set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_", kLetterByte);
  set("\"')]}", kCloser);
  for (size_t c = 128; c < 256; ++c) flags[c] = kBeyondAscii;
  return flags;
}();

uint8_t flags_of(char c) { return kBytes[static_cast<uint8_t>(c)]; }

// What Python's string.whitespace has, in which the word before a match is looked for.
bool is_ascii_space(char c) { return c == ' ' || (c >= 9 && c <= 13); }

// Positions in a text, or in a line of it.
class Scanner {
 public:
  explicit Scanner(std::string_view text) : text_(text) {}

  size_t size() const { return text_.size(); }
  char at(size_t i) const { return text_[i]; }
  uint8_t flags(size_t i) const { return flags_of(text_[i]); }
  // PythonClass of the character at i, and its bytes.
  uint8_t python(size_t i, size_t& length) const {
    return python_classes()[decode_utf8(text_.data() + i, length)];
  }
  // Whether there is white space at i, and its bytes.
  bool is_space(size_t i, size_t& length) const {
    const uint8_t f = flags(i);
    length = 1;
    if ((f & kBeyondAscii) == 0) return (f & kSpaceByte) != 0;
    return (python(i, length) & kPythonSpace) != 0;
  }
  bool is_space(size_t i) const {
    size_t length = 0;
    return is_space(i, length);
  }
  size_t skip_space(size_t i) const {
    size_t length = 0;
    while (i < size() && is_space(i, length)) i += length;
    return i;
  }
  // The start of the characters before i that are no white space, at least `from`.
  size_t token_start(size_t i, size_t from) const {
    while (i > from) {
      const auto before = static_cast<size_t>(previous_utf8(text_.data() + i) - text_.data());
      if (is_space(before)) break;
      i = before;
    }
    return i;
  }
  // The end of the characters from i on that are no white space.
  size_t skip_token(size_t i) const {
    size_t length = 0;
    while (i < size()) {
      const uint8_t f = flags(i);
      if ((f & (kSpaceByte | kBeyondAscii)) == 0) {
        ++i;
        continue;
      }
      if (is_space(i, length)) break;
      i += length;
    }
    return i;
  }

 private:
  std::string_view text_;
};

// The . ? and ! of a text, one after the other.
class Ends {
 public:
  explicit Ends(std::string_view text) : text_(text) { load(); }
  // False: there are no more.
  bool next(size_t& at) {
    while (mask_ == 0) {
      block_ += kBlock;
      if (block_ >= text_.size()) return false;
      load();
    }
    at = block_ + static_cast<size_t>(__builtin_ctz(mask_));
    mask_ &= mask_ - 1;
    return true;
  }

 private:
  static constexpr size_t kBlock = 32;
  // Bit k: one is at block_ + k.
  void load() {
    alignas(kBlock) char tail[kBlock] = {};
    const char* from = text_.data() + block_;
    if (block_ + kBlock > text_.size()) {
      if (block_ < text_.size()) std::memcpy(tail, from, text_.size() - block_);
      from = tail;
    }
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const auto equal = [&](char c) { return _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(c)); };
    const __m256i any = _mm256_or_si256(_mm256_or_si256(equal('.'), equal('?')), equal('!'));
    mask_ = static_cast<uint32_t>(_mm256_movemask_epi8(any));
  }

  std::string_view text_;
  size_t block_ = 0;
  uint32_t mask_ = 0;
};

// A place where a sentence may end.
struct Match {
  static constexpr size_t kNone = static_cast<size_t>(-1);
  size_t begin = 0, end = 0;
  size_t mark = 0;       // the . ? or !
  size_t after_end = 0;  // end of what follows and decides: a character, or a token
  size_t next = kNone;   // start of the token that follows; kNone: a character that ends words
};

// Source: PunktLanguageVars.period_context_re.
class PlainMatches {
 public:
  explicit PlainMatches(std::string_view text) : text_(text), ends_(text) {}
  bool next(Match& match) {
    for (size_t at = 0; ends_.next(at);) {
      const size_t after = at + 1;
      if (after >= text_.size()) return false;
      match.begin = match.mark = at;
      match.end = after;
      if ((text_.flags(after) & kNonWord) != 0) {
        match.after_end = after + 1;
        match.next = Match::kNone;
        return true;
      }
      const size_t token = text_.skip_space(after);
      if (token == after) continue;
      if (token == text_.size()) return false;
      match.after_end = text_.skip_token(token);
      match.next = token;
      return true;
    }
    return false;
  }

 private:
  const Scanner text_;
  Ends ends_;
};

// The same for Megatron-LM's expression with --keep-newlines, \S*[.?!]\s* before what follows: in
// each run of characters without white space the last place that something follows.
class KeepingMatches {
 public:
  explicit KeepingMatches(std::string_view text) : text_(text), ends_(text) {}
  bool next(Match& match) {
    for (size_t mark = 0; ends_.next(mark);) {
      if (mark < at_) continue;  // of a run that is done
      const size_t begin = text_.token_start(mark, at_), end = text_.skip_token(mark);
      for (size_t i = end; i-- > mark;) {
        if ((text_.flags(i) & kEnd) == 0) continue;
        const size_t follows = i + 1 == end ? text_.skip_space(end) : i + 1;
        if (follows == text_.size()) continue;
        const bool non_word = (text_.flags(follows) & kNonWord) != 0;
        match = {.begin = begin,
                 .end = follows,
                 .mark = i,
                 .after_end = non_word ? follows + 1 : text_.skip_token(follows),
                 .next = non_word ? Match::kNone : follows};
        at_ = follows;
        return true;
      }
      at_ = end;
    }
    return false;
  }

 private:
  const Scanner text_;
  Ends ends_;
  size_t at_ = 0;
};

// A token of the words around a match, with what Punkt finds out about it.
struct Token {
  std::string_view text;
  bool period_final = false, sentence_break = false, abbreviation = false, ellipsis = false;
  bool is_initial = false;  // one letter and a period
  bool is_number = false;
  bool facts_known = false;
  uint16_t facts = 0;  // of the type without its final period
};

// Decides whether a match ends a sentence, from its context. Keeps buffers between calls.
class Classifier {
 public:
  explicit Classifier(const PunktParameters& parameters) : parameters_(parameters) {}

  // `word`: where the context of the match starts.
  bool ends_sentence(std::string_view text, size_t word, const Match& match) {
    switch (from_mark(text, word, match)) {
      case Verdict::kEnds:
        return true;
      case Verdict::kUnknown:
        break;
    }
    return contains_break(text.substr(word, match.after_end - word));
  }

 private:
  enum class Verdict { kEnds, kUnknown };

  // The common cases, in which the tokens of the context need not be found: ? and !, which are
  // tokens of their own before white space and characters that end words, and a period after a
  // word of two letters or more, none of them unusual.
  Verdict from_mark(std::string_view text, size_t word, const Match& match) {
    const size_t after = match.mark + 1;
    if ((flags_of(text[after]) & (kNonWord | kSpaceByte)) == 0) return Verdict::kUnknown;
    if (text[match.mark] != '.') return Verdict::kEnds;
    const size_t follows = match.next == Match::kNone ? after : match.next;
    if (match.mark < word + 2 || text[follows] == '.') return Verdict::kUnknown;
    const size_t size = match.mark - word;
    key_.resize(size);
    uint64_t hash = PunktParameters::kHashStart;
    for (size_t i = 0; i < size; ++i) {
      const char c = text[word + i];
      if ((flags_of(c) & kLetterByte) == 0) return Verdict::kUnknown;
      key_[i] = static_cast<char>(c | (c == '_' ? 0 : 32));
      hash = PunktParameters::hash_step(hash, key_[i]);
    }
    const uint16_t facts = parameters_.facts(key_, hash);
    constexpr uint16_t kUnusual = PunktParameters::kAbbreviation | PunktParameters::kPairs;
    return (facts & kUnusual) == 0 ? Verdict::kEnds : Verdict::kUnknown;
  }

  // Source: PunktSentenceTokenizer.text_contains_sentbreak.
  bool contains_break(std::string_view context) {
    Token before;
    bool any = false;
    while (!context.empty()) {
      const size_t newline = std::min(context.find('\n'), context.size());
      const Scanner line(context.substr(0, newline));
      for (size_t at = line.skip_space(0); at < line.size(); at = line.skip_space(at)) {
        const size_t end = token_end(line, at);
        Token token;
        token.text = context.substr(at, end - at);
        annotate(token);
        if (any) decide(before, token);
        if (any && before.sentence_break) return true;
        before = token;
        any = true;
        at = end;
      }
      context.remove_prefix(std::min(newline + 1, context.size()));
    }
    return false;
  }

  // The end of a token of several marks at i: --, .. or dots with single spaces between them; 0:
  // there is none.
  static size_t marks_end(const Scanner& line, size_t i) {
    const char mark = line.at(i);
    if (mark != '.' && mark != '-') return 0;
    size_t end = i + 1;
    while (end < line.size() && line.at(end) == mark) ++end;
    if (end - i >= 2) return end;
    return mark == '.' ? spaced_dots_end(line, i) : 0;
  }

  static size_t spaced_dots_end(const Scanner& line, size_t i) {
    size_t pairs = 0, at = i, last_dot = i, length = 0;
    while (at < line.size() && line.at(at) == '.') {
      last_dot = at;
      if (at + 1 >= line.size() || !line.is_space(at + 1, length)) break;
      at += 1 + length;
      ++pairs;
    }
    // The last dot stands alone, or is the first half of the last pair.
    const bool alone = at == last_dot;
    return pairs >= (alone ? 2U : 3U) ? last_dot + 1 : 0;
  }

  static bool ends_word(const Scanner& line, size_t i) {
    if (i >= line.size()) return true;
    const uint8_t f = line.flags(i);
    if ((f & (kNonWord | kSpaceByte)) != 0) return true;
    if ((f & kBeyondAscii) != 0) return line.is_space(i);
    return marks_end(line, i) != 0;
  }

  // Source: PunktLanguageVars._word_tokenize_fmt.
  static size_t token_end(const Scanner& line, size_t i) {
    if (const size_t end = marks_end(line, i)) return end;
    size_t length = 1;
    if ((line.flags(i) & kBeyondAscii) != 0) line.python(i, length);
    size_t end = i + length;
    if ((line.flags(i) & kNotStart) != 0) return end;
    while (!ends_word(line, end) && !(line.at(end) == ',' && ends_word(line, end + 1))) {
      length = 1;
      if ((line.flags(end) & kBeyondAscii) != 0) line.python(end, length);
      end += length;
    }
    return end;
  }

  // The lower case of `text`, and its hash. Valid until the next call with the same buffer.
  static std::string_view lower(std::string_view text, std::string& buffer, uint64_t& hash) {
    buffer.resize(text.size());
    hash = PunktParameters::kHashStart;
    for (size_t i = 0; i < text.size(); ++i) {
      const char c = text[i];
      if ((flags_of(c) & kBeyondAscii) != 0) {
        buffer.clear();
        append_python_lower(text, buffer);
        hash = PunktParameters::hash(buffer);
        return buffer;
      }
      buffer[i] = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
      hash = PunktParameters::hash_step(hash, buffer[i]);
    }
    return buffer;
  }

  static uint8_t first_class(std::string_view text) {
    size_t length = 0;
    return python_classes()[decode_utf8(text.data(), length)];
  }

  static bool is_digit(std::string_view text, size_t i, size_t& length) {
    length = 1;
    const uint8_t f = flags_of(text[i]);
    if ((f & kBeyondAscii) == 0) return (f & kDigitByte) != 0;
    return (python_classes()[decode_utf8(text.data() + i, length)] & kPythonDigit) != 0;
  }

  // Source: PunktToken._RE_NUMERIC, -?[.,]?\d[\d,.-]*\.?
  static bool is_number(std::string_view text) {
    size_t i = 0, length = 0;
    if (text[i] == '-') ++i;
    if (i < text.size() && (text[i] == '.' || text[i] == ',')) ++i;
    if (i >= text.size() || !is_digit(text, i, length)) return false;
    for (i += length; i < text.size(); i += length) {
      const char c = text[i];
      length = 1;
      if (c != ',' && c != '.' && c != '-' && !is_digit(text, i, length)) return false;
    }
    return true;
  }

  static constexpr std::string_view kNumber = "##number##";

  // The type of a token, without a final period if `without_period`.
  std::string_view type_of(const Token& token, bool without_period, std::string& buffer,
                           uint64_t& hash) const {
    if (is_number(token.text)) {
      buffer = kNumber;
      hash = PunktParameters::hash(buffer);
      return buffer;
    }
    std::string_view text = token.text;
    if (without_period && text.size() > 1 && text.back() == '.') text.remove_suffix(1);
    return lower(text, buffer, hash);
  }

  // Source: PunktBaseClass._first_pass_annotation.
  void annotate(Token& token) {
    const std::string_view text = token.text;
    const char last = text.back();
    if (text.size() == 1 && (flags_of(last) & kEnd) != 0) {
      token.sentence_break = true;
      token.period_final = last == '.';
      return;
    }
    if (last != '.') return;
    token.period_final = true;
    if (text[text.size() - 2] == '.') {
      token.ellipsis = text.find_first_not_of('.') == std::string_view::npos;
      return;
    }
    const std::string_view stem = text.substr(0, text.size() - 1);
    uint64_t hash = 0;
    const std::string_view key = lower(stem, key_, hash);
    token.facts = parameters_.facts(key, hash);
    token.abbreviation = (token.facts & PunktParameters::kAbbreviation) != 0;
    if (!token.abbreviation) {
      if (const size_t dash = key.rfind('-'); dash != std::string_view::npos)
        token.abbreviation =
            (parameters_.facts(key.substr(dash + 1)) & PunktParameters::kAbbreviation) != 0;
    }
    token.sentence_break = !token.abbreviation;
    size_t length = 0;
    const uint8_t first = python_classes()[decode_utf8(stem.data(), length)];
    token.is_initial =
        length == stem.size() && (first & kPythonWord) != 0 && (first & kPythonDigit) == 0;
    token.is_number = is_number(text);
    token.facts_known = !token.is_number;
  }

  enum class Heuristic { kYes, kNo, kUnknown };

  // Whether the token is the first of a sentence, from the cases in which its type occurs.
  // Source: PunktSentenceTokenizer._ortho_heuristic.
  static Heuristic starts_sentence(const Token& token, uint16_t facts) {
    using P = PunktParameters;
    if (token.text.size() == 1 && std::strchr(";:,.!?", token.text[0]) != nullptr)
      return Heuristic::kNo;
    const uint8_t first = first_class(token.text);
    if ((first & kPythonUpper) != 0 && (facts & P::kLower) != 0 && (facts & P::kMiddleUpper) == 0)
      return Heuristic::kYes;
    if ((first & kPythonLower) != 0 && ((facts & P::kUpper) != 0 || (facts & P::kBeginLower) == 0))
      return Heuristic::kNo;
    return Heuristic::kUnknown;
  }

  // Source: PunktSentenceTokenizer._second_pass_annotation.
  void decide(Token& token, const Token& after) {
    if (!token.period_final) return;
    uint64_t hash = 0;
    if (!token.facts_known) {
      const std::string_view type = type_of(token, true, type_, hash);
      token.facts = parameters_.facts(type, hash);
    }
    const bool pairs = (token.facts & PunktParameters::kPairs) != 0;
    if (!pairs && !token.abbreviation && !token.ellipsis && !token.is_initial && !token.is_number)
      return;
    const std::string_view next = type_of(after, after.sentence_break, next_, hash);
    const uint16_t next_facts = parameters_.facts(next, hash);
    if (pairs && parameters_.is_collocation(type_of(token, true, type_, hash), next)) {
      token.sentence_break = false;
      return;
    }
    const Heuristic starts = starts_sentence(after, next_facts);
    const bool upper = (first_class(after.text) & kPythonUpper) != 0;
    if ((token.abbreviation || token.ellipsis) && !token.is_initial &&
        (starts == Heuristic::kYes || (upper && (next_facts & PunktParameters::kStarter) != 0))) {
      token.sentence_break = true;
      return;
    }
    if (!token.is_initial && !token.is_number) return;
    if (starts == Heuristic::kNo || (starts == Heuristic::kUnknown && token.is_initial && upper &&
                                     (next_facts & PunktParameters::kLower) == 0))
      token.sentence_break = false;
  }

  const PunktParameters& parameters_;
  std::string key_, type_, next_;
};

// Collects sentences; closing punctuation at the start of one belongs to the one before it.
// Source: PunktSentenceTokenizer._realign_boundaries.
class Sentences {
 public:
  Sentences(std::string_view text, std::vector<std::string_view>& out) : text_(text), out_(out) {}

  void add(size_t begin, size_t end) {
    size_t closers = 0, behind = 0;
    if (any_ && begin < end) find_closers(text_.substr(begin, end - begin), closers, behind);
    if (any_) emit(begin_ + moved_, closers > 0 ? begin + closers : end_);
    moved_ = behind;
    begin_ = begin;
    end_ = end;
    any_ = true;
  }
  void finish() { emit(begin_ + moved_, end_); }

 private:
  void emit(size_t begin, size_t end) {
    if (begin < end) out_.push_back(text_.substr(begin, end - begin));
  }
  // Characters of closing punctuation before white space, -- or an end of a line; `behind`: with
  // the white space after them.
  static void find_closers(std::string_view sentence, size_t& closers, size_t& behind) {
    const Scanner text(sentence);
    for (size_t i = 0; i < text.size() && (text.flags(i) & kCloser) != 0;) {
      ++i;
      const size_t space = text.skip_space(i);
      if (space == i && i < text.size() && sentence.substr(i, 2) != "--") continue;
      closers = i;
      behind = space;
      return;
    }
  }

  std::string_view text_;
  std::vector<std::string_view>& out_;
  size_t begin_ = 0, end_ = 0;  // the last one
  size_t moved_ = 0;            // bytes of its beginning that belong to the one before it
  bool any_ = false;
};

// The word before a match reaches back to the last white space; where two contexts would overlap,
// only the later one is looked at. Source: PunktSentenceTokenizer._match_potential_end_contexts and
// _slices_from_text.
template <class Matches>
void find_sentences(std::string_view text, Classifier& classifier, Sentences& sentences) {
  const Scanner scanner(text);
  Matches matches(text);
  Match match, before;
  bool any = false;
  size_t word = 0, word_end = 0;  // of the match before
  size_t sentence = 0;
  const auto judge = [&](const Match& m) {
    if (!classifier.ends_sentence(text, word, m)) return;
    sentences.add(sentence, m.end);
    sentence = m.next == Match::kNone ? m.end : m.next;
  };
  while (matches.next(match)) {
    size_t space = match.begin;
    while (space > word_end && !is_ascii_space(text[space - 1])) --space;
    // The first character after the word of the match before does not count.
    const size_t start = space > word_end + 1 ? space : word;
    if (any && word_end <= start) judge(before);
    before = match;
    any = true;
    word = start;
    word_end = match.begin;
  }
  if (any) judge(before);
  size_t end = text.size();
  while (end > 0) {
    const size_t last = static_cast<size_t>(previous_utf8(text.data() + end) - text.data());
    if (!scanner.is_space(last)) break;
    end = last;
  }
  sentences.add(sentence, end);
  sentences.finish();
}

}  // namespace

size_t SentenceSplitter::first_piece(std::string_view text) {
  if (text.size() <= kPieceCharacters) return text.size();
  size_t characters = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if ((static_cast<uint8_t>(text[i]) & 0xc0) == 0x80) continue;
    if (characters == kPieceCharacters) return i;
    ++characters;
  }
  return text.size();
}

void SentenceSplitter::split_piece(std::string_view text,
                                   std::vector<std::string_view>& out) const {
  Classifier classifier(parameters_);
  Sentences sentences(text, out);
  if (keep_newlines_)
    find_sentences<KeepingMatches>(text, classifier, sentences);
  else
    find_sentences<PlainMatches>(text, classifier, sentences);
}

void SentenceSplitter::split(std::string_view text, std::vector<std::string_view>& out) const {
  while (!text.empty()) {
    const size_t piece = first_piece(text);
    split_piece(text.substr(0, piece), out);
    text.remove_prefix(piece);
  }
}

}  // namespace megatron
