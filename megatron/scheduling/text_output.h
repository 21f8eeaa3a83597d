// The text of generated tokens, piece by piece.
#pragma once

#include <memory>
#include <string>

#include "megatron/scheduling/request.h"
#include "megatron/scheduling/stop_text.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

// Keeps references to both arguments.
class TextOutput {
 public:
  // `automaton`: of conditions.stop_texts; null where there are none.
  TextOutput(const Tokenizer& tokenizer, const StopConditions& conditions,
             std::shared_ptr<const StopAutomaton> automaton);

  // The text that is final now. Stop texts are looked for from the token `min_tokens` on.
  std::string push(int32_t id);
  // The rest, when the text ends and match() is -1. It may complete a stop text.
  std::string finish();
  int32_t match() const { return stop_.match(); }  // index of the stop text; -1: none

 private:
  const Tokenizer& tokenizer_;
  const StopConditions& conditions_;
  StreamDecoder decoder_;
  StopText stop_;
  int64_t tokens_ = 0;
};

}  // namespace megatron
