// C interface of the shared library megatron_grammar, which holds xgrammar, and what the program
// megatron_grammar_compiler reads and writes.
#pragma once

#include <cstdint>
#include <ctime>

#include "megatron/scheduling/grammar_kind.h"

namespace megatron {

inline constexpr const char* kGrammarLibrary = "libmegatron_grammar.so";
inline constexpr const char* kGrammarCompiler = "megatron_grammar_compiler";

// Read from the standard input: this, then the text, the ids that end a text (int32), the lengths
// of all tokens (int32), and their bytes one after another. Written to the standard output: the
// compiled grammar, and the exit status 0, or a message and the status 1.
struct GrammarJob {
  int64_t text_bytes = 0;
  int64_t most_bytes = 0;  // of memory that the program may use; 0: any
  int64_t token_ms = 0;    // of processor time for one token of a text
  int32_t kind = 0;
  int32_t num_ends = 0;
  int32_t num_tokens = 0;
  int32_t vocab_size = 0;
};

// Processor time of this thread: what a busy machine does not lengthen.
inline int64_t thread_ms() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1000000;
}

}  // namespace megatron

extern "C" {

// The tokens of a model by id, the empty one for those without text (special tokens), and the ids
// that end a text. `vocab_size`: ids in a mask, at least num_tokens. Null and a message on failure.
void* megatron_grammar_vocabulary(const char* bytes, const int32_t* lengths, int32_t num_tokens,
                                  int32_t vocab_size, const int32_t* ends, int32_t num_ends,
                                  char* error, int64_t error_bytes);
void megatron_grammar_free_vocabulary(void* vocabulary);

// Compiles, and follows a text for some tokens, each within `token_ms` of processor time; for the
// program above, since a grammar may take any time and memory. Calls `write` with the result, which
// megatron_grammar_load() reads. False and a message on failure.
bool megatron_grammar_compile(void* vocabulary, int32_t kind, const char* text, int64_t text_bytes,
                              int64_t token_ms,
                              void (*write)(void* context, const char* bytes, int64_t count),
                              void* context, char* error, int64_t error_bytes);

void* megatron_grammar_load(void* vocabulary, const char* bytes, int64_t count, char* error,
                            int64_t error_bytes);
void megatron_grammar_free(void* grammar);

void* megatron_grammar_start(void* grammar, char* error, int64_t error_bytes);
// 1: done; 0: (accept) the token does not fit; -1 and a message: failed.
int32_t megatron_grammar_fill(void* matcher, uint32_t* mask, int64_t words, char* error,
                              int64_t error_bytes);
int32_t megatron_grammar_accept(void* matcher, int32_t id, char* error, int64_t error_bytes);
int32_t megatron_grammar_roll_back(void* matcher, int64_t count, char* error, int64_t error_bytes);
bool megatron_grammar_has_ended(void* matcher);
void megatron_grammar_free_matcher(void* matcher);
}
