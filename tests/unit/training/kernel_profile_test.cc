#include "megatron/runtime/kernel_profile.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "megatron/base/files.h"

namespace megatron {
namespace {

constexpr int64_t kMs = 1000000;

TEST(KernelProfile, SumsByNameAndKind) {
  const KernelProfile profile =
      summarize_kernels({{"nvjet_sm90_tst_256x128", 0, 4 * kMs},
                         {"ncclDevKernel_AllReduce", 3 * kMs, 8 * kMs},
                         {"norm_forward", 6 * kMs, 7 * kMs},
                         {"norm_forward", 10 * kMs, 12 * kMs},
                         {"cudnn_generated_fort_native_sdpa_sm90", 12 * kMs, 13 * kMs},
                         {"Memset (Device)", 13 * kMs, 14 * kMs}});
  ASSERT_EQ(profile.kernels.size(), 5u);
  EXPECT_EQ(profile.kernels[0].name, "ncclDevKernel_AllReduce");
  EXPECT_EQ(profile.kernels[2].calls, 2);
  EXPECT_DOUBLE_EQ(profile.total_ms(KernelKind::kGemm), 4);
  EXPECT_DOUBLE_EQ(profile.total_ms(KernelKind::kAttention), 1);
  EXPECT_DOUBLE_EQ(profile.total_ms(KernelKind::kCopy), 1);
  EXPECT_DOUBLE_EQ(profile.total_ms(KernelKind::kOther), 3);
  EXPECT_DOUBLE_EQ(profile.span_ms, 14);
  EXPECT_DOUBLE_EQ(profile.busy_ms, 12);
  EXPECT_DOUBLE_EQ(profile.exposed_communication_ms, 3) << "4 to 6 and 7 to 8";
  ASSERT_EQ(profile.gaps.size(), 1u);
  EXPECT_EQ(profile.gaps[0].after, "ncclDevKernel_AllReduce");
  EXPECT_EQ(profile.gaps[0].before, "norm_forward");
  EXPECT_DOUBLE_EQ(profile.gaps[0].ms, 2);
  EXPECT_NE(kernel_table(profile, 1).find("longest kernels"), std::string::npos);
}

TEST(KernelProfile, CopiesBetweenGpusAreCommunication) {
  EXPECT_EQ(kernel_kind("Memcpy PtoP (Device -> Device)"), KernelKind::kCommunication);
  EXPECT_EQ(kernel_kind("Memcpy DtoD (Device -> Device)"), KernelKind::kCopy);
}

TEST(KernelProfile, TimelineHasARowForEachStream) {
  const std::filesystem::path path = std::filesystem::path(testing::TempDir()) / "timeline.json";
  write_timeline({{"gemm \"a\"", 5 * kMs, 7 * kMs, 7}, {"Memset", 4 * kMs, 5 * kMs, 13}}, 2, path);
  EXPECT_EQ(read_file(path),
            "{\"traceEvents\": [{\"name\": \"gemm \\\"a\\\"\", \"cat\": \"GEMM\", \"ph\": \"X\", "
            "\"pid\": 2, \"tid\": 7, \"ts\": 1000, "
            "\"dur\": 2000}, {\"name\": \"Memset\", \"cat\": \"copies and fills\", \"ph\": \"X\", "
            "\"pid\": 2, \"tid\": 13, \"ts\": 0, "
            "\"dur\": 1000}], \"displayTimeUnit\": \"ms\"}\n");
  std::filesystem::remove(path);
}

TEST(KernelProfile, NothingRan) {
  EXPECT_TRUE(summarize_kernels({}).kernels.empty());
  EXPECT_TRUE(profile_kernels([] {}).empty()) << "no GPU, no kernels";
}

}  // namespace
}  // namespace megatron
