// The parses of the commands that train: flags, YAML, and what checkpoints and folders of Hugging
// Face say of their model.
#include <filesystem>

#include "megatron/base/check.h"
#include "megatron/base/field_info.h"
#include "megatron/base/parse.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/interop/huggingface/hf_encoders.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/interop/huggingface/peft.h"
#include "megatron/models/model_table.h"
#include "megatron/training/arguments/arguments.h"
#include "megatron/training/arguments/flag_table.h"
#include "megatron/training/arguments/mimo_rules.h"

namespace megatron {

namespace {

// The checkpoint that --use-checkpoint-args reads the configuration of.
std::filesystem::path checkpoint_of(const TrainingConfig& training) {
  StartRequest request;
  request.mode = StartMode::kResume;
  request.load = training.load.empty() ? training.pretrained_checkpoint : training.load;
  request.ckpt_step = training.ckpt_step;
  // Tensors are verified later, by all ranks together
  request.depth = CheckDepth::kConfiguration;
  const StartDecision decision = resolve_start(request);
  MEGATRON_ASSERT(decision.checkpoint.has_value());
  return decision.checkpoint->directory;
}

// Tokenizer files that no longer exist are replaced by the copies in the checkpoint.
void use_stored_files(TokenizerConfig& config, const std::filesystem::path& folder) {
  for (std::string* file : {&config.tokenizer_model, &config.vocab_file, &config.merge_file}) {
    if (file->empty() || std::filesystem::exists(*file)) continue;
    std::filesystem::path stored = folder / "tokenizer" / std::filesystem::path(*file).filename();
    if (!std::filesystem::exists(stored)) stored = folder / "tokenizer" / "tokenizer.json";
    if (std::filesystem::exists(stored)) *file = stored.string();
  }
}

// Flags that --use-mp-args-from-checkpoint-args takes: the model-parallel layout of the run that
// wrote the checkpoint.
struct ModelParallelArguments : Config {
  explicit ModelParallelArguments(Arguments& a) : parallel(a.parallel), pipeline(a.pipeline) {}
  ParallelConfig& parallel;
  PipelineConfig& pipeline;
  void fields(FieldVisitor& v) override {
    v.field("tensor_model_parallel_size", parallel.tensor_model_parallel_size, "");
    v.field("pipeline_model_parallel_size", parallel.pipeline_model_parallel_size, "");
    v.field("num_layers_per_virtual_pipeline_stage", pipeline.num_layers_per_virtual_pipeline_stage,
            "");
    v.field("num_virtual_stages_per_pipeline_rank", pipeline.num_virtual_stages_per_pipeline_rank,
            "");
  }
};

// What --load or --pretrained-checkpoint says.
void read_stored_arguments(const TrainingConfig& training, Arguments& arguments) {
  for (const std::string& folder : {training.load, training.pretrained_checkpoint}) {
    if (!is_hf_folder(folder)) continue;
    if (training.use_mp_args_from_checkpoint_args)
      throw UsageError(cat("--use-mp-args-from-checkpoint-args is given, but ", folder,
                           " is a folder of Hugging Face, which says nothing of ranks"));
    HfModel model = read_hf_config(folder);
    if (!training.adapter.empty()) open_peft_folder(training.adapter, *model.family, model.config);
    arguments.transformer = model.config.transformer;
    for (OwnConfig& own : arguments.own)
      if (own.same_type(model.config.own)) own = model.config.own;
    arguments.tokenizer = hf_tokenizer(folder, model.config.vocab_size);
    return;
  }
  if (!training.use_checkpoint_args && !training.use_mp_args_from_checkpoint_args) return;
  if (training.load.empty() && training.pretrained_checkpoint.empty()) return;
  const std::filesystem::path folder = checkpoint_of(training);
  const std::filesystem::path stored = folder / "config.yaml";
  MEGATRON_CHECK(
      std::filesystem::exists(stored), folder.string(), " holds no config.yaml, which ",
      training.use_checkpoint_args ? "--use-checkpoint-args" : "--use-mp-args-from-checkpoint-args",
      " reads\nhint: give the flags instead");
  if (training.use_mp_args_from_checkpoint_args) {
    ModelParallelArguments sizes(arguments);
    Config* const configs[] = {&sizes};
    read_yaml(configs, stored.string(), /*ignore_unknown=*/true);
    arguments.pipeline.stored_in = folder.string();
  }
  if (!training.use_checkpoint_args) return;
  read_yaml(arguments.model_configs(), stored.string(), /*ignore_unknown=*/true);
  use_stored_files(arguments.tokenizer, folder);
  if (training.adapter.empty()) return;
  const Checkpoint checkpoint(folder);
  ModelConfig config;
  config.type = read_model_type(stored.string());
  const OwnConfig of_type = find_model_type(config.type).config;
  for (const OwnConfig& own : arguments.own)
    if (own.same_type(of_type)) config.own = own;
  config.transformer = arguments.transformer;
  config.transformer.finalize();
  const auto& tensors = checkpoint.manifest().tensors;
  if (const auto table = tensors.find("embedding.word_embeddings.weight"); table != tensors.end())
    config.vocab_size = config.padded_vocab_size = table->second.shape[0];
  open_peft_folder(training.adapter, family_of_model(checkpoint, config), config);
  arguments.transformer = config.transformer;
  for (OwnConfig& own : arguments.own)
    if (own.same_type(config.own)) own = config.own;
}

// `asked`: behave as if --use-checkpoint-args were given.
void read_checkpoint_arguments(Arguments& arguments, int argc, const char* const* argv,
                               ParseOptions options, bool asked) {
  Arguments first;
  first.training.use_checkpoint_args = asked;
  options.finalize = {};
  options.validate = {};
  try {
    if (parse_flags(first.configs(), argc, argv, options).help) return;
  } catch (const UsageError&) {
    // The main parse reports errors; this one only looks for the checkpoint.
  }
  read_stored_arguments(first.training, arguments);
  if (first.training.task != "mimo") return;
  const auto& data = own_config<MimoDataConfig>(first.own);
  for (const auto& [folder, media] :
       {std::pair{data.pretrained_vision_model, EncoderMedia::kImages},
        std::pair{data.pretrained_audio_model, EncoderMedia::kSounds}})
    if (!folder.empty())
      read_hf_encoder_config(folder, media, own_config<MimoConfig>(arguments.own));
}

// `arguments` hold the defaults.
Arguments parse(Arguments arguments, int argc, const char* const* argv,
                void (*more_rules)(const Arguments&, Violations&), bool use_checkpoint_args) {
  ParseOptions options;
  options.print_notes = false;
  use_flag_table(options, arguments);
  options.finalize = [&] { arguments.finalize(); };
  options.validate = [&](Violations& violations) {
    arguments.validate(violations);
    if (more_rules != nullptr) more_rules(arguments, violations);
  };
  read_checkpoint_arguments(arguments, argc, argv, options, use_checkpoint_args);
  const ParseResult result = parse_flags(arguments.configs(), argc, argv, options);
  arguments.already_so = result.already_so;
  if (result.was_given("sequence_parallel") && arguments.parallel.tensor_model_parallel_size == 1)
    arguments.already_so.emplace_back("--sequence-parallel",
                                      "with one tensor rank, every rank holds the whole sequence");
  arguments.notes = result.notes;
  arguments.help = result.help;
  arguments.help_topic = result.help_topic;
  return arguments;
}

void weights_are_given(const Arguments& a, Violations& v) {
  const TrainingConfig& t = a.training;
  if (t.load.empty() && t.pretrained_checkpoint.empty() && t.start != StartChoice::kFresh)
    v.add("finetune has no model to start from",
          "give a folder of checkpoints or of Hugging Face with --load");
  if (!t.load.empty() && t.load == t.save && t.pretrained_checkpoint.empty())
    v.add(cat("finetune would write into the folder it starts from, ", t.save),
          "give another --save");
}

}  // namespace

Arguments parse_arguments(int argc, const char* const* argv, int64_t world_size) {
  Arguments arguments;
  arguments.world_size = world_size;
  return parse(std::move(arguments), argc, argv, nullptr, /*use_checkpoint_args=*/false);
}

Arguments parse_finetune_arguments(int argc, const char* const* argv, int64_t world_size) {
  Arguments arguments;
  arguments.world_size = world_size;
  arguments.training.task = "sft";
  arguments =
      parse(std::move(arguments), argc, argv, weights_are_given, /*use_checkpoint_args=*/true);
  TrainingConfig& t = arguments.training;
  if (t.load.empty() || !t.pretrained_checkpoint.empty()) return arguments;
  if (t.ckpt_step) {  // applies to --load
    t.finetune = t.no_load_optim = true;
    return arguments;
  }
  t.finetune = false;
  t.no_load_optim = t.skip_train;
  t.pretrained_checkpoint = std::exchange(t.load, t.save);
  if (!t.save.empty() && t.start == StartChoice::kAuto) t.start = StartChoice::kResumeOrFresh;
  return arguments;
}

std::string run_help(std::string_view usage, std::span<Config* const> configs,
                     std::string_view topic, Config* own) {
  std::vector<std::string_view> basics = {"num_layers",
                                          "hidden_size",
                                          "num_attention_heads",
                                          "seq_length",
                                          "swiglu",
                                          "position_embedding_type",
                                          "tokenizer_type",
                                          "tokenizer_model",
                                          "data_path",
                                          "micro_batch_size",
                                          "global_batch_size",
                                          "train_iters",
                                          "device",
                                          "num_threads",
                                          "eval_interval",
                                          "lr",
                                          "lr_decay_style",
                                          "lr_warmup_iters",
                                          "weight_decay",
                                          "bf16",
                                          "tensor_model_parallel_size",
                                          "pipeline_model_parallel_size",
                                          "context_parallel_size",
                                          "sequence_parallel",
                                          "use_distributed_optimizer",
                                          "seed",
                                          "log_interval",
                                          "save",
                                          "save_interval",
                                          "load",
                                          "start",
                                          "lora_rank"};
  std::vector<FieldInfo> fields;
  if (own != nullptr) {
    Config* const configs_of_own[] = {own};
    fields = describe_fields(configs_of_own);
  }
  for (const FieldInfo& field : fields) basics.push_back(field.name);
  return help_text(usage, configs, topic, basics);
}

std::string resolved_yaml(const Arguments& arguments) {
  Arguments copy = arguments;
  return to_yaml(copy.configs());
}

std::string resolved_json(const Arguments& arguments) {
  Arguments copy = arguments;
  return to_json(copy.configs());
}

}  // namespace megatron
