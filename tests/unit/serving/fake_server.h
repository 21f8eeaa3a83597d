// A server over the fake engine, with a byte-level tokenizer and a small chat template.
#pragma once

#include <memory>
#include <string>

#include "fake_engine.h"
#include "megatron/serving/api_server.h"

namespace megatron {

struct FakeServer {
  explicit FakeServer(ServeConfig given = {}, ServeLimits limits = {},
                      FakeEngineOptions engine_options = {});
  ~FakeServer();

  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<ChatTemplate> chat_template;
  ServedModel model;
  std::unique_ptr<FakeEngine> engine;
  std::unique_ptr<ApiServer> server;
  int port() const { return server->port(); }
};

}  // namespace megatron
