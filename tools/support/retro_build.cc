#include "tools/support/retro_build.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/log.h"
#include "megatron/datasets/retro/training_documents.h"
#include "megatron/inference/retrieval/device_flat_index.h"
#include "megatron/inference/retrieval/faiss_index.h"
#include "megatron/models/retro/retro_config.h"
#include "megatron/runtime/device.h"
#include "megatron/training/arguments/microbatches.h"
#include "megatron/training/arguments/retro_rules.h"
#include "megatron/training/setup.h"
#include "megatron/training/tasks/tasks.h"

namespace megatron {
namespace {

using nlohmann::json;

constexpr std::string_view kEmbeddingTypes[] = {"float32", "float16"};
constexpr const char* kSteps[] = {"db-build", "index-train", "index-add", "query-neighbors"};

std::string count_text(int64_t n) { return format_count(static_cast<uint64_t>(n)); }

struct SplitSamples {
  std::string split;
  std::shared_ptr<const Dataset> dataset;
};

std::vector<SplitSamples> samples_of(const TrainValidTestDatasets& sets) {
  std::vector<SplitSamples> all;
  if (sets.train) all.push_back({"train", sets.train});
  for (size_t i = 0; i < sets.valid.size(); ++i)
    all.push_back({sets.valid.size() == 1 ? "valid" : cat("valid", i), sets.valid[i]});
  if (sets.test) all.push_back({"test", sets.test});
  return all;
}

}  // namespace

void RetroBuildConfig::fields(FieldVisitor& v) {
  v.group("retro");
  v.field("retro_tasks", retro_tasks,
          "steps, separated by commas: db-build, index-train, index-add, query-neighbors, or build "
          "for all; what is done already is not done again");
  v.field("retro_embedder", retro_embedder,
          "an encoder that gives vectors of chunks: a checkpoint or a folder of Hugging Face");
  v.choice("retro_embedding_type", retro_embedding_type, kEmbeddingTypes, "how vectors are stored");
  v.field(
      {"retro_embedder_max_length", "--retro-embedder-max-length --retro-bert-max-chunk-length"},
      retro_embedder_max_length,
      "tokens of a chunk's text for the embedder, with [CLS] and [SEP]; the rest is cut");
  v.field("retro_embedder_batch_tokens", retro_embedder_batch_tokens,
          "tokens of one forward pass of the embedder, padding included");
  v.field("retro_block_size", retro_block_size, "rows of one file, which bounds memory");
  v.field("retro_index_str", retro_index_str,
          "kind of the index: Flat, which is exact, or one of Faiss's index_factory, such as "
          "IVF4096_HNSW32,Flat");
  v.field("retro_index_ntrain", retro_index_ntrain,
          "vectors that an index of Faiss is trained with, drawn from all; 0: all");
  v.field("retro_query_nprobe", retro_query_nprobe,
          "lists that a search in an index of Faiss looks into, at most all");
  v.field({"retro_query_ef_search", "--retro-query-ef-search"}, retro_query_ef_search,
          "how far a search in a graph of Faiss (HNSW) looks");
  v.field("retro_query_num_neighbors_query", retro_query_num_neighbors_query,
          "chunks that are looked up for each chunk of a sample");
  v.field("retro_query_num_neighbors_save", retro_query_num_neighbors_save,
          "of these, without those of the sample's own documents, so many are stored");
  v.field("show", show,
          "SPLIT:SAMPLE, as train:0: print the chunks of a sample and what was found for them");
}

void RetroBuildConfig::validate(Violations& v) const {
  v.require(!retro_embedder.empty(), "--retro-embedder is required",
            "a checkpoint or a folder of Hugging Face of an encoder, such as a BERT");
  const auto positive = [&](const char* flag, int64_t value) {
    v.require(value > 0, cat(flag, " is ", value), "a positive number");
  };
  positive("--retro-embedder-max-length", retro_embedder_max_length);
  positive("--retro-embedder-batch-tokens", retro_embedder_batch_tokens);
  positive("--retro-block-size", retro_block_size);
  positive("--retro-query-num-neighbors-query", retro_query_num_neighbors_query);
  positive("--retro-query-num-neighbors-save", retro_query_num_neighbors_save);
  v.require(retro_query_num_neighbors_save <= retro_query_num_neighbors_query,
            cat("--retro-query-num-neighbors-save ", retro_query_num_neighbors_save,
                " is above --retro-query-num-neighbors-query ", retro_query_num_neighbors_query));
  positive("--retro-query-nprobe", retro_query_nprobe);
  positive("--retro-query-ef-search", retro_query_ef_search);
  v.require(retro_index_ntrain >= 0,
            cat("--retro-index-ntrain ", retro_index_ntrain, " is negative"));
}

std::vector<std::string> retro_steps(const std::string& tasks) {
  std::vector<std::string> steps;
  for (const std::string& task : split(tasks, ',')) {
    if (task == "build") {
      steps.insert(steps.end(), std::begin(kSteps), std::end(kSteps));
      continue;
    }
    if (std::find(std::begin(kSteps), std::end(kSteps), task) == std::end(kSteps))
      throw UsageError(cat("--retro-tasks ", task, " is unknown\nhint: build, ", listed(kSteps)));
    steps.push_back(task);
  }
  if (steps.empty()) throw UsageError("--retro-tasks names no step\nhint: build");
  return steps;
}

RetroBuild::RetroBuild(const Arguments& arguments, const RetroBuildConfig& config, const Job& job)
    : arguments_(arguments),
      config_(config),
      job_(job),
      share_{job.groups.world.rank(), job.groups.world.size()},
      chunk_length_(own_config<RetroConfig>(arguments.own).retro_chunk_length),
      project_(own_config<RetroDataConfig>(arguments.own).retro_project_dir, share_.is_first()),
      tokenizer_(make_tokenizer(arguments.tokenizer)),
      documents_(training_documents(arguments.data)) {
  const StoredModel stored = open_model(embedder_request(embedder_options()));
  embedder_tokenizer_ = stored.tokenizer_texts.tokenizer.empty()
                            ? make_tokenizer(stored.tokenizer)
                            : make_tokenizer(stored.tokenizer_texts);
  project_.agree({{"chunk_length", chunk_length_},
                  {"seed", arguments.transformer.seed},
                  {"tokenizer", tokenizer_->fingerprint()},
                  {"embedder_tokenizer", embedder_tokenizer_->fingerprint()},
                  {"data_sets", facts_of_documents(documents_)}});
  if (const auto trained = project_.done("index-train"))
    MEGATRON_CHECK((*trained)["index"] == config.retro_index_str, project_.manifest().string(),
                   ": the index is ", (*trained)["index"].dump(), ", here \"",
                   config.retro_index_str,
                   "\"\nhint: that --retro-index-str, or another --retro-project-dir");
}

std::string RetroBuild::text_of(std::span<const int64_t> ids) const {
  const int64_t eod = tokenizer_->eod().value_or(-1);
  std::vector<int32_t> own;
  for (const int64_t id : ids)
    if (id != eod) own.push_back(static_cast<int32_t>(id));
  return tokenizer_->decode(own);
}

TextOfIds RetroBuild::text_function() const {
  return [this](std::span<const int64_t> ids) { return text_of(ids); };
}

std::shared_ptr<const ChunkDatabase> RetroBuild::database() const {
  project_.require("db-build");
  std::vector<std::shared_ptr<const IndexedDataset>> data;
  for (const DocumentRange& range : documents_) data.push_back(range.data);
  return std::make_shared<const ChunkDatabase>(project_.chunks_file(), std::move(data),
                                               chunk_length_, tokenizer_->eod().value_or(0));
}

RetroEmbedderOptions RetroBuild::embedder_options() const {
  return {config_.retro_embedder, arguments_.training.device, config_.retro_embedder_max_length,
          config_.retro_embedder_batch_tokens, job_.local_rank};
}

void RetroBuild::open_embedder() {
  if (embedder_) return;
  embedder_ = std::make_unique<RetroEmbedder>(embedder_options());
  json facts = embedder_->facts();
  facts["embedding_type"] = kEmbeddingTypes[static_cast<size_t>(config_.retro_embedding_type)];
  facts["embedding_block_size"] = config_.retro_block_size;
  project_.agree(facts);
}

std::vector<float> RetroBuild::embed(std::span<const std::string> texts) {
  open_embedder();
  return embedder_->embed(texts);
}

BlockFiles RetroBuild::vectors() const {
  return {project_.embeddings_folder(),
          {project_.require("db-build")["chunks"], config_.retro_block_size, embedder_->width(),
           config_.retro_embedding_type == EmbeddingType::kFloat16 ? "<f2" : "<f4"}};
}

void RetroBuild::mark_done(const std::string& step, const json& counts) {
  share_.is_first() ? project_.mark_done(step, counts) : project_.wait_for(step);
}

void RetroBuild::build_database() {
  if (!share_.is_first()) return project_.wait_for("db-build");
  ChunkRules rules;
  rules.length = chunk_length_;
  rules.eod = tokenizer_->eod().value_or(-1);
  rules.embedder_tokens = [this](std::span<const int64_t> ids) {
    return std::ssize(embedder_tokenizer_->encode(text_of(ids)));
  };
  const DatabaseCounts counts =
      build_chunk_database(project_.chunks_file(), documents_, rules, config_.retro_block_size,
                           choose_num_threads(arguments_.training.num_threads));
  project_.mark_done("db-build", {{"chunks", counts.chunks}, {"invalid", counts.invalid}});
  log_info(cat("the database has ", count_text(counts.chunks), " chunks; ",
               count_text(counts.invalid), " without a token of the embedder were left out"));
}

void RetroBuild::make_vectors() {
  open_embedder();
  write_chunk_vectors(
      *database(), text_function(),
      [this](std::span<const std::string> texts) { return embed(texts); }, vectors(), share_);
}

void RetroBuild::train_index() {
  project_.require("db-build");
  if (is_exact()) {
    log_info("an index of the kind Flat has nothing to train");
  } else if (const auto file = project_.index_file(config_.retro_index_str, "trained");
             !std::filesystem::exists(file)) {
    share_.is_first() ? train_faiss(file) : make_vectors();
  }
  mark_done("index-train", {{"index", config_.retro_index_str}});
}

void RetroBuild::train_faiss(const std::filesystem::path& file) {
  open_embedder();
  FaissIndex index = FaissIndex::make(embedder_->width(), config_.retro_index_str);
  make_vectors();
  const BlockFiles files = vectors();
  const int64_t all = files.shape().rows, asked = config_.retro_index_ntrain,
                count = asked == 0 ? all : std::min(asked, all);
  log_info(cat("training ", config_.retro_index_str, " with ", count_text(count), " of ",
               count_text(all), " vectors, ",
               format_bytes(4.0 * static_cast<double>(count * files.shape().width)), " of memory"));
  index.train(draw_chunk_vectors(files, count, arguments_.transformer.seed));
  index.write(file);
}

void RetroBuild::add_to_index() {
  project_.require("index-train");
  make_vectors();
  const auto file = project_.index_file(config_.retro_index_str, "added");
  if (share_.is_first() && !is_exact() && !std::filesystem::exists(file)) add_to_faiss(file);
  mark_done("index-add", {{"vectors", vectors().shape().rows}});
}

void RetroBuild::add_to_faiss(const std::filesystem::path& file) {
  const BlockFiles files = vectors();
  FaissIndex index = FaissIndex::read(project_.index_file(config_.retro_index_str, "trained"));
  for (int64_t i = 0; i < files.num_blocks(); ++i)
    index.add(read_chunk_vectors(files, files.block(i)));
  index.write(file);
}

std::unique_ptr<VectorIndex> RetroBuild::open_index() const {
  if (is_exact())
    return open_flat_index(vectors(), choose_device(arguments_.training.device, job_.local_rank));
  auto index = std::make_unique<FaissIndex>(
      FaissIndex::read(project_.index_file(config_.retro_index_str, "added")));
  MEGATRON_CHECK(index->size() == vectors().shape().rows, "the index has ", index->size(),
                 " vectors, the project has ", vectors().shape().rows);
  index->set_search(config_.retro_query_nprobe, config_.retro_query_ef_search);
  return index;
}

void RetroBuild::query() {
  project_.require("index-add");
  open_embedder();
  const auto chunks = database();
  const std::unique_ptr<VectorIndex> index = open_index();
  const TrainValidTestDatasets sets =
      build_datasets(find_task("gpt", arguments_), arguments_, *tokenizer_);
  const auto count = [&](const std::string& split) {
    if (split != "train") return int64_t{0};  // all
    return arguments_.training.train_samples.value_or(
        arguments_.microbatches().samples_of_iterations(arguments_.train_iters()));
  };
  for (const SplitSamples& one : samples_of(sets))
    query_neighbors(
        project_, one.split, {one.dataset, *chunks, count(one.split)}, *chunks, text_function(),
        [this](std::span<const std::string> texts) { return embed(texts); }, *index,
        {config_.retro_query_num_neighbors_query, config_.retro_query_num_neighbors_save,
         config_.retro_block_size},
        share_);
}

void RetroBuild::run(const std::string& step) {
  // Neighbours are of samples, of which there may be others each time.
  if (step != "query-neighbors" && project_.done(step)) {
    log_info(cat(step, " is done already"));
    return;
  }
  log_info(cat("retro: ", step));
  if (step == "db-build") build_database();
  if (step == "index-train") train_index();
  if (step == "index-add") add_to_index();
  if (step == "query-neighbors") query();
}

void RetroBuild::show(const std::string& split, int64_t sample) {
  const TrainValidTestDatasets sets =
      build_datasets(find_task("gpt", arguments_), arguments_, *tokenizer_);
  std::shared_ptr<const Dataset> samples;
  for (const SplitSamples& one : samples_of(sets))
    if (one.split == split) samples = one.dataset;
  MEGATRON_CHECK(samples, "--show ", split, ":", sample, ": the run has no ", split, " samples");
  const int64_t m = chunk_length_;
  const Neighbors neighbors(project_, split, *samples, m);
  MEGATRON_CHECK(sample < neighbors.num_samples(), "--show ", split, ":", sample, ": there are ",
                 neighbors.num_samples(), " samples");
  const auto chunks = database();
  const RetroSample shown = RetroSamples(samples, *chunks).read(sample);
  const auto distance = [&](const std::string& a, const std::string& b) {
    const std::string texts[] = {a, b};
    const std::vector<float> v = embed(texts);
    double sum = 0;
    for (size_t i = 0; i < v.size() / 2; ++i)
      sum += std::pow(static_cast<double>(v[i]) - v[i + v.size() / 2], 2);
    return format_text("%.4f", sum);
  };
  for (int64_t u = 0; u * m < std::ssize(shown.ids); ++u) {
    const std::string text = text_of(std::span(shown.ids).subspan(static_cast<size_t>(u * m), m));
    print_line(cat("chunk ", u, ": ", text));
    for (const int32_t id : neighbors.of_chunk(sample, u)) {
      if (id < 0) break;
      const std::string found = text_of(chunks->ids(id));
      const auto next = chunks->continuation(id);
      const DocumentChunk row = chunks->chunk(id);
      print_line(cat("  neighbour ", id, ", document ", row.document, " of data set ", row.data_set,
                     ", squared distance ", distance(text, found)));
      print_line(cat("    ", found));
      print_line(next ? cat("    goes on: ", text_of(chunks->ids(*next)))
                      : "    the document ends there");
    }
  }
}

}  // namespace megatron
