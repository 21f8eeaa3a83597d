#include "megatron/serving/detail/json_fault.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/utf8.h"

namespace megatron {
namespace {

constexpr size_t kMaxPathBytes = 64;

class FaultFinder {
 public:
  FaultFinder(std::string_view text, size_t max_depth) : text_(text), max_depth_(max_depth) {}

  std::optional<JsonFault> find() {
    while (!fault_ && !done_) step();
    if (!fault_ && at_ < text_.size()) fail("more text after the end of the document");
    return fault_;
  }

 private:
  enum class Expects { kValue, kFirstOrEnd, kCommaOrEnd };
  struct Frame {
    bool object = false;
    size_t index = 0;
    std::string key;
  };

  bool fail(std::string what) {
    if (!fault_) fault_ = JsonFault{at_, path(), std::move(what)};
    return false;
  }
  std::string path() const {
    std::string out;
    for (const Frame& frame : frames_) {
      if (out.size() > kMaxPathBytes) break;
      if (frame.object)
        out += (out.empty() || frame.key.empty() ? "" : ".") + frame.key;
      else
        out += cat("[", frame.index, "]");
    }
    return out.substr(0, std::min(out.size(), kMaxPathBytes));
  }
  void skip_blanks() {
    while (at_ < text_.size() &&
           (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n' || text_[at_] == '\r'))
      ++at_;
  }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  void step() {
    skip_blanks();
    if (at_ >= text_.size()) {
      fail("the end of the text within the document");
      return;
    }
    if (expects_ == Expects::kCommaOrEnd)
      comma_or_end();
    else if (expects_ == Expects::kFirstOrEnd && peek() == (frames_.back().object ? '}' : ']'))
      close();
    else if (key())
      value();
    skip_blanks();
    if (frames_.empty()) done_ = true;
  }

  void comma_or_end() {
    Frame& frame = frames_.back();
    if (peek() == ',') {
      ++at_;
      ++frame.index;
      expects_ = Expects::kValue;
    } else if (peek() == (frame.object ? '}' : ']')) {
      close();
    } else {
      fail(frame.object ? "no comma or brace after a member" : "no comma or bracket after an item");
    }
  }
  void close() {
    ++at_;
    frames_.pop_back();
    expects_ = Expects::kCommaOrEnd;
  }
  // The name of a member and its colon, where there is one.
  bool key() {
    if (frames_.empty() || !frames_.back().object) return true;
    frames_.back().key.clear();
    if (peek() != '"') return fail("no name of a member");
    std::string name;
    if (!string(&name)) return false;
    frames_.back().key = name;
    skip_blanks();
    if (peek() != ':') return fail("no colon after the name of a member");
    ++at_;
    skip_blanks();
    return true;
  }
  void value() {
    const char c = peek();
    if (c == '{' || c == '[') {
      if (frames_.size() >= max_depth_) {
        fail(cat("values nested deeper than ", max_depth_));
        return;
      }
      ++at_;
      frames_.push_back({c == '{', 0, {}});
      expects_ = Expects::kFirstOrEnd;
      return;
    }
    if (c == '"' ? string(nullptr) : c == '-' || (c >= '0' && c <= '9') ? number() : word())
      expects_ = Expects::kCommaOrEnd;
  }
  bool word() {
    for (const std::string_view word : {"true", "false", "null"}) {
      if (!text_.substr(at_).starts_with(word)) continue;
      at_ += word.size();
      return true;
    }
    for (const std::string_view word : {"NaN", "nan", "Infinity", "inf"})
      if (text_.substr(at_).starts_with(word))
        return fail(cat(word, ", which is no number of JSON"));
    return fail("no value");
  }
  bool digits() {
    const size_t begin = at_;
    while (peek() >= '0' && peek() <= '9') ++at_;
    return at_ > begin;
  }
  bool number() {
    const size_t begin = at_;
    bool integer = true;
    if (peek() == '-') ++at_;
    if (text_.substr(at_).starts_with("-") || text_.substr(at_).starts_with("Inf"))
      return fail("no number");
    const bool zero = peek() == '0';
    const size_t first = at_;
    if (!digits() || (zero && at_ > first + 1)) return fail("no number");
    if (peek() == '.') {
      integer = false;
      ++at_;
      if (!digits()) return fail("no digits after the point of a number");
    }
    if (peek() == 'e' || peek() == 'E') {
      integer = false;
      ++at_;
      if (peek() == '+' || peek() == '-') ++at_;
      if (!digits()) return fail("no digits in the exponent of a number");
    }
    const std::string_view number = text_.substr(begin, at_ - begin);
    const char* const end = number.data() + number.size();
    bool good;
    if (integer) {
      int64_t value = 0;
      uint64_t large = 0;
      good = std::from_chars(number.data(), end, value).ec == std::errc() ||
             std::from_chars(number.data(), end, large).ec == std::errc();
    } else {
      double value = 0.0;
      const auto read = std::from_chars(number.data(), end, value);
      // Too small for a double is zero; too large is not.
      good = read.ec == std::errc() ? std::isfinite(value) : is_tiny(number);
    }
    if (good) return true;
    at_ = begin;
    return fail(cat(number.substr(0, 40), number.size() > 40 ? "..." : "",
                    integer ? ", an integer beyond 64 bits" : ", a number beyond doubles"));
  }
  // Of a number that no double holds: below all of them, not above.
  static bool is_tiny(std::string_view number) {
    const size_t e = number.find_first_of("eE");
    const std::string_view digits = number.substr(0, e);
    const size_t point = std::min(digits.find('.'), digits.size());
    const auto power = static_cast<int64_t>(point) -
                       static_cast<int64_t>(digits.find_first_of("123456789"));  // of ten
    if (e == std::string_view::npos) return power < 0;
    const std::string_view text = number.substr(e + (number[e + 1] == '+' ? 2 : 1));
    int64_t exponent = 0;
    if (std::from_chars(text.data(), text.data() + text.size(), exponent).ec != std::errc())
      return text.starts_with('-');
    return exponent < -power;
  }
  bool string(std::string* out) {
    for (++at_; at_ < text_.size();) {
      const unsigned char c = static_cast<unsigned char>(text_[at_]);
      if (c == '"') {
        ++at_;
        return true;
      }
      if (c < 0x20) return fail("a control character within a text");
      if (c == '\\') {
        if (!escape()) return false;
        continue;
      }
      const Utf8Character character = decode_utf8(text_, at_);
      if (!character.valid) return fail("bytes that are not UTF-8");
      if (out != nullptr && out->size() < 64)
        out->append(text_.substr(at_, static_cast<size_t>(character.bytes)));
      at_ += static_cast<size_t>(character.bytes);
    }
    return fail("a text without its closing quote");
  }
  // Four hexadecimal digits; -1: not so.
  int32_t hex4(size_t at) const {
    uint32_t value = 0;
    if (at + 4 > text_.size()) return -1;
    const char* const end = text_.data() + at + 4;
    const auto read = std::from_chars(text_.data() + at, end, value, 16);
    return read.ec == std::errc() && read.ptr == end ? static_cast<int32_t>(value) : -1;
  }
  bool escape() {
    const char c = at_ + 1 < text_.size() ? text_[at_ + 1] : '\0';
    if (c != 'u') {
      if (std::string_view("\"\\/bfnrt").find(c) == std::string_view::npos || c == '\0')
        return fail("an unknown escape within a text");
      at_ += 2;
      return true;
    }
    const int32_t code = hex4(at_ + 2);
    if (code < 0) return fail("an escape \\u without four hexadecimal digits");
    if (code >= 0xDC00 && code < 0xE000) return fail("half a surrogate pair within a text");
    if (code >= 0xD800 && code < 0xDC00) {
      const int32_t low = text_.substr(at_ + 6).starts_with("\\u") ? hex4(at_ + 8) : -1;
      if (low < 0xDC00 || low >= 0xE000) return fail("half a surrogate pair within a text");
      at_ += 6;
    }
    at_ += 6;
    return true;
  }

  std::string_view text_;
  size_t max_depth_, at_ = 0;
  std::vector<Frame> frames_;
  Expects expects_ = Expects::kValue;
  bool done_ = false;
  std::optional<JsonFault> fault_;
};

}  // namespace

std::optional<JsonFault> find_json_fault(std::string_view text, size_t max_depth) {
  return FaultFinder(text, max_depth).find();
}

}  // namespace megatron
