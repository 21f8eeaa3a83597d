// A conversation with a server of the OpenAI API.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "megatron/datasets/multimodal/multimodal_row.h"
#include "megatron/serving/http/http_client.h"

namespace megatron {

struct ChatSettings {
  std::string model;  // empty: the server's first
  std::string system;
  std::optional<double> temperature, top_p;
  std::optional<int64_t> max_tokens, seed;
};

// What a reply was: its text, and why there is no more of it.
struct ChatReply {
  std::string text;
  std::string problem;        // empty: it came to its end
  std::string finish_reason;  // "stop", "length"; empty: unknown
  int64_t output_tokens = 0;
  double first_token_s = 0.0, seconds = 0.0;  // from the request
};

// One thread uses it.
class ChatClient {
 public:
  // `key`: of the API; empty: none. Throws Error if the server does not answer.
  ChatClient(HttpUrl url, const std::string& ca_file, const std::string& key,
             ChatSettings settings);

  ChatSettings& settings() { return settings_; }
  const std::vector<std::string>& models() const { return models_; }  // of the server
  const HttpUrl& url() const { return client_.url(); }

  // Adds an image or a sound to the next message: its file's bytes.
  void attach(MediaKind kind, std::string bytes) {
    attached_.push_back({kind, {}, std::move(bytes)});
  }
  // Says `message` and gives the reply, piece by piece to `show`; setting `stop` ends it early.
  // What was said stays in the conversation, unless nothing came back.
  ChatReply say(const std::string& message, const std::atomic<bool>& stop,
                const std::function<void(std::string_view)>& show);
  void forget() {
    turns_.clear();
    attached_.clear();
  }
  // Takes the last message and its reply back; false: there is none.
  bool undo();
  size_t num_turns() const { return turns_.size() / 2; }

 private:
  std::string request_body() const;

  HttpClient client_;
  std::vector<HttpHeader> headers_;
  ChatSettings settings_;
  std::vector<std::string> models_;
  struct Turn {
    std::string role;
    std::string content;  // JSON: a text, or parts
  };
  std::vector<Turn> turns_;
  std::vector<RowMedium> attached_;  // to the next message
};

}  // namespace megatron
