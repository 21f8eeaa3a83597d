#include "megatron/scheduling/text_output.h"

#include <utility>

namespace megatron {

TextOutput::TextOutput(const Tokenizer& tokenizer, const StopConditions& conditions,
                       std::shared_ptr<const StopAutomaton> automaton)
    : tokenizer_(tokenizer),
      conditions_(conditions),
      decoder_(tokenizer),
      stop_(std::move(automaton), conditions.include_stop_text) {}

std::string TextOutput::push(int32_t id) {
  const bool passes = ++tokens_ < conditions_.min_tokens;
  // Models may have ids without text.
  if (id >= tokenizer_.vocab_size()) return {};
  if (conditions_.skip_special_tokens && tokenizer_.is_special(id)) return {};
  const std::string piece = decoder_.push(id);
  return passes ? stop_.pass(piece) : stop_.push(piece);
}

std::string TextOutput::finish() {
  std::string piece = stop_.push(decoder_.finish());
  return piece + stop_.finish();
}

}  // namespace megatron
