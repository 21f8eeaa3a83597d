#include "megatron/training/setup.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/log.h"
#include "megatron/base/threads.h"
#include "megatron/comm/one_shot/peer_collectives.h"
#include "megatron/comm/peer_mailbox.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/interop/huggingface/peft.h"
#include "megatron/interop/load_model.h"
#include "megatron/models/mimo/media_cost.h"
#include "megatron/models/mimo/mimo_config.h"
#include "megatron/nn/placement.h"
#include "megatron/optimizer/update_rules.h"
#include "megatron/pipeline_parallel/stage_layout.h"
#include "megatron/tensor/threads.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/arguments/encoder_offload_rules.h"
#include "megatron/training/arguments/frozen_media.h"
#include "megatron/training/arguments/layer_division.h"
#include "megatron/training/arguments/microbatches.h"
#include "megatron/training/arguments/mimo_rules.h"
#include "megatron/training/arguments/task_heads.h"
#include "megatron/training/checkpoint_state.h"
#include "megatron/training/experts/upcycling.h"
#include "megatron/transformer/config/lora.h"
#include "megatron/transformer/moe/token_dispatcher.h"

namespace megatron {

namespace {

StartMode start_mode(const TrainingConfig& config) {
  switch (config.start) {
    case StartChoice::kFresh:
      return StartMode::kFresh;
    case StartChoice::kResume:
      return StartMode::kResume;
    case StartChoice::kResumeOrFresh:
      return StartMode::kResumeOrFresh;
    case StartChoice::kAuto:
      break;
  }
  if (config.load.empty()) return StartMode::kFresh;
  // With --pretrained-checkpoint as fallback, an empty --load is not an error.
  return config.pretrained_checkpoint.empty() ? StartMode::kResume : StartMode::kResumeOrFresh;
}

// The checkpoint directory to start from, verified by all ranks together; empty: none.
std::string find(const StartRequest& request, Agreement& ranks) {
  const StartDecision decision = resolve_start(request, &ranks);
  if (ranks.rank() == 0)
    for (const std::string& warning : decision.warnings) log_warning(warning);
  return decision.checkpoint ? decision.checkpoint->directory.string() : "";
}

// The answer of rank 0, on all ranks.
bool is_hf_folder_for_all(const std::string& folder, Agreement& ranks) {
  return decide_together(ranks, [&] { return is_hf_folder(folder) ? "yes" : ""; }) == "yes";
}

struct Found {
  std::string directory;
  bool weights_only = false;
};

// Collective; the result is the same on all ranks.
Found find_start(const TrainingConfig& config, Agreement& ranks) {
  StartRequest request;
  if (config.start != StartChoice::kFresh && is_hf_folder_for_all(config.load, ranks)) {
    MEGATRON_CHECK(!config.ckpt_step, "--ckpt-step is given, but ", config.load,
                   " is a folder of Hugging Face");
    request.save = config.save;
    // A new run: refuses a --save folder with checkpoints of another run
    resolve_start(request, &ranks);
    return {config.load, true};
  }
  request.mode = start_mode(config);
  request.load = config.load;
  request.save = config.save;
  request.ckpt_step = config.ckpt_step;
  // With --pretrained-checkpoint, that is the dense one, and --load of the run.
  const bool upcycles = config.moe_use_upcycling && config.pretrained_checkpoint.empty();
  Found found{find(request, ranks), config.finetune || upcycles};
  decide_together(ranks, [&] {
    MEGATRON_CHECK(
        !found.weights_only || config.save.empty() || find_checkpoints(config.save).empty(),
        upcycles ? "--moe-use-upcycling" : "--finetune", " starts a new run, but ", config.save,
        " holds checkpoints already\nhint: give another --save, or resume with --load ",
        config.save, upcycles ? " and without --moe-use-upcycling" : "");
    return std::string();
  });
  if (!found.directory.empty() || config.pretrained_checkpoint.empty()) return found;
  if (is_hf_folder_for_all(config.pretrained_checkpoint, ranks))
    return {config.pretrained_checkpoint, true};
  StartRequest pretrained;
  pretrained.mode = StartMode::kResume;
  pretrained.load = config.pretrained_checkpoint;
  return {find(pretrained, ranks), true};
}

}  // namespace

StartPoint decide_start(const TrainingConfig& config, const Job& job) {
  Agreement alone;
  const Found found = find_start(config, job.agreement != nullptr ? *job.agreement : alone);
  StartPoint start;
  start.weights_only = found.weights_only;
  if (is_hf_folder(found.directory)) {
    HfFolder folder = open_hf_folder(found.directory);
    start.waived = std::move(folder.waived);
    start.checkpoint = std::move(folder.checkpoint);
  } else if (!found.directory.empty()) {
    start.checkpoint = Checkpoint::open_verified(found.directory);
    start.weights_only |= is_weights_only(*start.checkpoint);
  }
  start.upcycles = config.moe_use_upcycling && !start.continues();
  MEGATRON_CHECK(
      !start.upcycles || start.checkpoint,
      "--moe-use-upcycling found no dense checkpoint\nhint: name it with --load, or with "
      "--pretrained-checkpoint");
  if (start.continues())
    start.stored =
        run_state_from_json(start.checkpoint->state(), start.checkpoint->directory().string());
  return start;
}

namespace {

DatasetRequest dataset_request(const Arguments& arguments, const Tokenizer& tokenizer,
                               int64_t train_samples) {
  const TrainingConfig& training = arguments.training;
  TargetInputs inputs;
  inputs.train_samples = train_samples;
  inputs.train_iters = arguments.train_iters();
  inputs.eval_iters = training.eval_iters;
  // Without an interval there is only the evaluation after training.
  inputs.eval_interval =
      training.eval_iters > 0 ? training.eval_interval.value_or(inputs.train_iters + 1) : 0;
  inputs.start_eval_at_iter = training.start_eval_at_iter.value_or(0);
  inputs.eval_global_batch_size = arguments.eval_global_batch_size();
  inputs.full_validation = arguments.data.full_validation;
  DatasetRequest request;
  request.sequence_length = arguments.transformer.seq_length;
  request.seed = arguments.transformer.seed;
  request.targets = split_targets(inputs);
  request.tokenizer = facts_of(tokenizer, arguments.tokenizer.tokenizer_type);
  request.text_tokenizer = &tokenizer;
  return request;
}

void refuse_another_order(const StartPoint& start, const RunState& now,
                          const TrainingConfig& config) {
  if (now.data_fingerprint == start.stored.data_fingerprint) return;
  const std::string what =
      cat("the training data or its order is another than that of ",
          start.checkpoint->directory().string(), ": ",
          describe_difference(now.data_description, start.stored.data_description));
  MEGATRON_CHECK(config.accept_new_data_order, what,
                 "\nhint: give the flags and files of the data as they were, or "
                 "--accept-new-data-order to go on with the new "
                 "(some samples are then seen twice and others never)");
  log_warning(what);
}

int64_t wanted_samples(const Arguments& arguments) {
  return arguments.training.train_samples.value_or(
      arguments.microbatches().samples_of_iterations(arguments.train_iters()));
}

std::string name_of(const Parameter& parameter, const std::string& path) {
  return parameter.name.empty() ? path : parameter.name;
}

// Parameter names of the whole model, not only of this rank's part.
std::vector<std::string> parameter_names(const PretrainTask& task, const Arguments& arguments,
                                         const Vocabulary& vocabulary) {
  const std::unique_ptr<Model> model = whole_model(task.model_provider, arguments, vocabulary);
  std::vector<std::string> names;
  model->visit([&](const std::string& path, const Parameter& parameter) {
    if (parameter.trainable) names.push_back(name_of(parameter, path));
  });
  return names;
}

// Opens --adapter for the model of the loaded weights, which `config` is.
Checkpoint open_adapter(const Arguments& arguments, const Vocabulary& vocabulary,
                        const Checkpoint& weights, ModelConfig config) {
  const std::filesystem::path& folder = weights.directory();
  config.transformer = arguments.transformer;
  config.vocab_size = config.padded_vocab_size = vocabulary.size;
  const HfFamily& family =
      is_hf_folder(folder) ? *read_hf_config(folder).family : family_of_model(weights, config);
  return open_peft_folder(arguments.training.adapter, family, config);
}

void initialize_adapters(DistributedDataParallel& store, int64_t seed) {
  store.edit_values([&](Parameter& parameter) {
    if (is_lora_parameter(parameter.name)) initialize_parameter(parameter, seed, store.groups());
  });
}

// Parameters of these patterns that the checkpoint lacks.
void initialize_heads(DistributedDataParallel& store, const std::vector<std::string>& heads,
                      const Checkpoint& checkpoint, int64_t seed) {
  const auto is_head = [&](const std::string& name) {
    return std::any_of(heads.begin(), heads.end(),
                       [&](const std::string& pattern) { return matches_pattern(pattern, name); });
  };
  store.edit_values([&](Parameter& parameter) {
    if (is_head(parameter.name) && !checkpoint.manifest().tensors.contains(parameter.name))
      initialize_parameter(parameter, seed, store.groups());
  });
}

// A new run may start from the weights of another type.
void start_from_origin(const Checkpoint& checkpoint, const TrainedModel& model, LoadParts& parts) {
  const ModelOrigin& origin = find_model_type(model.chunks.front().module->config().type).origin;
  if (origin.type.empty() || stored_model_type(checkpoint) != origin.type) return;
  parts.origin = origin.type;
  parts.heads.insert(parts.heads.end(), origin.added.begin(), origin.added.end());
}

// All ranks open the same checkpoint; each verifies a share.
Checkpoint open_weights(const std::string& folder, Agreement* agreement) {
  if (is_hf_folder(folder)) return open_hf_folder(folder).checkpoint;
  StartRequest request;
  request.mode = StartMode::kResume;
  request.load = folder;
  return Checkpoint::open_verified(resolve_start(request, agreement).checkpoint->directory);
}

// The chunks of this rank, without memory.
std::vector<ModelChunk> declare_chunks(const PretrainTask& task, const Arguments& arguments,
                                       const Vocabulary& vocabulary, const Pipeline& pipeline,
                                       const ParallelGroups& groups) {
  std::vector<ModelChunk> chunks;
  std::vector<Model*> modules;
  for (int chunk = 0; chunk < pipeline.num_chunks(); ++chunk) {
    chunks.push_back(
        {task.model_provider(arguments, vocabulary, groups, pipeline.slice(chunk), modules),
         nullptr});
    modules.push_back(chunks.back().module.get());
  }
  return chunks;
}

// Gives declared chunks their memory, with initial values if they are wanted.
void store_chunks(std::vector<ModelChunk>& chunks, const Arguments& arguments,
                  const DistributedDataParallelConfig& sharding, const ParallelGroups& groups,
                  at::ScalarType dtype, c10::Device device, bool initialize) {
  const DataParallelGroups data = make_data_parallel_groups(groups, sharding);
  for (ModelChunk& chunk : chunks) {
    chunk.store = std::make_unique<DistributedDataParallel>(*chunk.module, groups, dtype, device,
                                                            sharding, data);
    if (initialize) chunk.store->initialize(arguments.transformer.seed);
  }
}

// The reference model: a frozen copy of the weights that this run starts from or, if it is resumed,
// of those that the first run started from.
std::vector<ModelChunk> build_reference(const PretrainTask& task, const Arguments& arguments,
                                        const Vocabulary& vocabulary, const Pipeline& pipeline,
                                        const ParallelGroups& groups, at::ScalarType dtype,
                                        c10::Device device, const StartPoint& start,
                                        Agreement* agreement) {
  std::vector<ModelChunk> chunks = declare_chunks(task, arguments, vocabulary, pipeline, groups);
  for (ModelChunk& chunk : chunks)
    for (Parameter* parameter : chunk.module->parameters()) parameter->trainable = false;
  store_chunks(chunks, arguments, arguments.ddp, groups, dtype, device, !start.checkpoint);
  if (!start.checkpoint) return chunks;
  const std::string& first = arguments.training.pretrained_checkpoint;
  MEGATRON_CHECK(!start.continues() || !first.empty(), "resuming ",
                 start.checkpoint->directory().string(),
                 " needs the weights that its run started from, as the reference model",
                 "\nhint: name them with --pretrained-checkpoint; with --lora-rank they are in the "
                 "checkpoint");
  load_weights(start.continues() ? open_weights(first, agreement) : *start.checkpoint, chunks,
               agreement);
  return chunks;
}

// Whether the checkpoint was saved without the frozen weights of the model. Checked for the whole
// model, so that all stages agree.
bool lacks_frozen(const Checkpoint& checkpoint, const PretrainTask& task,
                  const Arguments& arguments, const Vocabulary& vocabulary) {
  const std::unique_ptr<Model> model = whole_model(task.model_provider, arguments, vocabulary);
  freeze_parameters(arguments.training, *model);
  int64_t frozen = 0, stored = 0;
  model->visit([&](const std::string& path, const Parameter& parameter) {
    if (parameter.trainable) return;
    ++frozen;
    stored += checkpoint.manifest().tensors.contains(name_of(parameter, path)) ? 1 : 0;
  });
  return frozen > 0 && stored == 0;
}

// Opens the mailbox of the tensor ranks, if there are several and they exchange through it.
std::shared_ptr<PeerMailbox> open_mailbox(const Arguments& arguments, const ProcessGroup& tp,
                                          at::ScalarType dtype, c10::Device device) {
  const int64_t part_bytes =
      arguments.mailbox_part_bytes(static_cast<int64_t>(c10::elementSize(dtype)));
  std::shared_ptr<PeerMailbox> mailbox = tp.mailbox();
  if (mailbox == nullptr || part_bytes == 0) return mailbox;
  mailbox->open(device, part_bytes);
  const std::string& obstacle = mailbox->obstacle();
  if (device.is_cuda())
    log_info(obstacle.empty()
                 ? std::string("tensor parallel: peer-to-peer copies (same host)")
                 : "tensor parallel: collectives, not peer-to-peer copies: " + obstacle);
  return mailbox;
}

}  // namespace

TrainValidTestDatasets build_datasets(const PretrainTask& task, const Arguments& arguments,
                                      const Tokenizer& tokenizer) {
  return task.datasets_provider(arguments,
                                dataset_request(arguments, tokenizer, wanted_samples(arguments)));
}

TrainValidTestDatasets build_datasets(const PretrainTask& task, const Arguments& arguments,
                                      const Tokenizer& tokenizer, const StartPoint& start,
                                      RunState& state) {
  const int64_t wanted = wanted_samples(arguments);
  const auto build = [&](int64_t target) {
    state.data_target = target;
    TrainValidTestDatasets sets =
        task.datasets_provider(arguments, dataset_request(arguments, tokenizer, target));
    if (sets.train) {
      state.data_fingerprint = sets.train->fingerprint();
      state.data_description = sets.train->details();
    }
    return sets;
  };
  if (!start.continues() || arguments.training.skip_train) return build(wanted);
  // The data order depends on the number of requested samples; a run of another length keeps the
  // stored order if that has enough samples.
  TrainValidTestDatasets sets = build(start.stored.data_target);
  if (sets.train && sets.train->size() < wanted) sets = build(wanted);
  refuse_another_order(start, state, arguments.training);
  return sets;
}

void use_threads(const Arguments& arguments, int local_ranks) {
  const int64_t asked = arguments.training.num_threads;
  const bool updates = arguments.optimizer.optimizer_cpu_offload && asked <= 0;
  use_threads(updates ? std::max(1, available_cores() / std::max(1, local_ranks)) : asked,
              local_ranks);
}

at::ScalarType model_dtype(const OptimizerConfig& config) {
  return config.bf16 ? at::kBFloat16 : config.fp16 ? at::kHalf : at::kFloat;
}

Vocabulary vocabulary_of(const Arguments& arguments, const Tokenizer& tokenizer) {
  const int64_t size = model_vocab_size(arguments.tokenizer, tokenizer);
  return {size, padded_vocab_size(arguments.tokenizer, size, arguments.vocabulary_ranks())};
}

namespace {

// The chunks of this rank with their memory; initial values unless a checkpoint has them.
std::vector<ModelChunk> build_chunks(const PretrainTask& task, const Arguments& arguments,
                                     const Vocabulary& vocabulary, const Pipeline& pipeline,
                                     const ParallelGroups& groups, at::ScalarType dtype,
                                     c10::Device device, const StartPoint& start) {
  std::vector<ModelChunk> chunks = declare_chunks(task, arguments, vocabulary, pipeline, groups);
  for (ModelChunk& chunk : chunks) {
    freeze_parameters(arguments.training, *chunk.module);
    set_lr_factors(arguments.optimizer, *chunk.module);
  }
  DistributedDataParallelConfig sharding = arguments.ddp;
  sharding.whole_matrices = update_rule(arguments.optimizer).needs_whole_matrices();
  store_chunks(chunks, arguments, sharding, groups, dtype, device, !start.checkpoint);
  return chunks;
}

void add_optimizer(TrainedModel& model, const Arguments& arguments, c10::Device device) {
  const TransformerConfig& c = arguments.transformer;
  if (offloads_activations(arguments))
    model.offload = std::make_unique<ActivationOffload>(device, c.transfers());
  model.optimizer = std::make_unique<Optimizer>(
      arguments.optimizer, make_schedule(arguments.optimizer, arguments.train_length()),
      model.stores());
}

void refuse_experts(const Checkpoint& checkpoint) {
  for (const auto& [name, tensor] : checkpoint.manifest().tensors)
    MEGATRON_CHECK(name.find(".mlp.experts.") == std::string::npos,
                   "--moe-use-upcycling makes experts of a dense model, but ",
                   checkpoint.directory().string(), " holds experts: ", name,
                   "\nhint: leave --moe-use-upcycling out");
}

// Adapters and frozen weights that the checkpoint lacks come from the folders that the arguments
// name for them, or are initialised.
void load_start(const PretrainTask& task, const Arguments& arguments, const Vocabulary& vocabulary,
                const StartPoint& start, TrainedModel& model, Agreement* agreement) {
  LoadParts parts;
  const int64_t seed = arguments.transformer.seed;
  std::optional<Checkpoint> adapter;
  if (arguments.transformer.has_adapters() && !start.continues()) {
    if (!arguments.training.adapter.empty()) {
      adapter = open_adapter(arguments, vocabulary, *start.checkpoint,
                             model.chunks.front().module->config());
      parts.adapter_source = &*adapter;
    } else if (!has_adapters(*start.checkpoint)) {  // new adapters for a base model
      parts.adapters = false;
      for (const ModelChunk& chunk : model.chunks) initialize_adapters(*chunk.store, seed);
    }
  }
  if (start.encoders) {
    parts.heads = start.random;
    parts.encoders = &*start.encoders;
  } else if (!start.continues()) {
    parts.heads = heads_of_task(task.name);
    start_from_origin(*start.checkpoint, model, parts);
  }
  if (!parts.heads.empty())
    for (const ModelChunk& chunk : model.chunks)
      initialize_heads(*chunk.store, parts.heads, *start.checkpoint, seed);
  std::optional<Upcycling> upcycling;
  if (start.upcycles) {
    refuse_experts(*start.checkpoint);
    parts.upcycling =
        &upcycling.emplace(arguments.transformer, arguments.training.moe_upcycling_granularity);
  }
  StartPoint frozen;
  if (!upcycling && !start.encoders &&
      lacks_frozen(*start.checkpoint, task, arguments, vocabulary)) {
    const std::string& base = arguments.training.pretrained_checkpoint;
    if (!base.empty()) frozen.checkpoint = open_weights(base, agreement);
    frozen.weights_only = true;
    if (task.join_parts) task.join_parts(arguments, vocabulary, frozen);
    MEGATRON_CHECK(frozen.checkpoint, start.checkpoint->directory().string(),
                   " was saved without its frozen weights (--no-save-frozen)",
                   "\nhint: name what they were loaded from with --pretrained-checkpoint");
    parts.frozen_source = &*frozen.checkpoint;
    if (frozen.encoders) parts.encoders = &*frozen.encoders;
  }
  const bool with_optimizer = start.continues() && !arguments.training.no_load_optim;
  parts.optimizer = with_optimizer;
  load_model_state(*start.checkpoint, start.stored, arguments.optimizer, model, parts, agreement);
  if (model.optimizer && start.continues() && !with_optimizer) {
    // A new optimizer, with schedules advanced to the consumed samples.
    StepState state = model.optimizer->read_state();
    state.num_steps = start.stored.consumed_train_samples;
    model.optimizer->load_state(state);
  }
}

}  // namespace

TrainedModel build_model(const PretrainTask& task, const Arguments& arguments,
                         const Vocabulary& vocabulary, const ParallelGroups& groups,
                         at::ScalarType dtype, c10::Device device, const StartPoint& start,
                         Agreement* agreement) {
  const std::vector<std::string> names = parameter_names(task, arguments, vocabulary);
  arguments.training.check_freezing(names);
  check_lr_factors(arguments.optimizer, arguments.training, names);
  // Held until the linears of the model hold it.
  const std::shared_ptr<PeerMailbox> mailbox = open_mailbox(arguments, groups.tp, dtype, device);
  const std::shared_ptr<PeerRows> expert_rows =
      open_expert_rows(arguments.transformer, groups, device);
  TrainedModel model;
  model.ordered_sums = ordered_reductions(groups.tp, device);
  const EncoderRanks encoder = arguments.encoder_ranks();
  model.pipeline = std::make_unique<Pipeline>(
      arguments.pipeline, divide_layers(arguments, vocabulary, task.model_provider), groups, dtype,
      device, encoder,
      encoder.any() ? make_mesh(arguments.parallel, encoder, arguments.world_size) : Mesh());
  model.chunks =
      build_chunks(task, arguments, vocabulary, *model.pipeline, groups, dtype, device, start);
  if (!arguments.training.skip_train) add_optimizer(model, arguments, device);
  if (arguments.training.uses_cuda_graphs())
    model.graphs =
        std::make_unique<MicrobatchGraphs>(device, arguments.training.cuda_graph_warmup_steps);
  if (start.checkpoint) load_start(task, arguments, vocabulary, start, model, agreement);
  if (task.reference_step && !arguments.transformer.has_adapters())
    model.reference = build_reference(task, arguments, vocabulary, *model.pipeline, groups, dtype,
                                      device, start, agreement);
  if (model.optimizer && arguments.training.replica_hash_interval() > 0 &&
      groups.world.size() > 1) {
    std::vector<DistributedDataParallel*> frozen;
    for (const ModelChunk& chunk : model.reference) frozen.push_back(chunk.store.get());
    model.replicas =
        std::make_unique<ReplicaHashes>(*model.optimizer, model.stores(), frozen, groups.world);
  }
  return model;
}

ImageRanks image_ranks(const Arguments& arguments, const ParallelGroups& groups) {
  if (const EncoderRanks encoder = arguments.encoder_ranks(); encoder.any()) {
    const bool encodes = encoder.holds(groups.world.rank());
    return {.size = static_cast<int>(encoder.data),
            .rank = encodes ? groups.dp.rank() : -1,
            .reads = encodes,
            .replicas = arguments.data_parallel_size()};
  }
  const StageLayout stages =
      make_stage_layout(arguments.pipeline, arguments.parallel.pipeline_model_parallel_size,
                        arguments.transformer.num_layers);
  bool reads = false, encodes = false;  // on any of this rank's segments
  for (int chunk = 0; chunk < stages.num_chunks(); ++chunk) {
    const StageSlice slice = stages.slice(groups.pp.rank(), chunk);
    reads = reads || slice.starts();
    encodes = encodes || slice.embedding || slice.num_parts > 0;
  }
  const bool divided = own_config<MimoConfig>(arguments.own).divides_encoders();
  const int tensor = divided ? 1 : groups.tp.size();
  const int rank = groups.cp.rank() * tensor + (divided ? 0 : groups.tp.rank());
  return {groups.cp.size() * tensor, encodes ? rank : -1, groups.cp.size(), groups.cp.rank(),
          reads};
}

MediaCosts media_costs(const Arguments& arguments) {
  MimoConfig own = own_config<MimoConfig>(arguments.own);
  find_frozen_media(arguments.training, arguments.transformer, own);
  return media_costs(own);
}

int64_t data_parallel_rank(const Arguments& arguments, const ParallelGroups& groups) {
  return arguments.encoder_ranks().holds(groups.world.rank()) ? 0 : groups.dp.rank();
}

namespace {

// Whether samples change places within a global batch so that data-parallel ranks encode about as
// much: where losses are sums over it, and samples come in one order for all ranks.
bool balances_images(const Arguments& a) {
  return a.training.task == "mimo" && own_config<MimoDataConfig>(a.own).balance_images &&
         a.training.calculate_per_token_loss && a.data.dataloader_type == DataloaderType::kSingle;
}

}  // namespace

std::unique_ptr<DataLoader> make_train_loader(const Arguments& arguments,
                                              const ParallelGroups& groups,
                                              const std::shared_ptr<const Dataset>& dataset,
                                              int64_t consumed_samples, c10::Device device) {
  DataLoaderOptions options;
  options.sampler.type = arguments.data.dataloader_type;
  options.sampler.total_samples = dataset->size();
  options.sampler.micro_batch_size = arguments.training.micro_batch_size;
  // Any rank may compute documents of any sequence.
  const bool everything = arguments.parallel.hybrid_context_parallel;
  options.sampler.data_parallel_rank = everything ? 0 : data_parallel_rank(arguments, groups);
  options.sampler.data_parallel_size = everything ? 1 : arguments.data_parallel_size();
  options.sampler.data_sharding = arguments.data.data_sharding;
  options.consumed_samples = consumed_samples;
  options.num_workers = arguments.data.num_workers;
  options.allocator = host_allocator(device);
  options.image_ranks = image_ranks(arguments, groups);
  options.media_costs = media_costs(arguments);
  if (arguments.data_parallel_size() > 1 && balances_images(arguments))
    options.global_batch_size = [batches = arguments.microbatches()](int64_t consumed) {
      return batches.global_batch_size(consumed);
    };
  return std::make_unique<DataLoader>(dataset, std::move(options));
}

StepOptions step_options(const Arguments& arguments, int64_t consumed_samples) {
  const MicrobatchCalculator microbatches = arguments.microbatches();
  StepOptions options;
  options.num_microbatches = microbatches.num_microbatches(consumed_samples);
  options.global_batch_size = microbatches.global_batch_size(consumed_samples);
  options.replicas = arguments.data_parallel_size();
  options.per_token_loss = arguments.training.calculate_per_token_loss;
  return options;
}

}  // namespace megatron
