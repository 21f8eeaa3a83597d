#include "megatron/dist_checkpointing/verify.h"

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "megatron/base/check.h"
#include "megatron/base/failure_class.h"
#include "megatron/base/threads.h"
#include "megatron/dist_checkpointing/access_error.h"
#include "megatron/dist_checkpointing/detail/io.h"
#include "megatron/dist_checkpointing/detail/stored_blocks.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxProblems = 20;  // that ranks tell one another

// Which of n shares reads byte `position` of the concatenation of all files.
class Shares {
 public:
  Shares(const Manifest& manifest, const VerifyOptions& options) : options_(options) {
    for (const StoredFile& file : manifest.files) total_ += file.bytes;
  }
  bool is_own(uint64_t position) const {
    if (options_.num_shares == 1) return true;
    if (total_ == 0) return options_.share == 0;
    using Wide = unsigned __int128;
    return static_cast<uint64_t>(Wide{position} * static_cast<unsigned>(options_.num_shares) /
                                 total_) == static_cast<uint64_t>(options_.share);
  }

 private:
  const VerifyOptions& options_;
  uint64_t total_ = 0;
};

// What one share has to read.
struct FileWork {
  size_t file = 0;
  bool header = false;          // and the size
  uint64_t begin = 0, end = 0;  // blocks
};

std::vector<FileWork> plan(const Manifest& manifest, const VerifyOptions& options) {
  const Shares shares(manifest, options);
  std::vector<FileWork> work;
  uint64_t position = 0;
  for (size_t i = 0; i < manifest.files.size(); ++i) {
    const StoredFile& file = manifest.files[i];
    FileWork own{i, shares.is_own(position), 0, 0};
    const auto is_own = [&](uint64_t block) {
      return shares.is_own(position + file.header_bytes + block * kCheckpointBlockBytes);
    };
    const uint64_t blocks = file.block_hashes.size();
    while (own.begin < blocks && !is_own(own.begin)) ++own.begin;
    own.end = own.begin;
    while (own.end < blocks && is_own(own.end)) ++own.end;
    position += file.bytes;
    if (!options.tensor_files && file.header_bytes > 0) continue;
    if (own.header || own.begin < own.end) work.push_back(own);
  }
  return work;
}

class Verifier {
 public:
  Verifier(const fs::path& directory, const Manifest& manifest, const VerifyOptions& options)
      : directory_(directory), manifest_(manifest), options_(options) {}

  std::vector<std::string> run(const std::vector<FileWork>& work) {
    for (size_t begin = 0; begin < work.size(); begin += kMaxOpenFiles) {
      const size_t end = std::min(work.size(), begin + kMaxOpenFiles);
      run_some(std::vector<FileWork>(work.begin() + static_cast<ptrdiff_t>(begin),
                                     work.begin() + static_cast<ptrdiff_t>(end)));
      files_.clear();
    }
    std::sort(problems_.begin(), problems_.end());
    return std::move(problems_);
  }

 private:
  void run_some(const std::vector<FileWork>& work) {
    std::vector<std::pair<size_t, uint64_t>> blocks;
    for (const FileWork& item : work) {
      const StoredFile& file = manifest_.files[item.file];
      attempt([&] {
        auto in = std::make_unique<InputFile>(directory_ / file.name);
        if (options_.from_disk) in->forget_cached_pages();
        if (item.header) verify_header(*in, file);
        files_[item.file] = std::move(in);
        for (uint64_t block = item.begin; block < item.end; ++block)
          blocks.push_back({item.file, block});
      });
    }
    const auto body = [&](int64_t begin, int64_t end) {
      std::vector<std::byte> buffer;
      for (int64_t i = begin; i < end; ++i) {
        const auto [file, block] = blocks[static_cast<size_t>(i)];
        attempt([&, file = file, block = block] {
          read_block(*files_.at(file), manifest_.files[file], block, buffer);
        });
        if (options_.progress) options_.progress();
      }
    };
    parallel_for(static_cast<int64_t>(blocks.size()), 8, body, options_.threads);
  }

  // Damage is recorded and reading continues; an access error ends it.
  template <class Work>
  void attempt(const Work& work) {
    std::string damage = damage_of(work);
    if (damage.empty()) return;
    const std::lock_guard<std::mutex> guard(mutex_);
    problems_.push_back(std::move(damage));
  }

  const fs::path& directory_;
  const Manifest& manifest_;
  const VerifyOptions& options_;
  std::map<size_t, std::unique_ptr<InputFile>> files_;
  std::mutex mutex_;
  std::vector<std::string> problems_;
};

// Packs texts into one text and back; each is preceded by its length.
std::string joined(const std::vector<std::string>& texts) {
  std::string out;
  for (const std::string& text : texts) out += cat(text.size(), " ", text);
  return out;
}

std::vector<std::string> separated(const std::string& text) {
  std::vector<std::string> out;
  for (size_t at = 0; at < text.size();) {
    const size_t space = text.find(' ', at);
    const size_t length = std::stoul(text.substr(at, space - at));
    out.push_back(text.substr(space + 1, length));
    at = space + 1 + length;
  }
  return out;
}

}  // namespace

std::vector<std::string> verify_checkpoint(const fs::path& directory,
                                           const VerifyOptions& options) {
  Manifest manifest;
  std::string damage = damage_of([&] {
    const InputFile in(directory / kManifestName);
    if (options.from_disk) in.forget_cached_pages();
    manifest = parse_manifest(read_manifest_text(in), in.path().string());
  });
  if (!damage.empty()) return {std::move(damage)};
  return Verifier(directory, manifest, options).run(plan(manifest, options));
}

std::vector<std::string> verify_checkpoint(const fs::path& directory, Agreement& ranks,
                                           VerifyOptions options) {
  options.share = ranks.rank();
  options.num_shares = ranks.size();
  options.progress = [&ranks] { ranks.progress(); };
  std::vector<std::string> problems;
  std::exception_ptr failure;
  std::string own;
  try {
    problems = verify_checkpoint(directory, options);
    if (problems.size() > kMaxProblems) problems.resize(kMaxProblems);
    own = "+" + joined(problems);
  } catch (const std::exception& error) {
    failure = std::current_exception();
    own = cat(
        failure_class(error) == FailureClass::kRetry ? "~" : "!",
        ranks.size() > 1 ? cat("rank ", ranks.rank(), " cannot verify its part: ") : std::string(),
        error.what());
  }
  const std::vector<std::string> all = ranks.gather(own);
  const std::string verdict = ranks.broadcast([&]() -> std::string {
    std::set<std::string> merged;
    for (const std::string& text : all) {
      if (!text.starts_with('+')) return text;
      for (std::string& problem : separated(text.substr(1))) merged.insert(std::move(problem));
    }
    std::vector<std::string> list(merged.begin(), merged.end());
    if (list.size() > kMaxProblems) list.resize(kMaxProblems);
    return "+" + joined(list);
  }());
  if (failure && ranks.size() == 1) std::rethrow_exception(failure);
  if (!verdict.starts_with('+'))
    throw_access_error(verdict.substr(1), /*may_retry=*/verdict[0] == '~');
  return separated(verdict.substr(1));
}

void verify_file(const fs::path& directory, const StoredFile& file, const VerifyOptions& options) {
  Manifest manifest;
  manifest.files = {file};
  const std::vector<std::string> problems =
      Verifier(directory, manifest, options).run({{0, true, 0, file.block_hashes.size()}});
  MEGATRON_CHECK(problems.empty(), problems[0]);
}

}  // namespace megatron
