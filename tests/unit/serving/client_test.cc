// The client side: URLs, events, TLS, conversations and load against the fake server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <set>
#include <thread>

#include "ask.h"
#include "megatron/base/check.h"
#include "megatron/serving/bench/load_generator.h"
#include "megatron/serving/client/chat_client.h"
#include "megatron/serving/http/http_client.h"
#include "megatron/serving/http/sse.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(HttpUrls, AreRead) {
  const auto read = [](const char* text) {
    const HttpUrl url = parse_url(text);
    return cat(url.tls ? "tls " : "", url.host, " ", url.port, " ", url.path, " ",
               url.host_header());
  };
  EXPECT_EQ(read("http://127.0.0.1:8000"), "127.0.0.1 8000  127.0.0.1:8000");
  EXPECT_EQ(read("https://chat.example/base/"), "tls chat.example 443 /base chat.example:443");
  EXPECT_EQ(read("localhost:81"), "localhost 81  localhost:81");
  EXPECT_EQ(read("http://[::1]:9/"), "::1 9  [::1]:9");
  EXPECT_EQ(read("http://[::1]"), "::1 80  [::1]:80");
  for (const char* const bad : {"", "http://", "ftp://x", "http://x:0", "http://x:65536", "x:y",
                                "http://[::1", "http://:80"})
    EXPECT_NE(error_of([&] { parse_url(bad); }), "") << bad;
}

TEST(ServerSentEvents, ComeInAnyPieces) {
  const std::string text =
      "data: a\n\n: a comment\n\nevent: error\r\ndata:b\rdata:  c\r\n\r\nid: 5\ndata\n\ndata: rest";
  for (size_t size = 1; size < 12; ++size) {
    SseReader reader;
    std::vector<std::string> events;
    for (size_t at = 0; at < text.size(); at += size)
      reader.push(std::string_view(text).substr(at, size),
                  [&](std::string_view name, std::string_view data) {
                    events.push_back(cat(name, "|", data));
                  });
    EXPECT_THAT(events, ElementsAre("|a", "error|b\n c", "|")) << size;
  }
}

// A certificate of its own authority for "localhost" and 127.0.0.1, and its key.
void write_certificate(const std::string& certificate_file, const std::string& key_file) {
  EVP_PKEY* const key = EVP_EC_gen("P-256");
  X509* const certificate = X509_new();
  X509_set_version(certificate, 2);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate), 1);
  X509_gmtime_adj(X509_getm_notBefore(certificate), -60);
  X509_gmtime_adj(X509_getm_notAfter(certificate), 3600);
  X509_set_pubkey(certificate, key);
  X509_NAME* const name = X509_get_subject_name(certificate);
  X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>("localhost"), -1, -1, 0);
  X509_set_issuer_name(certificate, name);
  X509V3_CTX context;
  X509V3_set_ctx(&context, certificate, certificate, nullptr, nullptr, 0);
  for (const auto& [id, value] : {std::pair{NID_basic_constraints, "critical,CA:TRUE"},
                                  {NID_subject_alt_name, "DNS:localhost,IP:127.0.0.1"}}) {
    X509_EXTENSION* const extension = X509V3_EXT_conf_nid(nullptr, &context, id, value);
    X509_add_ext(certificate, extension, -1);
    X509_EXTENSION_free(extension);
  }
  X509_sign(certificate, key, EVP_sha256());
  std::FILE* file = std::fopen(certificate_file.c_str(), "w");
  PEM_write_X509(file, certificate);
  std::fclose(file);
  file = std::fopen(key_file.c_str(), "w");
  PEM_write_PrivateKey(file, key, nullptr, nullptr, 0, nullptr, nullptr);
  std::fclose(file);
  X509_free(certificate);
  EVP_PKEY_free(key);
}

class ClientTest : public ::testing::Test {
 protected:
  ClientTest() : folder_(::testing::TempDir() + cat("/client-", ::getpid(), "-")) {}
  HttpUrl url(const FakeServer& fake) { return parse_url(fake.server->url()); }
  std::string folder_;
};

TEST_F(ClientTest, Tls) {
  ServeConfig config;
  config.ssl_certfile = folder_ + "cert.pem";
  config.ssl_keyfile = folder_ + "key.pem";
  write_certificate(config.ssl_certfile, config.ssl_keyfile);
  FakeServer fake(config, {}, {.step_ns = 100'000});
  EXPECT_THAT(fake.server->url(), ::testing::StartsWith("https://127.0.0.1:"));
  HttpUrl local = url(fake);
  const HttpResponse response = fetch(local, {.path = "/health"}, config.ssl_certfile);
  EXPECT_EQ(response.status, 200);
  EXPECT_EQ(response.content_type, "application/json");
  const HttpResponse stream =
      fetch(local,
            {.method = "POST",
             .path = "/v1/completions",
             .body = "{\"prompt\":\"abc\",\"stream\":true,\"max_tokens\":300}"},
            config.ssl_certfile);
  EXPECT_TRUE(join(stream.body).done);
  const std::string large(2'000'000, 'a');
  EXPECT_EQ(
      fetch(local,
            {.method = "POST", .path = "/tokenize", .body = cat("{\"prompt\":\"", large, "\"}")},
            config.ssl_certfile)
          .status,
      200);
  // Nobody vouches for it, or it is another's.
  EXPECT_THAT(error_of([&] { fetch(local, {.path = "/health"}); }),
              HasSubstr("no TLS with 127.0.0.1"));
  write_certificate(folder_ + "other.pem", folder_ + "other-key.pem");
  EXPECT_THAT(error_of([&] { fetch(local, {.path = "/health"}, folder_ + "other.pem"); }),
              HasSubstr("no TLS with"));
  local.tls = false;
  EXPECT_NE(error_of([&] { fetch(local, {.path = "/health", .timeout_ns = 5'000'000'000}); }), "");
  // Plain bytes do no harm, and a client that says nothing is closed.
  RawClient plain(fake.port());
  plain.send(get_request("/health"));
  EXPECT_TRUE(plain.closed_within(5));
  config.ssl_keyfile = folder_ + "other-key.pem";
  EXPECT_THAT(error_of([&] { FakeServer again(config); }),
              HasSubstr("other-key.pem holds no private key for the certificate of"));
  config.ssl_certfile = "/nowhere.pem";
  EXPECT_THAT(error_of([&] { FakeServer again(config); }),
              HasSubstr("/nowhere.pem holds no chain of certificates"));
}

TEST_F(ClientTest, CallsShareConnections) {
  FakeServer fake({}, {}, {.step_ns = 100'000});
  HttpClient client(url(fake));
  int done = 0;
  std::string order;
  for (int i = 0; i < 20; ++i)
    client.start({.path = "/health",
                  .on_head = [&](int status, const auto&) { order += status == 200 ? "h" : "?"; },
                  .on_body = [&](std::string_view) { order += "b"; },
                  .on_done =
                      [&](const std::string& problem) {
                        EXPECT_EQ(problem, "");
                        ++done;
                        client.start(
                            {.path = "/health", .on_done = [&](const std::string&) { ++done; }});
                      }});
  client.run();
  EXPECT_EQ(done, 40);
  EXPECT_THAT(order, ::testing::StartsWith("hb"));
  EXPECT_LE(fake.server->counts().accepted, 20u);
  EXPECT_EQ(fake.server->counts().requests, 40u);
}

TEST_F(ClientTest, ProblemsAreTold) {
  FakeServer fake({}, {}, {.step_ns = 5'000'000, .stop_early = false});
  EXPECT_THAT(error_of([&] {
                fetch(url(fake), {.method = "POST",
                                  .path = "/v1/completions",
                                  .body = "{\"prompt\":\"a\",\"max_tokens\":4000}",
                                  .timeout_ns = 200'000'000});
              }),
              "timed out");
  HttpClient client(url(fake));
  std::string problem;
  const HttpCallId id =
      client.start({.method = "POST",
                    .path = "/v1/completions",
                    .body = "{\"prompt\":\"a\",\"max_tokens\":4000,\"stream\":true}",
                    .on_done = [&](const std::string& what) { problem = what; }});
  client.after(100'000'000, [&] { client.cancel(id); });
  client.run();
  EXPECT_EQ(problem, "cancelled");
  HttpUrl nobody = url(fake);
  nobody.port = 1;
  EXPECT_THAT(error_of([&] { fetch(nobody, {}); }),
              HasSubstr("cannot connect to 127.0.0.1:1: Connection refused"));
  nobody.host = "no.such.host.invalid";
  EXPECT_THAT(error_of([&] { fetch(nobody, {}); }),
              HasSubstr("no address for no.such.host.invalid"));
  std::thread stop([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    fake.server->stop();
  });
  EXPECT_THAT(error_of([&] {
                fetch(url(fake),
                      {.method = "POST",
                       .path = "/v1/completions",
                       .body = "{\"prompt\":\"a\",\"max_tokens\":4000,\"stream\":true}"});
              }),
              "the connection was closed before the response ended");
  stop.join();
}

TEST_F(ClientTest, Conversations) {
  FakeServer fake({}, {}, {.step_ns = 100'000});
  ChatClient client(url(fake), "", "", {.system = "be brief"});
  EXPECT_THAT(client.models(), ElementsAre("fake", "fake-adapter"));
  std::string shown;
  const std::atomic<bool> go{false};
  const auto show = [&](std::string_view piece) { shown += piece; };
  const ChatReply reply = client.say("hello", go, show);
  EXPECT_EQ(reply.problem, "");
  EXPECT_EQ(reply.text, shown);
  EXPECT_EQ(reply.finish_reason, "stop");
  EXPECT_EQ(reply.output_tokens, 21);
  EXPECT_EQ(fake.tokenizer->decode(fake.engine->last_spec().prompt),
            "system: be brief\nuser: hello\nassistant: ");
  client.settings().max_tokens = 3;
  client.settings().temperature = 0.0;
  EXPECT_EQ(client.say("more", go, show).finish_reason, "length");
  EXPECT_EQ(
      fake.tokenizer->decode(fake.engine->last_spec().prompt),
      "system: be brief\nuser: hello\nassistant: " + reply.text + "\nuser: more\nassistant: ");
  EXPECT_EQ(client.num_turns(), 2u);
  EXPECT_TRUE(client.undo());
  EXPECT_EQ(client.num_turns(), 1u);
  // A refused message leaves nothing behind.
  client.settings().max_tokens = 5000;
  EXPECT_THAT(client.say("x", go, show).problem, HasSubstr("at most"));
  EXPECT_EQ(client.num_turns(), 1u);
  client.settings().max_tokens.reset();
  fake.engine->fail_with(FinishReason::kNonFinite);
  EXPECT_THAT(client.say("x", go, show).problem, HasSubstr("the model failed"));
  fake.engine->fail_with(FinishReason::kLength);
  client.forget();
  EXPECT_FALSE(client.undo());
  const std::atomic<bool> stop{true};
  EXPECT_EQ(client.say("x", stop, show).problem, "stopped");
  HttpUrl nobody = url(fake);
  nobody.port = 1;
  EXPECT_THAT(error_of([&] { ChatClient(nobody, "", "", {}); }), HasSubstr("cannot connect"));
}

TEST_F(ClientTest, KeysAreAskedFor) {
  ServeConfig config;
  config.api_key_file = folder_ + "keys";
  std::ofstream(config.api_key_file) << "a:0123456789abcdef\n";
  FakeServer fake(config);
  EXPECT_THAT(error_of([&] { ChatClient(url(fake), "", "", {}); }),
              HasSubstr("hint: --api-key-file FILE"));
  EXPECT_EQ(ChatClient(url(fake), "", "0123456789abcdef", {}).models().size(), 2u);
  EXPECT_THAT(error_of([&] { make_http_target(url(fake), "", "", ""); }),
              HasSubstr("hint: --api-key-file"));
}

TEST_F(ClientTest, LoadInAClosedLoop) {
  FakeServer fake({}, {}, {.step_ns = 500'000, .max_running = 100, .stop_early = false});
  const auto target = make_http_target(url(fake), "", "", "");
  const ClientLoad options{.num_requests = 30,
                           .num_warmup = 3,
                           .concurrency = 5,
                           .prompt_tokens = 20,
                           .output_tokens = 10,
                           .prefix_tokens = 8};
  int64_t told = 0;
  const LoadResult result = run_load(*target, options, [&](int64_t ended) { told = ended; });
  const LoadSummary summary = summarise(result);
  EXPECT_EQ(told, 30);
  EXPECT_EQ(summary.completed, 30) << (summary.problems.empty() ? "" : summary.problems[0]);
  EXPECT_EQ(summary.output_tokens, 300);
  EXPECT_EQ(summary.prompt_tokens, 600);
  // Random bytes are often parts of characters, which have no text yet.
  EXPECT_LE(result.requests[0].token_ns.size(), 10u);
  EXPECT_GE(result.requests[0].token_ns.size(), 1u);
  EXPECT_GT(summary.first_token.p50, 0.0);
  EXPECT_GE(summary.whole.p50, summary.first_token.p50);
  EXPECT_EQ(fake.engine->last_spec().stop.max_tokens, 10);
  EXPECT_TRUE(fake.engine->last_spec().stop.end_tokens.empty());
  EXPECT_THAT(summary_text(summary), HasSubstr("30 completed, 0 failed"));
  EXPECT_EQ(Json::parse(summary_json(summary, options))["output_tokens"], 300);
  // The engine without HTTP sees the same requests.
  const auto direct = make_engine_target(*fake.engine, fake.model.limits.vocab_size);
  const LoadSummary inside = summarise(run_load(*direct, options));
  EXPECT_EQ(inside.completed, 30);
  EXPECT_EQ(inside.output_tokens, 300);
  EXPECT_EQ(inside.prompt_tokens, 600);
}

// Ends every request at once, and keeps its prompt.
class PromptsAlone final : public LoadTarget {
 public:
  std::pair<int32_t, int32_t> prompt_ids() const override { return {3, 100'000}; }
  void start(std::vector<int32_t> prompt, const ClientLoad&, uint64_t,
             Callbacks callbacks) override {
    prompts.push_back(std::move(prompt));
    ends.push_back(std::move(callbacks.on_end));
  }
  void after(int64_t, std::function<void()> work) override { work(); }
  void run() override {
    for (size_t i = 0; i < ends.size(); ++i) ends[i](1, 1, "");
    ends.clear();
  }
  std::vector<std::vector<int32_t>> prompts;
  std::vector<std::function<void(int64_t, int64_t, const std::string&)>> ends;
};

// A server's cache of prefixes would have them.
TEST(Load, MeasuredPromptsAreNotThoseOfBefore) {
  PromptsAlone target;
  run_load(target, {.num_requests = 6,
                    .num_warmup = 4,
                    .concurrency = 20,
                    .prompt_tokens = 12,
                    .prefix_tokens = 5});
  ASSERT_EQ(target.prompts.size(), 10U);
  std::set<std::vector<int32_t>> rests, prefixes;
  for (const std::vector<int32_t>& prompt : target.prompts) {
    prefixes.insert({prompt.begin(), prompt.begin() + 5});
    rests.insert({prompt.begin() + 5, prompt.end()});
  }
  EXPECT_EQ(prefixes.size(), 1U);
  EXPECT_EQ(rests.size(), 10U);
}

TEST_F(ClientTest, LoadAtARate) {
  FakeServer fake({}, {}, {.step_ns = 100'000, .max_running = 100, .stop_early = false});
  const auto target = make_http_target(url(fake), "", "", "");
  ClientLoad options{.num_requests = 60,
                     .concurrency = 1000,
                     .request_rate = 200.0,
                     .prompt_tokens = 4,
                     .output_tokens = 2,
                     .seed = 5};
  const LoadResult result = run_load(*target, options);
  EXPECT_EQ(summarise(result).completed, 60);
  // Arrivals are a Poisson process: 59 gaps of 5 ms on average, most of them shorter.
  const double last = static_cast<double>(result.requests.back().start_ns) / 1e9;
  EXPECT_GT(last, 0.15);
  EXPECT_LT(last, 2.0);
  int shorter = 0;
  for (size_t i = 1; i < result.requests.size(); ++i)
    shorter += result.requests[i].start_ns - result.requests[i - 1].start_ns < 5'000'000;
  EXPECT_GT(shorter, 25);
  EXPECT_LT(shorter, 59);
  // Or all at the same distance.
  options.arrivals = ArrivalPattern::kConstant;
  const LoadResult even = run_load(*target, options);
  for (size_t i = 0; i < even.requests.size(); ++i)
    EXPECT_GE(even.requests[i].start_ns, static_cast<int64_t>(i) * 5'000'000);
  EXPECT_LT(even.requests.back().start_ns, 2'000'000'000);
  // Failures are counted, each kind told once.
  fake.engine->fail_with(FinishReason::kNonFinite);
  const LoadSummary failed =
      summarise(run_load(*target, {.num_requests = 3, .prompt_tokens = 1, .output_tokens = 5}));
  EXPECT_EQ(failed.failed, 3);
  EXPECT_THAT(failed.problems, ElementsAre(HasSubstr("the model failed")));
}

TEST(LoadSummaries, Quantiles) {
  const LatencySummary summary =
      summarise(std::vector<int64_t>{4'000'000, 1'000'000, 3'000'000, 2'000'000});
  EXPECT_DOUBLE_EQ(summary.mean, 2.5);
  EXPECT_DOUBLE_EQ(summary.p50, 2.5);
  EXPECT_DOUBLE_EQ(summary.p90, 3.7);
  EXPECT_DOUBLE_EQ(summary.max, 4.0);
  EXPECT_EQ(summarise(std::vector<int64_t>()).p99, 0.0);
}

}  // namespace
}  // namespace megatron
