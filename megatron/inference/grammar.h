// Grammars that a generated text must follow: JSON schemas, regular expressions, EBNF, structural
// tags. xgrammar compiles and matches them, in a shared library that is loaded with the first
// grammar (`make grammars` builds it); without it every grammar is refused with the reason.
//
// A grammar comes from a request and may be hostile: what is larger or deeper than the limits is
// refused at once, and the rest is compiled in a process of its own, which ends at the limits of
// time and memory, and tries how long a text takes. A text that takes longer for a token than it
// may ends with an error.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/inference/grammar/grammar_api.h"
#include "megatron/scheduling/token_grammar.h"

namespace megatron {

class Tokenizer;
struct ProcessResult;

struct GrammarLimits {
  int64_t text_bytes = 64 << 10;
  int depth = 32;  // of JSON, of parentheses
  int64_t compile_ms = 2000;
  int64_t compile_bytes = int64_t{512} << 20;  // memory of the process that compiles
  int64_t compiled_bytes = int64_t{64} << 20;  // of the result
  int64_t token_ms = 500;                      // processor time for one token of a text
  int64_t cached = 64;                         // compiled grammars that are kept
};

// Safe to use from several threads.
class GrammarCompiler : public GrammarSource {
 public:
  // `vocab_size`: ids of the model, at least those of the tokenizer. `ends`: ids that end a text.
  // Loads nothing.
  GrammarCompiler(const Tokenizer& tokenizer, int64_t vocab_size, std::vector<int32_t> ends,
                  GrammarLimits limits = {});
  ~GrammarCompiler() override;

  // Takes up to compile_ms, unless the grammar is among those kept.
  std::shared_ptr<const TokenGrammar> compile(const GrammarText& grammar) override;

  // "", or why there are no grammars.
  static std::string unavailable();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Throws GrammarError for texts beyond the limits and for schemas with keywords that are not built.
void check_grammar(const GrammarText& grammar, const GrammarLimits& limits);

// The compiled grammar, from the end of the process that compiles. Throws GrammarError if the
// grammar is at fault, RetryError if the program could not even start.
std::string compiled_text(ProcessResult result, const GrammarLimits& limits,
                          const std::filesystem::path& program);

}  // namespace megatron
