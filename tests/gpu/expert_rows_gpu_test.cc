// Rates of what layers of experts do between their products. That these kernels are right is shown
// by kernel_gpu_test.cc.
#include <gtest/gtest.h>

#include <cstdio>

#include "megatron/tensor/experts/expert_rows.h"
#include "megatron/tensor/experts/weighted_activation.h"
#include "megatron/tensor/torch.h"
#include "tests/gpu/timing.h"

namespace megatron {
namespace {

const at::Device kGpu(at::kCUDA, 0);

struct Shape {
  int64_t tokens, experts, topk, hidden, ffn;
};

// One work against a copy of as many bytes as it cannot avoid to move.
void print_rate(const Shape& shape, const char* what, int64_t elements,
                const std::function<void()>& work) {
  const at::Tensor from = at::empty({elements / 2}, at::dtype(at::kBFloat16).device(kGpu));
  at::Tensor to = at::empty_like(from);
  const std::vector<double> ms = milliseconds(to, {[&] { to.copy_(from); }, work});
  std::printf("%ld tokens, %ld of %ld experts, %-24s %.3f ms, copy %.3f ms: %3.0f%%\n",
              static_cast<long>(shape.tokens), static_cast<long>(shape.topk),
              static_cast<long>(shape.experts), what, ms[1], ms[0], 100 * ms[0] / ms[1]);
}

// Prints rates; no bound, the clock of a machine is its own.
TEST(ExpertRowsGpu, Rates) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  for (const Shape& s : {Shape{8192, 8, 2, 2048, 7168}, Shape{8192, 128, 8, 2048, 768}}) {
    const auto options = at::dtype(at::kBFloat16).device(kGpu);
    const int64_t rows = s.tokens * s.topk;
    const at::Tensor x = at::randn({s.tokens, s.hidden}, options);
    const at::Tensor choices =
        std::get<1>(at::randn({s.tokens, s.experts}, options).topk(s.topk)).to(at::kInt);
    const ExpertOrder order = order_by_expert(choices, 0, s.experts);
    const at::Tensor moved = gather_rows(x, order.choices, s.topk);
    const at::Tensor fc1 = at::randn({rows, 2 * s.ffn}, options),
                     dy = at::randn({rows, s.ffn}, options),
                     weights = at::rand({rows}, options.dtype(at::kFloat));
    print_rate(s, "permute", s.tokens * s.hidden * (1 + s.topk),
               [&] { spread_rows(x, order.rows); });
    print_rate(s, "permute, as a gather", s.tokens * s.hidden * (1 + s.topk),
               [&] { gather_rows(x, order.choices, s.topk); });
    print_rate(s, "combine", s.tokens * s.hidden * (1 + s.topk),
               [&] { sum_rows(moved, order.rows); });
    print_rate(s, "activation", 3 * rows * s.ffn, [&] { weighted_activation(fc1, weights, {}); });
    print_rate(s, "activation, backward", 5 * rows * s.ffn,
               [&] { weighted_activation_backward(dy, fc1, weights, {}, {}); });
    print_rate(s, "order", 4 * rows, [&] { order_by_expert(choices, 0, s.experts); });
  }
}

}  // namespace
}  // namespace megatron
