// Every row of cases.cc on the CPU: outputs and gradients against ATen compositions in fp64, and
// the same bits on one and on three threads. `kernel_test --perf [filter]` times the large rows
// instead.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>

#include "megatron/tensor/torch.h"
#include "tests/kernels/cases.h"

namespace megatron {
namespace {

Tensors in_fp64(const Tensors& inputs) {
  Tensors wide;
  for (const at::Tensor& t : inputs) wide.push_back(t.is_floating_point() ? t.to(at::kDouble) : t);
  return wide;
}

class Kernel : public ::testing::TestWithParam<KernelCase> {};

TEST_P(Kernel, MatchesAten) {
  const KernelCase& row = GetParam();
  const Tensors inputs = row.inputs();
  const Tensors got = run_on(row, inputs, at::kCPU), expected = row.reference(in_fp64(inputs));
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_LT(relative_error(got[i], expected[i]), row.tolerance)
        << "output " << i << " of " << row.name;
  }
}

TEST_P(Kernel, DoesNotDependOnThreads) {
  const KernelCase& row = GetParam();
  if (row.name.starts_with("linear")) GTEST_SKIP() << "matrix products are the BLAS library's";
  const Tensors inputs = row.inputs();
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const Tensors one = run_on(row, inputs, at::kCPU);
  at::set_num_threads(3);
  const Tensors three = run_on(row, inputs, at::kCPU);
  at::set_num_threads(threads);
  for (size_t i = 0; i < one.size(); ++i)
    EXPECT_TRUE(at::equal(one[i], three[i])) << "output " << i;
}

INSTANTIATE_TEST_SUITE_P(Cases, Kernel, ::testing::ValuesIn(kernel_cases(false)),
                         [](const auto& info) { return info.param.name; });

// CPU seconds of this thread, so that other processes do not count.
double thread_seconds() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double seconds_of(const std::function<void()>& body) {
  body();
  double best = 1e300;
  for (int i = 0; i < 5; ++i) {
    const double start = thread_seconds();
    body();
    best = std::min(best, thread_seconds() - start);
  }
  return best;
}

// On one thread. The ratio is eager ATen's time over ours.
void print_times(const char* filter) {
  at::set_num_threads(1);
  std::printf("%-48s %10s %10s %10s %8s\n", "row", "ms", "GB/s", "ATen ms", "ratio");
  for (const KernelCase& row : kernel_cases(true)) {
    if (filter != nullptr && row.name.find(filter) == std::string::npos) continue;
    const Tensors inputs = row.inputs();
    const auto& aten = row.eager ? row.eager : row.reference;
    const double ours = seconds_of([&] { row.run(inputs); }),
                 theirs = seconds_of([&] { aten(inputs); });
    std::printf("%-48s %10.3f %10.1f %10.3f %8.2f\n", row.name.c_str(), ours * 1e3,
                static_cast<double>(row.bytes) / ours / 1e9, theirs * 1e3, theirs / ours);
  }
}

}  // namespace
}  // namespace megatron

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--perf") == 0) {
    megatron::print_times(argc > 2 ? argv[2] : nullptr);
    return 0;
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
