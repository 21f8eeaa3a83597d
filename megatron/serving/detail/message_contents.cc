#include "megatron/serving/detail/message_contents.h"

#include <utility>

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr size_t kShown = 60;  // of an address in a message

// What is in a part under its type: a text, or an object with one under `member`.
std::string_view text_under(JsonObject& part, const std::string& type, const char* member,
                            const std::string& where) {
  const auto given = part.any(type);
  if (!given) throw ApiError(400, where, cat(where, " has no ", type));
  std::string_view text;
  if (given->get(text) == simdjson::SUCCESS) return text;
  simdjson::dom::object object;
  if (given->get(object) != simdjson::SUCCESS || object.at_key(member).get(text))
    throw ApiError(400, where, cat(where, ".", type, " has no text ", member));
  return text;
}

// The base64 of a data: address.
std::string_view data_of(std::string_view address, const std::string& where) {
  if (address.starts_with("data:")) {
    const size_t comma = address.find(',');
    if (comma == std::string_view::npos || !address.substr(0, comma).ends_with(";base64"))
      throw ApiError(400, where, cat(where, ": the data: address is not in base64"));
    return address.substr(comma + 1);
  }
  const bool fetched = address.find("://") != std::string_view::npos;
  throw ApiError(400, where,
                 cat(where, ": ", address.substr(0, kShown), " is ",
                     fetched ? "an address, and the server fetches nothing"
                             : "no data: address, and the server reads no files for clients",
                     "; expected data:...;base64,..."));
}

}  // namespace

std::string MessageContents::read(JsonElement content, const std::string& where) {
  std::string_view text;
  if (content.get(text) == simdjson::SUCCESS) {
    message_.parts.push_back({std::string(text), -1});
    return std::string(text);
  }
  simdjson::dom::array parts;
  if (content.get(parts) != simdjson::SUCCESS)
    throw ApiError(400, where, cat(where, " is ", kind_of(content), "; expected a text or parts"));
  std::string joined;
  size_t index = 0;
  for (const JsonElement one : parts) {
    const std::string place = cat(where, "[", index++, "]");
    simdjson::dom::object object;
    if (one.get(object) != simdjson::SUCCESS)
      throw ApiError(400, place, cat(place, " is ", kind_of(one), "; expected an object"));
    JsonObject part(object, place + ".");
    if (index > 1) joined += "\n";
    read_part(part, place, joined);
  }
  return joined;
}

void MessageContents::read_part(JsonObject& part, const std::string& where, std::string& joined) {
  const std::string type = part.text("type").value_or("");
  if (type == "image_url") return add_medium(MediaKind::kImage, type, part, where);
  if (type == "input_audio" || type == "audio_url")
    return add_medium(MediaKind::kSound, type, part, where);
  if (type != "text" && type != "input_text" && type != "refusal")
    throw ApiError(400, where,
                   cat(where, " is of type \"", type.substr(0, 40), "\"; expected text",
                       model_.media == nullptr ? "" : ", image_url, input_audio or audio_url"),
                   "unsupported");
  auto given = part.text(type == "refusal" ? "refusal" : "text");
  if (!given) throw ApiError(400, where, cat(where, " has no text"));
  joined += *given;
  message_.parts.push_back({std::move(*given), -1});
}

void MessageContents::check_taken(MediaKind kind, const std::string& type,
                                  const std::string& where) const {
  const std::string reason =
      model_.media == nullptr ? "the model reads text alone" : model_.media->refusal(kind);
  if (!reason.empty())
    throw ApiError(400, where, cat(where, " is of type \"", type, "\": ", reason), "unsupported");
  if (std::ssize(row_.media) >= limits_.max_media)
    throw ApiError(400, where,
                   cat(where, ": more than ", limits_.max_media,
                       " images and sounds in one request (--max-media)"));
}

void MessageContents::add_medium(MediaKind kind, const std::string& type, JsonObject& part,
                                 const std::string& where) {
  check_taken(kind, type, where);
  std::string_view base64;
  if (type == "input_audio") {
    base64 = text_under(part, type, "data", where);
    auto input = part.object(type);
    const std::string format = input->text("format").value_or("wav");
    if (format != "wav" && format != "flac" && format != "ogg")
      throw ApiError(400, where,
                     cat(where, ".input_audio.format is \"", format.substr(0, 40),
                         "\"; expected wav, flac or ogg"));
  } else {
    base64 = data_of(text_under(part, type, "url", where), where);
  }
  message_.parts.push_back({{}, std::ssize(row_.media)});
  row_.media.push_back({kind, where, bytes_of(base64, where)});
}

std::string MessageContents::bytes_of(std::string_view base64, const std::string& where) const {
  // Before memory is asked for.
  const auto bytes = static_cast<int64_t>(base64.size() / 4 * 3);
  if (bytes > limits_.max_medium_bytes)
    throw ApiError(400, where,
                   cat(where, " has ", bytes, " bytes, at most ", limits_.max_medium_bytes,
                       " are taken (--max-medium-bytes)"));
  try {
    return decode_base64(base64, where);
  } catch (const Error& error) {
    throw ApiError(400, where, error.what());
  }
}

void MessageContents::end_message(std::string json, bool is_assistant) {
  message_.json = std::move(json);
  message_.is_assistant = is_assistant;
  row_.messages.push_back(std::exchange(message_, {}));
}

}  // namespace megatron
