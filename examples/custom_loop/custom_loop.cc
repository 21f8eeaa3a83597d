// A training loop of one's own, written only on the library: data, model, optimizer, loss,
// checkpoint, text.
//
//   custom_loop text.txt [steps]
//
// Trains a small byte-level GPT on a file and lets it write.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/dist_checkpointing/save.h"
#include "megatron/distributed/distributed_data_parallel.h"
#include "megatron/inference/generator.h"
#include "megatron/models/gpt/gpt_model.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/recompute.h"
#include "megatron/optimizer/optimizer.h"
#include "megatron/tensor/torch.h"
#include "megatron/tokenizers/tokenizer.h"

namespace {

using namespace megatron;

constexpr int64_t kBatch = 8, kSequence = 128;

ModelConfig model_config(const Tokenizer& tokenizer) {
  ModelConfig config;
  TransformerConfig& shape = config.transformer;
  shape.num_layers = 2;
  shape.hidden_size = 128;
  shape.num_attention_heads = 4;
  shape.seq_length = kSequence;
  shape.position_embedding_type = PositionEmbedding::kRope;
  shape.normalization = Normalization::kRMSNorm;
  shape.swiglu = true;
  shape.add_bias_linear = false;
  shape.hidden_dropout = shape.attention_dropout = 0.0;
  shape.finalize();
  Violations violations;
  shape.validate(violations);
  violations.throw_if_any();
  config.vocab_size = tokenizer.vocab_size();
  config.padded_vocab_size = padded_vocab_size(config.vocab_size, 128, 1);
  return config;
}

// Batch number `step`: windows of the text at places that depend on the step alone, [kBatch,
// kSequence + 1].
at::Tensor batch_of(const at::Tensor& text, int64_t step) {
  std::vector<at::Tensor> rows;
  for (int64_t i = 0; i < kBatch; ++i) {
    at::Tensor draw = at::empty({1}, at::kDouble);
    uniform_(draw, 0.0, 1.0, random_key(1234, "data"), step * kBatch + i, 1, 0);
    const auto last = static_cast<double>(text.size(0) - kSequence - 1);
    rows.push_back(text.narrow(0, static_cast<int64_t>(draw.item<double>() * last), kSequence + 1));
  }
  return at::stack(rows);
}

void save(GPTModel& model, const ParallelGroups& groups, int64_t step) {
  SaveRequest request;
  request.root = "custom_loop_checkpoints";
  request.iteration = step;
  request.replace_existing = true;
  model.visit([&](const std::string& name, Parameter& parameter) {
    request.tensors.push_back(sharded_tensor(parameter, groups, name, parameter.value));
  });
  std::printf("saved %s\n", save_checkpoint(request).directory.c_str());
}

void train(const std::string& path, int64_t steps) {
  TokenizerConfig bytes;
  bytes.tokenizer_type = "ByteLevelTokenizer";
  const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(bytes);
  const std::vector<int32_t> ids = tokenizer->encode(read_file(path));
  MEGATRON_CHECK(static_cast<int64_t>(ids.size()) > kSequence + 1, path, " has ", ids.size(),
                 " tokens, expected more than ", kSequence + 1);
  const at::Tensor text = at::tensor(ids, at::dtype(at::kInt)).to(at::kLong);

  const ParallelGroups groups;
  GPTModel model(model_config(*tokenizer), groups);
  DistributedDataParallel store(model, groups, at::kFloat, at::kCPU);
  initialize_parameters(model, 1234, groups);
  OptimizerConfig options;
  options.lr = 2e-3;
  options.lr_decay_style = LrDecayStyle::kCosine;
  options.lr_warmup_iters = std::min<int64_t>(20, steps / 2);
  Optimizer optimizer(options, make_schedule(options, {steps, std::nullopt, kBatch}), store);

  for (int64_t step = 0; step < steps; ++step) {
    const at::Tensor rows = batch_of(text, step);
    const at::Tensor tokens = rows.slice(1, 0, kSequence).contiguous(),
                     labels = rows.slice(1, 1).contiguous();
    ForwardContext context;
    context.training = true;
    context.place.sample = at::arange(step * kBatch, (step + 1) * kBatch, at::kLong);
    context.place.position = at::arange(kSequence, at::kLong);

    store.zero_grad();
    const Loss loss = model.loss(tokens, labels, at::ones({kBatch, kSequence}), context);
    RecomputeTape().backward(loss.sum);
    store.finish_grad_sync();
    optimizer.step(loss.weight, kBatch);
    if (step % 10 == 0 || step + 1 == steps) {
      const StepState state = optimizer.read_state();
      std::printf("step %4ld  loss %.4f  grad norm %.3f\n", static_cast<long>(step),
                  loss.sum.item<double>() / loss.weight.item<double>(), state.grad_norm);
    }
  }
  save(model, groups, steps);

  GenerateOptions sample;
  sample.sampling.temperature = 0.8;
  sample.tokens_to_generate = 100;
  const std::string prompts[] = {"The "};
  std::printf("The %s\n", generate(model, *tokenizer, prompts, sample)[0].text.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: custom_loop text.txt [steps]\n");
    return 2;
  }
  try {
    train(argv[1], argc > 2 ? std::atoll(argv[2]) : 100);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
