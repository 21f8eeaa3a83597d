#include "megatron/serving/http/http_parser.h"

#include <algorithm>
#include <boost/beast/http/basic_parser.hpp>
#include <utility>

#include "megatron/base/check.h"

namespace megatron {
namespace {

namespace beast = boost::beast;
namespace http = boost::beast::http;

std::string_view view(beast::string_view text) { return {text.data(), text.size()}; }

// Where the header ends, behind its empty line; npos: not yet.
size_t end_of_header(std::string_view bytes) {
  const size_t at = bytes.find("\r\n\r\n");
  return at == std::string_view::npos ? at : at + 4;
}

// A line feed without a carriage return or the reverse, a zero, a folded line.
bool has_odd_line(std::string_view header) {
  for (size_t i = 0; i < header.size(); ++i) {
    const char c = header[i];
    if (c == '\0') return true;
    if (c == '\n' && (i == 0 || header[i - 1] != '\r')) return true;
    if (c == '\r' && (i + 1 == header.size() || header[i + 1] != '\n')) return true;
    if ((c == ' ' || c == '\t') && i > 0 && header[i - 1] == '\n') return true;
  }
  return false;
}

// Splits "http://host/path?query" and "/path?query"; false: neither.
bool split_target(std::string_view target, std::string_view host, HttpRequest& request) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (!equal_ignoring_case(target.substr(0, scheme.size()), scheme)) continue;
    target.remove_prefix(scheme.size());
    const size_t slash = std::min(target.find('/'), target.size());
    if (!equal_ignoring_case(target.substr(0, slash), host)) return false;
    target.remove_prefix(slash);
    if (target.empty()) target = "/";
    break;
  }
  if (!target.starts_with('/')) return false;
  const size_t question = std::min(target.find('?'), target.size());
  request.path = target.substr(0, question);
  if (question < target.size()) request.query = target.substr(question + 1);
  return true;
}

// What Beast's parser finds, for either direction.
template <bool kIsRequest>
class Messages : public http::basic_parser<kIsRequest> {
 public:
  using ErrorCode = beast::error_code;
  using Text = beast::string_view;

  void on_request_impl(http::verb, Text method, Text target, int version, ErrorCode&) override {
    method_ = view(method);
    target_ = view(target);
    version_ = version;
  }
  void on_response_impl(int code, Text, int version, ErrorCode&) override {
    status_ = code;
    version_ = version;
  }
  void on_field_impl(http::field, Text name, Text value, ErrorCode&) override {
    if (!header_complete_) headers_.push_back({std::string(view(name)), std::string(view(value))});
  }
  void on_header_impl(ErrorCode&) override { header_complete_ = true; }
  void on_body_init_impl(boost::optional<uint64_t> const&, ErrorCode&) override {}
  size_t on_body_impl(Text body, ErrorCode&) override {
    on_body_(view(body));
    return body.size();
  }
  void on_chunk_header_impl(uint64_t size, Text, ErrorCode&) override { chunk_left_ = size; }
  size_t on_chunk_body_impl(uint64_t, Text body, ErrorCode&) override {
    chunk_left_ -= body.size();
    on_body_(view(body));
    return body.size();
  }
  void on_finish_impl(ErrorCode&) override {}

  std::string method_, target_;
  int status_ = 0, version_ = 11;
  std::vector<HttpHeader> headers_;
  bool header_complete_ = false;
  uint64_t chunk_left_ = 0;  // bytes of the chunk that has begun
  std::function<void(std::string_view)> on_body_;
};

// "0" and two line ends: no body in chunks ends with less. Beast's parser (1.74) ends the process
// by an assertion if it sees a beginning of that twice.
constexpr size_t kLastChunkBytes = 5;

// Feeds `pending` until the parser needs more, has the header alone (`only_header`) or is done;
// removes what was taken.
template <bool kIsRequest>
beast::error_code feed(Messages<kIsRequest>& parser, std::string& pending, size_t length) {
  beast::error_code error;
  if (parser.is_header_done() && parser.chunked() && parser.chunk_left_ == 0 &&
      length < kLastChunkBytes)
    return error;
  size_t taken = 0;
  while (taken < length && !parser.is_done()) {
    const size_t used =
        parser.put(boost::asio::const_buffer(pending.data() + taken, length - taken), error);
    taken += used;
    if (error || used == 0) break;
  }
  pending.erase(0, taken);
  if (error == http::error::need_more) error = {};
  return error;
}

}  // namespace

struct HttpRequestParser::Impl {
  explicit Impl(const HttpParserLimits& given) : limits(given) {
    parser.header_limit(static_cast<uint32_t>(limits.max_header_bytes));
    parser.body_limit(limits.max_body_bytes);
    parser.on_body_ = [this](std::string_view piece) { request.body += piece; };
  }

  void refuse(int status, std::string message) { fault = HttpFault{status, std::move(message)}; }
  void advance_header(std::string& pending);
  void take_header();
  void check_lengths();
  void advance_body(std::string& pending);

  HttpParserLimits limits;
  Messages<true> parser;
  HttpRequest request;
  bool header_done = false;
  bool chunked = false, has_body = false;
  std::optional<HttpFault> fault;
};

void HttpRequestParser::Impl::advance_header(std::string& pending) {
  // Empty lines before a request are allowed.
  size_t blank = 0;
  while (blank + 1 < pending.size() && pending[blank] == '\r' && pending[blank + 1] == '\n')
    blank += 2;
  pending.erase(0, blank);
  const size_t end = end_of_header(pending);
  const std::string_view seen = std::string_view(pending).substr(0, end);
  if (seen.size() > limits.max_header_bytes)
    return refuse(431, cat("the header is longer than ", limits.max_header_bytes, " bytes"));
  if (end == std::string::npos) {
    // The last byte may be the first half of a line end.
    if (!pending.empty() && has_odd_line(seen.substr(0, seen.size() - (seen.back() == '\r'))))
      refuse(400,
             "the header has a line that does not end in CR LF, is folded, or has a zero byte");
    return;
  }
  if (has_odd_line(seen))
    return refuse(
        400, "the header has a line that does not end in CR LF, is folded, or has a zero byte");
  if (std::count(seen.begin(), seen.end(), '\n') - 2 > limits.max_header_fields)
    return refuse(431, cat("the header has more than ", limits.max_header_fields, " fields"));
  const beast::error_code error = feed(parser, pending, end);
  if (error == http::error::bad_version)
    return refuse(505, "the protocol is not HTTP/1.0 or HTTP/1.1");
  if (error == http::error::body_limit)
    return refuse(413, cat("the body is longer than ", limits.max_body_bytes, " bytes"));
  if (error) return refuse(400, cat("the request is no HTTP: ", error.message()));
  if (!parser.is_header_done()) return refuse(400, "the request is no HTTP");
  take_header();
}

void HttpRequestParser::Impl::take_header() {
  request.method = parser.method_;
  request.version = parser.version_;
  request.headers = std::move(parser.headers_);
  const auto count = [&](std::string_view name) {
    return std::count_if(
        request.headers.begin(), request.headers.end(),
        [&](const HttpHeader& header) { return equal_ignoring_case(header.name, name); });
  };
  if (request.version != 10 && request.version != 11)
    return refuse(505, "the protocol is not HTTP/1.0 or HTTP/1.1");
  if (count("Host") > 1 || (count("Host") == 0 && request.version == 11))
    return refuse(400, cat("the request has ", count("Host"), " Host headers; expected one"));
  if (!split_target(parser.target_, request.header("Host"), request))
    return refuse(400, "the target is neither a path nor a URL of this host");
  if (count("Content-Length") > 1)
    return refuse(400, "the request has several Content-Length headers");
  check_lengths();
  header_done = !fault;
}

void HttpRequestParser::Impl::check_lengths() {
  const std::string* const encoding = find_header(request.headers, "Transfer-Encoding");
  const std::string* const length = find_header(request.headers, "Content-Length");
  if (encoding != nullptr) {
    if (length != nullptr)
      return refuse(400, "the request has both Content-Length and Transfer-Encoding");
    if (request.version == 10) return refuse(400, "HTTP/1.0 has no Transfer-Encoding");
    if (!equal_ignoring_case(*encoding, "chunked"))
      return refuse(501, "Transfer-Encoding is not \"chunked\"");
    chunked = has_body = true;
  } else if (length != nullptr) {
    if (length->empty() || length->size() > 19 ||
        length->find_first_not_of("0123456789") != std::string::npos)
      return refuse(400, "Content-Length is no number");
    const uint64_t bytes = std::stoull(*length);
    if (bytes > limits.max_body_bytes)
      return refuse(413, cat("the body has ", bytes, " bytes, at most ", limits.max_body_bytes,
                             " are taken"));
    has_body = bytes > 0;
  }
  const std::string_view expect = request.header("Expect");
  if (!expect.empty() && !equal_ignoring_case(expect, "100-continue"))
    refuse(417, "Expect is not \"100-continue\"");
}

void HttpRequestParser::Impl::advance_body(std::string& pending) {
  const beast::error_code error = feed(parser, pending, pending.size());
  if (error == http::error::body_limit)
    return refuse(413, cat("the body is longer than ", limits.max_body_bytes, " bytes"));
  if (error) return refuse(400, cat("the body is malformed: ", error.message()));
  // Lines of chunk sizes and trailers are kept until they are complete.
  if (!parser.is_done() && chunked && pending.size() > limits.max_header_bytes)
    refuse(431,
           cat("a chunk's size or the trailer is longer than ", limits.max_header_bytes, " bytes"));
}

HttpRequestParser::HttpRequestParser(const HttpParserLimits& limits)
    : impl_(std::make_unique<Impl>(limits)) {}
HttpRequestParser::~HttpRequestParser() = default;
HttpRequestParser::HttpRequestParser(HttpRequestParser&&) noexcept = default;
HttpRequestParser& HttpRequestParser::operator=(HttpRequestParser&&) noexcept = default;

void HttpRequestParser::advance(std::string& pending) {
  if (impl_->fault || done()) return;
  if (!impl_->header_done)
    impl_->advance_header(pending);
  else
    impl_->advance_body(pending);
}

bool HttpRequestParser::header_done() const { return impl_->header_done; }
bool HttpRequestParser::done() const {
  return impl_->header_done && !impl_->fault && (!impl_->has_body || impl_->parser.is_done());
}
const std::optional<HttpFault>& HttpRequestParser::fault() const { return impl_->fault; }
HttpRequest& HttpRequestParser::request() { return impl_->request; }
bool HttpRequestParser::expects_continue() const {
  return impl_->has_body && impl_->request.version == 11 &&
         !impl_->request.header("Expect").empty();
}
bool HttpRequestParser::keep_alive() const { return impl_->parser.keep_alive(); }
uint64_t HttpRequestParser::body_received() const { return impl_->request.body.size(); }

struct HttpResponseParser::Impl {
  explicit Impl(std::function<void(std::string_view)> on_body) : on_body(std::move(on_body)) {
    start();
  }
  void start() {
    parser = std::make_unique<Messages<false>>();
    parser->header_limit(1 << 20);
    parser->body_limit(UINT64_MAX);
    parser->on_body_ = on_body;
  }
  std::function<void(std::string_view)> on_body;
  std::unique_ptr<Messages<false>> parser;
};

HttpResponseParser::HttpResponseParser(std::function<void(std::string_view)> on_body)
    : impl_(std::make_unique<Impl>(std::move(on_body))) {}
HttpResponseParser::~HttpResponseParser() = default;
HttpResponseParser::HttpResponseParser(HttpResponseParser&&) noexcept = default;
HttpResponseParser& HttpResponseParser::operator=(HttpResponseParser&&) noexcept = default;

void HttpResponseParser::advance(std::string& pending) {
  while (!pending.empty() && !done()) {
    const size_t before = pending.size();
    if (!header_done()) {
      const size_t end = end_of_header(pending);
      if (end == std::string::npos) {
        MEGATRON_CHECK(before < size_t{1} << 20, "the header of the response does not end");
        return;
      }
      const beast::error_code error = feed(*impl_->parser, pending, end);
      MEGATRON_CHECK(!error, "the response is no HTTP: ", error.message());
      MEGATRON_CHECK(header_done(), "the response is no HTTP");
      if (status() / 100 == 1) impl_->start();
    } else {
      const beast::error_code error = feed(*impl_->parser, pending, before);
      MEGATRON_CHECK(!error, "the body of the response is malformed: ", error.message());
      if (pending.size() == before) return;
    }
  }
}

void HttpResponseParser::finish() {
  if (done()) return;
  beast::error_code error;
  if (header_done()) impl_->parser->put_eof(error);
  MEGATRON_CHECK(header_done() && !error, "the connection was closed before the response ended");
}

bool HttpResponseParser::header_done() const { return impl_->parser->header_complete_; }
bool HttpResponseParser::done() const { return impl_->parser->is_done(); }
int HttpResponseParser::status() const { return impl_->parser->status_; }
const std::vector<HttpHeader>& HttpResponseParser::headers() const {
  return impl_->parser->headers_;
}
bool HttpResponseParser::keep_alive() const { return impl_->parser->keep_alive(); }

}  // namespace megatron
