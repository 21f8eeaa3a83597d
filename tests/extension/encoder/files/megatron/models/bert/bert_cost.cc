// What the ends of a BERT cost a rank besides those of a GPT. Letters as in
// models/common/ends_cost.h.
//
// Saved:
//   embedding   8 R                token types
//   head        3 R h e + 8 R      dense: its input and output; norm: its input and statistics
//               b h e              output of the pooler
//
// The peak of the backward is still that of the output projection: all of this is held then.
#include "megatron/models/bert/bert_model.h"

namespace megatron {

EndsCost bert_ends_cost(const ModelConfig& model, const EndsShape& shape) {
  constexpr int64_t kIdBytes = 8;
  const LayerShape& s = shape.layer;
  const int64_t h = model.transformer.hidden_size, row = h * s.element;
  EndsCost cost = language_ends_cost(model, shape);
  cost.head.saved += s.rows * (3 * row + 2 * s.sum);
  cost.head_products += static_cast<double>(h * h);
  if (!has_binary_head(model)) return cost;
  cost.embedding.saved += s.rows * kIdBytes;
  cost.head.saved += s.samples * row;
  cost.batch += (s.tokens + s.samples) * kIdBytes + s.samples * 4;
  return cost;
}

}  // namespace megatron
