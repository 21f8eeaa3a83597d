// Prompts with images and sounds of a model that reads both, against PyTorch: ids, logits and
// greedy tokens; a second turn; in chunks of any length, beside other prompts, over two tensor
// ranks; what is wrong with their placeholders.
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "megatron/base/files.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/inference/engine.h"
#include "megatron/inference/evaluation/served_proof.h"
#include "megatron/inference/images/image_prompts.h"
#include "megatron/inference/memory_plan.h"
#include "megatron/inference/model_runner.h"
#include "megatron/nn/parameter_store.h"
#include "tests/unit/allocation_meter.h"
#include "tests/unit/error_of.h"
#include "tests/unit/golden_tensors.h"
#include "tests/unit/models/media_golden.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int64_t kMixedContext = 512, kMixedImage = 38;

const Json& mixed_facts() {
  static const Json facts =
      Json::parse(read_file(media_golden_folder("image_and_sound") / "generations.json"));
  return facts;
}

Json facts_of(const std::string& family) {
  for (const Json& row : Json::parse(read_file(media_golden_folder("generations.json"))))
    if (row["family"] == family) return row;
  return {};
}

// qwen2_audio's, whose last letter makes room for the token of images.
Json mixed_tokenizer() {
  Json out = facts_of("qwen2_audio")["tokenizer"];
  std::map<int, std::string> letters;
  for (const auto& [token, id] : out["model"]["vocab"].items())
    if (token.size() < 3) letters[id] = token;
  Json vocab = {{"<|im_start|>", 1}, {"<img>", 3}, {"<|im_end|>", 10}, {"<|AUDIO|>", 39}};
  vocab["<image>"] = kMixedImage;
  int next = 0;
  for (const auto& [id, letter] : letters) {
    while (next == 1 || next == 3 || next == 10) ++next;
    vocab[letter] = next++;
  }
  out["model"]["vocab"] = vocab;
  for (Json& token : out["added_tokens"])
    if (token["content"] == "</img>") token["content"] = "<image>", token["id"] = kMixedImage;
  return out;
}

// What a family's files say of its media, with that tokenizer.
fs::path write_media_folder(const std::string& family) {
  static std::atomic<int> folders = 0;
  const fs::path folder =
      fs::path(testing::TempDir()) / ("mixed_" + family + std::to_string(folders++));
  fs::remove_all(folder);
  fs::create_directories(folder);
  Json config = Json::parse(read_file(media_golden_folder(family) / "config.json"));
  if (family == "llava") config["image_token_id"] = config["image_token_index"] = kMixedImage;
  write_file_atomically(folder / "config.json", config.dump());
  write_file_atomically(folder / "preprocessor_config.json", facts_of(family)["processor"].dump());
  write_file_atomically(folder / "tokenizer.json", mixed_tokenizer().dump());
  write_file_atomically(folder / "tokenizer_config.json", R"({"eos_token": "<|im_end|>"})");
  return folder;
}

ModelConfig mixed_config(const HfFolder& seen, const HfFolder& heard) {
  ModelConfig config = heard.model.config;
  MimoConfig& own = *config.own.as<MimoConfig>();
  static_cast<VisionConfig&>(own) = *seen.model.config.own.as<MimoConfig>();
  own.image_token_id = kMixedImage;
  config.transformer.seq_length = kMixedContext;
  return config;
}

// qwen2_audio's language model and encoder of sounds beside llava's encoder of images.
struct MixedModel {
  explicit MixedModel(const ParallelGroups& of = {})
      : groups(of),
        seen(open_hf_folder(media_golden_folder("llava"))),
        heard(open_hf_folder(media_golden_folder("qwen2_audio"))),
        whole{0, heard.model.config.transformer.num_layers, true, true},
        model(mixed_config(seen, heard), groups, whole, {}),
        store(model, at::kFloat, at::kCPU, /*gradients=*/false),
        folders{write_media_folder("llava"), write_media_folder("qwen2_audio")},
        tokenizer(make_tokenizer(find_tokenizer(folders.media))),
        chat_template(mixed_facts()["template"]) {
    std::map<std::string, at::Tensor> values;
    for (const HfFolder* from : {&seen, &heard}) {
      MimoModel part(from->model.config, groups, whole, {});
      PlainParameterStore of_part(part, at::kFloat, at::kCPU, /*gradients=*/false);
      load_hf_values(*from, groups, whole, part);
      part.visit([&](const std::string& name, Parameter& p) { values[name] = p.value.clone(); });
    }
    model.visit([&](const std::string& name, Parameter& p) { p.value.copy_(values.at(name)); });
    prompts.emplace(model, *tokenizer, folders, chat_template, /*escape_literals=*/false);
  }

  RequestSpec request(const ImagePrompt& prompt) {
    const Generation start = prompts->start(prompt, 64, "prompt");
    RequestSpec spec;
    spec.rows = start.rows;
    spec.prompt.assign(prompt.ids.begin() + start.rows->count, prompt.ids.end());
    spec.sampling.temperature = 0.0;
    spec.stop.max_tokens = 64;
    return spec;
  }

  const ParallelGroups groups;
  const HfFolder seen, heard;
  const StageSlice whole;
  MimoModel model;
  PlainParameterStore store;
  const MediaFolders folders;
  const std::unique_ptr<Tokenizer> tokenizer;
  const std::string chat_template;
  std::optional<ImagePrompts> prompts;
};

RowMedium medium_of_file(const std::string& file) {
  const bool sound = file.ends_with(".wav");
  return {sound ? MediaKind::kSound : MediaKind::kImage, file,
          read_file(media_golden_folder(sound ? "sounds" : "same/json/media") / file)};
}

MultimodalRow mixed_row(const Json& text) {
  MultimodalRow row;
  row.caption = text["text"];
  for (const Json& file : text["files"]) row.media.push_back(medium_of_file(file));
  return row;
}

std::vector<int32_t> mixed_ids(const Json& numbers) { return numbers.get<std::vector<int32_t>>(); }

// Greedy tokens behind prompts that run at one time, of which a step reads so many tokens.
std::vector<std::vector<int32_t>> served_tokens(MixedModel& m,
                                                const std::vector<RequestSpec>& specs,
                                                int64_t step_tokens) {
  constexpr int64_t kWait = 60'000'000'000;
  const MonotonicClock clock;
  RunnerOptions runner_options;
  runner_options.slots = 4;
  runner_options.block_size = 8;
  runner_options.device_blocks = 128;
  ModelRunner runner(m.model, runner_options);
  EngineOptions options;
  options.scheduler.max_step_tokens = step_tokens;
  options.step_timeout_ns = kWait;
  options.check_invariants = true;
  Engine engine(runner, nullptr, m.tokenizer.get(), clock, options);
  engine.step(0);
  std::map<RequestId, size_t> places;
  for (const RequestSpec& spec : specs) {
    const Admission admission = engine.submit(spec);
    if (!admission.id) {
      ADD_FAILURE() << admission.refusal->message;
      return {};
    }
    places.emplace(*admission.id, places.size());
  }
  std::vector<std::vector<int32_t>> out(specs.size());
  while (!places.empty()) {
    engine.step(kWait);
    for (const Event& event : engine.take_events()) {
      for (const GeneratedToken& token : event.tokens)
        out[places.at(event.request)].push_back(token.id);
      if (event.finish) places.erase(event.request);
    }
  }
  return out;
}

TEST(MixedPrompts, TextsAreThoseOfPyTorch) {
  MixedModel m;
  for (const Json& text : mixed_facts()["texts"]) {
    const ImagePrompt prompt = m.prompts->of_text(mixed_row(text), "text");
    EXPECT_EQ(prompt.ids, mixed_ids(text["prompt_tokens"]));
    const at::Tensor logits = full_logits(m.model, prompt.ids, {}, prompt.media);
    for (const auto& [place, values] : text["logits"].items()) {
      const at::Tensor expected = at::tensor(values.get<std::vector<double>>()),
                       own = logits[std::stoll(place)].to(at::kDouble);
      EXPECT_LE((own - expected).norm().item<double>(), 1e-4 * expected.norm().item<double>())
          << "row " << place;
    }
    GenerateOptions options;
    options.sampling.greedy = true;
    const std::vector<Generation> made =
        generate(m.model, *m.tokenizer, {m.prompts->start(prompt, 64, "text")}, options);
    EXPECT_EQ(made.front().tokens, mixed_ids(text["tokens"]));
  }
}

TEST(MixedPrompts, TurnsBringBoth) {
  MixedModel m;
  const Chat chat(*m.tokenizer, {}, m.chat_template, {});
  MultimodalRow row;
  for (const Json& turn : mixed_facts()["turns"]) {
    row.messages.push_back({R"({"role":"user"})", false, {}});
    for (const Json& file : turn["files"]) {
      row.messages.back().parts.push_back({{}, std::ssize(row.media)});
      row.media.push_back(medium_of_file(file));
    }
    row.messages.back().parts.push_back({turn["text"], -1});
    const ImagePrompt prompt = m.prompts->of_conversation(row, chat, "turn");
    EXPECT_EQ(prompt.ids, mixed_ids(turn["prompt_tokens"]));
    EXPECT_EQ(m.prompts->ids_of_conversation(row, chat, "turn").ids, prompt.ids);
    EXPECT_EQ(served_tokens(m, {m.request(prompt)}, 1000).front(), mixed_ids(turn["tokens"]));
    row.messages.push_back({R"({"role":"assistant"})", true, {{turn["said"], -1}}});
  }
}

// Prompts of one text with other media share no cached prefix.
TEST(MixedPrompts, ChunksOfAnyLengthBesideOtherPrompts) {
  MixedModel m;
  const Json& text = mixed_facts()["texts"][1];
  MultimodalRow row = mixed_row(text);
  const RequestSpec spec = m.request(m.prompts->of_text(row, "text"));
  std::swap(row.media[0], row.media[3]);
  std::swap(row.media[1], row.media[2]);
  const RequestSpec other = m.request(m.prompts->of_text(row, "text"));
  const std::vector<int32_t> expected = mixed_ids(text["tokens"]),
                             of_other = served_tokens(m, {other}, 1000).front();
  EXPECT_NE(of_other, expected);
  for (const int64_t chunk : {1, 5, 17, 61})
    EXPECT_EQ(served_tokens(m, {spec, other, spec}, chunk),
              (std::vector<std::vector<int32_t>>{expected, of_other, expected}))
        << chunk;
}

TEST(MixedPrompts, OverTwoTensorRanks) {
  const Json& text = mixed_facts()["texts"][0];
  LocalLinks links(2);
  run_ranks(2, [&](const std::shared_ptr<Backend>& world) {
    ParallelGroups groups;
    groups.tp = ProcessGroup(world, "tp");
    MixedModel m(groups);
    ServedWorkload workload{{{RequestSpec()}}, 22 + 64};
    if (world->rank() == 0)  // which alone encodes
      workload.waves[0][0] = m.request(m.prompts->of_text(mixed_row(text), "text"));
    const std::vector<ServedText> got = serve_workload(m.model, workload, links, world->rank());
    if (world->rank() > 0) return;
    EXPECT_EQ(got.at(0).tokens, mixed_ids(text["tokens"]));
  });
}

TEST(MixedPrompts, PlaceholdersAreCountedByKind) {
  const MixedModel m;
  MultimodalRow row =
      mixed_row(mixed_facts()["texts"][1]);  // low.wav, an image, another, short.wav
  const auto of = [&](const char* text) {
    row.caption = text;
    return m.prompts->of_text(row, "text").ids;
  };
  EXPECT_EQ(of("ab"), of("<|AUDIO|><image><image><|AUDIO|>ab"));
  EXPECT_NE(of("ab"), of("<image><image><|AUDIO|><|AUDIO|>ab"));
  EXPECT_EQ(error_of([&] { of("<image>ab<image>"); }),
            "text: the text has <image> 2 times for 2 images and <|AUDIO|> 0 times for 2 sounds\n"
            "hint: once for each image and sound, or not at all: then images and sounds come "
            "before the text");
  EXPECT_EQ(error_of([&] { of("<image><image><image><|AUDIO|>ab"); }),
            "text: the text has <image> 3 times for 2 images and <|AUDIO|> 1 time for 2 sounds\n"
            "hint: once for each image and sound, or not at all: then images and sounds come "
            "before the text");
  const ImagePrompt prompt = m.prompts->of_text(row = mixed_row(mixed_facts()["texts"][1]), "text");
  EXPECT_EQ(error_of([&] { m.prompts->start(prompt, 500, "text"); }),
            "text has 62 tokens, 45 of them of 2 images and 2 sounds; with 500 to generate that is "
            "beyond the model's context of 512\n"
            "hint: give fewer images and sounds, or a shorter text");
  EXPECT_EQ(error_of([&] {
              ImagePrompts(const_cast<MimoModel&>(m.model), *m.tokenizer, {m.folders.media},
                           m.chat_template, false);
            }),
            m.folders.media.string() + ": its model reads images, this one images and sounds");
  MultimodalRow alone;
  alone.caption = "ab";
  alone.media = {medium_of_file("odd.wav")};
  EXPECT_EQ(m.prompts->of_text(alone, "text").kinds(), "sounds");
  EXPECT_EQ(m.prompts->of_text(alone, "text").media.images, nullptr);
}

// Half of the context's features are those of images, half of sounds.
TEST(MixedPrompts, TheLargestTakesNoMoreThanIsPlanned) {
  MixedModel m;
  ServedShape shape;
  shape.max_media = 1000;
  const auto planned = static_cast<double>(encoder_memory(m.model.config(), shape).step);
  MultimodalRow row;
  row.caption = "a";
  row.media.resize(28, medium_of_file("1_img1.jpg"));
  row.media.resize(28 + 10, medium_of_file("low.wav"));
  const auto held = std::make_shared<Meter>(), meter = std::make_shared<Meter>();
  ImagePrompt prompt;
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, held);
    prompt = m.prompts->of_text(row, "text");
  }
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
    m.prompts->start(prompt, 0, "text");
  }
  const auto taken = static_cast<double>(held->live + meter->most);
  EXPECT_LE(taken, 1.05 * planned);
  EXPECT_GE(taken, 0.4 * planned);
}

}  // namespace
}  // namespace megatron
