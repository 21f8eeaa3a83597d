// The HTTP layer by itself, with a handler that echoes: framing, deadlines, limits, clients that
// leave.
#include "megatron/serving/http/http_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <mutex>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/serving/http/http_parser.h"
#include "raw_client.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMs = 1'000'000;

// "/echo" answers with the body, "/stream" in pieces until told to end, "/hold" never.
class EchoHandler : public HttpHandler {
 public:
  std::optional<HttpResponse> refuse(const HttpRequest& head) override {
    if (head.path == "/forbidden") return fault_response(403, "no");
    return std::nullopt;
  }
  void handle(std::shared_ptr<HttpExchange> exchange) override {
    const std::string path = exchange->request().path;
    exchange->on_abort([this](HttpAbort why) {
      why_ = static_cast<int>(why);
      ++aborts_;
    });
    if (path == "/echo") {
      exchange->respond({.content_type = "text/plain",
                         .body = cat(exchange->request().method, " ", exchange->request().body)});
    } else if (path == "/pieces") {
      exchange->begin({.content_type = "text/plain", .body = "one "});
      exchange->write("two ");
      exchange->write("");
      exchange->write("three");
      exchange->end();
    } else if (path == "/drop") {
      exchange->begin({.content_type = "text/plain", .body = "one "});
    } else if (path == "/fail") {
      throw_error("planned");
    } else {
      if (path == "/stream") exchange->begin({.content_type = "text/plain"});
      const std::lock_guard lock(mutex_);
      held_.push_back(exchange);
    }
  }
  HttpResponse fault_response(int status, std::string_view message) override {
    return {.status = status, .body = cat("{\"fault\":\"", message, "\"}")};
  }

  // The next exchange that is held; waits for it.
  std::shared_ptr<HttpExchange> take() {
    for (int i = 0; i < 1000; ++i) {
      {
        const std::lock_guard lock(mutex_);
        if (!held_.empty()) {
          auto exchange = held_.front();
          held_.erase(held_.begin());
          return exchange;
        }
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    throw_error("no exchange came");
  }

  std::atomic<int> aborts_{0}, why_{-1};

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<HttpExchange>> held_;
};

// Until `claim` holds, at most 10 s.
template <class Claim>
bool becomes_true(Claim&& claim) {
  for (int i = 0; i < 2000; ++i) {
    if (claim()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

class HttpServerTest : public ::testing::Test {
 protected:
  HttpServerTest() {
    options_.port = 0;
    options_.limits.parser.max_body_bytes = 1000;
    options_.limits.parser.max_header_bytes = 2048;
    options_.limits.parser.max_header_fields = 20;
  }
  int start() {
    server_ = std::make_unique<HttpServer>(options_, handler_);
    server_->start();
    return server_->port();
  }
  RawResponse ask(std::string_view bytes) {
    RawClient client(server_->port());
    client.send(bytes);
    return client.response();
  }

  EchoHandler handler_;
  HttpServerOptions options_;
  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, OneConnectionServesRequestsInOrder) {
  RawClient client(start());
  client.send(post_request("/echo", "a") + post_request("/echo", "b") + get_request("/pieces"));
  EXPECT_EQ(client.response().body, "POST a");
  EXPECT_EQ(client.response().body, "POST b");
  const RawResponse pieces = client.response();
  EXPECT_EQ(pieces.body, "one two three");
  EXPECT_EQ(*find_header(pieces.headers, "transfer-encoding"), "chunked");
  client.send("\r\n" + get_request("/echo"));
  EXPECT_EQ(client.response().body, "GET ");
  EXPECT_EQ(server_->counts().requests, 4u);
  EXPECT_EQ(server_->counts().open, 1);
}

TEST_F(HttpServerTest, BodiesComeInAnyPieces) {
  const std::string request =
      "POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
      "3;name=\"a\"\r\nabc\r\n1\r\nd\r\n0\r\nTrailer: x\r\n\r\n";
  RawClient client(start());
  for (const char c : request) client.send(std::string_view(&c, 1));
  EXPECT_EQ(client.response().body, "POST abcd");
  for (size_t cut = 1; cut < request.size(); cut += 7) {
    client.send(request.substr(0, cut));
    client.send(request.substr(cut) + request);
    EXPECT_EQ(client.response().body, "POST abcd");
    EXPECT_EQ(client.response().body, "POST abcd");
  }
}

// Beast's parser would end the process at "0", line end, and half of another.
TEST(HttpParsers, EmptyBodiesInChunksComeInAnyPieces) {
  for (const std::string last : {"0\r\n\r\n", "00\r\n\r\n", "0;a=b\r\n\r\n", "0\r\nX: y\r\n\r\n"})
    for (size_t size = 1; size <= last.size(); ++size) {
      HttpRequestParser request({});
      HttpResponseParser response([](std::string_view) { FAIL() << "a body"; });
      std::string pending = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
      std::string received = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
      request.advance(pending);
      response.advance(received);
      for (size_t at = 0; at < last.size(); at += size) {
        ASSERT_FALSE(request.done() || response.done());
        pending += last.substr(at, size);
        received += last.substr(at, size);
        request.advance(pending);
        response.advance(received);
      }
      EXPECT_TRUE(request.done() && response.done()) << last << " by " << size;
      EXPECT_EQ(request.request().body, "");
      EXPECT_EQ(pending + received, "");
    }
}

TEST_F(HttpServerTest, OlderClientsAndHead) {
  start();
  RawClient old(server_->port());
  old.send("GET /pieces HTTP/1.0\r\n\r\n");
  const RawResponse pieces = old.response();
  EXPECT_EQ(pieces.body, "one two three");
  EXPECT_EQ(find_header(pieces.headers, "Transfer-Encoding"), nullptr);
  EXPECT_TRUE(old.closed_within(5));
  RawClient client(server_->port());
  client.send("HEAD /pieces HTTP/1.1\r\nHost: x\r\n\r\n" +
              get_request("/echo", "Connection: close\r\n"));
  std::string all;
  while (client.read_some(all, 10)) {
  }
  EXPECT_THAT(all, ::testing::StartsWith("HTTP/1.1 200 OK\r\nServer: megatron\r\nDate: "));
  EXPECT_THAT(all, HasSubstr("\r\n\r\nHTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(all, ::testing::EndsWith("Connection: close\r\n\r\nGET "));
}

TEST_F(HttpServerTest, ContinueComesBeforeTheBody) {
  RawClient client(start());
  client.send(
      "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n");
  std::string interim;
  client.read_some(interim, 10);
  EXPECT_EQ(interim, "HTTP/1.1 100 Continue\r\n\r\n");
  client.send("ok");
  EXPECT_EQ(client.response().body, "POST ok");
  // A refused request is not asked for its body.
  client.send(
      "POST /forbidden HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n");
  EXPECT_EQ(client.response().status, 403);
  EXPECT_TRUE(client.closed_within(5));
}

TEST_F(HttpServerTest, RefusedRequestsWithoutABodyKeepTheConnection) {
  RawClient client(start());
  client.send(get_request("/forbidden"));
  EXPECT_EQ(client.response().status, 403);
  client.send(get_request("/echo"));
  EXPECT_EQ(client.response().status, 200);
}

TEST_F(HttpServerTest, LimitsOfHeaderAndBody) {
  start();
  EXPECT_EQ(ask(get_request("/echo", "A: " + std::string(3000, 'x') + "\r\n")).status, 431);
  EXPECT_EQ(ask(get_request("/" + std::string(3000, 'x'))).status, 431);
  std::string fields;
  for (int i = 0; i < 25; ++i) fields += cat("A", i, ": b\r\n");
  EXPECT_EQ(ask(get_request("/echo", fields)).status, 431);
  EXPECT_EQ(ask(post_request("/echo", std::string(1001, 'x'))).status, 413);
  EXPECT_EQ(ask(post_request("/echo", std::string(1000, 'x'))).status, 200);
  // The length alone is enough.
  EXPECT_EQ(ask("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 10737418240\r\n\r\n").status,
            413);
  const std::string chunked =
      "POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
  EXPECT_EQ(ask(chunked + "3e8\r\n" + std::string(1000, 'x') + "\r\n1\r\nx\r\n0\r\n\r\n").status,
            413);
  EXPECT_EQ(ask(chunked + "ffffffffffffffff\r\n").status, 413);
  EXPECT_EQ(ask(chunked + "1;" + std::string(4000, 'x')).status, 431);
  EXPECT_EQ(ask(chunked + "0\r\nA: " + std::string(4000, 'x')).status, 431);
}

TEST_F(HttpServerTest, SlowRequestsEndAtTheirDeadline) {
  options_.limits.header_timeout_ns = 300 * kMs;
  options_.limits.body_timeout_ns = 300 * kMs;
  options_.limits.idle_timeout_ns = 600 * kMs;
  start();
  RawClient header(server_->port()), body(server_->port()), idle(server_->port());
  header.send("GET /echo HTTP/1.1\r\nHost: x\r\n");
  body.send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab");
  EXPECT_EQ(header.response(5).status, 408);
  EXPECT_EQ(body.response(5).status, 408);
  EXPECT_TRUE(idle.closed_within(5));
  header.close();
  body.close();
  EXPECT_TRUE(becomes_true([&] { return server_->counts().open == 0; }));
  EXPECT_EQ(server_->counts().faults, 2u);
}

TEST_F(HttpServerTest, ClientsThatLeaveAreNoticed) {
  start();
  for (const char* path : {"/stream", "/hold"}) {
    for (const bool hard : {false, true}) {
      const int before = handler_.aborts_;
      RawClient client(server_->port());
      client.send(get_request(path));
      const auto exchange = handler_.take();
      EXPECT_EQ(server_->counts().responding, 1);
      hard ? client.reset() : client.close();
      EXPECT_TRUE(becomes_true([&] { return handler_.aborts_ == before + 1; }));
      EXPECT_EQ(handler_.why_, static_cast<int>(HttpAbort::kClientGone));
      EXPECT_TRUE(becomes_true([&] { return server_->counts().responding == 0; }));
    }
  }
  EXPECT_EQ(server_->counts().client_gone, 4u);
  EXPECT_TRUE(becomes_true([&] { return server_->counts().open == 0; }));
}

TEST_F(HttpServerTest, AConnectionClosesThoughAnExchangeIsKept) {
  RawClient client(start());
  client.send(get_request("/hold"));
  const auto exchange = handler_.take();
  exchange->post([exchange] { exchange->respond({.body = "whole"}); });
  EXPECT_EQ(client.response().body, "whole");
  client.half_close();
  EXPECT_TRUE(client.closed_within(10));
  EXPECT_TRUE(becomes_true([&] { return server_->counts().open == 0; }));
}

TEST_F(HttpServerTest, ReadersThatDoNotReadAreCutOff) {
  options_.limits.max_unread_bytes = 200'000;
  options_.limits.send_timeout_ns = 500 * kMs;
  start();
  RawClient slow(server_->port(), 4096);
  slow.send(get_request("/stream"));
  auto exchange = handler_.take();
  // More than sockets hold, in pieces that are below the limit.
  for (int i = 0; i < 2000 && handler_.aborts_ == 0; ++i) {
    exchange->post([exchange] { exchange->write(std::string(10'000, 'x')); });
    if (i % 10 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(becomes_true([&] { return handler_.aborts_ == 1; }));
  EXPECT_EQ(handler_.why_, static_cast<int>(HttpAbort::kSlowReader));
  // One that takes nothing for too long, with little output.
  RawClient stuck(server_->port(), 4096);
  stuck.send(get_request("/stream"));
  auto other = handler_.take();
  for (int i = 0; i < 100; ++i) {
    other->post([other] { other->write(std::string(100'000, 'x')); });
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(becomes_true([&] { return handler_.aborts_ == 2; }));
  EXPECT_EQ(server_->counts().slow_readers, 2u);
}

TEST_F(HttpServerTest, ExchangesThatEndBadly) {
  start();
  EXPECT_EQ(ask(get_request("/fail")).status, 500);
  // One that is given up in the middle closes the connection, and no response looks complete.
  const RawResponse dropped = ask(get_request("/drop"));
  EXPECT_EQ(dropped.body, "one ");
  EXPECT_FALSE(dropped.complete);
}

TEST_F(HttpServerTest, ConnectionsAreCounted) {
  options_.limits.max_connections = 2;
  start();
  RawClient first(server_->port()), second(server_->port());
  first.send(get_request("/echo"));
  second.send(get_request("/echo"));
  EXPECT_EQ(first.response().status, 200);
  EXPECT_EQ(second.response().status, 200);
  RawClient third(server_->port());
  const RawResponse refused = third.response();
  EXPECT_EQ(refused.status, 503);
  EXPECT_EQ(*find_header(refused.headers, "Retry-After"), "1");
  EXPECT_TRUE(third.closed_within(5));
  second.close();
  EXPECT_TRUE(becomes_true([&] { return server_->counts().open == 1; }));
  EXPECT_EQ(ask(get_request("/echo")).status, 200);
  EXPECT_EQ(server_->counts().refused, 1u);
}

TEST_F(HttpServerTest, APortInUseIsRefused) {
  start();
  HttpServerOptions same = options_;
  same.port = server_->port();
  EXPECT_THAT(error_of([&] { HttpServer again(same, handler_); }),
              HasSubstr(cat("cannot listen on 127.0.0.1 port ", same.port,
                            ": Address already in "
                            "use\nhint: another program listens there")));
  same.host = "no.such.host.invalid";
  EXPECT_THAT(error_of([&] { HttpServer again(same, handler_); }), HasSubstr("has no address"));
  EXPECT_TRUE(is_loopback_host("localhost"));
  EXPECT_TRUE(is_loopback_host("::1"));
  EXPECT_FALSE(is_loopback_host("0.0.0.0"));
}

TEST_F(HttpServerTest, DrainingFinishesWhatHasBegun) {
  start();
  RawClient idle(server_->port()), busy(server_->port()), late(server_->port());
  idle.send(get_request("/echo"));
  EXPECT_EQ(idle.response().status, 200);
  busy.send(get_request("/stream"));
  const auto exchange = handler_.take();
  server_->drain();
  EXPECT_TRUE(idle.closed_within(5));
  exchange->post([exchange] {
    exchange->write("done");
    exchange->end();
  });
  EXPECT_EQ(busy.response().body, "done");
  EXPECT_TRUE(busy.closed_within(5));
  // New connections are still answered, so that routers learn of it.
  const RawResponse response = ask(get_request("/echo"));
  EXPECT_EQ(response.status, 200);
  EXPECT_EQ(*find_header(response.headers, "Connection"), "close");
}

TEST_F(HttpServerTest, StoppingCutsOffResponses) {
  start();
  RawClient client(server_->port());
  client.send(get_request("/stream"));
  const auto exchange = handler_.take();
  server_->stop();
  EXPECT_EQ(handler_.why_, static_cast<int>(HttpAbort::kServerStop));
  EXPECT_FALSE(client.response().complete);
  server_.reset();
  exchange->post([] { FAIL(); });  // there is no thread for it any more
}

// The timer expires while the thread is busy: it cannot be cancelled when the server stops.
TEST_F(HttpServerTest, StoppingEndsABusyThread) {
  start();
  server_->post(0, [] { std::this_thread::sleep_for(std::chrono::milliseconds(250)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  server_->stop();
}

// What the thread posts to itself does not fall behind what another posts after it.
TEST_F(HttpServerTest, PostsRunInTheOrderOfTheCalls) {
  start();
  std::vector<int> order;
  std::promise<void> done;
  server_->post(0, [&] {
    server_->post(0, [&] { order.push_back(1); });
    std::thread([&] {
      server_->post(0, [&] {
        order.push_back(2);
        done.set_value();
      });
    }).join();
  });
  done.get_future().wait();
  server_->stop();
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

TEST_F(HttpServerTest, ThreadsHaveConnectionsOfTheirOwn) {
  options_.threads = 2;
  start();
  std::vector<std::unique_ptr<RawClient>> clients;
  std::vector<std::shared_ptr<HttpExchange>> held;
  for (int i = 0; i < 6; ++i) {
    clients.push_back(std::make_unique<RawClient>(server_->port()));
    clients.back()->send(get_request("/stream"));
    held.push_back(handler_.take());
  }
  for (const auto& exchange : held)
    server_->post(exchange->shard(), [exchange] {
      exchange->write(cat("shard ", exchange->shard()));
      exchange->end();
    });
  int of_second = 0;
  for (const auto& client : clients) of_second += client->response().body == "shard 1";
  EXPECT_EQ(of_second, 3);
}

}  // namespace
}  // namespace megatron
