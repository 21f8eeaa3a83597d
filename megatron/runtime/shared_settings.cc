#include "megatron/runtime/shared_settings.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <memory>
#include <set>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/field_info.h"
#include "megatron/base/format.h"
#include "megatron/base/program_build.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

// Fields that are not kSame.
constexpr std::pair<FieldSharing, std::string_view> kSharing[] = {
    {FieldSharing::kLocal,
     "data_cache_path distributed_interface num_dataset_builder_threads num_threads num_workers"},
    {FieldSharing::kGiven,
     "prometheus_textfile run_dir tensorboard_dir wandb_save_dir log_samples"},
    {FieldSharing::kContents,
     "audio_media_model chat_template data_args_path data_path fewshot_data media_model "
     "media_root merge_file "
     "per_split_data_args_path "
     "retro_project_dir tasks "
     "test_data_path tokenizer_model train_data_path valid_data_path vocab_file"}};

constexpr uint64_t kWholeFile = 1 << 20;  // files up to this size are read completely
constexpr uint64_t kBlock = 4096;
constexpr size_t kManyFiles = 64;     // above this many paths in one flag, fewer blocks are read
constexpr size_t kFolderFiles = 256;  // files of a folder that are read

// Reads some blocks of a file and hashes them with its size.
class Sampler {
 public:
  explicit Sampler(bool few_blocks) : blocks_(few_blocks ? 2 : 8), state_(XXH3_createState()) {
    XXH3_64bits_reset(state_.get());
  }

  // Returns whether the path is a regular file.
  bool add_file(const std::string& path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
      if (errno != ENOENT && errno != ENOTDIR) problem_ = std::strerror(errno);
      return false;
    }
    struct stat info{};
    const bool regular = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
    if (regular) add(fd, static_cast<uint64_t>(info.st_size));
    close(fd);
    return regular;
  }
  void add_name(std::string_view name) {
    XXH3_64bits_update(state_.get(), name.data(), name.size());
  }

  std::string text() const {
    if (files_ == 0) return problem_.empty() ? "no such file" : problem_;
    return cat(bytes_, " bytes, contents ", format_hex(XXH3_64bits_digest(state_.get())));
  }

 private:
  struct Free {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };

  void add(int fd, uint64_t size) {
    ++files_;
    bytes_ += size;
    XXH3_64bits_update(state_.get(), &size, sizeof size);
    if (size <= kWholeFile) {
      for (uint64_t at = 0; at < size; at += kBlock) add_block(fd, at);
    } else {
      for (uint64_t i = 0; i < blocks_; ++i) add_block(fd, (size - kBlock) * i / (blocks_ - 1));
    }
  }
  void add_block(int fd, uint64_t at) {
    std::array<char, kBlock> block;
    const ssize_t got = pread(fd, block.data(), block.size(), static_cast<off_t>(at));
    if (got > 0) XXH3_64bits_update(state_.get(), block.data(), static_cast<size_t>(got));
  }

  uint64_t blocks_;
  std::unique_ptr<XXH3_state_t, Free> state_;
  uint64_t bytes_ = 0;
  int files_ = 0;
  std::string problem_;
};

bool is_number(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

// The paths in the value of a field: without the weights of a blend; of NAME=FILE the file.
std::vector<std::string> paths_of(const FieldInfo& field) {
  std::vector<std::string> words;
  if (const auto* text = std::get_if<std::string>(&field.value)) words = {*text};
  if (const auto* list = std::get_if<std::vector<std::string>>(&field.value)) words = *list;
  const bool named = field.name == "tasks" || field.name == "fewshot_data";
  std::vector<std::string> paths;
  for (std::string& word : words) {
    if (named) word.erase(0, word.find('=') + 1);
    if (word.empty() || word.size() > 4096 || is_number(word)) continue;
    paths.push_back(std::move(word));
  }
  return paths;
}

void add_contents(const FieldInfo& field, RankSettings& settings) {
  const std::vector<std::string> paths = paths_of(field);
  for (const std::string& path : paths)
    settings.push_back(
        {cat(field.flags[0], " ", path), contents_fingerprint(path, paths.size() > kManyFiles)});
}

void add_fields(std::span<Config* const> configs, RankSettings& settings) {
  for (const FieldInfo& field : describe_fields(configs)) {
    const FieldSharing sharing = field_sharing(field.name);
    if (sharing == FieldSharing::kLocal) continue;
    const std::string value = format_value(field.value);
    if (sharing == FieldSharing::kGiven) {
      settings.push_back({field.flags[0], value.empty() ? "" : "given"});
      continue;
    }
    settings.push_back({field.flags[0], value});
    if (sharing == FieldSharing::kContents) add_contents(field, settings);
  }
}

}  // namespace

FieldSharing field_sharing(std::string_view name) {
  for (const auto& [sharing, names] : kSharing)
    for (const std::string& listed : split(names))
      if (listed == name) return sharing;
  return FieldSharing::kSame;
}

std::string contents_fingerprint(const std::string& path, bool few_blocks) {
  static const std::set<std::string> kSuffixes = {".json", ".jsonl", ".model",
                                                  ".txt",  ".jinja", ".tiktoken"};
  Sampler sampler(few_blocks);
  std::error_code error;
  if (fs::is_directory(path, error)) {
    std::vector<std::string> names;
    for (const fs::directory_entry& entry : fs::directory_iterator(path, error))
      if (kSuffixes.contains(entry.path().extension())) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    if (names.size() > kFolderFiles) names.resize(kFolderFiles);
    for (const std::string& name : names) {
      sampler.add_name(name);
      sampler.add_file(cat(path, "/", name));
    }
  } else if (!sampler.add_file(path)) {
    sampler.add_file(path + ".idx");
    sampler.add_file(path + ".bin");
  }
  return sampler.text();
}

RankSettings shared_settings(std::span<Config* const> configs) {
  RankSettings settings = {
      {"the program's build", program_build()},
      {"the build of libmegatron_compute.so", library_build("libmegatron_compute.so")},
      {"the build of libtorch", library_build("libtorch_cpu.so")}};
  add_fields(configs, settings);
  return settings;
}

}  // namespace megatron
