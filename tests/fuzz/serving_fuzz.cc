// For any bytes, the HTTP parser ends with a request, a fault, or a wish for more; any body is read
// as a request or refused. The result does not depend on how bytes are cut. A run is 4,000 inputs
// of each kind, or MEGATRON_FUZZ_SECONDS for each.
#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/utf8.h"
#include "megatron/serving/api_error.h"
#include "megatron/serving/detail/json_fault.h"
#include "megatron/serving/detail/json_input.h"
#include "megatron/serving/generation_request.h"
#include "megatron/serving/http/http_parser.h"
#include "megatron/serving/tool_calls.h"
#include "tests/fuzz/repeat.h"

namespace megatron {
namespace {

const std::string kMessages[] = {
    "GET /v1/models?x=y HTTP/1.1\r\nHost: localhost:8000\r\nConnection: keep-alive, "
    "Upgrade\r\n\r\n",
    "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 11\r\nExpect: 100-continue\r\n\r\n"
    "{\"prompt\":1}",
    "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5;a=\"b\\\"\"\r\nabcde\r\n"
    "1F\r\n0123456789012345678901234567890\r\n0\r\nTrailer: x\r\n\r\nGET / HTTP/1.0\r\n\r\n",
    "\r\n\r\nPUT http://a/api HTTP/1.1\r\nhost: a\r\nX: \t y \r\n\r\n",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
};
const std::string kBodies[] = {
    R"({"prompt": ["a", "b"], "max_tokens": 5, "stop": ["x"], "logit_bias": {"5": 1.5}, "stream": true,
        "stream_options": {"include_usage": true}, "n": 2, "seed": 18446744073709551615})",
    R"({"prompt": [[1, 2], [3]], "echo": true, "logprobs": 3, "temperature": 1e-5, "top_p": 0.5})",
    R"({"messages": [{"role": "system", "content": "a\u00e9\ud83d\ude00"}, {"role": "user", "content":
        [{"type": "text", "text": "b"}]}, {"role": "assistant", "tool_calls": [{"id": "1", "function":
        {"name": "f", "arguments": "{\"x\": [1]}"}}]}, {"role": "tool", "content": "c"}], "tools":
        [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type":
        "string"}}}}}], "tool_choice": "auto", "chat_template_kwargs": {"a": 1}, "logprobs": true})",
    R"({"prompts": ["a"], "tokens_to_generate": 5, "top_k": 3, "add_BOS": true, "stop_on_eol": true})",
};
const std::string kParts[] = {"\r\n",
                              "\r\n\r\n",
                              "\n",
                              "\r",
                              ":",
                              " ",
                              "\t",
                              "chunked",
                              "Transfer-Encoding: chunked\r\n",
                              "Content-Length: 5\r\n",
                              "0\r\n",
                              "ffffffffffffffff",
                              "-1",
                              ";",
                              "\"",
                              "\\",
                              "Host: b\r\n",
                              "{",
                              "}",
                              "[",
                              "]",
                              "[[[[[[[[",
                              ",",
                              "null",
                              "true",
                              "1e999",
                              "123456789012345678901",
                              "NaN",
                              "\\ud800",
                              "\xff",
                              "\xc3\xa9",
                              "<tool_call>",
                              "</tool_call>",
                              "{\"name\":\"f\",\"arguments\":",
                              "<function=f>",
                              "<parameter=x>",
                              "</parameter>",
                              "</function>",
                              "\"prompt\":",
                              "\"messages\":"};

class ServingFuzz : public ::testing::Test {
 protected:
  void repeat(int count, const std::function<void()>& body) {
    repeat_with_seeds(count, [&](uint32_t seed) {
      random_.seed(seed);
      body();
    });
  }
  size_t below(size_t limit) { return random_() % limit; }
  std::string mutated(std::string text) {
    for (size_t n = below(6); n > 0; --n) {
      const size_t at = below(text.size() + 1);
      switch (below(5)) {
        case 0:
          text.insert(at, kParts[below(std::size(kParts))]);
          break;
        case 1:
          text.erase(at, below(8));
          break;
        case 2:
          if (at < text.size()) text[at] = static_cast<char>(random_());
          break;
        case 3:
          text.insert(at, text.substr(below(text.size() + 1), below(40)));
          break;
        default:
          text.insert(at, std::string(below(300), static_cast<char>(random_())));
      }
    }
    return text;
  }
  std::mt19937 random_;
};

// What a connection would see of `bytes`, fed in pieces of `size` (0: all at once).
std::string read_requests(const std::string& bytes, size_t size) {
  const HttpParserLimits limits{
      .max_header_bytes = 512, .max_header_fields = 8, .max_body_bytes = 64};
  std::string out, pending;
  size_t at = 0;
  const auto more = [&] {
    if (at >= bytes.size()) return false;
    const size_t length = size == 0 ? bytes.size() : size;
    pending += bytes.substr(at, length);
    at += length;
    return true;
  };
  for (int requests = 0; requests < 20; ++requests) {
    HttpRequestParser parser(limits);
    while (!parser.done()) {
      const size_t before = pending.size();
      const bool had_header = parser.header_done();
      parser.advance(pending);
      if (parser.fault()) return out + cat("fault ", parser.fault()->status);
      if (parser.done() || parser.header_done() != had_header) continue;
      if (pending.size() < before) continue;
      if (!more()) return out + "more";
    }
    const HttpRequest& request = parser.request();
    EXPECT_LE(request.body.size(), 64u);
    out += cat(request.method, " ", request.path, "?", request.query, " ", request.headers.size(),
               " ", request.body, " ", parser.keep_alive(), "\n");
    if (pending.empty() && !more()) return out;
  }
  return out;
}

TEST_F(ServingFuzz, Requests) {
  repeat(4000, [&] {
    const std::string bytes =
        mutated(kMessages[below(std::size(kMessages))]) +
        (below(2) == 0 ? mutated(kMessages[below(std::size(kMessages))]) : "");
    const std::string whole = read_requests(bytes, 0);
    const std::string pieces = read_requests(bytes, 1 + below(7));
    // Limits are noticed earlier in pieces: a fault may then have another status.
    if (whole.find("fault") == std::string::npos && pieces.find("fault") == std::string::npos) {
      ASSERT_EQ(whole, pieces) << bytes;
    }
  });
}

TEST_F(ServingFuzz, Responses) {
  repeat(4000, [&] {
    std::string body, pending = mutated(kMessages[4]);
    HttpResponseParser parser([&](std::string_view piece) { body += piece; });
    try {
      parser.advance(pending);
      parser.finish();
    } catch (const Error&) {
    }
  });
}

class Bodies : public ServingFuzz {
 protected:
  Bodies() {
    TokenizerConfig config;
    config.tokenizer_type = "ByteLevelTokenizer";
    tokenizer_ = make_tokenizer(config);
    model_.name = "m";
    model_.tokenizer = tokenizer_.get();
    model_.chat_template = model_.tool_template = &template_;
    model_.tool_format = ToolFormat::kHermes;
    model_.end_tokens = {256};
    model_.limits = {.vocab_size = 257, .max_positions = 1000};
  }
  std::unique_ptr<Tokenizer> tokenizer_;
  ChatTemplate template_{"{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}", "t"};
  ServedModel model_;
};

TEST_F(Bodies, AreReadOrRefused) {
  const ServeLimits limits;
  int read = 0, refused = 0;
  repeat(4000, [&] {
    const size_t kind = below(std::size(kBodies));
    const std::string body = mutated(kBodies[kind]);
    try {
      GenerationRequest request = kind < 2    ? parse_completion(body, model_, limits)
                                  : kind == 2 ? parse_chat(body, model_, limits)
                                              : parse_api(body, model_, limits);
      prepare(request, model_, 0);
      ++read;
    } catch (const ApiError& error) {
      ++refused;
      ASSERT_TRUE(error.status == 400 || error.status == 404) << error.what();
      // The answer is JSON, whatever the member was.
      const std::string json = error_json(error, ErrorShape::kOpenAi);
      ASSERT_TRUE(is_valid_utf8(json));
      ASSERT_FALSE(find_json_fault(json, 8));
    }
  });
  EXPECT_GT(read, 0);
  EXPECT_GT(refused, 0);
}

// The parser and the search for faults agree on what JSON is.
TEST_F(Bodies, FaultsAreFound) {
  repeat(4000, [&] {
    const std::string body = mutated(kBodies[below(std::size(kBodies))]);
    bool good = true;
    try {
      JsonDocument(body, 64).root();
    } catch (const ApiError& error) {
      good = std::string(error.what()).find("the body is no JSON") == std::string::npos;
    }
    const auto fault = find_json_fault(body, 63);
    ASSERT_EQ(good, !fault) << body << " " << (fault ? fault->what : "");
  });
}

TEST_F(ServingFuzz, ToolCalls) {
  repeat(4000, [&] {
    std::string text;
    for (size_t n = below(12); n > 0; --n) text += kParts[below(std::size(kParts))];
    text = mutated(text);
    for (const ToolFormat format :
         {ToolFormat::kHermes, ToolFormat::kLlama3Json, ToolFormat::kQwen3Coder}) {
      std::string results[2];
      for (const bool pieces : {false, true}) {
        const auto parser = make_tool_call_parser(format, {});
        std::string content, calls;
        int index = -1;
        const auto add = [&](const ToolCallText& out) {
          content += out.content;
          for (const ToolCallDelta& call : out.calls) {
            if (!call.name.empty()) ++index;
            ASSERT_EQ(call.index, index);
            calls += call.name.empty() ? call.arguments : "|" + call.name + "|";
          }
        };
        for (size_t at = 0; at < text.size();) {
          const size_t length = pieces ? 1 + below(5) : text.size();
          add(parser->push(text.substr(at, length)));
          at += length;
        }
        add(parser->finish());
        results[pieces] = content + "#" + calls;
      }
      ASSERT_EQ(results[0], results[1]) << text;
    }
  });
}

}  // namespace
}  // namespace megatron
