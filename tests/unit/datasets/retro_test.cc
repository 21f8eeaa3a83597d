// Chunks, vectors, neighbours and samples of a retrieval project against Megatron-Core's functions
// (tests/golden/retro), where both agree, and what is declared to differ.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "megatron/base/files.h"
#include "megatron/datasets/dataset_builder.h"
#include "megatron/datasets/retro/retro_dataset.h"
#include "testing.h"

namespace megatron::testing_datasets {
namespace {

using Longs = std::vector<int64_t>;
using nlohmann::json;

const std::string kRetroFolder = MEGATRON_SOURCE_DIR "/tests/golden/retro/";

const json& golden() {
  static const json all = json::parse(std::ifstream(kRetroFolder + "retro_data_golden.json"));
  return all;
}

// The text of ids is their numbers; the embedder knows no token for the blank one.
std::string numbers(std::span<const int64_t> ids) {
  std::string text;
  for (const int64_t id : ids) text += std::to_string(id) + " ";
  return text;
}

ChunkRules golden_rules() {
  ChunkRules rules;
  rules.length = golden()["chunk"];
  rules.eod = golden()["eod"];
  rules.embedder_tokens = [](std::span<const int64_t> ids) {
    return std::ssize(ids) - std::count(ids.begin(), ids.end(), golden()["blank"].get<int64_t>());
  };
  return rules;
}

// The golden's vectors: the sum of a row of a table for each token, chunks filled up with EOD.
class TokenSums {
 public:
  TokenSums() : table_(std::make_shared<const NpyArray>(kRetroFolder + "token_vectors.npy")) {}
  int64_t width() const { return table_->shape()[1]; }
  std::vector<float> operator()(std::span<const std::string> texts) const {
    std::vector<float> out;
    for (const std::string& text : texts) {
      std::istringstream words(text);
      Longs ids;
      for (int64_t id; words >> id;) ids.push_back(id);
      ids.resize(golden()["chunk"].get<size_t>(), golden()["eod"].get<int64_t>());
      for (int64_t k = 0; k < width(); ++k) {
        float sum = 0;
        for (const int64_t id : ids)
          sum += table_->as<float>("<f4")[static_cast<size_t>(id * width() + k)];
        out.push_back(sum);
      }
    }
    return out;
  }

 private:
  std::shared_ptr<const NpyArray> table_;
};

// All distances in fp64, sorted.
class SortedIndex : public VectorIndex {
 public:
  explicit SortedIndex(const BlockFiles& vectors) : width_(vectors.shape().width) {
    for (int64_t i = 0; i < vectors.num_blocks(); ++i) {
      const auto rows = read_chunk_vectors(vectors, vectors.block(i));
      rows_.insert(rows_.end(), rows.begin(), rows.end());
    }
  }
  int64_t size() const override { return std::ssize(rows_) / width_; }
  int64_t width() const override { return width_; }
  std::vector<int64_t> search(std::span<const float> queries, int64_t k) const override {
    std::vector<int64_t> out;
    for (size_t q = 0; q < queries.size(); q += static_cast<size_t>(width_)) {
      std::vector<std::pair<double, int64_t>> found;
      for (int64_t id = 0; id < size(); ++id) {
        double sum = 0;
        for (int64_t i = 0; i < width_; ++i) {
          const double d = static_cast<double>(queries[q + static_cast<size_t>(i)]) -
                           rows_[static_cast<size_t>(id * width_ + i)];
          sum += d * d;
        }
        found.emplace_back(sum, id);
      }
      std::sort(found.begin(), found.end());
      for (int64_t i = 0; i < k; ++i)
        out.push_back(i < size() ? found[static_cast<size_t>(i)].second : -1);
    }
    return out;
  }

 private:
  int64_t width_;
  std::vector<float> rows_;
};

std::vector<std::shared_ptr<const IndexedDataset>> golden_data() {
  std::vector<std::shared_ptr<const IndexedDataset>> all;
  for (const auto& data : golden()["data"])
    all.push_back(
        std::make_shared<const IndexedDataset>(kRetroFolder + data["name"].get<std::string>()));
  return all;
}

// The golden's database ends at the documents that Megatron-Core takes.
std::vector<DocumentRange> golden_documents() {
  std::vector<DocumentRange> all;
  for (const auto& data : golden_data())
    all.push_back({data, 0, golden()["train_documents"][all.size()].get<int64_t>()});
  return all;
}

std::shared_ptr<const Dataset> golden_samples(const std::string& cache, int64_t seed,
                                              int64_t samples) {
  DataConfig data;
  for (const auto& part : golden()["data"]) {
    data.data_path.push_back(part["weight"].dump());
    data.data_path.push_back(kRetroFolder + part["name"].get<std::string>());
  }
  data.split = golden()["split"];
  data.data_cache_path = cache;
  DatasetRequest request;
  request.sequence_length = golden()["seq_length"];
  request.seed = seed;
  request.targets = {samples, 0, 0};
  request.tokenizer.eod = golden()["eod"];
  return build_train_valid_test_datasets(data, request).train;
}

std::vector<Longs> rows_of(const std::vector<DocumentChunk>& chunks, bool valid) {
  std::vector<Longs> rows;
  for (const DocumentChunk& c : chunks)
    if (valid == (c.embedder_tokens > 0))
      rows.push_back({c.data_set, c.document, c.begin, c.end, c.embedder_tokens});
  return rows;
}

TEST(RetroChunks, AreMegatrons) {
  std::vector<DocumentChunk> all;
  for (const auto& data : golden_data()) {
    const auto data_set = static_cast<uint32_t>(all.empty() ? 0 : all.back().data_set + 1);
    const auto one = cut_documents(*data, data_set, 0, data->num_documents(), golden_rules());
    EXPECT_EQ(one, cut_documents(*data, data_set, 0, data->num_documents(), golden_rules(), 1));
    all.insert(all.end(), one.begin(), one.end());
  }
  EXPECT_EQ(rows_of(all, true), golden()["chunks"].get<std::vector<Longs>>());
  EXPECT_EQ(rows_of(all, false), golden()["invalid"].get<std::vector<Longs>>());
}

TEST(RetroChunks, DocumentsOfSeveralSequencesAreRefused) {
  const IndexedDataset sentences(MEGATRON_SOURCE_DIR "/tests/golden/masked/a");
  EXPECT_THAT(error_of([&] { check_one_sequence_per_document(sentences); }),
              ::testing::HasSubstr("sequences, chunks are cut from documents of one"));
}

// A project of the golden data in a folder of its own.
class RetroProjectTest : public ::testing::Test {
 protected:
  RetroProjectTest() : project_(folder_ / "project") {}

  void build_database(int64_t block_rows = 20) {
    const DatabaseCounts counts = build_chunk_database(project_.chunks_file(), golden_documents(),
                                                       golden_rules(), block_rows);
    EXPECT_EQ(counts.chunks, golden()["num_train_chunks"].get<int64_t>());
    EXPECT_FALSE(std::filesystem::exists(project_.folder() / "db" / "parts"));
  }
  std::shared_ptr<const ChunkDatabase> database() const {
    return std::make_shared<const ChunkDatabase>(project_.chunks_file(), golden_data(),
                                                 golden()["chunk"], golden()["eod"]);
  }
  BlockFiles vectors(const std::string& dtype = "<f4") const {
    return {project_.embeddings_folder(), {database()->size(), 50, embed_.width(), dtype}};
  }
  void query(const std::shared_ptr<const Dataset>& samples, int64_t count = 0) const {
    const auto chunks = database();
    write_chunk_vectors(*chunks, numbers, embed_, vectors());
    query_neighbors(project_, "train", {samples, *chunks, count}, *chunks, numbers, embed_,
                    SortedIndex(vectors()), {golden()["query"], golden()["save"], 10});
  }
  std::shared_ptr<const Dataset> samples(int64_t seed = golden()["seed"]) const {
    return golden_samples(folder_ / "cache", seed, golden()["samples"]);
  }
  // Of all files of the project, by name.
  std::map<std::string, std::string> contents() const {
    std::map<std::string, std::string> all;
    for (const auto& file : std::filesystem::recursive_directory_iterator(project_.folder()))
      if (file.is_regular_file()) all[file.path().string()] = read_file(file.path());
    return all;
  }

  TempFolder folder_;
  RetroProject project_;
  TokenSums embed_;
};

TEST_F(RetroProjectTest, VectorsAndNeighborsAreMegatrons) {
  build_database();
  const auto all = samples();
  query(all);
  const auto chunks = database();
  const auto stored = golden()["db_embeddings"];
  const SortedIndex index(vectors());
  for (int64_t id = 0; id < chunks->size(); ++id) {
    const std::string text[] = {numbers(chunks->ids(id))};
    const auto vector = embed_(text);
    for (size_t k = 0; k < vector.size(); ++k)
      ASSERT_NEAR(vector[k], stored[static_cast<size_t>(id)][k].get<float>(), 1e-5) << id;
  }
  const int64_t m = golden()["chunk"], neighbors = golden()["neighbors"];
  const RetroSamples texts(all, *chunks);
  const Neighbors found(project_, "train", *all, m);
  const RetroDataset dataset(all, chunks, Neighbors(project_, "train", *all, m), neighbors);
  int64_t missing = 0, others = 0;
  for (int64_t s = 0; s < golden()["samples"].get<int64_t>(); ++s) {
    SCOPED_TRACE(s);
    const json& expected = golden()["samples_golden"][static_cast<size_t>(s)];
    const RetroSample sample = texts.read(s);
    Longs ids = expected["text"].get<Longs>();
    ids.pop_back();  // the last label
    EXPECT_EQ(sample.ids, ids);
    EXPECT_EQ(sample.data_set, expected["dataset"].get<int64_t>());
    EXPECT_EQ(sample.documents, expected["documents"].get<Longs>());
    const Longs columns = Sample(dataset.sample(s)).get<int64_t>("neighbor_tokens");
    const auto mask = dataset.sample(s).get<uint8_t>("neighbor_mask");
    for (int64_t u = 0; u < 4; ++u) {
      const std::string text[] = {numbers(std::span(ids).subspan(static_cast<size_t>(u * m), m))};
      EXPECT_EQ(index.search(embed_(text), golden()["query"]),
                expected["exact"][static_cast<size_t>(u)].get<Longs>());
      const auto kept = found.of_chunk(s, u);
      EXPECT_EQ(Longs(kept.begin(), kept.end()),
                expected["filtered"][static_cast<size_t>(u)].get<Longs>());
      for (int64_t k = 0; k < neighbors; ++k) {
        const auto at = static_cast<size_t>(u * neighbors + k), r = static_cast<size_t>(2 * m);
        const Longs tokens(columns.begin() + at * r, columns.begin() + (at + 1) * r);
        const int64_t id = kept[static_cast<size_t>(k)];
        EXPECT_EQ(mask[at], id >= 0 ? 1 : 0);
        missing += id < 0 ? 1 : 0;
        if (id < 0 || !chunks->continuation(id)) {
          ++others;  // Megatron-Core retrieves tokens of another document there
          EXPECT_EQ(Longs(tokens.begin() + m, tokens.end()), Longs(m, golden()["eod"]));
          continue;
        }
        EXPECT_EQ(tokens,
                  expected["neighbor_tokens"][static_cast<size_t>(u)][static_cast<size_t>(k)]
                      .get<Longs>());
      }
    }
  }
  EXPECT_GT(others, missing);
}

TEST_F(RetroProjectTest, ContinuationsEndWithTheirDocument) {
  build_database();
  const auto chunks = database();
  const int64_t m = golden()["chunk"], eod = golden()["eod"];
  Longs out(static_cast<size_t>(2 * m));
  int64_t last = 0;
  for (int64_t id = 0; id < chunks->size(); ++id) {
    chunks->retrieved(id, out);
    const bool ends = id + 1 == chunks->size() ||
                      chunks->chunk(id).document != chunks->chunk(id + 1).document ||
                      chunks->chunk(id).data_set != chunks->chunk(id + 1).data_set;
    EXPECT_EQ(chunks->continuation(id), ends ? std::nullopt : std::optional(id + 1));
    Longs expected = chunks->ids(id);
    expected.resize(static_cast<size_t>(m), eod);
    if (!ends) {
      const Longs next = chunks->ids(id + 1);
      expected.insert(expected.end(), next.begin(), next.end());
    }
    expected.resize(out.size(), eod);
    EXPECT_EQ(out, expected) << id;
    last += ends ? 1 : 0;
  }
  EXPECT_EQ(last, 27);  // a document each
  chunks->retrieved(-1, out);
  EXPECT_EQ(out, Longs(out.size(), eod));
  EXPECT_THAT(error_of([&] { chunks->retrieved(chunks->size(), out); }),
              ::testing::HasSubstr("has 147 chunks, there is no 147"));
}

TEST_F(RetroProjectTest, AStopAnywhereLeavesTheSameFiles) {
  build_database();
  const auto all = samples();
  query(all);
  const auto expected = contents();
  std::filesystem::remove_all(project_.folder());

  // the same, stopped at every call
  struct Stopped : std::exception {};
  int64_t allowed = 0, stops = 0;
  const auto until_done = [&](const std::function<void()>& step) {
    for (bool done = false; !done; ++stops) try {
        allowed = 1;
        step();
        done = true;
      } catch (const Stopped&) {
      }
  };
  const auto count = [&] {
    if (allowed-- == 0) throw Stopped();
  };
  ChunkRules rules = golden_rules();
  int64_t cuts = 0;
  rules.embedder_tokens = [&, plain = golden_rules()](std::span<const int64_t> ids) {
    if (++cuts % 40 == 0) throw Stopped();
    return plain.embedder_tokens(ids);
  };
  until_done(
      [&] { build_chunk_database(project_.chunks_file(), golden_documents(), rules, 5, 1); });
  const int64_t cutting = stops;
  EXPECT_GT(cutting, 2);
  const auto chunks = database();
  const EmbedTexts embed = [&](std::span<const std::string> texts) {
    count();
    return embed_(texts);
  };
  until_done([&] { write_chunk_vectors(*chunks, numbers, embed, vectors()); });
  until_done([&] {
    query_neighbors(project_, "train", {all, *chunks}, *chunks, numbers, embed,
                    SortedIndex(vectors()), {golden()["query"], golden()["save"], 10});
  });
  EXPECT_GT(stops, cutting + 6);
  EXPECT_EQ(contents(), expected);
}

TEST_F(RetroProjectTest, NeighborsOfOtherSamplesAreRefusedByName) {
  build_database();
  query(samples());
  const std::string seed = golden()["seed"].dump();
  EXPECT_THAT(
      error_of([&] { Neighbors(project_, "train", *samples(78), 4); }),
      ::testing::AllOf(::testing::HasSubstr("has no neighbours of these train samples"),
                       ::testing::HasSubstr("datasets[0].random_seed is " + seed + ", here 78"),
                       ::testing::HasSubstr("--retro-tasks query-neighbors")));
  EXPECT_THAT(error_of([&] { Neighbors(project_, "valid", *samples(), 4); }),
              ::testing::HasSubstr("has no neighbours of these valid samples"));
  const auto chunks = database();
  EXPECT_THAT(error_of([&] {
                RetroDataset(samples(), chunks, Neighbors(project_, "train", *samples(), 4), 6);
              }),
              ::testing::HasSubstr("--retro-num-neighbors is 6, of each chunk 5 were saved"));
  EXPECT_THAT(error_of([&] { Neighbors(project_, "train", *samples(), 5); }),
              ::testing::HasSubstr("a sample has 16 tokens, which is no multiple of the 5"));
}

TEST_F(RetroProjectTest, SamplesBeyondThoseThatWereAskedForAreNone) {
  build_database();
  query(samples(), 3);
  const RetroDataset dataset(samples(), database(), Neighbors(project_, "train", *samples(), 4), 2);
  EXPECT_EQ(dataset.size(), 3);
}

TEST_F(RetroProjectTest, DamagedFilesAreNamed) {
  build_database();
  query(samples());
  const auto open = [&] { Neighbors(project_, "train", *samples(), 4); };
  const std::filesystem::path folder = project_.query_folder("train", samples()->fingerprint());
  const std::filesystem::path block = folder / "000000000010-000000000020.npy";
  const std::string whole = read_file(block);
  std::ofstream(block) << whole.substr(0, whole.size() - 4);
  EXPECT_THAT(error_of(open), ::testing::HasSubstr("10-000000000020.npy: 196 bytes follow"));
  std::ofstream(block) << npy_header("<i4", {10, 4}) << std::string(160, '\0');
  EXPECT_THAT(error_of(open), ::testing::HasSubstr("holds \"<i4\" [10, 4], expected"));
  std::filesystem::remove(block);
  EXPECT_THAT(error_of(open), ::testing::HasSubstr("the neighbours of 1 blocks of train samples"));
  std::string far = whole;
  far[far.size() - 198] = 0x7f;  // of the first row
  std::ofstream(block) << far;
  const RetroDataset dataset(samples(), database(), Neighbors(project_, "train", *samples(), 4), 2);
  EXPECT_THAT(error_of([&] { dataset.sample(2); }), ::testing::HasSubstr("chunks, there is no"));

  std::ofstream(project_.chunks_file()) << npy_header("<u4", {3, 4}) << std::string(48, '\0');
  EXPECT_THAT(error_of([&] { database(); }),
              ::testing::HasSubstr("chunks are \"<u4\" [chunks, 5]"));
}

TEST_F(RetroProjectTest, VectorsThatAreNotFiniteAreNamedWithTheirText) {
  build_database();
  const EmbedTexts broken = [&](std::span<const std::string> texts) {
    std::vector<float> rows = embed_(texts);
    rows[static_cast<size_t>(3 * embed_.width())] = NAN;
    return rows;
  };
  EXPECT_THAT(error_of([&] { write_chunk_vectors(*database(), numbers, broken, vectors()); }),
              ::testing::HasSubstr("the vector of chunk 3, \"" + numbers(database()->ids(3))));
}

TEST_F(RetroProjectTest, HalvesAreRoundedVectors) {
  build_database();
  write_chunk_vectors(*database(), numbers, embed_, vectors("<f2"));
  const std::string text[] = {numbers(database()->ids(0))};
  const auto exact = embed_(text);
  const auto halves = read_chunk_vectors(vectors("<f2"), vectors().block(0));
  for (size_t k = 0; k < exact.size(); ++k) {
    EXPECT_NEAR(halves[k], exact[k], std::abs(exact[k]) / 2048);
    EXPECT_NE(halves[k], exact[k]);
  }
}

TEST(RetroProject, OtherFactsAreRefusedByName) {
  TempFolder folder;
  const json facts = {{"seed", 7}, {"chunk_length", 64}, {"data_sets", {{{"index_hash", 12}}}}};
  RetroProject(folder.path()).agree(facts);
  RetroProject project(folder.path());
  project.agree(facts);
  json more = facts;
  more["embedder"] = "abc";
  project.agree(more);
  more["seed"] = 8;
  more["data_sets"][0]["index_hash"] = 13;
  EXPECT_THAT(error_of([&] { RetroProject(folder.path()).agree(more); }),
              ::testing::AllOf(::testing::HasSubstr("data_sets[0].index_hash is 12, here 13; "),
                               ::testing::HasSubstr("seed is 7, here 8")));
  more = facts;
  more["data_sets"].push_back({{"index_hash", 14}});
  EXPECT_THAT(error_of([&] { RetroProject(folder.path()).agree(more); }),
              ::testing::HasSubstr("there is no data_sets[1].index_hash, here it is 14"));
  EXPECT_THAT(error_of([&] { RetroProject(folder.path()).require("db-build"); }),
              ::testing::HasSubstr("the step db-build is not done"));
  project.mark_done("db-build", {{"chunks", 9}});
  EXPECT_EQ(RetroProject(folder.path()).require("db-build")["chunks"], 9);
  std::ofstream(project.manifest()) << "{\"format\": \"megatron retro project\", \"version\": 2}";
  EXPECT_THAT(error_of([&] { RetroProject(folder.path()); }),
              ::testing::HasSubstr("has version 2, this program reads version 1"));
  std::ofstream(project.manifest()) << "{";
  EXPECT_THAT(error_of([&] { RetroProject(folder.path()); }),
              ::testing::HasSubstr("is not the manifest of a retrieval project"));
}

}  // namespace
}  // namespace megatron::testing_datasets
