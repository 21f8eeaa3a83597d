// The program megatron_grammar_compiler: compiles one grammar within limits of time and memory, in
// a process of its own, so that a grammar that would take more ends nothing else.
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "megatron/inference/grammar/grammar_api.h"

namespace {

// Exactly so many bytes of the standard input.
bool read_all(void* out, size_t bytes) {
  auto* at = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t count = read(STDIN_FILENO, at, bytes);
    if (count <= 0) return false;
    at += count;
    bytes -= static_cast<size_t>(count);
  }
  return true;
}

void write_all(const char* bytes, size_t count) {
  while (count > 0) {
    const ssize_t written = write(STDOUT_FILENO, bytes, count);
    if (written <= 0) return;
    bytes += written;
    count -= static_cast<size_t>(written);
  }
}

int fail(const std::string& message) {
  write_all(message.data(), message.size());
  return 1;
}

void limit_memory(int64_t bytes) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  const rlimit limit{static_cast<rlim_t>(bytes), static_cast<rlim_t>(bytes)};
  if (bytes > 0) setrlimit(RLIMIT_AS, &limit);
#else
  static_cast<void>(bytes);  // their shadow memory is larger
#endif
  const rlimit none{0, 0};
  setrlimit(RLIMIT_CORE, &none);
}

}  // namespace

int main() {
  megatron::GrammarJob job;
  if (!read_all(&job, sizeof job)) return fail("no job");
  limit_memory(job.most_bytes);
  std::string text(static_cast<size_t>(job.text_bytes), '\0');
  std::vector<int32_t> ends(static_cast<size_t>(job.num_ends)),
      lengths(static_cast<size_t>(job.num_tokens));
  if (!read_all(text.data(), text.size()) ||
      !read_all(ends.data(), ends.size() * sizeof(int32_t)) ||
      !read_all(lengths.data(), lengths.size() * sizeof(int32_t)))
    return fail("the job is cut");
  size_t count = 0;
  for (const int32_t length : lengths) count += static_cast<size_t>(length);
  std::string tokens(count, '\0');
  if (!read_all(tokens.data(), tokens.size())) return fail("the job is cut");

  char error[1024] = {};
  void* const vocabulary =
      megatron_grammar_vocabulary(tokens.data(), lengths.data(), job.num_tokens, job.vocab_size,
                                  ends.data(), job.num_ends, error, sizeof error);
  if (vocabulary == nullptr) return fail(error);
  const auto write_result = [](void*, const char* bytes, int64_t written) {
    write_all(bytes, static_cast<size_t>(written));
  };
  const bool done =
      megatron_grammar_compile(vocabulary, job.kind, text.data(), job.text_bytes, job.token_ms,
                               write_result, nullptr, error, sizeof error);
  if (!done) fail(error);
  std::fflush(nullptr);
  _exit(done ? 0 : 1);  // nothing is worth freeing
}
