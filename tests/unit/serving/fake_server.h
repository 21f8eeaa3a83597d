// A server over the fake engine, with a byte-level tokenizer and a small chat template.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "fake_engine.h"
#include "megatron/serving/api_server.h"

namespace megatron {

// Remembers what it is asked for; a text with "wrong" in it is wrong, one with "absent" finds no
// library.
class FakeGrammars final : public GrammarSource {
 public:
  std::shared_ptr<const TokenGrammar> compile(const GrammarText& grammar) override;
  GrammarText last() const;

 private:
  mutable std::mutex mutex_;
  GrammarText last_;
};

struct FakeServer {
  explicit FakeServer(ServeConfig given = {}, ServeLimits limits = {},
                      FakeEngineOptions engine_options = {});
  ~FakeServer();

  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<ChatTemplate> chat_template;
  FakeGrammars grammars;
  ServedModel model;
  std::unique_ptr<FakeEngine> engine;
  std::unique_ptr<ApiServer> server;
  int port() const { return server->port(); }
};

}  // namespace megatron
