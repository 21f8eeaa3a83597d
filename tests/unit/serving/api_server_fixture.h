// A test of a server over the fake engine.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "ask.h"
#include "fake_server.h"

namespace megatron {

class ApiServerTest : public ::testing::Test {
 protected:
  Answer completions(const Json& body, const std::string& headers = "") {
    return post(fake().port(), "/v1/completions", body.dump(), headers);
  }
  Answer chat(const Json& body, const std::string& headers = "") {
    return post(fake().port(), "/v1/chat/completions", body.dump(), headers);
  }
  static Json hello() { return {{"messages", {{{"role", "user"}, {"content", "hello"}}}}}; }
  FakeServer& fake() {
    if (!fake_) fake_ = std::make_unique<FakeServer>(config_, limits_, engine_);
    return *fake_;
  }
  RequestSpec spec() { return fake().engine->last_spec(); }
  void reply_with(const std::string& text) {
    const auto ids = fake().tokenizer->encode(text);
    fake().engine->set_script([ids](const RequestSpec&, int32_t) { return ids; });
  }

  ServeConfig config_;
  ServeLimits limits_;
  FakeEngineOptions engine_{.step_ns = 100'000};
  std::unique_ptr<FakeServer> fake_;
};

}  // namespace megatron
