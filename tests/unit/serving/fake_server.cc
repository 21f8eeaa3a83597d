#include "fake_server.h"

#include <algorithm>

#include "megatron/base/failure_class.h"

namespace megatron {
namespace {

// With "blow_up" it takes more steps than templates may.
constexpr char kTemplate[] = R"(
{%- if tools %}tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}{{ "\n" }}{% endif %}
{%- for message in messages %}
  {{- message.role + ": " + message.content + "\n" }}
  {%- for call in message.tool_calls or [] %}
    {{- "<tool_call>" + call.function.name + (call.function.arguments | tojson) + "</tool_call>\n" }}
  {%- endfor %}
{%- endfor %}
{%- if blow_up %}
  {%- for i in range(10000) %}{% for j in range(10000) %}{% endfor %}{% endfor %}
{%- endif %}
{%- if add_generation_prompt %}{{ "assistant: " }}{% endif %})";

// Allows everything and never ends.
class AnyText final : public TokenGrammar {
 public:
  std::unique_ptr<TokenMatcher> start() const override { return std::make_unique<Matcher>(); }

 private:
  class Matcher final : public TokenMatcher {
    void fill(std::span<uint32_t> mask) override { std::ranges::fill(mask, ~uint32_t{0}); }
    bool accept(int32_t) override { return true; }
    void roll_back(int64_t) override {}
    bool has_ended() const override { return false; }
  };
};

}  // namespace

std::shared_ptr<const TokenGrammar> FakeGrammars::compile(const GrammarText& grammar) {
  if (grammar.text.find("wrong") != std::string::npos) throw GrammarError("is wrong");
  if (grammar.text.find("absent") != std::string::npos) throw Error("the library is not there");
  if (grammar.text.find("broken") != std::string::npos)
    throw RetryError("the compiler does not start");
  const std::lock_guard lock(mutex_);
  last_ = grammar;
  return std::make_shared<const AnyText>();
}

GrammarText FakeGrammars::last() const {
  const std::lock_guard lock(mutex_);
  return last_;
}

FakeServer::FakeServer(ServeConfig given, ServeLimits limits, FakeEngineOptions engine_options) {
  TokenizerConfig tokens;
  tokens.tokenizer_type = "ByteLevelTokenizer";
  tokenizer = make_tokenizer(tokens);
  chat_template = std::make_unique<ChatTemplate>(kTemplate, "template");
  model.name = "fake";
  model.adapters = {"fake-adapter"};
  model.created = 1'700'000'000;
  model.tokenizer = tokenizer.get();
  model.chat_template = model.tool_template = chat_template.get();
  model.tool_format = ToolFormat::kHermes;
  model.grammars = &grammars;
  model.end_tokens = model.chat_end_tokens = {*tokenizer->eod()};
  model.limits = {.vocab_size = tokenizer->vocab_size(),
                  .max_positions = 4096,
                  .num_adapters = 1,
                  .max_choices = static_cast<int32_t>(limits.max_choices),
                  .max_stop_texts = static_cast<int32_t>(limits.max_stop_texts),
                  .max_stop_text_bytes = limits.max_stop_text_bytes,
                  .max_logit_bias = static_cast<int32_t>(limits.max_logit_bias)};
  engine = std::make_unique<FakeEngine>(*tokenizer, model.limits, engine_options);
  given.port = 0;
  server = std::make_unique<ApiServer>(given, limits, *engine, model);
  server->start();
}

FakeServer::~FakeServer() {
  server->stop();
  engine.reset();
}

}  // namespace megatron
