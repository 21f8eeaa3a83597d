#include "megatron/serving/http/http_client.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>

#include "megatron/base/check.h"
#include "megatron/serving/http/detail/byte_stream.h"
#include "megatron/serving/http/http_parser.h"

namespace megatron {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;

// One call on its way.
struct OpenCall {
  HttpCall call;
  std::unique_ptr<ByteStream> stream;
  std::optional<asio::steady_timer> timer;
  bool timed_out = false, cancelled = false;
};

}  // namespace

std::string HttpUrl::host_header() const {
  const bool six = host.find(':') != std::string::npos;
  return cat(six ? "[" : "", host, six ? "]" : "", ":", port);
}

HttpUrl parse_url(std::string_view text) {
  HttpUrl url;
  std::string_view rest = text;
  const size_t scheme = rest.find("://");
  if (scheme != std::string_view::npos) {
    url.tls = equal_ignoring_case(rest.substr(0, scheme), "https");
    MEGATRON_CHECK(url.tls || equal_ignoring_case(rest.substr(0, scheme), "http"), "the URL ", text,
                   " is neither of http nor of https");
    rest.remove_prefix(scheme + 3);
  }
  url.port = url.tls ? 443 : 80;
  const size_t slash = std::min(rest.find('/'), rest.size());
  url.path = rest.substr(slash);
  rest = rest.substr(0, slash);
  while (url.path.ends_with('/')) url.path.pop_back();
  size_t colon = rest.rfind(':');
  if (rest.starts_with('[')) {
    const size_t end = rest.find(']');
    MEGATRON_CHECK(end != std::string_view::npos, "the URL ", text,
                   " has a bracket without its end");
    url.host = rest.substr(1, end - 1);
    colon = end + 1 < rest.size() ? end + 1 : std::string_view::npos;
  } else {
    url.host = rest.substr(0, colon);
  }
  if (colon != std::string_view::npos) {
    const std::string_view port = rest.substr(colon + 1);
    const auto read = std::from_chars(port.data(), port.data() + port.size(), url.port);
    MEGATRON_CHECK(read.ec == std::errc() && read.ptr == port.data() + port.size() &&
                       url.port > 0 && url.port < 65536,
                   "the URL ", text, " has no valid port");
  }
  MEGATRON_CHECK(!url.host.empty(), "the URL ", text, " names no host");
  return url;
}

struct HttpClient::Impl {
  Impl(HttpUrl given, const std::string& ca_file) : url(std::move(given)) {
    if (url.tls) tls = make_client_tls(ca_file);
  }

  asio::awaitable<void> perform(HttpCallId id, std::shared_ptr<OpenCall> open);
  asio::awaitable<std::string> exchange(OpenCall& open);
  asio::awaitable<std::string> connect(OpenCall& open);
  asio::awaitable<bool> receive(OpenCall& open, HttpResponseParser& parser, std::string& body);
  std::string request_text(const HttpCall& call) const;

  HttpUrl url;
  asio::io_context io{1};
  std::shared_ptr<asio::ssl::context> tls;
  std::vector<std::unique_ptr<ByteStream>> idle;
  std::map<HttpCallId, std::shared_ptr<OpenCall>> calls;
  std::vector<tcp::endpoint> endpoints;
  uint64_t next_id = 1;
};

std::string HttpClient::Impl::request_text(const HttpCall& call) const {
  std::string text =
      cat(call.method, " ", url.path, call.path, " HTTP/1.1\r\nHost: ", url.host_header(), "\r\n");
  for (const HttpHeader& header : call.headers)
    text += cat(header.name, ": ", header.value, "\r\n");
  if (!call.body.empty() || call.method == "POST" || call.method == "PUT")
    text += cat("Content-Length: ", call.body.size(), "\r\n");
  return text + "\r\n" + call.body;
}

// An empty text: connected.
asio::awaitable<std::string> HttpClient::Impl::connect(OpenCall& open) {
  ErrorCode error;
  if (endpoints.empty()) {
    tcp::resolver resolver(io);
    const auto found = resolver.resolve(url.host, std::to_string(url.port), error);
    if (error) co_return cat("no address for ", url.host, ": ", error.message());
    for (const auto& entry : found) endpoints.push_back(entry.endpoint());
  }
  for (const tcp::endpoint& endpoint : endpoints) {
    tcp::socket socket(io);
    ErrorCode ignored;
    socket.open(endpoint.protocol(), ignored);
    socket.set_option(tcp::no_delay(true), ignored);
    open.stream = url.tls ? make_tls_stream(std::move(socket), *tls, &url.host)
                          : make_plain_stream(std::move(socket));
    co_await open.stream->socket().async_connect(endpoint,
                                                 asio::redirect_error(asio::use_awaitable, error));
    if (open.timed_out || open.cancelled) co_return std::string("stopped");
    if (!error) break;
  }
  if (error) co_return cat("cannot connect to ", url.host_header(), ": ", error.message());
  error = co_await open.stream->handshake();
  if (error) co_return cat("no TLS with ", url.host_header(), ": ", error.message());
  co_return std::string();
}

// Reads the response, of which the parser appends to `body`; false: the connection ended before
// anything came.
asio::awaitable<bool> HttpClient::Impl::receive(OpenCall& open, HttpResponseParser& parser,
                                                std::string& body) {
  std::string pending;
  bool told = false, any = false;
  for (;;) {
    const ErrorCode error = co_await open.stream->read(pending);
    any = any || !pending.empty();
    if (error && !any) co_return false;
    parser.advance(pending);
    if (parser.header_done() && !told) {
      told = true;
      if (open.call.on_head) open.call.on_head(parser.status(), parser.headers());
    }
    if (!body.empty() && open.call.on_body) open.call.on_body(body);
    body.clear();
    if (parser.done()) co_return true;
    if (!error) continue;
    parser.finish();
    co_return true;
  }
}

// The problem; empty: none.
asio::awaitable<std::string> HttpClient::Impl::exchange(OpenCall& open) {
  for (bool first = true;; first = false) {
    const bool reused = first && !idle.empty();
    if (reused) {
      open.stream = std::move(idle.back());
      idle.pop_back();
    } else {
      std::string problem = co_await connect(open);
      if (!problem.empty()) co_return problem;
    }
    std::string body;
    HttpResponseParser parser([&](std::string_view piece) { body += piece; });
    const std::string request = request_text(open.call);
    ErrorCode error = co_await open.stream->write(request);
    bool answered = false;
    if (!error) answered = co_await receive(open, parser, body);
    if (answered) {
      if (parser.keep_alive() && parser.done()) idle.push_back(std::move(open.stream));
      co_return std::string();
    }
    // A kept connection may have been closed meanwhile: once more on a new one.
    if (!reused || open.timed_out || open.cancelled)
      co_return std::string("the connection was closed without a response");
  }
}

asio::awaitable<void> HttpClient::Impl::perform(HttpCallId id, std::shared_ptr<OpenCall> open) {
  if (open->call.timeout_ns > 0) {
    open->timer.emplace(io, std::chrono::nanoseconds(open->call.timeout_ns));
    open->timer->async_wait([open](const ErrorCode& error) {
      if (error) return;
      open->timed_out = true;
      if (open->stream) open->stream->close_now();
    });
  }
  std::string problem;
  try {
    problem = co_await exchange(*open);
  } catch (const Error& error) {
    problem = error.what();
  }
  if (open->timer) open->timer->cancel();
  if (!problem.empty() && open->timed_out) problem = "timed out";
  if (open->cancelled) problem = "cancelled";
  open->stream.reset();
  calls.erase(id);
  if (open->call.on_done) open->call.on_done(problem);
}

HttpClient::HttpClient(HttpUrl url, const std::string& ca_file)
    : impl_(std::make_unique<Impl>(std::move(url), ca_file)) {}

HttpClient::~HttpClient() {
  for (auto& [id, open] : impl_->calls)
    if (open->stream) open->stream->close_now();
  impl_->calls.clear();
  impl_->idle.clear();
}

HttpCallId HttpClient::start(HttpCall call) {
  const HttpCallId id{impl_->next_id++};
  auto open = std::make_shared<OpenCall>();
  open->call = std::move(call);
  impl_->calls[id] = open;
  asio::co_spawn(impl_->io, impl_->perform(id, std::move(open)), asio::detached);
  return id;
}

void HttpClient::cancel(HttpCallId id) {
  const auto found = impl_->calls.find(id);
  if (found == impl_->calls.end()) return;
  found->second->cancelled = true;
  if (found->second->stream) found->second->stream->close_now();
}

void HttpClient::after(int64_t ns, std::function<void()> work) {
  auto timer = std::make_shared<asio::steady_timer>(impl_->io, std::chrono::nanoseconds(ns));
  timer->async_wait([timer, work = std::move(work)](const ErrorCode& error) {
    if (!error) work();
  });
}

void HttpClient::run(int64_t most_ns) {
  impl_->io.restart();
  if (most_ns > 0)
    impl_->io.run_for(std::chrono::nanoseconds(most_ns));
  else
    impl_->io.run();
}

void HttpClient::stop() { impl_->io.stop(); }
void HttpClient::post(std::function<void()> work) { asio::post(impl_->io, std::move(work)); }
const HttpUrl& HttpClient::url() const { return impl_->url; }
int64_t HttpClient::num_open() const { return static_cast<int64_t>(impl_->calls.size()); }

HttpResponse fetch(const HttpUrl& url, HttpCall call, const std::string& ca_file) {
  HttpClient client(url, ca_file);
  HttpResponse response;
  std::string problem;
  call.on_head = [&](int status, const std::vector<HttpHeader>& headers) {
    response.status = status;
    response.headers = headers;
  };
  call.on_body = [&](std::string_view piece) { response.body += piece; };
  call.on_done = [&](const std::string& what) { problem = what; };
  client.start(std::move(call));
  client.run();
  MEGATRON_CHECK(problem.empty(), problem);
  if (const std::string* type = find_header(response.headers, "Content-Type"))
    response.content_type = *type;
  return response;
}

}  // namespace megatron
