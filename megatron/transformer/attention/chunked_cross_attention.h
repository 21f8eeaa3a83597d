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

// What the t rows of a ragged batch read while sequences are decoded. A sequence keeps in its slot
// what was retrieved for its last whole chunk; that of c chunks which the batch completes is new.
// The rows that read one chunk are a group.
struct DecodedChunks {
  int64_t length = 0;  // m
  at::Tensor tokens;   // [c, k, r] int64: of neighbours of the new chunks
  at::Tensor
      chunk_rows;  // [m, c] int64: rows of the new chunks in those that slots keep, [slots m],
                   // those of the batch and one of zeros
  // Rows of the batch whose chunk goes on, and their places in those that slots keep
  at::Tensor kept_rows, kept_places;
  // New chunks that are the last ones of their sequences, and their slots
  at::Tensor last_chunks, last_slots;
  at::Tensor sources;  // [g] int64: a slot, or behind all slots a new chunk
  at::Tensor queries;  // [q, g] int64: rows of the batch; t: none
  at::Tensor mask;     // bool [g, 1, 1, r k], True = is not attended to
  at::Tensor places;   // [t] int64: of each row in [q g]; q g: it reads nothing
};

// What all layers with chunked cross attention read.
struct RetrievedChunks {
  // Decoding; `encoded` [r, k c, h] of the new chunks, undefined without one.
  RetrievedChunks(std::shared_ptr<const DecodedChunks> decoded, at::Tensor encoded);
  // `encoded` [r, k l b, h] ([r/t, ...] with sequence parallelism), in the model's type: rows of
  // neighbours, the first neighbour of all chunks first. `there` [b, l, k]: 0 = there is none.
  RetrievedChunks(at::Tensor encoded, const at::Tensor& there, const ChunkedRows& chunks,
                  int64_t retrieved_length);
  at::Tensor encoded;
  ChunkedRows chunks;
  at::Tensor mask;                               // bool [l b, 1, 1, r k], True = is not attended to
  at::Tensor rows_read;                          // bool [s, b, 1]: rows that read something
  std::shared_ptr<const DecodedChunks> decoded;  // in the place of the three before; null: training
};

// Parameters and communication of CrossAttention, over ForwardContext::retrieved. Rows that read
// nothing, because no neighbour is there or they are before the end of the first chunk, stay as
// they are. Decoding, a slot keeps the keys and values of what its sequence retrieved last.
class ChunkedCrossAttention : public CrossAttention {
 public:
  using CrossAttention::CrossAttention;
  SublayerOutput forward(const at::Tensor& x, const LayerContext& context, bool add) override;
  // Registers the encoder of what was retrieved, which reads this layer's stream.
  void add_encoder(Module* encoder) { add("encoder", encoder); }

 private:
  at::Tensor read_kept(const at::Tensor& q, CrossKVCache& kept, const LayerContext& context);
};

}  // namespace megatron
