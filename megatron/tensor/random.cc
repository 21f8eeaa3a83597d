#include "megatron/tensor/random.h"

#include "megatron/base/check.h"
#include "megatron/kernels/philox.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

void check_probability(std::string_view what, double p) {
  MEGATRON_ASSERT(p >= 0.0 && p < 1.0, what, " has probability ", p, ", expected 0 <= p < 1");
}

void check_place(std::string_view what, const TokenPositions& place, int64_t s, int64_t samples,
                 const at::Device& device) {
  check_shape(cat(what, " place.position"), place.position, {s});
  check_shape(cat(what, " place.sample"), place.sample, {samples});
  for (const at::Tensor& t : {place.position, place.sample}) {
    MEGATRON_ASSERT(t.scalar_type() == at::kLong && t.is_contiguous() && t.device() == device, what,
                    " needs contiguous int64 places on ", device.str());
  }
}

// Whether an activation [s, b, h] has a sample for each of its rows.
bool has_sample_of_row(const at::Tensor& sample, const at::Tensor& x) {
  return x.size(1) == 1 && sample.numel() == x.size(0);
}

void check_dropout_place(std::string_view what, const TokenPositions& place, const at::Tensor& x) {
  check_place(what, place, x.size(0), has_sample_of_row(place.sample, x) ? x.size(0) : x.size(1),
              x.device());
}

// residual + mask * x / (1 - p), in out_type; residual may be undefined.
at::Tensor run_dropout(const at::Tensor& x, const at::Tensor& residual, at::ScalarType out_type,
                       double p, RandomKey key, const at::Tensor& sample,
                       const at::Tensor& position) {
  const at::Tensor in = x.contiguous();
  const at::Tensor add = residual.defined() ? residual.contiguous() : residual;
  at::Tensor out = at::empty(in.sizes(), in.options().dtype(out_type));
  Dropout args;
  args.p = p;
  args.key = key.value;
  args.sequence = in.size(0);
  args.batch = in.size(1);
  args.features = in.size(2);
  args.sample = sample.const_data_ptr<int64_t>();
  args.sample_of_row = has_sample_of_row(sample, in);
  args.position = position.const_data_ptr<int64_t>();
  args.x_dtype = to_dtype(in.scalar_type());
  args.x = in.const_data_ptr();
  args.out_dtype = to_dtype(out_type);
  args.residual = add.defined() ? add.const_data_ptr() : nullptr;
  args.out = out.data_ptr();
  launch(
      in, args.sequence * args.batch, args.features,
      [&](int64_t begin, int64_t end) { dropout_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(dropout_cuda(args, stream)); });
  return out;
}

class DropoutFunction : public torch::autograd::Function<DropoutFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const std::optional<at::Tensor>& residual, double p, int64_t key,
                            const at::Tensor& sample, const at::Tensor& position) {
    context->saved_data["p"] = p;
    context->saved_data["key"] = key;
    context->saved_data["x_type"] = x.scalar_type();
    context->saved_data["has_residual"] = residual.has_value();
    context->save_for_backward({sample, position});
    const at::Tensor add = residual.value_or(at::Tensor());
    const at::ScalarType out_type = add.defined() ? add.scalar_type() : x.scalar_type();
    return run_dropout(x, add, out_type, p, RandomKey{static_cast<uint64_t>(key)}, sample,
                       position);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    const RandomKey key{static_cast<uint64_t>(context->saved_data["key"].toInt())};
    at::Tensor dx;
    if (context->needs_input_grad(0)) {
      dx = run_dropout(grads[0], {}, context->saved_data["x_type"].toScalarType(),
                       context->saved_data["p"].toDouble(), key, saved[0], saved[1]);
    }
    const bool has_residual = context->saved_data["has_residual"].toBool();
    return {dx, has_residual ? grads[0] : at::Tensor(), {}, {}, {}, {}};
  }
};

RandomFill fill_args(const at::Tensor& out, RandomKey key, int64_t first_row, int64_t row_elements,
                     int64_t column_offset) {
  MEGATRON_ASSERT(out.is_contiguous() && out.dim() >= 1,
                  "random fill needs a contiguous tensor with rows");
  RandomFill fill;
  fill.key = key.value;
  fill.dtype = to_dtype(out.scalar_type());
  fill.out = out.data_ptr();
  fill.rows = out.size(0);
  fill.columns = fill.rows == 0 ? 0 : out.numel() / fill.rows;
  fill.first_row = first_row;
  fill.row_elements = row_elements;
  fill.column_offset = column_offset;
  return fill;
}

RandomFill fill_args(const at::Tensor& out, RandomKey key, const TokenPositions& place) {
  MEGATRON_ASSERT(out.dim() >= 2, "an activation has positions and samples");
  check_place("random fill", place, out.size(0), out.size(1), out.device());
  RandomFill fill = fill_args(out, key, 0, 0, 0);
  fill.batch = out.size(1);
  fill.rows = out.size(0) * out.size(1);
  fill.columns = fill.rows == 0 ? 0 : out.numel() / fill.rows;
  fill.sample = place.sample.const_data_ptr<int64_t>();
  fill.position = place.position.const_data_ptr<int64_t>();
  return fill;
}

void run_fill(const at::Tensor& out, const RandomFill& fill) {
  if (out.numel() == 0) return;
  launch(
      out, fill.rows, fill.columns,
      [&](int64_t begin, int64_t end) { fill_random_cpu(fill, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(fill_random_cuda(fill, stream)); });
}

void fill_normal(const at::Tensor& out, double std, RandomFill fill) {
  fill.normal = true;
  fill.a = std;
  run_fill(out, fill);
}

void fill_uniform(const at::Tensor& out, double low, double high, RandomFill fill) {
  fill.normal = false;
  fill.a = low;
  fill.b = high;
  run_fill(out, fill);
}

}  // namespace

uint64_t split_mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

RandomKey random_key(int64_t seed, std::string_view purpose, int64_t layer) {
  uint64_t hash = split_mix(static_cast<uint64_t>(seed));
  for (char c : purpose) hash = split_mix(hash ^ static_cast<unsigned char>(c));
  return {
      split_mix(split_mix(hash ^ (uint64_t{purpose.size()} << 32)) ^ static_cast<uint64_t>(layer))};
}

at::Tensor dropout(const at::Tensor& x, double p, RandomKey key, const TokenPositions& place) {
  check_probability("dropout", p);
  if (p == 0.0) return x;
  check_shape("dropout x", x, {-1, -1, -1});
  check_dropout_place("dropout", place, x);
  return DropoutFunction::apply(x, std::optional<at::Tensor>(), p, static_cast<int64_t>(key.value),
                                place.sample, place.position);
}

at::Tensor dropout_add(const at::Tensor& x, const at::Tensor& residual, double p, RandomKey key,
                       const TokenPositions& place) {
  check_probability("dropout_add", p);
  check_shape("dropout_add x", x, {-1, -1, -1});
  check_shape("dropout_add residual", residual, {x.size(0), x.size(1), x.size(2)});
  if (p == 0.0) {
    const bool same = x.scalar_type() == residual.scalar_type();
    return residual + (same ? x : x.to(residual.scalar_type()));
  }
  check_dropout_place("dropout_add", place, x);
  return DropoutFunction::apply(x, std::optional<at::Tensor>(residual), p,
                                static_cast<int64_t>(key.value), place.sample, place.position);
}

at::Tensor attention_dropout_mask(int64_t num_heads, int64_t first_head, double p, RandomKey key,
                                  const TokenPositions& query, const at::Tensor& key_position) {
  check_probability("attention dropout", p);
  const int64_t s = query.position.size(0), b = query.sample.size(0);
  check_place("attention dropout", query, s, b, query.position.device());
  check_shape("attention dropout key_position", key_position, {-1});
  MEGATRON_ASSERT(key_position.scalar_type() == at::kLong && key_position.is_contiguous(),
                  "attention dropout needs contiguous int64 key positions");
  at::Tensor out = at::empty({b, num_heads, s, key_position.size(0)},
                             query.position.options().dtype(at::kFloat));
  AttentionDropout args;
  args.p = p;
  args.key = key.value;
  args.batch = b;
  args.heads = num_heads;
  args.queries = s;
  args.keys = key_position.size(0);
  args.first_head = first_head;
  args.sample = query.sample.const_data_ptr<int64_t>();
  args.query_position = query.position.const_data_ptr<int64_t>();
  args.key_position = key_position.const_data_ptr<int64_t>();
  args.out = out.data_ptr<float>();
  launch(
      out, b * num_heads * s, args.keys,
      [&](int64_t begin, int64_t end) { attention_dropout_cpu(args, begin, end); },
      [&](void* stream) { MEGATRON_CUDA_KERNEL(attention_dropout_cuda(args, stream)); });
  return out;
}

void normal_(at::Tensor out, double std, RandomKey key, int64_t first_row, int64_t row_elements,
             int64_t column_offset) {
  fill_normal(out, std, fill_args(out, key, first_row, row_elements, column_offset));
}

void normal_(at::Tensor out, double std, RandomKey key, const TokenPositions& place) {
  fill_normal(out, std, fill_args(out, key, place));
}

void uniform_(at::Tensor out, double low, double high, RandomKey key, int64_t first_row,
              int64_t row_elements, int64_t column_offset) {
  fill_uniform(out, low, high, fill_args(out, key, first_row, row_elements, column_offset));
}

void uniform_(at::Tensor out, double low, double high, RandomKey key, const TokenPositions& place) {
  fill_uniform(out, low, high, fill_args(out, key, place));
}

}  // namespace megatron
