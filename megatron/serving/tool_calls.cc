#include "megatron/serving/tool_calls.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"

namespace megatron {
namespace {

constexpr std::string_view kBlanks = " \t\r\n";
constexpr std::string_view kBegin = "<tool_call>";
constexpr std::string_view kEnd = "</tool_call>";

bool is_blank(char c) { return kBlanks.find(c) != std::string_view::npos; }

// Length of the longest end of `text` that begins `mark` and is not all of it.
size_t held_back(std::string_view text, std::string_view mark) {
  for (size_t length = std::min(text.size(), mark.size() - 1); length > 0; --length)
    if (text.ends_with(mark.substr(0, length))) return length;
  return 0;
}

// One call within the text, from its first character to its last.
class CallReader {
 public:
  enum class State { kOpen, kDone, kNoCall };
  virtual ~CallReader() = default;
  // Takes characters until the call ends; the number taken. Appends to `out`.
  virtual size_t push(std::string_view text, std::vector<ToolCallDelta>& out) = 0;
  State state() const { return state_; }
  bool begun() const { return begun_; }  // its name has been passed on

 protected:
  explicit CallReader(int index) : index_(index) {}
  void begin(const std::string& name, std::vector<ToolCallDelta>& out) {
    begun_ = true;
    out.push_back({index_, name, {}});
  }
  void argue(std::string arguments, std::vector<ToolCallDelta>& out) {
    if (!arguments.empty()) out.push_back({index_, {}, std::move(arguments)});
  }
  State state_ = State::kOpen;

 private:
  int index_;
  bool begun_ = false;
};

// {"name": "f", "arguments": {...}} in any order, with "parameters" as another name. Arguments
// are passed on as they come once the name is known.
class JsonCall final : public CallReader {
 public:
  explicit JsonCall(int index) : CallReader(index) {}

  size_t push(std::string_view text, std::vector<ToolCallDelta>& out) override {
    size_t at = 0;
    std::string passed;
    for (; at < text.size() && state_ == State::kOpen; ++at) take(text[at], out, passed);
    argue(std::move(passed), out);
    return at;
  }

 private:
  enum class Place { kStart, kKeyOrEnd, kKey, kColon, kValue, kCommaOrEnd };

  void take(char c, std::vector<ToolCallDelta>& out, std::string& passed) {
    switch (place_) {
      case Place::kKey:
        text_ += c;
        if (in_text(c)) return;
        key_ = decoded(text_);
        place_ = Place::kColon;
        if (!key_ || (*key_ != "name" && !is_arguments() && *key_ != "type" && *key_ != "id"))
          state_ = State::kNoCall;
        return;
      case Place::kValue:
        return take_value(c, out, passed);
      default:
        break;
    }
    if (is_blank(c)) return;
    if (place_ == Place::kStart && c == '{') {
      place_ = Place::kKeyOrEnd;
    } else if (place_ == Place::kKeyOrEnd && c == '"') {
      text_ = c;
      escaped_ = false;
      place_ = Place::kKey;
    } else if (place_ == Place::kColon && c == ':') {
      place_ = Place::kValue;
      text_.clear();
      depth_ = 0;
      quoted_ = false;
    } else if (place_ == Place::kCommaOrEnd && c == ',') {
      place_ = Place::kKeyOrEnd;
    } else if (c == '}' && (place_ == Place::kCommaOrEnd || place_ == Place::kKeyOrEnd)) {
      end(out);
    } else {
      state_ = State::kNoCall;
    }
  }

  // Within a text that has begun; false: it ends with `c`.
  bool in_text(char c) {
    if (escaped_) {
      escaped_ = false;
    } else if (c == '\\') {
      escaped_ = true;
    } else if (c == '"') {
      return false;
    }
    return true;
  }
  static std::optional<std::string> decoded(const std::string& quoted) {
    const auto json = nlohmann::json::parse(quoted, nullptr, false);
    return json.is_string() ? std::optional(json.get<std::string>()) : std::nullopt;
  }

  void take_value(char c, std::vector<ToolCallDelta>& out, std::string& passed) {
    if (text_.empty() && is_blank(c)) return;
    const bool was_empty = text_.empty();
    if (!quoted_ && depth_ == 0 && !was_empty && (c == ',' || c == '}')) {
      // The end of a number or a word.
      end_value();
      if (state_ == State::kOpen) take(c, out, passed);
      return;
    }
    text_ += c;
    if (quoted_) {
      quoted_ = in_text(c);
    } else if (c == '"') {
      quoted_ = true;
      escaped_ = false;
    } else if (c == '{' || c == '[') {
      ++depth_;
    } else if (c == '}' || c == ']') {
      if (--depth_ < 0) state_ = State::kNoCall;
    }
    pass_on(c, was_empty, out, passed);
    const char first = text_.front();
    if (!quoted_ && depth_ == 0 && (first == '{' || first == '[' || first == '"')) end_value();
  }

  bool is_arguments() const { return key_ == "arguments" || key_ == "parameters"; }

  // Arguments that are an object go out as they come.
  void pass_on(char c, bool first, std::vector<ToolCallDelta>& out, std::string& passed) {
    if (!is_arguments() || !name_ || text_.front() != '{') return;
    if (first) {
      begin(*name_, out);
      streaming_ = true;
    }
    if (streaming_) passed += c;
  }

  void end_value() {
    place_ = Place::kCommaOrEnd;
    if (key_ == "name") {
      name_ = decoded(text_);
      if (!name_ || name_->empty()) state_ = State::kNoCall;
    } else if (is_arguments()) {
      if (streaming_) {
        given_ = true;
        streaming_ = false;
      } else {
        // JSON as a text is meant as what it holds.
        const auto inner = decoded(text_);
        arguments_ = inner ? *inner : text_;
      }
    }
  }

  void end(std::vector<ToolCallDelta>& out) {
    if (!name_) {
      state_ = State::kNoCall;
      return;
    }
    state_ = State::kDone;
    if (given_) return;
    begin(*name_, out);
    argue(arguments_.value_or("{}"), out);
  }

  Place place_ = Place::kStart;
  std::string text_;  // of the key or value that is read
  std::optional<std::string> key_, name_, arguments_;
  int depth_ = 0;
  bool quoted_ = false, escaped_ = false;
  bool streaming_ = false, given_ = false;
};

// <function=f><parameter=x>\nvalue\n</parameter>...</function>. A parameter is passed on when it
// is complete.
class TaggedCall final : public CallReader {
 public:
  TaggedCall(int index, const ToolParameters& parameters)
      : CallReader(index), parameters_(parameters) {}

  size_t push(std::string_view text, std::vector<ToolCallDelta>& out) override {
    size_t taken = 0;
    while (taken < text.size() && state_ == State::kOpen) {
      const char c = text[taken++];
      text_ += c;
      if (c == '>') read_tag(out);
      if (state_ == State::kOpen && !in_value_) check_start();
    }
    return taken;
  }

 private:
  // Between tags there is nothing but blanks.
  void check_start() {
    const size_t first = text_.find_first_not_of(kBlanks);
    if (first != std::string::npos && text_[first] != '<') state_ = State::kNoCall;
  }

  void read_tag(std::vector<ToolCallDelta>& out) {
    constexpr std::string_view kClose = "</parameter>";
    if (in_value_) {
      if (!text_.ends_with(kClose)) return;
      text_.resize(text_.size() - kClose.size());
      end_parameter(out);
      in_value_ = false;
      text_.clear();
      return;
    }
    const size_t first = text_.find_first_not_of(kBlanks);
    const std::string_view tag = std::string_view(text_).substr(first);
    if (!begun() && tag.starts_with("<function=") && tag.size() > 11) {
      name_ = tag.substr(10, tag.size() - 11);
      begin(name_, out);
    } else if (begun() && tag.starts_with("<parameter=") && tag.size() > 12) {
      parameter_ = tag.substr(11, tag.size() - 12);
      in_value_ = true;
    } else if (begun() && tag == "</function>") {
      argue(num_parameters_ == 0 ? "{}" : "}", out);
      state_ = State::kDone;
    } else {
      state_ = State::kNoCall;
    }
    text_.clear();
  }

  void end_parameter(std::vector<ToolCallDelta>& out) {
    std::string_view value = text_;
    if (value.starts_with('\n')) value.remove_prefix(1);
    if (value.ends_with('\n')) value.remove_suffix(1);
    argue(cat(num_parameters_++ == 0 ? "{" : ", ", json_quote(parameter_), ": ", typed(value)),
          out);
  }

  // The value as JSON, by the type in the function's schema; a text where it has none.
  std::string typed(std::string_view value) const {
    std::string type;
    if (const auto function = parameters_.find(name_); function != parameters_.end())
      if (const auto found = function->second.find(parameter_); found != function->second.end())
        type = found->second;
    if (type.empty() || type == "string") return json_quote(value);
    const auto json = nlohmann::json::parse(value, nullptr, false);
    return json.is_discarded() ? json_quote(value) : std::string(value);
  }

  const ToolParameters& parameters_;
  std::string text_, name_, parameter_;
  bool in_value_ = false;
  int num_parameters_ = 0;
};

// Text that is held until it is known to be content or part of a call.
class HeldText : public ToolCallParser {
 public:
  ToolCallText push(std::string_view piece) final {
    ToolCallText out;
    pending_ += piece;
    while (step(out)) {
    }
    return out;
  }

 protected:
  // Takes some of what is held. False: more text is needed.
  virtual bool step(ToolCallText& out) = 0;
  // Gives the open call what is held. False: it is still open.
  bool feed_call(ToolCallText& out) {
    const size_t taken = call_->push(pending_, out.calls);
    raw_ += pending_.substr(0, taken);
    pending_.erase(0, taken);
    return call_->state() != CallReader::State::kOpen;
  }

  std::string pending_, raw_;  // raw_: of the open call, should it be none
  std::unique_ptr<CallReader> call_;
  int num_calls_ = 0;
};

// Calls between <tool_call> and </tool_call>.
class MarkedCalls final : public HeldText {
 public:
  MarkedCalls(ToolFormat format, ToolParameters parameters)
      : format_(format), parameters_(std::move(parameters)) {}

  ToolCallText finish() override {
    ToolCallText out;
    if (call_ && !call_->begun())
      out.content = raw_ + pending_;
    else if (!call_ && !after_call_ &&
             !(num_calls_ > 0 && pending_.find_first_not_of(kBlanks) == std::string::npos))
      out.content = pending_;
    pending_.clear();
    raw_.clear();
    call_.reset();
    return out;
  }

 private:
  bool step(ToolCallText& out) override {
    if (pending_.empty()) return false;
    if (call_) return read_call(out);
    if (after_call_) return leave_call();
    const size_t at = pending_.find(kBegin);
    if (at != std::string::npos) {
      // Blanks before a call are not part of the content.
      const size_t last = pending_.find_last_not_of(kBlanks, at == 0 ? std::string::npos : at - 1);
      const size_t text = at > 0 && last != std::string::npos && last < at ? last + 1 : 0;
      out.content += pending_.substr(0, text);
      raw_ = pending_.substr(text, at - text + kBegin.size());
      pending_.erase(0, at + kBegin.size());
      if (format_ == ToolFormat::kQwen3Coder)
        call_ = std::make_unique<TaggedCall>(num_calls_, parameters_);
      else
        call_ = std::make_unique<JsonCall>(num_calls_);
      return true;
    }
    size_t keep = held_back(pending_, kBegin);
    while (keep < pending_.size() && is_blank(pending_[pending_.size() - keep - 1])) ++keep;
    out.content += pending_.substr(0, pending_.size() - keep);
    pending_.erase(0, pending_.size() - keep);
    return false;
  }

  bool read_call(ToolCallText& out) {
    if (!feed_call(out)) return !pending_.empty();
    const bool begun = call_->begun();
    call_.reset();
    if (begun) {
      ++num_calls_;
      after_call_ = true;
    } else {
      out.content += raw_;
    }
    raw_.clear();
    return true;
  }

  // Drops what follows the call up to its end mark. Without one, what is no blank is text again.
  bool leave_call() {
    const size_t at = pending_.find_first_not_of(kBlanks);
    if (at == std::string::npos) {
      pending_.clear();
      return false;
    }
    pending_.erase(0, at);
    if (pending_.starts_with(kEnd)) {
      pending_.erase(0, kEnd.size());
    } else if (kEnd.starts_with(pending_)) {
      return false;
    }
    after_call_ = false;
    return true;
  }

  ToolFormat format_;
  ToolParameters parameters_;
  bool after_call_ = false;
};

// A text that begins with a call, and more of them divided by semicolons.
class LeadingCalls final : public HeldText {
 public:
  ToolCallText finish() override {
    ToolCallText out;
    if (!call_ || !call_->begun()) out.content = raw_ + pending_;
    if (num_calls_ > 0 && out.content.find_first_not_of(" \t\r\n;") == std::string::npos)
      out.content.clear();
    raw_.clear();
    pending_.clear();
    call_.reset();
    return out;
  }

 private:
  static constexpr std::string_view kPythonTag = "<|python_tag|>";

  bool step(ToolCallText& out) override {
    if (pending_.empty()) return false;
    if (is_text_) {
      out.content += std::exchange(pending_, {});
      return false;
    }
    if (call_) return read_call(out);
    const size_t at = pending_.find_first_not_of(num_calls_ > 0 ? " \t\r\n;" : " \t\r\n");
    if (at == std::string::npos) return false;
    const std::string_view rest = std::string_view(pending_).substr(at);
    if (kPythonTag.starts_with(rest)) return false;
    const size_t tag = rest.starts_with(kPythonTag) ? kPythonTag.size() : 0;
    if (rest.substr(tag).starts_with('{')) {
      raw_ = pending_.substr(0, at + tag);
      pending_.erase(0, at + tag);
      call_ = std::make_unique<JsonCall>(num_calls_);
    } else {
      is_text_ = true;
    }
    return true;
  }

  bool read_call(ToolCallText& out) {
    if (!feed_call(out)) return false;
    if (call_->begun()) {
      ++num_calls_;
    } else {
      out.content += raw_;
      is_text_ = true;
    }
    raw_.clear();
    call_.reset();
    return true;
  }

  bool is_text_ = false;
};

// No calls: all is text.
class NoCalls final : public ToolCallParser {
 public:
  ToolCallText push(std::string_view piece) override { return {std::string(piece), {}}; }
  ToolCallText finish() override { return {}; }
};

}  // namespace

ToolFormat tool_format(std::string_view name, std::string_view chat_template) {
  if (name == "hermes") return ToolFormat::kHermes;
  if (name == "llama3_json") return ToolFormat::kLlama3Json;
  if (name == "qwen3_coder") return ToolFormat::kQwen3Coder;
  if (name != "auto") return ToolFormat::kNone;
  const auto has = [&](std::string_view text) {
    return chat_template.find(text) != std::string_view::npos;
  };
  if (has("<function=")) return ToolFormat::kQwen3Coder;
  if (has("<tool_call>")) return ToolFormat::kHermes;
  if (has("\"parameters\"") && has("tools")) return ToolFormat::kLlama3Json;
  return ToolFormat::kNone;
}

std::unique_ptr<ToolCallParser> make_tool_call_parser(ToolFormat format,
                                                      ToolParameters parameters) {
  switch (format) {
    case ToolFormat::kNone:
      return std::make_unique<NoCalls>();
    case ToolFormat::kLlama3Json:
      return std::make_unique<LeadingCalls>();
    default:
      return std::make_unique<MarkedCalls>(format, std::move(parameters));
  }
}

}  // namespace megatron
