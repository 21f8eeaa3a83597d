// Raw requests of which servers and proxies have been known to read different things, or to fall
// over: each is answered with the right status or the connection is closed, and the server goes on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <set>
#include <thread>

#include "ask.h"
#include "megatron/base/check.h"

namespace megatron {
namespace {

// What must come back: exactly one response, with one of these statuses.
struct RawRequest {
  std::string name, bytes;
  std::set<int> statuses;
};

constexpr char kBody[] = "{\"prompt\":\"a\",\"max_tokens\":1}";  // 29 bytes, 1d in hexadecimal

std::string completion(const std::string& headers, const std::string& body = kBody,
                       const std::string& version = "HTTP/1.1") {
  return cat("POST /v1/completions ", version, "\r\nHost: localhost\r\n", headers, "\r\n", body);
}

void add_lengths(std::vector<RawRequest>& out) {
  const std::string chunks = cat("1d\r\n", kBody, "\r\n0\r\n\r\n");
  const std::string smuggled = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n";
  for (const char* const length :
       {"-1", "+29", "29,29", "29, 32", "0x1d", "3 1", "29;", "1e1", " ", "99999999999999999999",
        "18446744073709551647", "-0", "\t", "thirty-one"})
    out.push_back({cat("Content-Length: ", length),
                   completion(cat("Content-Length: ", length, "\r\n")),
                   {400, 413}});
  out.push_back(
      {"two equal lengths", completion("Content-Length: 29\r\nContent-Length: 29\r\n"), {400}});
  out.push_back({"two lengths", completion("Content-Length: 29\r\nContent-Length: 0\r\n"), {400}});
  out.push_back({"two lengths, the other way",
                 completion("Content-Length: 0\r\ncontent-length: 29\r\n"),
                 {400}});
  out.push_back({"10 GiB declared", completion("Content-Length: 10737418240\r\n", ""), {413}});
  out.push_back(
      {"CL.TE", completion("Content-Length: 29\r\nTransfer-Encoding: chunked\r\n", chunks), {400}});
  out.push_back(
      {"TE.CL", completion("Transfer-Encoding: chunked\r\nContent-Length: 29\r\n", chunks), {400}});
  out.push_back(
      {"CL.TE with a request behind",
       completion("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n" + smuggled),
       {400}});
  out.push_back({"TE.CL with a request behind",
                 completion("Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
                            "5c\r\n" + smuggled + "0\r\n\r\n"),
                 {400}});
  for (const char* const encoding :
       {"identity", "gzip", "gzip, chunked", "chunked, identity", "chunked, chunked", "xchunked",
        "chunkedx", "\"chunked\"", "chunked;q=1", ",chunked", "chunked,", "deflate", "cow"})
    out.push_back({cat("Transfer-Encoding: ", encoding),
                   completion(cat("Transfer-Encoding: ", encoding, "\r\n"), chunks),
                   {400, 501}});
  out.push_back(
      {"two encodings",
       completion("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", chunks),
       {400, 501}});
  out.push_back({"two equal encodings",
                 completion("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", chunks),
                 {400}});
  for (const char* const header :
       {"Transfer-Encoding : chunked\r\n", " Transfer-Encoding: chunked\r\n",
        "Transfer-Encoding\t: chunked\r\n",
        "Transfer-Encoding:\x0b"
        "chunked\r\n",
        "Transfer-Encoding: chunked\n", "X: y\r\n Transfer-Encoding: chunked\r\n",
        "Transfer-Encoding:\r\n chunked\r\n", "Transfer\xc3\xa9-Encoding: chunked\r\n",
        "X: y\rTransfer-Encoding: chunked\r\n"})
    out.push_back({cat("hidden encoding ", header), completion(header, chunks), {400, 501}});
  for (const char* const header :
       {"Content-Length : 29\r\n", " Content-Length: 29\r\n", "Content-Length\t: 29\r\n",
        "Content Length: 29\r\n", "Content_Length: 29\r\n", "Content-Length:\n29\r\n",
        "Content-Length: 29\n", "X: y\r\n Content-Length: 29\r\n", "X: y\rContent-Length: 29\r\n",
        "Content-Length;29\r\n", "\"Content-Length\": 29\r\n", "Content-Length\xc2\xa0: 29\r\n"})
    out.push_back({cat("hidden length ", header), completion(header), {400}});
  out.push_back({"chunks in HTTP/1.0",
                 completion("Transfer-Encoding: chunked\r\n", chunks, "HTTP/1.0"),
                 {400}});
}

void add_chunks(std::vector<RawRequest>& out) {
  const auto chunked = [&](const std::string& name, const std::string& body,
                           std::set<int> statuses) {
    out.push_back({"chunks: " + name, completion("Transfer-Encoding: chunked\r\n", body),
                   std::move(statuses)});
  };
  const std::string body = kBody;
  chunked("in order", cat("1d\r\n", body, "\r\n0\r\n\r\n"), {200});
  chunked("capitals and zeros", cat("0000000001D\r\n", body, "\r\n0\r\n\r\n"), {200});
  chunked("an extension", cat("1d;a=b;c=\"d\"\r\n", body, "\r\n0\r\n\r\n"), {200});
  chunked("a trailer", cat("1d\r\n", body, "\r\n0\r\nX: y\r\n\r\n"), {200});
  chunked("a trailer that changes the length",
          cat("1d\r\n", body, "\r\n0\r\nContent-Length: 5\r\n\r\n"), {200, 400});
  chunked("a trailer that changes the key",
          cat("1d\r\n", body, "\r\n0\r\nAuthorization: x\r\nHost: evil\r\n\r\n"), {200, 400});
  for (const char* const size :
       {"-1", "+1d", "-ffffffe1", "0x1d", "1g", "", " 1d", "\t", "g", "1d 0", "1d\x01", "f_1"})
    chunked(cat("size ", size), cat(size, "\r\n", body, "\r\n0\r\n\r\n"), {400});
  chunked("size beyond 64 bits", cat("fffffffffffffffff\r\n", body), {400, 413});
  chunked("size of 64 bits", cat("ffffffffffffffff\r\n", body), {400, 413});
  chunked("size of 63 bits", cat("7fffffffffffffff\r\n", body), {400, 413});
  chunked("size above the limit", cat("800001\r\n", body), {413});
  chunked("no line feed after the size", cat("1d\r", body, "\r\n0\r\n\r\n"), {400});
  chunked("a line feed alone after the size", cat("1d\n", body, "\r\n0\r\n\r\n"), {400});
  chunked("no line end after the data", cat("1d\r\n", body, "0\r\n\r\n"), {400});
  chunked("data longer than its size", cat("1e\r\n", body, "\r\n0\r\n\r\n"), {400});
  chunked("a size line without end", std::string(20'000, '1'), {400, 413, 431});
  chunked("an extension without end", "1d;" + std::string(20'000, 'a'), {400, 431});
  chunked("a trailer without end", cat("1d\r\n", body, "\r\n0\r\nX: ", std::string(20'000, 'a')),
          {400, 431});
  chunked("an open quote in an extension", cat("1d;a=\"b\r\n", body, "\r\n0\r\n\r\n"), {400});
  std::string tiny;
  for (const char c : body) tiny += cat("1\r\n", c, "\r\n");
  chunked("of one byte each", tiny + "0\r\n\r\n", {200});
}

void add_heads(std::vector<RawRequest>& out) {
  const auto line = [&](const std::string& name, const std::string& bytes, std::set<int> statuses) {
    out.push_back({"head: " + name, bytes, std::move(statuses)});
  };
  line("in order", "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", {200});
  line("empty lines before", "\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", {200});
  line("no host", "GET /health HTTP/1.1\r\n\r\n", {400});
  line("two hosts", "GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", {400});
  line("an empty host", "GET /health HTTP/1.1\r\nHost:\r\n\r\n", {403});
  for (const char* const host :
       {"evil.example", "localhost@evil.example", "localhost:80:80", "localhost\tx", "localhost/",
        "localhost#", "127.0.0.1.evil.example", "[::1", "localhost,evil.example", "\xff", "*",
        "2130706433", "0.0.0.0"})
    line(cat("host ", host), cat("GET /health HTTP/1.1\r\nHost: ", host, "\r\n\r\n"), {400, 403});
  for (const char* const version :
       {"HTTP/1.2", "HTTP/2.0", "HTTP/0.9", "HTTP/11", "HTTP/1", "HTTP/1.", "HTTP/.1", "HTTP/1.1.1",
        "http/1.1", "HTTP/1.10", "HTTP/+1.1", "HTTPS/1.1", "SIP/2.0", "", "HTTP/1.1 "})
    line(cat("version ", version), cat("GET /health ", version, "\r\nHost: localhost\r\n\r\n"),
         {400, 505});
  line("HTTP/2's preface", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 505});
  line("TLS",
       std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11) + std::string(300, 'x') +
           "\r\n\r\n",
       {400});
  line("a proxy's line",
       "PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
       {400, 505});
  line("CONNECT", "CONNECT evil.example:443 HTTP/1.1\r\nHost: localhost\r\n\r\n", {400});
  line("another server's URL", "GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
       {400});
  line("OPTIONS *", "OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", {400});
  for (const char* const method :
       {"OPTIONS", "TRACE", "DELETE", "PATCH", "PUT", "get", "GETS", "PROPFIND"})
    line(cat("method ", method), cat(method, " /health HTTP/1.1\r\nHost: localhost\r\n\r\n"),
         {405});
  for (const char* const method : {"G ET", "GE\tT", "G\x01T", "\xc3\xa9", "", "GET:"})
    line(cat("method ", method), cat(method, " /health HTTP/1.1\r\nHost: localhost\r\n\r\n"),
         {400, 505});
  for (const char* const target :
       {"health", "/health\x01", "/hea lth", "/health\x7f", "?", "#", "\\health", "//health",
        "/../health", "/%68ealth", "/health/", "/health/../health", "/health%00", "/HEALTH",
        "/health;x", "/./health", "/admin/status/..", "/v1/models/../../admin/status"})
    line(cat("target ", target), cat("GET ", target, " HTTP/1.1\r\nHost: localhost\r\n\r\n"),
         {400, 404, 505});
  line("a long target",
       cat("GET /", std::string(20'000, 'a'), " HTTP/1.1\r\nHost: localhost\r\n\r\n"), {431});
  line("a long method", cat(std::string(20'000, 'A'), " / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
       {431});
  line("a long field",
       cat("GET / HTTP/1.1\r\nHost: localhost\r\nX: ", std::string(20'000, 'a'), "\r\n\r\n"),
       {431});
  std::string many = "GET /health HTTP/1.1\r\nHost: localhost\r\n";
  for (int i = 0; i < 1000; ++i) many += "A: b\r\n";
  line("many fields", many + "\r\n", {431});
  std::string endless = "GET /health HTTP/1.1\r\nHost: localhost\r\n";
  for (int i = 0; i < 10'000; ++i) endless += "A: b\r\n";
  line("fields without end", endless, {431});
  line("line feeds alone", "GET /health HTTP/1.1\nHost: localhost\n\n", {400});
  line("carriage returns alone", "GET /health HTTP/1.1\rHost: localhost\r\r", {400});
  using std::string_literals::operator""s;
  line("a zero", "GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n"s, {400});
  line("a folded line", "GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n", {400});
  line("a field without a colon", "GET /health HTTP/1.1\r\nHost: localhost\r\nX\r\n\r\n", {400});
  line("a field without a name", "GET /health HTTP/1.1\r\nHost: localhost\r\n: x\r\n\r\n", {400});
  line("a blank in a name", "GET /health HTTP/1.1\r\nHost: localhost\r\nX Y: x\r\n\r\n", {400});
  for (char c = 1; c < ' '; ++c)
    if (c != '\t')
      line(cat("character ", static_cast<int>(c), " in a value"),
           cat("GET /health HTTP/1.1\r\nHost: localhost\r\nX: a", std::string(1, c), "b\r\n\r\n"),
           {400});
  line("a foreign origin",
       "GET /health HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n\r\n", {403});
  line("a null origin", "GET /health HTTP/1.1\r\nHost: localhost\r\nOrigin: null\r\n\r\n", {403});
  line("a preflight",
       "OPTIONS /v1/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n"
       "Access-Control-Request-Method: POST\r\n\r\n",
       {403});
  line("Expect", completion("Content-Length: 29\r\nExpect: 200-maybe\r\n"), {417});
  line("Upgrade",
       "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
       {200});
  line("a bad Connection", "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: \"\r\n\r\n",
       {400});
  line("random bytes", "\x80\x81\x82\x83\xff\xfe\r\n\r\n", {400});
}

std::vector<RawRequest> corpus() {
  std::vector<RawRequest> out;
  add_lengths(out);
  add_chunks(out);
  add_heads(out);
  return out;
}

TEST(Abuse, RawRequests) {
  FakeServer fake({}, {}, {.step_ns = 100'000});
  const std::vector<RawRequest> requests = corpus();
  EXPECT_GE(requests.size(), 200u);
  for (const RawRequest& request : requests) {
    const auto begin = std::chrono::steady_clock::now();
    RawClient client(fake.port());
    client.send(request.bytes);
    const RawResponse response = client.response(5);
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    EXPECT_TRUE(request.statuses.contains(response.status))
        << request.name << ": " << response.status << " " << response.body.substr(0, 200);
    EXPECT_LT(seconds, 2.0) << request.name;
    if (response.status >= 400) {
      const Json json = Json::parse(response.body, nullptr, false);
      EXPECT_TRUE(json.is_object() && json.contains("error")) << request.name;
    }
    // Nothing behind a request that is no HTTP is read as another one.
    const std::string* const connection = find_header(response.headers, "Connection");
    if (connection != nullptr && *connection == "close") {
      client.half_close();
      std::string rest = client.unread();
      while (client.read_some(rest, 5)) {
      }
      EXPECT_EQ(rest, "") << request.name;
    }
  }
  EXPECT_EQ(get(fake.port(), "/health").status, 200);
  EXPECT_EQ(fake.server->num_open(), 0u);
}

}  // namespace
}  // namespace megatron
