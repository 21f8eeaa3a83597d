// Saving and loading with one rank: contents, accounting of tensors, existing directories,
// background saves.
#include "megatron/dist_checkpointing/save.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/async_saver.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "test_support.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(Save, RoundTripsTensorsStateAndFiles) {
  ScratchFolder folder;
  TinyModel model(7);
  const SaveResult result =
      save_checkpoint(request_for(model, folder.path() / "deep" / "ckpt", 100));
  EXPECT_EQ(result.directory.filename(), "iter_0000100");
  EXPECT_TRUE(result.warnings.empty());
  EXPECT_TRUE(holds_seed(result.directory, 7));
  EXPECT_TRUE(verify_checkpoint(result.directory).empty());
  EXPECT_TRUE(verify_checkpoint(result.directory, {.threads = 1, .from_disk = true}).empty());

  const Checkpoint checkpoint(result.directory);
  EXPECT_EQ(checkpoint.iteration(), 100);
  EXPECT_EQ(nlohmann::json::parse(checkpoint.state()).at("consumed_samples"), 800);
  EXPECT_EQ(checkpoint.read_file("config.yaml"), "seed: 1\n");
  EXPECT_EQ(checkpoint.read_file("tokenizer/tokenizer.json"), "{}");
  EXPECT_TRUE(checkpoint.has_file("config.yaml"));
  EXPECT_FALSE(checkpoint.has_file("merges.txt"));
  EXPECT_THAT(error_of([&] { checkpoint.read_file("merges.txt"); }),
              HasSubstr("holds no file merges.txt"));
  EXPECT_EQ(read_latest_hint(folder.path() / "deep" / "ckpt"), 100);
  EXPECT_THAT(names_in(folder.path() / "deep" / "ckpt"), ElementsAre("iter_0000100", kLatestName));
}

TEST(Save, AsksForTensorsThatHaveNoMemory) {
  ScratchFolder folder;
  TinyModel model(7);
  SaveRequest request = request_for(model, folder.path(), 1);
  std::map<std::string, void*> memory;
  for (ShardedTensor& tensor : request.tensors)
    memory[tensor.key] = std::exchange(tensor.data, nullptr);
  std::vector<std::string> asked;
  request.provide = [&](const ShardedTensor& tensor) {
    asked.push_back(tensor.key);
    return memory.at(tensor.key);
  };
  EXPECT_TRUE(holds_seed(save_checkpoint(request).directory, 7));
  EXPECT_EQ(asked.size(), memory.size()) << "each once";
}

// A file of 8 bytes that are not ours, then the matrix [[1, 2], [3, 4], [5, 6]] by columns.
TEST(Checkpoint, ReadsFilesOfOtherProgramsAndTransposedMatrices) {
  ScratchFolder folder;
  const float columns[] = {1, 3, 5, 2, 4, 6};
  spill(folder.path() / "w",
        "8 bytes " + std::string(reinterpret_cast<const char*>(columns), sizeof columns));
  Manifest manifest;
  StoredFile file;
  file.name = "w";
  file.bytes = 32;
  file.header_bytes = 8;
  file.has_checksums = false;
  manifest.files = {file};
  // Its last two rows come first.
  manifest.tensors["w"] = {DType::kFloat32,
                           {3, 2},
                           {{0, 4, {{0, 0}, {2, 2}}, 0, 4, 3}, {0, 0, {{2, 0}, {1, 2}}, 0, 2, 3}}};
  const Checkpoint checkpoint(folder.path(), manifest);
  double out[6] = {};
  ShardedTensor wanted;
  wanted.key = "w";
  wanted.dtype = DType::kFloat64;
  wanted.global_shape = {3, 2};
  wanted.data = out;
  LoadOptions convert;
  convert.convert_dtype = true;
  checkpoint.load({&wanted, 1}, convert);
  EXPECT_THAT(out, ElementsAre(3, 4, 5, 6, 1, 2));

  // A rank's column of rows 1 and 2, in the type of the file.
  float part[2] = {};
  wanted.dtype = DType::kFloat32;
  wanted.local_shape = {2, 1};
  wanted.pieces = {{{{1, 1}, {2, 1}}, {0, 0}}};
  wanted.data = part;
  checkpoint.load({&wanted, 1});
  EXPECT_THAT(part, ElementsAre(6, 2));

  wanted.flat_begin = 1;
  wanted.flat_end = 2;
  EXPECT_EQ(error_of([&] { checkpoint.load({&wanted, 1}); }),
            "w: a flat range of a tensor that is stored with a stride cannot be read");
  manifest.tensors["w"].fragments[0].offset = 8;
  EXPECT_THAT(error_of([&] { Checkpoint(folder.path(), manifest); }),
              HasSubstr("does not fit into the 24 data bytes of w"));
  manifest.tensors["w"].fragments[0].column_stride = 1;
  EXPECT_THAT(error_of([&] { Checkpoint(folder.path(), manifest); }),
              HasSubstr("a fragment with a stride is no whole part of a matrix"));
  spill(folder.path() / "w", "short");
  EXPECT_NE(error_of([&] { Checkpoint(folder.path(), manifest); }), "");
}

// [[1, 2, 3], [4, 5, 6]] by rows: its last two columns, then its first, make a matrix.
TEST(Checkpoint, ReadsColumnsOfLargerMatrices) {
  ScratchFolder folder;
  const float rows[] = {1, 2, 3, 4, 5, 6};
  spill(folder.path() / "w", std::string(reinterpret_cast<const char*>(rows), sizeof rows));
  Manifest manifest;
  StoredFile file;
  file.name = "w";
  file.bytes = sizeof rows;
  file.has_checksums = false;
  manifest.files = {file};
  manifest.tensors["w"] = {
      DType::kFloat32,
      {2, 3},
      {{0, 4, {{0, 0}, {2, 2}}, 0, 4, 0, 3}, {0, 0, {{0, 2}, {2, 1}}, 0, 2, 0, 3}}};
  const Checkpoint checkpoint(folder.path(), manifest);
  double out[6] = {};
  ShardedTensor wanted;
  wanted.key = "w";
  wanted.dtype = DType::kFloat64;
  wanted.global_shape = {2, 3};
  wanted.data = out;
  LoadOptions convert;
  convert.convert_dtype = true;
  checkpoint.load({&wanted, 1}, convert);
  EXPECT_THAT(out, ElementsAre(2, 3, 1, 5, 6, 4));

  // A rank's last two columns of row 1, in the type of the file.
  float part[2] = {};
  wanted.dtype = DType::kFloat32;
  wanted.local_shape = {1, 2};
  wanted.pieces = {{{{1, 1}, {1, 2}}, {0, 0}}};
  wanted.data = part;
  checkpoint.load({&wanted, 1});
  EXPECT_THAT(part, ElementsAre(6, 4));

  manifest.tensors["w"].fragments[0].offset = 8;
  EXPECT_THAT(error_of([&] { Checkpoint(folder.path(), manifest); }),
              HasSubstr("does not fit into the 24 data bytes of w"));
  for (const int64_t stride : {1, 3}) {  // too small; both at once
    manifest.tensors["w"].fragments[0].offset = 4;
    manifest.tensors["w"].fragments[0].row_stride = stride;
    manifest.tensors["w"].fragments[0].column_stride = stride - 1;
    EXPECT_THAT(error_of([&] { Checkpoint(folder.path(), manifest); }),
                HasSubstr("a fragment with a stride is no whole part of a matrix"));
  }
}

TEST(Save, WritesPlainSafetensorsUnderTheTensorsOwnNames) {
  ScratchFolder folder;
  TinyModel model(7);
  const SafetensorsFile file(save_checkpoint(request_for(model, folder.path(), 1)).directory /
                             "rank_00000.safetensors");
  EXPECT_EQ(file.entry("model.weight").shape, (std::vector<int64_t>{40, 64}));
  EXPECT_EQ(file.entry("optimizer.step").shape, (std::vector<int64_t>{}));
  EXPECT_EQ(file.header().metadata.at("megatron_iteration"), "1");
  EXPECT_EQ(file.header().data_begin % 8, 0u);
  for (const SafetensorsEntry& entry : file.header().tensors)
    EXPECT_EQ(entry.begin % static_cast<uint64_t>(size_of(entry.dtype)), 0u) << entry.name;
}

TEST(Save, OnlyReplicaZeroWritesAndEmptyTensorsSurvive) {
  ScratchFolder folder;
  float value = 3;
  ShardedTensor empty;
  empty.key = "empty";
  empty.global_shape = {0, 4};
  ShardedTensor replica;
  replica.key = "replica";
  replica.global_shape = {1};
  replica.replica_id = 1;
  replica.data = &value;
  ShardedTensor kept = replica;
  kept.key = "kept";
  kept.replica_id = 0;
  SaveRequest request;
  request.root = folder.path();
  request.tensors = {empty, replica, kept};
  const fs::path directory = save_checkpoint(request).directory;
  const Checkpoint checkpoint(directory);
  EXPECT_EQ(checkpoint.manifest().tensors.count("replica"), 0u);
  value = 0;
  checkpoint.load(std::vector<ShardedTensor>{empty, kept});
  EXPECT_EQ(value, 3);
}

TEST(Load, NamesEveryDifference) {
  ScratchFolder folder;
  TinyModel model(7);
  const fs::path directory = save_checkpoint(request_for(model, folder.path(), 1)).directory;
  std::vector<ShardedTensor> wanted = model.tensors();
  float extra = 0;
  wanted[0].global_shape = wanted[0].local_shape = {64, 40};
  wanted[1].dtype = DType::kInt32;
  wanted.erase(wanted.begin() + 2);
  wanted.push_back({"model.new", DType::kFloat32, {1}, {1}, {}, 0, -1, 0, &extra});
  const std::string error = error_of([&] { Checkpoint(directory).load(wanted); });
  EXPECT_THAT(error,
              HasSubstr(directory.string() +
                        ": model.weight has global shape [40, 64], the model expects [64, 40]"));
  EXPECT_THAT(error, HasSubstr("detail: model.bias is stored as F32, the model expects I32"));
  EXPECT_THAT(error, HasSubstr("detail: model.new is not in the checkpoint, the model expects it"));
  EXPECT_THAT(error,
              HasSubstr("detail: model.half is in the checkpoint, the model has no such tensor"));
}

TEST(Load, AllowListsAreExplicit) {
  ScratchFolder folder;
  TinyModel model(7);
  const fs::path directory = save_checkpoint(request_for(model, folder.path(), 1)).directory;
  std::vector<ShardedTensor> wanted = model.tensors();
  float extra = 5;
  wanted.resize(3);
  wanted.push_back({"lora.a", DType::kFloat32, {1}, {1}, {}, 0, -1, 0, &extra});
  LoadOptions options;
  options.allow_missing = {"lora.*"};
  options.allow_unexpected = {"optimizer.*"};
  const LoadReport report = Checkpoint(directory).load(wanted, options);
  EXPECT_THAT(report.missing, ElementsAre("lora.a"));
  EXPECT_THAT(report.unexpected, ElementsAre("optimizer.exp_avg.model.weight", "optimizer.step"));
  EXPECT_EQ(extra, 5);
  options.allow_unexpected.clear();
  options.wanted_elsewhere = {"opt*w*t", "optimizer.step"};
  EXPECT_TRUE(Checkpoint(directory).load(wanted, options).unexpected.empty());
}

TEST(Load, ConvertsFloatingTypesWhenAsked) {
  ScratchFolder folder;
  std::mt19937_64 random(3);
  std::vector<double> values = {
      0.0,   -0.0,   1.0,     65504.0, 65519.0, 65520.0, 1e-8, 6e-8, 5.9604644775390625e-08,
      1e300, 3.4e38, INFINITY};
  for (int i = 0; i < 2000; ++i)
    values.push_back(
        std::ldexp(static_cast<double>(random()), static_cast<int>(random() % 90) - 100));
  const auto count = static_cast<int64_t>(values.size());
  SaveRequest request;
  request.root = folder.path();
  request.tensors = {{"x", DType::kFloat64, {count}, {count}, {}, 0, -1, 0, values.data()}};
  const Checkpoint checkpoint(save_checkpoint(request).directory);
  const auto load_as = [&](DType dtype, void* out) {
    LoadOptions options;
    options.convert_dtype = true;
    checkpoint.load(std::vector<ShardedTensor>{{"x", dtype, {count}, {count}, {}, 0, -1, 0, out}},
                    options);
  };
  std::vector<float> single(values.size());
  load_as(DType::kFloat32, single.data());
  for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(single[i], static_cast<float>(values[i]));
  // Rounding to nearest: no other 16-bit value is nearer than the result, and ties go to even.
  std::vector<uint16_t> half(values.size());
  load_as(DType::kFloat16, half.data());
  for (size_t i = 0; i < values.size(); ++i) {
    _Float16 expected;
    expected = static_cast<_Float16>(values[i]);
    EXPECT_EQ(half[i], std::bit_cast<uint16_t>(expected)) << values[i];
  }
  load_as(DType::kBFloat16, half.data());
  for (size_t i = 0; i < values.size(); ++i) {
    const auto back = [](uint16_t bits) {
      return double{std::bit_cast<float>(static_cast<uint32_t>(bits) << 16)};
    };
    if (std::isinf(back(half[i]))) continue;
    const double error = std::abs(back(half[i]) - values[i]);
    EXPECT_LE(error, std::abs(back(static_cast<uint16_t>(half[i] + 1)) - values[i]));
    const double below = half[i] & 0x7fff ? back(static_cast<uint16_t>(half[i] - 1)) : INFINITY;
    EXPECT_LE(error, std::abs(below - values[i]));
  }
}

TEST(Save, RefusesContradictions) {
  ScratchFolder folder;
  float value = 1;
  const auto error_with = [&](const std::function<void(ShardedTensor&)>& change) {
    ShardedTensor tensor{"w", DType::kFloat32, {1}, {1}, {}, 0, -1, 0, &value};
    change(tensor);
    SaveRequest request;
    request.root = folder.path();
    request.tensors = {tensor};
    const std::string error = error_of([&] { save_checkpoint(request); });
    EXPECT_TRUE(names_in(folder.path()).empty()) << error;
    return error;
  };
  EXPECT_THAT(error_with([](ShardedTensor& t) { t.data = nullptr; }), HasSubstr("w has no memory"));
  EXPECT_THAT(error_with([](ShardedTensor& t) { t.key.clear(); }), HasSubstr("has no name"));
  EXPECT_THAT(error_with([](ShardedTensor& t) { t.global_shape = {2}; }),
              HasSubstr("no pieces say how they relate"));
  EXPECT_THAT(error_with([](ShardedTensor& t) { t.flat_end = 2; }),
              HasSubstr("the flat range 0 to 2 lies outside"));
  EXPECT_THAT(error_with([](ShardedTensor& t) { t.global_shape = {-1}; }),
              HasSubstr("extents are at least 0"));
  EXPECT_THAT(error_with([](ShardedTensor& t) {
                t.global_shape = {2};
                t.pieces = {{{{2}, {1}}, {0}}};
              }),
              HasSubstr("lies outside the global shape [2]"));
  EXPECT_THAT(error_with([](ShardedTensor& t) {
                t.global_shape = {2};
                t.pieces = {{{{1}, {1}}, {0}}};
              }),
              HasSubstr("tensor w: its fragments hold 1 of its 2 elements"));
  SaveRequest request;
  request.root = folder.path();
  request.state = "[1]";
  EXPECT_THAT(error_of([&] { save_checkpoint(request); }), HasSubstr("not a JSON object"));
  request.state = "{";
  EXPECT_THAT(error_of([&] { save_checkpoint(request); }), HasSubstr("is not JSON"));
  request.state = "{}";
  request.files = {{"../evil", ""}};
  EXPECT_THAT(error_of([&] { save_checkpoint(request); }),
              HasSubstr("\"../evil\" is no name of a file inside a checkpoint"));
  request.files = {{"manifest.json", ""}};
  EXPECT_THAT(error_of([&] { save_checkpoint(request); }),
              HasSubstr("may not be called manifest.json"));
  EXPECT_TRUE(names_in(folder.path()).empty());
}

TEST(Save, NeverOverwritesAUsableCheckpointUnlessTold) {
  ScratchFolder folder;
  TinyModel first(1), second(2);
  const fs::path directory = save_checkpoint(request_for(first, folder.path(), 5)).directory;
  SaveRequest request = request_for(second, folder.path(), 5);
  EXPECT_THAT(error_of([&] { save_checkpoint(request); }),
              HasSubstr("exists already and is usable"));
  EXPECT_TRUE(holds_seed(directory, 1));
  request.replace_existing = true;
  save_checkpoint(request);
  EXPECT_TRUE(holds_seed(directory, 2));
  EXPECT_THAT(names_in(folder.path()), ElementsAre("iter_0000005", kLatestName));
}

TEST(Save, MovesAnUnusableDirectoryAside) {
  ScratchFolder folder;
  TinyModel first(1), second(2);
  const fs::path directory = save_checkpoint(request_for(first, folder.path(), 5)).directory;
  flip_bit(directory / "rank_00000.safetensors", 8 * 5000);
  const SaveResult result = save_checkpoint(request_for(second, folder.path(), 5));
  EXPECT_TRUE(holds_seed(directory, 2));
  ASSERT_EQ(result.warnings.size(), 1u);
  EXPECT_THAT(result.warnings[0], HasSubstr("was moved to " + directory.string() + ".unusable-0"));
  EXPECT_THAT(names_in(folder.path()),
              ElementsAre("iter_0000005", "iter_0000005.unusable-0", kLatestName));
}

TEST(AsyncSaver, SavesInOrderAndReportsErrors) {
  ScratchFolder folder;
  std::weak_ptr<TinyModel> watched;
  AsyncSaver saver(2);
  for (int64_t iteration = 1; iteration <= 5; ++iteration) {
    auto model = std::make_shared<TinyModel>(static_cast<uint64_t>(iteration));
    watched = model;
    saver.submit(request_for(*model, folder.path(), iteration), model);
  }
  std::vector<SaveOutcome> outcomes = saver.finish();
  EXPECT_TRUE(watched.expired());
  ASSERT_EQ(outcomes.size(), 5u);
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(outcomes[i].error, "");
    EXPECT_TRUE(holds_seed(outcomes[i].result.directory, i + 1));
  }
  auto model = std::make_shared<TinyModel>(9);
  saver.submit(request_for(*model, folder.path(), 3), model);
  outcomes = saver.finish();
  ASSERT_EQ(outcomes.size(), 1u);
  EXPECT_EQ(outcomes[0].iteration, 3);
  EXPECT_THAT(outcomes[0].error, HasSubstr("saving iteration 3 failed"));
  EXPECT_THAT(outcomes[0].error, HasSubstr("exists already and is usable"));
  EXPECT_TRUE(saver.poll().empty());
  EXPECT_EQ(saver.in_flight(), 0);
}

TEST(Save, ReadersBesideAWriterSeeOnlyWholeCheckpoints) {
  ScratchFolder folder;
  std::atomic<bool> stop{false};
  std::atomic<int> seen{0};
  std::thread reader([&] {
    for (bool last = false; !last;) {
      last = stop;  // one more pass after the last save
      for (const CheckpointEntry& entry : find_checkpoints(folder.path(), CheckDepth::kFull)) {
        // The only legal trouble of a reader is that retention has taken the directory away.
        if (entry.problem.empty()) {
          ++seen;
        } else {
          EXPECT_FALSE(fs::exists(entry.directory)) << entry.problem;
        }
      }
    }
  });
  for (int64_t iteration = 1; iteration <= 40; ++iteration) {
    TinyModel model(static_cast<uint64_t>(iteration));
    SaveRequest request = request_for(model, folder.path(), iteration);
    request.retention.keep_last = 2;
    EXPECT_TRUE(save_checkpoint(request).warnings.empty());
  }
  stop = true;
  reader.join();
  EXPECT_GT(seen.load(), 0);
  EXPECT_THAT(names_in(folder.path()), ElementsAre("iter_0000039", "iter_0000040", kLatestName));
}

}  // namespace
}  // namespace megatron
