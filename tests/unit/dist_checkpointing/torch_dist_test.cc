// Checkpoints of torch.distributed.checkpoint: written by megatron-core, by us, damaged and
// malicious ones.
#include "megatron/dist_checkpointing/foreign/torch_dist.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/dist_checkpointing/foreign/pickle.h"
#include "megatron/dist_checkpointing/foreign/torch_archive.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

const fs::path kGolden = MEGATRON_SOURCE_DIR "/tests/golden/torch_dist";

bool everything(std::string_view) { return true; }

std::span<const std::byte> bytes_of(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// Without waiting for the disk.
void write(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

class TorchDistTest : public testing::Test {
 protected:
  TorchDistTest()
      : folder_(fs::temp_directory_path() /
                cat("torch_dist_", ::getpid(), "_",
                    testing::UnitTest::GetInstance()->current_test_info()->name())) {
    fs::create_directories(folder_);
  }
  ~TorchDistTest() override { fs::remove_all(folder_); }

  fs::path copy(const std::string& name) const {
    const fs::path from = kGolden / name / (name == "gpt" ? "iter_0000000" : "iter_0000005"),
                   to = folder_ / name;
    fs::remove_all(to);
    fs::copy(from, to, fs::copy_options::recursive);
    return to;
  }

  fs::path folder_;
};

std::vector<float> load(const fs::path& directory, const TorchDistFiles& files,
                        const std::string& key) {
  const StoredTensor& stored = files.manifest.tensors.at(key);
  int64_t elements = 1;
  for (const int64_t extent : stored.shape) elements *= extent;
  std::vector<float> out(static_cast<size_t>(elements));
  ShardedTensor tensor;
  tensor.key = key;
  tensor.dtype = DType::kFloat32;
  tensor.global_shape = stored.shape;
  tensor.data = out.data();
  LoadOptions options;
  options.convert_dtype = true;
  options.wanted_elsewhere = {"*"};
  Checkpoint(directory, files.manifest).load({&tensor, 1}, options);
  return out;
}

TEST_F(TorchDistTest, WhatMegatronCoreWroteIsRead) {
  const fs::path folder = kGolden / "llama";
  const auto directory = find_torch_dist(folder);
  ASSERT_TRUE(directory);
  EXPECT_EQ(directory->filename(), "iter_0000005");
  EXPECT_FALSE(find_torch_dist(folder, 4));
  EXPECT_FALSE(find_torch_dist(kGolden));
  const TorchDistFiles files =
      open_torch_dist(*directory, [](std::string_view key) { return key.starts_with("decoder."); });
  EXPECT_EQ(files.iteration, 5);
  // Two ranks, gate and up: four chunks per layer.
  const StoredTensor& fc1 = files.manifest.tensors.at("decoder.layers.mlp.linear_fc1.weight");
  EXPECT_THAT(fc1.shape, ElementsAre(3, 96, 32));
  EXPECT_EQ(fc1.fragments.size(), 12u);
  EXPECT_THAT(files.others,
              testing::IsSupersetOf({"embedding.word_embeddings.weight", "rng_state/shard_0.0_1.1",
                                     "optimizer.state.exp_avg.output_layer.weight"}));
  const PickleValue* args = files.common.root().find("args");
  ASSERT_TRUE(args != nullptr && args->is_object("argparse.Namespace"));
  EXPECT_EQ(args->attribute("num_layers")->integer, 3);
  EXPECT_EQ(args->attribute("normalization")->text, "RMSNorm");
  EXPECT_EQ(args->attribute("params_dtype")->text, "torch.float32");
  const std::vector<float> norm = load(*directory, files, "decoder.final_layernorm.weight");
  for (const float value : norm) EXPECT_NEAR(value, 1.0, 0.8);
}

TEST_F(TorchDistTest, TheCommonStateMayBeAnObjectOfTheDataFiles) {
  const TorchDistFiles files = open_torch_dist(kGolden / "gpt" / "iter_0000000", everything);
  ASSERT_NE(files.common.root().find("args"), nullptr);
  EXPECT_EQ(files.common.root().find("args")->attribute("num_layers")->integer, 2);
  EXPECT_EQ(files.common.root().find("checkpoint_version")->number, 3.0);
}

TEST_F(TorchDistTest, WhatIsWrittenIsRead) {
  const fs::path directory = folder_ / "iter_0000007";
  std::vector<float> data(2 * 3 * 5);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i) * 0.5f;
  const std::vector<uint16_t> halves = {0x3f80, 0x4000, 0x4040};  // 1, 2, 3 in bf16
  {
    TorchDistWriter writer(directory);
    for (int64_t i = 0; i < 2; ++i)
      writer.add_tensor("stack", DType::kFloat32, {2, 3, 5}, {{i, 0, 0}, {1, 3, 5}},
                        data.data() + i * 15);
    writer.add_empty_object("module._extra_state/shard_0_1");
    writer.add_tensor("halves", DType::kBFloat16, {3}, {{0}, {3}}, halves.data());
    const std::pair<std::string, std::string> common[] = {
        {pickle::text("iteration"), pickle::integer(7)},
        {pickle::text("large"), pickle::integer(int64_t{1} << 40)},
        {pickle::text("negative"), pickle::integer(-3)},
        {pickle::text("number"), pickle::number(-2.5)}};
    EXPECT_FALSE(find_torch_dist(directory));  // not before it is finished
    writer.finish(pickle::dict(common));
  }
  EXPECT_EQ(find_torch_dist(directory), directory);
  const TorchDistFiles files = open_torch_dist(directory, everything);
  EXPECT_EQ(files.iteration, 7);
  EXPECT_EQ(files.common.root().find("large")->integer, int64_t{1} << 40);
  EXPECT_EQ(files.common.root().find("negative")->integer, -3);
  EXPECT_EQ(files.common.root().find("number")->number, -2.5);
  EXPECT_EQ(load(directory, files, "stack"), data);
  EXPECT_THAT(load(directory, files, "halves"), ElementsAre(1.0f, 2.0f, 3.0f));
  EXPECT_THAT(files.others, ElementsAre("module._extra_state/shard_0_1"));
  EXPECT_THROW(TorchDistWriter{directory}, Error);  // holds something
}

TEST_F(TorchDistTest, CutFilesAreRefused) {
  for (const std::string name : {"llama", "gpt"}) {
    for (const fs::directory_entry& entry : fs::directory_iterator(copy(name))) {
      const std::string text = read_file(entry.path());
      const fs::path directory = folder_ / name;
      for (const double part : {0.0, 0.3, 0.7, 0.999}) {
        const auto size = static_cast<size_t>(part * static_cast<double>(text.size()));
        write(entry.path(), text.substr(0, size));
        if (entry.path().filename() == kTorchDistConfig)
          EXPECT_FALSE(find_torch_dist(directory));
        else
          EXPECT_THROW(open_torch_dist(directory, everything), Error)
              << entry.path() << " cut to " << size;
      }
      write(entry.path(), text);
    }
  }
}

// Whatever the bytes are, they are read or refused in our words.
TEST_F(TorchDistTest, ChangedBytesAreReadOrRefused) {
  uint64_t state = 99;
  const auto draw = [&](uint64_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % below;
  };
  const fs::path directory = copy("gpt");
  int refused = 0;
  for (const char* name : {kTorchDistMetadata, "__0_0.distcp", "__0_1.distcp"}) {
    const std::string text = read_file(directory / name);
    for (int i = 0; i < 300; ++i) {
      std::string changed = text;
      for (uint64_t n = 1 + draw(4); n-- > 0;)
        changed[draw(changed.size())] = static_cast<char>(draw(256));
      write(directory / name, changed);
      try {
        open_torch_dist(directory, everything);
      } catch (const Error&) {
        ++refused;
      }
    }
    write(directory / name, text);
  }
  EXPECT_GT(refused, 100);
}

TEST_F(TorchDistTest, NothingThatAFileNamesIsCalled) {
  const fs::path directory = copy("gpt"), proof = folder_ / "proof";
  const std::string argument[] = {pickle::text("touch " + proof.string())};
  const std::string attack = pickle::file(pickle::call(pickle::name("os", "system"), argument));
  write(directory / kTorchDistMetadata, attack);
  EXPECT_THAT(error_of([&] { open_torch_dist(directory, everything); }),
              HasSubstr(".metadata: names os.system, which no file of this kind needs\nhint: "
                        "nothing of it was executed"));
  const fs::path other = copy("llama");
  const std::pair<std::string, std::string> common[] = {
      {pickle::text("iteration"), pickle::integer(5)},
      {pickle::text("args"), pickle::call(pickle::name("os", "system"), argument)}};
  write(other / "common.pt", archive_of_pickle(pickle::file(pickle::dict(common))));
  EXPECT_EQ(open_torch_dist(other, everything).common.root().find("args")->text, "os.system");
  EXPECT_FALSE(fs::exists(proof));
}

TEST_F(TorchDistTest, FilesOutsideOfTheFolderAreNotOpened) {
  const fs::path directory = copy("gpt");
  std::string text = read_file(directory / kTorchDistMetadata);
  const std::string name = "__0_0.distcp", other = "../../../etc";  // of the same length
  ASSERT_EQ(name.size(), other.size());
  text.replace(text.find(name), name.size(), other);
  write(directory / kTorchDistMetadata, text);
  EXPECT_THAT(error_of([&] { open_torch_dist(directory, everything); }),
              HasSubstr("lies in \"../../../etc\", which is no name of a file in the folder"));
}

TEST(PickleTest, Values) {
  // Protocol 4 as Python writes it: {"a": [1, 2.5, None, True], "b": (b"x", -1, 2**40)}
  constexpr char kText[] =
      "\x80\x04\x95\x36\0\0\0\0\0\0\0}\x94(\x8c\x01"
      "a\x94]\x94(K\x01G@\x04\0\0\0\0\0\0N\x88"
      "e\x8c\x01"
      "b\x94"
      "C\x01x\x94J\xff\xff\xff\xff\x8a\x06\0\0\0\0\0\x01\x87\x94u.";
  const std::string text(kText, sizeof kText - 1);
  const Pickle pickled(bytes_of(text), "p", everything);
  const PickleValue& a = *pickled.root().find("a");
  ASSERT_EQ(a.items.size(), 4u);
  EXPECT_EQ(a.items[0]->integer, 1);
  EXPECT_EQ(a.items[1]->number, 2.5);
  EXPECT_TRUE(a.items[2]->is(PickleValue::Kind::kNone));
  EXPECT_EQ(a.items[3]->integer, 1);
  const PickleValue& b = *pickled.root().find("b");
  EXPECT_EQ(b.items[0]->text, "x");
  EXPECT_EQ(b.items[1]->integer, -1);
  EXPECT_EQ(b.items[2]->integer, int64_t{1} << 40);
}

TEST(PickleTest, BrokenProgramsAreRefused) {
  const auto error = [](const std::string& text) {
    return error_of([&] { Pickle(bytes_of(text), "p", everything); });
  };
  EXPECT_THAT(error("\x80\x02N"), HasSubstr("p: the pickle is cut short at byte 3"));
  EXPECT_THAT(error("\x80\x02."), HasSubstr("a value is missing on the stack"));
  EXPECT_THAT(error("\x80\x02NN."), HasSubstr("it ends with values that nothing uses"));
  EXPECT_THAT(error("\x80\x02t."), HasSubstr("a mark is missing on the stack"));
  EXPECT_THAT(error("\x80\x02(N."), HasSubstr("it ends with values that nothing uses"));
  EXPECT_THAT(error("\x80\x02h\x07."), HasSubstr("it refers to a value that it has not made"));
  EXPECT_THAT(error("\x80\x02NNb."), HasSubstr("a state is given to what is no object"));
  EXPECT_THAT(error("\x80\x02NNa."), HasSubstr("values are added to what is no list"));
  EXPECT_THAT(error("\x80\x02NNR."), HasSubstr("something is called that has no name"));
  EXPECT_THAT(error("\x80\x02X\xff\xff\xff\xff."), HasSubstr("the pickle is cut short"));
  EXPECT_THAT(error("\x80\x02X\x01" + std::string(3, '\0') + "\xff."),
              HasSubstr("a text is not UTF-8"));
  EXPECT_THAT(error("\x80\x02i"), HasSubstr("it holds the operation 105, which is not built"));
  // A list that holds itself is a value as any other.
  EXPECT_EQ(error("\x80\x02]q" + std::string(1, '\0') + "h" + std::string(1, '\0') + "a."), "");
}

TEST(TorchArchiveTest, TheChecksumOfThePickleIsVerified) {
  const fs::path path = fs::temp_directory_path() / cat("torch_archive_", ::getpid());
  const fs::path folder = path;
  fs::create_directories(folder);
  TorchDistWriter writer(folder / "a");
  const float one = 1.0f;
  writer.add_tensor("x", DType::kFloat32, {1}, {{0}, {1}}, &one);
  writer.finish(pickle::dict({}));
  std::string text = read_file(folder / "a" / "__0_0.distcp");
  text[text.find("storage")] = 'S';
  write(folder / "a" / "__0_0.distcp", text);
  EXPECT_THAT(error_of([&] { open_torch_dist(folder / "a", everything); }),
              HasSubstr("x at [0]: the checksum of data.pkl does not match"));
  fs::remove_all(folder);
}

}  // namespace
}  // namespace megatron
