// Which tokens a text may go on with: asked before a token is drawn, told what was drawn. What
// compiles grammars implements it (inference/grammar.h), and so do simple ones of tests.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "megatron/base/check.h"
#include "megatron/scheduling/grammar_kind.h"

namespace megatron {

// Words of a mask over ids: id i is bit i % 32 of word i / 32.
constexpr int64_t token_mask_words(int64_t vocab_size) { return (vocab_size + 31) / 32; }
inline bool is_allowed(std::span<const uint32_t> mask, int32_t id) {
  return (mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0;
}

// Follows one text. Used by one thread at a time.
class TokenMatcher {
 public:
  virtual ~TokenMatcher() = default;

  // Sets the bits of the ids that may come next and clears all others; ends of the text are among
  // them where it may end, and only there. None is set after the end, or if nothing fits. Throws
  // Error.
  virtual void fill(std::span<uint32_t> mask) = 0;
  // Appends a token. False: it does not fit, and nothing has changed.
  virtual bool accept(int32_t id) = 0;
  // Takes back the last `count` tokens that were accepted.
  virtual void roll_back(int64_t count) = 0;
  // Whether an end was accepted.
  virtual bool has_ended() const = 0;
};

// Safe to use from several threads.
class TokenGrammar {
 public:
  virtual ~TokenGrammar() = default;
  // At the beginning of a text. A matcher may outlive its grammar.
  virtual std::unique_ptr<TokenMatcher> start() const = 0;
};

struct GrammarText {
  GrammarKind kind = GrammarKind::kJson;
  std::string text;
  auto operator<=>(const GrammarText&) const = default;
};

// The grammar is at fault: malformed, not built, or beyond the limits. The message has no subject:
// "the keyword not is not built".
class GrammarError : public Error {
 public:
  using Error::Error;
};

// Safe to use from several threads.
class GrammarSource {
 public:
  virtual ~GrammarSource() = default;
  // Takes time. Throws GrammarError, and Error if there are no grammars here: the message says why.
  virtual std::shared_ptr<const TokenGrammar> compile(const GrammarText& grammar) = 0;
};

}  // namespace megatron
