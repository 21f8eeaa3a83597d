#include "megatron/distributed/buffer_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace megatron {
namespace {

std::vector<BufferParameter> sizes(std::vector<int64_t> elements) {
  std::vector<BufferParameter> parameters;
  for (int64_t n : elements) parameters.push_back({n, false, 0});
  return parameters;
}

TEST(BufferLayout, ReverseOrderWithAlignedStarts) {
  const BufferLayout layout = plan_buffer(sizes({100, 64, 1}), {});
  EXPECT_EQ(layout.slots[2].begin, 0);
  EXPECT_EQ(layout.slots[2].end, 1);
  EXPECT_EQ(layout.slots[1].begin, 64);
  EXPECT_EQ(layout.slots[0].begin, 128);
  EXPECT_EQ(layout.slots[0].end, 228);
  ASSERT_EQ(layout.buckets.size(), 1u);
  EXPECT_EQ(layout.buckets[0].parameters, (std::vector<int>{2, 1, 0}));
  EXPECT_EQ(layout.num_elements, 256);
}

TEST(BufferLayout, BucketsCloseAtTheirSize) {
  const BufferLayout layout = plan_buffer(sizes({64, 64, 64, 640, 64}), {128, 1, 128});
  ASSERT_EQ(layout.buckets.size(), 3u);
  EXPECT_EQ(layout.buckets[0].parameters, (std::vector<int>{4, 3}));
  EXPECT_EQ(layout.buckets[1].parameters, (std::vector<int>{2, 1}));
  EXPECT_EQ(layout.buckets[2].parameters, (std::vector<int>{0}));
  EXPECT_EQ(layout.slots[0].bucket, 2);
  for (size_t b = 1; b < layout.buckets.size(); ++b) {
    EXPECT_EQ(layout.buckets[b].begin, layout.buckets[b - 1].end) << "buckets touch";
  }
}

TEST(BufferLayout, ShardedBucketsEndAtWholeShards) {
  const BufferLayout layout = plan_buffer(sizes({100, 100, 100}), {150, 3, 128});
  ASSERT_EQ(layout.buckets.size(), 2u);
  EXPECT_EQ(layout.buckets[0].end, 384);  // lcm(3, 128), and 228 elements
  EXPECT_EQ(layout.slots[0].begin, 384);
  EXPECT_EQ(layout.num_elements, 768);
  EXPECT_EQ(plan_buffer(sizes({100}), {0, 3, 65536}).num_elements, 3 * 65536);
}

TEST(BufferLayout, NeighboursOfDifferentUnitsLieInDifferentBuckets) {
  std::vector<BufferParameter> parameters = sizes({10, 10, 10, 10});
  parameters[2].unit = parameters[3].unit = 1;
  const BufferLayout layout = plan_buffer(parameters, {0, 2, 128});
  ASSERT_EQ(layout.buckets.size(), 2u);
  EXPECT_EQ(layout.buckets[0].parameters, (std::vector<int>{3, 2}));
  EXPECT_EQ(layout.buckets[1].parameters, (std::vector<int>{1, 0}));
}

TEST(BufferLayout, ATiedEmbeddingHasItsOwnBucket) {
  std::vector<BufferParameter> parameters = sizes({10, 20, 30});
  parameters[1].own_bucket = true;
  const BufferLayout layout = plan_buffer(parameters, {});
  ASSERT_EQ(layout.buckets.size(), 3u);
  EXPECT_EQ(layout.buckets[0].parameters, (std::vector<int>{2}));
  EXPECT_EQ(layout.buckets[1].parameters, (std::vector<int>{1}));
  EXPECT_EQ(layout.buckets[2].parameters, (std::vector<int>{0}));
  EXPECT_FALSE(layout.buckets[0].own);
  EXPECT_TRUE(layout.buckets[1].own);
  EXPECT_FALSE(layout.buckets[2].own);
}

// Norms are the names that contain "norm".
std::vector<int> units_of(const std::vector<std::string>& names) {
  std::vector<bool> norms;
  for (const std::string& name : names) norms.push_back(name.find("norm") != std::string::npos);
  return sharding_units(names, norms);
}

TEST(BufferLayout, UnitsAreLayersAndThePartsAroundThem) {
  const std::string layer = "decoder.layers.";
  EXPECT_EQ(units_of({"embedding.word_embeddings.weight", "embedding.position_embeddings.weight",
                      layer + "0.mlp.layer_norm.weight", layer + "0.mlp.linear_fc2.weight",
                      layer + "1.mlp.linear_fc1.weight", layer + "10.mlp.linear_fc1.weight",
                      "decoder.final_layernorm.weight", "output_layer.weight"}),
            (std::vector<int>{0, 0, 1, 1, 2, 3, 3, 4}));
  EXPECT_EQ(units_of({layer + "3.a", "decoder.final_layernorm.weight"}), (std::vector<int>{0, 0}));
  EXPECT_EQ(units_of({"decoder.final_layernorm.weight", "decoder.final_layernorm.bias",
                      "output_layer.weight", "more.weight"}),
            (std::vector<int>{0, 0, 0, 1}))
      << "a stage without layers";
  EXPECT_EQ(units_of({"encoder.layers.0.a", "encoder.norm.weight", "encoder.pooler.weight"}),
            (std::vector<int>{0, 0, 1}))
      << "a matrix beside the layers";
  EXPECT_EQ(units_of({"weight", "bias"}), (std::vector<int>{0, 1}));
  EXPECT_TRUE(units_of({}).empty());
}

TEST(BufferLayout, ATableIsABucketOfEmbeddingsAlone) {
  std::vector<BufferParameter> parameters = sizes({64, 64, 64, 64});
  parameters[0].embedding = parameters[1].embedding = parameters[3].embedding = true;
  for (const int i : {2, 3}) parameters[i].unit = 1;
  const BufferLayout layout = plan_buffer(parameters, {});
  ASSERT_EQ(layout.buckets.size(), 2u);
  EXPECT_FALSE(layout.buckets[0].table) << "an embedding and something else";
  EXPECT_TRUE(layout.buckets[1].table);
  parameters[2].embedding = true;
  parameters[3].embedding = false;
  EXPECT_FALSE(plan_buffer(parameters, {}).buckets[0].table) << "in the other order";
}

// What holds of every layout of `parameters`.
void expect_sound(const BufferLayout& layout, const std::vector<BufferParameter>& parameters,
                  const BufferOptions& options) {
  int64_t end = 0;
  for (const BufferBucket& bucket : layout.buckets) {
    EXPECT_EQ(bucket.begin, end) << "buckets touch";
    end = bucket.begin;
    const int64_t slice = (bucket.end - bucket.begin) / options.num_shards;
    EXPECT_EQ(slice * options.num_shards, bucket.end - bucket.begin);
    EXPECT_EQ((bucket.end - bucket.begin) % (options.num_shards > 1 ? options.shard_alignment : 64),
              0);
    for (const int index : bucket.parameters) {
      const BufferSlot& slot = layout.slots[static_cast<size_t>(index)];
      const BufferParameter& parameter = parameters[static_cast<size_t>(index)];
      EXPECT_EQ(slot.begin % 64, 0);
      EXPECT_GE(slot.begin, end) << "parameters overlap";
      EXPECT_EQ(slot.end - slot.begin, parameter.num_elements);
      end = slot.end;
      if (parameter.whole) {
        EXPECT_EQ((slot.begin - bucket.begin) / slice, (slot.end - 1 - bucket.begin) / slice)
            << "a border cuts parameter " << index;
      }
    }
    EXPECT_LE(end, bucket.end);
    end = bucket.end;
  }
  EXPECT_EQ(end, layout.num_elements);
}

TEST(BufferLayout, NoShardBorderCutsAWholeParameter) {
  std::vector<BufferParameter> parameters = sizes({1000, 64, 1000, 64, 1000, 64});
  const auto cut = plan_buffer(parameters, {0, 2, 128});
  EXPECT_EQ(cut.num_elements, 2 * 1664);
  EXPECT_LT(cut.slots[2].begin, 1664) << "the middle one is cut";
  EXPECT_GT(cut.slots[2].end, 1664);
  for (size_t i = 0; i < 6; i += 2) parameters[i].whole = true;
  const auto whole = plan_buffer(parameters, {0, 2, 128});
  EXPECT_EQ(whole.num_elements, 2 * 2112) << "two in the second slice, in steps of 64";
  EXPECT_EQ(whole.slots[4].begin, 64);
  EXPECT_EQ(whole.slots[2].begin, 2112) << "moved to the border";
  EXPECT_EQ(whole.slots[1].begin, 2112 + 1024);
  EXPECT_EQ(whole.slots[0].begin, 2112 + 1024 + 64);
  // One rank has no borders.
  EXPECT_EQ(plan_buffer(parameters, {0, 1, 128}).num_elements,
            plan_buffer(sizes({1000, 64, 1000, 64, 1000, 64}), {0, 1, 128}).num_elements);
}

TEST(BufferLayout, WholeParametersOfAnySize) {
  std::mt19937 random(5);
  const auto below = [&](int limit) { return static_cast<int64_t>(random() % limit); };
  for (int i = 0; i < 300; ++i) {
    std::vector<BufferParameter> parameters(static_cast<size_t>(1 + below(40)));
    int64_t all = 0, largest = 0;
    for (BufferParameter& parameter : parameters) {
      parameter.num_elements = 1 + below(below(4) == 0 ? 20000 : 500);
      parameter.whole = below(3) > 0;
      parameter.unit = 0;
      all += parameter.num_elements;
      if (parameter.whole) largest = std::max(largest, parameter.num_elements);
    }
    const BufferOptions options{below(2) * 1000, 1 + below(9), below(4) == 0 ? 1024 : 128};
    const BufferLayout layout = plan_buffer(parameters, options);
    expect_sound(layout, parameters, options);
    // A slice is at most its share and one matrix longer; so is what alignment adds, per parameter
    // and per slice.
    const auto count = static_cast<int64_t>(parameters.size());
    if (layout.buckets.size() == 1) {
      EXPECT_LE(layout.num_elements, all + options.num_shards * (largest + 2048) + 64 * count);
    }
    for (size_t b = 0; options.num_shards > 1 && b + 1 < layout.buckets.size(); ++b) {
      const BufferBucket& bucket = layout.buckets[b];
      EXPECT_GE(bucket.end - bucket.begin, options.num_shards * largest)
          << "every shard could hold the largest";
    }
  }
}

// Of fp32 values in a model of 2-byte ones.
TEST(BufferLayout, WideParametersFillBucketsBesideTheOthers) {
  std::vector<BufferParameter> parameters = sizes({64, 10, 64, 10, 64, 10});
  for (const int i : {1, 3, 5}) parameters[i].wide = true;
  parameters[4].unit = parameters[5].unit = 1;
  BufferOptions options{0, 2, 128};
  options.wide_elements = 2;
  const BufferLayout layout = plan_buffer(parameters, options);
  ASSERT_EQ(layout.buckets.size(), 4u);
  const std::vector<std::vector<int>> expected = {{4}, {5}, {2, 0}, {3, 1}};
  int64_t value_begin = 0;
  for (int i = 0; i < 4; ++i) {
    const BufferBucket& bucket = layout.buckets[i];
    EXPECT_EQ(bucket.parameters, expected[i]);
    EXPECT_EQ(bucket.wide, i % 2 == 1);
    EXPECT_EQ(bucket.begin, 128 * i) << "of gradients, of one type";
    EXPECT_EQ(bucket.value_begin, value_begin);
    EXPECT_EQ(bucket.value_elements, bucket.wide ? 256 : 128);
    value_begin += bucket.value_elements;
  }
  EXPECT_EQ(layout.num_value_elements, value_begin);
  EXPECT_EQ(layout.slots[1].begin, 3 * 128 + 64);
  EXPECT_EQ(gathered_together(layout), (std::vector<int>{0, 0, 2, 2}));
  // They close at their own size, and each type at its own time.
  options.bucket_size = 20;
  for (BufferParameter& parameter : parameters) parameter.unit = 0;
  std::vector<std::vector<int>> buckets;
  for (const BufferBucket& bucket : plan_buffer(parameters, options).buckets)
    buckets.push_back(bucket.parameters);
  EXPECT_EQ(buckets, (std::vector<std::vector<int>>{{4}, {5, 3}, {2}, {0}, {1}}));
}

TEST(BufferLayout, NothingIsLegal) {
  const BufferLayout layout = plan_buffer({}, {});
  EXPECT_EQ(layout.num_elements, 0);
  EXPECT_TRUE(layout.buckets.empty());
}

TEST(BufferLayout, FrozenParametersLieBehind) {
  std::vector<BufferParameter> parameters = sizes({64, 128, 64, 192});
  for (const int i : {1, 3}) parameters[i].frozen = parameters[i].own_bucket = true;
  for (size_t i = 0; i < 4; ++i) parameters[i].unit = static_cast<int>(i / 2);
  const BufferLayout layout = plan_buffer(parameters, {});
  EXPECT_EQ(layout.num_trained_elements, 128);
  EXPECT_EQ(layout.num_trained_buckets, 2);
  EXPECT_EQ(layout.num_elements, 448);
  ASSERT_EQ(layout.buckets.size(), 4u);
  EXPECT_EQ(layout.slots[2].begin, 0);
  EXPECT_EQ(layout.slots[0].begin, 64);
  EXPECT_EQ(layout.slots[3].begin, 128);
  EXPECT_EQ(layout.slots[1].begin, 320);
  for (int bucket = 0; bucket < 4; ++bucket) {
    EXPECT_EQ(layout.buckets[bucket].frozen, bucket >= 2);
    EXPECT_EQ(layout.buckets[bucket].unit, bucket % 2 == 0 ? 1 : 0);
    EXPECT_FALSE(layout.buckets[bucket].own) << "its gradient is never complete";
  }
}

}  // namespace
}  // namespace megatron
