// Vectors of texts against sentence-transformers, and against transformers for the other poolings.
#include "megatron/inference/text_embedder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "megatron/base/files.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/interop/huggingface/sentence_transformers.h"
#include "megatron/interop/load_model.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

const fs::path kSentence = MEGATRON_SOURCE_DIR "/tests/golden/encoders/sentence";

struct SentenceGolden {
  SentenceGolden() : json(nlohmann::json::parse(read_file(kSentence / "vectors.json"))) {
    LoadModelRequest request;
    request.load = kSentence;
    loaded = load_model(request, groups);
    texts = json["texts"].get<std::vector<std::string>>();
  }
  at::Tensor embed(const EmbedOptions& options) {
    return TextEmbedder(*loaded.model, *loaded.tokenizer, options).embed(texts);
  }
  at::Tensor expected(const char* kind) const {
    std::vector<float> all;
    for (const auto& row : json[kind])
      for (const auto& number : row) all.push_back(number.get<float>());
    return at::tensor(all).view({std::ssize(texts), -1});
  }

  const ParallelGroups groups;
  LoadedModel loaded;
  nlohmann::json json;
  std::vector<std::string> texts;
};

TEST(TextEmbedder, VectorsOfSentenceTransformers) {
  SentenceGolden golden;
  const auto theirs = read_sentence_transformer(kSentence);
  ASSERT_TRUE(theirs.has_value());
  EXPECT_TRUE(theirs->mean);
  EXPECT_TRUE(theirs->normalize);
  EXPECT_EQ(theirs->max_length, 16);
  // In one batch with padding, and each text alone
  for (const int64_t batch_tokens : {8192, 1}) {
    const at::Tensor vectors = golden.embed({.pooling = Pooling::kMeanAll,
                                             .normalize = true,
                                             .max_length = 16,
                                             .batch_tokens = batch_tokens});
    EXPECT_LE((vectors - golden.expected("auto")).abs().max().item<float>(), 1e-5);
  }
}

TEST(TextEmbedder, OtherPoolings) {
  SentenceGolden golden;
  for (const auto& [kind, pooling] :
       {std::pair{"mean", Pooling::kMean}, {"cls", Pooling::kCls}, {"pooler", Pooling::kPooler}}) {
    const at::Tensor vectors = golden.embed({.pooling = pooling, .max_length = 16});
    EXPECT_LE((vectors - golden.expected(kind)).abs().max().item<float>(), 1e-5) << kind;
  }
}

TEST(TextEmbedder, CountsTextsThatItCuts) {
  SentenceGolden golden;
  TextEmbedder embedder(*golden.loaded.model, *golden.loaded.tokenizer, {.max_length = 16});
  embedder.embed(golden.texts);
  EXPECT_EQ(embedder.num_cut(), 1);
}

TEST(TextEmbedder, LengthsThatDoNotFitAreRefused) {
  SentenceGolden golden;
  const auto error = [&](int64_t max_length) {
    return error_of([&] { golden.embed({.max_length = max_length}); });
  };
  EXPECT_EQ(error(25), "--max-length 25 is beyond the model's 24 positions");
  EXPECT_EQ(error(2), "--max-length 2 leaves no room between the 2 tokens around a text");
}

TEST(SentenceTransformers, WhatIsNotBuiltIsNamed) {
  const fs::path folder = fs::path(testing::TempDir()) / "sentence_transformers";
  fs::create_directories(folder / "1_Pooling");
  EXPECT_FALSE(read_sentence_transformer(kSentence / "1_Pooling").has_value());
  const auto error = [&](const char* modules, const char* pooling) {
    write_file_atomically(folder / "modules.json", modules);
    write_file_atomically(folder / "1_Pooling" / "config.json", pooling);
    const std::string what = error_of([&] { read_sentence_transformer(folder); });
    return what.substr(0, what.find('\n')).substr(std::min(what.size(), folder.string().size()));
  };
  constexpr const char* kPooled =
      R"([{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}])";
  EXPECT_EQ(error(kPooled, R"({"pooling_mode_cls_token": true})"), "");
  EXPECT_EQ(error(kPooled, R"({"pooling_mode_max_tokens": true, "pooling_mode_cls_token": true})"),
            "/1_Pooling/config.json: pooling by cls_token max_tokens is not built");
  EXPECT_EQ(error(kPooled, R"({"pooling_mode": "lasttoken"})"),
            "/1_Pooling/config.json: pooling by lasttoken is not built");
  EXPECT_EQ(error(R"([{"path": "2_Dense", "type": "x.Dense"}])", "{}"),
            "/modules.json: a module of the type \"x.Dense\" is not built");
  EXPECT_EQ(error("{}", "{}"),
            "/modules.json: is not the JSON list of modules that sentence-transformers writes");
  fs::remove_all(folder);
}

}  // namespace
}  // namespace megatron
