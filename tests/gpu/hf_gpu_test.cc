// Hugging Face models on a GPU in fp32, against transformers on a CPU.
#include <gtest/gtest.h>

#include "megatron/tensor/torch.h"
#include "tests/unit/models/hf_golden.h"

namespace megatron {
namespace {

class HfGpu : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  }
  const at::Device gpu_{at::kCUDA, 0};
};

TEST_P(HfGpu, Logits) { expect_hf_logits_on(GetParam(), gpu_); }

TEST_P(HfGpu, GreedyGeneration) { expect_hf_greedy_tokens_on(GetParam(), gpu_); }

TEST_P(HfGpu, Gradients) { expect_hf_gradients_on(GetParam(), gpu_); }

INSTANTIATE_TEST_SUITE_P(Families, HfGpu,
                         testing::ValuesIn(std::vector<std::string>(std::begin(kHfGoldens),
                                                                    std::end(kHfGoldens))),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace megatron
