#include "megatron/reporting/flops.h"

#include <gtest/gtest.h>

namespace megatron {
namespace {

TEST(Flops, PeakIsThatOfTheLongestMatchingName) {
  EXPECT_EQ(peak_bf16_flops("NVIDIA H200"), 989e12);
  EXPECT_EQ(peak_bf16_flops("NVIDIA H100 PCIe"), 756e12);
  EXPECT_EQ(peak_bf16_flops("NVIDIA L40S"), 362e12);
  EXPECT_EQ(peak_bf16_flops("abacus"), 0);
}

}  // namespace
}  // namespace megatron
