// HTTP requests and responses as values.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace megatron {

struct HttpHeader {
  std::string name, value;
};

// The first header of that name, whatever its case; null: there is none.
const std::string* find_header(const std::vector<HttpHeader>& headers, std::string_view name);

struct HttpRequest {
  std::string method;  // "GET"
  std::string path;    // of the target, as it was sent: "/v1/models"
  std::string query;   // after the question mark
  int version = 11;    // 10 or 11
  std::vector<HttpHeader> headers;
  std::string body;
  std::string peer;  // address of the client, without its port

  // The value of a header; empty: not given.
  std::string_view header(std::string_view name) const;
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::vector<HttpHeader> headers;
  std::string body;
};

// "Not Found"
std::string_view reason_phrase(int status);

// Whether the texts are equal apart from the case of ASCII letters.
bool equal_ignoring_case(std::string_view a, std::string_view b);

}  // namespace megatron
