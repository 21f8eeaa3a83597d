// Keys, and names of hosts and origins.
#include "megatron/serving/request_guard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <fstream>

#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using ::testing::HasSubstr;

class ApiKeysTest : public ::testing::Test {
 protected:
  ApiKeysTest() : path_(::testing::TempDir() + cat("/keys-", ::getpid())) {}
  ~ApiKeysTest() override { std::filesystem::remove(path_); }
  ApiKeys read(const std::string& text) {
    std::ofstream(path_) << text;
    std::filesystem::permissions(
        path_, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
    return ApiKeys(path_);
  }
  std::filesystem::path path_;
};

TEST_F(ApiKeysTest, OfAFile) {
  const ApiKeys keys = read("# clients\n\nalice:0123456789abcdef\r\n bob:fedcba9876543210:admin\n");
  EXPECT_EQ(keys.find("0123456789abcdef")->name, "alice");
  EXPECT_FALSE(keys.find("0123456789abcdef")->admin);
  EXPECT_TRUE(keys.find("fedcba9876543210")->admin);
  for (const char* const wrong : {"", "0123456789abcde", "0123456789abcdefg", "0123456789abcdeF",
                                  "alice", "fedcba9876543210:admin"})
    EXPECT_FALSE(keys.find(wrong)) << wrong;
}

TEST_F(ApiKeysTest, BadFilesAreNamed) {
  const auto error = [&](const std::string& text) { return error_of([&] { read(text); }); };
  EXPECT_THAT(error(""), HasSubstr("holds no keys"));
  EXPECT_THAT(error("alice\n"), HasSubstr(":1: expected NAME:KEY or NAME:KEY:admin"));
  EXPECT_THAT(error("\nalice:short\n"),
              HasSubstr(":2: the key has 5 characters, expected at least 16"));
  EXPECT_THAT(error("a:0123456789abcdef\nb:0123456789abcdef\n"),
              HasSubstr(":2: this key is given twice"));
  EXPECT_THAT(error("a:0123456789abcdef\na:fedcba9876543210\n"),
              HasSubstr(":2: the name a is given twice"));
  EXPECT_THAT(error("a:0123456789 abcdef\n"), HasSubstr(":1: the key has a colon or a blank"));
  EXPECT_THAT(error_of([] { ApiKeys("/nowhere/keys"); }), HasSubstr("/nowhere/keys"));
}

int64_t thread_cpu_ns() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

// Comparing takes as long for a key that is nearly right as for one that is not.
TEST_F(ApiKeysTest, TimeTellsNothing) {
  std::string text;
  for (int i = 0; i < 50; ++i)
    text += cat("client", i, ":", 1'000'000'000 + i, "0123456789abcdef\n");
  const ApiKeys keys = read(text);
  const std::string tried[] = {"10000000000123456789abcdef",   // the first
                               "10000000490123456789abcdef",   // the last
                               "1000000049012345678901234x",   // nearly
                               "x0000000490123456789abcdef"};  // not at all
  int64_t least[4] = {INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX};
  for (int round = 0; round < 40; ++round)
    for (size_t i = 0; i < 4; ++i) {
      const int64_t begin = thread_cpu_ns();
      for (int k = 0; k < 100; ++k) keys.find(tried[i]);
      least[i] = std::min(least[i], thread_cpu_ns() - begin);
    }
  EXPECT_LT(static_cast<double>(*std::max_element(least, least + 4)),
            1.3 * static_cast<double>(*std::min_element(least, least + 4)));
}

HttpRequest request_with(std::vector<HttpHeader> headers) {
  HttpRequest request;
  request.headers = std::move(headers);
  return request;
}

TEST(RequestGuard, KeysOfHeaders) {
  const auto key = [](const std::string& value) {
    return key_of(request_with({{"authorization", value}}));
  };
  EXPECT_EQ(key("Bearer abc"), "abc");
  EXPECT_EQ(key("bearer   abc "), "abc");
  EXPECT_EQ(key("Basic dXNlcjpwYXNz"), "pass");           // user:pass
  EXPECT_EQ(key("Basic OnBhc3M6d29yZA=="), "pass:word");  // :pass:word
  for (const char* const none : {"abc", "Digest abc", "Basic !!!", "Basic dXNlcg==", ""})
    EXPECT_EQ(key(none), "") << none;
  EXPECT_EQ(key_of(HttpRequest()), "");
}

TEST(RequestGuard, HostsAndOrigins) {
  const auto allowed = [](const std::string& host, const HostRules& rules,
                          const std::string& origin = "") {
    std::vector<HttpHeader> headers = {{"Host", host}};
    if (!origin.empty()) headers.push_back({"Origin", origin});
    return !check_host(request_with(headers), rules);
  };
  const HostRules local, open{.loopback_only = false}, keyed{.loopback_only = false, .any = true},
      named{.names = {"chat.example"}};
  for (const char* const host :
       {"localhost", "localhost:8000", "127.0.0.1:1", "[::1]", "[::1]:80", "LOCALHOST"}) {
    EXPECT_TRUE(allowed(host, local)) << host;
    EXPECT_TRUE(allowed(host, open)) << host;
  }
  for (const char* const host : {"evil.example", "evil.example:8000", "localhost.evil.example",
                                 "127.0.0.1.evil.example", "", "localhost:80x", "[::1", "8.8.8.8"})
    EXPECT_FALSE(allowed(host, local)) << host;
  EXPECT_TRUE(allowed("10.0.0.5:8000", open));
  EXPECT_TRUE(allowed("[fe80::1]:8000", open));
  EXPECT_FALSE(allowed("evil.example", open));
  EXPECT_TRUE(allowed("anything.example", keyed));
  EXPECT_TRUE(allowed("chat.example:443", named));
  EXPECT_TRUE(allowed("localhost:8000", local, "http://localhost:8000"));
  EXPECT_TRUE(allowed("localhost:8000", named, "https://chat.example"));
  for (const char* const origin : {"http://evil.example", "null", "http://localhost:9000",
                                   "http://localhost", "localhost:8000"})
    EXPECT_FALSE(allowed("localhost:8000", local, origin)) << origin;
  EXPECT_FALSE(allowed("anything.example", keyed, "http://evil.example"));
  HttpRequest old;
  old.version = 10;
  EXPECT_FALSE(check_host(old, local));
}

}  // namespace
}  // namespace megatron
