#include "tests/unit/inference/toy_model.h"

#include "megatron/comm/parallel_groups.h"
#include "megatron/models/common/embedding.h"
#include "megatron/models/common/output_layer.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/layer/layer.h"
#include "megatron/transformer/layer_kinds.h"
#include "megatron/transformer/transformer_block.h"

namespace megatron {
namespace {

class ToyState final : public LayerState {
 public:
  std::vector<SlotBuffer*> slots() override { return {&sums, &inputs}; }
  SlotBuffer sums, inputs;  // [slots, h]
};

class ToyLayer final : public Layer {
 public:
  ToyLayer(const TransformerConfig& config, int64_t layer_number, const ParallelGroups& groups)
      : Layer(layer_number),
        in_("in", config.hidden_size, config.hidden_size, options(config), groups),
        out_("out", config.hidden_size, config.hidden_size, options(config), groups) {
    add("in", &in_);
    add("out", &out_);
  }

  at::Tensor forward(const at::Tensor& x, const LayerContext& context) override {
    const at::Tensor u = in_.forward(x).squeeze(1);
    if (context.state == nullptr) {
      const at::Tensor none = at::zeros({u.size(1)}, u.options());
      return out_.forward((scan(none, u) + whole_input).unsqueeze(1), x);
    }
    const RaggedBatch& batch = context.pass.decoding->batch;
    auto& state = *static_cast<ToyState*>(context.state);
    const at::Tensor sums = state.sums.rows(batch.num_slots, {u.size(1)}, u.options());
    const at::Tensor inputs = state.inputs.rows(batch.num_slots, {u.size(1)}, u.options());
    std::vector<at::Tensor> all;
    int64_t row = 0;
    for (size_t i = 0; i < batch.slots.size(); ++i) {
      const RaggedPart& part = batch.rows.parts()[i];
      const at::Tensor kept = sums[batch.slots[i]];
      const at::Tensor first = part.first == 0 ? at::zeros_like(kept) : kept;
      const at::Tensor own = scan(first, u.narrow(0, row, part.count));
      kept.copy_(own[-1]);
      all.push_back(own + inputs[batch.slots[i]]);
      row += part.count;
    }
    return out_.forward(at::cat(all).unsqueeze(1), x);
  }
  std::unique_ptr<LayerState> make_state() const override { return std::make_unique<ToyState>(); }

  // [h]
  at::Tensor summary(const SequenceInput& input) {
    return in_.forward(input.values.to(at::kDouble).unsqueeze(1)).squeeze(1).mean(0) +
           input.ids.to(at::kDouble).sum() * 0.01;
  }
  at::Tensor whole_input;  // of the sequence of a forward without a cache

 private:
  static LinearOptions options(const TransformerConfig& config) {
    LinearOptions options;
    options.init = config.weight_init(config.hidden_size, config.hidden_size);
    return options;
  }
  static at::Tensor scan(const at::Tensor& first, const at::Tensor& u) {
    std::vector<at::Tensor> sums;
    at::Tensor sum = first;
    for (int64_t t = 0; t < u.size(0); ++t) sums.push_back(sum = sum / 2 + u[t]);
    return at::stack(sums);
  }
  ColumnParallelLinear in_;
  RowParallelLinear out_;
};

ModelConfig toy_config() {
  ModelConfig config;
  TransformerConfig& t = config.transformer;
  t.num_layers = 2;
  t.hidden_size = 16;
  t.num_attention_heads = 2;
  t.seq_length = 64;
  t.position_embedding_type = PositionEmbedding::kRope;
  t.init_method_std = 0.5;
  t.finalize();
  config.vocab_size = 61;
  config.padded_vocab_size = 64;
  return config;
}

thread_local ToyLayer* last_made = nullptr;
std::unique_ptr<Layer> make_toy_layer(const TransformerConfig& config, int64_t layer_number,
                                      bool sequence_parallel, const ParallelGroups& groups) {
  if (layer_number == 2) return make_layer(config, layer_number, sequence_parallel, groups);
  auto layer = std::make_unique<ToyLayer>(config, layer_number, groups);
  last_made = layer.get();
  return layer;
}

class ToyModel final : public Model {
 public:
  explicit ToyModel(const ParallelGroups& groups)
      : Model(toy_config(), groups, {0, 2, true, true}),
        embedding_(config(), groups),
        block_(config().transformer, 0, 2, /*final_norm=*/true, false, groups, make_toy_layer),
        toy_(last_made),
        output_(config(), groups, slice(), &embedding_, nullptr) {
    add("embedding", &embedding_);
    add("decoder", &block_);
    name_parameters();
  }

  using Model::hidden;
  using Model::loss;
  StageTensors hidden(const Batch& batch, const StageTensors& /*input*/,
                      const ForwardContext& given) override {
    const ForwardContext context = with_rows(given, false, groups().tp);
    at::Tensor x = embedding_.forward(batch["tokens"], context);
    if (rows.defined()) x.narrow(0, 0, rows.size(0)).copy_(rows.unsqueeze(1));
    return {block_.forward(x, context)};
  }
  at::Tensor logits(const at::Tensor& hidden) override { return output_.linear().forward(hidden); }
  at::Tensor token_losses(const at::Tensor& hidden, const at::Tensor&) override { return hidden; }
  Loss loss(const StageTensors&, const Batch&, const ForwardContext&) override { return {}; }
  std::unique_ptr<VocabularyPass> begin_loss(const at::Tensor&, const Batch&) override {
    return nullptr;
  }
  EmbeddingTables embedding_tables() override { return {&embedding_.weight()}; }

  SequenceInputUse sequence_input() const override { return SequenceInputUse::kRequired; }
  StageTensors begin_sequence(const SequenceInput& input, const StageTensors&, DecodingState& state,
                              int64_t slot, int64_t num_slots) override {
    const at::Tensor summary = toy_->summary(input);
    static_cast<ToyState*>(state.of(*toy_))
        ->inputs.rows(num_slots, {summary.size(0)}, summary.options())[slot]
        .copy_(summary);
    return {};
  }

  void set_input(const SequenceInput& input) { toy_->whole_input = toy_->summary(input); }
  at::Tensor rows;  // of the sequence of a forward without a cache

 private:
  LanguageModelEmbedding embedding_;
  TransformerBlock block_;
  ToyLayer* toy_;
  OutputProjection output_;
};

}  // namespace

std::unique_ptr<Model> make_toy_model(const ParallelGroups& groups) {
  return std::make_unique<ToyModel>(groups);
}

at::Tensor toy_logits(Model& model, const SequenceInput& input, const at::Tensor& rows,
                      const std::vector<int32_t>& ids) {
  auto& toy = dynamic_cast<ToyModel&>(model);
  const at::NoGradGuard no_grad;
  toy.set_input(input);
  toy.rows = rows;
  std::vector<int64_t> tokens(static_cast<size_t>(rows.defined() ? rows.size(0) : 0), 0);
  tokens.insert(tokens.end(), ids.begin(), ids.end());
  const auto length = static_cast<int64_t>(tokens.size());
  ForwardContext context;
  context.place.position = at::arange(length, at::kLong);
  context.place.sample = at::zeros({1}, at::kLong);
  const at::Tensor logits =
      model.forward(at::tensor(tokens, at::kLong).unsqueeze(0), context).squeeze(1);
  toy.rows = at::Tensor();
  return logits;
}

}  // namespace megatron
