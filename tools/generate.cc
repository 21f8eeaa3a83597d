// megatron generate: lets a trained model continue prompts.
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/inference/generator.h"
#include "tools/commands.h"
#include "tools/load_model_flags.h"

namespace megatron {
namespace {

struct GenerateConfig : Config {
  std::vector<std::string> prompt;
  std::string prompts_file;
  int64_t tokens_to_generate = 64;
  std::vector<std::string> stop;
  bool ignore_eod = false;
  bool json = false;

  void fields(FieldVisitor& v) override {
    v.group("generate");
    v.field("prompt", prompt, "one or more texts to continue");
    v.field("prompts_file", prompts_file,
            "a file of prompts, one a line; with .jsonl each line is an object with \"prompt\" or "
            "\"text\"");
    v.field({"tokens_to_generate", "--tokens-to-generate --num-tokens-to-generate"},
            tokens_to_generate, "tokens after each prompt");
    v.field({"stop", "--stop --stop-words"}, stop, "texts at which generation ends");
    v.field("ignore_eod", ignore_eod, "go on after the end-of-document token");
    v.field("json", json, "print JSON");
  }
  void validate(Violations& violations) const override {
    if (prompt.empty() == prompts_file.empty())
      violations.add("exactly one of --prompt and --prompts-file is needed");
    if (tokens_to_generate <= 0)
      violations.add(cat("--tokens-to-generate ", tokens_to_generate, " must be positive"));
    for (const std::string& text : stop)
      if (text.empty()) violations.add("--stop: an empty text would end everything");
  }
};

std::string prompt_of_line(const std::string& path, size_t number, const std::string& line) {
  const auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  MEGATRON_CHECK(object.is_object(), path, ":", number, ": expected a JSON object");
  for (const char* key : {"prompt", "text"})
    if (object.contains(key) && object[key].is_string()) return object[key];
  throw_error(cat(path, ":", number, ": no string under \"prompt\" or \"text\""));
}

std::vector<std::string> read_prompts(const GenerateConfig& config) {
  if (config.prompts_file.empty()) return config.prompt;
  const std::string text = read_file(config.prompts_file);
  std::vector<std::string> prompts;
  size_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    size_t end = text.find('\n', begin);
    if (end == std::string::npos) end = text.size();
    std::string line = text.substr(begin, end - begin);
    if (!line.empty() && line.back() == '\r') line.pop_back();
    ++number;
    if (!line.empty())
      prompts.push_back(config.prompts_file.ends_with(".jsonl")
                            ? prompt_of_line(config.prompts_file, number, line)
                            : line);
    begin = end + 1;
  }
  MEGATRON_CHECK(!prompts.empty(), config.prompts_file, " holds no prompts");
  return prompts;
}

const char* name_of(FinishReason reason) {
  switch (reason) {
    case FinishReason::kLength:
      return "length";
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kEndOfDocument:
      return "end_of_document";
  }
  return "";
}

void print_json(const std::vector<std::string>& prompts, const std::vector<Generation>& results) {
  JsonWriter json(2);
  json.begin_array();
  for (size_t i = 0; i < results.size(); ++i) {
    json.begin_object().member("prompt", prompts[i]).member("text", results[i].text);
    json.member("finish_reason", name_of(results[i].finish_reason));
    json.key("tokens").begin_array();
    for (const int32_t token : results[i].tokens) json.value(token);
    json.end_array().end_object();
  }
  json.end_array();
  print_line(json.text());
}

void print_text(const std::vector<std::string>& prompts, const std::vector<Generation>& results) {
  for (size_t i = 0; i < results.size(); ++i) {
    if (i > 0) print_line("---");
    print_line(prompts[i] + results[i].text);
  }
}

}  // namespace

int generate(int argc, char** argv) {
  LoadModelConfig load;
  GenerateConfig config;
  GenerateOptions options;
  Config* const configs[] = {&load, &config, &options.sampling};
  if (parse_flags(configs, argc, argv).help) {
    print_line(help_text("megatron generate --load DIR --prompt TEXT [flags]", configs));
    return 0;
  }
  const std::vector<std::string> prompts = read_prompts(config);
  const ParallelGroups groups;
  LoadedModel loaded = load_model(load, groups);
  options.tokens_to_generate = config.tokens_to_generate;
  options.stop = config.stop;
  options.stop_at_eod = !config.ignore_eod;

  const bool stream = prompts.size() == 1 && !config.json;
  const auto print_now = [](std::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  };
  bool started = false;  // nothing is printed for a prompt that is refused
  const StreamCallback print = [&](size_t, std::string_view piece) {
    if (!std::exchange(started, true)) print_now(prompts[0]);
    print_now(piece);
  };
  const std::vector<Generation> results = generate(*loaded.model, *loaded.tokenizer, prompts,
                                                   options, stream ? print : StreamCallback());
  if (stream)
    print_line(started ? "" : prompts[0]);
  else if (config.json)
    print_json(prompts, results);
  else
    print_text(prompts, results);
  return 0;
}

}  // namespace megatron
