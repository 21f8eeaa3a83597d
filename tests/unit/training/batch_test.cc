#include "megatron/training/batch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "megatron/comm/parallel_groups.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/datasets/blended_dataset.h"
#include "megatron/tensor/torch.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using testing::HasSubstr;

// A micro-batch of two samples of four tokens; the second one holds two documents.
std::shared_ptr<const MicroBatch> example_batch(bool own_positions) {
  struct Owner {
    MicroBatch batch;
    std::vector<std::byte> memory;
  };
  const Columns columns = gpt_columns(4, own_positions);
  auto owner = std::make_shared<Owner>(
      Owner{MicroBatch(columns), std::vector<std::byte>(columns.block_bytes(2))});
  MicroBatch& b = owner->batch;
  b.micro_batch_size = 2;
  b.block = owner->memory.data();
  std::ranges::copy(std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8},
                    b.data().all<int64_t>("tokens").begin());
  std::ranges::copy(std::vector<int64_t>{2, 3, 4, 5, 6, 7, 8, 9},
                    b.data().all<int64_t>("labels").begin());
  std::ranges::copy(std::vector<int64_t>{0, 1, 2, 3, 0, 1, 0, 1},
                    b.data().all<int64_t>("position_ids").begin());
  std::ranges::copy(std::vector<float>{1, 1, 0, 1, 1, 1, 1, 1},
                    b.data().all<float>("loss_mask").begin());
  b.ordinals = {40, 41};
  b.document_starts = {{0}, {0, 2}};
  b.crosses_documents = false;
  return {owner, &owner->batch};
}

const ProcessGroup one;

TEST(Batch, TensorsShareTheHostMemoryAndKeepItAlive) {
  std::shared_ptr<const MicroBatch> source = example_batch(/*own_positions=*/true);
  const void* data = source->block;
  BatchMaker maker(c10::Device(c10::kCPU), one);
  const Batch batch = maker.make(source);
  source.reset();
  EXPECT_EQ(batch["tokens"].const_data_ptr(), data);
  EXPECT_EQ(batch["tokens"][1][0].item<int64_t>(), 5);
  EXPECT_EQ(batch["labels"][1][3].item<int64_t>(), 9);
  EXPECT_EQ(batch["loss_mask"][0][2].item<float>(), 0);
  EXPECT_EQ(batch["position_ids"][1][2].item<int64_t>(), 0);
  EXPECT_EQ(batch.place.sample[1].item<int64_t>(), 41);
  EXPECT_TRUE(at::equal(batch.place.position, at::arange(4)));
}

TEST(Batch, DocumentsAreNumberedWithinTheirSequence) {
  BatchMaker maker(c10::Device(c10::kCPU), one);
  const Batch batch = maker.make(example_batch(/*own_positions=*/false));
  EXPECT_FALSE(batch.find("position_ids").defined());
  EXPECT_THAT(error_of([&] { (void)batch["position_ids"]; }),
              HasSubstr("the model reads column position_ids, the data has tokens, labels, "
                        "loss_mask"));
  EXPECT_TRUE(
      at::equal(batch.document_ids, at::tensor({0, 0, 0, 0, 0, 0, 1, 1}, at::kLong).view({2, 4})));
}

// Sums over whole sequences, of which a context rank has a part.
TEST(Batch, TotalsAreThoseOfWholeSequences) {
  const auto expect_totals = [](const ProcessGroup& cp) {
    const Batch batch = BatchMaker(c10::Device(c10::kCPU), cp).make(example_batch(false));
    EXPECT_EQ(batch["loss_mask"].size(1), 4 / cp.size());
    EXPECT_TRUE(at::equal(batch.totals.loss_weight, at::tensor({3.0, 4.0})));
    EXPECT_TRUE(at::equal(batch.totals.tokens, at::tensor({4.0, 4.0})));
    EXPECT_FALSE(batch.padding.defined());
  };
  expect_totals(one);
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) { expect_totals({world, "cp"}); });
}

// Two streams of different lengths, and features of each sample: what an encoder and a decoder
// read. Every element says where it is from.
class Translations final : public Dataset {
 public:
  static constexpr int64_t kDecoder = 8, kEncoder = 16, kFeatures = 3;
  Translations(int64_t member, int64_t size)
      : Dataset(Columns(
            {{.name = "decoder_tokens", .shape = {kDecoder}},
             {.name = "encoder_tokens", .shape = {kEncoder}},
             {.name = "loudness", .type = ElementType::kFloat32, .shape = {kEncoder, kFeatures}},
             {.name = "language", .type = ElementType::kUInt8, .shape = {1}, .split = false},
             {.name = "weights",
              .type = ElementType::kFloat32,
              .shape = {kDecoder},
              .is_loss_weight = true}})),
        member_(member),
        size_(size) {}
  int64_t size() const override { return size_; }
  void read(int64_t index, const SampleSpans& out, std::vector<int32_t>& starts) const override {
    for (size_t i = 0; i < kDecoder; ++i)
      out.get<int64_t>("decoder_tokens")[i] = 1000 * index + static_cast<int64_t>(i);
    for (size_t i = 0; i < kEncoder; ++i)
      out.get<int64_t>("encoder_tokens")[i] = -(1000 * index + static_cast<int64_t>(i));
    for (size_t i = 0; i < kEncoder * kFeatures; ++i)
      out.get<float>("loudness")[i] = static_cast<float>(index) + 0.25F * static_cast<float>(i);
    out.get<uint8_t>("language")[0] = static_cast<uint8_t>(member_);
    std::ranges::fill(out.get<float>("weights"), 1.0F);
    starts.assign(1, 0);
  }
  std::string description() const override { return "{}"; }

 private:
  int64_t member_, size_;
};

std::shared_ptr<const Dataset> two_languages() {
  return std::make_shared<const BlendedDataset>(
      std::vector<std::shared_ptr<const Dataset>>{std::make_shared<Translations>(0, 40),
                                                  std::make_shared<Translations>(1, 20)},
      std::vector<double>{2, 1}, 60, Split::kTrain);
}

// The micro-batches that a loader gives from `consumed` on.
std::vector<Batch> batches_from(const std::shared_ptr<const Dataset>& data, int64_t consumed,
                                int64_t workers, const ProcessGroup& cp) {
  DataLoaderOptions options;
  options.sampler.micro_batch_size = 3;
  options.consumed_samples = consumed;
  options.num_workers = workers;
  DataLoader loader(data, options);
  BatchMaker maker(c10::Device(c10::kCPU), cp);
  std::vector<Batch> batches;
  while (const std::shared_ptr<const MicroBatch> next = loader.next())
    batches.push_back(maker.make(next));
  return batches;
}

TEST(Batch, ColumnsOfAnyLengthAndTypeComeFromEverySampleOfABlend) {
  const std::shared_ptr<const Dataset> data = two_languages();
  const std::vector<Batch> batches = batches_from(data, 0, /*workers=*/3, one);
  ASSERT_EQ(batches.size(), 20u);
  for (size_t i = 0; i < batches.size(); ++i) {
    const Batch& batch = batches[i];
    EXPECT_EQ(batch["decoder_tokens"].sizes(), at::IntArrayRef({3, Translations::kDecoder}));
    EXPECT_EQ(batch["encoder_tokens"].sizes(), at::IntArrayRef({3, Translations::kEncoder}));
    EXPECT_EQ(batch["loudness"].scalar_type(), at::kFloat);
    EXPECT_EQ(batch.place.position.size(0), Translations::kDecoder);
    for (int64_t row = 0; row < 3; ++row) {
      const auto [member, index] = data->locate(3 * static_cast<int64_t>(i) + row);
      EXPECT_EQ(batch["decoder_tokens"][row][7].item<int64_t>(), 1000 * index + 7);
      EXPECT_EQ(batch["encoder_tokens"][row][15].item<int64_t>(), -(1000 * index + 15));
      EXPECT_EQ(batch["loudness"][row][15][2].item<float>(), static_cast<float>(index) + 11.75F);
      EXPECT_EQ(batch["language"][row][0].item<uint8_t>(), member);
    }
  }
}

TEST(Batch, ColumnsContinueAtAnyNumberOfConsumedSamples) {
  const std::shared_ptr<const Dataset> data = two_languages();
  const std::vector<Batch> whole = batches_from(data, 0, /*workers=*/0, one);
  for (const int64_t skipped : {1, 7, 19}) {
    const std::vector<Batch> rest = batches_from(data, 3 * skipped, /*workers=*/2, one);
    ASSERT_EQ(rest.size(), whole.size() - static_cast<size_t>(skipped));
    for (size_t i = 0; i < rest.size(); ++i)
      for (const auto& [name, tensor] : rest[i].columns())
        EXPECT_TRUE(at::equal(tensor, whole[i + static_cast<size_t>(skipped)][name])) << name;
  }
}

TEST(Batch, EachContextRankHasItsPartOfEveryStream) {
  const std::shared_ptr<const Dataset> data = two_languages();
  const std::vector<Batch> whole = batches_from(data, 0, /*workers=*/0, one);
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    const ProcessGroup cp(world, "cp");
    const std::vector<Batch> parts = batches_from(data, 0, /*workers=*/1, cp);
    ASSERT_EQ(parts.size(), whole.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      for (const auto& [name, tensor] : parts[i].columns()) {
        const at::Tensor& all = whole[i][name];
        if (name == "language") {
          EXPECT_TRUE(at::equal(tensor, all)) << "whole on every rank";
          continue;
        }
        // Zig-zag: quarters r and 3 - r
        const int64_t quarter = all.size(1) / 4, r = cp.rank();
        EXPECT_TRUE(at::equal(tensor, at::cat({all.narrow(1, r * quarter, quarter),
                                               all.narrow(1, (3 - r) * quarter, quarter)},
                                              1)))
            << name;
      }
    }
  });
}

TEST(Batch, SamplesThatFillABatchHaveNoWeight) {
  DataLoaderOptions options;
  options.sampler = {.micro_batch_size = 3, .drop_last = false};
  DataLoader loader(std::make_shared<Translations>(0, 4), options);
  loader.next();
  const Batch batch = BatchMaker(c10::Device(c10::kCPU), one).make(loader.next());
  EXPECT_TRUE(at::equal(batch["weights"].sum(1), at::tensor({8.0F, 0.0F, 0.0F})));
}

TEST(Columns, RefusesWhatDoesNotFit) {
  const auto data = std::make_shared<Translations>(0, 4);
  EXPECT_THAT(error_of([&] { data->sample(0).get<int64_t>("tokens"); }),
              HasSubstr("there is no column tokens; the data has decoder_tokens int64 [8], "
                        "encoder_tokens int64 [16], loudness float32 [16, 3], language uint8 [1], "
                        "weights float32 [8]"));
  EXPECT_THAT(error_of([&] { data->sample(0).get<float>("decoder_tokens"); }),
              HasSubstr("column decoder_tokens is int64, read as float32"));
  EXPECT_THAT(error_of([] { Columns({{.name = "x", .shape = {1}}, {.name = "x", .shape = {2}}}); }),
              HasSubstr("two columns are named x"));
  EXPECT_THAT(error_of([] { Columns({{.name = "x"}}); }), HasSubstr("column x has no dimensions"));
  struct Other final : Dataset {
    Other() : Dataset(Columns({{.name = "tokens", .shape = {8}}})) {}
    int64_t size() const override { return 4; }
    void read(int64_t, const SampleSpans&, std::vector<int32_t>&) const override {}
    std::string description() const override { return "{}"; }
  };
  EXPECT_THAT(error_of([&] {
                BlendedDataset({data, std::make_shared<Other>()}, {1, 1}, 4, Split::kTrain);
              }),
              HasSubstr("the datasets of a blend have different columns"));
}

}  // namespace
}  // namespace megatron
