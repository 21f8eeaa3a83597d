// The equivalence matrix: every layout trains the model that one rank trains, in fp64 and in fp32.
#include "megatron/training/equivalence.h"

#include <gtest/gtest.h>

#include <map>
#include <sstream>

#include "layouts.h"
#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/prove.h"
#include "megatron/training/tasks/tasks.h"

namespace megatron {
namespace {

constexpr int kSteps = 5;
constexpr const char* kCommon =
    "--tokenizer-type NullTokenizer --vocab-size 101 --mock-data --num-workers 0 --micro-batch-size 2 --global-batch-size 24 "
    "--train-iters 5 --lr 1e-2 --clip-grad 1.0 --weight-decay 0.1 --adam-eps 1e-3 --init-method-std 0.2 --eval-iters 0 --seed 7 "
    "--device cpu";

Arguments parse(const std::string& flags, int world_size) {
  std::istringstream in("pretrain " + flags);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  std::vector<const char*> argv;
  for (const std::string& word : words) argv.push_back(word.c_str());
  return parse_arguments(static_cast<int>(argv.size()), argv.data(), world_size);
}

std::string first_differences(const std::vector<Comparison>& comparisons) {
  std::string text;
  int shown = 0;
  for (const Comparison& c : comparisons)
    if (!c.holds() && ++shown <= 8) text += cat("  ", c.name, ": ", c.difference, " > ", c.allowed, "\n");
  return text + (shown > 8 ? cat("  and ", shown - 8, " more\n") : "");
}

class Layouts : public testing::TestWithParam<LayoutRow> {
 protected:
  void check(at::ScalarType dtype, const char* optimizer, double rtol) {
    const LayoutRow& row = GetParam();
    const std::string model = model_flags(row.model);
    const Arguments arguments = parse(cat(kCommon, " ", optimizer, " ", model, " ", row.flags), row.world_size);
    const Arguments one = serial_arguments(arguments);
    static std::map<std::string, TrainingTrace> references;  // several layouts share one
    Arguments key_arguments = one;
    TrainingTrace& reference = references[cat(dtype, resolved_yaml(key_arguments))];
    const PretrainTask task = gpt_task();
    if (reference.steps.empty()) reference = trace_training(task, one, dtype, kSteps);
    const TrainingTrace trace = trace_training(task, arguments, dtype, kSteps);
    EXPECT_EQ(reference.faults, std::vector<std::string>());
    EXPECT_EQ(trace.faults, std::vector<std::string>());
    const std::vector<Comparison> comparisons = compare_traces(trace, reference, rtol, /*weight_allowance=*/0);
    EXPECT_GT(comparisons.size(), 100u);
    EXPECT_EQ(first_differences(comparisons), "");
  }
};

TEST_P(Layouts, Fp64) { check(at::kDouble, "--optimizer adam", 1e-10); }
// Adam's first steps divide by little more than rounding, which several steps then blow up; SGD does not.
TEST_P(Layouts, Fp32) { check(at::kFloat, "--optimizer sgd", 1e-5); }

INSTANTIATE_TEST_SUITE_P(Matrix, Layouts, testing::ValuesIn(layout_rows().begin(), layout_rows().end()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace megatron
