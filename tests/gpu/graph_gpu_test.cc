// Steps with micro-batches as CUDA graphs are bit-identical to eager ones.
#include <gtest/gtest.h>

#include "megatron/tensor/torch.h"
#include "megatron/training/setup.h"
#include "megatron/training/tasks/tasks.h"

namespace megatron {
namespace {

const at::Device kGpu(at::kCUDA, 0);

struct Case {
  const char* name;
  std::vector<std::string> flags;
  bool documents = false;
  int microbatches = 3;
};

Batch random_batch(const Arguments& arguments, int64_t first_sample, bool documents) {
  const int64_t b = arguments.training.micro_batch_size, s = arguments.transformer.seq_length;
  at::Tensor uniform = at::empty({b, s + 1}, at::dtype(at::kFloat).device(kGpu));
  uniform_(uniform, 0.0, 1.0, random_key(7, "tokens"), first_sample, s + 1, 0);
  const at::Tensor text = (uniform * 500).to(at::kLong);
  Batch batch;
  batch.set("tokens", text.slice(1, 0, s).contiguous());
  batch.set("labels", text.slice(1, 1, s + 1).contiguous());
  batch.set("loss_mask", (uniform.slice(1, 0, s) > 0.2).to(at::kFloat).contiguous());
  batch.place.sample = at::arange(first_sample, first_sample + b, batch["tokens"].options());
  batch.place.position = at::arange(s, batch["tokens"].options());
  batch.totals = sequence_totals(batch["loss_mask"], s);
  if (documents) {
    batch.document_ids = (batch.place.position / 24).to(at::kLong).expand({b, s}).contiguous();
    batch.set("position_ids", (batch.place.position % 24).expand({b, s}).contiguous());
  }
  return batch;
}

struct Result {
  std::vector<at::Tensor> losses;
  at::Tensor weights;
};

Result train(const Case& one, bool graphs) {
  std::vector<std::string> words = {"test",
                                    "--num-layers",
                                    "2",
                                    "--hidden-size",
                                    "128",
                                    "--num-attention-heads",
                                    "2",
                                    "--seq-length",
                                    "64",
                                    "--max-position-embeddings",
                                    "64",
                                    "--micro-batch-size",
                                    "2",
                                    "--train-iters",
                                    "8",
                                    "--lr",
                                    "1e-3",
                                    "--bf16",
                                    "--mock-data",
                                    "--tokenizer-type",
                                    "NullTokenizer",
                                    "--vocab-size",
                                    "500",
                                    "--no-gemm-tuning"};
  const std::string batch = one.microbatches == 1 ? "2" : "6";
  words.insert(words.end(), {"--global-batch-size", batch});
  words.insert(words.end(), one.flags.begin(), one.flags.end());
  if (graphs)
    words.insert(words.end(), {"--cuda-graph-impl", "local", "--cuda-graph-warmup-steps", "2"});
  std::vector<const char*> argv;
  for (const std::string& word : words) argv.push_back(word.c_str());
  const Arguments arguments = parse_arguments(static_cast<int>(argv.size()), argv.data(), 1);
  const ParallelGroups groups;
  const PretrainTask task = gpt_task();
  TrainedModel model =
      build_model(task, arguments, {500, 512}, groups, at::kBFloat16, kGpu, StartPoint{});
  Timers timers(0);
  Result result;
  int64_t sample = 0;
  for (int step = 0; step < 6; ++step) {
    const StepOutcome outcome = train_step(
        model, task, step_options(arguments, 0),
        [&] { return random_batch(arguments, std::exchange(sample, sample + 2), one.documents); },
        timers);
    result.losses.push_back(outcome.loss.cpu());
  }
  result.weights = model.chunks.front().store->flat_values().cpu();
  return result;
}

TEST(GraphGpu, LeavesTheBitsOfEagerSteps) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const std::vector<Case> cases = {
      {"gpt, tied, dropout", {"--hidden-dropout", "0.1", "--attention-dropout", "0.1"}},
      {"llama",
       {"--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope",
        "--disable-bias-linear", "--group-query-attention", "--num-query-groups", "1",
        "--untie-embeddings-and-output-weights", "--hidden-dropout", "0", "--attention-dropout",
        "0"}},
      {"documents", {"--hidden-dropout", "0.1", "--attention-dropout", "0"}, true},
      {"full recomputation",
       {"--recompute-granularity", "full", "--recompute-method", "uniform",
        "--recompute-num-layers", "1", "--hidden-dropout", "0.1", "--attention-dropout", "0"}},
      {"selective recomputation",
       {"--recompute-granularity", "selective", "--recompute-modules", "mlp", "layernorm",
        "--hidden-dropout", "0.1", "--attention-dropout", "0"}},
      {"means of means",
       {"--no-calculate-per-token-loss", "--hidden-dropout", "0", "--attention-dropout", "0"}},
      {"loss in parts",
       {"--cross-entropy-fusion-impl", "linear", "--cross-entropy-chunk-tokens", "50",
        "--hidden-dropout", "0", "--attention-dropout", "0"}},
      {"experts",
       {"--num-experts",
        "4",
        "--moe-router-topk",
        "2",
        "--moe-ffn-hidden-size",
        "64",
        "--disable-bias-linear",
        "--swiglu",
        "--hidden-dropout",
        "0",
        "--attention-dropout",
        "0",
        "--moe-router-load-balancing-type",
        "aux_loss",
        "global_aux_loss",
        "--moe-aux-loss-coeff",
        "0.01",
        "0.02",
        "--moe-z-loss-coeff",
        "0.001"}},
      {"experts chosen by sigmoid and bias, shared expert, jitter",
       {"--num-experts",
        "8",
        "--moe-router-topk",
        "2",
        "--moe-ffn-hidden-size",
        "64",
        "--moe-router-score-function",
        "sigmoid",
        "--moe-router-enable-expert-bias",
        "--moe-router-num-groups",
        "4",
        "--moe-router-group-topk",
        "2",
        "--moe-input-jitter-eps",
        "0.1",
        "--moe-shared-expert-intermediate-size",
        "64",
        "--moe-shared-expert-gate",
        "--moe-router-load-balancing-type",
        "seq_aux_loss",
        "--moe-aux-loss-coeff",
        "0.01",
        "--disable-bias-linear",
        "--swiglu",
        "--hidden-dropout",
        "0",
        "--attention-dropout",
        "0"}},
      {"experts, recomputed",
       {"--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "64",
        "--recompute-granularity", "selective", "--recompute-modules", "moe", "layernorm",
        "--moe-aux-loss-coeff", "0.01", "--disable-bias-linear", "--swiglu", "--hidden-dropout",
        "0", "--attention-dropout", "0"}},
      {"latent attention and a further token",
       {"--multi-latent-attention",
        "--q-lora-rank",
        "64",
        "--kv-lora-rank",
        "32",
        "--qk-head-dim",
        "64",
        "--qk-pos-emb-head-dim",
        "32",
        "--v-head-dim",
        "64",
        "--position-embedding-type",
        "rope",
        "--mtp-num-layers",
        "1",
        "--disable-bias-linear",
        "--hidden-dropout",
        "0",
        "--attention-dropout",
        "0"}},
      {"one micro-batch a step", {"--hidden-dropout", "0", "--attention-dropout", "0"}, false, 1},
  };
  for (const Case& one : cases) {
    const Result eager = train(one, /*graphs=*/false), graphs = train(one, /*graphs=*/true);
    for (size_t i = 0; i < eager.losses.size(); ++i)
      EXPECT_TRUE(at::equal(eager.losses[i], graphs.losses[i]))
          << one.name << ", step " << i << ": " << eager.losses[i] << graphs.losses[i];
    EXPECT_FALSE(at::equal(eager.losses[4], eager.losses[5])) << one.name;
    EXPECT_TRUE(at::equal(eager.weights, graphs.weights)) << one.name;
  }
}

}  // namespace
}  // namespace megatron
