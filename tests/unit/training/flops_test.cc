// The operations that a run reports of its model, against Megatron-LM's formula and numbers.
#include <gtest/gtest.h>

#include "megatron/training/tasks/tasks.h"
#include "tests/unit/parse_line.h"

namespace megatron {
namespace {

struct Row {
  const char* name;
  const char* flags;
  int64_t vocabulary;
  int64_t samples;
  double printed;  // by num_floating_point_operations; 0: not run
};

Arguments configured(const std::string& flags) {
  return parse_line(
      "train --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --lr 1e-3 "
      "--train-iters 1 --micro-batch-size 1 " +
      flags);
}

// The parts of attention in num_floating_point_operations(): of a token with weights, and of a pair
// of tokens.
struct AttentionOperations {
  long double weights, pair;
};

AttentionOperations attention_operations(const TransformerConfig& c) {
  const long double h = c.hidden_size, n = c.num_attention_heads;
  if (!c.multi_latent_attention) {
    const long double width = n * c.kv_channels, keys = c.query_groups() * c.kv_channels;
    return {h * (width + 2 * keys) + width * h, width};
  }
  const long double query = c.qk_head_dim + c.qk_pos_emb_head_dim, value = c.v_head_dim;
  const long double of_queries =
      c.q_lora_rank ? *c.q_lora_rank * (h + n * query + 1) : h * n * query;
  return {of_queries + c.kv_lora_rank * (h + n * (c.qk_head_dim + value) + 1) +
              h * c.qk_pos_emb_head_dim + n * value * h,
          n * (query + value) / 2};
}

// num_floating_point_operations() of Megatron-LM for a dense transformer; exact below 2^64.
long double formula(const TransformerConfig& c, int64_t vocabulary, int64_t samples) {
  const long double h = c.hidden_size, f = c.ffn_hidden_size, layers = c.num_layers,
                    gate = c.swiglu ? 1.5 : 1.0;
  const AttentionOperations attention = attention_operations(c);
  const long double tokens = samples * c.seq_length, squared_lengths = tokens * c.seq_length;
  return 6 * tokens * layers * attention.weights + 6 * layers * squared_lengths * attention.pair +
         6 * tokens * layers * 2 * h * f * gate + 6 * tokens * h * vocabulary;
}

class ReportedFlops : public testing::TestWithParam<Row> {};

TEST_P(ReportedFlops, AreThoseOfMegatron) {
  const Row& row = GetParam();
  const Arguments arguments = configured(row.flags);
  const double tokens = static_cast<double>(row.samples * arguments.transformer.seq_length);
  for (const char* name : {"gpt", "sft"}) {
    const PretrainTask task = find_task(name, arguments);
    const double flops = tokens * task.flops_per_token(arguments, {100, row.vocabulary});
    EXPECT_EQ(flops,
              static_cast<double>(formula(arguments.transformer, row.vocabulary, row.samples)));
    if (row.printed > 0) {
      EXPECT_EQ(flops, row.printed);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Models, ReportedFlops,
    testing::Values(
        Row{"gpt3",
            "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048", 51200,
            1536, 3.3405978001601987e18},
        Row{"gpt_345m",
            "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024", 50304,
            8, 18612240777216.0},
        Row{"llama3_8b",
            "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention "
            "--num-query-groups 8 --ffn-hidden-size 14336 --swiglu --seq-length 8192",
            128256, 128, 5.397062776101274e16},
        Row{"latent",
            "--num-layers 5 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 10944 "
            "--swiglu --seq-length 4096 --multi-latent-attention --kv-lora-rank 512 "
            "--qk-layernorm --position-embedding-type rope",
            102400, 64, 0},
        Row{"latent_queries",
            "--num-layers 3 --hidden-size 640 --num-attention-heads 4 --seq-length 512 "
            "--multi-latent-attention --kv-lora-rank 48 --q-lora-rank 40 --v-head-dim 96 "
            "--position-embedding-type rope",
            2560, 7, 0},
        // A gate that is not SwiGLU's is not counted.
        Row{"geglu",
            "--num-layers 3 --hidden-size 640 --num-attention-heads 4 --kv-channels 256 "
            "--group-query-attention --num-query-groups 1 --ffn-hidden-size 2048 --geglu "
            "--seq-length 512 --window-size 64 0 --window-attn-skip-freq 3",
            2560, 7, 0},
        Row{"recomputed",
            "--num-layers 5 --hidden-size 96 --num-attention-heads 6 --seq-length 48 "
            "--recompute-granularity selective --recompute-modules mlp core_attn --lora-rank 4 "
            "--lora-targets linear_qkv",
            640, 3, 0}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace megatron
