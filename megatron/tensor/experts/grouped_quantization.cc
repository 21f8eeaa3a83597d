#include "megatron/tensor/experts/grouped_quantization.h"

#include <vector>

#include "megatron/base/check.h"
#include "megatron/kernels/experts/grouped_gemm.h"
#include "megatron/kernels/experts/grouped_gemm_fp8.h"
#include "megatron/kernels/fp8/fp8.h"
#include "megatron/tensor/detail/expert_casts.h"
#include "megatron/tensor/detail/expert_loops.h"
#include "megatron/tensor/detail/launch.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

int64_t rounded_up(int64_t rows, int64_t unit) { return (rows + unit - 1) / unit * unit; }

// Calls f(expert, first row, rows, padded rows, padded rows before).
template <class F>
void for_each_padded(const at::Tensor& counts, int64_t rows, int64_t unit, const F& f) {
  int64_t before = 0;
  for_each_expert(counts, rows, [&](int64_t expert, int64_t first, int64_t count) {
    const int64_t padded = rounded_up(count, unit);
    f(expert, first, count, padded, before);
    before += padded;
  });
}

at::Tensor with_zero_rows(const at::Tensor& x, int64_t padded) {
  if (x.size(0) == padded) return x.contiguous();
  const at::Tensor all = at::zeros({padded, x.size(1)}, x.options());
  all.narrow(0, 0, x.size(0)).copy_(x);
  return all;
}

// The scale of one expert's tensor, as quantize_tensor() takes it; raises the amax to record.
TensorScale scale_of_expert(const at::Tensor& x, const ExpertScales& by, int64_t expert) {
  TensorScale scale;
  scale.amax = by.row_amax.defined() ? by.row_amax.max().view({1}) : largest_magnitude(x);
  if (by.new_amax.defined()) {
    at::Tensor slot = by.new_amax.narrow(0, expert, 1);
    at::maximum_out(slot, slot, scale.amax);
  }
  if (!by.scale.defined() || by.scale[expert].item<float>() == 0.0f) return scale;
  return {by.scale.narrow(0, expert, 1), {}, {}};
}

bool by_blocks(const QuantizationOptions& options) {
  return options.recipe == QuantizationRecipe::kBlockwise;
}

QuantizedTensor quantize_part(const at::Tensor& x, OperandRole role,
                              const QuantizationOptions& options, Orientations wanted,
                              const ExpertScales& by, int64_t expert) {
  return quantize_operand(x, role, options, wanted,
                          by_blocks(options) ? TensorScale() : scale_of_expert(x, by, expert));
}

// Copies one expert's matrices, of padded rows, to their places.
struct ExpertPlace {
  int64_t expert, first, count, padded, before;
};
void place_part(const QuantizedTensor& part, const ExpertPlace& at, int64_t c,
                const QuantizedTensor& out) {
  const int64_t blocks = c / kFp8Block;
  const auto bytes = [](const at::Tensor& codes) { return codes.view(at::kByte); };
  if (out.rows.defined()) {
    bytes(out.rows.codes)
        .narrow(0, at.first, at.count)
        .copy_(bytes(part.rows.codes).narrow(0, 0, at.count));
    if (out.rows.layout == ScaleLayout::kTensor) {
      out.rows.scale[at.expert].copy_(part.rows.scale);
    } else {
      out.rows.scale.narrow(0, at.first * blocks, at.count * blocks)
          .view({blocks, at.count})
          .copy_(part.rows.scale.narrow(1, 0, at.count));
    }
  }
  if (!out.columns.defined()) return;
  bytes(out.columns.codes)
      .narrow(0, at.before * c, at.padded * c)
      .copy_(bytes(part.columns.codes).view({-1}));
  if (out.columns.layout == ScaleLayout::kTensor) {
    out.columns.scale[at.expert].copy_(part.columns.scale);
  } else {
    out.columns.scale.narrow(0, at.before / kFp8Block * c, at.padded / kFp8Block * c)
        .copy_(part.columns.scale.view({-1}));
  }
}

// The quantised rows of one expert as a matrix of its own, with padded rows where `unit` > 1.
QuantizedMatrix rows_of_expert(const QuantizedMatrix& all, int64_t expert, int64_t first,
                               int64_t count, int64_t unit) {
  const int64_t c = all.codes.size(1), padded = rounded_up(count, unit), blocks = c / kFp8Block;
  QuantizedMatrix one;
  one.layout = all.layout;
  one.codes = with_zero_rows(all.codes.view(at::kByte).narrow(0, first, count), padded)
                  .view(all.codes.scalar_type());
  if (all.layout == ScaleLayout::kTensor) {
    one.scale = all.scale[expert];
  } else {
    one.scale = at::ones({blocks, padded}, all.scale.options());
    one.scale.narrow(1, 0, count)
        .copy_(all.scale.narrow(0, first * blocks, count * blocks).view({blocks, count}));
  }
  return one;
}

QuantizedMatrix columns_of_expert(const QuantizedMatrix& all, int64_t c, int64_t expert,
                                  int64_t before, int64_t padded) {
  QuantizedMatrix one;
  one.layout = all.layout;
  one.codes = all.codes.narrow(0, before * c, padded * c).view({c, padded});
  one.scale = all.layout == ScaleLayout::kTensor
                  ? all.scale[expert]
                  : all.scale.narrow(0, before / kFp8Block * c, padded / kFp8Block * c)
                        .view({padded / kFp8Block, c});
  return one;
}

QuantizedMatrix weight_of_expert(const QuantizedMatrix& all, int64_t expert) {
  QuantizedMatrix one{all.codes[expert], all.scale[expert], all.layout};
  if (all.layout == ScaleLayout::kTensor) return one;
  const int64_t columns = one.scale.size(1);
  const at::Tensor scale = at::zeros({one.scale.size(0), up4(columns)}, one.scale.options());
  scale.narrow(1, 0, columns).copy_(one.scale);
  one.scale = scale;
  return one;
}

// y = a b^T on the CPU, for blocks of rows that do not depend on the other rows.
void multiply_on_cpu(const QuantizedMatrix& a, const QuantizedMatrix& b, const at::Tensor& y,
                     int64_t before) {
  const bool scaled = a.layout == ScaleLayout::kTensor;
  const at::Tensor left = scaled ? a.codes.to(at::kFloat) : dequantize(a),
                   right = (scaled ? b.codes.to(at::kFloat) : dequantize(b)).t();
  const at::Tensor product = at::empty({y.size(0), y.size(1)}, left.options());
  multiply_rows(left, product, before,
                [&](const at::Tensor& in, at::Tensor out) { at::mm_out(out, in, right); });
  if (scaled) product.mul_(a.scale.select(0, kFp8InverseAt) * b.scale.select(0, kFp8InverseAt));
  y.copy_(product);
}

#ifdef MEGATRON_CUDA
void run_expert_cast(const at::Tensor& x, const at::Tensor& counts, int64_t experts,
                     const ExpertScales& by, const QuantizedTensor& out, at::ScalarType type,
                     bool square) {
  ExpertCastLaunch launch = expert_cast_into(out, type, x, x.size(1), counts, experts, by);
  launch.cast.x = x.const_data_ptr();
  launch.cast.square = square;
  fp8_expert_cast_cuda(launch.cast, current_stream(x));
}

QuantizedTensor quantize_weight_on_gpu(const at::Tensor& w, const QuantizationOptions& options,
                                       Orientations wanted, const ExpertScales& by) {
  const int64_t experts = w.size(0), n = w.size(1), k = w.size(2), row_blocks = n / kFp8Block,
                column_blocks = k / kFp8Block;
  const at::ScalarType type = options.type(OperandRole::kWeight);
  const auto codes = w.options().dtype(type), floats = w.options().dtype(at::kFloat);
  const bool blocks = by_blocks(options);
  const ScaleLayout layout = blocks ? ScaleLayout::kBlock128 : ScaleLayout::kTensor;
  const at::Tensor of_experts =
      blocks ? at::Tensor() : at::empty({experts, kFp8ScaleElements}, floats);
  QuantizedTensor out;
  if (wanted.rows)
    out.rows = {at::empty({experts, n, k}, codes),
                blocks ? at::empty({experts, row_blocks, column_blocks}, floats) : of_experts,
                layout};
  if (wanted.columns)
    out.columns = {at::empty({experts, k, n}, codes),
                   blocks ? at::empty({experts, column_blocks, row_blocks}, floats) : of_experts,
                   layout};
  const at::Tensor rows = w.contiguous().view({experts * n, k});
  run_expert_cast(rows, {}, experts, by, out, type, /*square=*/true);
  return out;
}

bool run_grouped_fp8(GroupedGemmFp8 gemm, const QuantizedMatrix& a, const QuantizedMatrix& b,
                     const at::Tensor& counts, const at::Tensor& d) {
  const at::ScalarType wanted = gemm.weight_grad ? at::kFloat : at::kBFloat16;
  if (!d.is_cuda() || d.scalar_type() != wanted || gemm.rows == 0 || !has_grouped_gemm())
    return false;
  MEGATRON_ASSERT(d.is_contiguous() && b.codes.scalar_type() == at::kFloat8_e4m3fn &&
                      reinterpret_cast<uintptr_t>(d.data_ptr()) % 16 == 0,
                  "a grouped FP8 product into a tensor that is not contiguous and aligned");
  gemm.a_type = kernel_type_of(a.codes.scalar_type());
  gemm.blocks = a.layout != ScaleLayout::kTensor;
  gemm.experts = counts.numel();
  gemm.counts = counts.const_data_ptr();
  gemm.wide_counts = counts.scalar_type() == at::kLong;
  gemm.a = static_cast<const uint8_t*>(a.codes.const_data_ptr());
  gemm.b = static_cast<const uint8_t*>(b.codes.const_data_ptr());
  gemm.a_scale = a.scale.const_data_ptr<float>();
  gemm.b_scale = b.scale.const_data_ptr<float>();
  gemm.d = d.data_ptr();
  // From the caching allocator: the stream orders its reuse.
  const at::Tensor workspace =
      at::empty({grouped_gemm_fp8_workspace(gemm.experts)}, d.options().dtype(at::kByte));
  gemm.workspace = workspace.data_ptr();
  grouped_gemm_fp8_cuda(gemm, current_stream(d));
  return true;
}
#else
bool run_grouped_fp8(const GroupedGemmFp8&, const QuantizedMatrix&, const QuantizedMatrix&,
                     const at::Tensor&, const at::Tensor&) {
  return false;
}
#endif

}  // namespace

QuantizedTensor quantize_expert_rows(const at::Tensor& x, const at::Tensor& counts,
                                     OperandRole role, const QuantizationOptions& options,
                                     Orientations wanted, const ExpertScales& by) {
  const at::NoGradGuard no_grad;
  check_shape("rows of experts", x, {-1, -1});
  check_expert_columns(x.size(1), options);
  const int64_t unit = options.alignment();
  QuantizedTensor out =
      empty_expert_codes(x, x.size(1), counts.numel(), options.type(role), options, wanted);
#ifdef MEGATRON_CUDA
  if (x.is_cuda()) {
    const at::Tensor in = x.contiguous();
    run_expert_cast(in, counts, counts.numel(), by, out, options.type(role), /*square=*/false);
    return out;
  }
#endif
  for_each_padded(
      counts, x.size(0), unit,
      [&](int64_t expert, int64_t first, int64_t count, int64_t padded, int64_t before) {
        if (count == 0) return;
        const at::Tensor rows = with_zero_rows(x.narrow(0, first, count), padded);
        ExpertScales part = by;
        if (by.row_amax.defined()) part.row_amax = by.row_amax.narrow(0, first, count);
        place_part(quantize_part(rows, role, options, wanted, part, expert),
                   {expert, first, count, padded, before}, x.size(1), out);
      });
  return out;
}

QuantizedTensor quantize_expert_weight(const at::Tensor& w, const QuantizationOptions& options,
                                       Orientations wanted, const ExpertScales& by) {
  const at::NoGradGuard no_grad;
  check_shape("weight of experts", w, {-1, -1, -1});
  check_expert_columns(w.size(2), options);
  const int64_t n = w.size(1), k = w.size(2);
  MEGATRON_ASSERT(n % options.alignment() == 0, "an FP8 weight of experts with ", n,
                  " rows, expected a multiple of ", options.alignment());
#ifdef MEGATRON_CUDA
  if (w.is_cuda()) return quantize_weight_on_gpu(w, options, wanted, by);
#endif
  std::vector<at::Tensor> codes[2], scales[2];
  QuantizedTensor part;
  for (int64_t expert = 0; expert < w.size(0); ++expert) {
    part = quantize_part(w[expert].contiguous(), OperandRole::kWeight, options, wanted, by, expert);
    const QuantizedMatrix* both[2] = {&part.rows, &part.columns};
    for (int i = 0; i < 2; ++i) {
      if (!both[i]->defined()) continue;
      codes[i].push_back(both[i]->codes.view(at::kByte));
      scales[i].push_back(by_blocks(options)
                              ? both[i]->scale.narrow(1, 0, (i == 0 ? k : n) / kFp8Block)
                              : both[i]->scale);
    }
  }
  const auto together = [&](int i, QuantizedMatrix& out) {
    if (codes[i].empty()) return;
    out = {at::stack(codes[i]).view(options.type(OperandRole::kWeight)), at::stack(scales[i]),
           by_blocks(options) ? ScaleLayout::kBlock128 : ScaleLayout::kTensor};
  };
  QuantizedTensor out;
  together(0, out.rows);
  together(1, out.columns);
  return out;
}

void raise_expert_amax(const at::Tensor& x, const at::Tensor& counts, const at::Tensor& amax) {
  const at::NoGradGuard no_grad;
#ifdef MEGATRON_CUDA
  if (x.is_cuda()) {
    const at::Tensor in = x.contiguous();
    ExpertCastLaunch launch = expert_cast_into({}, at::kFloat8_e4m3fn, in, in.size(1), counts,
                                               counts.numel(), {{}, amax});
    launch.cast.x = in.const_data_ptr();
    return fp8_expert_amax_cuda(launch.cast, current_stream(in));
  }
#endif
  for_each_expert(counts, x.size(0), [&](int64_t expert, int64_t first, int64_t count) {
    if (count == 0) return;
    at::Tensor slot = amax.narrow(0, expert, 1);
    at::maximum_out(slot, slot, largest_magnitude(x.narrow(0, first, count)));
  });
}

void grouped_quantized_product_into(const QuantizedMatrix& a, const QuantizedMatrix& b,
                                    const at::Tensor& counts, at::Tensor y, bool fast,
                                    const at::Tensor& before) {
  const at::NoGradGuard no_grad;
  check_shape("quantised weight of experts", b.codes, {counts.numel(), -1, a.codes.size(1)});
  check_shape("output of experts", y, {a.codes.size(0), b.codes.size(1)});
  if (y.size(0) == 0) return;
  GroupedGemmFp8 gemm;
  gemm.fast = fast;
  gemm.rows = y.size(0);
  gemm.n = y.size(1);
  gemm.k = a.codes.size(1);
  if (run_grouped_fp8(gemm, a, b, counts, y)) return;
  const int64_t unit = !y.is_cuda() ? 1 : a.layout == ScaleLayout::kTensor ? 16 : kFp8Block;
  for_each_expert(counts, y.size(0), [&](int64_t expert, int64_t first, int64_t count) {
    if (count == 0) return;
    const QuantizedMatrix rows = rows_of_expert(a, expert, first, count, unit),
                          weight = weight_of_expert(b, expert);
    const at::Tensor out = y.narrow(0, first, count);
    if (!y.is_cuda()) return multiply_on_cpu(rows, weight, out, rows_before(before, expert));
    out.copy_(quantized_product(rows, weight, y.scalar_type(), {}, fast).narrow(0, 0, count));
  });
}

void grouped_quantized_weight_grad(const QuantizedMatrix& dy, const QuantizedMatrix& x,
                                   const at::Tensor& counts, at::Tensor target, double beta) {
  const at::NoGradGuard no_grad;
  check_shape("weight gradient of experts", target, {counts.numel(), -1, -1});
  MEGATRON_ASSERT(beta == 0.0 || beta == 1.0, "a grouped weight gradient with beta ", beta,
                  ", expected 0 or 1");
  const int64_t n = target.size(1), k = target.size(2),
                unit = x.layout == ScaleLayout::kTensor ? 16 : kFp8Block;
  MEGATRON_ASSERT(dy.codes.numel() / n == x.codes.numel() / k,
                  "a grouped weight gradient of operands with different rows");
  GroupedGemmFp8 gemm;
  gemm.weight_grad = true;
  gemm.beta = static_cast<float>(beta);
  gemm.rows = x.codes.numel() / k;
  gemm.n = n;
  gemm.k = k;
  if (run_grouped_fp8(gemm, dy, x, counts, target)) return;
  for_each_padded(counts, x.codes.numel() / k, unit,
                  [&](int64_t expert, int64_t, int64_t count, int64_t padded, int64_t before) {
                    if (count > 0)
                      return quantized_product_into(
                          columns_of_expert(dy, n, expert, before, padded),
                          columns_of_expert(x, k, expert, before, padded), target[expert], beta);
                    if (beta == 0.0) target[expert].zero_();
                  });
}

}  // namespace megatron
