#include "megatron/datasets/multimodal/multimodal_row.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/datasets/sources/conversation.h"

namespace megatron {
namespace {

using OrderedJson = nlohmann::ordered_json;

bool given(const OrderedJson& object, const char* key) {
  return object.contains(key) && !object[key].is_null();
}

const char* word_of(MediaKind kind) { return kind == MediaKind::kImage ? "image" : "audio"; }

// Deeper ones are no rows, and would be written out by a recursion.
constexpr int kMostNested = 100;

bool is_nested_deeper(std::string_view json, int most) {
  int depth = 0;
  bool in_text = false;
  for (size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (in_text) {
      if (c == '\\') ++i;
      if (c == '"') in_text = false;
    } else if (c == '"') {
      in_text = true;
    } else if (c == '[' || c == '{') {
      if (++depth > most) return true;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

// Reads one row.
class RowReader {
 public:
  RowReader(const OrderedJson& row, const std::string& where,
            const std::vector<RowMedium>& container)
      : row_(row), where_(where), container_(container) {}

  MultimodalRow read(std::string_view json);
  std::vector<RowMedium> media();

 private:
  template <class... Args>
  [[noreturn]] void fail(const Args&... args) const {
    throw_error(cat(where_, ": ", args...));
  }
  RowMedium medium_of(const OrderedJson& value, MediaKind kind) const;
  RowMedium named(const std::string& name, MediaKind kind) const;
  RowMedium member_of_container(const std::string& path, MediaKind kind) const;
  void collect_media();
  std::vector<RowMedium> listed() const;
  int64_t place(RowMedium medium);
  int64_t place_next(MediaKind kind);
  int64_t place_numbered(MediaKind kind, std::string_view digits);
  int64_t place_given(const OrderedJson& value, MediaKind kind);
  void split_placeholders(const std::string& text, RowMessage& message);
  void read_part(const OrderedJson& part, RowMessage& message);
  std::optional<std::pair<MediaKind, const OrderedJson*>> medium_of_part(const OrderedJson& part,
                                                                         const std::string& type);
  void read_content(const OrderedJson& content, bool has_placeholders, RowMessage& message);
  void check_all_used() const;

  const OrderedJson& row_;
  const std::string& where_;
  const std::vector<RowMedium>& container_;
  struct Listed {
    std::vector<RowMedium> media;
    size_t next = 0;          // without a number
    size_t placeholders = 0;  // that asked for one of the list
    std::vector<bool> used;
  };
  std::array<Listed, 2> listed_;  // by kind
  MultimodalRow out_;
};

RowMedium RowReader::member_of_container(const std::string& path, MediaKind kind) const {
  for (const RowMedium& medium : container_) {
    const std::string_view name = medium.path;
    const std::string_view last = name.substr(name.rfind('/') + 1);
    if (medium.kind == kind && (name == path || last == path ||
                                name.substr(name.find('.', name.size() - last.size()) + 1) == path))
      return medium;
  }
  fail("there is no ", name_of(kind), " ", path, " among the members of the sample");
}

RowMedium RowReader::named(const std::string& name, MediaKind kind) const {
  if (name.empty()) fail("the path of an ", word_of(kind), " is empty");
  if (name.starts_with("data:")) {
    const size_t comma = name.find(',');
    if (comma == std::string::npos || !name.substr(0, comma).ends_with(";base64"))
      fail("a data: address of an ", word_of(kind), " is not in base64");
    return {kind, {}, decode_base64(std::string_view(name).substr(comma + 1), where_)};
  }
  if (const size_t colon = name.find("://"); colon != std::string::npos && colon < 16)
    fail("the ", word_of(kind), " ", name.substr(0, 100),
         " is an address; nothing is fetched\nhint: download it and give its path below "
         "--media-root");
  if (name.find('\0') != std::string::npos)
    fail("the path of an ", word_of(kind), " has a zero byte");
  return container_.empty() ? RowMedium{kind, name, {}} : member_of_container(name, kind);
}

RowMedium RowReader::medium_of(const OrderedJson& value, MediaKind kind) const {
  if (value.is_string()) return named(value.get<std::string>(), kind);
  if (!value.is_object())
    fail("an ", word_of(kind), " is ", value.type_name(),
         ", expected a path or an object with bytes or path");
  for (const char* key : {"bytes", "data"})
    if (given(value, key)) {
      if (!value[key].is_string())
        fail("the bytes of an ", word_of(kind), " are ", value[key].type_name());
      const auto& bytes = value[key].get_ref<const std::string&>();
      return bytes.starts_with("data:") ? named(bytes, kind)
                                        : RowMedium{kind, {}, decode_base64(bytes, where_)};
    }
  for (const char* key : {"path", "url"})
    if (given(value, key)) {
      if (!value[key].is_string())
        fail("the path of an ", word_of(kind), " is ", value[key].type_name());
      return named(value[key].get<std::string>(), kind);
    }
  fail("an ", word_of(kind), " has neither bytes nor path");
}

// What the row's own lists name, or, without them, what comes with it.
void RowReader::collect_media() {
  for (const char* key : {"video", "videos"})
    if (given(row_, key) && !row_[key].empty())
      fail("has a ", key, ", which is not built\nhint: give its frames as images");
  bool any = false;
  constexpr std::pair<const char*, MediaKind> kKeys[] = {{"image", MediaKind::kImage},
                                                         {"images", MediaKind::kImage},
                                                         {"audio", MediaKind::kSound},
                                                         {"audios", MediaKind::kSound}};
  for (const auto& [key, kind] : kKeys) {
    if (!given(row_, key)) continue;
    any = true;
    Listed& list = listed_[static_cast<size_t>(kind)];
    if (!list.media.empty()) fail("has both ", word_of(kind), " and ", key);
    if (row_[key].is_array()) {
      for (const OrderedJson& one : row_[key]) list.media.push_back(medium_of(one, kind));
    } else {
      list.media.push_back(medium_of(row_[key], kind));
    }
  }
  if (!any)
    for (const RowMedium& medium : container_)
      listed_[static_cast<size_t>(medium.kind)].media.push_back(medium);
  for (Listed& list : listed_) list.used.assign(list.media.size(), false);
}

int64_t RowReader::place(RowMedium medium) {
  out_.media.push_back(std::move(medium));
  return std::ssize(out_.media) - 1;
}

int64_t RowReader::place_next(MediaKind kind) {
  Listed& list = listed_[static_cast<size_t>(kind)];
  ++list.placeholders;
  // What is missing is counted, and told once all are.
  if (list.next >= list.media.size()) return 0;
  list.used[list.next] = true;
  return place(list.media[list.next++]);
}

int64_t RowReader::place_numbered(MediaKind kind, std::string_view digits) {
  Listed& list = listed_[static_cast<size_t>(kind)];
  size_t number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (error != std::errc() || number < 1 || number > list.media.size())
    fail("<", word_of(kind), "-", digits, "> names no medium: the row has ", list.media.size(),
         " of this kind");
  if (!list.used[number - 1]) ++list.placeholders;
  list.used[number - 1] = true;
  return place(list.media[number - 1]);
}

// That of a part. If it names a medium that comes with the row, that one has a place.
int64_t RowReader::place_given(const OrderedJson& value, MediaKind kind) {
  RowMedium medium = medium_of(value, kind);
  Listed& list = listed_[static_cast<size_t>(kind)];
  for (size_t i = 0; i < list.media.size() && !medium.path.empty(); ++i) {
    if (list.used[i] || list.media[i].path != medium.path) continue;
    list.used[i] = true;
    ++list.placeholders;
    break;
  }
  return place(std::move(medium));
}

// LLaVA's values: <image>, <image-2>, <audio>, <audio-2>.
void RowReader::split_placeholders(const std::string& text, RowMessage& message) {
  size_t done = 0;
  const auto add_text = [&](size_t end) {
    if (end > done) message.parts.push_back({text.substr(done, end - done), -1});
  };
  for (size_t at = text.find('<'); at != std::string::npos; at = text.find('<', at + 1)) {
    for (const MediaKind kind : {MediaKind::kImage, MediaKind::kSound}) {
      const std::string_view word = word_of(kind);
      if (text.compare(at + 1, word.size(), word) != 0) continue;
      size_t end = at + 1 + word.size();
      const size_t digits = end + 1;
      if (end < text.size() && text[end] == '-')
        for (++end; end < text.size() && text[end] >= '0' && text[end] <= '9';) ++end;
      if (end >= text.size() || text[end] != '>' || end == digits) continue;
      add_text(at);
      message.parts.push_back({{},
                               end < digits ? place_next(kind)
                                            : place_numbered(kind, std::string_view(text).substr(
                                                                       digits, end - digits))});
      done = end + 1;
      at = end;
      break;
    }
  }
  add_text(text.size());
}

std::optional<std::pair<MediaKind, const OrderedJson*>> RowReader::medium_of_part(
    const OrderedJson& part, const std::string& type) {
  const bool image = type == "image" || type == "image_url" || type == "input_image";
  const bool sound = type == "audio" || type == "audio_url" || type == "input_audio";
  if (!image && !sound) return {};
  const MediaKind kind = image ? MediaKind::kImage : MediaKind::kSound;
  for (const char* key : {type.c_str(), "image", "image_url", "audio", "path", "url"})
    if (given(part, key)) return std::pair(kind, &part[key]);
  return std::pair(kind, nullptr);
}

void RowReader::read_part(const OrderedJson& part, RowMessage& message) {
  if (part.is_string()) return message.parts.push_back({part.get<std::string>(), -1});
  if (!part.is_object() || !part.contains("type") || !part["type"].is_string())
    fail("a part of a message has no type, expected text, image, image_url, audio, ...");
  const auto type = part["type"].get<std::string>();
  if (type == "text") {
    if (!given(part, "text") || !part["text"].is_string()) fail("a part of type text has no text");
    return message.parts.push_back({part["text"].get<std::string>(), -1});
  }
  const auto medium = medium_of_part(part, type);
  if (!medium) fail("a part of a message is of type ", type, ", expected text, image or audio");
  const auto [kind, value] = *medium;
  Listed& list = listed_[static_cast<size_t>(kind)];
  while (value == nullptr && list.next < list.media.size() && list.used[list.next]) ++list.next;
  message.parts.push_back({{}, value == nullptr ? place_next(kind) : place_given(*value, kind)});
}

void RowReader::read_content(const OrderedJson& content, bool has_placeholders,
                             RowMessage& message) {
  if (content.is_null()) {
    message.has_content = false;
  } else if (content.is_string()) {
    const auto text = content.get<std::string>();
    if (has_placeholders)
      split_placeholders(text, message);
    else
      message.parts.push_back({text, -1});
  } else if (content.is_array()) {
    for (const OrderedJson& part : content) read_part(part, message);
  } else {
    fail("the content of a message is ", content.type_name(),
         ", expected a text or a list of parts");
  }
}

void RowReader::check_all_used() const {
  for (const MediaKind kind : {MediaKind::kImage, MediaKind::kSound}) {
    const Listed& list = listed_[static_cast<size_t>(kind)];
    if (list.placeholders != list.media.size())
      fail(list.placeholders, list.placeholders == 1 ? " place" : " places", " for ",
           list.media.size(), " ", name_of(kind), list.media.size() == 1 ? "" : "s",
           "\nhint: each medium has one place: <", word_of(kind),
           "> in conversations, a part of type ", word_of(kind), " in messages");
  }
}

std::vector<RowMedium> RowReader::listed() const {
  std::vector<RowMedium> out = listed_[0].media;
  out.insert(out.end(), listed_[1].media.begin(), listed_[1].media.end());
  return out;
}

std::vector<RowMedium> RowReader::media() {
  collect_media();
  return listed();
}

MultimodalRow RowReader::read(std::string_view json) {
  collect_media();
  const bool conversations = given(row_, "conversations");
  if (!conversations && !given(row_, "messages") && given(row_, "caption")) {
    if (!row_["caption"].is_string())
      fail("the caption is ", row_["caption"].type_name(), ", expected a string");
    return caption_row(row_["caption"].get<std::string>(), listed(), where_);
  }
  if (!conversations && !given(row_, "messages") && given(row_, "document")) {
    if (!row_["document"].is_array())
      fail("the document is ", row_["document"].type_name(), ", expected a list of parts");
    RowMessage document;
    read_content(row_["document"], false, document);
    check_all_used();
    if (document.parts.empty()) fail("the document is empty");
    out_.document = std::move(document.parts);
    return std::move(out_);
  }
  if (!conversations && !given(row_, "messages"))
    fail("has none of conversations, messages, document and caption");
  const Conversation conversation = parse_conversation(json, where_);
  for (size_t i = 0; i < conversation.messages.size(); ++i) {
    OrderedJson given_message = OrderedJson::parse(conversation.messages[i]);
    RowMessage message;
    message.is_assistant = conversation.is_assistant[i];
    read_content(given_message.contains("content") ? given_message["content"] : OrderedJson(),
                 conversations && !given(row_, "messages"), message);
    given_message.erase("content");
    message.json = given_message.dump();
    out_.messages.push_back(std::move(message));
  }
  check_all_used();
  out_.tools = conversation.tools;
  out_.variables = conversation.variables;
  return std::move(out_);
}

OrderedJson parse_row(std::string_view json, const std::string& where) {
  MEGATRON_CHECK(!is_nested_deeper(json, kMostNested), where, ": is nested deeper than ",
                 kMostNested);
  OrderedJson row = OrderedJson::parse(json, nullptr, /*allow_exceptions=*/false);
  MEGATRON_CHECK(row.is_object(), where, ": is no JSON object");
  return row;
}

}  // namespace

const char* name_of(MediaKind kind) { return kind == MediaKind::kImage ? "image" : "sound"; }

MultimodalRow parse_multimodal_row(std::string_view json, const std::string& where,
                                   const std::vector<RowMedium>& container) {
  const OrderedJson row = parse_row(json, where);
  return RowReader(row, where, container).read(json);
}

std::vector<RowMedium> parse_row_media(std::string_view json, const std::string& where) {
  const OrderedJson row = parse_row(json, where);
  return RowReader(row, where, {}).media();
}

MultimodalRow caption_row(std::string caption, std::vector<RowMedium> media,
                          const std::string& where) {
  MEGATRON_CHECK(!caption.empty(), where, ": the caption is empty");
  MEGATRON_CHECK(!media.empty(), where, ": the caption has neither an image nor a sound");
  MultimodalRow row;
  row.caption = std::move(caption);
  row.media = std::move(media);
  return row;
}

std::string decode_base64(std::string_view text, const std::string& where) {
  if (text.size() % 4 == 0)
    for (int i = 0; i < 2 && text.ends_with('='); ++i) text.remove_suffix(1);
  std::string out;
  out.reserve(text.size() / 4 * 3 + 3);
  uint32_t bits = 0;
  int count = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const int value = c >= 'A' && c <= 'Z'   ? c - 'A'
                      : c >= 'a' && c <= 'z' ? c - 'a' + 26
                      : c >= '0' && c <= '9' ? c - '0' + 52
                      : c == '+'             ? 62
                      : c == '/'             ? 63
                                             : -1;
    MEGATRON_CHECK(value >= 0, where, ": the bytes of a medium are no base64: byte ", i,
                   " of their text");
    bits = bits << 6 | static_cast<uint32_t>(value);
    if ((count += 6) >= 8) out += static_cast<char>(bits >> (count -= 8) & 0xff);
  }
  MEGATRON_CHECK(count < 6 && (bits & ((1U << count) - 1)) == 0, where,
                 ": the bytes of a medium are no base64: their text is cut");
  return out;
}

}  // namespace megatron
