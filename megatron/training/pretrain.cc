#include "megatron/training/pretrain.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/base/log.h"
#include "megatron/base/process_signals.h"
#include "megatron/datasets/reading_summary.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/models/common/routers.h"
#include "megatron/reporting/flops.h"
#include "megatron/reporting/section_means.h"
#include "megatron/reporting/trace.h"
#include "megatron/runtime/signals.h"
#include "megatron/runtime/time_limit.h"
#include "megatron/tensor/threads.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/arguments/configuration_changes.h"
#include "megatron/training/arguments/microbatches.h"
#include "megatron/training/arguments/padding_rules.h"
#include "megatron/training/checkpoint_state.h"
#include "megatron/training/dynamic_context/dynamic_context_batches.h"
#include "megatron/training/evaluation.h"
#include "megatron/training/experts/routing_files.h"
#include "megatron/training/metrics_sinks.h"
#include "megatron/training/rank_reports.h"
#include "megatron/training/run_folders.h"
#include "megatron/training/setup.h"
#include "megatron/training/start_notes.h"

namespace megatron {

namespace {

// A reason to stop, next to signal numbers.
constexpr int64_t kOutOfTime = 1000;

class Run {
 public:
  Run(const PretrainTask& task, const Arguments& arguments, const Job& job, RunFolders& folders,
      const Versions& libraries);
  // Returns the exit code.
  int execute();

 private:
  // What is known of an iteration before its outcome is read.
  struct Pending {
    StepRecord record;
    double loader_wait = 0.0;  // ms that this rank waited for its micro-batches
    std::vector<std::shared_ptr<const MicroBatch>> held;
  };

  void announce();
  void warn_of_other_architecture() const;
  TrainingLog make_log() const;
  void make_loaders();
  void train();
  void one_step();
  void read_outcomes(bool all);
  void after_step();
  int64_t wants_to_stop();
  bool should_exit();
  bool due(const std::optional<int64_t>& interval) const {
    return interval && state_.iteration % *interval == 0;
  }
  void evaluate_validation(const std::string& where, bool may_stop = false);
  void evaluate_test();
  void add_media(const StepNumbers& numbers, StepRecord& record) const;
  // Evaluations can be cut short if there are no other ranks.
  bool may_stop_now() const { return groups_.world.size() == 1 && signalled(); }
  bool signalled() const { return signals_ && signals_->received() != 0; }
  void save();
  void profile_steps();
  void write_start_record();
  void announce_replicas() const;
  void write_startup_record(int64_t iteration);
  std::vector<std::pair<std::string, double>> named(const std::vector<double>& metrics) const;
  int end(const std::string& reason);
  void warn_of_slow_saves();
  void require_final_save() const;

  const PretrainTask& task_;
  const Arguments& arguments_;
  const TrainingConfig& config_;
  RunFolders& folders_;
  const c10::Device device_;
  const int64_t train_iters_;
  const MicrobatchCalculator microbatches_;
  const Job& job_;
  const ParallelGroups& groups_;
  const Versions& libraries_;
  StartClock start_clock_{"program and rendezvous"};
  std::unique_ptr<Tokenizer> tokenizer_;
  Vocabulary vocabulary_;
  StartPoint start_;
  RunState state_;
  TrainValidTestDatasets datasets_;
  TrainedModel model_;
  Timers timers_;
  TrainingLog log_;
  Checkpointer checkpointer_;
  std::unique_ptr<DataLoader> loader_;
  std::unique_ptr<DynamicContextBatches> dynamic_context_;  // in place of loader_ and batches_
  BatchMaker batches_;
  RoutingFiles routing_;
  std::vector<Evaluator> validation_;
  OutcomeReader outcomes_;
  std::optional<SlowRankWatch> slow_ranks_;
  SectionMeans sections_;     // of this log interval
  MediaCounts media_;         // of this step and this model replica
  double loader_wait_ = 0.0;  // ms of this step
  std::deque<Pending> pending_;
  Trace trace_;
  bool profiling_ = false;
  int64_t timed_iterations_ = 0;
  int64_t steps_done_ = 0;  // by this process
  int64_t last_batch_size_ = 0;
  bool first_outcome_ = true;  // no outcome has been read yet
  int64_t stop_ = 0;           // stop request of any rank, from the last outcome read
  std::string exit_reason_;
  bool stopped_ = false;  // before the configured end; can be resumed
  TimeLimit time_limit_;
  std::chrono::steady_clock::time_point turn_began_;
  bool warned_of_grace_ = false;
  std::unique_ptr<SignalHandler> signals_;
};

const char* dtype_name(const OptimizerConfig& config) {
  return config.bf16 ? "bf16" : config.fp16 ? "fp16" : "fp32";
}

RunState initial_state(const StartPoint& start, const PretrainTask& task,
                       const Tokenizer& tokenizer) {
  RunState state;
  if (start.continues()) {
    state = start.stored;
    MEGATRON_CHECK(state.task == task.name, start.checkpoint->directory().string(),
                   " was trained for the task ", state.task, ", this run is for ", task.name);
    MEGATRON_CHECK(state.tokenizer_fingerprint == tokenizer.fingerprint(),
                   start.checkpoint->directory().string(),
                   " was trained with another tokenizer\nhint: its files are stored in ",
                   (start.checkpoint->directory() / "tokenizer").string());
  }
  state.task = task.name;
  state.tokenizer_fingerprint = tokenizer.fingerprint();
  return state;
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

Run::Run(const PretrainTask& task, const Arguments& arguments, const Job& job, RunFolders& folders,
         const Versions& libraries)
    : task_(task),
      arguments_(arguments),
      config_(arguments.training),
      folders_(folders),
      device_(choose_device(config_.device, job.local_rank)),
      train_iters_(arguments.train_iters()),
      microbatches_(arguments.microbatches()),
      job_(job),
      groups_(job.groups),
      libraries_(libraries),
      tokenizer_(
          start_clock_.stage("tokenizer", [&] { return make_tokenizer(arguments.tokenizer); })),
      vocabulary_(vocabulary_of(arguments, *tokenizer_)),
      start_(start_clock_.stage("checkpoint chosen",
                                [&] {
                                  StartPoint start = decide_start(config_, job);
                                  if (task.join_parts)
                                    task.join_parts(arguments, vocabulary_, start);
                                  return start;
                                })),
      state_(initial_state(start_, task, *tokenizer_)),
      datasets_(start_clock_.stage(
          "data", [&] { return build_datasets(task, arguments, *tokenizer_, start_, state_); })),
      model_(start_clock_.stage("model and weights",
                                [&] {
                                  return build_model(task, arguments, vocabulary_, groups_,
                                                     model_dtype(arguments.optimizer), device_,
                                                     start_, job.agreement);
                                })),
      timers_(static_cast<int>(config_.profile && device_.is_cpu() ? 2 : config_.timing_log_level),
              [device = device_] { synchronize(device); }),
      log_(make_log()),
      checkpointer_(arguments, model_, log_, timers_,
                    checkpoint_files(arguments, *tokenizer_, start_.origin()),
                    /*replace_existing=*/start_.continues(), job.agreement),
      batches_(device_, groups_.cp, unpadded_row_multiple(arguments),
               task.addition(model_.chunks.front().module->config())),
      routing_(config_.moe_routing_record, config_.moe_routing_replay, groups_.world.rank()),
      outcomes_(device_),
      // With several ranks, the decision is part of a step's outcome, which the host may read two
      // steps later.
      time_limit_(60.0 * static_cast<double>(config_.exit_duration_in_mins.value_or(0)),
                  groups_.world.size() > 1 ? 3 : 1) {
  if (model_.optimizer && !task_.norm_parts.empty()) {
    Optimizer::NormParts prefixes;
    for (const auto& [name, own] : task_.norm_parts) prefixes.push_back(own);
    model_.optimizer->keep_norms_of(prefixes);
  }
  timers_.set_sections(job.clock.get());
  if (job.clock && groups_.world.size() > 1)
    slow_ranks_.emplace(groups_, device_, config_.log_interval, model_.pipeline->encodes());
  make_loaders();
  // The checkpoint that the run starts from exists already; into another folder it is saved at the
  // end even if nothing is trained.
  std::error_code ignored;
  if (start_.continues() &&
      std::filesystem::equivalent(start_.checkpoint->directory().parent_path(), config_.save,
                                  ignored))
    checkpointer_.set_last_saved(state_.iteration);
  folders_.set_iteration(state_.iteration);
  if (start_.continues())
    folders_.set_saved(state_.iteration, start_.checkpoint->directory().string(), 0);
  checkpointer_.when_published([this](const Checkpointer::Published& newest) {
    folders_.set_saved(newest.iteration, newest.directory, newest.longest_seconds);
  });
  if (config_.exit_signal_handler)
    signals_ = std::make_unique<SignalHandler>(config_.exit_signal_number());
}

// Flags override the configuration of a Hugging Face folder; weights are rarely useful in another
// architecture.
void Run::warn_of_other_architecture() const {
  const std::filesystem::path& folder = start_.checkpoint->directory();
  if (!is_hf_folder(folder) || start_.upcycles) return;
  const std::string difference =
      architecture_difference(arguments_.transformer, read_hf_config(folder).config.transformer);
  if (!difference.empty())
    log_warning(cat("this run is another model than ", folder.string(), ": ", difference,
                    " as its config.json says"));
}

std::vector<std::pair<std::string, double>> Run::named(const std::vector<double>& metrics) const {
  std::vector<std::pair<std::string, double>> out;
  for (size_t i = 0; i < metrics.size(); ++i) out.emplace_back(task_.metrics[i], metrics[i]);
  return out;
}

TrainingLog Run::make_log() const {
  RunFacts facts;
  facts.loss_name = task_.loss_name;
  facts.loss_per_token = task_.loss_per_token;
  facts.train_iters = train_iters_;
  facts.start_iteration = state_.iteration;
  facts.sequence_length = arguments_.transformer.seq_length;
  facts.world_size = groups_.world.size();
  facts.peak_flops = peak_bf16_flops(device_name(device_));
  facts.flops_per_token = task_.flops_per_token(arguments_, vocabulary_);
  if (!job_.is_first()) return TrainingLog(config_, facts);
  return TrainingLog(
      config_, facts,
      MetricsQueue(open_sinks({config_, resolved_json(arguments_), state_.iteration})));
}

void Run::make_loaders() {
  const DataConfig& data = arguments_.data;
  if (!config_.skip_train) {
    MEGATRON_CHECK(datasets_.train || state_.iteration >= train_iters_,
                   "the data has no training split\nhint: see --split");
    if (datasets_.train) {
      loader_ = make_train_loader(arguments_, groups_, datasets_.train,
                                  state_.consumed_train_samples, device_);
      if (arguments_.parallel.hybrid_context_parallel)
        dynamic_context_ = std::make_unique<DynamicContextBatches>(arguments_, groups_,
                                                                   std::move(loader_), device_);
    }
  }
  if (config_.eval_iters == 0 && !data.full_validation) datasets_.valid.clear();
  state_.consumed_valid_samples.resize(datasets_.valid.size());
  for (size_t i = 0; i < datasets_.valid.size(); ++i) {
    Evaluator::Options options = evaluation_options(arguments_, groups_);
    options.consumed_samples = state_.consumed_valid_samples[i];
    validation_.emplace_back(datasets_.valid[i], options, device_);
  }
}

void Run::announce() {
  for (const std::string& note : arguments_.notes) log_info(note);
  for (const auto& [flag, reason] : arguments_.already_so)
    log_info(cat(flag, " is already so: ", reason));
  if (job_.is_first())
    for (const std::string& note :
         start_notes(arguments_, vocabulary_, device_.is_cuda(), task_.model_provider))
      log_warning(note);
  const int64_t frozen = model_.num_frozen();
  const std::string frozen_text = format_count(static_cast<uint64_t>(frozen));
  log_info(cat("device ", device_name(device_), ", ", dtype_name(arguments_.optimizer), ", ",
               format_count(static_cast<uint64_t>(model_.num_parameters())), " parameters",
               groups_.world.size() > 1 ? " on this rank" : "",
               frozen > 0 ? cat(" of which ", frozen_text, " are frozen") : "", ", vocabulary ",
               vocabulary_.size, " padded to ", vocabulary_.padded_size));
  if (arguments_.transformer.fp4_format != Fp4Format::kNone)
    log_info(
        "FP4 is emulated: operands are rounded as on Blackwell and multiplied in bf16, slower than "
        "without");
  if (start_.continues()) {
    log_info(cat("resuming from ", start_.checkpoint->directory().string(), " at iteration ",
                 state_.iteration, " of ", train_iters_));
    for (const std::string& change :
         configuration_changes(arguments_, start_.checkpoint->directory() / "config.yaml"))
      log_info(cat("changed since that checkpoint: ", change));
  } else if (start_.checkpoint) {
    warn_of_other_architecture();
    for (const std::string& name : start_.waived)
      log_info(cat("holds no weights and is left out: ", name));
    for (const std::string& note : start_.notes) log_info(note);
    if (!start_.encoders)
      log_info(cat("starting from the weights of ", start_.checkpoint->directory().string(),
                   start_.upcycles ? ", which become those of experts" : ""));
  } else {
    log_info(cat("starting from new weights, seed ", arguments_.transformer.seed));
  }
  if (datasets_.train && !config_.skip_train)
    log_info(cat(
        "the whole run ",
        reading_summary(*datasets_.train, config_.train_samples.value_or(
                                              microbatches_.samples_of_iterations(train_iters_)))));
  announce_replicas();
  log_progress(config_, cat("started at iteration ", state_.iteration));
  if (!config_.run_folder().empty() && job_.is_first())
    write_file_atomically(std::filesystem::path(config_.run_folder()) / "config.yaml",
                          resolved_yaml(arguments_));
  write_start_record();
}

void Run::announce_replicas() const {
  const int64_t interval = config_.replica_hash_interval();
  const bool asked = config_.check_weight_hash_across_dp_replicas_interval.value_or(0) > 0;
  const int64_t count = model_.replicas ? model_.replicas->size() : 0;
  if (count > 0) {
    log_info(cat("copies of ", count, " tensors of this rank on other ranks are compared every ",
                 interval, " iterations"));
  } else if (asked && !config_.skip_train) {
    log_info(
        "--check-weight-hash-across-dp-replicas-interval: no tensor of this rank has a copy on "
        "another one");
  }
}

// Collects the hosts of all ranks; the first rank writes.
void Run::write_start_record() {
  const std::vector<RankHost> hosts = gather_hosts(job_, this_rank_host(device_name(device_)));
  if (!log_.metrics().is_open()) return;
  MetricsRecord record = log_.metrics().begin("start");
  record.member("iteration", state_.iteration)
      .member("task", task_.name)
      .member("device", device_name(device_));
  record.member("dtype", dtype_name(arguments_.optimizer));
  record.member("parameters", model_.num_parameters()).member("train_iters", train_iters_);
  for (const auto& [name, size] : arguments_.transformer.sizes()) record.member(name, size);
  record.member("vocab_size", vocabulary_.size)
      .member("global_batch_size", microbatches_.global_batch_size(state_.consumed_train_samples));
  record.member("micro_batch_size", config_.micro_batch_size)
      .member("optimizer", arguments_.optimizer.optimizer);
  record.member("lr", arguments_.optimizer.lr.value_or(0))
      .member("seed", arguments_.transformer.seed);
  add_origin(record, job_, arguments_.parallel, arguments_.encoder_ranks(), hosts, libraries_);
  log_.metrics().write(std::move(record));
  if (datasets_.train) log_.left_out(datasets_.train->left_out(), state_.iteration);
}

void Run::write_startup_record(int64_t iteration) {
  start_clock_.end_stage("first step");
  MetricsRecord record = log_.metrics().begin("startup");
  record.member("iteration", iteration).json("seconds", start_clock_.json());
  log_.metrics().write(std::move(record));
}

int Run::execute() {
  announce();
  if (start_.upcycles) save();  // so that the run resumes without the dense checkpoint
  if (config_.skip_train) {
    log_info("--skip-train: evaluating only");
  } else {
    train();
  }
  if (exit_reason_.empty()) {
    const std::string where = cat("iteration ", state_.iteration, " on validation set");
    evaluate_validation(where, /*may_stop=*/true);
    evaluate_test();
    stopped_ = may_stop_now();
    exit_reason_ = stopped_ ? "evaluation stopped by a signal" : "finished";
  }
  const int code = end(exit_reason_);
  // Copies from peers' memory must have completed before the last barrier.
  for (ModelChunk& chunk : model_.chunks) chunk.store->finish_param_sync();
  return code;
}

// With --save-failure continue the run continues without checkpoints, but its end must not look as
// if there were one.
void Run::require_final_save() const {
  if (config_.save.empty() || config_.skip_train || checkpointer_.last_saved() == state_.iteration)
    return;
  const int64_t newest = checkpointer_.newest().iteration;
  throw Error(
      cat("the final state, of iteration ", state_.iteration,
          ", was not saved (--save-failure continue); ",
          newest >= 0 ? cat("the newest checkpoint is iteration ", newest)
                      : cat(config_.save, " holds no checkpoint of this run"),
          "\nhint: make room there and start the run again with --start-mode resume-or-fresh"));
}

// Tells the user when a step and a checkpoint take longer than a signal leaves.
void Run::warn_of_slow_saves() {
  const Checkpointer::Published& newest = checkpointer_.newest();
  if (newest.directory.empty()) return;
  const int64_t grace =
      config_.exit_signal_grace_seconds.value_or(job_.launch.under_torchrun() ? 30 : 0);
  const double needed = newest.longest_seconds + time_limit_.longest_turn();
  if (grace == 0 || needed <= static_cast<double>(grace) || !job_.is_first() ||
      std::exchange(warned_of_grace_, true))
    return;
  log_warning(
      cat("a step and a save take ", static_cast<int64_t>(needed + 0.5),
          " s, but the run is killed ", grace, " s after a signal",
          config_.exit_signal_grace_seconds ? " (--exit-signal-grace-seconds)" : " (torchrun)",
          ": what was done since the last checkpoint would be lost\nhint: save more often "
          "(--save-interval), or ask the "
          "scheduler for an earlier signal (Slurm: --signal=TERM@SECONDS)"));
}

int Run::end(const std::string& reason) {
  checkpointer_.finish();
  require_final_save();
  log_progress(config_, cat(reason, " at iteration ", state_.iteration));
  MetricsRecord record = log_.metrics().begin("end");
  record.member("iteration", state_.iteration).member("reason", reason);
  log_.metrics().write(std::move(record));
  log_.close();
  log_info(cat(reason, " at iteration ", state_.iteration));
  const int code = stopped_ ? static_cast<int>(config_.stopped_exit_code.value_or(0)) : 0;
  folders_.ended(stopped_ ? RunEnd::kStopped : RunEnd::kFinished, code, reason);
  return code;
}

void Run::train() {
  start_clock_.end_stage("loaders and announcement");
  log_.resume();
  turn_began_ = std::chrono::steady_clock::now();
  while (state_.iteration < train_iters_) {
    profile_steps();
    const int64_t batch_size = microbatches_.global_batch_size(state_.consumed_train_samples);
    if (last_batch_size_ != 0 && batch_size != last_batch_size_) {
      log_info(cat("the global batch size grows from ", last_batch_size_, " to ", batch_size));
      save();
    }
    last_batch_size_ = batch_size;
    one_step();
    after_step();
    if (should_exit()) break;
  }
  read_outcomes(/*all=*/true);
  profile_steps();
  save();
}

void Run::one_step() {
  StepOptions options = step_options(arguments_, state_.consumed_train_samples);
  options.stop = wants_to_stop();
  const int64_t compared = config_.replica_hash_interval();
  if (compared > 0 && (state_.iteration + 1) % compared == 0)
    options.compare_replicas = state_.iteration + 1;
  if (const std::optional<int64_t> kept = config_.save_tokens_per_expert_interval)
    options.keeps_tokens_per_expert = (state_.iteration + 1) % *kept == 0;
  if (dynamic_context_)
    options.num_microbatches = dynamic_context_->begin_step(options.global_batch_size);
  const auto next_batch = [this] {
    if (dynamic_context_) return dynamic_context_->next();
    const auto begin = std::chrono::steady_clock::now();
    const std::shared_ptr<const MicroBatch> batch = loader_->next();
    loader_wait_ += 1e3 * seconds_since(begin);
    MEGATRON_CHECK(batch, "the training samples are used up after ", state_.consumed_train_samples,
                   " of ", loader_->dataset().size());
    media_.add(*batch);
    return batches_.make(batch);
  };
  media_ = {};
  loader_wait_ = 0.0;
  if (task_.logs_images || task_.logs_sounds) options.media = &media_;
  options.routing = routing_.begin(state_.iteration + 1);
  outcomes_.push(train_step(model_, task_, options, next_batch, timers_));
  routing_.end(state_.iteration + 1);
  if (job_.after_first_step && steps_done_++ == 0) job_.after_first_step();
  folders_.set_iteration(++state_.iteration);
  ++timed_iterations_;
  state_.consumed_train_samples += options.global_batch_size;

  Pending pending;
  pending.record.iteration = state_.iteration;
  pending.record.consumed_samples = state_.consumed_train_samples;
  pending.record.global_batch_size = options.global_batch_size;
  pending.held = batches_.take_held();
  pending.loader_wait = loader_wait_;
  if (state_.iteration % config_.log_interval == 0) {
    if (config_.log_num_zeros_in_grad)
      pending.record.num_zeros = static_cast<int64_t>(model_.optimizer->num_zeros());
    if (config_.log_params_norm) pending.record.params_norm = model_.optimizer->params_norm();
  }
  pending_.push_back(std::move(pending));
}

void Run::read_outcomes(bool all) {
  for (StepNumbers numbers; outcomes_.pop(numbers, all);) {
    StepRecord record = pending_.front().record;
    const double loader_wait = pending_.front().loader_wait;
    pending_.pop_front();
    if (numbers.replicas_differ) throw Error(model_.replicas->describe(record.iteration));
    if (slow_ranks_)
      if (const std::optional<std::string> line = slow_ranks_->step(record.iteration, numbers))
        log_warning(*line);
    for (const auto& [rank, times] : numbers.times) sections_.add(rank, times);
    const StepState& step = numbers.state;
    record.loss = numbers.loss;
    record.metrics = named(numbers.metrics);
    const std::vector<std::string> auxiliary = model_.auxiliary_losses();
    for (size_t i = 0; i < auxiliary.size(); ++i)
      record.metrics.emplace_back(auxiliary[i], numbers.auxiliary[i]);
    if (numbers.count_over_mean > 0)
      record.metrics.emplace_back("tokens per expert max/mean", numbers.count_over_mean);
    add_media(numbers, record);
    if (task_.logs_images || task_.logs_sounds)
      record.metrics.emplace_back("loader wait ms", loader_wait);
    record.skipped = step.skip != 0;
    record.non_finite = step.consecutive_bad > 0;
    record.learning_rate =
        learning_rate(model_.optimizer->schedule(), 0, static_cast<double>(step.num_steps));
    record.loss_scale = step.loss_scale;
    stop_ = std::max(stop_, numbers.stop);
    record.grad_norm = step.grad_norm;
    if (std::exchange(first_outcome_, false)) write_startup_record(record.iteration);
    if (!numbers.tokens_per_expert.empty())
      log_.tokens_per_expert(routers_of(arguments_.transformer).names, numbers.tokens_per_expert,
                             record.iteration);
    if (log_.step(record)) {
      if (config_.log_memory_interval && record.iteration % *config_.log_memory_interval == 0)
        log_.memory(gather_memory(groups_.world, device_), record.iteration);
      if (config_.timing_log_level > 0 && record.iteration % config_.log_interval == 0) {
        log_.timers(gather_timers(groups_.world, device_, timers_), record.iteration,
                    timed_iterations_);
        timers_.reset();
        timed_iterations_ = 0;
      }
    }
    if (record.iteration % config_.log_interval == 0)
      if (const std::optional<SectionSummaries> sections = sections_.take())
        log_.sections(*sections, record.iteration);
    MEGATRON_CHECK(!model_.optimizer->must_stop(step), "iteration ", record.iteration,
                   ": loss or gradient was not finite for ", step.consecutive_bad,
                   " iterations in a row\nhint: lower --lr, raise --lr-warmup-iters, or look at "
                   "the data from sample ",
                   record.consumed_samples - record.global_batch_size,
                   " on; --max-consecutive-bad-steps sets the limit");
  }
}

// Counts of images and sounds over all replicas, how evenly these have them, and gradient norms of
// parts of the model.
void Run::add_media(const StepNumbers& numbers, StepRecord& record) const {
  struct Count {
    const char* name;
    int64_t MediaCounts::* member;
    bool balanced, logged;
  };
  const Count counts[] = {{"images", &MediaCounts::images, false, task_.logs_images},
                          {"patches", &MediaCounts::patches, true, task_.logs_images},
                          {"sounds", &MediaCounts::sounds, false, task_.logs_sounds},
                          {"frames", &MediaCounts::frames, true, task_.logs_sounds}};
  for (const auto& [name, member, balanced, logged] : counts) {
    if (!logged) continue;
    int64_t sum = 0, most = 0;
    for (const MediaCounts& replica : numbers.media) {
      sum += replica.*member;
      most = std::max(most, replica.*member);
    }
    record.counts.emplace_back(name, sum);
    const auto replicas = static_cast<double>(numbers.media.size());
    if (balanced && replicas > 1)
      record.metrics.emplace_back(
          cat(name, " max/mean"),
          sum == 0 ? 1.0 : static_cast<double>(most) * replicas / static_cast<double>(sum));
  }
  for (size_t i = 0; i < numbers.module_norms.size(); ++i)
    record.metrics.emplace_back("grad norm " + task_.norm_parts[i].first, numbers.module_norms[i]);
}

void Run::after_step() {
  const int64_t iteration = state_.iteration;
  const bool evaluates = due(config_.eval_interval) &&
                         iteration >= config_.start_eval_at_iter.value_or(0) &&
                         !validation_.empty();
  const bool saves = due(config_.save_interval);
  const bool logs = iteration % config_.log_interval == 0 || pending_.front().record.iteration == 1;
  read_outcomes(/*all=*/logs || evaluates || saves);
  if (evaluates) evaluate_validation(cat("iteration ", iteration));
  if (saves) save();
  checkpointer_.poll();
  time_limit_.add_turn(seconds_since(std::exchange(turn_began_, std::chrono::steady_clock::now())));
  warn_of_slow_saves();
}

// Why this rank would end the run now, as a number: a signal, or kOutOfTime; 0: continue.
int64_t Run::wants_to_stop() {
  if (signalled()) return signals_->received();
  if (!config_.exit_duration_in_mins) return 0;
  const double save_seconds =
      config_.save.empty() ? 0 : checkpointer_.expected_seconds(folders_.seconds_per_save());
  return time_limit_.reached(seconds_since(job_.started), save_seconds) ? kOutOfTime : 0;
}

// All ranks decide alike: by the outcomes of steps, or by the iteration.
bool Run::should_exit() {
  const int64_t stop = groups_.world.size() > 1 ? stop_ : wants_to_stop();
  if (stop == kOutOfTime) {
    exit_reason_ = cat("stopped by --exit-duration-in-mins ", *config_.exit_duration_in_mins);
  } else if (stop != 0) {
    exit_reason_ = cat("stopped by signal ", stop);
  } else if (due(config_.exit_interval)) {
    exit_reason_ = "stopped by --exit-interval";
  }
  stopped_ = !exit_reason_.empty();
  return stopped_;
}

// Evaluations during training are never cut short: the samples they consume are part of the run's
// state.
void Run::evaluate_validation(const std::string& where, bool may_stop) {
  if (validation_.empty()) return;
  log_.pause();
  if (job_.clock) job_.clock->pause();
  std::function<bool()> stop;
  if (may_stop) stop = [this] { return may_stop_now(); };
  for (size_t i = 0; i < validation_.size(); ++i) {
    const Region region(timers_, "evaluate", 1);
    EvaluationRecord record;
    record.iteration = state_.iteration;
    record.consumed_samples = state_.consumed_train_samples;
    record.set_is_named = !arguments_.data.validation_set_names.empty();
    record.set_index = validation_.size() > 1 || record.set_is_named ? static_cast<int>(i) : -1;
    record.set_name = i < datasets_.valid_names.size() ? datasets_.valid_names[i] : "";
    record.at_end = may_stop;
    record.where = where;
    const std::optional<Evaluator::Result> result = validation_[i].run(task_, model_, stop);
    if (!result) break;
    record.loss = result->loss;
    record.metrics = named(result->metrics);
    state_.consumed_valid_samples[i] = validation_[i].consumed_samples();
    log_.evaluation(record);
  }
  if (job_.clock) job_.clock->resume();
  log_.resume();
}

void Run::evaluate_test() {
  if (!datasets_.test || config_.eval_iters == 0) return;
  EvaluationRecord record;
  record.iteration = state_.iteration;
  record.consumed_samples = state_.consumed_train_samples;
  record.split = "test";
  record.at_end = true;
  log_.pause();
  record.where = cat("iteration ", state_.iteration, " on test set");
  const std::optional<Evaluator::Result> result =
      Evaluator(datasets_.test, evaluation_options(arguments_, groups_, /*of_test_set=*/true),
                device_)
          .run(task_, model_, [this] { return may_stop_now(); });
  if (!result) return;
  record.loss = result->loss;
  record.metrics = named(result->metrics);
  log_.evaluation(record);
}

void Run::save() {
  if (config_.save.empty()) return;
  read_outcomes(/*all=*/true);
  if (model_.optimizer) {
    state_.step = model_.optimizer->read_state();
    state_.schedule = model_.optimizer->schedule();
  }
  if (job_.clock) job_.clock->pause();
  folders_.check();
  checkpointer_.save(state_);
  if (job_.clock) job_.clock->resume();
}

void Run::profile_steps() {
  const auto& ranks = config_.profile_ranks;
  const int rank = groups_.world.rank();
  if (!config_.profile || std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) return;
  const bool inside =
      state_.iteration >= config_.profile_step_start && state_.iteration < config_.profile_step_end;
  if (inside == profiling_) return;
  profiling_ = inside;
  synchronize(device_);
  if (device_.is_cuda()) {
    inside ? start_device_profiler() : stop_device_profiler();
  } else if (inside) {
    timers_.set_listener(
        [this](const std::string& name, auto begin, auto end) { trace_.add(name, begin, end); });
  } else {
    timers_.set_listener({});
    const std::filesystem::path path =
        std::filesystem::path(config_.run_folder()) /
        (rank == 0 ? "trace.json" : cat("trace-rank-", rank, ".json"));
    trace_.write(path);
    log_info(cat("wrote ", path.string(), "; open it in https://ui.perfetto.dev"));
  }
}

}  // namespace

int pretrain(const PretrainTask& task, const Arguments& arguments, const Job& job,
             const Versions& libraries) {
  use_threads(arguments, job.local_world_size);
  make_standard_output_optional();
  RunFolders folders(arguments.training, job);
  try {
    return with_own_errors([&] {
      Run run(task, arguments, job, folders, libraries);
      const int code = run.execute();
      job.groups.world.barrier();  // no rank destroys its groups while another uses them
      return code;
    });
  } catch (const std::exception& error) {
    folders.failed(error);
    throw;
  }
}

}  // namespace megatron
