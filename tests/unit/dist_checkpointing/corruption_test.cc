// Any damage of any file of a checkpoint is detected: by verification, and by loading if the
// damaged part is read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "test_support.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// A checkpoint with more than one block in its tensor file.
class Corruption : public testing::Test {
 protected:
  static constexpr int64_t kRows = 3000;
  void SetUp() override {
    SaveRequest request = request_for(model_, folder_.path(), 3);
    directory_ = save_checkpoint(request).directory;
    ASSERT_EQ(files_below(directory_).size(), 4u);
    ASSERT_TRUE(verify_checkpoint(directory_).empty());
  }
  // The damage must be found, named by file, and undone damage must verify again.
  void expect_found(const fs::path& damaged) {
    const std::vector<std::string> problems = verify_checkpoint(directory_, {.threads = 1});
    ASSERT_FALSE(problems.empty()) << damaged;
    EXPECT_THAT(problems[0], HasSubstr(damaged.filename().string()));
    const StartDecision decision = [&] {
      StartRequest request{StartMode::kResume, folder_.path(), {}, {}, false};
      try {
        return resolve_start(request);
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("every checkpoint in it is damaged"));
        return StartDecision{};
      }
    }();
    EXPECT_FALSE(decision.checkpoint.has_value());
  }

  ScratchFolder folder_;
  TinyModel model_{5, kRows};
  fs::path directory_;
  std::mt19937_64 random_{17};
};

TEST_F(Corruption, OneFlippedBitInAnyFile) {
  for (const fs::path& file : files_below(directory_)) {
    for (int i = 0; i < 60; ++i) {
      const uint64_t bit = random_() % (fs::file_size(file) * 8);
      flip_bit(file, bit);
      const std::vector<std::string> problems = verify_checkpoint(directory_, {.threads = 1});
      EXPECT_FALSE(problems.empty()) << file << " bit " << bit;
      EXPECT_THAT(problems, testing::Contains(HasSubstr(file.filename().string())));
      if (i == 0) expect_found(file);
      flip_bit(file, bit);
    }
  }
  EXPECT_TRUE(verify_checkpoint(directory_).empty());
}

TEST_F(Corruption, LoadFindsDamageInWhatItReads) {
  const fs::path file = directory_ / "rank_00000.safetensors";
  const Checkpoint checkpoint(directory_);
  const StoredFile& stored = checkpoint.manifest().files[0];
  for (int i = 0; i < 60; ++i) {
    const uint64_t bit =
        (stored.header_bytes * 8) + random_() % ((stored.bytes - stored.header_bytes) * 8);
    flip_bit(file, bit);
    TinyModel target(0, kRows);
    const uint64_t block = (bit / 8 - stored.header_bytes) / kCheckpointBlockBytes;
    const std::string error = error_of([&] { checkpoint.load(target.tensors(), {.threads = 1}); });
    EXPECT_THAT(error, HasSubstr(cat(file.string(), ": the checksum of bytes ",
                                     stored.header_bytes + block * kCheckpointBlockBytes, " to ")));
    flip_bit(file, bit);
  }
  TinyModel target(0, kRows);
  checkpoint.load(target.tensors());
  EXPECT_TRUE(target.equals(model_));
}

TEST_F(Corruption, DamageElsewhereDoesNotDisturbAPartialLoad) {
  const Checkpoint checkpoint(directory_);
  const StoredTensor& moments = checkpoint.manifest().tensors.at("optimizer.exp_avg.model.weight");
  ASSERT_EQ(moments.fragments[0].offset, 0u);
  flip_bit(directory_ / "rank_00000.safetensors",
           (checkpoint.manifest().files[0].header_bytes + 10) * 8);
  float bias[33];
  const std::vector<ShardedTensor> wanted = {
      {"model.bias", DType::kFloat32, {33}, {33}, {}, 0, -1, 0, bias}};
  LoadOptions options;
  options.allow_unexpected = {"*"};
  checkpoint.load(wanted, options);  // its block is whole
  EXPECT_FALSE(verify_checkpoint(directory_).empty());
}

TEST_F(Corruption, TruncationAndGrowth) {
  for (const fs::path& file : files_below(directory_)) {
    const std::string whole = slurp(file);
    std::vector<size_t> lengths = {
        0, 1, 7, 8, 9, whole.size() / 2, whole.size() - 1, whole.size() + 1, whole.size() + 4096};
    for (int i = 0; i < 20; ++i) lengths.push_back(random_() % whole.size());
    for (size_t length : lengths) {
      if (length == whole.size()) continue;
      fs::resize_file(file, length);
      EXPECT_FALSE(verify_checkpoint(directory_).empty()) << file << " cut to " << length;
      if (file.filename() == "rank_00000.safetensors") {
        EXPECT_THAT(error_of([&] { Checkpoint checkpoint(directory_); }),
                    HasSubstr(cat("is ", length, " bytes long, the manifest says ", whole.size())));
      }
      fs::resize_file(file, 0);
      spill(file, whole);
    }
  }
  EXPECT_TRUE(verify_checkpoint(directory_).empty());
}

TEST_F(Corruption, DeletedFiles) {
  for (const fs::path& file : files_below(directory_)) {
    const std::string whole = slurp(file);
    fs::remove(file);
    expect_found(file);
    fs::create_directory(file);  // something else in its place
    expect_found(file);
    fs::remove(file);
    spill(file, whole);
  }
  EXPECT_TRUE(verify_checkpoint(directory_).empty());
}

TEST_F(Corruption, FilesSwappedWithAnotherCheckpoint) {
  TinyModel other(6, kRows);
  const fs::path second = save_checkpoint(request_for(other, folder_.path(), 4)).directory;
  const auto swap = [&](const char* name) {
    fs::rename(directory_ / name, folder_.path() / "hold");
    fs::rename(second / name, directory_ / name);
    fs::rename(folder_.path() / "hold", second / name);
  };
  swap("rank_00000.safetensors");
  EXPECT_FALSE(verify_checkpoint(directory_).empty());
  EXPECT_FALSE(verify_checkpoint(second).empty());
  swap("rank_00000.safetensors");
  swap("manifest.json");
  EXPECT_FALSE(verify_checkpoint(directory_).empty());
  EXPECT_FALSE(verify_checkpoint(second).empty());
  swap("manifest.json");
  EXPECT_TRUE(verify_checkpoint(directory_).empty());
  // A whole directory under another name is found as well.
  fs::rename(second, folder_.path() / "iter_0000009");
  EXPECT_THAT(find_checkpoints(folder_.path())[0].problem,
              HasSubstr("its manifest is of iteration 4"));
}

TEST_F(Corruption, OldFormatVersionsAreNamed) {
  Manifest manifest = Checkpoint(directory_).manifest();
  const std::string text = encode_manifest(manifest);
  EXPECT_EQ(parse_manifest(text, "m").tensors.size(), manifest.tensors.size());
  EXPECT_THAT(error_of([&] { parse_manifest(text.substr(0, text.size() - 1), "m"); }),
              HasSubstr("m: its checksum does not match"));
  EXPECT_THAT(error_of([&] { parse_manifest("{}", "m"); }),
              HasSubstr("m: is 2 bytes long and holds no manifest"));
}

TEST(Manifest, RefusesContradictionsBehindARightChecksum) {
  const auto refusal = [](const std::function<void(Manifest&)>& change) {
    Manifest manifest;
    manifest.files = {{"f", 8 + 64, 8, 0, {1}}};
    manifest.tensors["w"] = {DType::kFloat32, {4, 4}, {{0, 0, {{0, 0}, {4, 4}}, 0, 16}}};
    EXPECT_NO_THROW(parse_manifest(encode_manifest(manifest), "m"));
    change(manifest);
    return error_of([&] { parse_manifest(encode_manifest(manifest), "m"); });
  };
  EXPECT_THAT(refusal([](Manifest& m) { m.tensors["w"].fragments[0].file = 1; }),
              HasSubstr("m: tensor w: a fragment lies in file 1 of 1"));
  EXPECT_THAT(refusal([](Manifest& m) { m.tensors["w"].fragments[0].offset = 4; }),
              HasSubstr("does not fit into the 64 data bytes of f"));
  EXPECT_THAT(refusal([](Manifest& m) { m.tensors["w"].fragments[0].offset = 1; }),
              HasSubstr("does not fit"));
  EXPECT_THAT(refusal([](Manifest& m) { m.tensors["w"].fragments[0].offset = ~uint64_t{3}; }),
              HasSubstr("expected a whole number below 2^63"));
  EXPECT_THAT(refusal([](Manifest& m) { m.tensors["w"].fragments[0].flat_end = 17; }),
              HasSubstr("flat range 0 to 17 of 16 elements"));
  EXPECT_THAT(refusal([](Manifest& m) { m.tensors["w"].fragments[0].box.offset[0] = 1; }),
              HasSubstr("lies outside the shape [4, 4]"));
  EXPECT_THAT(
      refusal([](Manifest& m) { m.tensors["w"].shape = {int64_t{1} << 40, int64_t{1} << 40}; }),
      HasSubstr("too large"));
  EXPECT_THAT(refusal([](Manifest& m) { m.tensors["w"].fragments.clear(); }),
              HasSubstr("hold 0 of its 16 elements"));
  EXPECT_THAT(refusal([](Manifest& m) { m.files[0].name = "../f"; }),
              HasSubstr("is no name of a file inside the checkpoint"));
  EXPECT_THAT(refusal([](Manifest& m) { m.files[0].name = "/etc/passwd"; }),
              HasSubstr("is no name of a file inside the checkpoint"));
  EXPECT_THAT(refusal([](Manifest& m) { m.files[0].block_hashes.push_back(1); }),
              HasSubstr("2 checksums for 1 blocks"));
  EXPECT_THAT(refusal([](Manifest& m) { m.files.push_back(m.files[0]); }),
              HasSubstr("file f is listed twice"));
  EXPECT_THAT(refusal([](Manifest& m) {
                m.tensors["w"].fragments = {{0, 0, {{0, 0}, {4, 4}}, 0, 8},
                                            {0, 0, {{0, 0}, {4, 4}}, 7, 15}};
              }),
              HasSubstr("elements of the box at [0, 0] are given twice"));
  EXPECT_THAT(refusal([](Manifest& m) {
                m.tensors["w"].fragments = {{0, 0, {{0, 0}, {4, 2}}, 0, 8},
                                            {0, 0, {{2, 1}, {2, 3}}, 0, 6},
                                            {0, 0, {{0, 2}, {1, 2}}, 0, 2}};
              }),
              HasSubstr("are given twice"));
}

}  // namespace
}  // namespace megatron
