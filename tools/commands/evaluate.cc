// megatron evaluate: perplexity, LAMBADA and multiple-choice tasks on the user's data files.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/base/progress.h"
#include "megatron/comm/launch.h"
#include "megatron/inference/evaluation/evaluation_tasks.h"
#include "megatron/inference/evaluation/neighbor_scoring.h"
#include "megatron/inference/generator.h"
#include "megatron/runtime/job.h"
#include "megatron/runtime/shared_settings.h"
#include "tools/commands/evaluate_questions.h"
#include "tools/support/image_input.h"
#include "tools/support/load_model_flags.h"
#include "tools/support/neighbor_lookup.h"

namespace megatron {
namespace {

std::string all_task_names() { return cat(evaluation_task_names(), ", ", question_task_names()); }

struct EvaluateConfig : Config {
  std::vector<std::string> tasks;
  std::vector<std::string> fewshot_data;
  int64_t num_fewshot = 0;
  std::optional<int64_t> limit;
  std::optional<int64_t> max_length;
  std::optional<int64_t> stride;
  std::optional<int64_t> prefix_token_id;
  bool add_bos = false;
  int64_t batch_tokens = 8192;
  std::string log_samples;
  bool json = false;
  int64_t tensor_model_parallel_size = 1;

  void fields(FieldVisitor& v) override {
    v.group("evaluate");
    v.field(
        "tasks", tasks,
        "what to measure, each as NAME=FILE: perplexity (.txt or .jsonl), lambada, hellaswag, arc, "
        "piqa, mmlu, race (.jsonl); of models that see or hear vqa, anls, relaxed, exact, choices");
    v.field(
        "num_fewshot", num_fewshot,
        "solved examples before each question, the first ones of --fewshot-data (of its subject)");
    v.field("fewshot_data", fewshot_data, "where those come from, each as NAME=FILE");
    v.field("limit", limit, "only the first examples of each file");
    v.field(
        "max_length", max_length,
        "tokens of one input; longer contexts lose their beginning. none: the model's positions");
    v.field(
        "stride", stride,
        "perplexity: tokens that each window after the first adds; the smaller, the more context "
        "and the slower. none: --max-length");
    v.field(
        "prefix_token_id", prefix_token_id,
        "token before documents and in place of empty contexts. none: the beginning of text, else "
        "the end of document");
    v.field({"add_bos", "--add-bos --add-bos-token"}, add_bos,
            "that token before every context, too");
    v.field("batch_tokens", batch_tokens, "tokens of one forward pass of a rank, padding included");
    v.field("log_samples", log_samples, "write the scores of every example to this .jsonl file");
    v.field("json", json, "print JSON");
    v.field("tensor_model_parallel_size", tensor_model_parallel_size,
            "ranks that share one copy of the model; the others take other examples");
  }
  void validate(Violations& violations) const override {
    if (tasks.empty())
      violations.add("--tasks is required",
                     "for example --tasks perplexity=wiki.txt piqa=piqa.jsonl");
    for (const auto* list : {&tasks, &fewshot_data})
      for (const std::string& item : *list)
        if (const size_t sign = item.find('=');
            sign == 0 || sign == std::string::npos || sign + 1 == item.size())
          violations.add(
              cat(list == &tasks ? "--tasks " : "--fewshot-data ", item, ": expected NAME=FILE"),
              cat("the names are ", all_task_names()));
    const auto positive = [&](const char* flag, int64_t value) {
      if (value <= 0) violations.add(cat(flag, " ", value, " must be positive"));
    };
    positive("--limit", limit.value_or(1));
    positive("--max-length", max_length.value_or(1));
    positive("--stride", stride.value_or(1));
    positive("--batch-tokens", batch_tokens);
    positive("--tensor-model-parallel-size", tensor_model_parallel_size);
    if (num_fewshot < 0) violations.add(cat("--num-fewshot ", num_fewshot, " is negative"));
    if (num_fewshot == 0 && !fewshot_data.empty())
      violations.add("--fewshot-data has no effect without --num-fewshot");
  }
};

constexpr KnownFlag kRefused[] = {
    {"--pipeline-model-parallel-size", KnownFlag::Kind::kRefused,
     "evaluate splits a model over tensor-parallel ranks only", 1, 1, "1"},
    {"--context-parallel-size", KnownFlag::Kind::kRefused,
     "evaluate splits a model over tensor-parallel ranks only", 1, 1, "1"},
};

std::pair<std::string, std::string> name_and_file(const std::string& item) {
  const size_t sign = item.find('=');
  return {item.substr(0, sign), item.substr(sign + 1)};
}

// One task: of text alone, or with questions.
struct Task {
  EvaluationTask text;
  QuestionTask asked;

  bool asks() const { return !asked.questions.empty(); }
  const std::string& name() const { return asks() ? asked.name : text.name; }
  const std::string& file() const { return asks() ? asked.file : text.file; }
  uint64_t size() const { return asks() ? asked.questions.size() : text.examples.size(); }
};

EvaluationTask read_text_task(const EvaluateConfig& config, const std::string& name,
                              const std::string& file) {
  EvaluationTask task = read_evaluation_task(name, file, config.limit);
  if (config.num_fewshot == 0 || task.kind != EvaluationKind::kChoices) return task;
  const auto shots =
      std::find_if(config.fewshot_data.begin(), config.fewshot_data.end(),
                   [&](const std::string& s) { return name_and_file(s).first == name; });
  MEGATRON_CHECK(shots != config.fewshot_data.end(), "--num-fewshot ", config.num_fewshot,
                 " needs solved examples for ", name, "\nhint: give --fewshot-data ", name,
                 "=FILE");
  add_few_shot_examples(task, read_evaluation_task(name, name_and_file(*shots).second),
                        config.num_fewshot);
  return task;
}

std::vector<Task> read_tasks(const EvaluateConfig& config, const QuestionConfig& asked) {
  std::vector<Task> tasks;
  for (const std::string& item : config.tasks) {
    const auto [name, file] = name_and_file(item);
    Task& task = tasks.emplace_back();
    if (is_question_task(name))
      task.asked = read_question_task(name, file, asked.media_root, config.limit);
    else
      task.text = read_text_task(config, name, file);
  }
  return tasks;
}

// Of the media that questions have.
std::vector<MediaKind> kinds_asked(std::span<const Task> tasks) {
  std::vector<MediaKind> kinds;
  for (const Task& task : tasks)
    for (const Question& question : task.asked.questions)
      for (const RowMedium& medium : question.sample.row.media)
        if (std::ranges::find(kinds, medium.kind) == kinds.end()) kinds.push_back(medium.kind);
  return kinds;
}

EvaluationOptions options_for(const EvaluateConfig& config, const LoadedModel& model) {
  const TransformerConfig& t = model.config.transformer;
  EvaluationOptions options;
  const int64_t positions =
      t.max_position_embeddings > 0 ? t.max_position_embeddings : t.seq_length;
  options.max_length = config.max_length.value_or(positions);
  MEGATRON_CHECK(options.max_length > 0,
                 "the model does not say how many positions it has\nhint: give --max-length");
  const int64_t limit = max_positions(model.config);
  MEGATRON_CHECK(limit < 0 || options.max_length <= limit, "--max-length ", options.max_length,
                 " is beyond the model's ", limit, " positions");
  MEGATRON_CHECK(!config.stride || *config.stride <= options.max_length, "--stride ",
                 config.stride.value_or(0), " is larger than the windows of ", options.max_length,
                 " tokens (--max-length)");
  options.stride = config.stride;
  options.prefix = model.tokenizer->bos() ? model.tokenizer->bos() : model.tokenizer->eod();
  if (config.prefix_token_id) {
    MEGATRON_CHECK(
        *config.prefix_token_id >= 0 && *config.prefix_token_id < model.config.vocab_size,
        "--prefix-token-id ", *config.prefix_token_id, " is outside the vocabulary of ",
        model.config.vocab_size);
    options.prefix = static_cast<int32_t>(*config.prefix_token_id);
  }
  options.add_prefix_to_context = config.add_bos;
  return options;
}

// A line of --log-samples.
std::string sample_line(const EvaluationTask& task, const EvaluationRequests& requests, size_t i,
                        std::span<const Score> scores) {
  const EvaluationExample& example = task.examples[i];
  JsonWriter json;
  json.begin_object().member("task", task.name).member("where", example.where);
  const auto own = scores.subspan(requests.first[i], requests.first[i + 1] - requests.first[i]);
  if (task.kind == EvaluationKind::kPerplexity) {
    double logprob = 0.0;
    for (const Score& score : own) logprob += score.logprob;
    json.member("logprob", logprob).member("tokens", requests.tokens[i]);
    json.member("words", example.words).member("bytes", example.choices[0].size());
    return json.end_object().text();
  }
  json.member("context", example.description + example.context);
  json.key("choices").begin_array();
  for (size_t c = 0; c < own.size(); ++c)
    json.begin_object()
        .member("text", example.choices[c])
        .member("logprob", own[c].logprob)
        .member("greedy", own[c].greedy)
        .member("tokens", requests.requests[requests.first[i] + c].num_scored)
        .end_object();
  json.end_array();
  if (task.kind == EvaluationKind::kChoices)
    json.member("gold", example.gold).member("chosen", most_likely_choice(own));
  return json.end_object().text();
}

void print_table(std::span<const Task> tasks, std::span<const EvaluationResult> results) {
  std::vector<std::vector<std::string>> rows = {
      {"task", "file", "examples", "metric", "value", "stderr"}};
  for (size_t i = 0; i < tasks.size(); ++i) {
    const std::string file = std::filesystem::path(tasks[i].file()).filename().string();
    bool first = true;
    for (const EvaluationMetric& metric : results[i].metrics) {
      rows.push_back(
          {first ? tasks[i].name() : "", first ? file : "",
           first ? std::to_string(results[i].examples) : "", metric.name,
           format_fixed(metric.value, 4),
           metric.standard_error ? "\u00b1 " + format_fixed(*metric.standard_error, 4) : ""});
      first = false;
    }
    for (const EvaluationResult::Group& group : results[i].groups)
      rows.push_back({"", "  " + group.name, std::to_string(group.examples), "acc",
                      format_fixed(group.accuracy, 4), ""});
  }
  for (const std::string& line : format_table(rows, [](size_t c) { return c == 2 || c == 4; }))
    print_line(line);
}

void print_json(const EvaluateConfig& config, const LoadedModel& model,
                const EvaluationOptions& options, std::span<const Task> tasks,
                std::span<const EvaluationResult> results) {
  JsonWriter json(2);
  json.begin_object()
      .member("model", model.directory.string())
      .member("iteration", model.iteration);
  json.member("max_length", options.max_length).key("results").begin_array();
  for (size_t i = 0; i < tasks.size(); ++i) {
    const bool choices = !tasks[i].asks() && tasks[i].text.kind == EvaluationKind::kChoices;
    json.begin_object().member("task", tasks[i].name()).member("file", tasks[i].file());
    json.member("examples", results[i].examples);
    json.member("num_fewshot", choices ? config.num_fewshot : 0);
    for (const EvaluationMetric& metric : results[i].metrics) {
      json.member(metric.name, metric.value);
      if (metric.standard_error) json.member(metric.name + "_stderr", *metric.standard_error);
    }
    if (!results[i].groups.empty()) {
      json.key("groups").begin_array();
      for (const EvaluationResult::Group& group : results[i].groups)
        json.begin_object()
            .member("name", group.name)
            .member("examples", group.examples)
            .member("acc", group.accuracy)
            .end_object();
      json.end_array();
    }
    json.end_object();
  }
  json.end_array().end_object();
  print_line(json.text());
}

struct Flags {
  LoadModelConfig load;
  EvaluateConfig evaluate;
  ProjectLookupConfig lookup;
  QuestionConfig questions;
};

// The result of a task of text, and a line of --log-samples of each example.
EvaluationResult score_text(const EvaluateConfig& config, const EvaluationTask& task,
                            const EvaluationOptions& options, const LoadedModel& loaded,
                            const ParallelGroups& groups, const FindNeighbors& find,
                            std::vector<std::string>& samples) {
  const EvaluationRequests requests = make_requests(task, *loaded.tokenizer, options);
  if (requests.num_truncated > 0)
    log_warning(cat(task.name, ": ", requests.num_truncated, " of ", requests.requests.size(),
                    " inputs are longer than --max-length ", options.max_length,
                    " and were cut at the beginning"));
  ProgressBar bar("evaluating " + task.name, requests.requests.size(), "requests");
  ScoringOptions scoring;
  if (find) scoring = scoring_with_neighbors(loaded.config, *loaded.tokenizer, find);
  scoring.batch_tokens = config.batch_tokens;
  const std::vector<Score> scores = score(*loaded.model, groups, requests.requests, scoring,
                                          [&](uint64_t done) { bar.advance(done); });
  bar.finish();
  for (size_t i = 0; i < task.examples.size(); ++i)
    samples.push_back(sample_line(task, requests, i, scores));
  return evaluate(task, requests, scores);
}

int evaluate_model(const Flags& flags, std::span<const Task> tasks, const Job& job) {
  const EvaluateConfig& config = flags.evaluate;
  LoadedModel loaded = load_model(flags.load, job.groups, /*tokenizer_required=*/true,
                                  job.local_rank, job.local_world_size, job.agreement);
  const EvaluationOptions options = options_for(config, loaded);
  FindNeighbors find;
  if (loaded.config.type == "retro" || !flags.lookup.retro_project_dir.empty())
    find = open_project(flags.lookup, loaded, flags.load.device);
  std::unique_ptr<AtomicFileWriter> writer;
  if (!config.log_samples.empty() && job.is_first())
    writer = std::make_unique<AtomicFileWriter>(config.log_samples);
  std::vector<EvaluationResult> results;
  for (const Task& task : tasks) {
    std::vector<std::string> samples;
    if (task.asks()) {
      ProgressBar bar("evaluating " + task.name(), task.size(), "questions");
      AskedQuestions asked =
          ask_questions(flags.questions, loaded, job.groups, task.asked, config.batch_tokens,
                        [&](uint64_t done) { bar.advance(done); });
      bar.finish();
      results.push_back(std::move(asked.result));
      samples = std::move(asked.samples);
    } else {
      results.push_back(score_text(config, task.text, options, loaded, job.groups, find, samples));
    }
    for (size_t i = 0; writer && i < samples.size(); ++i) writer->write(samples[i] + "\n");
  }
  if (writer) writer->commit();
  if (config.json)
    print_json(config, loaded, options, tasks, results);
  else
    print_table(tasks, results);
  job.groups.world.barrier();
  return 0;
}

}  // namespace

extern "C" int megatron_evaluate(int argc, char** argv) {
  Flags flags;
  LoadModelConfig& load = flags.load;
  const EvaluateConfig& config = flags.evaluate;
  Config* const configs[] = {&load, &flags.evaluate, &flags.lookup, &flags.questions};
  if (!parse_or_help("megatron evaluate DIR --tasks NAME=FILE ... [flags]", configs, argc, argv,
                     {.known = kRefused, .positional = "load"}))
    return 0;
  const Launch launch = launch_from_environment();
  RuntimeOptions options;
  options.gemm_tuning = false;  // steps have any number of rows
  options.parallel.tensor_model_parallel_size = config.tensor_model_parallel_size;
  options.settings = [&] { return shared_settings(configs); };
  data_parallel_size(options.parallel, launch.world_size);  // the ranks divide
  const std::vector<Task> tasks = read_tasks(config, flags.questions);
  if (std::ranges::any_of(tasks, &Task::asks))
    load.accept = [name = load.load, kinds = kinds_asked(tasks)](const ModelConfig& model,
                                                                 const Tokenizer*) {
      const bool alone = kinds.empty() && reads_media(model, MediaKind::kSound);
      check_reads(
          !kinds.empty() ? kinds : std::vector{alone ? MediaKind::kSound : MediaKind::kImage},
          model, name);
    };
  if (launch.world_size > 1) {
    const LoadModelRequest request = load_model_request(load, launch.local_rank);
    options.device = request.device.is_cuda() ? DeviceChoice::kCuda : DeviceChoice::kCpu;
  }
  return run_job(launch, options,
                 [&](const Job& job) { return evaluate_model(flags, tasks, job); });
}

}  // namespace megatron
