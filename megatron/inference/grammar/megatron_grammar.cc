// The shared library megatron_grammar: xgrammar behind a C interface. C++ exceptions, types and
// symbols of xgrammar stay inside. What xgrammar only warns about, leaving it out of the grammar,
// is an error here: a text would not be what was asked for.
#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "megatron/inference/grammar/grammar_api.h"

namespace {

using megatron::GrammarKind;

// What xgrammar says that it leaves out of a grammar that it compiles on this thread.
thread_local std::string* left_out = nullptr;

// One line without a final period.
std::string plain_message(std::string text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == '.')) text.pop_back();
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

void put_message(const std::string& text, char* error, int64_t error_bytes) {
  const size_t count = std::min(text.size(), static_cast<size_t>(error_bytes - 1));
  std::memcpy(error, text.data(), count);
  error[count] = '\0';
}

// Calls the body; after an exception it gives `failed`, and the message.
template <class Result, class Body>
Result guarded(Result failed, char* error, int64_t error_bytes, const Body& body) {
  try {
    return body();
  } catch (const std::exception& problem) {
    put_message(plain_message(problem.what()), error, error_bytes);
  } catch (...) {
    put_message("xgrammar failed without a message", error, error_bytes);
  }
  return failed;
}

struct Vocabulary {
  xgrammar::TokenizerInfo info;
};
struct Grammar {
  xgrammar::CompiledGrammar compiled;
};
struct Matcher {
  xgrammar::GrammarMatcher matcher;
};

xgrammar::CompiledGrammar compile(const xgrammar::TokenizerInfo& info, GrammarKind kind,
                                  const std::string& text) {
  xgrammar::GrammarCompiler compiler(info, /*max_threads=*/1, /*cache_enabled=*/false);
  switch (kind) {
    case GrammarKind::kJson:
      return compiler.CompileBuiltinJSONGrammar();
    case GrammarKind::kJsonSchema:
      // White space is bounded: a model that goes on with it would never end.
      return compiler.CompileJSONSchema(text, /*any_whitespace=*/true, std::nullopt, std::nullopt,
                                        /*strict_mode=*/true, /*max_whitespace_cnt=*/4);
    case GrammarKind::kRegex:
      return compiler.CompileRegex(text);
    case GrammarKind::kEbnf:
      return compiler.CompileGrammar(text);
    case GrammarKind::kStructuralTag:
      return compiler.CompileStructuralTag(text);
  }
  throw std::runtime_error("no such kind of grammar");
}

void fill_mask(xgrammar::GrammarMatcher& matcher, uint32_t* mask, int64_t words) {
  DLTensor tensor{};
  int64_t shape[] = {words};
  tensor.data = mask;
  tensor.device = {kDLCPU, 0};
  tensor.ndim = 1;
  tensor.dtype = xgrammar::GetBitmaskDLType();
  tensor.shape = shape;
  matcher.FillNextTokenBitmask(&tensor);
}

// The ids of a mask, without those that end a text where there are others.
std::vector<int32_t> allowed_ids(const std::vector<uint32_t>& mask,
                                 const std::vector<int32_t>& ends) {
  std::vector<int32_t> ids, ending;
  for (size_t id = 0; id < 32 * mask.size(); ++id) {
    if ((mask[id / 32] >> (id % 32) & 1) == 0) continue;
    const auto allowed = static_cast<int32_t>(id);
    (std::count(ends.begin(), ends.end(), allowed) > 0 ? ending : ids).push_back(allowed);
  }
  return ids.empty() ? ending : ids;
}

// Some grammars compile fast and are slow to follow: ((a*)*)* keeps a state for each way to read a
// text, and there are exponentially many.
void follow_a_text(const xgrammar::CompiledGrammar& compiled, const xgrammar::TokenizerInfo& info,
                   int64_t token_ms) {
  constexpr int kTokens = 32;
  xgrammar::GrammarMatcher matcher(compiled);
  std::vector<uint32_t> mask(static_cast<size_t>(info.GetVocabSize() + 31) / 32);
  uint32_t random = 1;
  for (int i = 0; i < kTokens && !matcher.IsTerminated(); ++i) {
    const int64_t begin = megatron::thread_ms();
    fill_mask(matcher, mask.data(), static_cast<int64_t>(mask.size()));
    const std::vector<int32_t> ids = allowed_ids(mask, info.GetStopTokenIds());
    if (ids.empty()) return;
    random = random * 1664525u + 1013904223u;
    matcher.AcceptToken(ids[(random >> 8) % ids.size()]);
    if (megatron::thread_ms() - begin > token_ms)
      throw std::runtime_error("takes more than " + std::to_string(token_ms) +
                               " ms for one token of a text");
  }
}

}  // namespace

// xgrammar's log (XGRAMMAR_LOG_CUSTOMIZE).
namespace xgrammar {
[[noreturn]] void LogFatalImpl(const std::string&, int, const std::string& message);
void LogFatalImpl(const std::string&, int, const std::string& message) {
  throw std::runtime_error(message);
}
void LogMessageImpl(const std::string&, int, int level, const std::string& message);
void LogMessageImpl(const std::string&, int, int level, const std::string& message) {
  constexpr int kWarning = 2;
  if (level == kWarning && left_out != nullptr && left_out->empty()) *left_out = message;
}
}  // namespace xgrammar

extern "C" {

#define MEGATRON_GRAMMAR_EXPORT __attribute__((visibility("default")))

MEGATRON_GRAMMAR_EXPORT void* megatron_grammar_vocabulary(const char* bytes, const int32_t* lengths,
                                                          int32_t num_tokens, int32_t vocab_size,
                                                          const int32_t* ends, int32_t num_ends,
                                                          char* error, int64_t error_bytes) {
  return guarded<void*>(nullptr, error, error_bytes, [&]() -> void* {
    std::vector<std::string> tokens;
    tokens.reserve(static_cast<size_t>(num_tokens));
    for (int32_t id = 0; id < num_tokens; ++id) {
      tokens.emplace_back(bytes, static_cast<size_t>(lengths[id]));
      bytes += lengths[id];
    }
    return new Vocabulary{xgrammar::TokenizerInfo(tokens, xgrammar::VocabType::RAW, vocab_size,
                                                  std::vector<int32_t>(ends, ends + num_ends))};
  });
}

MEGATRON_GRAMMAR_EXPORT void megatron_grammar_free_vocabulary(void* vocabulary) {
  delete static_cast<Vocabulary*>(vocabulary);
}

MEGATRON_GRAMMAR_EXPORT bool megatron_grammar_compile(
    void* vocabulary, int32_t kind, const char* text, int64_t text_bytes, int64_t token_ms,
    void (*write)(void* context, const char* bytes, int64_t count), void* context, char* error,
    int64_t error_bytes) {
  return guarded(false, error, error_bytes, [&] {
    std::string warning;
    left_out = &warning;
    const xgrammar::TokenizerInfo& info = static_cast<Vocabulary*>(vocabulary)->info;
    const xgrammar::CompiledGrammar compiled = compile(
        info, static_cast<GrammarKind>(kind), std::string(text, static_cast<size_t>(text_bytes)));
    left_out = nullptr;
    if (!warning.empty()) throw std::runtime_error(warning);
    follow_a_text(compiled, info, token_ms);
    const std::string result = compiled.SerializeJSON();
    write(context, result.data(), static_cast<int64_t>(result.size()));
    return true;
  });
}

MEGATRON_GRAMMAR_EXPORT void* megatron_grammar_load(void* vocabulary, const char* bytes,
                                                    int64_t count, char* error,
                                                    int64_t error_bytes) {
  return guarded<void*>(nullptr, error, error_bytes, [&]() -> void* {
    auto loaded = xgrammar::CompiledGrammar::DeserializeJSON(
        std::string(bytes, static_cast<size_t>(count)), static_cast<Vocabulary*>(vocabulary)->info);
    if (auto* problem = std::get_if<xgrammar::SerializationError>(&loaded))
      std::visit([](const auto& error) { throw std::runtime_error(error.what()); }, *problem);
    return new Grammar{std::get<xgrammar::CompiledGrammar>(std::move(loaded))};
  });
}

MEGATRON_GRAMMAR_EXPORT void megatron_grammar_free(void* grammar) {
  delete static_cast<Grammar*>(grammar);
}

MEGATRON_GRAMMAR_EXPORT void* megatron_grammar_start(void* grammar, char* error,
                                                     int64_t error_bytes) {
  return guarded<void*>(nullptr, error, error_bytes, [&]() -> void* {
    return new Matcher{xgrammar::GrammarMatcher(static_cast<Grammar*>(grammar)->compiled)};
  });
}

MEGATRON_GRAMMAR_EXPORT int32_t megatron_grammar_fill(void* matcher, uint32_t* mask, int64_t words,
                                                      char* error, int64_t error_bytes) {
  return guarded<int32_t>(-1, error, error_bytes, [&] {
    fill_mask(static_cast<Matcher*>(matcher)->matcher, mask, words);
    return 1;
  });
}

MEGATRON_GRAMMAR_EXPORT int32_t megatron_grammar_accept(void* matcher, int32_t id, char* error,
                                                        int64_t error_bytes) {
  return guarded<int32_t>(-1, error, error_bytes, [&] {
    return static_cast<Matcher*>(matcher)->matcher.AcceptToken(id) ? 1 : 0;
  });
}

MEGATRON_GRAMMAR_EXPORT int32_t megatron_grammar_roll_back(void* matcher, int64_t count,
                                                           char* error, int64_t error_bytes) {
  return guarded<int32_t>(-1, error, error_bytes, [&] {
    static_cast<Matcher*>(matcher)->matcher.Rollback(static_cast<int>(count));
    return 1;
  });
}

MEGATRON_GRAMMAR_EXPORT bool megatron_grammar_has_ended(void* matcher) {
  return static_cast<Matcher*>(matcher)->matcher.IsTerminated();
}

MEGATRON_GRAMMAR_EXPORT void megatron_grammar_free_matcher(void* matcher) {
  delete static_cast<Matcher*>(matcher);
}
}
