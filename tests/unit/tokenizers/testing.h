// Helpers shared by the tokenizer tests.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/tokenizers/tokenizer.h"
#include "tests/unit/error_of.h"

namespace megatron {

inline std::filesystem::path golden_dir() {
  return std::filesystem::path(MEGATRON_SOURCE_DIR) / "tests/golden/tokenizers";
}

// A temporary folder, removed by the destructor.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "tokenizers-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path write(std::string_view name, std::string_view text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

inline std::unique_ptr<Tokenizer> load(const std::filesystem::path& model) {
  TokenizerConfig config;
  config.tokenizer_type = "HuggingFaceTokenizer";
  config.tokenizer_model = model.string();
  return make_tokenizer(config);
}

inline std::unique_ptr<Tokenizer> load_gpt2() {
  TokenizerConfig config;
  config.tokenizer_type = "GPT2BPETokenizer";
  config.vocab_file = (golden_dir() / "gpt2/vocab.json").string();
  config.merge_file = (golden_dir() / "gpt2/merges.txt").string();
  return make_tokenizer(config);
}

}  // namespace megatron
