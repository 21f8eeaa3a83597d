#include "ask.h"

#include "megatron/base/check.h"

namespace megatron {

std::string Answer::header(std::string_view name) const {
  const std::string* found = find_header(headers, name);
  return found != nullptr ? *found : "";
}

std::string Answer::param() const {
  const Json& param = json["error"]["param"];
  return param.is_string() ? param.get<std::string>() : "";
}

Answer ask(int port, const std::string& bytes) {
  RawClient client(port);
  client.send(bytes);
  RawResponse response = client.response();
  Answer answer{response.status, std::move(response.headers), std::move(response.body), {}};
  answer.json = Json::parse(answer.body, nullptr, false);
  return answer;
}

Answer post(int port, const std::string& path, const std::string& body,
            const std::string& more_headers) {
  return ask(port, post_request(path, body, more_headers));
}

Answer get(int port, const std::string& path, const std::string& more_headers) {
  return ask(port, get_request(path, more_headers));
}

std::vector<std::string> events_of(const std::string& body) {
  std::vector<std::string> events;
  for (size_t begin = 0; begin < body.size();) {
    const size_t end = body.find("\n\n", begin);
    MEGATRON_CHECK(end != std::string::npos, "an event without its end");
    std::string event = body.substr(begin, end - begin), name;
    begin = end + 2;
    if (event.starts_with("event: ")) {
      const size_t line = event.find('\n');
      name = event.substr(7, line - 7) + ": ";
      event.erase(0, line + 1);
    }
    MEGATRON_CHECK(event.starts_with("data: "), "an event without data: ", event);
    events.push_back(name + event.substr(6));
  }
  return events;
}

Joined join(const std::string& body) {
  Joined joined;
  for (const std::string& event : events_of(body)) {
    MEGATRON_CHECK(!joined.done, "an event after the end");
    if (event == "[DONE]") {
      joined.done = true;
      continue;
    }
    const Json chunk = Json::parse(event);
    ++joined.chunks;
    if (chunk.contains("usage") && chunk["usage"].is_object()) joined.usage = chunk["usage"];
    for (const Json& choice : chunk["choices"]) {
      const int index = choice["index"];
      MEGATRON_CHECK(!joined.finish_reasons.contains(index), "a chunk after the finish");
      std::string& text = joined.texts[index];
      if (choice.contains("text")) {
        text += choice["text"].get<std::string>();
      } else {
        MEGATRON_CHECK(choice["delta"].contains("role") == text.empty() ||
                           choice["delta"].empty() || !choice["delta"].contains("role"),
                       "the role comes late");
        text += choice["delta"].value("content", "");
        for (const Json& call : choice["delta"].value("tool_calls", Json::array())) {
          Json& calls = joined.calls[index];
          const size_t at = call["index"];
          if (call["function"].contains("name"))
            calls.push_back({{"name", call["function"]["name"]}, {"arguments", ""}});
          calls[at]["arguments"] = calls[at]["arguments"].get<std::string>() +
                                   call["function"]["arguments"].get<std::string>();
        }
      }
      if (choice["finish_reason"].is_string())
        joined.finish_reasons[index] = choice["finish_reason"];
    }
  }
  return joined;
}

}  // namespace megatron
