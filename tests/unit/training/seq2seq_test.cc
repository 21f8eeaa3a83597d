// Pairs of texts with a T5 against transformers: samples, loss, accuracy; what is refused.
#include <gtest/gtest.h>

#include <map>

#include "megatron/comm/parallel_groups.h"
#include "megatron/datasets/tuning/text_to_text.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/interop/load_model.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/tasks/tasks.h"
#include "tests/unit/error_of.h"
#include "tests/unit/golden_tensors.h"
#include "tests/unit/parse_line.h"

namespace megatron {
namespace {

const std::string kT5Golden = MEGATRON_SOURCE_DIR "/tests/golden/encoders/t5_v1_1";

std::map<std::string, at::Tensor> golden_tensors() {
  return read_golden_tensors(SafetensorsFile(kT5Golden + "/golden.safetensors"));
}

// The golden's texts without the padding, each sample a row.
TextToTextDataset golden_rows(const std::map<std::string, at::Tensor>& golden) {
  const at::Tensor &ids = golden.at("input_ids"), &labels = golden.at("labels");
  const auto row = [](const at::Tensor& of, const at::Tensor& counted) {
    const at::Tensor kept = of.masked_select(counted).to(at::kInt);
    return std::vector<int32_t>(kept.const_data_ptr<int32_t>(),
                                kept.const_data_ptr<int32_t>() + kept.numel());
  };
  std::vector<TextToTextTokens> rows;
  for (int64_t i = 0; i < ids.size(0); ++i)
    rows.push_back(
        {row(ids[i], golden.at("attention_mask")[i] > 0), row(labels[i], labels[i] >= 0)});
  return {std::move(rows), 0, {.lengths = {ids.size(1), labels.size(1)}}};
}

template <class T>
at::Tensor column(const Dataset& rows, const char* name, int64_t sample) {
  const std::vector<T> values = rows.sample(sample).get<T>(name);
  return at::tensor(std::vector<int64_t>(values.begin(), values.end()), at::kLong);
}

// Those without a hole in the text, where the golden has the sample as it is.
TEST(Seq2seq, SamplesAreThoseOfTransformers) {
  const auto golden = golden_tensors();
  const TextToTextDataset rows = golden_rows(golden);
  const auto expect = [&](const char* name, const at::Tensor& actual, const at::Tensor& expected) {
    EXPECT_TRUE(at::equal(actual, expected.to(at::kLong))) << name << '\n' << actual << expected;
  };
  const at::Tensor& labels = golden.at("labels");
  for (int64_t i = 1; i < rows.size(); ++i) {
    const at::Tensor counted = labels[i] >= 0;
    expect("text_enc", column<int64_t>(rows, "text_enc", i), golden.at("input_ids")[i]);
    expect("enc_mask", column<uint8_t>(rows, "enc_mask", i), golden.at("attention_mask")[i]);
    expect("labels", column<int64_t>(rows, "labels", i), labels[i].clamp_min(-1));
    expect("loss_mask", column<float>(rows, "loss_mask", i), counted);
    expect("dec_mask", column<uint8_t>(rows, "dec_mask", i), counted);
    // Behind the text the decoder reads what the golden has there: zeros, but for the last token.
    expect("text_dec", column<int64_t>(rows, "text_dec", i) * counted,
           golden.at("decoder_input_ids")[i] * counted);
  }
}

TEST(Seq2seq, LossAndAccuracyAreThoseOfTransformers) {
  const at::NoGradGuard no_grad;
  const auto golden = golden_tensors();
  const ParallelGroups groups;
  LoadModelRequest request;
  request.load = kT5Golden;
  request.dtype = at::kFloat;
  request.tokenizer_required = false;
  const LoadedModel loaded = load_model(request, groups);
  const at::Tensor labels = golden.at("labels").to(at::kLong);
  Batch batch;
  batch.set("text_enc", golden.at("input_ids").to(at::kLong));
  batch.set("enc_mask", golden.at("attention_mask").to(at::kLong));
  batch.set("text_dec", golden.at("decoder_input_ids").to(at::kLong));
  batch.set("dec_mask", (labels >= 0).to(at::kLong));
  batch.set("labels", labels.clamp_min(-1));
  batch.set("loss_mask", (labels >= 0).to(at::kFloat));
  ForwardContext context;
  context.place.position = at::arange(batch["text_enc"].size(1));
  context.place.sample = at::arange(labels.size(0));
  batch.place = context.place;
  const PretrainTask task = find_task("seq2seq", Arguments());
  const StageOutput output = task.forward_step(*loaded.model, batch, {}, context);
  const at::Tensor counted = labels >= 0;
  const auto tokens = counted.sum().item<double>();
  EXPECT_EQ(output.loss.weight.item<double>(), tokens);
  EXPECT_NEAR(output.loss.sum.item<double>() / tokens, golden.at("loss").item<double>(), 1e-5);
  const at::Tensor hits = (golden.at("logits").argmax(2) == labels).logical_and(counted);
  EXPECT_GT(hits.sum().item<double>(), 0);
  EXPECT_EQ(output.metrics.item<double>(), hits.sum().item<double>());
}

TEST(Seq2seq, NamesFlagsThatDoNotFit) {
  const auto error = [](const char* flags) {
    return error_of([&] {
      parse_line(cat("pretrain --task seq2seq --mock-data --tokenizer-type NullTokenizer "
                     "--vocab-size 99 --num-layers 2 --hidden-size 8 --num-attention-heads 2 "
                     "--seq-length 16 --micro-batch-size 2 --train-iters 1 --lr 1e-2 --device cpu ",
                     flags),
                 2);
    });
  };
  EXPECT_EQ(error("--decoder-seq-length 8"), "");
  const auto refused = [&](const char* flags, const std::string& message) {
    EXPECT_NE(error(flags).find(message), std::string::npos) << error(flags);
  };
  refused("",
          "--decoder-seq-length is not given\nhint: the tokens of the longest target, and its end");
  refused("--decoder-seq-length 8 --mask-prob 0.3",
          "--mask-prob has no effect with --task seq2seq");
  refused("--decoder-seq-length 8 --bert-choices 3",
          "--bert-choices has no effect with --task seq2seq");
  refused("--decoder-seq-length 8 --reset-attention-mask",
          "--reset-position-ids, --reset-attention-mask or --eod-mask-loss has no effect with "
          "--task seq2seq");
  refused("--decoder-seq-length 8 --context-parallel-size 2",
          "ring attention with --task seq2seq (--cp-comm-type p2p or a2a+p2p) is not built");
  EXPECT_EQ(error("--decoder-seq-length 8 --context-parallel-size 2 --cp-comm-type all_gather"),
            "");
}

}  // namespace
}  // namespace megatron
