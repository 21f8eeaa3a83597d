#include "megatron/serving/http/http_message.h"

#include <algorithm>
#include <iterator>

namespace megatron {
namespace {

constexpr char lower_case(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; }

struct StatusText {
  int status;
  std::string_view phrase;
};
constexpr StatusText kStatusTexts[] = {{100, "Continue"},
                                       {200, "OK"},
                                       {204, "No Content"},
                                       {304, "Not Modified"},
                                       {400, "Bad Request"},
                                       {401, "Unauthorized"},
                                       {403, "Forbidden"},
                                       {404, "Not Found"},
                                       {405, "Method Not Allowed"},
                                       {408, "Request Timeout"},
                                       {409, "Conflict"},
                                       {411, "Length Required"},
                                       {413, "Content Too Large"},
                                       {415, "Unsupported Media Type"},
                                       {417, "Expectation Failed"},
                                       {421, "Misdirected Request"},
                                       {429, "Too Many Requests"},
                                       {431, "Request Header Fields Too Large"},
                                       {500, "Internal Server Error"},
                                       {501, "Not Implemented"},
                                       {503, "Service Unavailable"},
                                       {504, "Gateway Timeout"},
                                       {505, "HTTP Version Not Supported"}};

}  // namespace

bool equal_ignoring_case(std::string_view a, std::string_view b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](char x, char y) {
           return lower_case(x) == lower_case(y);
         });
}

const std::string* find_header(const std::vector<HttpHeader>& headers, std::string_view name) {
  for (const HttpHeader& header : headers)
    if (equal_ignoring_case(header.name, name)) return &header.value;
  return nullptr;
}

std::string_view HttpRequest::header(std::string_view name) const {
  const std::string* found = find_header(headers, name);
  return found != nullptr ? std::string_view(*found) : std::string_view();
}

std::string_view reason_phrase(int status) {
  const auto* const found =
      std::find_if(std::begin(kStatusTexts), std::end(kStatusTexts),
                   [&](const StatusText& text) { return text.status == status; });
  return found == std::end(kStatusTexts) ? std::string_view("Unknown") : found->phrase;
}

}  // namespace megatron
