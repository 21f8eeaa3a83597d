// GGUF files: element types against the package gguf, values of keys, and files that are damaged.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/foreign/ggml_types.h"
#include "megatron/dist_checkpointing/foreign/gguf_file.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "tests/unit/error_of.h"
#include "tests/unit/gguf_builder.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

const fs::path kGgufGoldens = fs::path(MEGATRON_SOURCE_DIR) / "tests/golden/gguf";

class Gguf : public testing::Test {
 protected:
  void SetUp() override { fs::create_directories(folder_); }
  void TearDown() override { fs::remove_all(folder_); }
  fs::path write(const std::string& bytes) const {
    std::ofstream(folder_ / "m.gguf", std::ios::binary) << bytes;
    return folder_ / "m.gguf";
  }
  // Without the path.
  std::string refusal(const std::string& bytes) const {
    const fs::path path = write(bytes);
    std::string text = error_of([&] { GgufFile file(path); });
    EXPECT_THAT(text, testing::StartsWith(path.string() + ": "));
    return text.substr(std::min(text.size(), path.string().size() + 2));
  }
  const fs::path folder_ = fs::path(testing::TempDir()) / ("gguf_" + std::to_string(getpid()));
};

class GgmlTypes : public testing::TestWithParam<const char*> {};

TEST_P(GgmlTypes, DecodeToTheBitsOfThePackage) {
  const SafetensorsFile golden(kGgufGoldens / "blocks.safetensors");
  const GgmlType* const type = find_ggml_type(GetParam());
  ASSERT_NE(type, nullptr);
  const SafetensorsEntry &in = golden.entry(GetParam()),
                         &out = golden.entry(std::string(GetParam()) + ".fp32");
  std::vector<std::byte> blocks(in.end - in.begin);
  golden.read(in, blocks.data());
  const int64_t count = std::ssize(blocks) / type->bytes;
  std::vector<float> expected(static_cast<size_t>(count * type->block)), found(expected.size());
  ASSERT_EQ(out.end - out.begin, expected.size() * sizeof(float));
  golden.read(out, expected.data());
  type->decode(blocks.data(), count, found.data());
  for (size_t i = 0; i < found.size(); ++i)
    ASSERT_EQ(std::memcmp(&found[i], &expected[i], sizeof(float)), 0)
        << "element " << i << ": " << found[i] << ", expected " << expected[i];
  EXPECT_EQ(find_ggml_type(type->id), type);
}

INSTANTIATE_TEST_SUITE_P(All, GgmlTypes,
                         testing::Values("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
                                         "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
                                         "MXFP4"),
                         [](const auto& param) { return std::string(param.param); });

TEST(GgmlTypes, WithoutADecoderAreKnownByNameAndSize) {
  const GgmlType* const type = find_ggml_type(40);
  ASSERT_NE(type, nullptr);
  EXPECT_EQ(type->name, "NVFP4");
  EXPECT_EQ(type->decode, nullptr);
  EXPECT_EQ(find_ggml_type(5), nullptr) << "removed from ggml";
  EXPECT_THAT(ggml_type_names(), HasSubstr("F32, F16, Q4_0, Q4_1, Q5_0"));
}

TEST_F(Gguf, GivesKeysAndTensors) {
  GgufBuilder builder;
  builder.key("a.u8", uint8_t{200}).key("a.i8", int8_t{-3}).key("a.u16", uint16_t{65535});
  builder.key("a.i16", int16_t{-4}).key("a.u32", uint32_t{4000000000}).key("a.i32", int32_t{-5});
  builder.key("a.u64", uint64_t{1} << 40).key("a.i64", int64_t{-6}).key("a.f32", 0.5f);
  builder.key("a.f64", 1e-300).key("a.bool", true).key("a.text", "na\u00efve");
  builder.key("a.ints", std::vector<int32_t>{1, -2}).key("a.floats", std::vector<float>{1.5f});
  builder.key("a.texts", std::vector<std::string>{"", "x", "yy"});
  builder.tensor("one", {3}).tensor("two", {2, 3, 4});
  for (const uint32_t version : {2u, 3u}) {
    builder.version = version;
    const GgufFile file(write(builder.build()));
    EXPECT_EQ(file.version(), static_cast<int>(version));
    EXPECT_EQ(file.keys().size(), 15u);
    EXPECT_EQ(file.integer("a.u8"), 200);
    EXPECT_EQ(file.integer("a.i8"), -3);
    EXPECT_EQ(file.integer("a.u16"), 65535);
    EXPECT_EQ(file.integer("a.i16"), -4);
    EXPECT_EQ(file.integer("a.u32"), 4000000000);
    EXPECT_EQ(file.integer("a.i32"), -5);
    EXPECT_EQ(file.integer("a.u64"), int64_t{1} << 40);
    EXPECT_EQ(file.integer("a.i64"), -6);
    EXPECT_EQ(file.number("a.f32"), 0.5);
    EXPECT_EQ(file.number("a.f64"), 1e-300);
    EXPECT_EQ(file.number("a.i8"), -3.0);
    EXPECT_EQ(file.boolean("a.bool"), true);
    EXPECT_EQ(file.text("a.text"), "na\u00efve");
    EXPECT_THAT(*file.integers("a.ints", 2), ElementsAre(1, -2));
    EXPECT_THAT(*file.numbers("a.floats", 2), ElementsAre(1.5));
    EXPECT_THAT(*file.texts("a.texts", 3), ElementsAre("", "x", "yy"));
    EXPECT_FALSE(file.integer("a.none"));
    EXPECT_FALSE(file.texts("a.none", 3));
    ASSERT_EQ(file.tensors().size(), 2u);
    const GgufTensor* const two = file.find_tensor("two");
    ASSERT_NE(two, nullptr);
    EXPECT_THAT(two->shape, ElementsAre(4, 3, 2));
    EXPECT_EQ(two->bytes, 96u);
    float element = 0;
    file.read_at(two->offset + 5 * sizeof element, &element, sizeof element);
    EXPECT_EQ(element, 5.0f / 64.0f);
    EXPECT_EQ(file.find_tensor("three"), nullptr);
  }
}

TEST_F(Gguf, RefusesValuesOfAnotherTypeByTheirKey) {
  GgufBuilder builder;
  builder.key("n", 1.5f).key("t", "x").key("b", true).key("list", std::vector<int32_t>{1, 2});
  builder.key("huge", ~uint64_t{0}).key("inf", INFINITY).raw("odd", 7, "\x02");
  builder.key("bad", "\xff").key("texts", std::vector<std::string>{"ok", "\xc3"});
  const GgufFile file(write(builder.build()));
  const auto message = [&](const auto& body) { return error_of([&] { body(); }); };
  EXPECT_THAT(message([&] { file.integer("n"); }),
              HasSubstr("key n at byte 37: is of type FLOAT32, expected an integer"));
  EXPECT_THAT(message([&] { file.number("t"); }),
              HasSubstr("is of type STRING, expected a number"));
  EXPECT_THAT(message([&] { file.boolean("t"); }), HasSubstr("expected a boolean"));
  EXPECT_THAT(message([&] { file.text("b"); }), HasSubstr("is of type BOOL, expected a text"));
  EXPECT_THAT(message([&] { file.integer("list"); }),
              HasSubstr("is an array of INT32, expected an integer"));
  EXPECT_THAT(message([&] { file.integers("n", 1); }), HasSubstr("expected an array of integers"));
  EXPECT_THAT(message([&] { file.texts("list", 9); }), HasSubstr("expected an array of texts"));
  EXPECT_THAT(message([&] { file.integers("list", 1); }),
              HasSubstr("has 2 elements, expected at most 1"));
  EXPECT_THAT(message([&] { file.integer("huge"); }), HasSubstr("expected less than 2^63"));
  EXPECT_THAT(message([&] { file.number("inf"); }), HasSubstr("expected a finite number"));
  EXPECT_THAT(message([&] { file.boolean("odd"); }), HasSubstr("is 2, expected 0 or 1"));
  EXPECT_THAT(message([&] { file.text("bad"); }), HasSubstr("is not UTF-8"));
  EXPECT_THAT(message([&] { file.texts("texts", 2); }), HasSubstr("element 1: is not UTF-8"));
  EXPECT_THAT(message([&] { file.text("t", 0); }),
              HasSubstr("is 1 bytes long, expected at most 0"));
}

TEST_F(Gguf, RefusesOtherFormatsByName) {
  GgufBuilder builder;
  builder.key("general.architecture", "llama").tensor("t", {4});
  EXPECT_EQ(refusal("GGUF"), "is 4 bytes long, too short for a GGUF file");
  GgufBuilder other = builder;
  other.magic = "tjgg";
  EXPECT_THAT(refusal(other.build()), HasSubstr("from before GGUF, which is not built\nhint: "));
  other.magic = "PK\3\4";
  EXPECT_THAT(refusal(other.build()), HasSubstr("does not begin with \"GGUF\""));
  other = builder;
  other.version = 0x03000000;
  EXPECT_THAT(refusal(other.build()), HasSubstr("is a big-endian GGUF file, which is not built"));
  other.version = 1;
  EXPECT_THAT(refusal(other.build()),
              HasSubstr("is GGUF version 1, which is not built; expected 2 or 3"));
  for (const uint32_t version : {0u, 4u, 0x00010003u}) {
    other.version = version;
    EXPECT_THAT(refusal(other.build()), HasSubstr("which is not known; expected 2 or 3"));
  }
}

TEST_F(Gguf, RefusesCountsAndLengthsThatTheFileCannotHold) {
  GgufBuilder builder;
  builder.key("a", uint32_t{1}).tensor("t", {4});
  GgufBuilder wrong = builder;
  wrong.num_keys = uint64_t{1} << 63;
  EXPECT_EQ(refusal(wrong.build()),
            "says that it has 9223372036854775808 keys, expected at most 65536");
  wrong.num_keys = 1;
  wrong.num_tensors = 1 << 20;
  EXPECT_EQ(refusal(wrong.build()), "says that it has 1048576 tensors, expected at most 131072");
  wrong = builder;
  wrong.num_keys = 7;  // what follows is read as keys
  EXPECT_THAT(refusal(wrong.build()), HasSubstr("at byte "));
  wrong = GgufBuilder();
  wrong.raw("list", 9, GgufBuilder::number<uint32_t>(10) + GgufBuilder::number(~uint64_t{0}));
  EXPECT_EQ(refusal(wrong.build()),
            "key list at byte 36: has 18446744073709551615 elements of at least 8 bytes, the file "
            "has 0 more bytes");
  wrong = GgufBuilder();
  wrong.raw("text", 8, GgufBuilder::number(~uint64_t{0} - 3));
  EXPECT_THAT(
      refusal(wrong.build()),
      HasSubstr("key text at byte 36: needs 18446744073709551612 bytes at byte 48, the file "
                "has 0 more\nhint: the file was cut short"));
  wrong = GgufBuilder();
  wrong.raw("texts", 9,
            GgufBuilder::number<uint32_t>(8) + GgufBuilder::number<uint64_t>(2) +
                GgufBuilder::text("ok") + GgufBuilder::number<uint64_t>(1000));
  EXPECT_THAT(refusal(wrong.build()), HasSubstr("key texts at byte 37: needs 1000 bytes"));
  // Every prefix of a file is refused, and names where it ends.
  const std::string whole = builder.build();
  for (size_t length = 0; length < whole.size(); ++length)
    EXPECT_NE(refusal(whole.substr(0, length)), "") << length;
}

TEST_F(Gguf, RefusesNamesTypesAndNesting) {
  GgufBuilder wrong;
  wrong.raw("nested", 9,
            GgufBuilder::number<uint32_t>(9) + GgufBuilder::number<uint64_t>(1) +
                GgufBuilder::number<uint32_t>(9));
  EXPECT_EQ(refusal(wrong.build()),
            "key nested at byte 38: is an array of arrays, which is not built");
  wrong = GgufBuilder();
  wrong.raw("what", 13, "");
  EXPECT_EQ(refusal(wrong.build()), "key what at byte 36: has type 13, which is not known");
  wrong = GgufBuilder();
  wrong.key("twice", 1).key("twice", 2);
  EXPECT_THAT(refusal(wrong.build()),
              HasSubstr("key twice at byte 58: there is another key of this name at byte 41"));
  wrong = GgufBuilder();
  wrong.key("", 1);
  EXPECT_THAT(refusal(wrong.build()), HasSubstr("key 0 of 1 at byte 24: its name has 0 bytes"));
  wrong = GgufBuilder();
  wrong.key("line\nbreak", 1);
  EXPECT_THAT(refusal(wrong.build()), HasSubstr("bytes that are no printable ASCII"));
  wrong = GgufBuilder();
  wrong.key(std::string(70000, 'k'), 1);
  EXPECT_THAT(refusal(wrong.build()), HasSubstr("its name has 70000 bytes, expected 1 to 65535"));
  wrong = GgufBuilder();
  wrong.tensor(std::string(2000, 't'), {4});
  EXPECT_THAT(refusal(wrong.build()), HasSubstr("its name has 2000 bytes, expected 1 to 1024"));
  wrong = GgufBuilder();
  wrong.tensor("t", {4}, 5, std::string(16, 'x'));
  EXPECT_THAT(refusal(wrong.build()),
              HasSubstr("tensor t at byte 33: has type 5, which is not known"));
  wrong = GgufBuilder();
  wrong.tensor("t", {48, 2}, 2, std::string(54, 'x'));
  EXPECT_THAT(
      refusal(wrong.build()),
      HasSubstr("has rows of 48 elements, which are no whole blocks of 32 of its type Q4_0"));
}

TEST_F(Gguf, RefusesTensorsThatLieElsewhere) {
  const std::string data(64, 'x');
  GgufBuilder wrong;
  wrong.tensor("t", {16}, 0, data, 8);
  EXPECT_THAT(refusal(wrong.build()),
              HasSubstr("its data begin at offset 8, which is no multiple of the alignment 32"));
  wrong = GgufBuilder();
  wrong.tensor("t", {16}, 0, data, 32);
  EXPECT_THAT(refusal(wrong.build()),
              HasSubstr("tensor t: its 64 bytes at offset 32 lie outside the file, which has 64 "
                        "bytes of data\nhint: the file was cut short"));
  wrong = GgufBuilder();
  wrong.tensor("t", {16}, 0, data, ~uint64_t{31});
  EXPECT_THAT(refusal(wrong.build()), HasSubstr("lie outside the file"));
  wrong = GgufBuilder();
  wrong.tensor("a", {16}, 0, data).tensor("b", {16}, 0, data, 32);
  EXPECT_THAT(refusal(wrong.build()), HasSubstr("tensor b: its data at byte "));
  EXPECT_THAT(refusal(wrong.build()), HasSubstr(" overlap those of a, which end at byte "));
  wrong = GgufBuilder();
  wrong.tensor("a", {16}, 0, data).tensor("a", {16}, 0, data);
  EXPECT_THAT(refusal(wrong.build()), HasSubstr("tensor a at byte "));
  EXPECT_THAT(refusal(wrong.build()), HasSubstr("there is another tensor of this name at byte "));
  for (const std::vector<uint64_t>& extents :
       {std::vector<uint64_t>{0}, {uint64_t{1} << 40, uint64_t{1} << 40}, {~uint64_t{0}}}) {
    wrong = GgufBuilder();
    wrong.tensor("t", extents, 0, data);
    EXPECT_THAT(refusal(wrong.build()), HasSubstr("expected at least 1 and at most 2^50"));
  }
  for (const std::vector<uint64_t>& extents : {std::vector<uint64_t>{}, {1, 1, 1, 1, 1}}) {
    wrong = GgufBuilder();
    wrong.tensor("t", extents, 0, data);
    EXPECT_THAT(refusal(wrong.build()), HasSubstr(" dimensions, expected 1 to 4"));
  }
  for (const uint32_t alignment : {0u, 4u, 48u, 1u << 21}) {
    wrong = GgufBuilder();
    wrong.key("general.alignment", alignment).tensor("t", {16}, 0, data);
    EXPECT_THAT(refusal(wrong.build()), HasSubstr("expected a power of two from 8 to 1048576"));
  }
  GgufBuilder right;
  right.alignment = 64;
  right.key("general.alignment", uint32_t{64}).tensor("a", {1}).tensor("b", {1});
  EXPECT_EQ(GgufFile(write(right.build())).tensors()[1].offset % 64, 0u);
}

// Bytes of the process's heap, at most.
uint64_t memory_in_use() {
  std::ifstream in("/proc/self/statm");
  uint64_t all = 0, resident = 0;
  in >> all >> resident;
  return resident * static_cast<uint64_t>(getpagesize());
}

TEST_F(Gguf, TakesLittleMemoryWhateverTheCountsSay) {
  // 100 MB of the shortest texts and of numbers, none of which is read.
  std::string texts = GgufBuilder::number<uint32_t>(8) + GgufBuilder::number<uint64_t>(8 << 20);
  texts.resize(texts.size() + (uint64_t{8} << 23), '\0');
  GgufBuilder builder;
  builder.raw("tokens", 9, texts);
  builder.key("numbers", std::vector<uint8_t>(32 << 20));
  const fs::path path = write(builder.build());
  texts.clear();
  texts.shrink_to_fit();
  builder = GgufBuilder();
  const uint64_t before = memory_in_use();
  const GgufFile file(path);
  EXPECT_LT(memory_in_use(), before + (uint64_t{16} << 20));
  EXPECT_THAT(error_of([&] { file.texts("tokens", 1 << 20); }),
              HasSubstr("has 8388608 elements, expected at most 1048576"));
  EXPECT_LT(memory_in_use(), before + (uint64_t{16} << 20));
}

}  // namespace
}  // namespace megatron
