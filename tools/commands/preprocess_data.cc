// megatron preprocess-data: JSON lines, text or Parquet to indexed datasets.
#include <string>
#include <string_view>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/base/threads.h"
#include "megatron/datasets/sources/preprocess.h"

namespace megatron {
namespace {

constexpr std::string_view kFormats[] = {"auto", "jsonl", "text", "parquet"};

// Megatron's flags of this command that have no effect here.
constexpr KnownFlag kKnownFlags[] = {
    {"--keep-sequential-samples", KnownFlag::Kind::kAlreadySo,
     "documents always keep the order of the input"},
    {"--partitions", KnownFlag::Kind::kRefused,
     "one pool of workers uses all cores and keeps the order of the input; use --workers", 1, 1,
     "1"},
    {"--find-optimal-num-workers", KnownFlag::Kind::kRefused,
     "all cores are used unless --workers says otherwise"},
    {"--workers-to-check", KnownFlag::Kind::kRefused,
     "all cores are used unless --workers says otherwise", 1, -1},
    {"--max-documents", KnownFlag::Kind::kRefused,
     "all cores are used unless --workers says otherwise", 1, 1},
};

struct PreprocessDataConfig : Config {
  std::vector<std::string> input;
  std::string output_prefix;
  InputFormat input_format = InputFormat::kAuto;
  std::vector<std::string> json_keys = {"text"};
  bool split_sentences = false;
  bool keep_newlines = false;
  std::string lang = "english";
  std::string punkt_params;
  bool append_eod = false;
  int64_t workers = 0;
  int64_t log_interval = 0;
  int64_t max_line_mib = 32;
  bool overwrite = false;
  bool json = false;

  void fields(FieldVisitor& v) override {
    v.group("preprocess-data");
    v.field(
        "input", input,
        "files or folders: JSON lines, text (one file, one document), Parquet; also .gz and .zst");
    v.field("output_prefix", output_prefix,
            "writes <prefix>_<key>_document.bin, .idx and .json for each key; ..._sentence with "
            "--split-sentences");
    v.choice("input_format", input_format, kFormats,
             "auto: by the extension of each file; unknown ones are text");
    v.field("json_keys", json_keys, "keys of JSON lines, or columns of Parquet, that hold text");
    v.field("split_sentences", split_sentences,
            "each sentence is a sequence, for BERT and T5; a list of strings in JSON lines counts "
            "as split already");
    v.field("keep_newlines", keep_newlines,
            "white space after a sentence belongs to it, for tokenizers that see it");
    v.field("lang", lang,
            "language of Punkt's parameters, a folder of tokenizers/punkt_tab in NLTK_DATA or "
            "NLTK's usual places");
    v.field("punkt_params", punkt_params,
            "folder of Punkt's parameters, instead of --lang; none: split without any");
    v.field("append_eod", append_eod, "close each document with the end-of-document token");
    v.field({"workers", "--workers --num-threads"}, workers,
            "threads that turn text into tokens; 0: OMP_NUM_THREADS, else all cores");
    v.field("log_interval", log_interval, "documents between log lines; 0: only the progress bar");
    v.field("max_line_mib", max_line_mib,
            "longest JSON line; longer ones are refused, because memory is bounded");
    v.field("overwrite", overwrite,
            "replace data sets of that prefix; without it they are refused");
    v.field("json", json, "print the result as JSON");
  }
  void validate(Violations& violations) const override {
    if (input.empty()) violations.add("preprocess-data needs --input", "--input corpus.jsonl");
    if (output_prefix.empty())
      violations.add("preprocess-data needs --output-prefix", "--output-prefix data");
    if (json_keys.empty()) violations.add("--json-keys is empty", "--json-keys text");
    if (!split_sentences && (keep_newlines || lang != "english" || !punkt_params.empty()))
      violations.add(
          "--keep-newlines, --lang and --punkt-params have no effect without --split-sentences");
    if (lang != "english" && !punkt_params.empty())
      violations.add("--lang has no effect with --punkt-params");
    if (workers < 0)
      violations.add(cat("--workers is ", workers), "0 (OMP_NUM_THREADS, else all cores) or more");
    if (log_interval < 0)
      violations.add(cat("--log-interval is ", log_interval), "0 (none) or more");
    if (max_line_mib < 1 || max_line_mib > 2048)
      violations.add(cat("--max-line-mib is ", max_line_mib), "1 to 2048");
  }
};

void print_result(const PreprocessResult& result, bool as_json) {
  if (as_json) {
    JsonWriter json;
    json.begin_object().member("files", result.num_files).member("text_bytes", result.text_bytes);
    json.member("seconds", result.seconds).key("datasets").begin_array();
    for (const PreprocessedDataset& dataset : result.datasets) {
      json.begin_object()
          .member("prefix", dataset.prefix)
          .member("num_documents", dataset.num_documents);
      json.member("num_sequences", dataset.num_sequences)
          .member("num_tokens", dataset.num_tokens)
          .end_object();
    }
    print_line(json.end_array().end_object().text());
    return;
  }
  for (const PreprocessedDataset& dataset : result.datasets) {
    print_line(cat(dataset.prefix, ": ", format_count(dataset.num_documents), " documents, ",
                   format_count(dataset.num_tokens), " tokens from ",
                   format_bytes(static_cast<double>(result.text_bytes)), " in ",
                   format_duration(result.seconds)));
  }
}

std::shared_ptr<const SentenceSplitter> make_splitter(const PreprocessDataConfig& config) {
  PunktParameters parameters;
  if (config.punkt_params.empty())
    parameters = read_punkt_parameters(find_punkt_parameters(config.lang));
  else if (config.punkt_params != "none")
    parameters = read_punkt_parameters(config.punkt_params);
  return std::make_shared<const SentenceSplitter>(std::move(parameters), config.keep_newlines);
}

}  // namespace

int preprocess_data(int argc, char** argv) {
  PreprocessDataConfig config;
  TokenizerConfig tokenizer_config;
  Config* const configs[] = {&config, &tokenizer_config};
  if (!parse_or_help("megatron preprocess-data --input FILE ... --output-prefix PREFIX "
                     "--tokenizer-type TYPE ...",
                     configs, argc, argv, {.known = kKnownFlags, .positional = "input"}))
    return 0;
  const auto tokenizer = make_tokenizer(tokenizer_config);
  PreprocessOptions options;
  options.inputs = config.input;
  options.format = config.input_format;
  options.json_keys = config.json_keys;
  options.output_prefix = config.output_prefix;
  if (config.split_sentences) options.splitter = make_splitter(config);
  options.append_eod = config.append_eod;
  options.overwrite = config.overwrite;
  options.program = cat("megatron ", MEGATRON_VERSION);
  options.tokenizer_type = tokenizer_config.tokenizer_type;
  options.workers = choose_num_threads(config.workers);
  options.log_interval = config.log_interval;
  options.max_line_bytes = static_cast<size_t>(config.max_line_mib) << 20;
  print_result(preprocess_files(options, *tokenizer), config.json);
  return 0;
}

}  // namespace megatron
