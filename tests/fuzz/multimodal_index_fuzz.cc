// For any bytes in the files of an index of media, it is built again or refused with an Error that
// names a file of the data; what is read lies in the arrays and within the limits, and sequences
// are read or refused likewise. A run is 60 indices with damaged files and 200 with damaged numbers
// under checksums that agree, or MEGATRON_FUZZ_SECONDS for each.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>

#include "megatron/datasets/index_cache.h"
#include "tests/fuzz/repeat.h"
#include "tests/unit/datasets/multimodal/indexed.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using namespace testing_multimodal;

// An array of the cache.
struct Stored {
  std::string name, dtype;
  int64_t columns = 0;  // 0: one dimension
  std::string bytes;
};

class MultimodalIndexFuzz : public Indexed {
 protected:
  size_t below(size_t limit) { return random_() % limit; }

  // Rows with files, one with an image of its own, and members of an archive.
  MultimodalIndexFuzz() {
    const std::string png =
        "iVBORw0KGgoAAAANSUhEUgAAAAIAAAADCAIAAAA2iEnWAAAAFElEQVR4nGPkTD7OwMDAxMDAgKAAFl8BORQWRUQAAA"
        "AASUVORK5CYII=";
    const std::string rows = write_rows("rows.jsonl", 0, 5);
    folder_.write("rows.jsonl",
                  read_file(rows) +
                      Json{{"caption", "c"}, {"image", "data:image/png;base64," + png}}.dump() +
                      "\n");
    paths_ = {rows, write_tar("images.tar", 0, 6)};
  }

  // Everything that an index and its sequences give.
  std::string read(const MultimodalIndex& index) {
    std::string out;
    for (int64_t i = 0; i < index.size(); ++i) {
      out += index.name(i);
      for (const int32_t id : index.sample(i).ids) out += cat(" ", id);
      for (int64_t m = 0; m < index.media_count(i); ++m) {
        const MediumFacts facts = index.facts(i, m);
        EXPECT_GT(facts.size.height, 0);
        EXPECT_LE(facts.size.width, options_.limits.max_image_pixels / facts.size.height);
        out += cat(" ", index.medium(i, m).name, " ", facts.size.height, "x", facts.size.width);
      }
    }
    const auto of_others = [](const MultimodalIndex*) {};
    const auto data = dataset({&index, of_others}, {.sequence_length = 40});
    for (int64_t i = 0; i < data->size(); ++i) out += content(*data, i);
    return out;
  }

  // The content; nothing if it is refused.
  std::string read_or_refused(const std::string& path) {
    testing::internal::CaptureStderr();  // what is damaged and built again
    std::string out;
    try {
      out = read(*index(path));
      ++read_;
    } catch (const Error& error) {
      EXPECT_TRUE(std::string(error.what()).starts_with(folder_.path())) << error.what();
      EXPECT_FALSE(holds_address(error.what())) << error.what();
      ++refused_;
    }
    testing::internal::GetCapturedStderr();
    return out;
  }

  void damage(std::string& bytes) {
    if (bytes.empty()) return;
    const size_t at = below(bytes.size());
    switch (below(4)) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ 1 << below(8));
        break;
      case 1:
        bytes.resize(at);
        break;
      case 2:
        bytes.insert(at, bytes.substr(below(bytes.size()), 1 + below(80)));
        break;
      default:
        bytes[at] = static_cast<char>(random_());
    }
  }

  // A number, or a row more or less.
  void damage(Stored& array) {
    const size_t width = array.dtype == "<i8" ? 8 : 4;
    const size_t row = width * static_cast<size_t>(std::max<int64_t>(array.columns, 1));
    const size_t rows = array.bytes.size() / row;
    if (rows == 0) return;
    constexpr int64_t kEdges[] = {-1,
                                  0,
                                  1,
                                  2,
                                  3,
                                  5,
                                  7,
                                  100,
                                  int64_t{1} << 31,
                                  int64_t{1} << 32,
                                  int64_t{1} << 62,
                                  std::numeric_limits<int64_t>::max(),
                                  std::numeric_limits<int64_t>::min()};
    if (const size_t what = below(8); what == 0) {
      array.bytes.erase(below(rows) * row, row);
    } else if (what == 1) {
      array.bytes.insert(below(rows) * row, array.bytes.substr(below(rows) * row, row));
    } else {
      char* const at = array.bytes.data() + below(array.bytes.size() / width) * width;
      int64_t value = 0;
      std::memcpy(&value, at, width);
      value = below(2) == 0 ? kEdges[below(std::size(kEdges))]
                            : static_cast<int64_t>(static_cast<uint64_t>(value) + below(5) - 2);
      std::memcpy(at, &value, width);
    }
  }

  // The arrays of an index as they lie in the cache.
  std::vector<Stored> stored(const std::string& description) {
    std::vector<NpyArray> arrays;
    cache(description).get(kNames, {}, arrays);
    std::vector<Stored> out;
    for (size_t i = 0; i < arrays.size(); ++i) {
      const auto bytes = arrays[i].bytes();
      out.push_back({kNames[i],
                     arrays[i].dtype(),
                     arrays[i].shape().size() > 1 ? arrays[i].shape()[1] : 0,
                     {reinterpret_cast<const char*>(bytes.data()), bytes.size()}});
    }
    return out;
  }

  // Puts them there, with their checksums.
  void store(const std::string& description, const std::vector<Stored>& arrays) {
    std::filesystem::remove(
        cat(options_.cache_path, "/", hash_text(description), "-MultimodalIndex-description.txt"));
    std::vector<CacheArray> all;
    for (const Stored& array : arrays) {
      const auto elements =
          static_cast<int64_t>(array.bytes.size()) / (array.dtype == "<i8" ? 8 : 4);
      std::vector<int64_t> shape = {elements};
      if (array.columns > 0) shape = {elements / array.columns, array.columns};
      all.push_back({array.name, array.dtype, shape, std::as_bytes(std::span(array.bytes))});
    }
    std::vector<NpyArray> read_back;
    cache(description).get(kNames, [&](const auto& put) { put(all); }, read_back);
  }

  IndexCache cache(const std::string& description) const {
    return {options_.cache_path, "MultimodalIndex", description};
  }

  const std::vector<std::string> kNames = {"ids", "runs", "media", "ends", "texts", "held"};
  std::vector<std::string> paths_;
  std::mt19937 random_;
  int read_ = 0, refused_ = 0;
};

TEST_F(MultimodalIndexFuzz, DamagedFilesAreBuiltAgain) {
  std::map<std::string, std::string> whole;  // by the data
  repeat_with_seeds(60, [&](uint32_t seed) {
    random_.seed(seed);
    const std::string& path = paths_[below(2)];
    const std::string content = whole.try_emplace(path, read(*index(path))).first->second;
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(options_.cache_path))
      if (entry.path().extension() == ".npy" || entry.path().extension() == ".txt")
        files.push_back(entry.path());
    std::ranges::sort(files);
    const std::filesystem::path& file = files[below(files.size())];
    std::string bytes = read_file(file);
    damage(bytes);
    write_file_atomically(file, bytes);
    // An array's type is in no checksum: it may be refused.
    const std::string now = read_or_refused(path);
    EXPECT_TRUE(now == content || (now.empty() && file.extension() == ".npy")) << file << now;
    if (now.empty()) std::filesystem::remove_all(options_.cache_path);
  });
  EXPECT_GT(read_, 10);
}

TEST_F(MultimodalIndexFuzz, DamagedNumbersStayWithinTheArrays) {
  std::map<std::string, std::pair<std::string, std::vector<Stored>>> corpus;
  repeat_with_seeds(200, [&](uint32_t seed) {
    random_.seed(seed);
    const std::string& path = paths_[below(2)];
    auto& [description, arrays] = corpus[path];
    if (arrays.empty()) {
      description = index(path)->description();
      arrays = stored(description);
      ASSERT_EQ(arrays.size(), kNames.size());
    }
    std::vector<Stored> damaged = arrays;
    for (size_t edits = 1 + below(3); edits > 0; --edits) damage(damaged[below(damaged.size())]);
    store(description, damaged);
    read_or_refused(path);
  });
  EXPECT_GT(read_, 20);
  EXPECT_GT(refused_, 20);
}

}  // namespace
}  // namespace megatron
