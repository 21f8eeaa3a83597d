// The index of media and the sequences made from it: the same whatever the files, the data-parallel
// size and the workers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <span>

#include "megatron/datasets/blended_dataset.h"
#include "megatron/datasets/image_plan.h"
#include "megatron/datasets/index_cache.h"
#include "tests/unit/datasets/multimodal/indexed.h"
#include "tests/unit/error_of.h"
#include "tests/unit/media/golden_images.h"

namespace megatron {
namespace {

using namespace testing_multimodal;

TEST_F(Indexed, ArchivesAndFilesGiveTheSameSamples) {
  const auto files = index(write_rows("rows.jsonl", 0, 30));
  write_tar("tar/a.tar", 0, 17);
  write_tar("tar/b.tar", 17, 30);
  const auto archives = index(folder_ / "tar");
  ASSERT_EQ(files->size(), 30);
  ASSERT_EQ(archives->size(), 30);
  for (int64_t i = 0; i < 30; ++i) {
    EXPECT_EQ(archives->sample(i).ids, files->sample(i).ids);
    EXPECT_EQ(archives->bytes(i, 0), files->bytes(i, 0));
    EXPECT_EQ(archives->facts(i, 0).size, files->facts(i, 0).size);
  }
  EXPECT_EQ(archives->name(17), folder_ / "tar/b.tar" + ": 17");
  EXPECT_EQ(files->medium(3, 0).name, folder_ / "rows.jsonl" + ": line 4: 4_img1.webp");
  EXPECT_EQ(archives->shard(16), 0);
  EXPECT_EQ(archives->shard(17), 1);
  // Packed alike, too.
  const auto a = dataset(files, {.sequence_length = 40}),
             b = dataset(archives, {.sequence_length = 40});
  ASSERT_EQ(a->size(), b->size());
  for (int64_t i = 0; i < a->size(); ++i) EXPECT_EQ(content(*a, i), content(*b, i));
}

// Tasks open an index with an encoder that ends before the run does.
TEST_F(Indexed, ItsRulesOutliveTheEncoder) {
  const auto data = dataset(index(write_rows("rows.jsonl", 0, 4)), {.sequence_length = 40});
  const auto rows = data->images(0).at(0).rows;
  MediaRules other = encoder_->rules();
  other.patch /= 2;
  // In the memory of the one that the index was opened with.
  encoder_.emplace(*tokenizer_, *conversations_, other, false);
  EXPECT_EQ(data->images(0).at(0).rows, rows);
}

// An image that is cut, and one that is none: their samples count nothing, and all others are what
// and where they would be.
TEST_F(Indexed, SamplesOfBadImagesCountNothingInTheirPlaces) {
  const auto whole = dataset(index(write_tar("whole.tar", 0, 20)), {.sequence_length = 40}, 30);
  const std::string damaged = write_tar("damaged.tar", 0, 20, [](int64_t i, std::string& bytes) {
    if (i == 5) bytes.resize(bytes.size() - 30);
    if (i == 11) bytes = "no image";
  });
  EXPECT_THAT(error_of([&] { index(damaged); }), testing::HasSubstr(damaged + ": 11: 11.webp: "));
  options_.most_bad = 1;
  EXPECT_THAT(error_of([&] { index(damaged); }),
              testing::HasSubstr(": 2 media cannot be decoded, more than --max-bad-media 1; the "
                                 "first: " +
                                 damaged + ": 5: 5.jpg: byte "));
  options_.most_bad = 2;
  for (const bool from_cache : {false, true}) {
    const auto data = dataset(index(damaged), {.sequence_length = 40}, 30);
    const std::vector<BadSample>& bad = data->index().bad_samples();
    ASSERT_EQ(bad.size(), 2U) << from_cache;
    EXPECT_EQ(bad[0].sample, 5);
    EXPECT_EQ(bad[1].sample, 11);
    EXPECT_THAT(bad[1].reason, testing::StartsWith(damaged + ": 11: 11.webp: "));
    EXPECT_EQ(data->counts().bad, 2);
    EXPECT_EQ(data->counts().positions, whole->counts().positions);
    EXPECT_LT(data->counts().counted, whole->counts().counted);
    ASSERT_EQ(data->size(), whole->size());
    int64_t seen = 0;
    for (int64_t i = 0; i < data->size(); ++i) {
      Sample ours = data->sample(i), theirs = whole->sample(i);
      EXPECT_EQ(ours.get<int64_t>("tokens"), theirs.get<int64_t>("tokens"));
      EXPECT_EQ(ours.document_starts, theirs.document_starts);
      std::vector<float> mask = theirs.get<float>("loss_mask");
      const std::vector<SequenceRun> runs = data->runs(i);
      for (size_t k = 0; k < runs.size(); ++k) {
        const bool is_bad = runs[k].sample == 5 || runs[k].sample == 11;
        EXPECT_EQ(data->index().is_bad(runs[k].sample, runs[k].medium), is_bad);
        const SampleImage image = data->images(i).at(k);
        std::vector<uint8_t> pixels(static_cast<size_t>(image.bytes())), expected = pixels;
        data->read_image(i, static_cast<int64_t>(k), pixels);
        whole->read_image(i, static_cast<int64_t>(k), expected);
        if (!is_bad) {
          EXPECT_EQ(pixels, expected);
          continue;
        }
        ++seen;
        EXPECT_EQ(std::ranges::count(pixels, 128), std::ssize(pixels));
        const size_t end = k + 1 < ours.document_starts.size()
                               ? static_cast<size_t>(ours.document_starts[k + 1])
                               : mask.size();
        for (auto at = static_cast<size_t>(ours.document_starts[k]); at < end; ++at) mask[at] = 0;
      }
      EXPECT_EQ(ours.get<float>("loss_mask"), mask);
    }
    EXPECT_GE(seen, 2);
  }
}

TEST_F(Indexed, PixelsAreTheSameForAnyDataRanksAndWorkers) {
  const auto data = dataset(index(write_rows("rows.jsonl", 0, 30)), {.sequence_length = 40}, 48);
  const std::vector<std::string> expected = stream(data, 1, 0, 0, 24);
  ASSERT_EQ(expected.size(), 24U);
  EXPECT_EQ(std::set<std::string>(expected.begin(), expected.end()).size() > 6, true);
  for (const int64_t dp : {1, 2, 3})
    for (const int64_t workers : {0, 1, 8}) {
      EXPECT_EQ(stream(data, dp, workers, 0, 24), expected) << dp << " " << workers;
      // From the middle on, with what other ranks and workers have consumed.
      const std::vector<std::string> rest = stream(data, dp, workers, 12, 24);
      EXPECT_TRUE(std::ranges::equal(rest, std::span(expected).subspan(12)))
          << dp << " " << workers;
    }
}

// Questions about images, as a list of LLaVA, archives, a folder of Megatron-Energon and Parquet
// with the bytes of images: the same samples in the same order, whatever the layout, and from any
// place on with another one.
TEST_F(Indexed, TheSameContentGivesTheSameStreamFromAnySource) {
  Json rows = Json::array();
  std::vector<std::pair<std::string, std::string>> shards[2], facts[2];
  for (int64_t i = 0; i < 30; ++i) {
    const std::string image = image_of(i), bytes = read_file(options_.media_root + "/" + image);
    const std::string key = cat(i < 17 ? "x/" : "y/", i),
                      name = key + image.substr(image.rfind('.'));
    const Json turns = {{{"from", "human"}, {"value", cat("<image>\nq", i)}},
                        {{"from", "gpt"}, {"value", caption_of(i)}}};
    rows.push_back({{"image", image}, {"conversations", turns}});
    for (auto* members : {&shards[i / 17], &facts[i / 17]}) members->emplace_back(name, bytes);
    shards[i / 17].emplace_back(key + ".json", Json{{"conversations", turns}}.dump());
    facts[i / 17].emplace_back(key + ".json",
                               Json{{"q", cat("q", i)}, {"a", caption_of(i)}}.dump());
  }
  for (int s = 0; s < 2; ++s) {
    folder_.write(cat("tar/", s, ".tar"), tar_of(shards[s]));
    folder_.write(cat("energon/", s, ".tar"), tar_of(facts[s]));
  }
  folder_.write("energon/.nv-meta/dataset.yaml",
                "sample_type: {__module__: megatron.energon, __class__: VQASample}\nfield_map: "
                "{image: 'png,jpg,webp', context: 'json[q]', answers: 'json[a]'}\n");
  folder_.write("energon/.nv-meta/split.yaml", "split_parts: {train: ['{0..1}.tar']}");
  folder_.write("energon/.nv-meta/.info.json", R"({"shard_counts": {"0.tar": 17, "1.tar": 13}})");
  std::vector<std::string> expected;
  for (const std::string& source : {folder_.write("rows.json", rows.dump()), folder_ / "tar",
                                    folder_ / "energon", kGoldens + "same/questions.parquet"}) {
    SCOPED_TRACE(source);
    const auto data = dataset(index(source), {.sequence_length = 90}, 40);
    ASSERT_EQ(data->index().size(), 30);
    if (expected.empty()) expected = stream(data, 1, 0, 0, 36);
    ASSERT_EQ(expected.size(), 36U);
    EXPECT_GT(std::set<std::string>(expected.begin(), expected.end()).size(), 10U);
    for (const int64_t dp : {1, 2, 3})
      for (const int64_t workers : {0, 1, 8})
        EXPECT_EQ(stream(data, dp, workers, 0, 36), expected) << dp << " " << workers;
    for (const auto& [dp, workers] : {std::pair(3, 1), {2, 8}, {1, 0}})
      EXPECT_TRUE(
          std::ranges::equal(stream(data, dp, workers, 12, 36), std::span(expected).subspan(12)))
          << dp << " " << workers;
  }
}

// Pixels of the loader are those of the image processor, and ranks that divide the images have each
// of them once.
TEST_F(Indexed, RanksDivideImages) {
  const auto data = dataset(index(write_rows("rows.jsonl", 0, 30)), {.sequence_length = 40}, 48);
  const auto images_of = [&](ImageRanks ranks) {
    DataLoaderOptions options;
    options.sampler.micro_batch_size = 4;
    options.num_workers = 0;
    options.image_ranks = ranks;
    return *DataLoader(data, options).next()->images;
  };
  const BatchImages whole = images_of({});
  ASSERT_GT(whole.all.size(), 5U);
  EXPECT_EQ(images_of({2, -1}).patches.size(), 0U);
  const BatchImages parts[] = {images_of({2, 0}), images_of({2, 1})};
  size_t at = 0, of[] = {0, 0};
  for (size_t k = 0; k < whole.all.size(); ++k) {
    const auto size = static_cast<size_t>(whole.all[k].image.bytes());
    const auto owner = static_cast<size_t>(parts[0].all[k].owner);
    EXPECT_EQ(parts[1].all[k].owner, parts[0].all[k].owner);
    EXPECT_TRUE(std::ranges::equal(std::span(whole.patches).subspan(at, size),
                                   std::span(parts[owner].patches).subspan(of[owner], size)));
    at += size;
    of[owner] += size;
  }
  EXPECT_EQ(at, whole.patches.size());
  EXPECT_LE(std::max(of[0], of[1]) - std::min(of[0], of[1]),
            whole.patches.size() / whole.all.size());
}

// Within each of several global batches, whose sizes differ.
TEST_F(Indexed, BalancedSamplesStayInTheirGlobalBatch) {
  const auto data = dataset(index(write_rows("rows.jsonl", 0, 30)), {.sequence_length = 40}, 48);
  const std::vector<std::string> expected = stream(data, 1, 0, 0, 24);
  const auto size_of = [](int64_t consumed) { return consumed < 12 ? 6 : 12; };
  for (const int64_t workers : {0, 1, 8})
    for (const int64_t start : {0, 6, 12})
      EXPECT_TRUE(std::ranges::equal(stream(data, 3, workers, start, 24, size_of),
                                     std::span(expected).subspan(static_cast<size_t>(start))))
          << workers << " " << start;
  // Patches of the ranks, in a batch of 12
  const auto patches = [&](bool balanced) {
    std::vector<int64_t> out;
    for (const int64_t rank : {0, 1}) {
      DataLoaderOptions options;
      options.sampler.data_parallel_size = 2;
      options.sampler.data_parallel_rank = rank;
      if (balanced) options.global_batch_size = [](int64_t) { return 12; };
      DataLoader loader(data, options);
      out.push_back(0);
      while (loader.consumed() < 12) {
        const auto batch = loader.next();
        for (const auto& one : batch->images->all) out.back() += one.image.patches();
      }
    }
    return std::pair(out[0] + out[1], std::abs(out[0] - out[1]));
  };
  EXPECT_EQ(patches(true).first, patches(false).first);
  EXPECT_LT(patches(true).second, patches(false).second);
}

// Images over ranks, and samples over replicas.
TEST_F(Indexed, MediaAreDividedByTheirCosts) {
  const auto data = dataset(index(write_rows("rows.jsonl", 0, 30)), {.sequence_length = 40}, 48);
  const auto squared = [](const SampleImage& image) {
    const int64_t pixels = image.size.height * image.size.width;
    return pixels * pixels;
  };
  const auto none = [](const SampleImage&) -> int64_t { return 0; };
  using Cost = std::function<int64_t(const SampleImage&)>;
  for (const Cost& cost : {Cost(squared), Cost(none)}) {
    DataLoaderOptions options;
    options.sampler.micro_batch_size = 6;
    options.sampler.data_parallel_size = 2;
    options.image_ranks = {2, 0};
    options.media_costs.image = cost;
    options.global_batch_size = [](int64_t) { return 12; };
    const auto batch = DataLoader(data, options).next();
    std::vector<int64_t> of_samples(12, 0), of_images;
    for (int64_t i = 0; i < 12; ++i)
      for (const SampleImage& image : data->images(i))
        of_samples[static_cast<size_t>(i)] += cost(image);
    EXPECT_EQ(batch->ordinals, balanced_samples(of_samples, 0, 2));
    std::vector<int> owners;
    for (const auto& one : batch->images->all) {
      of_images.push_back(cost(one.image));
      owners.push_back(one.owner);
    }
    EXPECT_GT(owners.size(), 6U);
    EXPECT_EQ(owners, plan_images(of_images, 2));
  }
}

// A worker that is slow to begin its micro-batch finds its global batch, also when the others read
// ahead as far as the queue allows and every micro-batch is a global batch.
TEST_F(Indexed, BalancedBatchesAreKeptForSlowWorkers) {
  const auto data = dataset(index(write_rows("rows.jsonl", 0, 30)), {.sequence_length = 40}, 480);
  const std::vector<std::string> expected = stream(data, 1, 0, 0, 480);
  EXPECT_EQ(stream(data, 1, 16, 0, 480, [](int64_t) { return 2; }), expected);
}

TEST(ImagePlan, SamplesAreDealtBySize) {
  const std::vector<int64_t> costs = {1, 9, 3, 7, 3, 8};
  EXPECT_EQ(balanced_samples(costs, 0, 2), (std::vector<int64_t>{1, 2, 4}));
  EXPECT_EQ(balanced_samples(costs, 1, 2), (std::vector<int64_t>{5, 3, 0}));
  EXPECT_EQ(balanced_samples(costs, 0, 1), (std::vector<int64_t>{1, 5, 3, 2, 4, 0}));
  // One that outweighs the others: its rank has the least of every row behind it.
  const std::vector<int64_t> heavy = {100, 10, 9, 8, 7, 1};
  EXPECT_EQ(balanced_samples(heavy, 0, 2), (std::vector<int64_t>{0, 3, 5}));
  EXPECT_EQ(balanced_samples(heavy, 1, 2), (std::vector<int64_t>{1, 2, 4}));
}

TEST(ImagePlan, LargestFirstToTheLeastLoaded) {
  EXPECT_EQ(plan_images(std::vector<int64_t>{9, 7, 6, 5, 4, 3}, 2),
            (std::vector<int>{0, 1, 1, 0, 1, 0}));
  EXPECT_EQ(plan_images(std::vector<int64_t>{2, 2, 2}, 2), (std::vector<int>{0, 1, 0}));
  EXPECT_EQ(plan_images(std::vector<int64_t>{}, 3), (std::vector<int>{}));
}

TEST_F(Indexed, BytesOfRowsAreHeld) {
  // Parquet holds images, and one row with a sound, which this model does not read.
  EXPECT_EQ(error_of([&] { index(kGoldens + "same/parquet"); }),
            kGoldens +
                "same/parquet/rows.parquet: row 4: there is a sound, which the model does "
                "not read");
  const std::string row =
      R"({"caption": "c", "image": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAIAAAADCAIAAAA2iEnWAAAAFElEQVR4nGPkTD7OwMDAxMDAgKAAFl8BORQWRUQAAAAASUVORK5CYII="})";
  const auto held = index(folder_.write("held.jsonl", row + "\n"));
  EXPECT_EQ(held->medium(0, 0).place.path, "");
  EXPECT_EQ(held->bytes(0, 0).substr(1, 3), "PNG");
  EXPECT_EQ(held->facts(0, 0).size, (ImageSize{3, 2}));
}

TEST_F(Indexed, IsReadFromTheCacheAndBuiltAgainWhenRowsChange) {
  const std::string path = write_rows("rows.jsonl", 0, 5);
  const auto files = [&] {
    std::set<std::string> out;
    for (const auto& entry : std::filesystem::directory_iterator(options_.cache_path))
      if (entry.path().string().ends_with("ids.npy")) out.insert(entry.path().filename());
    return out;
  };
  const std::string first = index(path)->description();
  const std::set<std::string> built = files();
  EXPECT_EQ(built.size(), 1U);
  EXPECT_EQ(index(path)->description(), first);
  EXPECT_EQ(files(), built);
  write_rows("rows.jsonl", 0, 6);
  EXPECT_EQ(index(path)->size(), 6);
  EXPECT_NE(index(path)->description(), first);
  EXPECT_EQ(files().size(), 2U);
}

// The description, which decides whether a run may go on, has hashes as ever; a checkpoint keeps
// what they stand for.
TEST_F(Indexed, DetailsHaveWhatTheDescriptionHashes) {
  const auto data = dataset(index(write_rows("rows.jsonl", 0, 4)), {.sequence_length = 40});
  const Json named = Json::parse(data->description());
  EXPECT_EQ(named.at("index"), hash_text(data->index().description()));
  Json details = Json::parse(data->details());
  const Json full = details.at("index");
  const Json& media = full.at("encoding").at("media");
  EXPECT_EQ(media.at("model_type"), "llava");
  EXPECT_EQ(media.at("image_token_id"), 260);
  EXPECT_EQ(media.at("image_processor").at("crop_size"), Json({{"height", 28}, {"width", 28}}));
  EXPECT_TRUE(full.at("encoding").at("conversations").contains("chat_template"));
  EXPECT_EQ(full.at("files").at(0),
            cat("rows.jsonl ", hash_text(read_file(folder_ / "rows.jsonl"))));
  details["index"] = named.at("index");
  EXPECT_EQ(details, named);
  const BlendedDataset blend({data, data}, {0.5, 0.5}, 2, Split::kTrain);
  EXPECT_EQ(Json::parse(blend.details()).at("datasets").at(1).at("index"), full);
  EXPECT_EQ(Json::parse(blend.description()).at("datasets").at(1), named);
}

TEST_F(Indexed, AnImageThatIsAnotherOneIsNamed) {
  options_.media_root = "";
  folder_.write("a.png", read_file(kGoldens + "same/json/media/0_img1.png"));
  const auto data = index(folder_.write("rows.jsonl", R"({"image": "a.png", "caption": "c"})"));
  EXPECT_NO_THROW(data->bytes(0, 0));
  folder_.write("a.png", read_file(kGoldens + "same/json/media/3_img1.png"));
  EXPECT_EQ(error_of([&] { data->bytes(0, 0); }),
            folder_ / "rows.jsonl" +
                ": line 1: a.png: is another image than when the data set was indexed: 7x2, it was "
                "5x9\nhint: save the file of rows again, so that it is indexed again");
}

// EXIF that says 9: the image is taken as stored, and counted.
TEST_F(Indexed, OrientationsThatAreNoneAreCounted) {
  for (const GoldenImage& image : golden_images())
    if (image.name.starts_with("webp 0 RGBA"))
      folder_.write("a.webp", {image.file.begin(), image.file.end()});
  options_.media_root = "";
  const std::string row = R"({"image": "a.webp", "caption": "c"})";
  testing::internal::CaptureStderr();
  const std::string path = folder_.write("rows.jsonl", row + "\n" + row + "\n");
  EXPECT_EQ(index(path)->facts(0, 0).size, (ImageSize{38, 16}));
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              testing::HasSubstr(path +
                                 ": line 1: a.webp: its EXIF gives no orientation of 1 to "
                                 "8; 2 images of " +
                                 path + " are such, and taken as stored"));
}

// Tar has no checksum of what members hold; PNG has, which is looked at when the image is read.
TEST_F(Indexed, AFlippedBitOfAMemberIsNamed) {
  const std::string path = write_tar("a.tar", 0, 1, [](int64_t, std::string& bytes) {
    char& byte = bytes[bytes.find("IDAT") + 10];
    byte = static_cast<char>(byte ^ 1);
  });
  const auto data = dataset(index(path), {.sequence_length = 40});
  std::vector<uint8_t> patches(static_cast<size_t>(data->images(0).at(0).bytes()));
  EXPECT_THAT(error_of([&] { data->read_image(0, 0, patches); }),
              testing::StartsWith(path + ": 0: 0.png: byte "));
}

TEST_F(Indexed, LimitsAreChecked) {
  options_.most_media = 1;
  const std::string path =
      folder_.write("rows.jsonl", R"({"image": ["0_img1.png", "1_img1.jpg"], "caption": "c"})");
  EXPECT_EQ(error_of([&] { index(path); }),
            path + ": line 1: has 2 images and sounds, more than 1");
  options_.most_media = 2;
  options_.limits.max_image_pixels = 50;
  EXPECT_EQ(error_of([&] { index(path); }).substr(0, path.size() + 21),
            path + ": line 1: 1_img1.jpg:");
}

TEST_F(Indexed, RunsLieWhereTheirRowsAre) {
  const auto data = dataset(index(write_rows("rows.jsonl", 0, 20)), {.sequence_length = 50});
  const int64_t image = *tokenizer_->token_to_id("<image>");
  int64_t runs = 0;
  for (int64_t i = 0; i < data->size(); ++i) {
    Sample sample = data->sample(i);
    std::vector<int64_t> tokens = sample.get<int64_t>("tokens");
    const std::vector<float> mask = sample.get<float>("loss_mask");
    const std::vector<int64_t> labels = sample.get<int64_t>("labels");
    for (const SequenceRun& run : data->runs(i)) {
      EXPECT_EQ(run.rows, 4);
      for (int64_t p = run.position; p < run.position + run.rows; ++p)
        EXPECT_EQ(std::exchange(tokens[static_cast<size_t>(p)], -1), image);
      EXPECT_EQ(mask[static_cast<size_t>(run.position) + 3], 1.0F);
      EXPECT_EQ(mask[static_cast<size_t>(run.position) + 2], 0.0F);
      ++runs;
    }
    EXPECT_EQ(std::count(tokens.begin(), tokens.end(), image), 0);
    for (size_t p = 0; p < labels.size(); ++p) EXPECT_FALSE(labels[p] == image && mask[p] > 0);
  }
  EXPECT_EQ(runs, 20);
}

TEST_F(Indexed, PatchesOfASequenceStayWithinTheirCapacity) {
  const auto all = index(write_rows("rows.jsonl", 0, 40));
  // Four patches an image.
  const auto free = dataset(all, {.sequence_length = 100});
  EXPECT_GT(free->counts().most_patches, 12);
  EXPECT_EQ(free->counts().patches, 160);
  const auto bound = dataset(all, {.sequence_length = 100, .most_patches = 12});
  EXPECT_EQ(bound->counts().most_patches, 12);
  EXPECT_GE(bound->size(), 14);
  int64_t runs = 0;
  for (int64_t i = 0; i < bound->size(); ++i) {
    EXPECT_LE(std::ssize(bound->runs(i)), 3);
    runs += std::ssize(bound->runs(i));
  }
  EXPECT_EQ(runs, 40);
  EXPECT_EQ(error_of([&] { dataset(all, {.sequence_length = 100, .most_patches = 3}); }),
            folder_ / "rows.jsonl" +
                ": line 1: its images have 4 patches, more than the 3 that a sequence may have");
}

TEST_F(Indexed, LongSamplesAreDroppedCutOrRefused) {
  // 4 rows, up to 12 letters and the end: at most 16 positions.
  const auto all = index(write_rows("rows.jsonl", 0, 12));
  const auto dropped = dataset(all, {.sequence_length = 10});
  EXPECT_EQ(dropped->counts().dropped, 6);
  EXPECT_EQ(dropped->counts().first_dropped, folder_ / "rows.jsonl" + ": line 2");
  const auto cut = dataset(all, {.sequence_length = 10, .long_samples = LongSamples::kCut});
  EXPECT_EQ(cut->counts().cut, 6);
  EXPECT_EQ(cut->counts().dropped, 0);
  EXPECT_EQ(
      error_of([&] { dataset(all, {.sequence_length = 10, .long_samples = LongSamples::kError}); }),
      folder_ / "rows.jsonl" + ": line 2: takes 12 positions, the sequence has 10");
  EXPECT_EQ(error_of([&] {
              dataset(all, {.sequence_length = 3, .long_samples = LongSamples::kCut});
            }).substr(0, (folder_ / "rows.jsonl").size() + 11),
            folder_ / "rows.jsonl" + ": none of t");
}

TEST_F(Indexed, TheOrderIsOneOfIndexSeedAndEpoch) {
  std::vector<int64_t> shards;
  for (int64_t i = 0; i < 60; ++i) shards.push_back(i / 20);
  for (const int64_t window : {0, 1, 8, 100}) {
    std::vector<int64_t> sorted = sample_order(shards, 7, 0, window);
    EXPECT_EQ(sorted, sample_order(shards, 7, 0, window));
    if (window != 1) {
      EXPECT_NE(sorted, sample_order(shards, 7, 1, window));
    }
    std::sort(sorted.begin(), sorted.end());
    for (int64_t i = 0; i < 60; ++i) EXPECT_EQ(sorted[static_cast<size_t>(i)], i);
  }
  // Within a window of 20 files follow each other, each in an order of its own.
  const std::vector<int64_t> order = sample_order(shards, 7, 0, 20);
  for (size_t i = 0; i < 60; ++i)
    EXPECT_EQ(shards[static_cast<size_t>(order[i])],
              shards[static_cast<size_t>(order[i / 20 * 20])]);
  EXPECT_FALSE(std::is_sorted(order.begin(), order.begin() + 20));
  // A window of one keeps the order within files.
  const std::vector<int64_t> kept = sample_order(shards, 7, 0, 1);
  EXPECT_TRUE(std::is_sorted(kept.begin(), kept.begin() + 20));
}

TEST_F(Indexed, GlobalBatchesAreTheSameForAnyRanksAndWorkers) {
  const auto data = dataset(index(write_rows("rows.jsonl", 0, 50)),
                            {.sequence_length = 40, .shuffle_window = 16}, 60);
  constexpr int64_t kGlobalBatch = 6, kBatches = 10;
  // Content of each global batch, read from `consumed` samples on.
  const auto stream = [&](int64_t ranks, int64_t workers, int64_t consumed) {
    std::vector<std::multiset<std::string>> out(static_cast<size_t>(kBatches));
    for (int64_t rank = 0; rank < ranks; ++rank) {
      DataLoaderOptions options;
      options.sampler.data_parallel_size = ranks;
      options.sampler.data_parallel_rank = rank;
      options.num_workers = workers;
      options.consumed_samples = consumed;
      DataLoader loader(data, options);
      for (int64_t step = consumed / ranks; step < kBatches * kGlobalBatch / ranks; ++step) {
        const auto batch = loader.next();
        EXPECT_EQ(batch->sample_ids.size(), 1U);
        out[static_cast<size_t>(step * ranks / kGlobalBatch)].insert(
            content(*data, batch->sample_ids[0]));
      }
    }
    return out;
  };
  const auto expected = stream(1, 0, 0);
  EXPECT_EQ(expected[0].size(), 6U);
  EXPECT_NE(expected[0], expected[1]);
  for (const int64_t ranks : {1, 2, 3})
    for (const int64_t workers : {0, 1, 8}) EXPECT_EQ(stream(ranks, workers, 0), expected);
  // Gone on with from another layout.
  auto rest = expected;
  for (size_t i = 0; i < 4; ++i) rest[i].clear();
  EXPECT_EQ(stream(3, 8, 4 * kGlobalBatch), rest);
  EXPECT_EQ(stream(2, 1, 4 * kGlobalBatch), rest);
}

}  // namespace
}  // namespace megatron
