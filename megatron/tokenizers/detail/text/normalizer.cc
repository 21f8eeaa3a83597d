#include "megatron/tokenizers/detail/text/normalizer.h"

#include <array>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/tokenizers/detail/text/byte_level.h"
#include "megatron/tokenizers/detail/text/unicode.h"
#include "megatron/tokenizers/detail/text/utf8.h"

namespace megatron {
namespace {

// Calls on_character(code point, its bytes) for each character.
template <class OnCharacter>
void for_each_character(std::string_view text, OnCharacter&& on_character) {
  size_t length;
  for (size_t at = 0; at < text.size(); at += length) {
    const uint32_t c = decode_utf8(text.data() + at, length);
    on_character(c, text.substr(at, length));
  }
}

void append_lower(uint32_t c, std::string& out) {
  append_utf8(lower_case(c), out);
  if (c == 0x130) append_utf8(0x307, out);
}

void append_lowercase(std::string_view text, std::string& out) {
  for_each_character(text, [&](uint32_t c, std::string_view) { append_lower(c, out); });
}

void append_without(std::string_view text, uint16_t traits, std::string& out) {
  for_each_character(text, [&](uint32_t c, std::string_view bytes) {
    if ((unicode_traits()[c] & traits) == 0) out += bytes;
  });
}

std::string_view strip(std::string_view text, bool left, bool right) {
  size_t length;
  while (left && !text.empty() && is_space(decode_utf8(text.data(), length)))
    text.remove_prefix(length);
  while (right && !text.empty()) {
    const char* last = previous_utf8(text.data() + text.size());
    if (!is_space(decode_utf8(last, length))) break;
    text.remove_suffix(length);
  }
  return text;
}

// Source: `tokenizers` normalizers/unicode.rs.
void append_nmt(std::string_view text, std::string& out) {
  for_each_character(text, [&](uint32_t c, std::string_view bytes) {
    if ((c >= 0x01 && c <= 0x08) || c == 0x0b || (c >= 0x0e && c <= 0x1f) || c == 0x7f ||
        c == 0x8f || c == 0x9f) {
      return;
    }
    const bool space = c == 0x09 || c == 0x0a || c == 0x0c || c == 0x0d || c == 0x1680 ||
                       (c >= 0x200b && c <= 0x200f) || c == 0x2028 || c == 0x2029 || c == 0x2581 ||
                       c == 0xfeff || c == 0xfffd;
    out += space ? std::string_view(" ") : bytes;
  });
}

// Source: `tokenizers` normalizers/bert.rs.
bool is_chinese(uint32_t c) {
  return (c >= 0x4e00 && c <= 0x9fff) || (c >= 0x3400 && c <= 0x4dbf) ||
         (c >= 0x20000 && c <= 0x2a6df) || (c >= 0x2a700 && c <= 0x2b73f) ||
         (c >= 0x2b740 && c <= 0x2b81f) || (c >= 0x2b920 && c <= 0x2ceaf) ||
         (c >= 0xf900 && c <= 0xfaff) || (c >= 0x2f800 && c <= 0x2fa1f);
}

// The result of clean_text and lowercase for ASCII characters; 0: removed.
std::array<char, 128> bert_ascii(const NormalizerStep& step) {
  std::array<char, 128> out{};
  for (uint32_t c = 0; c < 128; ++c) {
    out[c] = static_cast<char>(step.lower ? lower_case(c) : c);
    if (!step.clean_text) continue;
    if (c == 0 || (unicode_traits()[c] & kControl) != 0) {
      out[c] = 0;
    } else if (is_space(c)) {
      out[c] = ' ';
    }
  }
  return out;
}

void append_bert_stretch(const NormalizerStep& step, std::string_view text, std::string& out) {
  std::string cleaned, buffer;
  for_each_character(text, [&](uint32_t c, std::string_view bytes) {
    if (step.clean_text) {
      if (c == 0xfffd || (unicode_traits()[c] & kControl) != 0) return;
      if (is_space(c)) {
        cleaned += ' ';
        return;
      }
    }
    const bool spaced = step.chinese && is_chinese(c);
    if (spaced) cleaned += ' ';
    cleaned += bytes;
    if (spaced) cleaned += ' ';
  });
  std::string_view result = cleaned;
  if (step.strip_accents) result = to_normal_form(NormalForm::kNfd, result, buffer);
  for_each_character(result, [&](uint32_t c, std::string_view bytes) {
    if (step.strip_accents && (unicode_traits()[c] & kNonspacing) != 0) return;
    if (step.lower) {
      append_lower(c, out);
    } else {
      out += bytes;
    }
  });
}

// Stretches without ASCII are normalised separately: no ASCII character is a mark, and none is
// reordered.
void append_bert(const NormalizerStep& step, std::string_view text, std::string& out) {
  const std::array<char, 128> ascii = bert_ascii(step);
  const bool keeps_zero = !step.clean_text;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const auto byte = static_cast<unsigned char>(text[at]);
    if (byte < 128) {
      if (ascii[byte] != 0 || (byte == 0 && keeps_zero)) out += ascii[byte];
      ++at;
      continue;
    }
    size_t end = at;
    while (end < text.size() && static_cast<signed char>(text[end]) < 0) ++end;
    append_bert_stretch(step, text.substr(at, end - at), out);
    at = end;
  }
}

}  // namespace

void refuse_growth(std::string_view where, size_t most) {
  throw_error(cat(where, ": makes more than ", most,
                  " bytes of a text, which is the limit for its length",
                  "\nhint: the file is damaged, or made to exhaust memory"));
}

void append_replaced(std::string_view text, std::string_view pattern, std::string_view content,
                     const GrowthLimit& limit, std::string& out) {
  size_t done = 0;
  for (size_t at; (at = text.find(pattern, done)) != text.npos; done = at + pattern.size()) {
    limit.check(out.size() + (at - done) + content.size());
    out.append(text.substr(done, at - done));
    out += content;
  }
  out.append(text.substr(done));
}

void append_replaced(std::string_view text, const Regex& regex, std::string_view content,
                     const GrowthLimit& limit, std::string& out) {
  size_t done = 0;
  regex.for_each_match(text, [&](size_t begin, size_t end) {
    limit.check(out.size() + (begin - done) + content.size());
    out.append(text.substr(done, begin - done));
    out += content;
    done = end;
  });
  out.append(text.substr(done));
}

Normalizer::Normalizer(std::vector<NormalizerStep> steps) : steps_(std::move(steps)) {
  for (const NormalizerStep& step : steps_) {
    regexes_.push_back(step.kind == NormalizerStep::Kind::kReplaceRegex
                           ? std::make_unique<Regex>(step.pattern, step.where)
                           : nullptr);
    charsmaps_.push_back(step.kind == NormalizerStep::Kind::kCharsmap
                             ? std::make_unique<Charsmap>(step.content, step.where)
                             : nullptr);
  }
}

std::string_view Normalizer::apply(std::string_view text, Scratch& scratch) const {
  const size_t most = most_normalized_bytes(text.size());
  for (size_t i = 0; i < steps_.size(); ++i) {
    const NormalizerStep& step = steps_[i];
    const GrowthLimit limit{most, step.where};
    limit.check(text.size());
    // The buffer that does not contain `text`.
    std::string& out = text.data() == scratch.a.data() ? scratch.b : scratch.a;
    if (step.kind == NormalizerStep::Kind::kNormalForm) {
      text = to_normal_form(step.form, text, out);
      continue;
    }
    if (step.kind == NormalizerStep::Kind::kStrip) {
      const std::string_view stripped = strip(text, step.left, step.right);
      if (stripped.data() != text.data()) {  // `text` must start at the start of its buffer
        out.assign(stripped);
        text = out;
      } else {
        text = stripped;
      }
      continue;
    }
    out.clear();
    switch (step.kind) {
      case NormalizerStep::Kind::kLowercase:
        append_lowercase(text, out);
        break;
      case NormalizerStep::Kind::kStripAccents:
        append_without(text, kMark, out);
        break;
      case NormalizerStep::Kind::kReplaceString:
        append_replaced(text, step.pattern, step.content, limit, out);
        break;
      case NormalizerStep::Kind::kReplaceRegex:
        append_replaced(text, *regexes_[i], step.content, limit, out);
        break;
      case NormalizerStep::Kind::kPrepend:
        limit.check(text.size() + step.content.size());
        if (!text.empty()) out += step.content;
        out += text;
        break;
      case NormalizerStep::Kind::kCharsmap:
        charsmaps_[i]->append_by_clusters(text, out);
        break;
      case NormalizerStep::Kind::kBert:
        append_bert(step, text, out);
        break;
      case NormalizerStep::Kind::kNmt:
        append_nmt(text, out);
        break;
      case NormalizerStep::Kind::kByteLevel:
        append_byte_level(text, out);
        break;
      case NormalizerStep::Kind::kNormalForm:
      case NormalizerStep::Kind::kStrip:
        break;
    }
    text = out;
  }
  return text;
}

}  // namespace megatron
