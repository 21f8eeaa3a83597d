// The attentions whose times are part of a step's lower bound are those of the model: against
// attention by its definition, key by key.
#include "megatron/training/benchmarking/measured_attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "megatron/models/model_table.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/arguments/model_provider.h"
#include "megatron/training/tasks/tasks.h"
#include "tests/unit/parse_line.h"

namespace megatron {
namespace {

// Whether query i of `s` sees key j, and what distance adds to its score.
using Sees = std::function<bool(int64_t i, int64_t j)>;
struct Definition {
  Sees sees;
  double softcap = 0.0;
};

std::vector<AttendedLayers> layers_of(const std::string& flags, const Batch& batch = {}) {
  const Arguments arguments = parse_line(
      "train --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --lr 1e-3 --train-iters 1 "
      "--num-attention-heads 4 --hidden-size 32 --micro-batch-size 3 --global-batch-size 3 " +
      flags);
  const Vocabulary vocabulary{100, 128};
  const std::unique_ptr<Model> model =
      whole_model(find_task(arguments).model_provider, arguments, vocabulary);
  LayerShape shape;
  shape.samples = 3;
  shape.tokens = shape.rows = 3 * arguments.transformer.seq_length;
  const ModelConfig& config = model->config();
  const EndsCost ends = find_model_type(config.type).ends_cost(config, {shape, 128});
  return attended_layers(config, config.transformer.num_layers, shape, {batch, ends.first_stack});
}

// q [s, n, d], k [s_k, g, d], v [s_k, g, v] of one sample.
at::Tensor defined(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const AttentionOptions& options, const Definition& d, int64_t length) {
  const int64_t s = q.size(0), keys = k.size(0), n = q.size(1), group = n / k.size(1);
  std::vector<at::Tensor> heads;
  for (int64_t head = 0; head < n; ++head) {
    at::Tensor scores =
        options.scale * at::matmul(q.select(1, head), k.select(1, head / group).t());
    if (d.softcap > 0) scores = d.softcap * at::tanh(scores / d.softcap);
    for (int64_t i = 0; i < s; ++i)
      for (int64_t j = 0; j < keys; ++j) {
        if (!d.sees(i, j)) scores[i][j] = -INFINITY;
        if (options.distance_bias.defined())
          scores[i][j] += options.distance_bias[head][j - i + length - 1].item<double>();
      }
    if (options.sinks.defined()) scores = at::cat({scores, options.sinks[head].expand({s, 1})}, 1);
    const at::Tensor shares = at::softmax(scores, 1).narrow(1, 0, keys);
    heads.push_back(at::matmul(shares, v.select(1, head / group)));
  }
  return at::stack(heads, 1).flatten(1);
}

void expect_defined(const AttendedLayers& layers, const Definition& d) {
  const MeasuredAttention attention(layers.size, layers.rows, at::kDouble, at::kCPU);
  const auto [q, k, v] = attention.operands();
  const at::Tensor y = attention.forward();
  int64_t row = 0, key_row = 0;
  for (int64_t sample = 0; sample < layers.size.sequences; ++sample) {
    if (layers.rows.queries == nullptr) {
      const at::Tensor own = defined(q.select(1, sample), k.select(1, sample), v.select(1, sample),
                                     attention.options(), d, layers.size.queries);
      EXPECT_TRUE(at::allclose(y.select(1, sample), own, 1e-10, 1e-12));
      continue;
    }
    const auto i = static_cast<size_t>(sample);
    const int64_t rows = layers.rows.queries->lengths[i], keys = layers.rows.of_keys().lengths[i];
    const auto of = [](const at::Tensor& x, int64_t first, int64_t count) {
      return x.squeeze(1).narrow(0, first, count);
    };
    EXPECT_TRUE(at::allclose(of(y, row, rows),
                             defined(of(q, row, rows), of(k, key_row, keys), of(v, key_row, keys),
                                     attention.options(), d, layers.size.queries),
                             1e-10, 1e-12));
    row += rows;
    key_row += keys;
  }
  attention.both();
}

std::shared_ptr<UnpaddedRows> texts(int64_t length, const std::vector<int64_t>& lengths) {
  std::vector<uint8_t> mask(static_cast<size_t>(length) * lengths.size());
  std::vector<int64_t> samples;
  for (size_t i = 0; i < lengths.size(); ++i) {
    std::fill_n(mask.begin() + static_cast<std::ptrdiff_t>(i) * length, lengths[i], uint8_t{1});
    samples.push_back(static_cast<int64_t>(i));
  }
  return std::make_shared<UnpaddedRows>(make_unpadded_rows({mask}, samples, 1));
}

bool earlier(int64_t i, int64_t j) { return j <= i; }
bool all(int64_t, int64_t) { return true; }

TEST(MeasuredAttention, OfADecoderIsCausalInItsWindowsCapsAndSinks) {
  const auto plain = layers_of("--num-layers 3 --seq-length 12 --max-position-embeddings 12");
  ASSERT_EQ(plain.size(), 1u);
  EXPECT_EQ(plain[0].layers, 3);
  EXPECT_TRUE(plain[0].size.packed);
  expect_defined(plain[0], {earlier});
  const auto gemma = layers_of(
      "--num-layers 4 --seq-length 12 --max-position-embeddings 12 --window-size 3 0 "
      "--window-attn-skip-freq 2 --attn-logit-softcapping 2.0 --group-query-attention "
      "--num-query-groups 2 --attention-dropout 0");
  ASSERT_EQ(gemma.size(), 2u);
  EXPECT_EQ(gemma[0].layers, 2);
  expect_defined(gemma[0], {[](int64_t i, int64_t j) { return j <= i && j >= i - 3; }, 2.0});
  expect_defined(gemma[1], {earlier, 2.0});
  const auto sinks = layers_of(
      "--num-layers 1 --seq-length 12 --max-position-embeddings 12 --softmax-type learnable");
  expect_defined(sinks[0], {earlier});
  EXPECT_TRUE(
      MeasuredAttention(sinks[0].size, {}, at::kDouble, at::kCPU).options().sinks.defined());
  const auto latent = layers_of(
      "--num-layers 1 --seq-length 12 --max-position-embeddings 12 --multi-latent-attention "
      "--kv-lora-rank 8 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 5 "
      "--position-embedding-type rope --normalization RMSNorm");
  EXPECT_EQ(latent[0].size.key_size, 10);
  EXPECT_EQ(latent[0].size.value_size, 5);
  expect_defined(latent[0], {earlier});
}

TEST(MeasuredAttention, OfAnEncoderSeesBothSidesOfATextWithoutItsPadding) {
  const std::string bert = "--task bert --seq-length 12 --max-position-embeddings 12 ";
  const auto full = layers_of(bert + "--num-layers 2");
  ASSERT_EQ(full.size(), 1u);
  EXPECT_EQ(full[0].layers, 2);
  expect_defined(full[0], {all});
  Batch batch;
  batch.unpadded.emplace_back("padding_mask", texts(12, {5, 12, 1}));
  const auto ragged = layers_of(bert + "--num-layers 2 --window-size 2 1", batch);
  ASSERT_NE(ragged[0].rows.queries, nullptr);
  expect_defined(ragged[0], {[](int64_t i, int64_t j) { return j >= i - 2 && j <= i + 1; }});
  const MeasuredAttention narrow(ragged[0].size, ragged[0].rows, at::kFloat, at::kCPU),
      whole(full[0].size, {}, at::kFloat, at::kCPU);
  EXPECT_EQ(whole.forward_flops(), 2.0 * 3 * 12 * 12 * 2 * 32);
  EXPECT_EQ(narrow.forward_flops(), 2.0 * ((5 + 12) * 4 + 1) * 2 * 32);
}

TEST(MeasuredAttention, OfTwoStacksHasTheirDistancesAndLengths) {
  const std::string t5 =
      "--task t5 --encoder-num-layers 2 --decoder-num-layers 3 --encoder-seq-length 12 "
      "--decoder-seq-length 7 --position-embedding-type relative ";
  for (const bool ragged : {false, true}) {
    Batch batch;
    if (ragged) {
      batch.unpadded.emplace_back("enc_mask", texts(12, {9, 3, 12}));
      batch.unpadded.emplace_back("dec_mask", texts(7, {1, 7, 4}));
    }
    const auto layers = layers_of(t5, batch);
    ASSERT_EQ(layers.size(), 3u);  // encoder, decoder, cross attention
    EXPECT_EQ(layers[0].layers, 2);
    EXPECT_EQ(layers[1].layers, 3);
    EXPECT_EQ(layers[2].layers, 3);
    EXPECT_EQ(layers[1].size.queries, 7);
    EXPECT_EQ(layers[2].size.keys, 12);
    EXPECT_TRUE(layers[0].size.by_distance && layers[1].size.by_distance);
    EXPECT_FALSE(layers[2].size.by_distance);
    expect_defined(layers[0], {all});
    expect_defined(layers[1], {earlier});
    expect_defined(layers[2], {all});
  }
}

}  // namespace
}  // namespace megatron
