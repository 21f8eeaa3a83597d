// The first layer that reads neighbours, with the encoder of neighbours, which all layers that read
// them share.
#pragma once

#include <memory>
#include <vector>

#include "megatron/models/retro/retro_config.h"
#include "megatron/transformer/transformer_block.h"
#include "megatron/transformer/transformer_layer.h"

namespace megatron {

// Keeps references to its stacks and groups, which must outlive it.
//
//   x1 = x + attention(norm(x))
//   z = the norm of cross attention of x1
//   e = the encoder of the neighbours' embeddings; its first layer attends to z of their chunk
//   y = x1 + chunked cross attention of x1 over e, and the MLP
//
// Parameters: layers.N... of the layer, and layers.N.cross_attention.encoder.layers.J...; the
// encoder has no final norm.
class FirstRetroLayer : public Module {
 public:
  FirstRetroLayer(const RetroStacks& stacks, bool sequence_parallel, const ParallelGroups& groups);

  struct Result {
    at::Tensor x, encoded;
  };
  //   x            [s, b, h]          (s/t with sequence parallelism)
  //   neighbours   [r, k l b, h]      (r/t) their embeddings, the first neighbour of all first
  //   there        [b, l, k]          0 = there is none
  //   retrieved    the context of their tokens
  // Returns the stream behind the layer and the encoded neighbours, in the model's type.
  Result forward(const at::Tensor& x, const at::Tensor& neighbors, const at::Tensor& there,
                 const ForwardContext& pass, const ForwardContext& retrieved);

  // Decoding, with the rows of `pass.retrieved`: x [t, 1, h] and the embeddings of the neighbours
  // of its new chunks [r, k c, h], undefined without one, `retrieved` the context of their tokens.
  // Of a running chunk the norm's output is kept. Returns the encoded neighbours of new chunks.
  Result decode(const at::Tensor& x, const at::Tensor& neighbors, const ForwardContext& pass,
                const ForwardContext& retrieved);

 private:
  at::Tensor new_chunks(const at::Tensor& x, const DecodedChunks& chunks, const DecodingPass& pass);
  at::Tensor chunks_of(const at::Tensor& x, const ChunkedRows& chunks);
  // The encoder's own context: what its first layer reads.
  ForwardContext reading(const at::Tensor& z, const ChunkedRows& chunks, const ForwardContext& pass,
                         const ForwardContext& retrieved) const;

  const RetroStacks& stacks_;
  const bool sequence_parallel_;
  const ParallelGroups& groups_;
  std::unique_ptr<TransformerLayer> layer_;
  // The two parts of the layer as layers, for recomputation
  std::vector<std::unique_ptr<Layer>> attending_, reading_;
  LayerRunner runner_;
  RotaryEmbedding rotary_;
  TransformerBlock encoder_;
};

}  // namespace megatron
