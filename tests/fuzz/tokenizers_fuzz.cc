// For any bytes in tokenizer files and text, loading returns a tokenizer or throws Error, and a
// loaded tokenizer encodes and decodes without reading out of bounds. A run is 1,500 mutations in
// total,
// or MEGATRON_FUZZ_SECONDS for each target.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/tokenizers/detail/text/utf8.h"
#include "megatron/tokenizers/sentence_splitter.h"
#include "megatron/tokenizers/tokenizer.h"
#include "tests/fuzz/repeat.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

const fs::path& golden() {
  static const fs::path path = fs::path(MEGATRON_SOURCE_DIR) / "tests/golden/tokenizers";
  return path;
}

// A file of the goldens and how it is given.
struct Seed {
  const char* type;
  const char* file;
};
constexpr Seed kJson[] = {
    {"HuggingFaceTokenizer", "kinds/llama2.json"},
    {"HuggingFaceTokenizer", "kinds/gemma.json"},
    {"HuggingFaceTokenizer", "kinds/t5.json"},
    {"HuggingFaceTokenizer", "kinds/xlmr.json"},
    {"HuggingFaceTokenizer", "kinds/unigram_text.json"},
    {"HuggingFaceTokenizer", "kinds/bert.json"},
    {"HuggingFaceTokenizer", "kinds/word_level.json"},
    {"HuggingFaceTokenizer", "kinds/bpe_suffix.json"},
    {"HuggingFaceTokenizer", "kinds/bpe_prefix.json"},
    {"HuggingFaceTokenizer", "llama3.json"},
    {"TikTokenizer", "kinds/tiktoken_v2.json"},
};
constexpr Seed kBinary[] = {
    {"SentencePieceTokenizer", "kinds/sp_llama.model"},
    {"SentencePieceTokenizer", "kinds/sp_bpe.model"},
    {"SentencePieceTokenizer", "kinds/sp_unigram.model"},
    {"SentencePieceTokenizer", "kinds/sp_unigram_bytes.model"},
    {"SentencePieceTokenizer", "kinds/sp_suffix.model"},
    {"TikTokenizer", "kinds/tiktoken_llama3.model"},
};

constexpr std::string_view kParts[] = {
    "The quick brown fox",
    "  ",
    "\n\r\n",
    "word wordy Wordy",
    "<mask>",
    "<lr> <r>",
    "<|endoftext|>",
    "caf\xc3\xa9 cafe\xcc\x81",
    "\xe2\x96\x81",
    "\xe4\xbd\xa0\xe5\xa5\xbd",
    "\xf0\x9f\x98\x80\xe2\x80\x8d",
    "<0xE4>",
    "\xff\xc0\x80",
    "\xe4\xbd",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "12345",
    "\xcc\x81\xcc\xa3",
    std::string_view("\0\x01\x7f", 3),
    "\xef\xbc\xa1\xef\xac\x81",
};

class TokenizersFuzz : public ::testing::Test {
 protected:
  TokenizersFuzz() {
    // In memory where that exists: the readers are tested, not the disk.
    const fs::path base =
        fs::is_directory("/dev/shm") ? fs::path("/dev/shm") : fs::temp_directory_path();
    folder_ = base / ("megatron-tokenizers-fuzz-" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  ~TokenizersFuzz() override { fs::remove_all(folder_); }

  // Calls body() `count` times, or for MEGATRON_FUZZ_SECONDS, with a new seed each time.
  void repeat(int count, const std::function<void()>& body) {
    repeat_with_seeds(count, [&](uint32_t seed) {
      random_.seed(seed);
      body();
    });
  }

  std::string some_text() {
    std::string text;
    for (uint64_t n = random_() % 30; n > 0; --n) {
      if (random_() % 3 == 0) {
        for (uint64_t k = random_() % 8; k > 0; --k) text += static_cast<char>(random_());
      } else {
        text += kParts[random_() % std::size(kParts)];
      }
    }
    return text;
  }

  // Encodes and decodes; ids are of the vocabulary, whatever the file said.
  void use(const Tokenizer& tokenizer) {
    try {
      const std::vector<int32_t> ids = tokenizer.encode(some_text());
      for (const int32_t id : ids) ASSERT_TRUE(id >= 0 && id < tokenizer.vocab_size()) << id;
      (void)tokenizer.decode(ids);
      StreamDecoder stream(tokenizer);
      for (const int32_t id : ids) (void)stream.push(id);
      (void)stream.finish();
    } catch (const Error&) {
    }
  }

  bool load_and_use(const char* type, const fs::path& path) {
    TokenizerConfig config;
    config.tokenizer_type = type;
    config.tokenizer_model = path.string();
    if (config.tokenizer_type == "TikTokenizer" && path.extension() == ".json") {
      config.tiktoken_num_special_tokens = 40;
      config.vocab_size = 640;
    }
    std::unique_ptr<Tokenizer> tokenizer;
    try {
      tokenizer = make_tokenizer(config);
    } catch (const Error&) {
      return false;
    }
    for (int i = 0; i < 3; ++i) use(*tokenizer);
    return true;
  }

  std::mt19937_64 random_;
  fs::path folder_;
};

// Characters that keep JSON and base64 mostly well formed.
TEST_F(TokenizersFuzz, JsonFiles) {
  int loaded = 0;
  repeat(500, [&] {
    const Seed& seed = kJson[random_() % std::size(kJson)];
    std::string bytes = read_file(golden() / seed.file);
    for (uint64_t n = 1 + random_() % 3; n > 0; --n) {
      const size_t at = random_() % bytes.size();
      switch (random_() % 4) {
        case 0:
          bytes[at] = "0123456789{}[]\",:aZ.x-+/ "[random_() % 25];
          break;
        case 1:
          bytes.erase(at, random_() % 6);
          break;
        case 2:  // another part of the file
          bytes.replace(at, std::min<size_t>(8, bytes.size() - at),
                        bytes.substr(random_() % bytes.size(), random_() % 12));
          break;
        default:  // a value or a name that means something else
          for (const auto& [from, to] : {std::pair{"true", "false"},
                                         {"false", "true"},
                                         {"always", "first"},
                                         {"Isolated", "Removed"},
                                         {"null", "0"},
                                         {"\\u", "\\\\"}}) {
            const size_t found = bytes.find(from, at);
            if (found != bytes.npos) bytes.replace(found, std::strlen(from), to);
          }
      }
      if (bytes.empty()) break;
    }
    const fs::path path = folder_ / "tokenizer.json";
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
    loaded += load_and_use(seed.type, path);
  });
  EXPECT_GT(loaded, 0);
}

TEST_F(TokenizersFuzz, BinaryFiles) {
  int loaded = 0;
  repeat(700, [&] {
    const Seed& seed = kBinary[random_() % std::size(kBinary)];
    std::string bytes = read_file(golden() / seed.file);
    for (uint64_t n = 1 + random_() % 3; n > 0; --n) {
      const size_t at = random_() % bytes.size();
      switch (random_() % 4) {
        case 0:
          bytes[at] ^= static_cast<char>(1 << random_() % 8);
          break;
        case 1:
          bytes[at] = static_cast<char>(random_());
          break;
        case 2:
          if (random_() % 8 == 0) bytes.resize(at + 1);
          break;
        default:  // the settings stand at the end
          bytes[bytes.size() - 1 - random_() % std::min<size_t>(300, bytes.size())] =
              static_cast<char>(random_());
      }
    }
    const fs::path path = folder_ / "tokenizer.model";
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
    loaded += load_and_use(seed.type, path);
  });
  EXPECT_GT(loaded, 0);
}

TEST_F(TokenizersFuzz, Texts) {
  std::vector<std::unique_ptr<Tokenizer>> tokenizers;
  for (const auto& seeds : {std::pair{std::begin(kJson), std::end(kJson)},
                            std::pair{std::begin(kBinary), std::end(kBinary)}}) {
    for (const Seed* seed = seeds.first; seed != seeds.second; ++seed) {
      TokenizerConfig config;
      config.tokenizer_type = seed->type;
      config.tokenizer_model = (golden() / seed->file).string();
      if (std::string_view(seed->file).ends_with("v2.json")) {
        config.tiktoken_num_special_tokens = 40;
        config.vocab_size = 640;
      }
      tokenizers.push_back(make_tokenizer(config));
    }
  }
  repeat(300, [&] { use(*tokenizers[random_() % tokenizers.size()]); });
}

// Sentences are parts of the text in its order and whole characters, whatever text and parameters
// are.
TEST_F(TokenizersFuzz, Sentences) {
  constexpr std::string_view kMarks[] = {".",   "?",    "!",      "\"",           "')", "--",
                                         "...", ". . ", " ",      "\n",           ",",  "Dr.",
                                         "x.",  "3.5",  "\u3000", "\u0391\u03a3."};
  const fs::path goldens = fs::path(MEGATRON_SOURCE_DIR) / "tests/golden/punkt/english";
  repeat(600, [&] {
    for (const char* name :
         {"abbrev_types.txt", "sent_starters.txt", "collocations.tab", "ortho_context.tab"}) {
      std::string bytes = read_file(goldens / name);
      if (random_() % 4 == 0 && !bytes.empty())
        bytes[random_() % bytes.size()] = "\t\n\r0 a.\xff"[random_() % 8];
      std::ofstream(folder_ / name, std::ios::binary | std::ios::trunc) << bytes;
    }
    std::string raw, text;
    for (uint64_t n = random_() % 40; n > 0; --n)
      raw += random_() % 4 == 0 ? some_text() : std::string(kMarks[random_() % std::size(kMarks)]);
    append_repaired_utf8(raw, text);
    PunktParameters parameters;
    try {
      parameters = read_punkt_parameters(folder_);
    } catch (const Error&) {
    }
    for (const bool keep : {false, true}) {
      std::vector<std::string_view> sentences;
      SentenceSplitter(parameters, keep).split(text, sentences);
      const char* at = text.data();
      for (const std::string_view sentence : sentences) {
        ASSERT_GE(sentence.data(), at);
        ASSERT_FALSE(sentence.empty());
        at = sentence.data() + sentence.size();
        ASSERT_LE(at, text.data() + text.size());
        ASSERT_EQ(valid_utf8_prefix(sentence), sentence.size());
      }
    }
  });
}

}  // namespace
}  // namespace megatron
