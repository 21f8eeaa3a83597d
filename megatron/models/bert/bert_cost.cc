// What the ends of a BERT cost a rank. Letters as in models/common/ends_cost.h; in the costs of the
// language model's head M, the positions of a micro-batch that the loss counts at most, takes the
// place of T and R.
//
// Saved besides what the ends of a language model save:
//   embedding   8 R                token types
//               R h x + 8 R        input and statistics of the norm of the embeddings
//   head        8 M                which rows are counted
//               3 M h e + 8 M      dense: its input and output; norm: its input and statistics
//               3 b h e            pooler: its input and output; the input of the binary head or
//                                  of that of classes
//
// The normed hidden states, R h e, are there while the head runs and in the backward of the norm.
#include <algorithm>

#include "megatron/models/bert/bert_model.h"
#include "megatron/models/model.h"
#include "megatron/transformer/config/norm_placement.h"

namespace megatron {
namespace {

constexpr int64_t kBertIdBytes = 8;  // of a token id or a place

// The positions that the head sees, in the place of all of them.
EndsShape counted_shape(const EndsShape& shape, int64_t most) {
  EndsShape counted = shape;
  LayerShape& s = counted.layer;
  const int64_t length = s.tokens / s.samples, parts = s.sequence_parallel ? s.tensor : 1;
  if (most <= 0 || most >= length) return counted;
  const int64_t positions = std::min((most + parts - 1) / parts * parts, length);
  s.tokens = positions * s.samples;
  s.rows = s.tokens / parts;
  return counted;
}

// The head of a language model with the rows of `counted`, after a final norm of all rows.
EndCost head_of_counted(const ModelConfig& model, const EndsShape& shape,
                        const EndsShape& counted) {
  const int64_t h = model.transformer.hidden_size;
  const LayerShape &s = shape.layer, &m = counted.layer;
  EndCost head = language_ends_cost(model, counted).head;
  const int64_t statistics = 2 * s.sum, row = h * s.element;
  const int64_t norm = has_final_norm(model.transformer) ? h * s.residual + statistics : 0;
  const int64_t after_norm = head.saved - m.rows * norm;  // saved by output layer and loss
  const int64_t dense = m.rows * (3 * row + statistics),
                chosen = m.rows == s.rows ? 0 : m.tokens * kBertIdBytes;
  head.saved += (s.rows - m.rows) * norm + dense + chosen;
  head.pending += m.rows * row;
  const int64_t normed = m.rows == s.rows ? 0 : s.rows * row;
  head.forward_peak += normed;
  head.norm_forward_peak = -(after_norm + dense + chosen) + s.rows * row;
  head.norm_backward_peak = s.rows * (row + h * s.residual) - after_norm - dense - chosen;
  return head;
}

// The head of a model that is not trained to predict tokens: a final norm, the pooler and classes.
EndCost head_of_first(const ModelConfig& model, const LayerShape& s) {
  const int64_t h = model.transformer.hidden_size;
  EndCost head;
  if (has_final_norm(model.transformer)) head.saved = s.rows * (h * s.residual + 2 * s.sum);
  head.saved += 3 * s.samples * h * s.element;
  const BertConfig& own = model.own.as_or_default<BertConfig>();
  if (own.bert_pooler_norm) head.saved += s.samples * (h * s.element + 2 * s.sum);
  if (own.bert_pooling == BertPooling::kMean) {
    head.saved += s.tokens * s.element;  // which tokens count
    head.forward_peak += s.rows * h * s.element;
  }
  head.norm_backward_peak = s.rows * h * s.residual;
  return head;
}

}  // namespace

EndsCost bert_ends_cost(const ModelConfig& model, const EndsShape& shape) {
  const BertConfig& own = model.own.as_or_default<BertConfig>();
  const LayerShape& s = shape.layer;
  const int64_t h = model.transformer.hidden_size, row = h * s.element;
  const EndsShape counted = counted_shape(shape, own.most_counted);
  EndsCost cost = language_ends_cost(model, shape);
  if (has_lm_head(model)) {
    cost.head = head_of_counted(model, shape, counted);
    const double share =
        static_cast<double>(counted.layer.tokens) / static_cast<double>(shape.layer.tokens);
    cost.head_products = share * (cost.head_products + static_cast<double>(h * h));
  } else {
    cost.head = head_of_first(model, s);
    cost.head_products = static_cast<double>(h * (h + text_head_outputs(model)) * s.samples) /
                         static_cast<double>(s.tokens);
  }
  // Labels; padding mask; the weight of each sample, the order and whether it was cut
  cost.batch += s.tokens + s.samples * (2 * kBertIdBytes + 4);
  cost.batch += s.tokens * kBertIdBytes;  // token types
  if (num_token_types(model) > 0) cost.embedding.saved += s.rows * kBertIdBytes;
  if (own.bert_embedding_norm) cost.embedding.saved += s.rows * (h * s.residual + 2 * s.sum);
  if (has_binary_head(model)) cost.head.saved += 3 * s.samples * row;
  return cost;
}

}  // namespace megatron
