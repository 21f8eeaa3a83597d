// megatron inspect-dataset: contents and validity of an indexed dataset, and the tokens of a
// training sample.
#include <algorithm>
#include <string>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/datasets/blend.h"
#include "megatron/datasets/dataset_builder.h"
#include "megatron/datasets/dataset_description.h"
#include "megatron/datasets/indexed_dataset.h"
#include "megatron/datasets/masked/masked_datasets.h"
#include "tools/support/inspect_media.h"

namespace megatron {
namespace {

constexpr std::string_view kSampleSplits[] = {"train", "valid", "test"};
enum class SampleTask { kGpt, kBert, kT5 };
constexpr std::string_view kSampleTasks[] = {"gpt", "bert", "t5"};

struct InspectDatasetConfig : Config {
  explicit InspectDatasetConfig(const InspectMediaConfig& media) : media(&media) {}

  const InspectMediaConfig* media;  // where it is given the rest does not apply
  std::vector<std::string> prefix;
  bool multimodal = false;
  bool verify = false;
  std::optional<int64_t> sample;
  SampleTask task = SampleTask::kGpt;
  bool bert_binary_head = true;
  std::optional<int64_t> decoder_seq_length;
  Split sample_split = Split::kTrain;
  std::optional<int64_t> seq_length;
  std::optional<int64_t> num_samples;
  int64_t seed = 1234;
  bool json = false;

  void fields(FieldVisitor& v) override {
    v.group("inspect-dataset");
    v.field({"prefix", "--input --prefix"}, prefix, "datasets to describe (or --data-path)");
    v.field("multimodal", multimodal, "the datasets have a mode for each sequence");
    v.field("verify", verify,
            "read every token; with a tokenizer or --vocab-size find those outside the vocabulary");
    v.field("sample", sample,
            "print the tokens of this sample of the blend that the data flags describe");
    v.choice("task", task, kSampleTasks, "task of the run that takes --sample");
    v.field({"bert_binary_head", "--bert-no-binary-head", true}, bert_binary_head,
            "--task bert: the run has no loss of the order of sentences");
    v.field("decoder_seq_length", decoder_seq_length, "--task t5: tokens of the decoder's samples");
    v.choice("sample_split", sample_split, kSampleSplits, "split of --sample");
    v.field({"seq_length", "--seq-length"}, seq_length, "sequence length of --sample");
    v.field(
        "num_samples", num_samples,
        "samples that the run takes from the split, which its order depends on; none: one epoch");
    v.field("seed", seed, "seed of the run");
    v.field("json", json, "print JSON");
  }
  void validate(Violations& violations) const override {
    if (!media->media_model.empty()) return check_media(violations);
    if (sample && !seq_length) violations.add("--sample needs --seq-length");
    if (sample && task == SampleTask::kT5 && decoder_seq_length.value_or(0) < 2)
      violations.add("--task t5 needs --decoder-seq-length", "2 or more");
    if (sample && *sample < 0) violations.add(cat("--sample is ", *sample), "0 or more");
    if (num_samples && *num_samples < 1)
      violations.add(cat("--num-samples is ", *num_samples), "1 or more");
    if (seq_length && *seq_length < 1)
      violations.add(cat("--seq-length is ", *seq_length), "1 or more");
  }

 private:
  void check_media(Violations& violations) const {
    violations.require(media->save_media.empty() || sample, "--save-media needs --sample");
    violations.require(!sample || *sample >= 0, cat("--sample is ", sample.value_or(0)),
                       "0 or more");
    violations.require(!multimodal && !verify && !seq_length && !num_samples,
                       "--media-model does not go with --multimodal, --verify, --seq-length and "
                       "--num-samples, which are for indexed datasets");
  }
};

// Documents by length in tokens: bucket b holds lengths in [2^(b-1), 2^b), bucket 0 the empty ones.
std::vector<int64_t> length_histogram(const IndexedDataset& data) {
  std::vector<int64_t> buckets;
  const auto documents = data.document_indices();
  const auto lengths = data.sequence_lengths();
  for (int64_t d = 0; d < data.num_documents(); ++d) {
    int64_t tokens = 0;
    for (int64_t s = documents[d]; s < documents[d + 1]; ++s) tokens += lengths[s];
    size_t bucket = 0;
    for (int64_t bound = tokens; bound > 0; bound /= 2) ++bucket;
    if (buckets.size() <= bucket) buckets.resize(bucket + 1);
    ++buckets[bucket];
  }
  return buckets;
}

int64_t bucket_begin(size_t bucket) { return bucket == 0 ? 0 : int64_t{1} << (bucket - 1); }
int64_t bucket_end(size_t bucket) { return int64_t{1} << bucket; }  // exclusive

std::vector<std::string> prefixes_of(const InspectDatasetConfig& config, const DataConfig& data) {
  if (!config.prefix.empty()) return config.prefix;
  if (!data.data_path.empty()) return parse_blend(data.data_path, "--data-path").prefixes;
  if (!data.data_args_path.empty())
    return read_blend_file(data.data_args_path, "--data-args-path").prefixes;
  std::vector<std::string> out;
  for (const auto* paths : {&data.train_data_path, &data.valid_data_path, &data.test_data_path}) {
    if (paths->empty()) continue;
    const auto prefixes = parse_blend(*paths, "--train/valid/test-data-path").prefixes;
    out.insert(out.end(), prefixes.begin(), prefixes.end());
  }
  return out;
}

struct Inspected {
  IndexedDataset data;
  std::optional<DatasetDescription> description;
  std::vector<int64_t> histogram;
  std::optional<VerifyResult> verified;
};

void print_text(const Inspected& item) {
  const IndexedDataset& data = item.data;
  print_line(cat(data.prefix()));
  print_line(cat("  element type  ", to_string(data.type())));
  print_line(cat("  documents     ", format_count(data.num_documents())));
  print_line(cat("  sequences     ", format_count(data.num_sequences())));
  print_line(cat("  tokens        ", format_count(data.num_tokens()), " (",
                 format_bytes(static_cast<double>(data.num_tokens() * size_of(data.type()))), ")"));
  if (const auto& d = item.description) {
    print_line(cat("  tokenizer     ", d->tokenizer.name, ", ", d->tokenizer.vocab_size,
                   " ids, fingerprint ", d->tokenizer.fingerprint));
    print_line(cat("  ends of documents ", !d->append_eod   ? "marked in parts of it"
                                           : *d->append_eod ? "marked (--append-eod)"
                                                            : "not marked"));
    print_line(cat("  written by    ", d->program));
  } else {
    print_line(cat("  tokenizer     unknown (there is no ",
                   description_path(data.prefix()).filename().string(), ")"));
  }
  print_line("  document lengths in tokens");
  const int64_t most =
      item.histogram.empty() ? 1 : *std::max_element(item.histogram.begin(), item.histogram.end());
  for (size_t b = 0; b < item.histogram.size(); ++b) {
    if (item.histogram[b] == 0) continue;
    std::string range = b == 0 ? "0" : cat(bucket_begin(b), " to ", bucket_end(b) - 1);
    range.resize(std::max<size_t>(range.size(), 24), ' ');
    std::string count = format_count(item.histogram[b]);
    count.insert(0, std::max<size_t>(count.size(), 14) - count.size(), ' ');
    print_line(cat("    ", range, count, "  ",
                   std::string((item.histogram[b] * 40 + most - 1) / most, '#')));
  }
  if (!item.verified) return;
  print_line(cat("  every token read: ids ", item.verified->min_token, " to ",
                 item.verified->max_token, ", ", format_count(item.verified->num_bad_tokens),
                 " outside the vocabulary"));
}

void add_json(const Inspected& item, JsonWriter& json) {
  const IndexedDataset& data = item.data;
  json.begin_object()
      .member("prefix", data.prefix())
      .member("version", 1)
      .member("dtype", to_string(data.type()));
  json.member("num_documents", data.num_documents()).member("num_sequences", data.num_sequences());
  json.member("num_tokens", data.num_tokens()).key("document_lengths").begin_array();
  for (size_t b = 0; b < item.histogram.size(); ++b) {
    if (item.histogram[b] == 0) continue;
    json.begin_object().member("from", bucket_begin(b)).member("below", bucket_end(b));
    json.member("documents", item.histogram[b]).end_object();
  }
  json.end_array();
  json.key("description");
  item.description ? json.raw(description_json(*item.description)) : json.null();
  if (item.verified) {
    json.key("verified").begin_object().member("min_token", item.verified->min_token);
    json.member("max_token", item.verified->max_token)
        .member("bad_tokens", item.verified->num_bad_tokens)
        .end_object();
  }
  json.end_object();
}

// The tokenizer of the flags, if they name one.
struct GivenTokenizer {
  std::unique_ptr<Tokenizer> tokenizer;
  TokenizerFacts facts;
};
GivenTokenizer given_tokenizer(const TokenizerConfig& config) {
  GivenTokenizer given;
  if (!config.tokenizer_type.empty()) {
    given.tokenizer = make_tokenizer(config);
    given.facts = facts_of(*given.tokenizer, config.tokenizer_type);
  }
  given.facts.vocab_size = config.vocab_size.value_or(given.facts.vocab_size);
  return given;
}

TrainValidTestDatasets datasets_of_task(const InspectDatasetConfig& config, const DataConfig& data,
                                        const MaskedDataConfig& masked,
                                        const DatasetRequest& request) {
  if (config.task == SampleTask::kGpt) return build_train_valid_test_datasets(data, request);
  if (request.text_tokenizer == nullptr)
    throw UsageError(
        "--task bert and t5 need a tokenizer\nhint: --tokenizer-type BertWordPieceCase "
        "--vocab-file vocab.txt");
  const MaskedKind kind = config.task == SampleTask::kBert ? MaskedKind::kBert : MaskedKind::kT5;
  return build_masked_datasets(
      {kind, config.bert_binary_head, config.decoder_seq_length.value_or(0)}, data, masked,
      request);
}

std::shared_ptr<const Dataset> dataset_of_split(const InspectDatasetConfig& config,
                                                const DataConfig& data,
                                                const MaskedDataConfig& masked,
                                                const GivenTokenizer& given) {
  DatasetRequest request;
  request.sequence_length = *config.seq_length;
  request.seed = config.seed;
  request.tokenizer = given.facts;
  request.text_tokenizer = given.tokenizer.get();
  request.targets = {.train = 0, .valid = 0, .test = 0};
  (config.sample_split == Split::kTrain   ? request.targets.train
   : config.sample_split == Split::kValid ? request.targets.valid
                                          : request.targets.test) = config.num_samples;
  const TrainValidTestDatasets all = datasets_of_task(config, data, masked, request);
  const auto dataset = config.sample_split == Split::kTrain ? all.train
                       : config.sample_split == Split::kValid
                           ? (all.valid.empty() ? nullptr : all.valid[0])
                           : all.test;
  MEGATRON_CHECK(dataset, "there is no ", to_string(config.sample_split),
                 " split\nhint: give it a share of --split");
  return dataset;
}

// What is printed of a sample: a name and numbers each.
std::vector<std::pair<std::string, std::vector<int64_t>>> columns_of(const Sample& sample,
                                                                     const Columns& columns,
                                                                     SampleTask task) {
  std::vector<std::pair<std::string, std::vector<int64_t>>> out;
  for (const Column& column : columns) {
    if (task == SampleTask::kGpt && column.name != "tokens" && column.name != "labels") continue;
    std::vector<int64_t> values;
    const auto take = [&](const auto& elements) {
      values.assign(elements.begin(), elements.end());
    };
    if (column.type == ElementType::kFloat32)
      take(sample.get<float>(column.name));
    else if (column.type == ElementType::kUInt8)
      take(sample.get<uint8_t>(column.name));
    else
      take(sample.get<int64_t>(column.name));
    out.emplace_back(column.name, std::move(values));
  }
  return out;
}

void print_sample(const InspectDatasetConfig& config, const DataConfig& data,
                  const MaskedDataConfig& masked, const GivenTokenizer& tokenizer,
                  JsonWriter* json) {
  const auto dataset = dataset_of_split(config, data, masked, tokenizer);
  MEGATRON_CHECK(*config.sample < dataset->size(), "--sample ", *config.sample, ": the ",
                 to_string(config.sample_split), " split has ", dataset->size(), " samples");
  const Sample sample = dataset->sample(*config.sample);
  const auto [member, index] = dataset->locate(*config.sample);
  const auto columns = columns_of(sample, dataset->columns(), config.task);
  if (json == nullptr) {
    print_line(cat("sample ", *config.sample, " of ", format_count(dataset->size()), ", ",
                   to_string(config.sample_split), " split, sample ", index, " of dataset ",
                   member));
    if (config.task == SampleTask::kGpt) {
      print_line(listed(columns[0].second, {}, " "));
      print_line(cat("next token ", columns[1].second.back()));
    } else {
      for (const auto& [name, values] : columns)
        print_line(cat(name, " ", listed(values, {}, " ")));
    }
    print_line(cat("fingerprint ", dataset->fingerprint()));
    return;
  }
  json->key("sample")
      .begin_object()
      .member("index", *config.sample)
      .member("split", to_string(config.sample_split));
  json->member("num_samples", dataset->size())
      .member("dataset", member)
      .member("dataset_sample", index);
  json->member("fingerprint", dataset->fingerprint());
  for (const auto& [name, values] : columns) json->member(name, values);
  json->end_object();
}

}  // namespace

int inspect_dataset(int argc, char** argv) {
  InspectMediaConfig media;
  InspectDatasetConfig config(media);
  DataConfig data;
  MaskedDataConfig masked;
  TokenizerConfig tokenizer_config;
  Config* const configs[] = {&config, &media, &data, &masked, &tokenizer_config};
  if (!parse_or_help("megatron inspect-dataset PREFIX ... [--verify] [--sample I --seq-length S "
                     "--data-path ...]",
                     configs, argc, argv, {.positional = "prefix"}))
    return 0;
  if (config.sample && data.data_path.empty() && !config.prefix.empty())
    data.data_path = config.prefix;
  const std::vector<std::string> prefixes = prefixes_of(config, data);
  if (prefixes.empty() && (!config.sample || !media.media_model.empty()))
    throw UsageError(
        "inspect-dataset needs a dataset\nhint: megatron inspect-dataset data_text_document");
  if (!media.media_model.empty()) {
    inspect_media(media, tokenizer_config, prefixes, config.sample, config.json);
    return 0;
  }
  const GivenTokenizer tokenizer = given_tokenizer(tokenizer_config);
  JsonWriter json;
  json.begin_object().key("datasets").begin_array();
  std::vector<std::string> bad;
  for (const std::string& prefix : prefixes) {
    Inspected item{
        IndexedDataset(prefix, {.mmap = data.mmap_bin_files, .multimodal = config.multimodal}),
        read_description(prefix),
        {},
        {}};
    check_tokenizer(item.data, tokenizer.facts.identity);
    item.histogram = length_histogram(item.data);
    if (config.verify)
      item.verified = verify_indexed_dataset(item.data, tokenizer.facts.vocab_size);
    if (config.json)
      add_json(item, json);
    else
      print_text(item);
    if (item.verified)
      bad.insert(bad.end(), item.verified->bad_tokens.begin(), item.verified->bad_tokens.end());
  }
  json.end_array();
  if (config.sample) print_sample(config, data, masked, tokenizer, config.json ? &json : nullptr);
  json.end_object();
  if (config.json) print_line(json.text());
  if (bad.empty()) return 0;
  std::string message = bad[0];
  for (size_t i = 1; i < bad.size(); ++i) message += "\ndetail: " + bad[i];
  throw_error(message);
}

}  // namespace megatron
