// The safetensors reader and writer: golden files of the Python package, malformed headers, random
// damage.
#include "megatron/dist_checkpointing/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "megatron/base/check.h"
#include "test_support.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

std::string with_length(const std::string& header, const std::string& data = {}) {
  std::string text(8, '\0');
  for (size_t i = 0; i < 8; ++i) text[i] = static_cast<char>(header.size() >> (8 * i));
  return text + header + data;
}

SafetensorsHeader parse(const std::string& file) {
  return parse_safetensors_header(std::as_bytes(std::span(file)), file.size(), "f");
}

std::string refusal(const std::string& header, const std::string& data = {}) {
  return error_of([&] { parse(with_length(header, data)); });
}

TEST(Safetensors, RoundTripsEveryType) {
  ScratchFolder folder;
  const fs::path path = folder.path() / "t.safetensors";
  std::vector<unsigned char> bytes(64);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i);
  std::vector<SafetensorsTensor> tensors;
  for (int i = 0; i < 10; ++i) {
    const auto dtype = static_cast<DType>(i);
    tensors.push_back({cat("a \"name\" ", to_string(dtype)), dtype, {2, 3}, bytes.data()});
  }
  tensors.push_back({"scalar", DType::kInt32, {}, bytes.data()});
  tensors.push_back({"nothing", DType::kFloat32, {0, 5}, nullptr});
  write_safetensors(path, tensors, {{"format", "pt"}, {"note", "\xc3\xa9"}});
  const SafetensorsFile file(path);
  EXPECT_EQ(file.header().tensors.size(), tensors.size());
  EXPECT_EQ(file.header().metadata.at("note"), "\xc3\xa9");
  EXPECT_EQ(file.header().data_begin % 8, 0u);
  for (const SafetensorsTensor& tensor : tensors) {
    const SafetensorsEntry& entry = file.entry(tensor.name);
    EXPECT_EQ(entry.dtype, tensor.dtype);
    EXPECT_EQ(entry.shape, tensor.shape);
    std::vector<unsigned char> read(entry.end - entry.begin);
    file.read(entry, read.data());
    EXPECT_TRUE(std::equal(read.begin(), read.end(), bytes.begin()));
  }
  unsigned char two[2];
  file.read(file.entry("scalar"), 2, 2, two);
  EXPECT_EQ(two[0], 2);
  EXPECT_THAT(error_of([&] { file.read(file.entry("scalar"), 3, 2, two); }),
              HasSubstr("has 4 bytes; 2 were asked for at offset 3"));
  EXPECT_THAT(error_of([&] { file.entry("absent"); }), HasSubstr("has no tensor \"absent\""));
  EXPECT_EQ(file.find("absent"), nullptr);
  tensors[1].name = tensors[0].name;
  EXPECT_THAT(error_of([&] { write_safetensors(path, tensors); }), HasSubstr("is given twice"));
}

TEST(Safetensors, ReadsThePythonPackagesFile) {
  const fs::path golden =
      fs::path(MEGATRON_SOURCE_DIR) / "tests/golden/checkpoint/python.safetensors";
  const SafetensorsFile file(golden);
  EXPECT_EQ(file.header().metadata.at("source"), "safetensors");
  const SafetensorsEntry& weight = file.entry("weight");
  EXPECT_EQ(weight.dtype, DType::kFloat32);
  EXPECT_EQ(weight.shape, (std::vector<int64_t>{3, 5}));
  std::vector<float> values(15);
  file.read(weight, values.data());
  for (size_t i = 0; i < 15; ++i) EXPECT_EQ(values[i], static_cast<float>(i) * 0.25f - 1.0f);
  std::vector<uint16_t> half(7);
  EXPECT_EQ(file.entry("half").dtype, DType::kBFloat16);
  file.read(file.entry("half"), half.data());
  EXPECT_EQ(half, (std::vector<uint16_t>{0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0}));
  std::vector<int64_t> ids(2);
  file.read(file.entry("ids"), ids.data());
  EXPECT_EQ(ids, (std::vector<int64_t>{-1, int64_t{1} << 40}));
  EXPECT_EQ(file.entry("scalar").shape, std::vector<int64_t>{});
  EXPECT_EQ(file.entry("mask").dtype, DType::kBool);
}

TEST(Safetensors, RefusesMalformedFiles) {
  EXPECT_THAT(error_of([] { parse("1234567"); }), HasSubstr("f: is 7 bytes long, too short"));
  EXPECT_THAT(error_of([] { parse(std::string(7, '\0') + "\x7f"); }),
              HasSubstr("at most 100000000 are allowed"));
  std::string cut = with_length("{}      ");
  cut.pop_back();
  EXPECT_THAT(error_of([&] { parse(cut); }),
              HasSubstr("claims a header of 8 bytes, the file has 15"));
  EXPECT_THAT(refusal(""), HasSubstr("does not start with {"));
  EXPECT_THAT(refusal(" {}"), HasSubstr("does not start with {"));
  EXPECT_THAT(refusal("{\"a\":}"), HasSubstr("is not JSON"));
  EXPECT_THAT(refusal("{\"\xff\":1}"), HasSubstr("is not JSON"));
  EXPECT_THAT(refusal("{\"a\":1}"), HasSubstr("must have exactly dtype, shape and data_offsets"));
  EXPECT_THAT(refusal("{\"a\":[[[[[1]]]]]}"), HasSubstr("nests deeper"));
  const auto tensor = [](const char* dtype, const char* shape, const char* offsets) {
    return cat("{\"dtype\":\"", dtype, "\",\"shape\":", shape, ",\"data_offsets\":", offsets, "}");
  };
  const std::string good = tensor("F32", "[1]", "[0,4]");
  EXPECT_EQ(parse(with_length("{\"a\":" + good + "}", "1234")).tensors.size(), 1u);
  EXPECT_THAT(refusal("{\"a\":" + good + ",\"a\":" + good + "}", "1234"),
              HasSubstr("names \"a\" twice"));
  EXPECT_THAT(refusal("{\"a\":" + tensor("F33", "[1]", "[0,4]") + "}", "1234"),
              HasSubstr("tensor \"a\": unknown element type \"F33\""));
  EXPECT_THAT(refusal("{\"a\":" + tensor("F32", "[2]", "[0,4]") + "}", "1234"),
              HasSubstr("needs 8 bytes by its shape"));
  EXPECT_THAT(refusal("{\"a\":" + tensor("F32", "[1]", "[4,0]") + "}", "1234"),
              HasSubstr("data_offsets are 4 and 0"));
  EXPECT_THAT(refusal("{\"a\":" + tensor("F32", "[-1]", "[0,4]") + "}", "1234"),
              HasSubstr("has -1 where"));
  EXPECT_THAT(refusal("{\"a\":" + tensor("F32", "[1.0]", "[0,4]") + "}", "1234"),
              HasSubstr("has 1.0 where"));
  EXPECT_THAT(refusal("{\"a\":" + tensor("F32", "[1]", "[0,4,8]") + "}", "1234"),
              HasSubstr("malformed dtype, shape or data_offsets"));
  EXPECT_THAT(refusal("{\"a\":" + tensor("F32", "[4294967296,4294967296]", "[0,0]") + "}"),
              HasSubstr("too large"));
  EXPECT_THAT(refusal("{\"a\":" + tensor("F32", "[9223372036854775808]", "[0,0]") + "}"),
              HasSubstr("where a number of bytes"));
  EXPECT_THAT(refusal("{\"a\":" + good + "}", "12345678"),
              HasSubstr("the tensors take 4 bytes, the file holds 8"));
  EXPECT_THAT(refusal("{\"a\":" + good + "}", "123"),
              HasSubstr("the tensors take 4 bytes, the file holds 3"));
  EXPECT_THAT(
      refusal("{\"a\":" + good + ",\"b\":" + tensor("F32", "[1]", "[8,12]") + "}", "123456789012"),
      HasSubstr("after a gap from byte 4"));
  EXPECT_THAT(refusal("{\"a\":" + good + ",\"b\":" + tensor("F32", "[1]", "[2,6]") + "}", "123456"),
              HasSubstr("inside its predecessor"));
  EXPECT_THAT(refusal("{\"__metadata__\":{\"a\":1}}"), HasSubstr("\"a\" is not a string"));
  EXPECT_THAT(refusal("{\"__metadata__\":[]}"), HasSubstr("__metadata__ is not an object"));
}

// Every damaged header is either refused with an Error or describes tensors that lie inside the
// file.
TEST(Safetensors, RandomDamageNeverEscapes) {
  const std::string base =
      slurp(fs::path(MEGATRON_SOURCE_DIR) / "tests/golden/checkpoint/python.safetensors");
  ASSERT_GT(base.size(), 8u);
  std::mt19937_64 random(11);
  const std::string tokens = "{}[]\",:0123456789-+.eEFIB \\u";
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string file = base;
    for (int edits = 1 + static_cast<int>(random() % 4); edits > 0; --edits) {
      const size_t at = random() % file.size();
      switch (random() % 4) {
        case 0:
          file[at] = static_cast<char>(file[at] ^ (1 << random() % 8));
          break;
        case 1:
          file[at] = tokens[random() % tokens.size()];
          break;
        case 2:
          file.erase(at, random() % 16);
          break;
        default:
          file.insert(at, 1 + random() % 4, tokens[random() % tokens.size()]);
      }
      if (file.empty()) file = "x";
    }
    try {
      const SafetensorsHeader header = parse(file);
      for (const SafetensorsEntry& entry : header.tensors) {
        ASSERT_LE(entry.begin, entry.end);
        ASSERT_LE(header.data_begin + entry.end, file.size());
      }
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 10000);
}

}  // namespace
}  // namespace megatron
