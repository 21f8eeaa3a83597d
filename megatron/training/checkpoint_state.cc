#include "megatron/training/checkpoint_state.h"

#include <algorithm>
#include <ctime>
#include <fstream>
#include <set>
#include <sstream>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/base/log.h"
#include "megatron/comm/process_group.h"
#include "megatron/datasets/sources/conversation.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/interop/huggingface/hf_folder.h"
#include "megatron/interop/huggingface/peft.h"
#include "megatron/interop/load_model.h"
#include "megatron/models/model_table.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/experts/upcycling.h"
#include "megatron/training/hybrid_start.h"
#include "megatron/training/replicated_state.h"
#include "megatron/transformer/config/lora.h"

namespace megatron {

namespace {

const std::string& model_type(const std::vector<ModelChunk>& chunks) {
  return chunks.front().module->config().type;
}

// Rank 0 reads it; all ranks fail alike.
void check_type(const Checkpoint& checkpoint, const std::string& type, Agreement* agreement) {
  Agreement alone;
  decide_together(agreement != nullptr ? *agreement : alone, [&] {
    check_model_type(checkpoint, type);
    return std::string();
  });
}

std::vector<StateTensor> weight_tensors(const std::vector<ModelChunk>& chunks) {
  std::vector<StateTensor> out;
  for (const ModelChunk& chunk : chunks)
    for (StateTensor& entry : chunk.store->state()) out.push_back(std::move(entry));
  return out;
}

std::vector<StateTensor> state_tensors(TrainedModel& model, bool with_optimizer) {
  std::vector<StateTensor> out = weight_tensors(model.chunks);
  if (with_optimizer && model.optimizer)
    for (StateTensor& entry : model.optimizer->tensors()) out.push_back(std::move(entry));
  for (const ModelChunk& chunk : model.chunks)
    for (StateTensor& entry : chunk.store->delayed_scaling_state()) out.push_back(std::move(entry));
  return out;
}

// Pipeline stages load different tensors of one checkpoint.
std::vector<std::string> keys_of_all_ranks(const std::vector<ShardedTensor>& wanted,
                                           Agreement* agreement) {
  if (agreement == nullptr) return {};
  std::string own;
  for (const ShardedTensor& tensor : wanted) own += tensor.key + "\n";
  std::set<std::string> keys;
  for (const std::string& text : agreement->gather(own)) {
    std::istringstream lines(text);
    for (std::string key; std::getline(lines, key);) keys.insert(key);
  }
  std::string all;
  for (const std::string& key : keys) all += key + "\n";
  std::istringstream lines(agreement->broadcast(all));
  std::vector<std::string> out;
  for (std::string key; std::getline(lines, key);) out.push_back(key);
  return out;
}

// Replicas read each byte once and broadcast it; a rank that cannot read its part fails the load on
// all ranks.
LoadReport read_tensors(const Checkpoint& checkpoint, std::vector<StateTensor> tensors,
                        LoadOptions options, Agreement* agreement) {
  if (agreement == nullptr)
    for (StateTensor& tensor : tensors) tensor.replicas = nullptr;
  const ReplicatedRead replicated(std::move(tensors));
  std::vector<at::Tensor> on_host;
  std::vector<ShardedTensor> wanted;
  for (const StateTensor& part : replicated.parts()) {
    on_host.push_back(part.data.is_cpu() ? part.data : at::empty_like(part.data, at::kCPU));
    wanted.push_back(part.description);
    wanted.back().data = on_host.back().data_ptr();
    wanted.back().replica_id = 0;
  }
  Agreement alone;
  Agreement& ranks = agreement != nullptr ? *agreement : alone;
  options.wanted_elsewhere = keys_of_all_ranks(wanted, agreement);
  options.progress = [&ranks] { ranks.progress(); };
  LoadReport report;
  work_together(ranks, [&] { report = checkpoint.load(wanted, options); });
  for (size_t i = 0; i < on_host.size(); ++i)
    if (const at::Tensor& data = replicated.parts()[i].data; !data.is_cpu()) data.copy_(on_host[i]);
  replicated.share();
  return report;
}

// Moves tensors that `chosen` accepts out of `tensors`.
template <class Chosen>
std::vector<StateTensor> take(std::vector<StateTensor>& tensors, const Chosen& chosen) {
  std::vector<StateTensor> taken;
  std::erase_if(tensors, [&](StateTensor& entry) {
    if (!chosen(entry.description.key)) return false;
    taken.push_back(std::move(entry));
    return true;
  });
  return taken;
}

// A pooler with a norm has the form of the head of masked tokens, from which it starts where the
// checkpoint has that head and no pooler, as in `transformers`.
void take_pooler_from_head(const Checkpoint& checkpoint, std::vector<StateTensor>& tensors) {
  constexpr std::string_view kPooler = "pooler.", kNorm = "pooler.layer_norm.weight";
  const auto& held = checkpoint.manifest().tensors;
  if (std::ranges::none_of(tensors, [&](const auto& t) { return t.description.key == kNorm; }))
    return;
  for (StateTensor& tensor : tensors) {
    std::string& key = tensor.description.key;
    if (!key.starts_with(kPooler) || held.contains(key)) continue;
    if (std::string head = cat("lm_head.", key.substr(kPooler.size())); held.contains(head))
      key = std::move(head);
  }
}

// Names of the frozen parameters of this rank.
std::set<std::string> frozen_names(const TrainedModel& model) {
  std::set<std::string> names;
  for (const ModelChunk& chunk : model.chunks)
    for (const Parameter* parameter : chunk.store->parameters())
      if (!parameter->trainable) names.insert(parameter->name);
  return names;
}

}  // namespace

bool has_adapters(const Checkpoint& checkpoint) {
  const auto& tensors = checkpoint.manifest().tensors;
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const auto& item) { return is_lora_parameter(item.first); });
}

void load_weights(const Checkpoint& checkpoint, std::vector<ModelChunk>& chunks,
                  Agreement* agreement) {
  LoadOptions options;
  options.convert_dtype = true;
  options.allow_unexpected = {"optimizer.*", "fp8.*"};
  check_type(checkpoint, model_type(chunks), agreement);
  for (ModelChunk& chunk : chunks) chunk.store->values_will_change();
  read_tensors(checkpoint, weight_tensors(chunks), options, agreement);
  for (ModelChunk& chunk : chunks) chunk.store->values_changed();
}

void load_model_state(const Checkpoint& checkpoint, const RunState& state,
                      const OptimizerConfig& config, TrainedModel& model, LoadParts parts,
                      Agreement* agreement) {
  const std::string name = checkpoint.directory().string();
  MEGATRON_CHECK(!parts.optimizer || (state.step && state.schedule), name,
                 " was saved without its optimizer\nhint: give --no-load-optim, or --finetune");
  const bool resumes_parts = parts.frozen_source != nullptr;  // only the frozen ones are read
  if (parts.encoders == nullptr || resumes_parts)
    check_type(checkpoint, parts.origin.empty() ? model_type(model.chunks) : parts.origin,
               agreement);
  std::vector<StateTensor> tensors = state_tensors(model, parts.optimizer), adapters;
  if (!parts.adapters || parts.adapter_source != nullptr)
    adapters = take(tensors, [&](const std::string& key) {
      return is_lora_parameter(key) || (parts.adapter_source != nullptr &&
                                        parts.adapter_source->manifest().tensors.contains(key));
    });
  std::vector<StateTensor> frozen;
  if (parts.frozen_source != nullptr)
    frozen = take(tensors, [names = frozen_names(model)](const std::string& key) {
      return names.contains(key);
    });
  std::vector<std::vector<StateTensor>> of_encoders;
  if (parts.encoders != nullptr)
    for (const Checkpoint& encoder : *parts.encoders)
      of_encoders.push_back(take(resumes_parts ? frozen : tensors, [&](const std::string& key) {
        return encoder.manifest().tensors.contains(key);
      }));
  if (parts.upcycling != nullptr) parts.upcycling->redirect(tensors);
  read_as_letters(checkpoint, model.chunks.front().module->config().transformer, tensors);
  if (!parts.heads.empty()) take_pooler_from_head(checkpoint, tensors);
  LoadOptions options;
  options.convert_dtype = !parts.optimizer;
  // A run may resume in another precision: scales that it does not use are ignored, and those that
  // the checkpoint does not have are measured in the first step.
  options.allow_unexpected = {"fp8.*"};
  options.allow_missing = {"fp8.*"};
  if (!parts.optimizer) options.allow_unexpected.push_back("optimizer.*");
  for (const std::string& head : parts.heads) {
    options.allow_unexpected.push_back(head);
    options.allow_missing.push_back(head);
  }
  for (ModelChunk& chunk : model.chunks) chunk.store->values_will_change();
  const LoadReport report = read_tensors(checkpoint, tensors, options, agreement);
  if (parts.optimizer && !report.missing.empty())
    log_warning(cat(name, " holds no scales for ", report.missing.front(),
                    report.missing.size() > 1 ? " and others" : "",
                    ": the first step scales tensors by their own values"));
  if (parts.adapter_source != nullptr)
    read_tensors(*parts.adapter_source, adapters, options, agreement);
  if (parts.frozen_source != nullptr) {
    options.convert_dtype = true;
    options.allow_unexpected = {"*"};
    read_tensors(*parts.frozen_source, frozen, options, agreement);
  }
  options.convert_dtype = true;
  for (size_t i = 0; i < of_encoders.size(); ++i)
    read_tensors((*parts.encoders)[i], std::move(of_encoders[i]), options, agreement);
  for (ModelChunk& chunk : model.chunks) {
    chunk.store->values_changed();
    if (parts.upcycling != nullptr) parts.upcycling->complete(*chunk.store);
    chunk.store->delayed_scales_loaded();
  }
  if (!model.optimizer) return;
  if (parts.optimizer) {
    model.optimizer->set_schedule(
        resume_schedule(model.optimizer->schedule(), *state.schedule, config));
    model.optimizer->load_state(*state.step);
    model.optimizer->reload_values();
  } else {
    model.optimizer->reload_masters();
  }
}

std::vector<std::pair<std::string, std::string>> checkpoint_files(const Arguments& arguments,
                                                                  const Tokenizer& tokenizer,
                                                                  const Checkpoint* start) {
  std::vector<std::pair<std::string, std::string>> files = {
      {"config.yaml", resolved_yaml(arguments)}};
  for (const std::filesystem::path& file : tokenizer.files())
    files.emplace_back("tokenizer/" + file.filename().string(), read_file(file));
  // A model is saved with the chat template that it was trained on.
  const auto add = [&](const std::string& name, const std::string& text) {
    for (auto& [known, contents] : files)
      if (known == "tokenizer/" + name) return;
    files.emplace_back("tokenizer/" + name, text);
  };
  const std::filesystem::path folder = tokenizer_folder(arguments.tokenizer);
  const std::string given = arguments.sft.given_template();
  if (!given.empty()) add("chat_template.jinja", load_chat_template(folder, given).source());
  for (const char* name : {"chat_template.jinja", "chat_template.json", "tokenizer_config.json",
                           "special_tokens_map.json", "added_tokens.json"})
    if (!folder.empty() && std::filesystem::is_regular_file(folder / name))
      add(name, read_file(folder / name));
  if (start == nullptr) return files;
  const std::filesystem::path adapter = arguments.training.adapter;
  for (auto& [name, text] : origin_files(*start))
    if (name != kKeptPeftConfig || adapter.empty()) files.emplace_back(name, std::move(text));
  if (is_peft_folder(adapter))
    files.emplace_back(kKeptPeftConfig, read_file(adapter / kPeftConfig));
  return files;
}

// Host copies of the state tree. The next save reuses the memory after the previous one has ended.
struct Checkpointer::Snapshot {
  std::vector<at::Tensor> tensors;
};

Checkpointer::Checkpointer(const Arguments& arguments, TrainedModel& model, TrainingLog& log,
                           Timers& timers, std::vector<std::pair<std::string, std::string>> files,
                           bool replace_existing, Agreement* agreement)
    : arguments_(arguments),
      model_(model),
      log_(log),
      timers_(timers),
      files_(std::move(files)),
      replace_existing_(replace_existing),
      agreement_(agreement) {
  // checkpoint_files() are those of the run; what holds the weights says of which type they are.
  for (auto& [name, contents] : files_)
    if (name == "config.yaml") contents = model_type_yaml(model_type(model.chunks)) + contents;
  if (arguments.training.async_save) saver_ = std::make_unique<AsyncSaver>(1);
}

Checkpointer::~Checkpointer() = default;

SaveRequest Checkpointer::request(const RunState& state, bool copy,
                                  std::shared_ptr<Snapshot>& snapshot) {
  const TrainingConfig& training = arguments_.training;
  std::vector<StateTensor> tensors = state_tensors(model_, !training.no_save_optim);
  if (!training.save_frozen)
    take(tensors,
         [names = frozen_names(model_)](const std::string& key) { return names.contains(key); });
  tensors = parts_to_write(tensors);
  const bool reuse =
      snapshot_ && snapshot_.use_count() == 1 && snapshot_->tensors.size() == tensors.size();
  snapshot = reuse ? snapshot_ : std::make_shared<Snapshot>();
  SaveRequest out;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& source = tensors[i].data;
    at::Tensor host = source;
    if (copy || !source.is_cpu() || !source.is_contiguous()) {
      if (!reuse) {
        snapshot->tensors.push_back(at::empty(
            source.sizes(), source.options().device(at::kCPU).pinned_memory(source.is_cuda())));
      }
      host = snapshot->tensors[i];
      host.copy_(source, /*non_blocking=*/true);
    } else if (!reuse) {
      snapshot->tensors.push_back(host);
    }
    out.tensors.push_back(tensors[i].description);
    out.tensors.back().data = host.data_ptr();
  }
  synchronize(model_.device());
  snapshot_ = snapshot;
  out.root = training.save;
  out.iteration = state.iteration;
  out.state = run_state_to_json(state);
  out.files = files_;
  out.retention.retain_interval = training.save_retain_interval;
  out.retention.keep_last = training.keep_last_checkpoints;
  out.replace_existing = replace_existing_;
  out.agreement = agreement_;
  return out;
}

void Checkpointer::save(RunState state) {
  if (state.iteration == last_saved_) return;
  const Region region(timers_, "save-checkpoint", 1);
  log_.pause();
  if (arguments_.training.no_save_optim) {
    state.step.reset();
    state.schedule.reset();
  }
  last_saved_ = state.iteration;
  const auto begin = std::chrono::steady_clock::now();
  std::shared_ptr<Snapshot> snapshot;
  if (saver_) {
    // Wait first, so that the copy can reuse the memory of the previous save.
    if (saver_->in_flight() > 0) finish();
    SaveRequest save = request(state, /*copy=*/true, snapshot);
    started_.emplace_back(state.iteration, begin);
    saver_->submit(std::move(save), snapshot);
  } else {
    SaveOutcome outcome;
    outcome.iteration = state.iteration;
    started_.emplace_back(state.iteration, begin);
    try {
      outcome.result = save_checkpoint(request(state, /*copy=*/false, snapshot));
    } catch (const Error& error) {
      outcome.failure = std::current_exception();
      outcome.error = error.what();
    }
    report(outcome);
  }
  log_.resume();
}

void Checkpointer::poll() {
  if (!saver_) return;
  for (const SaveOutcome& outcome : saver_->poll()) report(outcome);
}

void Checkpointer::finish() {
  if (!saver_) return;
  for (const SaveOutcome& outcome : saver_->finish()) report(outcome);
}

namespace {

// A rank that failed or hangs ends the run even if it would survive a disk error.
void rethrow_if_a_peer_failed(const SaveOutcome& outcome) {
  if (!outcome.failure) return;
  try {
    std::rethrow_exception(outcome.failure);
  } catch (const CollectiveError&) {
    throw;
  } catch (const std::exception&) {
  }
}

}  // namespace

void Checkpointer::report(const SaveOutcome& outcome) {
  double seconds = 0;
  const auto begun = std::find_if(started_.begin(), started_.end(),
                                  [&](const auto& s) { return s.first == outcome.iteration; });
  if (begun != started_.end()) {
    seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begun->second).count();
    started_.erase(begun);
  }
  for (const std::string& warning : outcome.result.warnings) log_warning(warning);
  if (!outcome.error.empty()) {
    rethrow_if_a_peer_failed(outcome);
    if (last_saved_ == outcome.iteration) last_saved_ = -1;
    const std::string message =
        cat("the checkpoint of iteration ", outcome.iteration, " was not saved: ", outcome.error);
    if (arguments_.training.save_failure == SaveFailure::kStop)
      throw Error(message + "\nhint: --save-failure continue keeps training without it");
    log_error(message);
    log_error("training continues (--save-failure continue)");
    return;
  }
  newest_.iteration = outcome.iteration;
  newest_.directory = outcome.result.directory.string();
  newest_.longest_seconds = std::max(newest_.longest_seconds, seconds);
  if (when_published_) when_published_(newest_);
  print_line(cat("  saved checkpoint of iteration ", outcome.iteration, " to ",
                 outcome.result.directory.string(), " (",
                 format_bytes(static_cast<double>(outcome.result.total_bytes)), ")"));
  log_progress(arguments_.training, cat("saved iteration ", outcome.iteration));
  if (!log_.metrics().is_open()) return;
  MetricsRecord record = log_.metrics().begin("checkpoint");
  record.member("iteration", outcome.iteration)
      .member("bytes", outcome.result.total_bytes)
      .member("seconds", seconds);
  record.member("directory", outcome.result.directory.string());
  log_.metrics().write(std::move(record));
}

double Checkpointer::expected_seconds(double before) {
  const double measured = std::max(newest_.longest_seconds, before);
  if (measured > 0) return measured;
  if (state_bytes_ == 0)
    for (const StateTensor& tensor : state_tensors(model_, !arguments_.training.no_save_optim))
      state_bytes_ += static_cast<double>(tensor.data.nbytes());
  constexpr double kBytesPerSecond = 100e6;
  return state_bytes_ / kBytesPerSecond;
}

void log_progress(const TrainingConfig& config, const std::string& text) {
  if (!config.log_progress || config.save.empty()) return;
  std::error_code ignored;
  std::filesystem::create_directories(config.save, ignored);
  std::ofstream(std::filesystem::path(config.save) / "progress.txt", std::ios::app)
      << format_time(std::time(nullptr), "%Y-%m-%d %H:%M:%S") << "\t" << text << "\n";
}

}  // namespace megatron
