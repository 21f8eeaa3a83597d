#include "megatron/reporting/flops.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "megatron/base/check.h"

namespace megatron {
namespace {

// The expected values were printed by Megatron-LM's num_floating_point_operations.
void expect_flops(const ModelFlops& model, int64_t batch, int64_t s, double expected) {
  EXPECT_NEAR(iteration_flops(model, IterationTokens::unpacked(batch, s)) / expected, 1.0, 1e-15);
}

ModelFlops gpt(int64_t layers, int64_t h, int64_t heads, int64_t vocab) {
  ModelFlops m;
  m.num_layers = layers;
  m.hidden_size = h;
  m.ffn_hidden_size = 4 * h;
  m.num_attention_heads = m.num_query_groups = heads;
  m.kv_channels = h / heads;
  m.padded_vocab_size = vocab;
  return m;
}

ModelFlops llama3_8b() {
  ModelFlops m = gpt(32, 4096, 32, 128256);
  m.num_query_groups = 8;
  m.ffn_hidden_size = 14336;
  m.gated = true;
  return m;
}

TEST(Flops, Gpt3) { expect_flops(gpt(96, 12288, 96, 51200), 1536, 2048, 3.3405978001601987e18); }

TEST(Flops, Gpt345M) { expect_flops(gpt(24, 1024, 16, 50304), 8, 1024, 18612240777216.0); }

TEST(Flops, Gpt345MWithOnePredictionLayer) {
  ModelFlops m = gpt(24, 1024, 16, 50304);
  m.mtp_num_layers = 1;
  expect_flops(m, 8, 1024, 21917369106432.0);
}

TEST(Flops, Llama3) { expect_flops(llama3_8b(), 128, 8192, 5.397062776101274e16); }

TEST(Flops, Mixtral) {
  ModelFlops m = llama3_8b();
  m.padded_vocab_size = 32000;
  m.moe = MoEFlops{.num_experts = 8, .topk = 2, .ffn_hidden_size = 14336};
  expect_flops(m, 256, 4096, 8.357827687376486e16);
}

TEST(Flops, LatentAttentionWithExperts) {
  ModelFlops m = gpt(27, 2048, 16, 102400);
  m.ffn_hidden_size = 10944;
  m.gated = true;
  MoEFlops moe{
      .num_experts = 64, .topk = 6, .ffn_hidden_size = 1408, .shared_ffn_hidden_size = 2816};
  moe.is_moe_layer.assign(27, true);
  moe.is_moe_layer[0] = false;
  m.moe = moe;
  m.mla = MLAFlops{
      .kv_lora_rank = 512, .qk_head_dim = 128, .qk_pos_emb_head_dim = 64, .v_head_dim = 128};
  expect_flops(m, 64, 4096, 4295538795085824.0);
}

TEST(Flops, Hybrid) {
  ModelFlops m = gpt(8, 2048, 16, 131072);
  m.num_query_groups = 8;
  m.ffn_hidden_size = 8192;
  m.hybrid_pattern = "M-M*M-M-";
  expect_flops(m, 64, 4096, 810614947577856.0);
}

TEST(Flops, RefusesAnUnknownLayer) {
  ModelFlops m = gpt(1, 64, 1, 128);
  m.hybrid_pattern = "M?";
  try {
    iteration_flops(m, IterationTokens::unpacked(1, 1));
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                testing::HasSubstr(
                    "the hybrid pattern M? has the unknown layer '?', expected M, *, - or E"));
  }
  m.hybrid_pattern = "E";
  EXPECT_THROW(iteration_flops(m, IterationTokens::unpacked(1, 1)), Error);
}

TEST(Flops, PeakIsThatOfTheLongestMatchingName) {
  EXPECT_EQ(peak_bf16_flops("NVIDIA H200"), 989e12);
  EXPECT_EQ(peak_bf16_flops("NVIDIA H100 PCIe"), 756e12);
  EXPECT_EQ(peak_bf16_flops("NVIDIA L40S"), 362e12);
  EXPECT_EQ(peak_bf16_flops("abacus"), 0);
}

}  // namespace
}  // namespace megatron
