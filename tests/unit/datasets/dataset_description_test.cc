// <prefix>.json: how a dataset was written, and errors if it is read with other settings.
#include <fstream>
#include <nlohmann/json.hpp>

#include "megatron/base/files.h"
#include "megatron/datasets/dataset_builder.h"
#include "megatron/datasets/indexed_dataset_builder.h"
#include "megatron/datasets/sources/preprocess.h"
#include "testing.h"

namespace megatron::testing_datasets {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::unique_ptr<Tokenizer> bytes_tokenizer() {
  TokenizerConfig config;
  config.tokenizer_type = "ByteLevelTokenizer";
  return make_tokenizer(config);
}

TokenizerIdentity other_tokenizer() {
  return {"HuggingFaceTokenizer of b.json", "feedbeef", 257, true};
}

std::string write_text(const TempFolder& folder, const std::string& name) {
  write_file_atomically(folder / (name + ".txt"), "text of " + name);
  return folder / (name + ".txt");
}

// <folder>/<name>_text_document, written from one small file.
std::string preprocess(const TempFolder& folder, const std::string& name, bool append_eod = true,
                       bool overwrite = false) {
  PreprocessOptions options;
  options.inputs = {write_text(folder, name)};
  options.output_prefix = folder / name;
  options.append_eod = append_eod;
  options.overwrite = overwrite;
  options.program = "megatron 1.2.3";
  options.tokenizer_type = "ByteLevelTokenizer";
  options.workers = 1;
  preprocess_files(options, *bytes_tokenizer());
  return folder / (name + "_text_document");
}

// The description with one member changed.
void edit(const std::string& prefix, const std::function<void(nlohmann::ordered_json&)>& change) {
  auto json = nlohmann::ordered_json::parse(read_file(description_path(prefix)));
  change(json);
  write_file_atomically(description_path(prefix), json.dump());
}

TEST(DatasetDescription, IsWrittenWithTheData) {
  const TempFolder folder;
  const std::string prefix = preprocess(folder, "a");
  const auto description = read_description(prefix);
  ASSERT_TRUE(description.has_value());
  EXPECT_EQ(description->program, "megatron 1.2.3");
  EXPECT_EQ(description->tokenizer.name, "ByteLevelTokenizer");
  EXPECT_EQ(description->tokenizer.fingerprint, bytes_tokenizer()->fingerprint());
  EXPECT_EQ(description->tokenizer.vocab_size, 257);
  EXPECT_EQ(description->append_eod, true);
  EXPECT_EQ(description->sources, std::vector<std::string>{folder / "a.txt"});
  EXPECT_EQ(description->element_type, "u16");
  EXPECT_EQ(description->num_documents, 1);
  EXPECT_EQ(description->num_tokens, 10);
  EXPECT_EQ(folder.files().size(), 4u) << "text, .bin, .idx, .json";
}

TEST(DatasetDescription, AnotherTokenizerIsRefused) {
  const TempFolder folder;
  const IndexedDataset data(preprocess(folder, "a"));
  EXPECT_TRUE(check_tokenizer(data, identity_of(*bytes_tokenizer(), "ByteLevelTokenizer")));
  EXPECT_TRUE(check_tokenizer(data, {})) << "no tokenizer to compare with";
  const std::string hash = "0123456789abcdef0123456789abcdef";
  edit(data.prefix(),
       [&](auto& json) { json["tokenizer"]["fingerprint"] = "GPT2BPETokenizer-" + hash; });
  EXPECT_TRUE(check_tokenizer(data, {"b.json", "HuggingFaceTokenizer-" + hash, 257, true}))
      << "one definition in two forms";
  EXPECT_THAT(
      error_of([&] {
        check_tokenizer(data, {"b.json", "GPT2BPETokenizer-" + std::string(32, '0'), 257, true});
      }),
      HasSubstr(
          "(257 ids, fingerprint 01234567), this run has b.json (257 ids, fingerprint 00000000)"));
  EXPECT_THAT(error_of([&] { check_tokenizer(data, other_tokenizer()); }),
              AllOf(HasSubstr("a_text_document: was written with another tokenizer: "
                              "ByteLevelTokenizer (257 ids, fingerprint 01234567"),
                    HasSubstr("this run has HuggingFaceTokenizer of b.json (257 ids, fingerprint "
                              "feedbeef)\nhint: give the tokenizer that wrote the data")));
  const TokenizerIdentity numbers{"NullTokenizer", "0", 300, false},
      few{"NullTokenizer", "0", 200, false};
  EXPECT_TRUE(check_tokenizer(data, numbers)) << "its ids are those of any other";
  EXPECT_THAT(error_of([&] { check_tokenizer(data, few); }),
              HasSubstr("NullTokenizer has only 200 ids"));
}

TEST(DatasetDescription, StopsARunAtItsStart) {
  const TempFolder folder;
  DataConfig config;
  config.data_path = {preprocess(folder, "a")};
  config.split = "1,0,0";
  DatasetRequest request;
  request.sequence_length = 4;
  request.targets = {.train = 2, .valid = 0, .test = 0};
  request.tokenizer = facts_of(*bytes_tokenizer(), "ByteLevelTokenizer");
  EXPECT_NE(build_train_valid_test_datasets(config, request).train, nullptr);
  request.tokenizer.identity = other_tokenizer();
  EXPECT_THAT(error_of([&] { build_train_valid_test_datasets(config, request); }),
              HasSubstr("was written with another tokenizer"));
  std::filesystem::remove(description_path(config.data_path[0]));
  ::testing::internal::CaptureStderr();
  EXPECT_NE(build_train_valid_test_datasets(config, request).train, nullptr);
  EXPECT_THAT(
      ::testing::internal::GetCapturedStderr(),
      HasSubstr("a_text_document: does not say which tokenizer wrote the tokens (there is no "
                "a_text_document.json)"));
}

TEST(DatasetDescription, DamageIsNamedAndOtherFilesAreLeftAlone) {
  const TempFolder folder;
  const std::string prefix = preprocess(folder, "a");
  const std::string path = description_path(prefix).string(), good = read_file(path);
  const auto error = [&](const std::function<void(nlohmann::ordered_json&)>& change) {
    write_file_atomically(path, good);
    edit(prefix, change);
    return error_of([&] { check_tokenizer(IndexedDataset(prefix), {}); });
  };
  EXPECT_THAT(error([](auto& json) { json["version"] = 2; }),
              HasSubstr(path + ": is of version 2, this program reads 1"));
  EXPECT_THAT(error([](auto& json) { json.erase("num_tokens"); }),
              HasSubstr(path + ": has no num_tokens"));
  EXPECT_THAT(error([](auto& json) { json["tokenizer"]["fingerprint"] = 3; }),
              HasSubstr(path + ": tokenizer: fingerprint is not a string"));
  EXPECT_THAT(error([](auto& json) { json["num_tokens"] = 11; }),
              HasSubstr(path + ": describes 1 documents, 1 sequences and 11 tokens of type u16, "));
  for (const std::string& text : {std::string("some words"), std::string(R"({"format": "other"})"),
                                  std::string(2 << 20, ' ')}) {
    write_file_atomically(path, text);
    EXPECT_FALSE(check_tokenizer(IndexedDataset(prefix), other_tokenizer())) << "not a description";
    EXPECT_THAT(error_of([&] { preprocess(folder, "a", true, /*overwrite=*/true); }),
                HasSubstr(path + ": exists already and describes no data set"));
    EXPECT_EQ(read_file(path), text);
  }
}

TEST(DatasetDescription, ADataSetIsReplacedOnlyWhenAsked) {
  const TempFolder folder;
  const std::string prefix = preprocess(folder, "a", true);
  EXPECT_THAT(error_of([&] { preprocess(folder, "a", false); }),
              HasSubstr(prefix + ".bin: exists already\nhint: give another --output-prefix, or "
                                 "--overwrite to replace the data set"));
  EXPECT_EQ(read_description(prefix)->append_eod, true);
  preprocess(folder, "a", false, /*overwrite=*/true);
  EXPECT_EQ(read_description(prefix)->append_eod, false);
}

TEST(DatasetDescription, OfMergedData) {
  const TempFolder folder;
  const std::vector<std::string> inputs = {preprocess(folder, "a"), preprocess(folder, "b")};
  const std::string merged = folder / "m";
  merge_indexed_datasets(inputs, merged, false, "megatron 4");
  auto description = read_description(merged);
  ASSERT_TRUE(description.has_value());
  EXPECT_EQ(description->program, "megatron 4");
  EXPECT_EQ(description->num_tokens, 20);
  EXPECT_EQ(description->sources, inputs);
  EXPECT_EQ(description->append_eod, true);
  EXPECT_TRUE(check_tokenizer(IndexedDataset(merged), {}));

  edit(inputs[1], [](auto& json) { json["append_eod"] = false; });
  merge_indexed_datasets(inputs, merged, false, "megatron 4");
  EXPECT_EQ(read_description(merged)->append_eod, std::nullopt);

  edit(inputs[1], [](auto& json) { json["tokenizer"]["fingerprint"] = "feed"; });
  EXPECT_THAT(error_of([&] { merge_indexed_datasets(inputs, folder / "n", false, ""); }),
              AllOf(HasSubstr(inputs[1] +
                              ": was written with ByteLevelTokenizer (257 ids, fingerprint "
                              "feed), " +
                              inputs[0] + " with "),
                    HasSubstr("write both with one tokenizer")));
  EXPECT_FALSE(std::filesystem::exists(folder / "n.bin"));

  std::filesystem::remove(description_path(inputs[1]));
  merge_indexed_datasets(inputs, merged, false, "megatron 4");
  EXPECT_FALSE(read_description(merged).has_value()) << "a part of it is of an unknown tokenizer";
}

}  // namespace
}  // namespace megatron::testing_datasets
