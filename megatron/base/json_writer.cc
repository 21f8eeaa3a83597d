#include "megatron/base/json_writer.h"

#include <cmath>

#include "megatron/base/check.h"
#include "megatron/base/field_info.h"
#include "megatron/base/format.h"
#include "megatron/base/utf8.h"

namespace megatron {
namespace {

// C0 and C1 controls, line and paragraph separators, the byte order mark and non-characters.
bool needs_escape(uint32_t code) {
  return code < 0x20 || (code >= 0x7F && code < 0xA0) || code == 0x2028 || code == 0x2029 ||
         code == 0xFEFF || code == 0xFFFE || code == 0xFFFF;
}

void append_escape(std::string& out, uint32_t code) {
  switch (code) {
    case '\n':
      out += "\\n";
      return;
    case '\t':
      out += "\\t";
      return;
    case '\r':
      out += "\\r";
      return;
    case '\b':
      out += "\\b";
      return;
    case '\f':
      out += "\\f";
      return;
    default:
      out += format_text("\\u%04x", code);
  }
}

}  // namespace

std::string json_quote(std::string_view text) {
  std::string out = "\"";
  for (size_t i = 0; i < text.size();) {
    const Utf8Character c = decode_utf8(text, i);
    if (!c.valid) {
      out += "\xEF\xBF\xBD";
    } else if (c.code == '"' || c.code == '\\') {
      out += '\\';
      out += static_cast<char>(c.code);
    } else if (needs_escape(c.code)) {
      append_escape(out, c.code);
    } else {
      out += text.substr(i, static_cast<size_t>(c.bytes));
    }
    i += static_cast<size_t>(c.bytes);
  }
  return out += '"';
}

void JsonWriter::new_line() {
  if (indent_ <= 0) return;
  text_ += '\n';
  text_.append(scopes_.size() * static_cast<size_t>(indent_), ' ');
}

void JsonWriter::before_value() {
  if (after_key_) {
    after_key_ = false;
    return;
  }
  MEGATRON_ASSERT(scopes_.empty() ? text_.empty() : scopes_.back() == Scope::kArray,
                  "a JSON value without a key");
  if (scopes_.empty()) return;
  if (!first_) text_ += indent_ > 0 ? "," : ", ";
  first_ = false;
  new_line();
}

JsonWriter& JsonWriter::key(std::string_view name) {
  MEGATRON_ASSERT(!scopes_.empty() && scopes_.back() == Scope::kObject && !after_key_, "JSON key ",
                  name);
  if (!first_) text_ += indent_ > 0 ? "," : ", ";
  first_ = false;
  new_line();
  text_ += json_quote(name);
  text_ += ": ";
  after_key_ = true;
  return *this;
}

JsonWriter& JsonWriter::open(Scope scope, char bracket) {
  before_value();
  text_ += bracket;
  scopes_.push_back(scope);
  first_ = true;
  return *this;
}

JsonWriter& JsonWriter::close(Scope scope, char bracket) {
  MEGATRON_ASSERT(!scopes_.empty() && scopes_.back() == scope && !after_key_, "JSON ", bracket);
  scopes_.pop_back();
  if (!first_) new_line();
  text_ += bracket;
  first_ = false;
  return *this;
}

JsonWriter& JsonWriter::begin_object() { return open(Scope::kObject, '{'); }
JsonWriter& JsonWriter::end_object() { return close(Scope::kObject, '}'); }
JsonWriter& JsonWriter::begin_array() { return open(Scope::kArray, '['); }
JsonWriter& JsonWriter::end_array() { return close(Scope::kArray, ']'); }

JsonWriter& JsonWriter::raw(std::string_view json) {
  before_value();
  text_ += json;
  return *this;
}

JsonWriter& JsonWriter::null() { return raw("null"); }
JsonWriter& JsonWriter::value(bool v) { return raw(v ? "true" : "false"); }
JsonWriter& JsonWriter::value(double v) {
  return std::isfinite(v) ? raw(format_double(v)) : null();
}
JsonWriter& JsonWriter::value(std::string_view v) { return raw(json_quote(v)); }

const std::string& JsonWriter::text() const {
  MEGATRON_ASSERT(scopes_.empty() && !text_.empty(), "unfinished JSON: ", text_);
  return text_;
}

}  // namespace megatron
