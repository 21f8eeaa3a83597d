#include "megatron/inference/grammar.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <list>
#include <map>
#include <mutex>

#include "megatron/base/failure_class.h"
#include "megatron/base/loading/shared_object.h"
#include "megatron/inference/grammar/compile_process.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

struct GrammarLibrary {
  decltype(&megatron_grammar_vocabulary) vocabulary = nullptr;
  decltype(&megatron_grammar_free_vocabulary) free_vocabulary = nullptr;
  decltype(&megatron_grammar_load) load = nullptr;
  decltype(&megatron_grammar_free) free = nullptr;
  decltype(&megatron_grammar_start) start = nullptr;
  decltype(&megatron_grammar_fill) fill = nullptr;
  decltype(&megatron_grammar_accept) accept = nullptr;
  decltype(&megatron_grammar_roll_back) roll_back = nullptr;
  decltype(&megatron_grammar_has_ended) has_ended = nullptr;
  decltype(&megatron_grammar_free_matcher) free_matcher = nullptr;
  fs::path compiler;  // the program
};

GrammarLibrary load_grammar_library() {
  std::vector<fs::path> paths = paths_beside_program(kGrammarLibrary);
  if (const char* given = std::getenv("MEGATRON_GRAMMAR_LIBRARY")) paths = {given};
  const SharedObject library(kGrammarLibrary, paths, "grammars need", "`make grammars` builds it");
  GrammarLibrary out;
  library.resolve("megatron_grammar_vocabulary", out.vocabulary);
  library.resolve("megatron_grammar_free_vocabulary", out.free_vocabulary);
  library.resolve("megatron_grammar_load", out.load);
  library.resolve("megatron_grammar_free", out.free);
  library.resolve("megatron_grammar_start", out.start);
  library.resolve("megatron_grammar_fill", out.fill);
  library.resolve("megatron_grammar_accept", out.accept);
  library.resolve("megatron_grammar_roll_back", out.roll_back);
  library.resolve("megatron_grammar_has_ended", out.has_ended);
  library.resolve("megatron_grammar_free_matcher", out.free_matcher);
  const fs::path& path = library.path();
  out.compiler = path.parent_path() / kGrammarCompiler;
  if (!fs::exists(out.compiler))
    out.compiler = path.parent_path() / ".." / "bin" / kGrammarCompiler;
  MEGATRON_CHECK(fs::exists(out.compiler), path.string(), ": the program ", kGrammarCompiler,
                 " that belongs to it is not there\nhint: `make grammars` builds both");
  return out;
}

const GrammarLibrary& grammar_library() {
  static const GrammarLibrary loaded = load_grammar_library();
  return loaded;
}

// A message of the library.
struct GrammarMessage {
  char text[1024] = {};
  static constexpr int64_t kBytes = sizeof text;
};

class LibraryMatcher : public TokenMatcher {
 public:
  LibraryMatcher(std::shared_ptr<void> grammar, void* matcher, int64_t token_ms)
      : grammar_(std::move(grammar)), matcher_(matcher), token_ms_(token_ms) {}
  ~LibraryMatcher() override { grammar_library().free_matcher(matcher_); }

  void fill(std::span<uint32_t> mask) override {
    if (has_ended()) {
      std::ranges::fill(mask, 0u);
      return;
    }
    GrammarMessage message;
    const int64_t begin = thread_ms();
    const int32_t done = grammar_library().fill(matcher_, mask.data(), std::ssize(mask),
                                                message.text, message.kBytes);
    MEGATRON_CHECK(done >= 0, "the grammar's mask: ", message.text);
    check_time(begin);
  }
  bool accept(int32_t id) override {
    if (has_ended()) return false;
    GrammarMessage message;
    const int64_t begin = thread_ms();
    const int32_t done = grammar_library().accept(matcher_, id, message.text, message.kBytes);
    MEGATRON_CHECK(done >= 0, "the grammar's next state: ", message.text);
    check_time(begin);
    accepted_ += done;
    return done == 1;
  }
  void roll_back(int64_t count) override {
    MEGATRON_ASSERT(count >= 0 && count <= accepted_, "cannot take back ", count, " tokens of ",
                    accepted_);
    if (count == 0) return;
    GrammarMessage message;
    const int32_t done = grammar_library().roll_back(matcher_, count, message.text, message.kBytes);
    MEGATRON_CHECK(done >= 0, "the grammar's earlier state: ", message.text);
    accepted_ -= count;
  }
  bool has_ended() const override { return grammar_library().has_ended(matcher_); }

 private:
  void check_time(int64_t begin_ms) const {
    MEGATRON_CHECK(thread_ms() - begin_ms <= token_ms_, "the grammar takes more than ", token_ms_,
                   " ms for one token");
  }

  std::shared_ptr<void> grammar_;
  void* matcher_;
  const int64_t token_ms_;
  int64_t accepted_ = 0;
};

class LibraryGrammar : public TokenGrammar {
 public:
  LibraryGrammar(std::shared_ptr<void> grammar, int64_t token_ms)
      : grammar_(std::move(grammar)), token_ms_(token_ms) {}
  std::unique_ptr<TokenMatcher> start() const override {
    GrammarMessage message;
    void* const matcher = grammar_library().start(grammar_.get(), message.text, message.kBytes);
    MEGATRON_CHECK(matcher != nullptr, "the grammar's first state: ", message.text);
    return std::make_unique<LibraryMatcher>(grammar_, matcher, token_ms_);
  }

 private:
  std::shared_ptr<void> grammar_;
  const int64_t token_ms_;
};

void append_bytes(std::string& out, const void* bytes, size_t count) {
  out.append(static_cast<const char*>(bytes), count);
}

}  // namespace

std::string compiled_text(ProcessResult result, const GrammarLimits& limits,
                          const fs::path& program) {
  using End = ProcessResult::End;
  const std::string memory =
      cat("cannot be compiled within ", limits.compile_bytes, " bytes of memory");
  switch (result.end) {
    case End::kDeadline:
      throw GrammarError(cat("cannot be compiled within ", limits.compile_ms, " ms"));
    case End::kTooMuch:
      throw GrammarError(
          cat("is larger than ", limits.compiled_bytes, " bytes when it is compiled"));
    case End::kKilled:  // the stack or the memory is at its limit
      throw GrammarError(cat(memory, " (signal ", result.status, ")"));
    case End::kExited:
      break;
  }
  if (result.status == 0) return std::move(result.output);
  // It says why. A program that has not even started, for want of a library, says nothing.
  if (result.output.empty())
    throw RetryError(cat("grammars cannot be compiled: ", program.string(), " ended with status ",
                         result.status, "\nhint: `make grammars` builds it"));
  throw GrammarError(result.output.find("bad_alloc") == std::string::npos
                         ? result.output.substr(0, GrammarMessage::kBytes)
                         : memory);
}

struct GrammarCompiler::Impl {
  GrammarLimits limits;
  std::vector<int32_t> ends, lengths;
  std::string bytes;  // of all tokens
  int64_t vocab_size = 0;
  std::mutex mutex;  // of what follows
  std::shared_ptr<void> vocabulary;
  std::list<std::pair<GrammarText, std::shared_ptr<const TokenGrammar>>> kept;  // newest first
  std::map<GrammarText, decltype(kept)::iterator> by_text;

  std::shared_ptr<const TokenGrammar> find(const GrammarText& grammar) {
    const std::lock_guard lock(mutex);
    const auto found = by_text.find(grammar);
    if (found == by_text.end()) return nullptr;
    kept.splice(kept.begin(), kept, found->second);
    return found->second->second;
  }

  void keep(const GrammarText& grammar, const std::shared_ptr<const TokenGrammar>& compiled) {
    const std::lock_guard lock(mutex);
    if (limits.cached <= 0 || by_text.contains(grammar)) return;
    kept.emplace_front(grammar, compiled);
    by_text[grammar] = kept.begin();
    if (std::ssize(kept) <= limits.cached) return;
    by_text.erase(kept.back().first);
    kept.pop_back();
  }

  std::shared_ptr<void> loaded_vocabulary() {
    const std::lock_guard lock(mutex);
    if (vocabulary) return vocabulary;
    const GrammarLibrary& library = grammar_library();
    GrammarMessage message;
    void* const made =
        library.vocabulary(bytes.data(), lengths.data(), static_cast<int32_t>(lengths.size()),
                           static_cast<int32_t>(vocab_size), ends.data(),
                           static_cast<int32_t>(ends.size()), message.text, message.kBytes);
    MEGATRON_CHECK(made != nullptr, "the vocabulary for grammars: ", message.text);
    vocabulary = std::shared_ptr<void>(made, library.free_vocabulary);
    return vocabulary;
  }

  // What the program reads.
  std::string job(const GrammarText& grammar) const {
    GrammarJob header;
    header.text_bytes = std::ssize(grammar.text);
    header.most_bytes = limits.compile_bytes;
    header.token_ms = limits.token_ms;
    header.kind = static_cast<int32_t>(grammar.kind);
    header.num_ends = static_cast<int32_t>(ends.size());
    header.num_tokens = static_cast<int32_t>(lengths.size());
    header.vocab_size = static_cast<int32_t>(vocab_size);
    std::string out;
    append_bytes(out, &header, sizeof header);
    out += grammar.text;
    append_bytes(out, ends.data(), ends.size() * sizeof(int32_t));
    append_bytes(out, lengths.data(), lengths.size() * sizeof(int32_t));
    return out + bytes;
  }

  std::string compiled(const GrammarText& grammar) const {
    const fs::path& program = grammar_library().compiler;
    return compiled_text(
        run_bounded_process(program, job(grammar), limits.compile_ms, limits.compiled_bytes),
        limits, program);
  }
};

GrammarCompiler::GrammarCompiler(const Tokenizer& tokenizer, int64_t vocab_size,
                                 std::vector<int32_t> ends, GrammarLimits limits)
    : impl_(std::make_unique<Impl>()) {
  MEGATRON_ASSERT(vocab_size >= tokenizer.vocab_size());
  impl_->limits = limits;
  impl_->ends = std::move(ends);
  impl_->vocab_size = vocab_size;
  for (int64_t id = 0; id < tokenizer.vocab_size(); ++id) {
    const auto token = static_cast<int32_t>(id);
    const std::string text =
        tokenizer.is_special(token) ? std::string() : tokenizer.token_bytes(token);
    impl_->lengths.push_back(static_cast<int32_t>(text.size()));
    impl_->bytes += text;
  }
}

GrammarCompiler::~GrammarCompiler() = default;

std::shared_ptr<const TokenGrammar> GrammarCompiler::compile(const GrammarText& grammar) {
  check_grammar(grammar, impl_->limits);
  if (auto found = impl_->find(grammar)) return found;
  const std::shared_ptr<void> vocabulary = impl_->loaded_vocabulary();
  const std::string text = impl_->compiled(grammar);
  const GrammarLibrary& library = grammar_library();
  GrammarMessage message;
  void* const loaded =
      library.load(vocabulary.get(), text.data(), std::ssize(text), message.text, message.kBytes);
  MEGATRON_CHECK(loaded != nullptr, "a compiled grammar cannot be read: ", message.text);
  // A grammar refers to the vocabulary.
  const std::shared_ptr<void> shared(
      loaded, [vocabulary, free = library.free](void* loaded_grammar) { free(loaded_grammar); });
  auto compiled = std::make_shared<const LibraryGrammar>(shared, impl_->limits.token_ms);
  impl_->keep(grammar, compiled);
  return compiled;
}

std::string GrammarCompiler::unavailable() {
  try {
    grammar_library();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace megatron
