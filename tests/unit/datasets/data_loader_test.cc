// The background loader: order, restarts, memory, errors.
#include "megatron/datasets/data_loader.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "megatron/datasets/gpt/mock_dataset.h"
#include "testing.h"

namespace megatron::testing_datasets {
namespace {

using ::testing::HasSubstr;
using Longs = std::vector<int64_t>;

std::shared_ptr<const Dataset> mock(int64_t samples) {
  GPTDatasetConfig config;
  config.sequence_length = 16;
  config.tokenizer = {.vocab_size = 50, .eod = 49};
  return std::make_shared<const MockGPTDataset>(Split::kTrain, samples, config);
}

// A dataset whose reading takes an uneven time, and that fails at one index.
class Awkward : public Dataset {
 public:
  explicit Awkward(int64_t fails_at) : Dataset(gpt_columns(2)), fails_at_(fails_at) {}
  int64_t size() const override { return 64; }
  void read(int64_t index, const SampleSpans& sample, std::vector<int32_t>& starts) const override {
    const GPTSpans out(sample);
    std::this_thread::sleep_for(std::chrono::microseconds(index * 7919 % 13 * 100));
    MEGATRON_CHECK(index != fails_at_, "sample ", index, " is damaged");
    std::fill(out.tokens.begin(), out.tokens.end(), index);
    std::fill(out.loss_mask.begin(), out.loss_mask.end(), 1.0F);
    starts.assign(1, 0);
  }
  std::string description() const override { return "{}"; }

 private:
  int64_t fails_at_;
};

template <class T>
std::vector<T> row(const MicroBatch& batch, const char* column, int64_t i) {
  const std::span<const T> elements = batch.data().row<T>(column, i);
  return {elements.begin(), elements.end()};
}

DataLoaderOptions options_of(int64_t workers, int64_t consumed = 0) {
  DataLoaderOptions options;
  options.sampler.micro_batch_size = 2;
  options.sampler.data_parallel_rank = 1;
  options.sampler.data_parallel_size = 2;
  options.consumed_samples = consumed;
  options.num_workers = workers;
  return options;
}

TEST(DataLoader, GivesEveryBatchInOrderForAnyNumberOfWorkers) {
  const auto dataset = mock(21);
  for (const int64_t workers : {0, 1, 3}) {
    DataLoader loader(dataset, options_of(workers));
    for (int64_t step = 0; step < 5; ++step) {
      const auto batch = loader.next();
      ASSERT_NE(batch, nullptr);
      EXPECT_EQ(batch->sample_ids, (Longs{4 * step + 2, 4 * step + 3}));
      EXPECT_EQ(batch->ordinals, batch->sample_ids);
      EXPECT_EQ(loader.consumed(), 4 * (step + 1));
      for (int64_t i = 0; i < 2; ++i) {
        const Sample sample = dataset->sample(batch->sample_ids[i]);
        for (const char* name : {"tokens", "labels", "position_ids"})
          EXPECT_EQ(row<int64_t>(*batch, name, i), sample.get<int64_t>(name));
        EXPECT_EQ(row<float>(*batch, "loss_mask", i), sample.get<float>("loss_mask"));
      }
    }
    EXPECT_EQ(loader.next(), nullptr);
    EXPECT_EQ(loader.next(), nullptr) << "the end stays the end";
    EXPECT_EQ(loader.consumed(), 20);
  }
}

TEST(DataLoader, ContinuesAnywhere) {
  DataLoaderOptions options = options_of(2);
  options.sampler.type = DataloaderType::kCyclic;
  const auto dataset = mock(21);
  std::vector<Longs> whole;
  DataLoader loader(dataset, options);
  for (int i = 0; i < 12; ++i) whole.push_back(loader.next()->sample_ids);
  for (const int64_t start : {1, 5, 7}) {
    options.consumed_samples = 4 * start;
    DataLoader again(dataset, options);
    for (size_t i = start; i < whole.size(); ++i) EXPECT_EQ(again.next()->sample_ids, whole[i]);
  }
}

TEST(DataLoader, KeepsOrderWhenWorkersFinishOutOfOrder) {
  DataLoaderOptions options = options_of(4);
  options.sampler = {.micro_batch_size = 1};
  DataLoader loader(std::make_shared<Awkward>(-1), options);
  for (int64_t i = 0; i < 64; ++i) EXPECT_EQ(row<int64_t>(*loader.next(), "tokens", 0)[1], i);
}

TEST(DataLoader, RethrowsAtThePlaceOfTheError) {
  for (const int64_t workers : {0, 4}) {
    DataLoaderOptions options = options_of(workers);
    options.sampler = {.micro_batch_size = 1};
    DataLoader loader(std::make_shared<Awkward>(9), options);
    for (int64_t i = 0; i < 9; ++i) EXPECT_EQ(row<int64_t>(*loader.next(), "tokens", 0)[0], i);
    EXPECT_THAT(error_of([&] { loader.next(); }), HasSubstr("sample 9 is damaged"));
    EXPECT_THAT(error_of([&] { loader.next(); }), HasSubstr("sample 9 is damaged"));
  }
}

TEST(DataLoader, ReusesMemoryOfTheAllocatorAndOutlivesTheLoader) {
  std::atomic<int> live = 0, total = 0;
  DataLoaderOptions options = options_of(2);
  options.prefetch = 3;
  options.allocator = {[&](size_t bytes) {
                         ++live, ++total;
                         return std::malloc(bytes);
                       },
                       [&](void* block, size_t) {
                         --live;
                         std::free(block);
                       }};
  {
    std::shared_ptr<const MicroBatch> kept;
    {
      DataLoader loader(mock(4000), options);
      for (int i = 0; i < 500; ++i) kept = loader.next();
    }
    EXPECT_EQ(kept->data().data(0), kept->block);
    EXPECT_EQ(row<int64_t>(*kept, "tokens", 0),
              mock(4000)->sample(kept->sample_ids[0]).get<int64_t>("tokens"));
    EXPECT_LE(total, 8) << "blocks are used again";
    EXPECT_GT(live, 0);
  }
  EXPECT_EQ(live, 0);
}

TEST(DataLoader, PaddingSamplesHaveNoLoss) {
  DataLoaderOptions options = options_of(1, 4);
  options.sampler = {.micro_batch_size = 4, .drop_last = false};
  DataLoader loader(mock(6), options);
  const auto batch = loader.next();
  EXPECT_EQ(batch->sample_ids, (Longs{4, 5, kPaddingSample, kPaddingSample}));
  float first = 0, padding = 0;
  const std::span<const float> mask = batch->data().all<float>("loss_mask");
  for (size_t i = 0; i < 32; ++i) first += mask[i], padding += mask[32 + i];
  EXPECT_EQ(first, 32);
  EXPECT_EQ(padding, 0);
}

TEST(DataLoader, StopsQuicklyWithFullQueue) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 20; ++i) DataLoader(mock(1000), options_of(3)).next();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST(MockDataset, IsAFunctionOfSeedSplitAndIndex) {
  GPTDatasetConfig config;
  config.sequence_length = 300;
  config.tokenizer = {.vocab_size = 50, .eod = 49};
  config.reset_attention_mask = config.reset_position_ids = true;
  const MockGPTDataset train(Split::kTrain, 10, config), valid(Split::kValid, 10, config);
  EXPECT_EQ(train.sample(3).get<int64_t>("tokens"),
            MockGPTDataset(Split::kTrain, 10, config).sample(3).get<int64_t>("tokens"));
  EXPECT_NE(train.sample(3).get<int64_t>("tokens"), train.sample(4).get<int64_t>("tokens"));
  EXPECT_NE(train.sample(3).get<int64_t>("tokens"), valid.sample(3).get<int64_t>("tokens"));
  const Sample sample = train.sample(0);
  EXPECT_GT(sample.document_starts.size(), 1u);
  for (size_t p = 1; p < sample.document_starts.size(); ++p) {
    EXPECT_EQ(sample.get<int64_t>("tokens")[sample.document_starts[p] - 1], 49);
    EXPECT_EQ(sample.get<int64_t>("position_ids")[sample.document_starts[p]], 0);
  }
  for (size_t i = 0; i + 1 < 300; ++i)
    EXPECT_EQ(sample.get<int64_t>("labels")[i], sample.get<int64_t>("tokens")[i + 1]);
}

}  // namespace
}  // namespace megatron::testing_datasets
