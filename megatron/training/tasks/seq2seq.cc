// Fine-tuning of a T5 to write a text for another one: the loss counts the target's tokens.
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/datasets/tuning/text_to_text.h"
#include "megatron/models/t5/t5_model.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/arguments/t5_rules.h"
#include "megatron/training/tasks/row_sets.h"
#include "megatron/training/tasks/tasks.h"

namespace megatron {

namespace {

void warn_of_cuts(const std::string& path, const TextToTextFile& file,
                  const TextToTextLengths& lengths) {
  if (file.inputs_cut > 0)
    log_warning(cat(path, ": ", file.inputs_cut, " of ", file.rows.size(),
                    " inputs have more than --seq-length ", lengths.encoder,
                    " tokens and lose their end"));
  if (file.targets_cut > 0)
    log_warning(cat(path, ": ", file.targets_cut, " of ", file.rows.size(),
                    " targets have more than --decoder-seq-length ", lengths.decoder,
                    " tokens and lose their end"));
}

TrainValidTestDatasets make_pair_datasets(const Arguments& arguments,
                                          const DatasetRequest& request) {
  const TextToTextLengths lengths{request.sequence_length,
                                  own_config<T5Config>(arguments.own).decoder_seq_length};
  RowSource<TextToTextTokens> source;
  source.read = [&](const std::string& path) {
    TextToTextFile file = encode_text_to_text(path, *request.text_tokenizer, lengths);
    warn_of_cuts(path, file, lengths);
    return std::move(file.rows);
  };
  source.mock = [&](Split split, int64_t num_samples) {
    return mock_text_to_text(request, split, num_samples, lengths);
  };
  source.make = [&](std::vector<TextToTextTokens> rows, const std::vector<std::string>& files,
                    int64_t num_samples) {
    TextToTextConfig config{lengths, request.seed};
    config.pad = std::max<int64_t>(0, request.tokenizer.pad);
    if (!arguments.data.mock_data) config.decoder_start = decoder_start_of(*request.text_tokenizer);
    JsonWriter description;
    description.begin_object().member("files", files);
    description.member("tokenizer", request.tokenizer.identity.fingerprint).end_object();
    config.description = description.text();
    return std::make_shared<TextToTextDataset>(std::move(rows), num_samples, std::move(config));
  };
  return build_row_sets(arguments.data, request, source);
}

// The metric is how many of the counted tokens have the largest logit, given the target before
// them.
StageOutput seq2seq_step(Model& model, const Batch& batch, const StageTensors& input,
                         const ForwardContext& context) {
  StageTensors hidden = model.hidden(batch, input, context);
  if (!model.slice().head) return {std::move(hidden), {}, {}};
  at::Tensor hits;  // [s_d, b]
  const at::Tensor losses = dynamic_cast<T5Model&>(model).token_losses_and_hits(
      hidden.front(), t5_decoder_column(batch, "labels"), &hits);
  const at::Tensor mask = t5_decoder_column(batch, "loss_mask").t().to(losses.scalar_type());
  return {{}, {(losses * mask).sum(), mask.sum()}, (hits * mask).sum(at::kDouble).reshape({1})};
}

PretrainTask seq2seq_task(const Arguments& arguments) {
  PretrainTask task = gpt_task(arguments);
  task.name = "seq2seq";
  task.model_provider = provide_model("t5");
  task.datasets_provider = make_pair_datasets;
  task.forward_step = seq2seq_step;
  task.metrics = {"token accuracy"};
  task.flops_per_token = [provide = task.model_provider](const Arguments& a,
                                                         const Vocabulary& vocabulary) {
    return model_flops_per_token(provide, a, vocabulary);
  };
  return task;
}

}  // namespace

const TaskType& seq2seq_task_type() {
  static const TaskType type = {.name = "seq2seq",
                                .make = seq2seq_task,
                                .finalize = finalize_t5,
                                .validate = validate_t5,
                                .shrink = shrink_t5};
  return type;
}

}  // namespace megatron
