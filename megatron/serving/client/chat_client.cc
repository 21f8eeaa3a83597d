#include "megatron/serving/client/chat_client.h"

#include <chrono>
#include <nlohmann/json.hpp>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/serving/http/sse.h"

namespace megatron {
namespace {

using Json = nlohmann::json;

constexpr int64_t kLookNs = 30'000'000;  // how soon a wish to stop is noticed

// The message of an error in either shape.
std::string message_of(const std::string& body, int status) {
  const Json json = Json::parse(body, nullptr, false);
  if (json.is_object() && json.contains("error") && json["error"].is_object())
    return json["error"].value("message", "");
  if (json.is_object() && json.contains("message")) return json.value("message", "");
  return cat("the server answered ", status);
}

std::string base64_of(std::string_view bytes) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  out.reserve((bytes.size() + 2) / 3 * 4);
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t bits = 0;
    for (size_t k = 0; k < 3; ++k)
      bits = bits << 8 | (i + k < bytes.size() ? static_cast<uint8_t>(bytes[i + k]) : 0U);
    for (size_t k = 0; k < 4; ++k)
      out += i + k <= bytes.size() ? kDigits[bits >> (18 - 6 * k) & 63] : '=';
  }
  return out;
}

// What the API calls the format of a sound.
std::string_view format_of(std::string_view bytes) {
  return bytes.starts_with("fLaC") ? "flac" : bytes.starts_with("OggS") ? "ogg" : "wav";
}

// The content of a message: a text, or its media and then the text.
std::string content_of(const std::string& text, const std::vector<RowMedium>& media) {
  JsonWriter json;
  if (media.empty()) return json.value(text).text();
  json.begin_array();
  for (const RowMedium& medium : media) {
    json.begin_object();
    if (medium.kind == MediaKind::kImage)
      json.member("type", "image_url")
          .key("image_url")
          .begin_object()
          .member("url", "data:image;base64," + base64_of(medium.bytes));
    else
      json.member("type", "input_audio")
          .key("input_audio")
          .begin_object()
          .member("data", base64_of(medium.bytes))
          .member("format", format_of(medium.bytes));
    json.end_object().end_object();
  }
  json.begin_object().member("type", "text").member("text", text).end_object();
  return json.end_array().text();
}

struct Receiving {
  SseReader events;
  ChatReply reply;
  int status = 0;
  std::string body;
  bool done = false, ended = false;
  std::chrono::steady_clock::time_point began = std::chrono::steady_clock::now();

  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  }
  void take(std::string_view data, const std::function<void(std::string_view)>& show) {
    if (data == "[DONE]") {
      done = true;
      return;
    }
    const Json chunk = Json::parse(data, nullptr, false);
    if (!chunk.is_object()) return;
    if (chunk.contains("error")) reply.problem = message_of(std::string(data), status);
    if (chunk.contains("usage") && chunk["usage"].is_object())
      reply.output_tokens = chunk["usage"].value("completion_tokens", int64_t{0});
    for (const Json& choice : chunk.value("choices", Json::array())) {
      const Json delta = choice.value("delta", Json::object());
      if (choice.contains("finish_reason") && choice["finish_reason"].is_string())
        reply.finish_reason = choice["finish_reason"];
      if (!delta.contains("content") || !delta["content"].is_string()) continue;
      const std::string piece = delta["content"];
      if (piece.empty()) continue;
      if (reply.text.empty()) reply.first_token_s = seconds();
      reply.text += piece;
      show(piece);
    }
  }
};

}  // namespace

ChatClient::ChatClient(HttpUrl url, const std::string& ca_file, const std::string& key,
                       ChatSettings settings)
    : client_(url, ca_file), settings_(std::move(settings)) {
  headers_ = {{"Content-Type", "application/json"}};
  if (!key.empty()) headers_.push_back({"Authorization", "Bearer " + key});
  const HttpResponse response = fetch(
      url, {.path = "/v1/models", .headers = headers_, .timeout_ns = 30'000'000'000}, ca_file);
  MEGATRON_CHECK(response.status == 200, "GET ", url.host_header(), url.path,
                 "/v1/models: ", message_of(response.body, response.status),
                 response.status == 401 ? "\nhint: --api-key-file FILE" : "");
  const Json json = Json::parse(response.body, nullptr, false);
  if (json.is_object() && json.contains("data") && json["data"].is_array())
    for (const Json& model : json["data"])
      if (model.contains("id") && model["id"].is_string()) models_.push_back(model["id"]);
  MEGATRON_CHECK(!models_.empty() || !settings_.model.empty(), "GET ", url.host_header(),
                 "/v1/models lists no model\nhint: name one with --model");
  if (settings_.model.empty()) settings_.model = models_[0];
}

std::string ChatClient::request_body() const {
  JsonWriter json;
  json.begin_object().member("model", settings_.model).member("stream", true);
  json.key("stream_options").begin_object().member("include_usage", true).end_object();
  if (settings_.temperature) json.member("temperature", *settings_.temperature);
  if (settings_.top_p) json.member("top_p", *settings_.top_p);
  if (settings_.max_tokens) json.member("max_tokens", *settings_.max_tokens);
  if (settings_.seed) json.member("seed", *settings_.seed);
  json.key("messages").begin_array();
  const auto write = [&](const std::string& role, const std::string& content) {
    json.begin_object().member("role", role).key("content").raw(content).end_object();
  };
  if (!settings_.system.empty()) write("system", content_of(settings_.system, {}));
  for (const Turn& turn : turns_) write(turn.role, turn.content);
  return json.end_array().end_object().text();
}

ChatReply ChatClient::say(const std::string& message, const std::atomic<bool>& stop,
                          const std::function<void(std::string_view)>& show) {
  turns_.push_back({"user", content_of(message, std::exchange(attached_, {}))});
  Receiving receiving;
  HttpCall call;
  call.method = "POST";
  call.path = "/v1/chat/completions";
  call.headers = headers_;
  call.body = request_body();
  call.on_head = [&](int status, const std::vector<HttpHeader>&) { receiving.status = status; };
  call.on_body = [&](std::string_view piece) {
    if (receiving.status != 200)
      receiving.body += piece;
    else
      receiving.events.push(
          piece, [&](std::string_view, std::string_view data) { receiving.take(data, show); });
  };
  call.on_done = [&](const std::string& problem) {
    receiving.ended = true;
    std::string& found = receiving.reply.problem;
    if (found.empty()) found = problem;
    if (found.empty() && receiving.status != 200)
      found = message_of(receiving.body, receiving.status);
    if (found.empty() && !receiving.done) found = "the server went away before the end";
  };
  const HttpCallId id = client_.start(std::move(call));
  for (bool cancelled = false; !receiving.ended;) {
    client_.run(kLookNs);
    if (stop && !std::exchange(cancelled, true)) client_.cancel(id);
  }
  ChatReply& reply = receiving.reply;
  reply.seconds = receiving.seconds();
  if (stop) reply.problem = "stopped";
  if (reply.text.empty() && !reply.problem.empty())
    turns_.pop_back();
  else
    turns_.push_back({"assistant", content_of(reply.text, {})});
  return reply;
}

bool ChatClient::undo() {
  if (turns_.empty()) return false;
  turns_.resize(turns_.size() - std::min<size_t>(2, turns_.size()));
  return true;
}

}  // namespace megatron
