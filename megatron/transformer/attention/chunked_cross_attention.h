// Cross attention chunk by chunk: what follows a chunk of a sequence reads what was retrieved for
// that chunk. Source: Borgeaud et al. 2022 (arXiv:2112.04426).
//
// A sequence of s rows has l = ceil(s / m) chunks of m rows; the first one is shorter if s is no
// multiple of m. The last row of chunk u and the m - 1 after it read what was retrieved for it, so
// that no row sees anything of a later one: of the last chunk only the last row does. Rows before
// the end of the first chunk read nothing.
#pragma once

#include "megatron/transformer/attention/cross_attention.h"

namespace megatron {

// How the rows of a sequence are chunks.
struct ChunkedRows {
  ChunkedRows(int64_t rows, int64_t chunk_length)
      : s(rows), m(chunk_length), l((rows + chunk_length - 1) / chunk_length) {}
  int64_t first() const { return s - (l - 1) * m; }  // rows of the first chunk
  int64_t s, m, l;
};

// The rows of each chunk, [s, b, h] -> [m, l b, h]; behind those of a short first one are zeros.
at::Tensor rows_of_chunks(const at::Tensor& x, const ChunkedRows& chunks);

// Samples of [l b] sequences, one for each chunk of each sample; `samples` [b].
at::Tensor samples_of_chunks(const at::Tensor& samples, int64_t chunks);

// What all layers with chunked cross attention read.
struct RetrievedChunks {
  // `encoded` [r, k l b, h] ([r/t, ...] with sequence parallelism), in the model's type: rows of
  // neighbours, the first neighbour of all chunks first. `there` [b, l, k]: 0 = there is none.
  RetrievedChunks(at::Tensor encoded, const at::Tensor& there, const ChunkedRows& chunks,
                  int64_t retrieved_length);
  at::Tensor encoded;
  ChunkedRows chunks;
  at::Tensor mask;       // bool [l b, 1, 1, r k], True = is not attended to
  at::Tensor rows_read;  // bool [s, b, 1]: rows that read something
};

// Parameters and communication of CrossAttention, over ForwardContext::retrieved. Rows that read
// nothing, because no neighbour is there or they are before the end of the first chunk, stay as
// they are.
class ChunkedCrossAttention : public CrossAttention {
 public:
  using CrossAttention::CrossAttention;
  SublayerOutput forward(const at::Tensor& x, const LayerContext& context, bool add) override;
  // Registers the encoder of what was retrieved, which reads this layer's stream.
  void add_encoder(Module* encoder) { add("encoder", encoder); }
};

}  // namespace megatron
