#include "megatron/transformer/attention/core_attention_cost.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "megatron/kernels/attention/distance_attention.h"
#include "megatron/tensor/attention/attention.h"

namespace megatron {

namespace {

constexpr int64_t kScoreElements = int64_t{1} << 26;  // tensor/attention/attention_unfused.cc
// SMs of H100 and H200; they bound the splits of the deterministic backward
constexpr int64_t kMultiprocessors = 132;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t unit) { return ceil_div(a, unit) * unit; }

// Working memory of one thread in libtorch's tiled CPU kernel: scores and their gradients of one
// tile.
int64_t cpu_piece_bytes(int64_t s, int64_t sum) {
  const int64_t queries = s >= 768 ? 256 : s >= 192 ? 64 : 32, keys = 512;
  return 2 * std::min(s, queries) * std::min(s, keys) * sum;
}

// Whether kernels attend within ranges of rows, so that padding needs no mask.
bool takes_ranges(const TransformerConfig& c, const LayerShape& s) {
  return s.unpadded && s.on_gpu && s.element == 2 && c.attention_dropout == 0;
}

// Whether cuDNN attends within ranges of rows, causally.
bool takes_causal_ranges(const TransformerConfig& c, const LayerShape& s, int64_t head) {
  return c.causal && s.element == 2 && head % 8 == 0 && head <= 256 && c.attention_dropout == 0 &&
         c.attn_logit_softcapping == 0 && c.softmax_type == SoftmaxType::kVanilla &&
         (c.attention_backend == AttentionBackend::kAuto ||
          c.attention_backend == AttentionBackend::kFused);
}

// Whether they attend so within documents.
bool takes_documents(const TransformerConfig& c, const LayerShape& s,
                     const CoreAttentionSizes& heads) {
  return s.document_rows && heads.others == 0 && takes_causal_ranges(c, s, heads.key);
}

// Sums of ranges are [documents, heads, the longest], with powers of two for both numbers: more
// than one for each token.
constexpr int64_t kSumsOfDocuments = 4;

bool is_masked(const TransformerConfig& c, const LayerShape& s, const CoreAttentionSizes& heads) {
  if (s.documents && !takes_documents(c, s, heads)) return true;
  if (heads.others == 0 && s.block_tokens > 0 && !takes_token_blocks(c, s, heads.key)) return true;
  return ((!c.causal && s.padded) || heads.others > 0) && !takes_ranges(c, s);
}

}  // namespace

bool takes_token_blocks(const TransformerConfig& c, const LayerShape& s, int64_t head) {
  return s.block_tokens > 0 && s.on_gpu && s.context == 1 && takes_causal_ranges(c, s, head);
}

CoreAttentionCost::CoreAttentionCost(const TransformerConfig& c, int64_t layer, const LayerShape& s,
                                     const CoreAttentionSizes& heads)
    : config(c),
      shape(s),
      masked(is_masked(c, s, heads)),
      by_distance(c.position_embedding_type == PositionEmbedding::kRelative && heads.others == 0),
      sizes(heads),
      in_blocks(heads.others == 0 && takes_token_blocks(c, s, heads.key)),
      sequence(heads.others > 0 ? c.seq_length / s.context : c.seq_length),
      key_sequence(heads.others > 0 ? heads.others / s.samples : sequence),
      wide(s.sum / s.element),
      q(s.tokens * heads.heads * heads.key * s.element),
      k((heads.others > 0 ? heads.others : s.tokens) * heads.groups * heads.key * s.element),
      v((heads.others > 0 ? heads.others : s.tokens) * heads.groups * heads.value * s.element),
      out(s.tokens * heads.heads * heads.value * s.element),
      lse((s.documents && takes_documents(c, s, heads) ? kSumsOfDocuments : 1) * s.tokens *
          heads.heads * s.sum) {
  const std::vector<int64_t> window = c.window(layer);
  windowed = !window.empty() && window[0] >= 0 && window[0] < sequence - 1;
  divide_context(layer);
  narrow_window = kernel == AttentionKernel::kLibrary && s.on_gpu && heads.others == 0 &&
                  !in_blocks && heads.groups == heads.heads &&
                  distance_attention_supports(heads.key) && window.size() == 2 &&
                  is_narrow_window(window[0], c.causal ? 0 : window[1], sequence);
}

bool CoreAttentionCost::takes_mask() const {
  constexpr int64_t kKeyMultiple = 8;
  return masked && (sizes.others > 0 || (!config.causal && !shape.documents)) && shape.on_gpu &&
         shape.element == 2 && sizes.groups == sizes.heads && sizes.key == sizes.value &&
         key_sequence % kKeyMultiple == 0 && config.attention_dropout == 0;
}

bool CoreAttentionCost::is_unfused() const {
  if (config.attention_backend == AttentionBackend::kUnfused ||
      config.attention_backend == AttentionBackend::kLocal)
    return true;
  const bool in_parts = gathers || outer > 1;  // which kernels with masks and biases do not take
  if ((masked && (in_parts || !takes_mask())) || config.attention_dropout > 0 ||
      config.attn_logit_softcapping > 0)
    return true;
  if (windowed && (!shape.on_gpu || sequence % 64 != 0)) return true;  // cuDNN supports windows
  if (by_distance && !(!in_parts && shape.on_gpu && distance_attention_supports(sizes.key) &&
                       sizes.value == sizes.key))
    return true;
  if (sizes.value > sizes.key) return true;
  return shape.on_gpu && (shape.element != 2 || sizes.key % 8 != 0 || sizes.key > 256);
}

// How the context ranks divide the work, and which kernels compute it.
void CoreAttentionCost::divide_context(int64_t layer) {
  const int64_t context = sizes.others > 0 ? 1 : shape.context;
  const ContextParallelType type =
      context > 1 ? config.context_parallel_type(layer) : ContextParallelType::kA2A;
  a2a = type == ContextParallelType::kA2A      ? context
        : type == ContextParallelType::kA2AP2P ? shape.context_levels.at(0)
                                               : 1;
  outer = context / a2a;
  gathers = type == ContextParallelType::kAllGather;
  const bool unfused = is_unfused();
  kernel = gathers     ? AttentionKernel::kAllGather
           : outer > 1 ? AttentionKernel::kRing
           : unfused   ? AttentionKernel::kUnfused
                       : AttentionKernel::kLibrary;
  if (a2a > 1)
    exchanged =
        shape.tokens *
        (sizes.heads * sizes.key + std::lcm(sizes.groups, a2a) * (sizes.key + sizes.value)) *
        shape.element;
  const bool whole_sequence =
      kernel == AttentionKernel::kLibrary || kernel == AttentionKernel::kUnfused;
  if (!whole_sequence && (!shape.on_gpu || unfused)) {
    const int64_t queries = sequence / shape.context * a2a;
    // Of a ring all queries with as many keys, else half of them with those of the whole sequence
    const int64_t pairs = gathers ? queries / 2 * sequence : queries * queries;
    block_scores = shape.samples * sizes.heads / a2a * pairs * shape.sum;
    if (by_distance)
      block_distances = sizes.heads * (queries / 2) * (queries / 2 + sequence) * shape.sum;
  }
  // Of cross attention one mask serves all queries and layers, of blocks of tokens all layers.
  const bool shared = sizes.others > 0 || (shape.block_tokens > 0 && context == 1);
  if (masked && whole_sequence && !shared) mask = shape.samples * sequence * sequence;
}

AttentionSize CoreAttentionCost::attention(int64_t layer) const {
  const int64_t samples = std::max<int64_t>(1, shape.samples);
  AttentionSize size;
  size.sequences = samples;
  size.queries = shape.tokens / samples;
  size.crosses = sizes.others > 0;
  size.keys = size.crosses ? sizes.others / samples : size.queries;
  size.heads = sizes.heads;
  size.groups = sizes.groups;
  size.key_size = sizes.key;
  size.value_size = sizes.value;
  size.backend = config.attention_backend;
  size.deterministic = !config.fast;
  if (size.crosses) return size;
  size.packed = sizes.packed;
  size.causal = config.causal;
  if (const std::vector<int64_t> window = config.window(layer); !window.empty()) {
    size.window_left = window[0];
    if (!config.causal) size.window_right = window[1];
  }
  size.softcap = config.attn_logit_softcapping;
  size.by_distance = by_distance;
  size.sinks = has_sinks();
  return size;
}

int64_t CoreAttentionCost::padded_out() const {
  const bool cudnn =
      shape.on_gpu && sequence % 64 == 0 && config.attention_backend != AttentionBackend::kFlash;
  return kernel == AttentionKernel::kLibrary && sizes.value < sizes.key && !cudnn ? q : 0;
}

int64_t CoreAttentionCost::saved() const {
  int64_t saved = mask + out;  // input of linear_proj
  if (!saves_library()) return saved;
  if (exchanged > 0 && padded_out() == 0) saved += out;  // before the all-to-all back
  if (takes_mask()) saved += out;                        // of the kernel, samples outside
  return saved + padded_out() + lse;
}

// fp32 scores of the largest piece that unfused attention computes at a time.
int64_t CoreAttentionCost::score_bytes() const {
  const int64_t b = shape.samples, own_heads = std::max<int64_t>(1, sizes.heads / a2a);
  const int64_t own_groups =
      std::min(own_heads, std::max<int64_t>(1, config.query_groups() / shape.tensor / a2a));
  const int64_t group = own_heads / own_groups * sequence * key_sequence;
  if (b * own_groups * group <= kScoreElements) return b * own_groups * group * shape.sum;
  return std::clamp<int64_t>(kScoreElements / std::max<int64_t>(1, group), 1, own_groups) * group *
         shape.sum;
}

// Of unfused attention: copies in the accumulating type, or, where heads share keys, in its order;
// or as much for inputs that have come back from host memory.
int64_t CoreAttentionCost::copied(int64_t bytes) const {
  const bool views = wide == 1 && sizes.heads == sizes.groups && !config.offloads_activations();
  return views ? 0 : wide * bytes;
}

// Of unfused attention: which keys lie behind a query, or outside of its window.
int64_t CoreAttentionCost::limits_bytes() const {
  // The mask of blocks has causality in it; a window is joined to it.
  if (masked && shape.block_tokens > 0 && sizes.others == 0)
    return windowed ? shape.samples * sequence * sequence : 0;
  const bool limited = config.causal || !config.window_size.empty();
  return limited && sizes.others == 0 ? sequence * sequence : 0;
}

// Of relative positions: the gradients of the scores of all samples of a piece, summed in rows that
// are twice as wide, while those of the probabilities are no longer held.
int64_t CoreAttentionCost::distances_extra() const {
  if (!by_distance) return 0;
  const int64_t own_heads = std::max<int64_t>(1, sizes.heads / a2a), b = shape.samples;
  const bool all = b * own_heads * sequence * key_sequence <= kScoreElements;
  return std::max<int64_t>(0, 2 * score_bytes() / (all ? b : 1) - score_bytes());
}

// Keys and values repeated for libtorch's CPU kernel, which has no grouped-query attention; with
// packed attention they are views.
int64_t CoreAttentionCost::repeated_groups() const {
  return shape.on_gpu || sizes.packed || q == k ? 0 : 2 * q;
}

// Of bytes of all tokens, those of tokens in blocks.
int64_t CoreAttentionCost::of_blocks(int64_t bytes) const {
  return bytes / shape.tokens * shape.block_tokens;
}

// Log-sum-exps of the blocks, whose number is a power of two and whose length a multiple of 64.
int64_t CoreAttentionCost::block_lse() const {
  const auto blocks = static_cast<uint64_t>(ceil_div(shape.block_tokens, shape.block_length));
  return static_cast<int64_t>(std::bit_ceil(blocks)) * round_up(shape.block_length, 64) *
         sizes.heads * shape.sum;
}

// Of a block's tokens and their later ones: inputs taken, output and log-sum-exps, which are copied
// once; then that output and the causal one combined in fp32 and rounded.
int64_t CoreAttentionCost::blocks_forward() const {
  if (!in_blocks) return 0;
  const int64_t later = of_blocks(out), taken = of_blocks(q + k + v),
                sums = shape.block_tokens * sizes.heads * shape.sum;
  return later + std::max(taken + 2 * block_lse() + sums, 2 * later * (1 + wide) + 3 * sums);
}

// Inputs and gradients of queries, keys and values, the output and its gradient, taken; and what
// the kernel needs.
int64_t CoreAttentionCost::blocks_backward() const {
  if (!in_blocks) return 0;
  const int64_t most = round_up(shape.block_length, 64),
                blocks = block_lse() / (most * sizes.heads * shape.sum);
  const int64_t work =
      config.fast
          ? blocks * most * sizes.heads * sizes.key * shape.sum
          : attention_parts(blocks, sizes.heads, sizes.groups, most, most, true).scratch_bytes;
  return 2 * (of_blocks(q + k + v + out) + block_lse()) + work;
}

int64_t CoreAttentionCost::forward_extra() const {
  switch (kernel) {
    case AttentionKernel::kLibrary:
      if (in_blocks) return std::max(lse, blocks_forward());
      return repeated_groups() + 2 * padded_out();  // padded values, and the output
    case AttentionKernel::kUnfused:
      return 2 * score_bytes() + copied(q + k + v) + limits_bytes() +
             (has_sinks() ? (wide - 1) * out + lse : 0);  // the sum before it is rounded
    case AttentionKernel::kRing:
      return 2 * (k + v) + (wide + 1) * out + 2 * lse + block_scores;
    case AttentionKernel::kAllGather:
      return 2 * shape.context * (k + v) + out + block_scores;
  }
  return 0;
}

// What a library's backward allocates on a GPU: the deterministic one of flash attention sums the
// query gradient in fp32, in as many copies as fill the GPU; cuDNN's writes the score gradients of
// a part of the batch.
int64_t CoreAttentionCost::backward_copies() const {
  if (!shape.on_gpu) return 0;
  if (kernel == AttentionKernel::kLibrary && takes_mask()) return q * wide + lse;
  const int64_t b = shape.samples, own_heads = std::max<int64_t>(1, sizes.heads / a2a);
  const int64_t queries = sequence / shape.context * a2a;
  if (kernel == AttentionKernel::kLibrary && (by_distance || narrow_window)) {
    DistanceAttentionArgs args;
    args.samples = b;
    args.heads = own_heads;
    args.queries = args.keys = queries;
    args.head_size = sizes.key;
    return distance_attention_workspace(args, by_distance);
  }
  if (kernel != AttentionKernel::kLibrary || queries % 64 != 0)
    return ceil_div(kMultiprocessors, b * own_heads) * b * round_up(queries, 128) * own_heads *
           round_up(sizes.key, 32) * 4;
  if (config.fast) return q * wide;  // query gradient in fp32
  // Packed attention, and causal attention beside blocks, treat their inputs as b x groups samples
  // of one KV group each, but for ranges of rows.
  const bool folds = (sizes.packed || in_blocks) && !takes_ranges(config, shape) &&
                     !(in_blocks && shape.documents);
  const int64_t own_groups =
      std::max<int64_t>(1, config.query_groups() / shape.tensor / (folds ? 1 : a2a));
  const AttentionParts parts =
      folds ? attention_parts(b * own_groups, own_heads / own_groups, 1, queries, queries, true)
            : attention_parts(b, own_heads, own_groups, queries, queries, true);
  return parts.scratch_bytes;
}

int64_t CoreAttentionCost::backward_extra() const {
  // Gradients of repeated keys and values, before they are summed
  const int64_t expanded = q > k ? 2 * q : 0, copies = backward_copies();
  switch (kernel) {
    case AttentionKernel::kLibrary:
      if (shape.on_gpu)
        return std::max(expanded + copies + lse + 3 * padded_out(), blocks_backward());
      // The output gradient in the kernel's memory layout; gradients of repeated keys and values
      // instead of the plain ones; values, output gradient and values' gradient as wide as keys.
      return q + cpu_piece_bytes(sequence / shape.context * a2a, shape.sum) + repeated_groups() +
             (expanded > 0 ? expanded - 2 * k : 0) +
             (padded_out() > 0 ? 2 * padded_out() + q - v : 0);
    case AttentionKernel::kUnfused:
      return (config.attention_dropout > 0 ? 5 : 3) * score_bytes() + distances_extra() +
             copied(q + out + k + v) + limits_bytes() +
             (has_sinks() ? out + lse : 0);  // computed again
    case AttentionKernel::kRing:
      return (2 + 2 * wide) * (k + v) + wide * q + expanded + copies + lse + 2 * block_scores;
    case AttentionKernel::kAllGather:
      return shape.context * (2 + wide) * (k + v) + expanded + copies + lse + 2 * block_scores +
             block_distances;
  }
  return 0;
}

Traffic CoreAttentionCost::ring_traffic(int64_t ranks, double keys) const {
  const double others = static_cast<double>(ranks - 1), widened = static_cast<double>(wide);
  Traffic sent{others * keys,
               others * keys + (gathers ? others : static_cast<double>(ranks)) * keys * widened};
  if (config.recomputes("core_attn")) sent.backward += sent.forward;
  return sent;
}

Traffic CoreAttentionCost::context_traffic() const {
  if (shape.context == 1) return {};
  double keys = static_cast<double>(k + v);
  Traffic sent;
  if (a2a > 1) {
    // Keys are repeated until their heads are divisible by the inner ranks.
    keys =
        keys * static_cast<double>(std::lcm(sizes.groups, a2a)) / static_cast<double>(sizes.groups);
    const double exchange = scatter_bytes(a2a, static_cast<double>(q + out) + keys);
    sent = {exchange, exchange};
  }
  if (outer > 1) sent += ring_traffic(outer, keys);
  return sent;
}

// A token sees half of the sequence on average, or all of it.
double CoreAttentionCost::score_products() const {
  const bool half = config.causal && sizes.others == 0;
  const double seen = static_cast<double>(key_sequence) * (half ? 0.5 : 1.0);
  return seen * static_cast<double>(config.num_attention_heads * (sizes.key + sizes.value));
}

}  // namespace megatron
