// A data set of text with images that is indexed and read, for tests.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "megatron/datasets/data_loader.h"
#include "megatron/datasets/multimodal/multimodal_dataset.h"
#include "tests/unit/datasets/multimodal/testing.h"

namespace megatron::testing_multimodal {

using Json = nlohmann::ordered_json;

// The LLaVA of the goldens (four rows an image) and rows of images in several forms.
class Indexed : public ::testing::Test {
 protected:
  Indexed() {
    SftConfig config;
    for (const auto& row : Json::parse(read_file(kGoldens + "expansions.json")))
      if (row.at("family") == "llava") {
        folder_.write("model/config.json", row.at("config").dump());
        folder_.write("model/preprocessor_config.json", row.at("processor").dump());
        config.chat_template = row.at("template");
      }
    conversations_.emplace(*tokenizer_, "", config);
    encoder_.emplace(*tokenizer_, *conversations_, read_media_rules(folder_ / "model", *tokenizer_),
                     false);
    options_.cache_path = folder_ / "cache";
    options_.media_root = kGoldens + "same/json/media";
  }

  // Captions of 1 to 12 letters; number % 4 chooses the image.
  static std::string image_of(int64_t i) {
    return std::vector<std::string>{"0_img1.png", "1_img1.jpg", "3_img1.png",
                                    "4_img1.webp"}[static_cast<size_t>(i % 4)];
  }
  static std::string caption_of(int64_t i) {
    return std::string(static_cast<size_t>(1 + i * 7 % 12), static_cast<char>('a' + i % 26));
  }
  // Rows first to last as JSON lines.
  std::string write_rows(const std::string& name, int64_t first, int64_t last) {
    std::string text;
    for (int64_t i = first; i < last; ++i)
      text += Json{{"image", image_of(i)}, {"caption", caption_of(i)}}.dump() + "\n";
    return folder_.write(name, text);
  }
  // `damage`: of the bytes of the image of a sample.
  std::string write_tar(
      const std::string& name, int64_t first, int64_t last,
      const std::function<void(int64_t, std::string&)>& damage = [](int64_t, std::string&) {}) {
    std::vector<std::pair<std::string, std::string>> files;
    for (int64_t i = first; i < last; ++i) {
      const std::string image = image_of(i);
      files.emplace_back(cat(i, image.substr(image.rfind('.'))),
                         read_file(options_.media_root + "/" + image));
      damage(i, files.back().second);
      files.emplace_back(cat(i, ".txt"), caption_of(i));
    }
    return folder_.write(name, tar_of(files));
  }
  std::shared_ptr<const MultimodalIndex> index(const std::string& path) {
    return std::make_shared<const MultimodalIndex>(path, *encoder_, options_);
  }
  static std::shared_ptr<const MultimodalDataset> dataset(
      std::shared_ptr<const MultimodalIndex> index, MultimodalDatasetOptions options,
      std::optional<int64_t> samples = {}) {
    return std::make_shared<const MultimodalDataset>(std::move(index), std::pair(0.0, 1.0),
                                                     Split::kTrain, samples, options);
  }
  // Ids, documents and the bytes of media of a sequence.
  static std::string content(const MultimodalDataset& data, int64_t i) {
    Sample sample = data.sample(i);
    std::string out;
    for (const int64_t token : sample.get<int64_t>("tokens")) out += cat(token, " ");
    for (const int32_t start : sample.document_starts) out += cat("|", start);
    for (const SequenceRun& run : data.runs(i))
      out += cat("[", run.position, "+", run.rows, " ", data.index().bytes(run.sample, run.medium),
                 "]");
    return out;
  }

  Folder folder_;
  std::unique_ptr<Tokenizer> tokenizer_ = make_tokenizer(find_tokenizer(kGoldens + "tokenizer"));
  std::optional<ConversationEncoder> conversations_;
  std::optional<MultimodalEncoder> encoder_;
  MultimodalIndexOptions options_;
};

// Samples and pixels of the steps, in the order of their places in the stream.
inline std::vector<std::string> stream(
    const std::shared_ptr<const Dataset>& data, int64_t dp, int64_t workers, int64_t consumed,
    int64_t until, std::function<int64_t(int64_t)> global_batch_size = nullptr) {
  std::map<int64_t, std::string> out;
  for (int64_t rank = 0; rank < dp; ++rank) {
    DataLoaderOptions options;
    options.sampler.micro_batch_size = 2;
    options.sampler.data_parallel_size = dp;
    options.sampler.data_parallel_rank = rank;
    options.consumed_samples = consumed;
    options.num_workers = workers;
    options.global_batch_size = global_batch_size;
    DataLoader loader(data, options);
    while (loader.consumed() < until) {
      const auto batch = loader.next();
      size_t at = 0;
      for (int64_t i = 0; i < 2; ++i) {
        std::string& text = out[batch->ordinals[static_cast<size_t>(i)]];
        for (const int64_t token : batch->data().row<int64_t>("tokens", i)) text += cat(token, " ");
        for (const auto& [sample, image, owner] : batch->images->all) {
          if (sample != i) continue;
          text += cat("[", image.pictures, " ", image.rows, "x", image.columns, " ");
          for (const size_t end = at + static_cast<size_t>(image.bytes()); at < end; ++at)
            text += static_cast<char>(batch->images->patches[at]);
        }
      }
      EXPECT_EQ(at, batch->images->patches.size());
    }
  }
  std::vector<std::string> texts;
  for (auto& [ordinal, text] : out) texts.push_back(std::move(text));
  return texts;
}

}  // namespace megatron::testing_multimodal
