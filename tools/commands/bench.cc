// megatron bench: times training steps of a configuration on random tokens, the kernels of its
// layers, or the machine.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <optional>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/comm/launch.h"
#include "megatron/reporting/flops.h"
#include "megatron/runtime/device.h"
#include "megatron/runtime/kernel_profile.h"
#include "megatron/tensor/threads.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/arguments/flag_table.h"
#include "megatron/training/arguments/padding_rules.h"
#include "megatron/training/benchmarking/ceilings.h"
#include "megatron/training/rank_reports.h"
#include "megatron/training/setup.h"
#include "megatron/training/tasks/tasks.h"
#include "megatron/training/training_job.h"
#include "megatron/transformer/context_parallel/context_parallel.h"
#include "tools/support/ranks_command.h"

namespace megatron {

int bench_serve(int argc, char** argv);  // bench_serve.cc

namespace {

struct BenchConfig : Config {
  std::vector<std::string> what;
  int64_t bench_warmup = 3;
  int64_t bench_steps = 10;
  int64_t bench_kernels = 0;
  std::string bench_timeline;
  bool bench_floor = false;
  std::string bench_only;
  double bench_seconds = 1.0;
  bool bench_sections = false;
  std::string bench_slow;
  bool json = false;

  void fields(FieldVisitor& v) override {
    v.group("bench");
    v.field("what", what,
            "what to measure: train (steps), kernels (those of a layer, the head and the "
            "optimizer), machine (products, copies, attention, collectives)");
    v.field("bench_warmup", bench_warmup, "steps before the clock starts");
    v.field("bench_steps", bench_steps, "steps that are timed; their median is reported");
    v.field("bench_kernels", bench_kernels,
            "one more step under the profiler: time by kind of work and this many of the longest "
            "kernels (0: none)");
    v.field("bench_timeline", bench_timeline,
            "the kernels and copies of that step by stream, for Perfetto or chrome://tracing; of "
            "rank R above 0 in FILE.R");
    v.field("bench_floor", bench_floor,
            "also the time that the parts of a step take alone, each at the rate measured here");
    v.field("bench_sections", bench_sections,
            "time the sections of every second step, as pretrain does of all on several ranks, and "
            "report what that costs");
    v.field(
        "bench_slow", bench_slow,
        "RANK:SECTION:SHARE slows a rank after the warm-up by that share of a step, by products "
        "(forward), or by sleeping (data, host), and reports when it is named");
    v.field("bench_only", bench_only, "of kernels, only those whose names contain this");
    v.field("bench_seconds", bench_seconds, "how long kernels and parts of a step are run each");
    v.field("json", json, "print JSON");
  }
  struct Slow {
    int rank = -1;
    Section section = Section::kNone;
    double share = 0;
  };
  std::optional<Slow> parse_slow() const {
    Slow slow;
    char name[16] = {};
    if (std::sscanf(bench_slow.c_str(), "%d:%15[a-z]:%lf", &slow.rank, name, &slow.share) != 3)
      return std::nullopt;
    for (const Section section : {Section::kForward, Section::kData, Section::kHost})
      if (std::string_view(name) == section_name(section)) slow.section = section;
    if (slow.section == Section::kNone || slow.rank < 0 || !(slow.share > 0)) return std::nullopt;
    return slow;
  }
  bool is(std::string_view kind) const { return what.size() == 1 && what.front() == kind; }
  void validate(Violations& violations) const override {
    if (!is("train") && !is("kernels") && !is("machine"))
      violations.add("megatron bench needs to know what to measure",
                     "megatron bench train --config FILE, megatron bench kernels --config FILE, or "
                     "megatron bench machine");
    if (!(bench_seconds > 0))
      violations.add(cat("--bench-seconds ", bench_seconds, " must be positive"));
    if (bench_floor && !is("train"))
      violations.add("--bench-floor belongs to megatron bench train");
    if (!bench_only.empty() && !is("kernels"))
      violations.add("--bench-only belongs to megatron bench kernels");
    if (!bench_timeline.empty() && !is("train"))
      violations.add("--bench-timeline belongs to megatron bench train");
    if ((bench_sections || !bench_slow.empty()) && !is("train"))
      violations.add("--bench-sections and --bench-slow belong to megatron bench train");
    if (!bench_slow.empty() && !parse_slow())
      violations.add(cat("--bench-slow ", bench_slow, " is not understood"),
                     "RANK:SECTION:SHARE with forward, data or host: 1:forward:0.2");
    if (bench_warmup < 0) violations.add(cat("--bench-warmup ", bench_warmup, " is negative"));
    if (bench_kernels < 0) violations.add(cat("--bench-kernels ", bench_kernels, " is negative"));
    if (bench_steps <= 0) violations.add(cat("--bench-steps ", bench_steps, " must be positive"));
  }
};

// A micro-batch of new random tokens. All ranks of one data-parallel index generate the same ones.
Batch random_batch(const Arguments& arguments, int64_t vocab_size, c10::Device device,
                   const ProcessGroup& cp, int64_t first_sample) {
  const int64_t b = arguments.training.micro_batch_size, s = arguments.transformer.seq_length;
  // Generated on the device, so that no step waits for the host, as in `pretrain`.
  at::Tensor uniform = at::empty({b, s + 1}, at::dtype(at::kFloat).device(device));
  uniform_(uniform, 0.0, 1.0, random_key(arguments.transformer.seed, "bench"), first_sample, s + 1,
           0);
  const at::Tensor text =
      (uniform * static_cast<double>(vocab_size)).to(at::kLong).clamp_max(vocab_size - 1);
  Batch batch;
  batch.set("tokens", zigzag_slice(text.slice(1, 0, s), 1, cp).contiguous());
  batch.set("labels", zigzag_slice(text.slice(1, 1, s + 1), 1, cp).contiguous());
  batch.set("loss_mask", at::ones(batch["tokens"].sizes(), at::dtype(at::kFloat).device(device)));
  batch.totals.loss_weight = batch.totals.tokens =
      at::full({b}, s, at::dtype(at::kDouble).device(device));
  batch.place.sample =
      at::arange(first_sample, first_sample + b, at::dtype(at::kLong).device(device));
  batch.place.position = zigzag_positions(s, cp.size(), cp.rank(), device);
  return batch;
}

// The run's task if its samples have padding or its model is of another type; all others have the
// model, the samples and the costs of gpt.
PretrainTask benched_task(const Arguments& arguments, const Vocabulary& vocabulary) {
  PretrainTask task = find_task(arguments);
  const bool own = pads_samples(task.name) ||
                   whole_model(task.model_provider, arguments, vocabulary)->config().type != "gpt";
  return own ? std::move(task) : gpt_task();
}

// The micro-batches of a rank: of random tokens, or of the task's own samples, made up.
class BenchBatches {
 public:
  BenchBatches(const PretrainTask& task, const Arguments& arguments, const Vocabulary& vocabulary,
               const ParallelGroups& groups, c10::Device device)
      : arguments_(arguments),
        vocab_size_(vocabulary.size),
        groups_(groups),
        device_(device),
        sample_(groups.dp.rank() * arguments.training.micro_batch_size),
        maker_(device, groups.cp, unpadded_row_multiple(arguments),
               task.addition(whole_model(task.model_provider, arguments, vocabulary)->config())) {
    if (task.name == "gpt") return;
    tokenizer_ = make_tokenizer(arguments.tokenizer);
    datasets_ = build_datasets(task, arguments, *tokenizer_);
    loader_ = make_train_loader(arguments, groups, datasets_.train, /*consumed=*/0, device);
  }
  Batch next() {
    if (loader_ == nullptr) {
      const int64_t step = arguments_.training.micro_batch_size * groups_.dp.size();
      return random_batch(arguments_, vocab_size_, device_, groups_.cp,
                          std::exchange(sample_, sample_ + step));
    }
    const std::shared_ptr<const MicroBatch> source = loader_->next();
    MEGATRON_CHECK(source != nullptr, "--train-iters has fewer steps than are timed");
    tokens_ += text_tokens(*source);
    Batch batch = maker_.make(source);
    Batch rows;
    rows.unpadded = batch.unpadded;
    rows.most_counted = batch.most_counted;
    rows_.push_back(std::move(rows));
    return batch;
  }
  // Which rows a usual micro-batch computes: the one with the median number of them.
  Batch usual_rows() {
    if (rows_.empty()) return {};
    const auto count = [](const Batch& batch) {
      int64_t rows = 0;
      for (const auto& [column, texts] : batch.unpadded) rows += texts->rows;
      return rows;
    };
    const auto middle = rows_.begin() + std::ssize(rows_) / 2;
    std::ranges::nth_element(rows_, middle, {}, count);
    return *middle;
  }
  // Tokens of texts without padding since the last call, a rank's share of those of its data rank;
  // 0: not known. Copies to the device have ended.
  double take_tokens() {
    maker_.take_held();
    return static_cast<double>(std::exchange(tokens_, 0)) * static_cast<double>(groups_.dp.size()) /
           static_cast<double>(groups_.world.size());
  }

 private:
  const Arguments& arguments_;
  int64_t vocab_size_;
  const ParallelGroups& groups_;
  c10::Device device_;
  int64_t sample_, tokens_ = 0;
  std::vector<Batch> rows_;  // of each micro-batch, without its columns
  std::unique_ptr<Tokenizer> tokenizer_;
  TrainValidTestDatasets datasets_;
  std::unique_ptr<DataLoader> loader_;  // null: random tokens
  BatchMaker maker_;
};

struct Measured {
  double text_tokens = 0.0;        // of a rank in a timed step, without padding; 0: not known
  double step_ms = 0.0;            // median
  double timed_step_ms = 0.0;      // median of steps whose sections are timed
  SectionTimes sections{};         // sections of this rank
  std::vector<std::string> named;  // slow ranks
  double first_step_ms = 0.0;
  double last_loss = 0.0;
  double count_over_mean = 0.0;  // StepNumbers::count_over_mean, median of the timed steps
  KernelProfile kernels;         // kernels of an additional step
  Batch rows;                    // BenchBatches::usual_rows()
  StepFloor floor;               // --bench-floor
};

double median(std::vector<double> times) {
  if (times.empty()) return 0.0;
  std::nth_element(times.begin(), times.begin() + static_cast<int64_t>(times.size() / 2),
                   times.end());
  return times[times.size() / 2];
}

void sleep_ms(double milliseconds) {
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(milliseconds));
}

// Delays one rank artificially.
class Slowdown {
 public:
  Slowdown(const BenchConfig& config, const Arguments& arguments, int rank, c10::Device device) {
    if (config.bench_slow.empty()) return;
    slow_ = *config.parse_slow();
    if (slow_.rank != rank) slow_.section = Section::kNone;
    passes_ = static_cast<double>(step_options(arguments, 0).num_microbatches);
    const int64_t size = device.is_cuda() ? 2048 : 256;
    factor_ = at::ones({size, size},
                       at::TensorOptions().dtype(model_dtype(arguments.optimizer)).device(device));
    for (const int count : {3, 20}) {
      const auto begin = std::chrono::steady_clock::now();
      multiply(count);
      synchronize(device);
      product_ms_ =
          std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
              .count() /
          count;
    }
  }
  // Step time without the delay; 0: no delay yet.
  void set_step(double milliseconds) { step_ms_ = milliseconds; }
  void in_forward() const {
    if (slow_.section == Section::kForward)
      multiply(static_cast<int>(slow_.share * step_ms_ / passes_ / product_ms_));
  }
  void in_data() const {
    if (slow_.section == Section::kData) sleep_ms(slow_.share * step_ms_ / passes_);
  }
  void on_host() const {
    if (slow_.section == Section::kHost) sleep_ms(slow_.share * step_ms_);
  }

 private:
  void multiply(int count) const {
    const at::NoGradGuard no_grad;
    for (int i = 0; i < count; ++i) at::mm(factor_, factor_);
  }
  BenchConfig::Slow slow_;
  double passes_ = 1, product_ms_ = 0, step_ms_ = 0;
  at::Tensor factor_;
};

Measured measure(TrainedModel& model, const PretrainTask& plain_task, const Arguments& arguments,
                 const BenchConfig& config, const Vocabulary& vocabulary, c10::Device device,
                 SectionClock* clock) {
  StepOptions options = step_options(arguments, 0);
  const ParallelGroups& groups = model.groups();
  Timers timers(0);
  OutcomeReader reader(device);
  Slowdown slowdown(config, arguments, groups.world.rank(), device);
  PretrainTask task = plain_task;
  task.forward_step = [&](Model& model, const Batch& batch, const StageTensors& input,
                          const ForwardContext& context) {
    slowdown.in_forward();
    return plain_task.forward_step(model, batch, input, context);
  };
  std::optional<SlowRankWatch> watch;
  if (clock != nullptr && !config.bench_slow.empty())
    watch.emplace(groups, device, config.bench_steps, model.pipeline->encodes());
  const int64_t compared = arguments.training.replica_hash_interval();
  BenchBatches batches(plain_task, arguments, vocabulary, groups, device);
  const auto next_batch = [&] {
    slowdown.in_data();
    return batches.next();
  };
  Measured measured;
  StepNumbers numbers;
  std::vector<double> times, timed_times, counts_over_mean;
  for (int64_t step = 0; step < config.bench_warmup + config.bench_steps; ++step) {
    groups.world.barrier();
    synchronize(device);
    const auto start = std::chrono::steady_clock::now();
    const bool timed = clock != nullptr && (watch || (config.bench_sections && step % 2 == 1));
    if (clock != nullptr) timers.set_sections(timed ? clock : nullptr);
    if (clock != nullptr && !timed) clock->pause();
    options.compare_replicas.reset();
    if (compared > 0 && (step + 1) % compared == 0) options.compare_replicas = step + 1;
    slowdown.on_host();
    reader.push(train_step(model, task, options, next_batch, timers));
    synchronize(device);
    const double ms =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    while (reader.pop(numbers, /*all=*/true)) {
      measured.last_loss = numbers.loss;
      if (step >= config.bench_warmup) counts_over_mean.push_back(numbers.count_over_mean);
      if (numbers.replicas_differ) throw Error(model.replicas->describe(step + 1));
      for (const auto& [rank, sections] : numbers.times)
        if (rank == groups.world.rank()) measured.sections = sections;
      if (!watch) continue;
      if (const std::optional<std::string> line = watch->step(step + 1, numbers))
        measured.named.push_back(*line);
    }
    if (step == 0) measured.first_step_ms = ms;
    const double texts = batches.take_tokens();
    if (step >= config.bench_warmup)
      measured.text_tokens += texts / static_cast<double>(config.bench_steps);
    if (step >= config.bench_warmup) (timed ? timed_times : times).push_back(ms);
    if (step + 1 == config.bench_warmup && config.bench_warmup > 1) slowdown.set_step(ms);
  }
  timers.set_sections(nullptr);
  if (clock != nullptr) clock->pause();
  if (config.bench_floor) measured.rows = batches.usual_rows();
  if (config.bench_kernels > 0 || !config.bench_timeline.empty()) {
    groups.world.barrier();
    const std::vector<KernelEvent> events = profile_kernels([&] {
      reader.push(train_step(model, task, options, next_batch, timers));
      synchronize(device);
    });
    const int rank = groups.world.rank();
    if (!config.bench_timeline.empty())
      write_timeline(events, rank,
                     rank == 0 ? config.bench_timeline : cat(config.bench_timeline, ".", rank));
    if (config.bench_kernels > 0) measured.kernels = summarize_kernels(events);
  }
  measured.count_over_mean = median(counts_over_mean);
  measured.timed_step_ms = median(timed_times);
  measured.step_ms = times.empty() ? measured.timed_step_ms : median(times);
  return measured;
}

// Rates are per rank: `tokens` and `flops` are those of a step divided by the number of ranks.
void print_result(const BenchConfig& config, const Measured& measured, double tokens, double flops,
                  int64_t num_parameters, int ranks, c10::Device device) {
  const double seconds = measured.step_ms / 1e3, text_tokens = measured.text_tokens;
  const double peak = peak_bf16_flops(device_name(device));
  const MemoryUse memory = memory_use(device);
  JsonWriter json(2);
  json.begin_object().member("device", device_name(device)).member("ranks", ranks);
  json.member("parameters_of_this_rank", num_parameters)
      .member("tokens_per_step_and_rank", tokens)
      .member("step_ms", measured.step_ms)
      .member("first_step_ms", measured.first_step_ms);
  if (text_tokens > 0)
    json.member("text_tokens_per_step_and_rank", text_tokens)
        .member("text_tokens_per_second_and_rank", text_tokens / seconds);
  json.member("tokens_per_second_and_rank", tokens / seconds)
      .member("tflops", flops / seconds / 1e12);
  if (measured.count_over_mean > 0)
    json.member("tokens_per_expert_max_over_mean", measured.count_over_mean);
  json.member("mfu", peak > 0 ? flops / seconds / peak : 0.0)
      .member("max_allocated_bytes", memory.max_allocated);
  json.member("last_loss", measured.last_loss);
  if (measured.timed_step_ms > 0) {
    json.member("step_ms_with_timed_sections", measured.timed_step_ms);
    json.key("section_ms").begin_object();
    for (int i = 0; i < kNumSections; ++i)
      json.member(section_name(static_cast<Section>(i)), measured.sections[i]);
    json.end_object().member("slow_ranks", measured.named);
  }
  if (!measured.kernels.kernels.empty()) write_json(json.key("profile"), measured.kernels);
  if (config.bench_floor) {
    const StepFloor& floor = measured.floor;
    json.key("floor").begin_object();
    json.member("gemm_ms", floor.gemm_ms).member("attention_ms", floor.attention_ms);
    json.member("states_ms", floor.states_ms);
    json.member("memory_ms", floor.memory_ms).member("optimizer_ms", floor.optimizer_ms);
    json.member("total_ms", floor.total_ms()).end_object();
  }
  json.end_object();
  if (config.json) {
    print_line(json.text());
    return;
  }
  std::string text = format_text(
      "%d x %s | %.1f M parameters a rank | %.1f ms/step | %.0f tokens/s/rank | %.2f TFLOP/s",
      ranks, device_name(device).c_str(), static_cast<double>(num_parameters) / 1e6,
      measured.step_ms, tokens / seconds, flops / seconds / 1e12);
  if (peak > 0)
    text += format_text(" | %.1f%% of %.0f | peak %.1f GiB", 100 * flops / seconds / peak,
                        peak / 1e12, static_cast<double>(memory.max_allocated) / (1 << 30));
  if (text_tokens > 0)
    text += format_text(" | %.0f tokens/s/rank without padding", text_tokens / seconds);
  if (measured.count_over_mean > 0)
    text += format_text(" | tokens per expert max/mean %.2f", measured.count_over_mean);
  print_line(cat(text, " | loss ", measured.last_loss));
  if (measured.timed_step_ms > 0) {
    text = format_text("with timed sections %.2f ms, without %.2f ms (%+.2f%%)",
                       measured.timed_step_ms, measured.step_ms,
                       100 * (measured.timed_step_ms / measured.step_ms - 1));
    for (int i = 0; i < kNumSections; ++i)
      text +=
          format_text(" | %s %.2f", section_name(static_cast<Section>(i)), measured.sections[i]);
    print_line(text);
    for (const std::string& named : measured.named) print_line(named);
    if (!config.bench_slow.empty() && measured.named.empty()) print_line("no rank was named");
  }
  if (config.bench_floor) {
    const StepFloor& floor = measured.floor;
    const std::string states =
        floor.states_ms > 0 ? format_text("states %.1f, ", floor.states_ms) : "";
    print_line(format_text(
        "floor %.1f ms (GEMM %.1f, attention %.1f, %sother memory %.1f, optimizer %.1f) | "
        "the step reaches %.1f%% of it",
        floor.total_ms(), floor.gemm_ms, floor.attention_ms, states.c_str(), floor.memory_ms,
        floor.optimizer_ms, 100 * floor.total_ms() / measured.step_ms));
  }
  if (!measured.kernels.kernels.empty())
    print_line(kernel_table(measured.kernels, static_cast<size_t>(config.bench_kernels)));
}

// Random tokens need no tokenizer where the size of the padded vocabulary is known: they are drawn
// from all of it.
void use_padded_vocabulary(TokenizerConfig& tokenizer) {
  if (!tokenizer.tokenizer_type.empty() || tokenizer.padded_vocab_size.value_or(0) < 1) return;
  tokenizer.tokenizer_type = "NullTokenizer";
  if (!tokenizer.vocab_size) tokenizer.vocab_size = tokenizer.padded_vocab_size;
}

c10::Device prepare_device(const Arguments& arguments, const Job& job) {
  use_threads(arguments, job.local_world_size);
  return choose_device(arguments.training.device, job.local_rank);
}

// `copy_rate` in bytes per second; 0: do not print fractions of it.
void print_ceilings(const BenchConfig& config, const std::vector<Ceiling>& all, double copy_rate,
                    c10::Device device) {
  JsonWriter json(2);
  json.begin_object().member("device", device_name(device)).key("measured").begin_array();
  for (const Ceiling& one : all) {
    json.begin_object().member("name", one.name).member("microseconds", one.seconds * 1e6);
    if (one.flops > 0) json.member("tflops", one.flop_rate() / 1e12);
    if (one.bytes > 0) json.member("gigabytes_per_second", one.byte_rate() / 1e9);
    if (one.bytes > 0 && copy_rate > 0) json.member("of_copy_rate", one.byte_rate() / copy_rate);
    json.end_object();
  }
  json.end_array().end_object();
  if (config.json) return print_line(json.text());
  print_line(device_name(device));
  for (const Ceiling& one : all) {
    std::string text = format_text("%-62s %10.1f us", one.name.c_str(), one.seconds * 1e6);
    if (one.flops > 0) text += format_text(" %10.1f TFLOP/s", one.flop_rate() / 1e12);
    if (one.bytes > 0) text += format_text(" %10.1f GB/s", one.byte_rate() / 1e9);
    if (one.bytes > 0 && copy_rate > 0)
      text += format_text(" %5.1f%% of a copy", 100 * one.byte_rate() / copy_rate);
    print_line(text);
  }
}

int bench_machine(const Arguments& arguments, const BenchConfig& config, const Job& job) {
  const c10::Device device = prepare_device(arguments, job);
  std::vector<Ceiling> all = machine_ceilings(device, config.bench_seconds);
  const ProcessGroup& world = job.groups.world;
  for (Ceiling& one : collective_ceilings(world, device, config.bench_seconds)) {
    one.name += cat(" over ", world.size(), " ranks, per rank");
    all.push_back(std::move(one));
  }
  if (job.is_first()) print_ceilings(config, all, 0.0, device);
  world.barrier();
  return 0;
}

int bench_kernels(const Arguments& arguments, const BenchConfig& config, const Job& job) {
  const c10::Device device = prepare_device(arguments, job);
  const Vocabulary vocabulary = vocabulary_of(arguments, *make_tokenizer(arguments.tokenizer));
  const Ceiling copy = copy_ceiling(device, config.bench_seconds);
  std::vector<Ceiling> all = {copy};
  const std::unique_ptr<Model> model =
      whole_model(benched_task(arguments, vocabulary).model_provider, arguments, vocabulary);
  for (Ceiling& one : kernel_ceilings(arguments, model->config(), vocabulary, device,
                                      config.bench_seconds, config.bench_only))
    all.push_back(std::move(one));
  MEGATRON_CHECK(all.size() > 1, "no kernel of this model has \"", config.bench_only,
                 "\" in its name\nhint: without --bench-only all are measured and named");
  if (job.is_first()) print_ceilings(config, all, copy.byte_rate(), device);
  job.groups.world.barrier();
  return 0;
}

int bench_train(const Arguments& arguments, const BenchConfig& config, const Job& job) {
  MEGATRON_CHECK(
      !arguments.parallel.hybrid_context_parallel,
      "bench trains on sequences of one length; --hybrid-context-parallel divides documents");
  const c10::Device device = prepare_device(arguments, job);
  const Vocabulary vocabulary = vocabulary_of(arguments, *make_tokenizer(arguments.tokenizer));
  const PretrainTask task = benched_task(arguments, vocabulary);
  TrainedModel model = build_model(task, arguments, vocabulary, job.groups,
                                   model_dtype(arguments.optimizer), device, StartPoint{});
  const bool sections = config.bench_sections || !config.bench_slow.empty();
  MEGATRON_CHECK(!sections || job.clock,
                 "--bench-sections and --bench-slow compare ranks, but this run has only one\n",
                 "hint: start it under torchrun");
  Measured measured = measure(model, task, arguments, config, vocabulary, device,
                              sections ? job.clock.get() : nullptr);
  if (config.bench_floor) {
    MEGATRON_CHECK(
        job.groups.world.size() == job.groups.dp.size(),
        "--bench-floor supports only steps without tensor, pipeline and context parallelism");
    int64_t updated = 0;
    for (const DistributedDataParallel* store : model.stores()) {
      for (const FlatShard& shard : store->shards())
        updated += shard.trained() ? shard.values.numel() : 0;
    }
    measured.floor =
        step_floor(arguments, whole_model(task.model_provider, arguments, vocabulary)->config(),
                   vocabulary, measured.rows, step_options(arguments, 0).num_microbatches, updated,
                   device, config.bench_seconds);
  }
  const int ranks = job.groups.world.size();
  const auto tokens = static_cast<double>(step_options(arguments, 0).global_batch_size *
                                          arguments.transformer.seq_length);
  print_result(config, measured, tokens / ranks,
               tokens * task.flops_per_token(arguments, vocabulary) / ranks, model.num_parameters(),
               ranks, device);
  for (ModelChunk& chunk : model.chunks) chunk.store->finish_param_sync();
  job.groups.world.barrier();  // no rank destroys its groups while another uses them
  return 0;
}

}  // namespace

extern "C" int megatron_bench(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "serve") return bench_serve(argc - 1, argv + 1);
  const Launch launch = launch_from_environment();
  Arguments arguments;
  arguments.world_size = launch.world_size;
  BenchConfig config;
  // Benchmarks of the machine need no model.
  const bool machine = std::any_of(
      argv, argv + argc, [](const char* word) { return std::string_view(word) == "machine"; });
  std::vector<Config*> configs =
      machine ? std::vector<Config*>{&arguments.comm} : arguments.configs();
  configs.push_back(&config);
  ParseOptions options;
  use_flag_table(options, arguments);
  options.positional = "what";
  options.finalize = [&] {
    if (config.is("machine")) return;
    arguments.data = DataConfig();  // tokens are random; nothing is read, evaluated or saved
    arguments.data.mock_data = true;
    use_padded_vocabulary(arguments.tokenizer);
    arguments.training.save.clear();
    arguments.training.load.clear();
    arguments.training.save_interval.reset();
    if (!arguments.optimizer.lr) arguments.optimizer.lr = 1e-4;
    if (!arguments.training.train_iters && !arguments.training.train_samples)
      arguments.training.train_iters = 1000;
    arguments.finalize();
  };
  options.validate = [&](Violations& violations) {
    if (!config.is("machine")) arguments.validate(violations);
  };
  ParseResult parsed;
  RanksCommand command;
  command.parse = [&] {
    parsed = parse_flags(configs, argc, argv, options);
    return parsed.help;
  };
  command.help = [&] {
    return run_help(
        "megatron bench train|kernels --config FILE [flags of pretrain], "
        "megatron bench machine, or megatron bench serve --url URL|--load DIR",
        configs, parsed.help_topic, &config);
  };
  command.run = [&] {
    return run_job(
        launch, arguments,
        [&](const Job& job) {
          if (config.is("machine")) return bench_machine(arguments, config, job);
          if (config.is("kernels")) return bench_kernels(arguments, config, job);
          return bench_train(arguments, config, job);
        },
        std::array<Config*, 1>{&config});
  };
  return run_command(launch, command);
}

}  // namespace megatron
