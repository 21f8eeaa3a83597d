// Time of building the sample index of sentence-level data, on one core.
//
//   bench_sentence_index --documents DOCUMENTS.npy --lengths LENGTHS.npy [--samples N]
//                        [--max-length N] [--short-seq-prob X] [--min-sentences N] [--seed N]
//                        [--repeat N] [--rows FILE]
//
// DOCUMENTS (int64): the first sentence of each document, and behind them the number of sentences.
// LENGTHS (int32): tokens of each sentence. Prints one JSON object with the seconds of each
// repetition; --rows writes the rows as they lie in memory. sentence_index_peer.py calls it.
#include <chrono>
#include <fstream>

#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/datasets/masked/sentence_index.h"
#include "megatron/datasets/npy.h"

namespace megatron {
namespace {

struct BenchConfig : Config {
  std::string documents, lengths, rows;
  std::optional<int64_t> samples;
  int64_t max_length = 509, min_sentences = 2, seed = 1234, repeat = 1;
  double short_seq_prob = 0.1;

  void fields(FieldVisitor& v) override {
    v.group("bench");
    v.field("documents", documents, "first sentence of each document, and their end (.npy, int64)");
    v.field("lengths", lengths, "tokens of each sentence (.npy, int32)");
    v.field("samples", samples, "epochs are added until there are so many rows; none: one epoch");
    v.field("max_length", max_length, "tokens of a sample");
    v.field("short_seq_prob", short_seq_prob, "share of shorter samples");
    v.field("min_sentences", min_sentences, "sentences of a sample at least");
    v.field("seed", seed, "seed of the order");
    v.field("repeat", repeat, "how often to build it");
    v.field("rows", rows, "write the rows to this file");
  }
  void validate(Violations& violations) const override {
    if (documents.empty() || lengths.empty())
      violations.add("--documents and --lengths are required", "two .npy files");
  }
};

int run(int argc, char** argv) {
  BenchConfig config;
  Config* const configs[] = {&config};
  if (!parse_or_help("bench_sentence_index --documents FILE --lengths FILE", configs, argc, argv))
    return 0;
  const NpyArray documents(config.documents), lengths(config.lengths);
  const auto first = documents.as<int64_t>("<i8");
  const auto tokens = lengths.as<int32_t>("<i4");
  // In memory before the clock starts
  const std::vector<int64_t> own_documents(first.begin(), first.end());
  const std::vector<int32_t> own_lengths(tokens.begin(), tokens.end());
  SentenceIndexInputs inputs;
  inputs.documents = own_documents;
  inputs.lengths = own_lengths;
  inputs.num_samples = config.samples;
  inputs.max_length = config.max_length;
  inputs.short_probability = config.short_seq_prob;
  inputs.seed = config.seed;
  inputs.min_sentences = config.min_sentences;
  JsonWriter json;
  json.begin_object().key("seconds").begin_array();
  SentenceIndex index;
  for (int64_t i = 0; i < config.repeat; ++i) {
    index = {};
    const auto start = std::chrono::steady_clock::now();
    index = build_sentence_index(inputs);
    json.value(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  json.end_array().member("rows", index.rows.size()).end_object();
  if (!config.rows.empty()) {
    std::ofstream out(config.rows, std::ios::binary);
    const auto write = [&](const auto& rows) {
      out.write(reinterpret_cast<const char*>(rows.data()),
                static_cast<std::streamsize>(rows.size() * sizeof(rows[0])));
    };
    index.rows.is_wide ? write(index.rows.wide) : write(index.rows.narrow);
  }
  print_line(json.text());
  return 0;
}

}  // namespace
}  // namespace megatron

int main(int argc, char** argv) {
  try {
    return megatron::run(argc, argv);
  } catch (const megatron::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
