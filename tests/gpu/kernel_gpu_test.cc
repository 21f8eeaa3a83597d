// Every row of tests/kernels/cases.cc on CUDA: against fp64 on the CPU, bit for bit if `bit_equal`,
// and deterministic in two runs.
#include <gtest/gtest.h>

#include "megatron/comm/parallel_groups.h"
#include "megatron/nn/forward_parameter_store.h"
#include "megatron/tensor/batch_invariant/row_products.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/layers.h"
#include "tests/kernels/cases.h"

namespace megatron {
namespace {

const at::Device kGpu(at::kCUDA, 0);

class GpuKernel : public ::testing::TestWithParam<KernelCase> {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  }
};

TEST_P(GpuKernel, MatchesTheCpu) {
  const KernelCase& row = GetParam();
  const Tensors inputs = row.inputs();
  Tensors wide;
  for (const at::Tensor& t : inputs) wide.push_back(t.is_floating_point() ? t.to(at::kDouble) : t);
  const Tensors gpu = run_on(row, inputs, kGpu), cpu = run_on(row, inputs, at::kCPU),
                exact = row.reference(wide);
  ASSERT_EQ(gpu.size(), cpu.size());
  for (size_t i = 0; i < gpu.size(); ++i) {
    EXPECT_LT(relative_error(gpu[i], exact[i]), row.tolerance)
        << "output " << i << " of " << row.name << " on CUDA against fp64; the CPU's error is "
        << relative_error(cpu[i], exact[i]);
    if (!row.bit_equal) continue;
    const int64_t differ = gpu[i].ne(cpu[i]).sum().item<int64_t>();
    EXPECT_EQ(differ, 0)
        << "output " << i << " of " << row.name << ": " << differ << " of " << gpu[i].numel()
        << " elements are not the CPU's bits; largest difference "
        << (gpu[i].to(at::kDouble) - cpu[i].to(at::kDouble)).abs().max().item<double>();
  }
}

TEST_P(GpuKernel, IsDeterministic) {
  const KernelCase& row = GetParam();
  const Tensors inputs = row.inputs();
  const Tensors first = run_on(row, inputs, kGpu), second = run_on(row, inputs, kGpu);
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(at::equal(first[i], second[i]))
        << "output " << i << " of " << row.name << " differs between two runs";
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GpuKernel, ::testing::ValuesIn(kernel_cases(false)),
                         [](const auto& info) { return info.param.name; });

// bf16 and fp16 products summed straight into fp32, at aligned and odd sizes and strides.
// The kernel cases would pass without it, too.
TEST(GpuGemm, FewRowsHaveOneKernelWithNormAndActivation) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf, at::kFloat})
    for (int64_t rows = 1; rows <= 5; ++rows) {
      const at::TensorOptions options = at::dtype(type).device(at::kCUDA);
      const at::Tensor x = at::randn({rows, 1, 1024}, options),
                       w = at::randn({1024, 1024}, options), gain = at::randn({1024}, options);
      const at::Tensor y = fused_linear_forward(x, w, {}, {gain, 1e-5, false, true});
      EXPECT_EQ(y.defined(), rows < 5 && type != at::kFloat) << rows << toString(type);
      if (!y.defined()) continue;
      EXPECT_EQ(y.sizes(), (at::IntArrayRef{rows, 1, 512}));
    }
}

// Rows that are no whole spans, columns that are no whole tiles, blocks that take half of a
// multiprocessor and all of it.
TEST(GpuGemm, FewRowsEqualTheProduct) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf})
    for (const auto& [columns, inner] : std::vector<std::array<int64_t, 2>>{
             {4096, 4096}, {771, 1032}, {4099, 14336}, {1000, 20480}, {2048, 264}})
      for (int64_t rows = 1; rows <= 4; ++rows) {
        at::manual_seed(1);
        const at::TensorOptions options = at::dtype(type).device(at::kCUDA);
        const at::Tensor x = at::randn({rows, inner}, options),
                         w = at::randn({columns, inner}, options) / std::sqrt(inner),
                         bias = at::randn({columns}, options),
                         addend = at::randn({rows, columns}, options);
        const at::Tensor y = at::full({rows, columns}, std::nan(""), options);
        ASSERT_TRUE(multiply_few_rows(x, w, bias, addend, y, /*at_rest=*/true, {}));
        const at::Tensor expected = at::matmul(x.to(at::kDouble), w.to(at::kDouble).t()) +
                                    bias.to(at::kDouble) + addend.to(at::kDouble);
        EXPECT_LT(relative_error(y.cpu(), expected.cpu()), type == at::kHalf ? 5e-4 : 4e-3)
            << rows << " x " << columns << " x " << inner << " " << toString(type);
        const at::Tensor first = at::empty({1, columns}, options);
        ASSERT_TRUE(multiply_few_rows(x.narrow(0, 0, 1), w, bias, addend.narrow(0, 0, 1), first,
                                      /*at_rest=*/false, {}));
        EXPECT_TRUE(at::equal(first, y.narrow(0, 0, 1))) << "a row depends on those beside it";
      }
}

// The last columns of a tile may be those of no product, the last rows those of no text.
TEST(GpuGemm, SomeRowsHaveOneKernelWithSwiglu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  const at::TensorOptions options = at::dtype(at::kBFloat16).device(at::kCUDA);
  const auto product = [](const at::Tensor& x, const at::Tensor& w) {
    return at::matmul(x.to(at::kFloat), w.to(at::kFloat).t()).to(at::kBFloat16).to(at::kFloat);
  };
  for (const auto& [columns, inner] : std::vector<std::array<int64_t, 2>>{
           {14336, 4096}, {7200, 264}, {12200, 1032}, {14696, 64}, {16384, 2048}}) {
    at::manual_seed(1);
    const at::Tensor x = at::randn({130, inner}, options),
                     w = at::randn({2 * columns, inner}, options) / std::sqrt(inner);
    const at::Tensor gate = product(x, w.narrow(0, 0, columns)),
                     value = product(x, w.narrow(0, columns, columns));
    const at::Tensor expected = at::silu(gate) * value;
    at::Tensor all;
    for (const int64_t rows : {128, 100, 65, 64, 33, 32, 129}) {
      const at::Tensor own = x.narrow(0, 0, rows).unsqueeze(1);
      EXPECT_EQ(is_gated_rows(own, w), rows > 32 && rows <= 128) << rows;
      if (!is_gated_rows(own, w)) continue;
      const at::Tensor y = multiply_gated_rows(own, w);
      ASSERT_EQ(y.sizes(), (at::IntArrayRef{rows, 1, columns}));
      EXPECT_LT(relative_error(y.squeeze(1).cpu(), expected.narrow(0, 0, rows).cpu()), 1e-2)
          << rows << " x " << columns << " x " << inner;
      if (!all.defined()) all = y;
      EXPECT_TRUE(at::equal(y, all.narrow(0, 0, rows)))
          << "the numbers of a row differ between " << rows << " and 128 rows";
    }
    EXPECT_FALSE(is_gated_rows(x.narrow(0, 0, 64), w.to(at::kHalf)));
  }
}

TEST(GpuGemm, SomeRowsAreNormedBeforeTheirSwiglu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  constexpr int64_t kColumns = 8192, kInner = 512;
  LinearOptions options;
  options.bias = false;
  options.parts = {kColumns, kColumns};
  options.input_norm = true;
  options.norm.kind = Normalization::kRMSNorm;
  const ParallelGroups groups;
  ColumnParallelLinear fc1("linear_fc1", kInner, 2 * kColumns, options, groups);
  fc1.name_parameters("mlp");
  ForwardParameterStore store(fc1, at::kBFloat16, kGpu);
  const at::NoGradGuard no_grad;
  at::manual_seed(1);
  fc1.visit([](const std::string&, Parameter& parameter) {
    parameter.value.dim() == 1 ? parameter.value.uniform_(0.5, 1.5)
                               : parameter.value.normal_(0.0, 0.05);
  });
  store.place();
  for (const int64_t rows : {48, 128, 129}) {
    const at::Tensor x = 5 * at::randn({rows, 1, kInner}, at::dtype(at::kBFloat16).device(kGpu));
    const std::optional<SublayerOutput> fused = fc1.forward_swiglu(x);
    EXPECT_EQ(fused.has_value(), rows <= 128);
    if (!fused) continue;
    const auto halves = fc1.forward(x).to(at::kFloat).chunk(2, -1);
    EXPECT_LT(relative_error(fused->output.cpu(), (at::silu(halves[0]) * halves[1]).cpu()), 1e-2);
    EXPECT_TRUE(at::equal(fused->residual, x));
  }
}

TEST(GpuGemm, WeightGradientOfHalfOperandsInFp32) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    for (const auto& [rows, n, k, extra] :
         std::vector<std::array<int64_t, 4>>{{4096, 1024, 512, 0},
                                             {513, 129, 257, 0},
                                             {64, 8, 16, 3},
                                             {1, 1, 1, 0},
                                             {2048, 768, 768, 8}}) {
      at::manual_seed(1);
      const at::Tensor dy = at::randn({rows, n + extra}).to(type).narrow(1, 0, n);
      const at::Tensor x = at::randn({rows, k + extra}).to(type).narrow(1, 0, k),
                       start = at::randn({n, k});
      at::Tensor target = start.to(kGpu);
      const at::Tensor dy_gpu =
          at::empty({rows, n + extra}, dy.options().device(kGpu)).narrow(1, 0, n).copy_(dy);
      const at::Tensor x_gpu =
          at::empty({rows, k + extra}, x.options().device(kGpu)).narrow(1, 0, k).copy_(x);
      for (int i = 0; i < 2; ++i) linear_weight_grad(dy_gpu, x_gpu, target, 1.0);
      const at::Tensor product = at::matmul(dy.to(at::kDouble).t(), x.to(at::kDouble));
      EXPECT_LT(relative_error(target.cpu(), start.to(at::kDouble) + 2 * product), 1e-5)
          << c10::toString(type) << " rows " << rows << " n " << n << " k " << k << " extra stride "
          << extra;
      target.fill_(std::numeric_limits<float>::quiet_NaN());
      linear_weight_grad(dy_gpu, x_gpu, target, 0.0);
      EXPECT_LT(relative_error(target.cpu(), product), 1e-5) << "beta = 0 must not read the target";
    }
  }
}

}  // namespace
}  // namespace megatron
