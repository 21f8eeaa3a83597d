#include "megatron/models/retro/first_retro_layer.h"

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/mappings.h"

namespace megatron {
namespace {

// Rows of running chunks, [slots, m, h].
class RunningChunks final : public LayerState {
 public:
  std::vector<SlotBuffer*> slots() override { return {&rows}; }
  SlotBuffer rows;
};

// A part of a layer in the place of one. Its state is that of what it reads beside the layer's.
class LayerPart : public Layer {
 public:
  using Forward = at::Tensor (TransformerLayer::*)(const at::Tensor&, const LayerContext&);
  LayerPart(TransformerLayer& layer, Forward forward)
      : Layer(layer.layer_number()), layer_(layer), forward_(forward) {}
  at::Tensor forward(const at::Tensor& x, const LayerContext& context) override {
    return (layer_.*forward_)(x, context);
  }
  std::unique_ptr<LayerState> make_state() const override {
    return std::make_unique<RunningChunks>();
  }

 private:
  TransformerLayer& layer_;
  Forward forward_;
};

std::vector<std::unique_ptr<Layer>> part_of(TransformerLayer& layer, LayerPart::Forward forward) {
  std::vector<std::unique_ptr<Layer>> parts;
  parts.push_back(std::make_unique<LayerPart>(layer, forward));
  return parts;
}

std::unique_ptr<TransformerLayer> make_first(const RetroStacks& stacks, bool sequence_parallel,
                                             const ParallelGroups& groups) {
  std::unique_ptr<Layer> layer =
      make_layer(stacks.decoder, stacks.first, sequence_parallel, groups);
  return std::unique_ptr<TransformerLayer>(static_cast<TransformerLayer*>(layer.release()));
}

at::Tensor shared(const at::Tensor& x, const ForwardContext& pass) {
  return pass.tape != nullptr ? pass.tape->share(x) : x;
}

}  // namespace

FirstRetroLayer::FirstRetroLayer(const RetroStacks& stacks, bool sequence_parallel,
                                 const ParallelGroups& groups)
    : stacks_(stacks),
      sequence_parallel_(sequence_parallel),
      groups_(groups),
      layer_(make_first(stacks, sequence_parallel, groups)),
      attending_(part_of(*layer_, &TransformerLayer::attend)),
      reading_(part_of(*layer_, &TransformerLayer::read)),
      runner_(stacks.decoder, groups.tp, /*last_chunk=*/false),
      rotary_(stacks.decoder),
      encoder_(stacks.encoder, 0, stacks.encoder.num_layers, /*final_norm=*/false,
               sequence_parallel, groups, make_layer,
               /*numbered_after=*/stacks.decoder.num_layers) {
  auto& cross = static_cast<ChunkedCrossAttention&>(layer_->cross_attention());
  cross.add_encoder(&encoder_);
  // The encoder reads what this norm gives, too.
  cross.input_norm()->visit([](const std::string&, Parameter& parameter) { ++parameter.uses; });
  add(cat("layers.", stacks.first - 1), layer_.get());
}

// z of the rows of chunks, of which the encoder's linear gathers this rank's rows again.
at::Tensor FirstRetroLayer::chunks_of(const at::Tensor& x, const ChunkedRows& chunks) {
  const at::Tensor z = layer_->cross_attention().input_norm()->forward(x);
  if (!sequence_parallel_ || groups_.tp.size() == 1) return rows_of_chunks(z, chunks);
  const at::Tensor rows =
      rows_of_chunks(gather_from_sequence_parallel_region(z, groups_.tp), chunks);
  MEGATRON_CHECK(chunks.m % groups_.tp.size() == 0, "--retro-chunk-length ", chunks.m,
                 " is not divisible by the ", groups_.tp.size(),
                 " tensor-parallel ranks that --sequence-parallel splits it over");
  const int64_t own = chunks.m / groups_.tp.size();
  return rows.narrow(0, groups_.tp.rank() * own, own);
}

// [m, c, h] of chunks that the batch completes, undefined without one.
at::Tensor FirstRetroLayer::new_chunks(const at::Tensor& x, const DecodedChunks& chunks,
                                       const DecodingPass& pass) {
  Norm& norm = *layer_->cross_attention().input_norm();
  const at::Tensor z = norm.forward(x);  // [t, 1, h]
  const int64_t h = z.size(2), m = chunks.length, slots = pass.batch.num_slots;
  auto& state = static_cast<RunningChunks&>(*pass.state.of(*reading_.front()));
  const at::Tensor kept = state.rows.rows(slots, {m, h}, z.options()).view({slots * m, h});
  at::Tensor out;
  if (chunks.chunk_rows.numel() > 0)
    out = at::cat({kept, z.view({-1, h}), at::zeros({1, h}, z.options())})
              .index_select(0, chunks.chunk_rows.flatten())
              .view({m, -1, h});
  if (chunks.kept_rows.numel() > 0)
    kept.index_copy_(0, chunks.kept_places, z.view({-1, h}).index_select(0, chunks.kept_rows));
  return out;
}

FirstRetroLayer::Result FirstRetroLayer::decode(const at::Tensor& x, const at::Tensor& neighbors,
                                                const ForwardContext& given,
                                                const ForwardContext& retrieved) {
  ForwardContext pass = given;
  LayerRotary tables;
  if (stacks_.decoder.position_embedding_type == PositionEmbedding::kRope)
    tables = rotary_.tables(pass.position_ids, x.scalar_type());
  const DecodingPass& decoding = *pass.decoding;
  const LayerContext context{pass, tables, /*offloaded=*/false, decoding.state.of(*layer_)};
  const at::Tensor attended = layer_->attend(x, context);
  const std::shared_ptr<const DecodedChunks> chunks = pass.retrieved->decoded;
  const at::Tensor z = new_chunks(attended, *chunks, decoding);
  at::Tensor encoded;
  if (z.defined()) {
    const at::ScalarType type = layer_->parameters().front()->value.scalar_type();
    ForwardContext of_chunks;  // each is a sample of one chunk
    of_chunks.place.sample = at::arange(z.size(1), given.place.sample.options());
    encoded =
        encoder_
            .forward(neighbors, reading(z.to(type), ChunkedRows(chunks->length, chunks->length),
                                        of_chunks, retrieved))
            .to(type);
  }
  pass.retrieved = std::make_shared<const RetrievedChunks>(chunks, encoded);
  return {layer_->read(attended, context), encoded};
}

ForwardContext FirstRetroLayer::reading(const at::Tensor& z, const ChunkedRows& chunks,
                                        const ForwardContext& pass,
                                        const ForwardContext& retrieved) const {
  ForwardContext out = retrieved;
  const at::Tensor& position = retrieved.place.position;
  const int64_t k = retrieved.place.sample.size(0) / (chunks.l * pass.place.sample.size(0));
  EncodedSequence encoded;
  encoded.states = z;
  encoded.position = at::arange(chunks.m, position.options());
  // Query i of neighbour n is row i k + n of those that read the chunk.
  encoded.readers = {samples_of_chunks(pass.place.sample, chunks.l),
                     at::arange(position.size(0) * k, position.options())};
  out.encoded = std::make_shared<const EncodedSequence>(std::move(encoded));
  return out;
}

FirstRetroLayer::Result FirstRetroLayer::forward(const at::Tensor& x, const at::Tensor& neighbors,
                                                 const at::Tensor& there,
                                                 const ForwardContext& given,
                                                 const ForwardContext& retrieved) {
  ForwardContext pass = given;
  LayerRotary tables;
  if (stacks_.decoder.position_embedding_type == PositionEmbedding::kRope)
    tables = rotary_.tables(pass.position_ids.defined() ? pass.position_ids : pass.place.position,
                            x.scalar_type());
  const ChunkedRows chunks(pass.place.position.size(0), retrieved.place.position.size(0) / 2);
  const at::Tensor attended = shared(runner_.run(attending_, x, LayerContext{pass, tables}), pass);
  const at::ScalarType type = layer_->parameters().front()->value.scalar_type();
  const at::Tensor z = shared(chunks_of(attended, chunks).to(type), pass);
  const at::Tensor encoded =
      shared(encoder_.forward(neighbors, reading(z, chunks, pass, retrieved)).to(type), pass);
  pass.retrieved = std::make_shared<const RetrievedChunks>(encoded, there, chunks,
                                                           retrieved.place.position.size(0));
  return {runner_.run(reading_, attended, LayerContext{pass, tables}), encoded};
}

}  // namespace megatron
