// What a layer costs a rank: bytes of memory, multiply-adds, bytes sent. Functions of plain shapes;
// plans (training/planning/) add them up along layers and schedule. Each kind of layer has its own
// beside it: attention/attention_cost.h, feed_forward/mlp_cost.h.
//
// Letters: T = tokens of a rank in attention (s b / c), R = tokens of a rank between layers (T, or
// T/t with sequence parallelism), e = bytes per element of the model's type, x = of the residual
// stream, h f n g d as in docs/notation.md, t c the sizes of tensor and context axes, F = 2f when
// the MLP is gated, else f; G = max(1, g/t) groups on a rank, N = n/t heads; k = 2 for LayerNorm, 1
// for RMSNorm.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "megatron/transformer/config/transformer_config.h"
#include "megatron/transformer/layer/state_keeping.h"

namespace megatron {

// One micro-batch of one rank.
struct LayerShape {
  int64_t samples = 1;  // b
  int64_t tokens = 0;   // T
  int64_t rows = 0;     // R
  // Tokens of an encoder on a rank, which cross attention reads; 0: there is none
  int64_t encoded = 0;
  // Bytes of one element: of the model's type, of the residual stream, of sums and statistics
  int64_t element = 4, residual = 4, sum = 4;
  // t, c, and the ranks that experts and the matrices of one expert are divided over
  int64_t tensor = 1, context = 1, expert = 1, expert_tensor = 1;
  // Rows of this rank's experts as a multiple of its share under perfect balance
  double expert_load = 1.0;
  std::vector<int64_t> context_levels;  // inner and outer ranks of a2a+p2p
  bool sequence_parallel = false;
  bool documents = false;  // tokens attend within their document only
  // ForwardContext::document_rows is given, by which kernels on GPUs know documents without a mask
  bool document_rows = false;
  // Tokens of the micro-batch that attend in both directions within their block, those of images,
  // and tokens of each block (ForwardContext::token_blocks); 0: there are none
  int64_t block_tokens = 0, block_length = 0;
  bool unpadded = false;      // rows of padding are in no layer
  bool padded = true;         // texts of encoders have padding, which is masked
  bool on_gpu = true;         // GPU kernels save other tensors than CPU ones
  StateKeeping keeping = {};  // of decoding
};

// Bytes that one layer, or a chunk, saves, by kind.
struct SavedBytes {
  int64_t residual = 0;
  int64_t norms = 0;
  int64_t attention = 0;
  int64_t mlp = 0;
  int64_t ends = 0;                   // embedding, final norm, head, loss
  int64_t encoder = 0, features = 0;  // of media: an encoder, and what it gives to the first layer
  int64_t total() const { return residual + norms + attention + mlp + ends + encoder + features; }
  SavedBytes& operator+=(const SavedBytes& other);
  SavedBytes& operator-=(const SavedBytes& other);
};

// Bytes of saved tensors that go to host memory: freed on the device, and allocated again when they
// are reloaded.
struct OffloadedBytes {
  SavedBytes given;
  int64_t taken = 0;
};

// A linear of a layer, whole: y [rows, outputs] = x [rows, inputs] w^T.
struct LinearSize {
  const char* name;
  int64_t outputs, inputs;
  bool gelu_in_input_grad = false;  // the GEMM of its input gradient applies a GELU's backward
  int64_t unreported = 0;           // outputs that reported_products() leaves out
  double share = 1;                 // its rows for each token of the sequence
  bool of_encoded = false;          // which are those that cross attention attends to
  double products() const { return share * static_cast<double>(outputs * inputs); }
};

// Attention of one micro-batch on a rank, and which keys a query sees; as AttentionOptions
// (tensor/attention/attention.h).
struct AttentionSize {
  int64_t sequences = 1, queries = 1, keys = 1;
  int64_t heads = 1, groups = 1;         // of queries; of keys and values
  int64_t key_size = 1, value_size = 1;  // of one head
  bool packed = false;                   // queries, keys and values are views of one tensor
  bool crosses = false;                  // keys are other tokens
  bool causal = false;
  int64_t window_left = -1, window_right = -1;
  double softcap = 0.0;
  bool by_distance = false;  // scores have a bias by distance
  bool sinks = false;
  AttentionBackend backend = AttentionBackend::kAuto;
  bool deterministic = true;
  bool operator==(const AttentionSize&) const = default;
};

// Bytes that a rank sends for one micro-batch.
struct Traffic {
  double forward = 0, backward = 0;
  Traffic& operator+=(const Traffic& other);
};

// Sent by a ring in an all-gather or reduce-scatter of `bytes` in total; an all-reduce is both.
double scatter_bytes(int64_t ranks, double bytes);

// Simulates allocations and frees; keeps the live bytes and their peak.
class AllocationTrack {
 public:
  void take(int64_t bytes);
  void give(int64_t bytes) { live_ -= bytes; }
  // Allocates and frees at once: a temporary of one operation.
  void touch(int64_t bytes);
  int64_t live() const { return live_; }
  int64_t most() const { return most_; }

 private:
  int64_t live_ = 0, most_ = 0;
};

// Note [Bytes of casts]
// SublayerCost::moved_elements counts, in elements of the model's type, the minimal extra reads and
// writes of casts compared with operands that are not quantised: the two quantised copies (both
// orientations) of an element are as large as one of them. Where scales are known in advance,
// kernels write quantised values instead; in addition to plain ones where both are needed. Where
// the scale needs the amax of the whole tensor, the tensor's inputs are read twice, or the tensor
// is written and read back, whichever is less.
//
// A norm reads and writes, with the residual add, 4 h forward; backward dy, x, the residual's
// gradient and dx.
inline constexpr double kNormElements = 8;

// What decoding keeps on a rank: of each position, in blocks, and of each sequence, in slots
// (layer_state.h).
struct KeptBytes {
  int64_t position = 0, sequence = 0;
  KeptBytes& operator+=(const KeptBytes& other);
};

// A sublayer and the residual connection around it: half a layer. Its input and its output are
// R h x each. Peaks count from the start of the half.
struct SublayerCost {
  SavedBytes saved;  // with its input
  OffloadedBytes offloaded;
  // Under autograd; its input is counted before. At the end it holds what it saves, without the
  // input, and its output.
  int64_t forward_peak = 0, forward_end = 0;
  int64_t unrecorded_peak = 0;  // without autograd, besides input and output
  // Its saved tensors and the output's gradient are counted before. At the end it has freed both,
  // but not its input, and holds the input's gradient.
  int64_t backward_peak = 0, backward_end = 0;
  // Between the passes I and W of a zero-bubble schedule: inputs and output gradients of its
  // linears; and the peak of I in addition to those of the whole chunk.
  int64_t pending = 0, deferred_peak = 0;
  // Input of a linear whose weight gradient runs in a later transfer of the mailbox: Note
  // [Postponed weight gradients] in tensor_parallel/layers.cc
  int64_t postponed = 0;
  // Inputs of a weight gradient that runs in a later exchange of experts, held at backward_end.
  int64_t carried = 0;
  // Per token of the sequence, over all ranks of the layer: with weights, and of queries with keys
  // and of their scores with values.
  std::vector<LinearSize> linears;
  std::vector<AttentionSize> attentions;
  double score_products = 0;
  double recomputed_products = 0;  // again in the backward, by --recompute-modules
  // Elements per token that the kernels of the other operations must read or write
  double moved_elements = 0;
  double weight_products() const;
  // Adds a sublayer that follows this one in the same half; `stream`: bytes of what lies between.
  // It takes back all that it offloads.
  void append(const SublayerCost& next, int64_t stream);
  // For a sequence of another stack with `share` tokens for each token of this one.
  void count_per_token_of(double share);
  // Sets the peaks and ends from the allocations of the passes. `recomputed`: the forward runs
  // without autograd, and again in the backward.
  void set_peaks(const std::function<void(AllocationTrack&)>& forward,
                 const std::function<void(AllocationTrack&)>& backward, int64_t unrecorded,
                 bool recomputed = false);
  Traffic tensor, context, expert, expert_tensor;  // over these axes of the mesh
  bool overlaps_context = false;  // that over the context axis overlaps with score_products
  KeptBytes kept;
};

// A layer of two halves, each the unit of offloading, or of one.
struct LayerCost {
  SublayerCost first, second;
  bool one_half = false;  // `second` is empty
  int64_t stream = 0;     // bytes of its input, and of its output: R h x
  // Bytes of `first` that stay in host memory in the backward
  int64_t not_reloaded = 0;
  // Parts that full recomputation computes again one by one, and what is held between the passes
  // for those behind the first; none: the layer is one
  struct Part {
    int64_t unrecorded_peak = 0;
    int64_t saved = 0, backward_peak = 0;  // with the layer's input, as of a layer
  };
  std::vector<Part> parts;
  int64_t held_for_parts = 0;

  SavedBytes saved() const;
  SavedBytes offloaded() const;
  // Peak without autograd, besides input and output.
  int64_t unrecorded_peak() const;
  double weight_products() const;
  double score_products() const;
  double products() const { return weight_products() + score_products(); }
  Traffic tensor() const;
  Traffic context() const;
  Traffic expert() const;
  Traffic expert_tensor() const;
  KeptBytes kept() const;

  // Peak of the forward in addition to its input, while other layers' bytes are still in transfer
  // to the host during each half.
  int64_t forward_peak(int64_t leaving_first = 0, int64_t leaving_second = 0) const;

  // Peaks of the backward in addition to its saved tensors and its output's gradient, while other
  // layers' bytes are being reloaded. `grad_is_held`: the caller keeps that gradient alive.
  struct Backward {
    int64_t second_half;  // which runs first
    int64_t most;
  };
  Backward backward_peak(bool grad_is_held, int64_t reloading_second = 0,
                         int64_t reloading_first = 0) const;
};

// Of a layer with one residual connection.
LayerCost one_branch_cost(SublayerCost branch);

// `offloaded`: its saved activations go to host memory. Layers count from 1.
using LayerCostFunction = LayerCost (*)(const TransformerConfig& config, int64_t layer_number,
                                        const LayerShape& shape, bool offloaded);

// The LayerCostFunction of a layer that is this sublayer alone.
template <SublayerCost (*cost)(const TransformerConfig&, int64_t, const LayerShape&, bool)>
LayerCost one_branch(const TransformerConfig& config, int64_t layer_number, const LayerShape& shape,
                     bool offloaded) {
  return one_branch_cost(cost(config, layer_number, shape, offloaded));
}

// What full recomputation covers in a chunk, from its first layer.
struct RecomputedLayers {
  int64_t units = 0, layers = 0;
  int64_t longest = 0;      // layers of the longest unit
  int64_t unit_layers = 1;  // layers of a full unit
};
RecomputedLayers recomputed_layers(const TransformerConfig& config, int64_t num_layers);

// -- for the costs of sublayers

// Bytes of the tensors around the linears of a sublayer, and the steps of its passes around them.
struct StreamCost {
  StreamCost(const TransformerConfig& config, const LayerShape& shape);
  // `normed_input`: whether the sublayer normalises its input.
  StreamCost(const TransformerConfig& config, const LayerShape& shape, bool normed_input);

  int64_t stream;    // R h x
  int64_t normed;    // R h e
  int64_t cast;      // R h x if the norm's output is converted, else 0
  int64_t gathered;  // T h e if rows are gathered over tensor ranks, else 0
  // T h e: output of the row-parallel linear, input gradient of the column-parallel one
  int64_t product;
  int64_t part;    // R h e: `product` after the reduce-scatter; 0: none
  int64_t stats;   // statistics of one norm
  int64_t branch;  // gradient of the sublayer's output, if it is not that of the stream
  bool pre_norm, recompute_norm;
  // Saved by the input's norm (statistics, and its output unless it is recomputed) and by the norm
  // and the scale of the sublayer's output; 0 without one
  int64_t pre_norm_saved, post_norm_saved;

  // Norm, all-gather and GEMM of a column-parallel layer; the output stays allocated.
  void column_forward(int64_t output, AllocationTrack& track) const;
  // GEMM of a row-parallel layer, reduction over tensor ranks, and residual add, whose result stays
  // allocated. `unsaved`: temporaries made from the layer's input.
  void row_forward(int64_t unsaved, AllocationTrack& track) const;
  // From the gradient of the sublayer's output to that of the row-parallel layer's input.
  void row_backward(int64_t input, int64_t input_saved, AllocationTrack& track) const;
  // Norm and GEMM of a column-parallel layer, from dy, which is already counted. Ends with the
  // gradient of the residual stream allocated, and dy and the saved tensors freed.
  void column_backward(int64_t dy, AllocationTrack& track) const;
  // What both linears hold for a weight pass of its own, besides what the sublayer adds.
  int64_t pending() const { return stream + stats + (recompute_norm ? 0 : normed) + product; }
  // Both linears over the tensor ranks.
  Traffic tensor_traffic(const LayerShape& shape) const;
};

// Adds what --offload-modules moves to the host: `count` tensors of equal size, `bytes` together,
// with elements of `element` bytes, if the module is named and they are large enough. Returns
// whether they are moved.
bool offload(const TransformerConfig& config, const char* module, int64_t SavedBytes::* kind,
             int64_t bytes, int64_t element, int64_t count, OffloadedBytes& out);

// -- for reports

// Multiply-adds per token as Megatron-LM counts them, which knows no gate but SwiGLU's.
double reported_products(const LayerCost& layer);

}  // namespace megatron
