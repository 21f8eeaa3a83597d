#include "layouts.h"

#include <array>
#include <cstring>

#include "megatron/base/check.h"

namespace megatron {
namespace {

struct Model {
  const char* name;
  const char* flags;
};

// Sizes are small and odd where they may be. Vocabulary 101 is padded by a layout-dependent number of rows.
constexpr Model kModels[] = {
    // LayerNorm, biases, learned positions, tied head, all dropouts.
    {"gpt",
     "--num-layers 4 --hidden-size 48 --num-attention-heads 12 --seq-length 24 --max-position-embeddings 24 "
     "--attention-dropout 0.1 --hidden-dropout 0.1"},
    // RMSNorm, SwiGLU, RoPE, groups, no biases, own head.
    {"llama",
     "--num-layers 4 --hidden-size 48 --ffn-hidden-size 96 --num-attention-heads 12 --group-query-attention "
     "--num-query-groups 6 --seq-length 24 --position-embedding-type rope --normalization RMSNorm --swiglu "
     "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"},
    // QK norms, biases of queries, 2 groups, tied head, documents that do not see each other.
    {"qwen",
     "--num-layers 4 --hidden-size 48 --ffn-hidden-size 96 --num-attention-heads 12 --group-query-attention "
     "--num-query-groups 2 --seq-length 24 --position-embedding-type rope --normalization RMSNorm --swiglu "
     "--disable-bias-linear --add-qkv-bias --qk-layernorm --attention-dropout 0 --hidden-dropout 0.1 "
     "--reset-position-ids --reset-attention-mask --eod-mask-loss"},
};

constexpr LayoutRow kRows[] = {
    {"tp2", "gpt", 2, "--tensor-model-parallel-size 2"},
    {"tp2_llama", "llama", 2, "--tensor-model-parallel-size 2"},
    {"tp4_sp", "gpt", 4, "--tensor-model-parallel-size 4 --sequence-parallel"},
    {"tp3_sp_llama", "llama", 3, "--tensor-model-parallel-size 3 --sequence-parallel"},
    {"tp4_groups2", "qwen", 4, "--tensor-model-parallel-size 4"},
    {"tp4_groups2_sp", "qwen", 4, "--tensor-model-parallel-size 4 --sequence-parallel"},
    {"dp2", "gpt", 2, ""},
    {"dp3_llama", "llama", 3, ""},
    {"pp2", "gpt", 2, "--pipeline-model-parallel-size 2"},
    {"pp4_llama", "llama", 4, "--pipeline-model-parallel-size 4"},
    {"pp2_qwen", "qwen", 2, "--pipeline-model-parallel-size 2"},
};

}  // namespace

std::span<const LayoutRow> layout_rows() { return kRows; }

const char* model_flags(const char* name) {
  for (const Model& model : kModels)
    if (std::strcmp(model.name, name) == 0) return model.flags;
  throw_error(cat("the matrix has no model ", name));
}

}  // namespace megatron
