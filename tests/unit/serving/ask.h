// Requests to the fake server, and their answers as JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fake_server.h"
#include "raw_client.h"

namespace megatron {

using Json = nlohmann::ordered_json;

struct Answer {
  int status = 0;
  std::vector<HttpHeader> headers;
  std::string body;
  Json json;  // of the body; discarded: it is none

  std::string header(std::string_view name) const;
  // Members of OpenAI's error object.
  std::string message() const { return json["error"]["message"]; }
  std::string param() const;
};

Answer ask(int port, const std::string& bytes);
Answer post(int port, const std::string& path, const std::string& body,
            const std::string& more_headers = "");
Answer get(int port, const std::string& path, const std::string& more_headers = "");

// The data of server-sent events, in order; those of named events begin with "NAME: ".
std::vector<std::string> events_of(const std::string& body);

// The text of each choice, joined from the chunks of a stream, and the reasons why they ended.
struct Joined {
  std::map<int, std::string> texts, finish_reasons;
  std::map<int, Json> calls;  // name and arguments
  Json usage;
  int chunks = 0;
  bool done = false;
};
Joined join(const std::string& body);

}  // namespace megatron
