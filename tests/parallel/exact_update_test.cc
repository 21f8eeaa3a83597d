// What follows the backward: layouts that sum gradients in bf16, keep narrow states or scale fp16
// losses update the weights as one rank does, to the bit.
#include "megatron/training/proving/exact_update.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <span>
#include <string_view>
#include <tuple>

#include "against_one_rank.h"
#include "layouts.h"
#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/proving/prove.h"
#include "megatron/training/tasks/tasks.h"

namespace megatron {
namespace {

constexpr const char* kCommon =
    "--tokenizer-type NullTokenizer --vocab-size 101 --make-vocab-size-divisible-by 8 --mock-data "
    "--num-workers 0 --micro-batch-size 1 --global-batch-size 12 --train-iters 6 --lr 1e-2 "
    "--weight-decay 0.1 --init-method-std 0.2 --eval-iters 0 --seed 7 --device cpu";

// Rows of the equivalence matrix, and more flags.
struct Layout {
  const char* row;
  const char* more = "";
};
void PrintTo(const Layout& layout, std::ostream* out) { *out << layout.row << layout.more; }

constexpr Layout kLayouts[] = {
    {"dp2", "--overlap-grad-reduce --ddp-bucket-size 5000"},
    {"dp2_zero1_frozen"},
    {"dp4_zero1_overlap"},
    {"dp4_zero1_instances2"},
    {"dp2_zero2_buckets"},
    {"dp4_zero1_instances2", "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads"},
    {"dp2_zero3_lora"},
    {"dp4_zero3_instances2"},
    {"tp3_sp_lora_parts"},
    {"pp2_vocab"},
    {"pp2_vpp2_dp3_zero1"},
    {"pp2_zbv_dp2_zero1", "--optimizer-cpu-offload"},
    {"cp2_dp2_dynamic_cp_zero1"},
    {"cp2_means"},
    {"tp2_pp2_dp2"},
    {"pp2_mtp"},  // stages use the tied table once, and twice or more
};

struct Types {
  const char* name;
  const char* flags;
};
void PrintTo(const Types& types, std::ostream* out) { *out << types.flags; }

#define NARROW "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "
constexpr Types kTypes[] = {
    {"Bf16", "--bf16"},
    {"SumsInBf16", "--bf16 --grad-reduce-in-bf16 " NARROW "--main-params-dtype bf16"},
    {"Fp16", "--fp16"},
    {"Fp32", NARROW},
};

Arguments arguments_of(const Layout& layout, const char* types) {
  for (const LayoutRow& row : layout_rows())
    if (row.name == std::string_view(layout.row))
      return parse_run(cat(kCommon, " ", model_flags(row.model), " --hidden-size 24 ", row.flags,
                           " ", layout.more, " ", types),
                       row.world_size);
  throw_error(cat("no row ", layout.row));
}

class ExactUpdate : public testing::TestWithParam<std::tuple<Layout, Types>> {};

TEST_P(ExactUpdate, IsThatOfOneRank) {
  const auto& [layout, types] = GetParam();
  const Proof proof = prove_updates(gpt_task(), arguments_of(layout, types.flags));
  EXPECT_EQ(failures({proof}), "");
  EXPECT_EQ(proof.lines.size(), 6u);
}

std::string name_of_case(const testing::TestParamInfo<std::tuple<Layout, Types>>& info) {
  const auto& [layout, types] = info.param;
  return cat(layout.row, *layout.more == '\0' ? "_" : "_more_", types.name);
}
INSTANTIATE_TEST_SUITE_P(Layouts, ExactUpdate,
                         testing::Combine(testing::ValuesIn(kLayouts), testing::ValuesIn(kTypes)),
                         name_of_case);

// In which only an encoder has infinite gradients: all ranks skip these steps and lower the loss
// scale, those of stages without the encoder, too.
struct EncoderOverflow {
  const char* row;
  const char* encoder;
};
void PrintTo(const EncoderOverflow& of, std::ostream* out) { *out << of.row << " " << of.encoder; }

constexpr EncoderOverflow kEncoderOverflows[] = {
    {"tp4_sp_llava", "vision_model."},          {"dp2_zero3_llava", "vision_model."},
    {"cp2_pp2_vpp2_llava", "vision_model."},    {"tp2_sp_pp2_dp2_llava", "vision_projection."},
    {"pp2_tp2_sp_qwen2_audio", "audio_model."}, {"v_pp3_tp2_sp_image_and_sound", "audio_model."},
    {"v_pp4_llava", "vision_model."},
};

LayoutRow row_of(std::string_view name) {
  for (const std::span<const LayoutRow> rows : {vision_rows(), audio_rows()})
    for (const LayoutRow& row : rows)
      if (row.name == name) return row;
  throw_error(cat("no row ", name));
}

class EncoderOverflows : public testing::TestWithParam<EncoderOverflow> {};

TEST_P(EncoderOverflows, SkipStepsOfAllRanks) {
  const auto& [name, encoder] = GetParam();
  const LayoutRow row = row_of(name);
  const Arguments layout = exact_update_arguments(parse_run(
      cat(kCommon, " ", model_flags(row.model), " ", row.flags, " --fp16"), row.world_size));
  const PretrainTask task = find_task(layout);
  const auto trace_of = [&, encoder = encoder](const Arguments& arguments) {
    TraceOptions options{at::kHalf, kUpdateSteps, /*updates=*/true, at::kHalf};
    options.gradients = [&](TrainedModel& model, const StepOptions& step, int index) {
      return report_exact_gradients(model, arguments, step, index, encoder);
    };
    return trace_training(task, arguments, options);
  };
  const TrainingTrace one = trace_of(serial_arguments(layout)), all = trace_of(layout);
  std::vector<double> skips;
  for (const TracedStep& step : one.steps) {
    skips.push_back(step.number("skip"));
    int64_t infinite = 0;
    for (const auto& [parameter, grad] : step.grads) {
      if (!at::isinf(grad).any().item<bool>()) continue;
      ++infinite;
      EXPECT_TRUE(parameter.starts_with(encoder)) << parameter;
    }
    EXPECT_EQ(infinite, static_cast<int64_t>(skips.back()));
  }
  EXPECT_EQ(skips, (std::vector<double>{0, 0, 1, 0, 1, 0}));
  EXPECT_THAT(all.faults, testing::IsEmpty());
  for (const Comparison& of : compare_traces(all, one, 0)) EXPECT_TRUE(of.holds()) << of.name;
}

INSTANTIATE_TEST_SUITE_P(Layouts, EncoderOverflows, testing::ValuesIn(kEncoderOverflows),
                         [](const auto& info) { return cat(info.param.row, "_", info.index); });

// What the steps of the proof are.
TEST(ExactUpdateSteps, SkipOverflowAndChangeTheLossScale) {
  const Arguments arguments = exact_update_arguments(arguments_of({"dp4_zero1"}, "--fp16"));
  TraceOptions options{at::kHalf, kUpdateSteps, /*updates=*/true, at::kHalf};
  options.gradients = [&](TrainedModel& model, const StepOptions& step, int index) {
    return report_exact_gradients(model, arguments, step, index);
  };
  const TrainingTrace trace = trace_training(gpt_task(), arguments, options);
  std::vector<double> skips, scales;
  int clipped = 0;
  for (const TracedStep& step : trace.steps) {
    skips.push_back(step.number("skip"));
    scales.push_back(step.number("loss_scale"));
    const double clip = step.number("clip factor");
    clipped += 0 < clip && clip < 1;
    int64_t infinite = 0, zeros = 0;
    for (const auto& [name, grad] : step.grads) {
      infinite += at::isinf(grad).sum().item<int64_t>();
      zeros += (grad == 0).sum().item<int64_t>();
    }
    EXPECT_EQ(infinite, static_cast<int64_t>(skips.back()));
    EXPECT_GT(zeros, 1000);
  }
  EXPECT_EQ(skips, (std::vector<double>{0, 0, 1, 0, 1, 0}));
  EXPECT_EQ(scales, (std::vector<double>{1024, 2048, 2048, 2048, 1024, 1024}));
  EXPECT_EQ(clipped, 2);
}

}  // namespace
}  // namespace megatron
