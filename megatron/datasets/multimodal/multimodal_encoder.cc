#include "megatron/datasets/multimodal/multimodal_encoder.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/datasets/index_cache.h"
#include "megatron/tokenizers/rendered_text.h"

namespace megatron {
namespace {

using OrderedJson = nlohmann::ordered_json;

// Divides a spelling that is ordinary text.
constexpr std::string_view kDivider = kHidingMark;

const char* type_of(MediaKind kind) { return kind == MediaKind::kImage ? "image" : "audio"; }

size_t count_of(std::string_view text, std::string_view what) {
  size_t out = 0;
  for (size_t at = text.find(what); at != std::string_view::npos;
       at = text.find(what, at + what.size()))
    ++out;
  return out;
}

// Spans without [begin, end), which lies within one or outside of all.
void cut_from_spans(std::vector<TextSpan>& spans, size_t begin, size_t end) {
  std::vector<TextSpan> out;
  for (const TextSpan& span : spans) {
    if (span.begin < begin) out.push_back(span);
    if (span.begin < begin && span.end > begin) out.back().end = begin;
    if (span.end > end && span.begin < end)
      out.push_back({end, span.end, span.takes_last_token_whole});
    if (span.begin >= end) out.push_back(span);
  }
  spans = std::move(out);
}

// Spans of a text of which [begin, end) becomes `size` bytes.
void replace_in_spans(std::vector<TextSpan>& spans, size_t begin, size_t end, size_t size) {
  for (TextSpan& span : spans) {
    if (span.begin >= end) span.begin = span.begin - end + begin + size;
    if (span.end >= end) span.end = span.end - end + begin + size;
  }
}

}  // namespace

MultimodalEncoder::MultimodalEncoder(const Tokenizer& tokenizer,
                                     const ConversationEncoder& conversations, MediaRules rules,
                                     bool escape_literals)
    : tokenizer_(tokenizer),
      conversations_(conversations),
      rules_(std::move(rules)),
      escape_literals_(escape_literals || text_spells_no_special(tokenizer)) {
  for (const MediaKind kind : {MediaKind::kImage, MediaKind::kSound})
    if (const ModalityRule* rule = rule_of(kind)) {
      literals_.push_back(rule->placeholder);
      literals_.push_back(rule->token);
    }
  for (int64_t id = 0; id < tokenizer.vocab_size(); ++id) {
    const auto token = static_cast<int32_t>(id);
    if (!tokenizer.is_special(token)) continue;
    const std::string text = tokenizer.id_to_token(token);
    if (!text.empty() && megatron::encode_rendered(tokenizer, text) == std::vector<int32_t>{token})
      literals_.push_back(text);
  }
  // The longest of several that begin at one place comes first.
  std::sort(literals_.begin(), literals_.end(), [](const std::string& a, const std::string& b) {
    return a.size() != b.size() ? a.size() > b.size() : a < b;
  });
  literals_.erase(std::unique(literals_.begin(), literals_.end()), literals_.end());
  takes_parts_ = takes_parts();
}

const ModalityRule* MultimodalEncoder::rule_of(MediaKind kind) const {
  const std::optional<ModalityRule>& rule = kind == MediaKind::kImage ? rules_.image : rules_.sound;
  return rule ? &*rule : nullptr;
}

// Whether the template writes a placeholder for a part of a list.
bool MultimodalEncoder::takes_parts() const {
  for (const MediaKind kind : {MediaKind::kImage, MediaKind::kSound}) {
    const ModalityRule* rule = rule_of(kind);
    if (rule == nullptr) continue;
    Conversation probe;
    probe.messages = {
        OrderedJson{{"role", "user"},
                    {"content", OrderedJson::array({{{"type", type_of(kind)}},
                                                    {{"type", "text"}, {"text", "x"}}})}}
            .dump(),
        OrderedJson{{"role", "assistant"},
                    {"content", OrderedJson::array({{{"type", "text"}, {"text", "y"}}})}}
            .dump()};
    probe.is_assistant = {false, true};
    try {
      if (count_of(conversations_.render(probe, "").text, rule->placeholder) != 1) return false;
    } catch (const Error&) {
      return false;
    }
  }
  return true;
}

std::pair<size_t, size_t> MultimodalEncoder::find_literal(std::string_view text,
                                                          size_t from) const {
  std::pair<size_t, size_t> best = {std::string_view::npos, 0};
  for (const std::string& literal : literals_)
    if (const size_t at = text.find(literal, from); at < best.first) best = {at, literal.size()};
  return best;
}

std::string MultimodalEncoder::checked_text(const std::string& text,
                                            const std::string& place) const {
  MEGATRON_CHECK(text.find(kDivider) == std::string::npos, place,
                 ": the text holds private characters (U+F8FF U+E000 U+F8FE)");
  std::string out;
  size_t done = 0;
  for (;;) {
    const auto [at, size] = find_literal(text, done);
    if (at == std::string_view::npos) return out + text.substr(done);
    MEGATRON_CHECK(escape_literals_, place, ", byte ", at, ": the text holds ",
                   text.substr(at, size),
                   ", which the tokenizer takes for a token of its own\nhint: "
                   "--escape-modality-text encodes it as ordinary text");
    // Behind the first character (of any bytes) no part is a spelling of this token any more.
    size_t first = at + 1;
    while (first < at + size && (static_cast<uint8_t>(text[first]) & 0xc0) == 0x80) ++first;
    out += cat(text.substr(done, first - done), kDivider);
    done = first;
  }
}

void MultimodalEncoder::check_members(const std::string& json, const std::string& place) const {
  const auto [at, size] = find_literal(json, 0);
  MEGATRON_CHECK(at == std::string_view::npos, place, ": holds ", json.substr(at, size),
                 ", which the tokenizer takes for a token of its own");
}

Conversation MultimodalEncoder::conversation(const MultimodalRow& row,
                                             const std::string& where) const {
  Conversation out;
  const auto placeholder = [&](int64_t medium) {
    const ModalityRule* rule = rule_of(row.media[static_cast<size_t>(medium)].kind);
    return rule == nullptr ? std::string() : rule->placeholder;
  };
  for (const RowPart& part : row.document)
    out.completion +=
        part.medium < 0 ? checked_text(part.text, where + ": document") : placeholder(part.medium);
  if (!row.document.empty()) return out;
  if (row.messages.empty()) {
    for (int64_t i = 0; i < std::ssize(row.media); ++i) out.prompt += placeholder(i);
    out.completion = checked_text(row.caption, where + ": caption");
    return out;
  }
  check_members(row.tools, where + ": tools");
  check_members(row.variables, where + ": chat_template_kwargs");
  out.tools = row.tools;
  out.variables = row.variables;
  for (size_t m = 0; m < row.messages.size(); ++m) {
    const RowMessage& message = row.messages[m];
    const std::string place = cat(where, ": message ", m + 1);
    check_members(message.json, place);
    OrderedJson json = OrderedJson::parse(message.json);
    OrderedJson list = OrderedJson::array();
    std::string text;
    for (const RowPart& part : message.parts) {
      if (part.medium < 0) {
        const std::string checked = checked_text(part.text, place);
        list.push_back({{"type", "text"}, {"text", checked}});
        text += checked;
      } else {
        list.push_back({{"type", type_of(row.media[static_cast<size_t>(part.medium)].kind)}});
        text += placeholder(part.medium);
      }
    }
    if (!message.has_content)
      json["content"] = nullptr;
    else if (takes_parts_)
      json["content"] = list;
    else
      json["content"] = text;
    out.messages.push_back(json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace));
    out.is_assistant.push_back(message.is_assistant);
  }
  return out;
}

RenderedConversation MultimodalEncoder::with_media(const RenderedConversation& rendered,
                                                   const MultimodalRow& row,
                                                   const std::vector<MediumFacts>& media,
                                                   const std::string& where,
                                                   std::vector<MediaRun>& runs) const {
  for (const MediaKind kind : {MediaKind::kImage, MediaKind::kSound}) {
    const ModalityRule* rule = rule_of(kind);
    const auto of_row = static_cast<size_t>(
        std::count_if(row.media.begin(), row.media.end(),
                      [&](const RowMedium& medium) { return medium.kind == kind; }));
    const size_t written = rule == nullptr ? of_row : count_of(rendered.text, rule->placeholder);
    MEGATRON_CHECK(written == of_row, where, ": the chat template writes ", rule->placeholder, " ",
                   written, " times for ", of_row, " ", name_of(kind), of_row == 1 ? "" : "s");
  }
  RenderedConversation out = rendered;
  std::array<size_t, 2> next = {0, 0};
  for (size_t from = 0;;) {
    std::pair<size_t, const ModalityRule*> found = {std::string::npos, nullptr};
    MediaKind kind = MediaKind::kImage;
    for (const MediaKind one : {MediaKind::kImage, MediaKind::kSound}) {
      const ModalityRule* rule = rule_of(one);
      const size_t at =
          rule == nullptr ? std::string::npos : out.text.find(rule->placeholder, from);
      if (at < found.first) found = {at, rule}, kind = one;
    }
    if (found.second == nullptr) return out;
    size_t& number = next[static_cast<size_t>(kind)];
    while (row.media[number].kind != kind) ++number;
    const MediumText medium = medium_text(rules_, media[number], where);
    const size_t end = found.first + found.second->placeholder.size();
    out.text.replace(found.first, end - found.first, medium.text);
    replace_in_spans(out.trained, found.first, end, medium.text.size());
    // What a medium becomes is not trained, also where everything around it is.
    if (!row.document.empty())
      cut_from_spans(out.trained, found.first, found.first + medium.text.size());
    for (const int64_t rows : medium.rows) runs.push_back({0, rows, static_cast<int64_t>(number)});
    from = found.first + medium.text.size();
    ++number;
  }
}

// Encodes what lies between dividers piece by piece.
void MultimodalEncoder::encode_text(const RenderedConversation& rendered,
                                    std::vector<int32_t>& ids) const {
  if (text_spells_no_special(tokenizer_)) return conversations_.encode_append(rendered, ids);
  for (size_t begin = 0; begin <= rendered.text.size();) {
    const size_t end = std::min(rendered.text.find(kDivider, begin), rendered.text.size());
    RenderedConversation piece{rendered.text.substr(begin, end - begin), {}};
    for (const TextSpan& span : rendered.trained) {
      const size_t first = std::max(span.begin, begin), last = std::min(span.end, end);
      if (first < last)
        piece.trained.push_back(
            {first - begin, last - begin, span.end > end || span.takes_last_token_whole});
    }
    conversations_.encode_append(piece, ids);
    begin = end == rendered.text.size() ? end + 1 : end + kDivider.size();
  }
}

EncodedSample MultimodalEncoder::encode(const MultimodalRow& row,
                                        const std::vector<MediumFacts>& media,
                                        const std::string& where) const {
  // Before the template, whose errors say less.
  for (const MediumFacts& medium : media) medium_text(rules_, medium, where);
  EncodedSample out =
      encode_rendered(conversations_.render(conversation(row, where), where), row, media, where);
  if (row.messages.empty())
    if (const std::optional<int32_t> eod = tokenizer_.eod()) out.ids.push_back(*eod);
  return out;
}

EncodedSample MultimodalEncoder::encode_rendered(const RenderedConversation& rendered,
                                                 const MultimodalRow& row,
                                                 const std::vector<MediumFacts>& media,
                                                 const std::string& where) const {
  MEGATRON_ASSERT(media.size() == row.media.size());
  EncodedSample out;
  encode_text(with_media(rendered, row, media, where, out.runs), out.ids);
  size_t run = 0;
  for (size_t i = 0; i < out.ids.size(); ++i) {
    int32_t& id = out.ids[i];
    const int32_t token = id < 0 ? ~id : id;
    const bool is_media =
        (rules_.image && token == rules_.image->id) || (rules_.sound && token == rules_.sound->id);
    if (!is_media) continue;
    MEGATRON_CHECK(run < out.runs.size(), where, ": the text has more tokens of media than the ",
                   out.runs.size(), " that its media become");
    out.runs[run++].token = static_cast<int64_t>(i);
    id = ~token;
  }
  MEGATRON_CHECK(run == out.runs.size(), where, ": the text has ", run, " tokens of media, ",
                 row.media.size(), row.media.size() == 1 ? " medium becomes " : " media become ",
                 out.runs.size());
  return out;
}

std::string MultimodalEncoder::description(bool in_full) const {
  const std::string conversations = conversations_.description();
  JsonWriter json;
  json.begin_object().key("conversations").raw(in_full ? conversations : json_quote(conversations));
  json.key("media").raw(in_full ? rules_.details : json_quote(hash_text(rules_.description)));
  json.member("escape", escape_literals_).end_object();
  return json.text();
}

}  // namespace megatron
