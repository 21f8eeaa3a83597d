// Fine-tuning of an encoder to answer multiple-choice questions. A sample is a question with one of
// its choices, those of a question follow each other, and micro-batches hold whole questions.
#include "megatron/base/check.h"
#include "megatron/datasets/tuning/multiple_choice.h"
#include "megatron/models/bert/bert_model.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/tasks/labelled_sets.h"
#include "megatron/training/tasks/tasks.h"
#include "megatron/transformer/config/proof/proof_size.h"

namespace megatron {

namespace {

constexpr int64_t kUsualChoices = 4;  // of RACE

TrainValidTestDatasets make_choice_datasets(const Arguments& arguments,
                                            const DatasetRequest& request) {
  const int64_t choices = own_config<BertConfig>(arguments.own).bert_choices;
  LabelledSource source;
  source.read = [&](const std::string& path) {
    const std::vector<ChoiceQuestion> questions = read_choice_questions(path, choices);
    for (size_t i = 0; i < questions.size(); ++i)
      MEGATRON_CHECK(questions[i].answer.has_value(), path, ": question ", i + 1,
                     " has no answer to train on");
    return encode_file(path, texts_of_choices(questions), request);
  };
  source.mock = [&](Split split, int64_t num_samples) {
    return mock_choices(request, split, num_samples, choices);
  };
  source.group = choices;
  source.describe = [&](JsonWriter& json) { json.member("choices", choices); };
  return build_labelled_sets(arguments, request, source);
}

// Cross entropy of the right choice among those of a question; the metric is how many questions
// have their highest score there.
StageOutput multichoice_step(Model& model, const Batch& batch, const StageTensors& input,
                             const ForwardContext& context) {
  StageTensors hidden = model.hidden(batch, input, context);
  if (!model.slice().head) return {std::move(hidden), {}, {}};
  const int64_t choices = num_choices(model.config());
  const at::Tensor raw = dynamic_cast<BertModel&>(model).class_logits(
      hidden.front(), batch.find("padding_mask"), &context, batch.rows_of("padding_mask").get());
  const at::Tensor scores = raw.to(raw.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)
                                .reshape({-1, choices});  // [questions, choices]
  const at::Tensor answer = batch["target"].view({-1, choices}).narrow(1, 0, 1).to(at::kLong);
  // A question of which only a part is in the data counts nothing.
  const at::Tensor weight = batch["sample_weight"]
                                .view({-1, choices})
                                .amin(/*dim=*/1, /*keepdim=*/true)
                                .to(scores.scalar_type());
  const at::Tensor losses = -scores.log_softmax(1).gather(1, answer);
  const at::Tensor hits = scores.detach().argmax(1, /*keepdim=*/true) == answer;
  return {
      {}, {(losses * weight).sum(), weight.sum()}, (hits * weight).sum(at::kDouble).reshape({1})};
}

PretrainTask multichoice_task(const Arguments& arguments) {
  PretrainTask task = gpt_task(arguments);
  task.name = "multichoice";
  task.loss_name = "multiple-choice loss";
  task.loss_per_token = false;
  task.model_provider = provide_model("bert");
  task.datasets_provider = make_choice_datasets;
  task.forward_step = multichoice_step;
  task.metrics = {"accuracy"};
  task.flops_per_token = [provider = task.model_provider](const Arguments& a,
                                                          const Vocabulary& vocabulary) {
    return model_flops_per_token(provider, a, vocabulary);
  };
  return task;
}

// Four choices as in RACE, unless flags or the model say otherwise.
void finalize_multichoice(Arguments& arguments) {
  auto& own = own_config<BertConfig>(arguments.own);
  if (own.bert_choices == 0 && own.bert_classes == 0) own.bert_choices = kUsualChoices;
}

void validate_multichoice(const Arguments& arguments, Violations& violations) {
  const int64_t choices = own_config<BertConfig>(arguments.own).bert_choices;
  violations.require(choices > 0, "--task multichoice has no use for --bert-classes",
                     "--bert-classes 0 and the number of choices, --bert-choices");
  if (choices < 2) return;
  const auto whole = [&](const char* flag, int64_t size) {
    violations.require(size % choices == 0,
                       cat(flag, " ", size, " is no multiple of --bert-choices ", choices),
                       "a sample is a question with one of its choices: give the number of "
                       "questions times that of their choices");
  };
  whole("--micro-batch-size", arguments.training.micro_batch_size);
  if (const auto& own = arguments.training.eval_micro_batch_size)
    whole("--eval-micro-batch-size", *own);
  violations.require(arguments.data.dataloader_type == DataloaderType::kSingle,
                     "--task multichoice with --dataloader-type cyclic",
                     "leave it out: the choices of a question follow each other, and questions are "
                     "shuffled in each epoch");
  violations.require(
      !arguments.parallel.sequence_parallel && arguments.parallel.context_parallel_size == 1,
      "--task multichoice with --sequence-parallel or --context-parallel-size is not built");
}

// Micro-batches of a proof have two samples.
void shrink_multichoice(Arguments& arguments, const Arguments&, Shrinker& shrinker) {
  shrinker.set("--bert-choices", own_config<BertConfig>(arguments.own).bert_choices, 2);
}

}  // namespace

const TaskType& multichoice_task_type() {
  static const TaskType type = {.name = "multichoice",
                                .make = multichoice_task,
                                .finalize = finalize_multichoice,
                                .validate = validate_multichoice,
                                .shrink = shrink_multichoice};
  return type;
}

}  // namespace megatron
