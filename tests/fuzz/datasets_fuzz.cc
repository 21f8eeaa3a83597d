// For any bytes in .idx, .bin and .npy files, readers return data or throw Error; they never read
// outside the files. A run is 20,000 mutations in total, or MEGATRON_FUZZ_SECONDS for each target.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/datasets/gpt/gpt_dataset.h"
#include "megatron/datasets/indexed_dataset.h"
#include "megatron/datasets/indexed_dataset_builder.h"
#include "megatron/datasets/npy.h"
#include "tests/fuzz/repeat.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

std::string read_all(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_all(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

// Changes bytes, whole fields, and lengths.
class Mutator {
 public:
  explicit Mutator(uint32_t seed) : random_(seed) {}

  std::string mutate(std::string bytes) {
    for (uint64_t n = 1 + random_() % 3; n > 0; --n) {
      switch (random_() % 6) {
        case 0:
          flip_bit(bytes);
          break;
        case 1:
          write_number(bytes, 8);
          break;
        case 2:
          write_number(bytes, 4);
          break;
        case 3:
          bytes.resize(bytes.empty() ? 0 : random_() % (bytes.size() + 1));
          break;
        case 4:
          bytes.append(random_() % 20, static_cast<char>(random_()));
          break;
        default:
          copy_part(bytes);
      }
    }
    return bytes;
  }
  uint64_t number() { return random_(); }

 private:
  void flip_bit(std::string& bytes) {
    if (!bytes.empty()) bytes[random_() % bytes.size()] ^= static_cast<char>(1 << random_() % 8);
  }
  void write_number(std::string& bytes, size_t width) {
    static constexpr int64_t kEdges[] = {0,
                                         1,
                                         2,
                                         -1,
                                         127,
                                         255,
                                         32767,
                                         65536,
                                         0x7fffffff,
                                         -0x80000000LL,
                                         0x7fffffffffffffff,
                                         -0x7fffffffffffffff - 1,
                                         0x1000000000000000,
                                         34,
                                         1000};
    if (bytes.size() < width) return;
    const uint64_t value =
        static_cast<uint64_t>(kEdges[random_() % std::size(kEdges)]) + random_() % 3;
    std::memcpy(bytes.data() + random_() % (bytes.size() - width + 1), &value, width);
  }
  void copy_part(std::string& bytes) {
    if (bytes.size() < 9) return;
    const size_t length = 1 + random_() % 8, from = random_() % (bytes.size() - length),
                 to = random_() % (bytes.size() - length);
    std::memmove(bytes.data() + to, bytes.data() + from, length);
  }
  std::mt19937_64 random_;
};

class DatasetsFuzz : public ::testing::Test {
 protected:
  DatasetsFuzz() {
    // In memory where that exists: the readers are tested, not the disk.
    const fs::path base =
        fs::is_directory("/dev/shm") ? fs::path("/dev/shm") : fs::temp_directory_path();
    folder_ = base / ("megatron-fuzz-" + std::to_string(::getpid()));
    fs::create_directories(folder_);
    for (const auto& entry : fs::directory_iterator(MEGATRON_SOURCE_DIR "/tests/fuzz/corpus"))
      if (entry.path().extension() == ".idx")
        corpus_.push_back(entry.path().parent_path() / entry.path().stem());
    std::sort(corpus_.begin(), corpus_.end());
  }
  ~DatasetsFuzz() override { fs::remove_all(folder_); }

  // Reads all that a dataset offers; returns whether it could be opened.
  bool read_dataset(const std::string& prefix, bool mmap, bool multimodal);

  fs::path folder_;
  std::vector<fs::path> corpus_;
};

bool DatasetsFuzz::read_dataset(const std::string& prefix, bool mmap, bool multimodal) {
  try {
    const auto data =
        std::make_shared<const IndexedDataset>(prefix, IndexedDatasetOptions{mmap, multimodal});
    int64_t tokens = 0;
    for (int64_t s = 0; s < data->num_sequences(); ++s) {
      std::vector<char> raw(data->sequence_lengths()[s] * size_of(data->type()));
      data->read_bytes(s, 0, data->sequence_lengths()[s], raw.data());
      tokens += data->sequence_lengths()[s];
      (void)data->mode(s);
      (void)data->document_of(s);
    }
    EXPECT_EQ(tokens, data->num_tokens());
    for (const int64_t entry : data->document_indices()) EXPECT_LE(entry, data->num_sequences());
    GPTDatasetConfig config;
    config.sequence_length = 3;
    config.use_cache = false;
    config.threads = 1;
    config.tokenizer.vocab_size = 200;
    const GPTDataset samples(data, 0, data->num_sequences(), Split::kTrain, 5, config);
    for (int64_t i = 0; i < samples.size(); ++i) (void)samples.sample(i);
    return true;
  } catch (const Error&) {
    return false;
  }
}

TEST_F(DatasetsFuzz, CorpusIsSound) {
  ASSERT_GE(corpus_.size(), 3u);
  for (const fs::path& prefix : corpus_)
    EXPECT_TRUE(read_dataset(prefix.string(), true, prefix.filename() == "modes")) << prefix;
}

TEST_F(DatasetsFuzz, IndexedDataset) {
  std::vector<std::pair<std::string, std::string>> files;
  for (const fs::path& prefix : corpus_)
    files.emplace_back(read_all(prefix.string() + ".idx"), read_all(prefix.string() + ".bin"));
  const std::string prefix = (folder_ / "d").string();
  int64_t opened = 0, refused = 0;
  repeat_with_seeds(14000, [&](uint32_t seed) {
    Mutator mutator(seed);
    auto [idx, bin] = files[mutator.number() % files.size()];
    if (mutator.number() % 4 != 0)
      idx = mutator.mutate(idx);
    else
      bin = mutator.mutate(bin);
    write_all(prefix + ".idx", idx);
    write_all(prefix + ".bin", bin);
    ++(read_dataset(prefix, mutator.number() % 2 == 0, mutator.number() % 8 == 0) ? opened
                                                                                  : refused);
  });
  EXPECT_GT(opened, 0);
  EXPECT_GT(refused, 0);
}

TEST_F(DatasetsFuzz, Npy) {
  const std::string path = (folder_ / "a.npy").string();
  const std::string seeds[] = {npy_header("<i4", {5, 2}) + std::string(40, 'x'),
                               npy_header("<i8", {3}) + std::string(24, 'y'),
                               npy_header("<i2", {0}),
                               npy_header("<u4", {16}) + std::string(64, 'z')};
  repeat_with_seeds(6000, [&](uint32_t seed) {
    Mutator mutator(seed);
    write_all(path, mutator.mutate(seeds[mutator.number() % std::size(seeds)]));
    try {
      const NpyArray array(path);
      int64_t sum = 0;
      for (const std::byte byte : array.bytes()) sum += std::to_integer<int>(byte);
      EXPECT_LE(array.size(), static_cast<int64_t>(fs::file_size(path)));
      EXPECT_GE(sum, 0);
    } catch (const Error&) {
    }
  });
}

}  // namespace
}  // namespace megatron
