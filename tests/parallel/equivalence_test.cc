// The equivalence matrix: every layout computes what one rank computes, in fp64, and one of four in
// fp32; with MEGATRON_MATRIX=whole (`make matrix`) all of them in both, and some more. With
// MEGATRON_PROVED_ROWS=1 rows with images and sounds are shrunk and proved, too, as by `megatron
// prove`; MEGATRON_PROVED_ROWS=thorough is its --thorough.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string_view>
#include <vector>

#include "against_one_rank.h"
#include "layouts.h"
#include "megatron/base/check.h"
#include "megatron/training/proving/prove.h"
#include "megatron/training/tasks/tasks.h"

namespace megatron {
namespace {

constexpr int kSteps = 5;
constexpr const char* kCommon =
    "--tokenizer-type NullTokenizer --vocab-size 101 --make-vocab-size-divisible-by 8 --mock-data "
    "--num-workers 0 --micro-batch-size 2 "
    "--train-iters 5 --lr 1e-2 --clip-grad 1.0 --weight-decay 0.1 --adam-eps 1e-3 "
    "--init-method-std 0.2 --eval-iters 0 --seed 7 "
    "--device cpu";

// The flags of a row, with as few micro-batches as show what its layout does with several: each is
// time, on every rank.
std::string flags_of(const LayoutRow& row, const char* more = "") {
  constexpr int64_t kSamples = 24, kFewSamples = 12;
  const std::string flags = cat(kCommon, " ", more, " ", model_flags(row.model), " ", row.flags);
  const auto with = [&](int64_t samples) { return cat(flags, " --global-batch-size ", samples); };
  const Arguments all = parse_run(with(kSamples), row.world_size);
  const int64_t together = all.data_parallel_size() * all.training.micro_batch_size,
                microbatches = kFewSamples / together,
                stages = all.parallel.pipeline_model_parallel_size;
  const bool few = kFewSamples % together == 0 && microbatches % stages == 0 &&
                   microbatches >= 2 * stages && !all.encoder_ranks().any();
  return with(few ? kFewSamples : kSamples);
}

class Layouts : public testing::TestWithParam<LayoutRow> {
 protected:
  void check(c10::ScalarType dtype, const char* optimizer, double rtol) {
    const LayoutRow& row = GetParam();
    const Arguments arguments = parse_run(flags_of(row, optimizer), row.world_size);
    EXPECT_EQ(differences_from_one_rank(arguments, dtype, rtol, kSteps, row.task), "");
  }
};

TEST_P(Layouts, Fp64) { check(c10::ScalarType::Double, "--optimizer adam", 1e-10); }

class RoundedLayouts : public Layouts {};
// Adam's first steps divide by little more than rounding, which several steps then blow up; SGD
// does not.
TEST_P(RoundedLayouts, Fp32) { check(c10::ScalarType::Float, "--optimizer sgd", 1e-5); }

bool is_whole() {
  const char* wanted = std::getenv("MEGATRON_MATRIX");
  return wanted != nullptr && std::string_view(wanted) == "whole";
}

// Rows of the whole matrix alone.
std::vector<LayoutRow> more_rows(std::span<const LayoutRow> rows) {
  return is_whole() ? std::vector<LayoutRow>(rows.begin(), rows.end()) : std::vector<LayoutRow>();
}

std::vector<LayoutRow> rows_in_fp32(std::span<const LayoutRow> rows) {
  const size_t every = is_whole() ? 1 : 4;
  std::vector<LayoutRow> taken;
  for (size_t i = 0; i < rows.size(); i += every) taken.push_back(rows[i]);
  return taken;
}

// Micro-batches are computed in the same bits on any stage and data rank; of their gradients the
// order of the sum differs.
class QuantizedLayouts : public testing::TestWithParam<LayoutRow> {};

TEST_P(QuantizedLayouts, Bf16) {
  const LayoutRow& row = GetParam();
  EXPECT_EQ(
      differences_from_one_rank(parse_run(flags_of(row), row.world_size), c10::ScalarType::BFloat16,
                                1e-5, kSteps, row.task, /*updates=*/false),
      "");
}

std::string_view proved_rows() {
  const char* wanted = std::getenv("MEGATRON_PROVED_ROWS");
  return wanted == nullptr ? "" : wanted;
}

// Each takes seconds: none unless they are asked for.
std::vector<LayoutRow> rows_to_prove(std::span<const LayoutRow> rows) {
  return proved_rows().empty() ? std::vector<LayoutRow>()
                               : std::vector<LayoutRow>(rows.begin(), rows.end());
}

class ProvedRows : public testing::TestWithParam<LayoutRow> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ProvedRows);

TEST_P(ProvedRows, Hold) {
  constexpr int kProvedSteps = 3;
  const LayoutRow& row = GetParam();
  const auto start = std::chrono::steady_clock::now();
  const Arguments whole = parse_run(flags_of(row), row.world_size);
  const Shrunk shrunk = shrink(whole, /*max_axis=*/4, kProvedSteps);
  const std::vector<Proof> proofs =
      prove(find_task(whole), shrunk.arguments, kProvedSteps, proved_rows() == "thorough");
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::printf("%s, %lld ranks: %.1f s\n", row.name,
              static_cast<long long>(shrunk.arguments.world_size), seconds.count());
  for (const std::string& lost : shrunk.lost) std::printf("  not proved: %s\n", lost.c_str());
  for (const Proof& proof : proofs)
    for (const std::string& what : proof.not_proved)
      std::printf("  not proved: %s\n", what.c_str());
  EXPECT_EQ(proofs.size(), 3u);
  EXPECT_EQ(failures(proofs), "");
}

INSTANTIATE_TEST_SUITE_P(Vision, ProvedRows, testing::ValuesIn(rows_to_prove(vision_rows())),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(Audio, ProvedRows, testing::ValuesIn(rows_to_prove(audio_rows())),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(Matrix, RoundedLayouts, testing::ValuesIn(rows_in_fp32(layout_rows())),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(Experts, RoundedLayouts, testing::ValuesIn(rows_in_fp32(expert_rows())),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(Encoders, RoundedLayouts, testing::ValuesIn(rows_in_fp32(encoder_rows())),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(Hybrids, RoundedLayouts, testing::ValuesIn(rows_in_fp32(hybrid_rows())),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(Hybrids, Layouts,
                         testing::ValuesIn(hybrid_rows().begin(), hybrid_rows().end()),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(MoreHybrids, Layouts, testing::ValuesIn(more_rows(more_hybrid_rows())),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(MoreHybrids, RoundedLayouts,
                         testing::ValuesIn(more_rows(more_hybrid_rows())),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(MoreEncoders, Layouts, testing::ValuesIn(more_rows(more_encoder_rows())),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(MoreEncoders, RoundedLayouts,
                         testing::ValuesIn(more_rows(more_encoder_rows())),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(Vision, RoundedLayouts, testing::ValuesIn(rows_in_fp32(vision_rows())),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(Vision, Layouts,
                         testing::ValuesIn(vision_rows().begin(), vision_rows().end()),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(Audio, Layouts,
                         testing::ValuesIn(audio_rows().begin(), audio_rows().end()),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(Encoders, Layouts,
                         testing::ValuesIn(encoder_rows().begin(), encoder_rows().end()),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(Experts, Layouts,
                         testing::ValuesIn(expert_rows().begin(), expert_rows().end()),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(Matrix, QuantizedLayouts,
                         testing::ValuesIn(quantized_rows().begin(), quantized_rows().end()),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(Experts, QuantizedLayouts,
                         testing::ValuesIn(quantized_expert_rows().begin(),
                                           quantized_expert_rows().end()),
                         [](const auto& info) { return std::string(info.param.name); });
INSTANTIATE_TEST_SUITE_P(Matrix, Layouts,
                         testing::ValuesIn(layout_rows().begin(), layout_rows().end()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace megatron
