// Fine-tuning against transformers: packed conversations give the same loss and gradients as
// separate ones.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/interop/huggingface/hf_convert.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/models/gpt/gpt_model.h"
#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/setup.h"
#include "megatron/training/tasks/tasks.h"
#include "tests/unit/golden_tensors.h"
#include "tests/unit/models/their_form.h"

namespace megatron {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

const fs::path kGolden = fs::path(MEGATRON_SOURCE_DIR) / "tests" / "golden";
constexpr int64_t kSequence = 24;

// The goldens, and gradients under the names of transformers in fp64.
struct Golden {
  std::map<std::string, at::Tensor> tensors;

  Golden()
      : tensors(read_golden_tensors(
            SafetensorsFile((kGolden / "sft" / "golden.safetensors").string()))) {}
  at::Tensor grad(const std::string& name, at::IntArrayRef shape) const {
    return tensors.at("grad/" + name).view(shape);
  }
};

Arguments sft_arguments(const fs::path& cache) {
  Arguments a;
  a.transformer = read_hf_config(kGolden / "hf" / "llama2").config.transformer;
  a.transformer.seq_length = kSequence;
  a.tokenizer.tokenizer_type = "NullTokenizer";
  a.tokenizer.vocab_size = 40;
  a.tokenizer.pad_vocab_size = false;
  a.training.task = "sft";
  a.sft.chat_template = (kGolden / "sft" / "template.jinja").string();
  a.data.train_data_path = {(kGolden / "sft" / "conversations.jsonl").string()};
  a.data.data_cache_path = cache.string();
  a.data.num_workers = 0;
  a.optimizer.lr = 1e-3;
  a.training.micro_batch_size = 2;
  a.training.train_iters = 1;
  a.training.eval_iters = 0;
  a.finalize();
  return a;
}

TEST(Sft, PackedLossAndGradientsAreThoseOfTransformers) {
  at::set_num_threads(1);
  const Golden golden;
  const fs::path cache = fs::path(testing::TempDir()) / "sft_golden_cache";
  fs::remove_all(cache);
  const Arguments arguments = sft_arguments(cache);
  const PretrainTask task = find_task("sft", {});
  const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(arguments.tokenizer);
  const TrainValidTestDatasets datasets = build_datasets(task, arguments, *tokenizer);

  const ParallelGroups groups;
  const HfFolder folder = open_hf_folder(kGolden / "hf" / "llama2");
  GPTModel model(folder.model.config, groups);
  PlainParameterStore store(model, at::kFloat, at::kCPU, /*gradients=*/true);
  std::map<std::string, at::Tensor> grads;
  std::vector<ShardedTensor> wanted;
  model.visit([&](const std::string& name, Parameter& parameter) {
    wanted.push_back(sharded_tensor(parameter, groups, name, parameter.value));
    grads[name] = store.grad(parameter);
  });
  LoadOptions options;
  options.convert_dtype = true;
  folder.checkpoint.load(wanted, options);

  // One epoch: what it leaves of the last micro-batch counts nowhere.
  const int64_t samples = datasets.train->size();
  ASSERT_LT(samples, 14) << "conversations share sequences";
  DataLoaderOptions loading;
  loading.sampler.micro_batch_size = 1;
  loading.num_workers = 0;
  DataLoader loader(datasets.train, loading);
  BatchMaker batches(at::kCPU, groups.cp);
  double loss_sum = 0, weight = 0;
  for (int64_t i = 0; i < samples; ++i) {
    const Batch batch = batches.make(loader.next());
    ForwardContext context;
    context.place = batch.place;
    context.position_ids = batch.find("position_ids");
    context.document_ids = batch.document_ids;
    const StageOutput output = task.forward_step(model, batch, {}, context);
    loss_sum += output.loss.sum.item<double>();
    weight += output.loss.weight.item<double>();
    RecomputeTape().backward(output.loss.sum);
  }
  EXPECT_EQ(weight, golden.tensors.at("counted").item<int64_t>());
  const double expected_loss = golden.tensors.at("loss").item<double>();
  EXPECT_NEAR(loss_sum, expected_loss, 1e-5 * expected_loss);

  const std::vector<HfTensor> tensors = hf_tensors(*folder.model.family, folder.model.config);
  double all = 0;
  for (const HfTensor& tensor : tensors)
    all += golden.grad(tensor.name, tensor.shape).square().sum().item<double>();
  for (const HfTensor& tensor : tensors) {
    const at::Tensor expected = golden.grad(tensor.name, tensor.shape);
    const at::Tensor actual = in_their_form(tensor, grads.at(tensor.ours)).to(at::kDouble);
    EXPECT_LE((actual - expected).norm().item<double>(),
              1e-5 * expected.norm().item<double>() + 1e-8 * std::sqrt(all))
        << tensor.name;
  }
}

std::string usage_error(bool finetune, std::vector<std::string> flags) {
  flags.insert(flags.begin(), finetune ? "finetune" : "pretrain");
  for (const char* flag : {"--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2",
                           "--seq-length", "8", "--micro-batch-size", "1", "--train-iters", "1",
                           "--lr", "1e-3", "--tokenizer-type", "ByteLevelTokenizer", "--mock-data"})
    flags.emplace_back(flag);
  std::vector<const char*> argv;
  for (const std::string& flag : flags) argv.push_back(flag.c_str());
  try {
    const auto parse = finetune ? parse_finetune_arguments : parse_arguments;
    const Arguments a = parse(static_cast<int>(argv.size()), argv.data(), 1);
    return cat("task ", a.training.task, " load ", a.training.load, " pretrained ",
               a.training.pretrained_checkpoint,
               a.training.start == StartChoice::kResumeOrFresh ? " resume-or-fresh" : "",
               a.training.finetune ? " finetune" : "",
               a.data.dataloader_inter_document_masking ? " apart" : "");
  } catch (const UsageError& error) {
    return error.what();
  }
}

TEST(Sft, Flags) {
  const std::string base = (kGolden / "hf" / "llama2").string();
  EXPECT_EQ(usage_error(false, {}), "task gpt load  pretrained ");
  EXPECT_EQ(usage_error(false, {"--sft"}), "task sft load  pretrained  apart");
  EXPECT_EQ(usage_error(true, {"--start-mode", "fresh"}), "task sft load  pretrained  apart");
  EXPECT_THAT(usage_error(true, {}), HasSubstr("finetune has no model to start from"));
  EXPECT_THAT(usage_error(true, {"--load", base, "--save", base}),
              HasSubstr("finetune would write into the folder it starts from, " + base));
  EXPECT_THAT(usage_error(false, {"--chat-template", "x"}), HasSubstr("has no effect on text"));
  EXPECT_THAT(usage_error(false, {"--sft", "--eod-mask-loss"}),
              HasSubstr("has no effect on conversations"));
  EXPECT_THAT(usage_error(false, {"--sft", "--chat-template", "x", "--sft-tokenizer-prompt-format",
                                  "identity"}),
              HasSubstr("--chat-template and --sft-tokenizer-prompt-format are both given"));
}

TEST(Sft, FinetuneGoesOnWhereItsFolderHoldsCheckpoints) {
  const std::string base = (kGolden / "hf" / "llama2").string();
  EXPECT_EQ(usage_error(true, {"--load", base, "--save", "/out"}),
            cat("task sft load /out pretrained ", base, " resume-or-fresh apart"));
  EXPECT_EQ(usage_error(true, {"--load", base}), cat("task sft load  pretrained ", base, " apart"));
}

}  // namespace
}  // namespace megatron
