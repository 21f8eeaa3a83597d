// Pretraining of a BERT: masked tokens, and the order of two halves of a text.
#include "megatron/base/check.h"
#include "megatron/datasets/masked/masked_datasets.h"
#include "megatron/models/bert/bert_model.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/tasks/tasks.h"
#include "megatron/transformer/config/proof/proof_size.h"

namespace megatron {
namespace {

at::Tensor weight_of_tokens(const Batch& batch) { return batch["loss_mask"].sum(at::kDouble); }

// Of context ranks that which has the first token of the sequences counts them.
at::Tensor weight_of_samples(const Batch& batch) {
  return batch["sample_weight"].sum(at::kDouble) * (batch.place.position[0] == 0);
}

// The plan counts the logits of masked tokens alone, whose number follows from flags of the data.
ModelProvider bert_provider() {
  return [provide = provide_model("bert")](const Arguments& arguments, const Vocabulary& vocabulary,
                                           const ParallelGroups& groups, const StageSlice& slice,
                                           const std::vector<Model*>& chunks) {
    Arguments counted = arguments;
    own_config<BertConfig>(counted.own).most_counted = arguments.most_masked_by_bert();
    return provide(counted, vocabulary, groups, slice, chunks);
  };
}

PretrainTask bert_task(const Arguments& arguments) {
  PretrainTask task = gpt_task(arguments);
  task.name = "bert";
  task.model_provider = bert_provider();
  const auto& own = own_config<BertConfig>(arguments.own);
  const bool binary_head = own.bert_binary_head;
  if (!own.bert_lm_head)
    throw UsageError(
        "--task bert trains the head of masked tokens, which the model has not "
        "(--bert-no-lm-head)\nhint: a model of Hugging Face has it with ForMaskedLM or "
        "ForPreTraining as its architecture");
  if (own.bert_classes > 0)
    throw UsageError(
        "--task bert trains the heads of pretraining, in whose place --bert-classes puts another");
  if (own.bert_pooler && !binary_head)
    throw UsageError(
        "--bert-pooler: --task bert trains the pooler with the binary head alone\nhint: leave out "
        "--bert-no-binary-head");
  task.datasets_provider = [binary_head](const Arguments& a, const DatasetRequest& request) {
    return build_masked_datasets({MaskedKind::kBert, binary_head}, a.data, a.masked, request);
  };
  if (binary_head) {
    task.loss_weight = weight_of_tokens;
    task.own_weights = {{"sop loss", weight_of_samples}};
  }
  task.flops_per_token = [](const Arguments& a, const Vocabulary& vocabulary) {
    return model_flops_per_token(bert_provider(), a, vocabulary);
  };
  return task;
}

// Several masked tokens in a short sample: with one, the weights of both losses were equal.
void shrink_bert(Arguments& arguments, const Arguments&, Shrinker& shrinker) {
  constexpr double kLeast = 0.4;
  double& share = arguments.masked.mask_prob;
  if (share >= kLeast) return;
  shrinker.note(cat("--mask-prob ", share, " -> ", kLeast));
  share = kLeast;
}

}  // namespace

const TaskType& bert_task_type() {
  static const TaskType type = {.name = "bert", .make = bert_task, .shrink = shrink_bert};
  return type;
}

}  // namespace megatron
