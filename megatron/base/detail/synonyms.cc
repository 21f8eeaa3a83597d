// Names of our flags in other programs: an unknown flag that is known there is answered with ours.
#include "megatron/base/detail/synonyms.h"

#include <algorithm>
#include <iterator>

namespace megatron {
namespace {

struct Synonym {
  std::string_view theirs;  // without leading dashes, "_" written as "-"
  std::string_view ours;
};

constexpr Synonym kSynonyms[] = {
    // Hugging Face trainers
    {"adam-epsilon", "--adam-eps"},
    {"batch-size", "--micro-batch-size"},
    {"dataloader-num-workers", "--num-workers"},
    {"dataset-name", "--data-path"},
    {"eval-steps", "--eval-interval"},
    {"gradient-accumulation-steps", "--global-batch-size"},
    {"gradient-checkpointing", "--recompute-activations"},
    {"learning-rate", "--lr"},
    {"logging-steps", "--log-interval"},
    {"lora-r", "--lora-rank"},
    {"lora-target-modules", "--lora-targets"},
    {"lr-scheduler-type", "--lr-decay-style"},
    {"max-grad-norm", "--clip-grad"},
    {"max-length", "--seq-length"},
    {"max-new-tokens", "--tokens-to-generate"},
    {"max-seq-length", "--seq-length"},
    {"max-steps", "--train-iters"},
    {"model-name-or-path", "--load"},
    {"num-epochs", "--train-samples"},
    {"num-train-epochs", "--train-samples"},
    {"optim", "--optimizer"},
    {"output-dir", "--save"},
    {"per-device-eval-batch-size", "--eval-micro-batch-size"},
    {"per-device-train-batch-size", "--micro-batch-size"},
    {"report-to", "--wandb-project"},
    {"resume-from-checkpoint", "--load"},
    {"save-steps", "--save-interval"},
    {"save-total-limit", "--keep-last-checkpoints"},
    {"train-file", "--train-data-path"},
    {"warmup-ratio", "--lr-warmup-fraction"},
    {"warmup-steps", "--lr-warmup-iters"},
    // Hugging Face config.json
    {"intermediate-size", "--ffn-hidden-size"},
    {"num-hidden-layers", "--num-layers"},
    {"num-key-value-heads", "--num-query-groups"},
    {"rms-norm-eps", "--norm-epsilon"},
    {"rope-theta", "--rotary-base"},
    // torchtitan, by the name after the dot
    {"checkpoint.folder", "--save"},
    {"checkpoint.interval", "--save-interval"},
    {"context-parallel-degree", "--context-parallel-size"},
    {"data-parallel-shard-degree", "--use-megatron-fsdp"},
    {"dump-folder", "--save"},
    {"local-batch-size", "--micro-batch-size"},
    {"log-freq", "--log-interval"},
    {"max-norm", "--clip-grad"},
    {"pipeline-parallel-degree", "--pipeline-model-parallel-size"},
    {"seq-len", "--seq-length"},
    {"tensor-parallel-degree", "--tensor-model-parallel-size"},
    {"training.steps", "--train-iters"},
    // llama.cpp
    {"c", "--seq-length"},
    {"cnv", "--chat"},
    {"conversation", "--chat"},
    {"ctx-size", "--seq-length"},
    {"f", "--prompts-file"},
    {"file", "--prompts-file"},
    {"m", "--load"},
    {"model", "--load"},
    {"n", "--tokens-to-generate"},
    {"n-predict", "--tokens-to-generate"},
    {"p", "--prompt"},
    {"s", "--seed"},
    {"t", "--num-threads"},
    {"temp", "--temperature"},
    {"threads", "--num-threads"},
};

std::string_view synonym_of(std::string_view name) {
  const auto* const at = std::find_if(std::begin(kSynonyms), std::end(kSynonyms),
                                      [&](const Synonym& s) { return s.theirs == name; });
  return at == std::end(kSynonyms) ? std::string_view() : at->ours;
}

}  // namespace

std::vector<std::string> synonyms_of(std::string_view flag) {
  flag.remove_prefix(std::min(flag.find_first_not_of('-'), flag.size()));
  std::string name(flag);
  std::replace(name.begin(), name.end(), '_', '-');
  std::vector<std::string> found;
  if (const std::string_view ours = synonym_of(name); !ours.empty()) found.emplace_back(ours);
  const size_t dot = name.rfind('.');
  if (dot == std::string::npos) return found;
  const std::string last = name.substr(dot + 1);
  if (const std::string_view ours = synonym_of(last); !ours.empty()) found.emplace_back(ours);
  found.push_back("--" + last);
  return found;
}

}  // namespace megatron
