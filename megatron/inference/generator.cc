#include "megatron/inference/generator.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/datasets/tuning/text_to_text.h"
#include "megatron/inference/engine.h"
#include "megatron/inference/memory_plan.h"
#include "megatron/inference/model_runner.h"
#include "megatron/inference/speculation/draft_model.h"
#include "megatron/models/mimo/mimo_config.h"
#include "megatron/tensor/torch.h"
#include "megatron/tokenizers/rendered_text.h"
#include "megatron/transformer/layer/forward_context.h"

namespace megatron {
namespace {

// The device of a model's parameters.
at::Device device_of(Model& model) { return model.parameters().front()->value.device(); }

// Sequences that run at a time.
constexpr size_t kSequences = 64;
constexpr int64_t kGenerateWaitNs = 1'000'000'000;
// Nobody waits for a step but the user, who may end the program.
constexpr int64_t kNoLimitNs = int64_t{1} << 60;

bool reads_input(const Model& model) {
  return model.sequence_input() == SequenceInputUse::kRequired;
}

std::optional<int32_t> end_of_input(const Tokenizer& tokenizer, const GenerateOptions& options) {
  return options.end_of_input ? options.end_of_input : tokenizer.eod();
}

void check_ids(const std::vector<int32_t>& ids, size_t prompt, const ModelConfig& config) {
  for (const int32_t id : ids) {
    const MediumOfToken medium = medium_of(config, id);
    MEGATRON_CHECK(medium.name.empty(), "prompt ", prompt + 1, " has the token of ",
                   medium.name == "image" ? "an " : "a ", medium.name, ", ", id, ", and no ",
                   medium.name, "\nhint: ", medium.hint);
    MEGATRON_CHECK(id < config.vocab_size, "prompt ", prompt + 1, " has the token id ", id,
                   ", the model's vocabulary has ", config.vocab_size);
  }
}

// The prompts of an encoder-decoder: inputs of its encoder.
std::vector<Generation> inputs_of_encoder(const Model& model, const Tokenizer& tokenizer,
                                          std::span<const std::string> prompts,
                                          const GenerateOptions& options) {
  const ModelConfig& config = model.config();
  std::vector<Generation> results(prompts.size());
  for (size_t i = 0; i < prompts.size(); ++i) {
    std::vector<int32_t>& ids = results[i].prompt_tokens;
    ids = tokenizer.encode(prompts[i]);
    if (const auto end = end_of_input(tokenizer, options)) ids.push_back(*end);
    MEGATRON_CHECK(!ids.empty(), "prompt ", i + 1, " has no tokens");
    check_ids(ids, i, config);
    const int64_t most = config.transformer.seq_length;
    if (options.cut_input && std::ssize(ids) > most) {
      const int32_t last = ids.back();
      ids.resize(static_cast<size_t>(most));
      if (end_of_input(tokenizer, options)) ids.back() = last;
    }
    MEGATRON_CHECK(std::ssize(ids) <= most, "prompt ", i + 1, " has ", ids.size(),
                   " tokens, the encoder reads ", most, "\nhint: shorten the prompt");
  }
  const int64_t limit = max_positions(config), tokens = options.tokens_to_generate;
  MEGATRON_CHECK(limit < 0 || tokens + 1 <= limit, tokens,
                 " tokens to generate are beyond the model's ", limit, " positions",
                 "\nhint: --tokens-to-generate ", limit - 1);
  return results;
}

// A cache for the longest texts that can run together, as far as memory goes; others wait.
RunnerOptions runner_options(Model& model, const std::vector<Generation>& texts,
                             const GenerateOptions& given) {
  const int64_t tokens = given.tokens_to_generate;
  RunnerOptions options;
  options.keeping = given.states.keeping();
  options.keeping.drafts = given.speculation.num_speculative_tokens;
  std::vector<int64_t> blocks;
  for (const Generation& text : texts) {
    const int64_t before = reads_input(model) ? 1 : std::ssize(text.prompt_tokens);
    blocks.push_back((before + tokens - 1) / options.block_size + 1);
  }
  std::ranges::sort(blocks, std::greater());
  blocks.resize(std::min(blocks.size(), kSequences));
  options.slots = static_cast<int32_t>(blocks.size());
  CacheDemand demand;
  demand.slots = options.slots;
  demand.block_size = options.block_size;
  demand.wanted = std::accumulate(blocks.begin(), blocks.end(), int64_t{0});
  demand.needed = blocks.front();
  demand.hint = "give a smaller --tokens-to-generate, or a shorter prompt";
  const auto element = static_cast<int64_t>(model.parameters().front()->value.element_size());
  const KeptBytes kept = kept_bytes(model.config(), model.slice(), 1, element, options.keeping);
  options.device_blocks = plan_cache(kept, demand, cache_budget(device_of(model), 0)).blocks;
  return options;
}

EngineOptions engine_options(const GenerateOptions& options, size_t prompts) {
  EngineOptions engine;
  engine.scheduler.max_waiting = static_cast<int64_t>(prompts);
  engine.max_stop_texts = static_cast<int32_t>(options.stop.size());
  for (const std::string& text : options.stop)
    engine.max_stop_text_bytes =
        std::max(engine.max_stop_text_bytes, static_cast<int64_t>(text.size()));
  engine.step_timeout_ns = kNoLimitNs;
  options.speculation.apply(engine.scheduler);
  return engine;
}

RequestSpec request_of(const Model& model, const Tokenizer& tokenizer,
                       const GenerateOptions& options, const Generation& text, size_t prompt) {
  const ModelConfig& config = model.config();
  RequestSpec spec;
  spec.rows = text.rows;
  spec.prompt.assign(text.prompt_tokens.begin() + (text.rows ? text.rows->count : 0),
                     text.prompt_tokens.end());
  if (reads_input(model)) {
    spec.prompt = {options.decoder_start ? *options.decoder_start : decoder_start_of(tokenizer)};
    spec.state_input = std::make_shared<const StateInput>(StateInput{text.prompt_tokens, {}, {}});
  }
  spec.sampling = options.sampling.parameters();
  spec.first_choice = static_cast<int32_t>(prompt);
  spec.stop.max_tokens = options.tokens_to_generate;
  spec.stop.end_tokens = options.stop_tokens;
  const std::optional<int32_t> end =
      reads_input(model) ? end_of_input(tokenizer, options) : tokenizer.eod();
  if (options.stop_at_eod && end) spec.stop.end_tokens.push_back(*end);
  std::erase_if(spec.stop.end_tokens, [&](int32_t id) { return id >= config.vocab_size; });
  spec.stop.stop_texts = options.stop;
  spec.stop.skip_special_tokens = options.skip_special_tokens;
  return spec;
}

// Appends what an event brings; whether the text has ended.
bool take(const Event& event, Generation& text) {
  for (const GeneratedToken& token : event.tokens) text.tokens.push_back(token.id);
  text.text += event.text;
  if (!event.finish) return false;
  text.finish_reason = event.finish->reason;
  MEGATRON_CHECK(text.finish_reason != FinishReason::kNonFinite,
                 "the model's logits are not finite at position ",
                 text.prompt_tokens.size() + text.tokens.size(),
                 "\nhint: the checkpoint may come from a run that diverged");
  MEGATRON_CHECK(is_complete(text.finish_reason), event.finish->message);
  if (text.finish_reason == FinishReason::kEndToken) text.tokens.pop_back();
  return true;
}

}  // namespace

int64_t max_positions(const ModelConfig& config) {
  return config.transformer.position_embedding_type == PositionEmbedding::kLearnedAbsolute
             ? config.transformer.max_position_embeddings
             : -1;
}

std::vector<Generation> encode_prompts(const ModelConfig& config, const Tokenizer& tokenizer,
                                       std::span<const std::string> prompts,
                                       const GenerateOptions& options) {
  std::vector<Generation> results(prompts.size());
  for (size_t i = 0; i < prompts.size(); ++i) {
    std::vector<int32_t>& ids = results[i].prompt_tokens;
    ids = options.rendered ? encode_rendered(tokenizer, prompts[i]) : tokenizer.encode(prompts[i]);
    if (ids.empty()) {
      MEGATRON_CHECK(tokenizer.eod(), "prompt ", i + 1,
                     " has no tokens and the tokenizer has no end-of-document token to start from");
      ids.push_back(*tokenizer.eod());
    }
    check_ids(ids, i, config);
    const int64_t limit = max_positions(config);
    const auto needed = static_cast<int64_t>(ids.size()) + options.tokens_to_generate;
    MEGATRON_CHECK(limit < 0 || needed <= limit, "prompt ", i + 1, " has ", ids.size(),
                   " tokens; with ", options.tokens_to_generate,
                   " to generate that is beyond the model's ", limit, " positions",
                   "\nhint: shorten the prompt or give --tokens-to-generate ",
                   std::max<int64_t>(0, limit - static_cast<int64_t>(ids.size())));
  }
  return results;
}

MediumOfToken medium_of(const ModelConfig& config, int64_t id) {
  const auto* own = config.own.as<MimoConfig>();
  if (own != nullptr && own->sees() && id == own->image_token_id) return {"image", "--image FILE"};
  if (own != nullptr && own->hears() && id == own->audio_token_id) return {"sound", "--audio FILE"};
  return {};
}

std::vector<Generation> generate(Model& model, const Tokenizer& tokenizer,
                                 std::span<const std::string> prompts,
                                 const GenerateOptions& options, const StreamCallback& stream) {
  return generate(model, tokenizer,
                  reads_input(model) ? inputs_of_encoder(model, tokenizer, prompts, options)
                                     : encode_prompts(model.config(), tokenizer, prompts, options),
                  options, stream);
}

std::vector<Generation> generate(Model& model, const Tokenizer& tokenizer,
                                 std::vector<Generation> texts, const GenerateOptions& options,
                                 const StreamCallback& stream) {
  const ModelConfig& config = model.config();
  MEGATRON_ASSERT(model.groups().tp.size() == 1 && model.groups().pp.size() == 1,
                  "a model that is divided generates by an engine of several ranks");
  if (texts.empty() || options.tokens_to_generate <= 0) return texts;
  const MonotonicClock clock;
  ModelRunner runner(model, runner_options(model, texts, options));
  EngineOptions engine_flags = engine_options(options, texts.size());
  std::optional<ModelRunner> draft_runner;
  if (options.draft != nullptr) {
    draft_runner.emplace(*options.draft, runner_options(*options.draft, texts, options));
    engine_flags.scheduler.draft_source = std::make_shared<DraftModel>(
        *draft_runner,
        DraftModelOptions{.vocab_size = config.vocab_size, .step_timeout_ns = kNoLimitNs});
  }
  Engine engine(runner, nullptr, &tokenizer, clock, engine_flags);
  engine.step(0);  // from now on it takes requests
  std::map<RequestId, size_t> unfinished;
  for (size_t i = 0; i < texts.size(); ++i) {
    const Admission admission = engine.submit(request_of(model, tokenizer, options, texts[i], i));
    MEGATRON_CHECK(admission.id, "prompt ", i + 1, ": ", admission.refusal->message);
    texts[i].rows = nullptr;  // the engine has them
    unfinished[*admission.id] = i;
  }
  while (!unfinished.empty()) {
    engine.step(kGenerateWaitNs);
    for (const Event& event : engine.take_events()) {
      const size_t i = unfinished.at(event.request);
      const bool ended = take(event, texts[i]);
      if (stream && !event.text.empty()) stream(i, event.text);
      if (ended) unfinished.erase(event.request);
    }
  }
  return texts;
}

namespace {

// The columns of an encoder-decoder, and places of the encoder in the context.
Batch pair_of(std::span<const int32_t> input, const at::Tensor& tokens, ForwardContext& context) {
  const std::vector<int64_t> wide(input.begin(), input.end());
  const at::Tensor ids = at::tensor(wide, tokens.options()).unsqueeze(0);
  context.place.position = at::arange(ids.size(1), tokens.options());
  Batch batch;
  batch.set("text_enc", ids);
  batch.set("enc_mask", at::ones_like(ids));
  batch.set("text_dec", tokens);
  batch.set("dec_mask", at::ones_like(tokens));
  batch.place = context.place;
  return batch;
}

}  // namespace

at::Tensor full_logits(Model& model, std::span<const int32_t> ids, std::span<const int32_t> input,
                       const PromptMedia& media) {
  const at::NoGradGuard no_grad;
  MEGATRON_CHECK(!ids.empty(), "no token ids were given");
  const ModelConfig& config = model.config();
  const int64_t limit = max_positions(config);
  const auto length = static_cast<int64_t>(ids.size());
  MEGATRON_CHECK(limit < 0 || length <= limit, length, " token ids are beyond the model's ", limit,
                 " positions");
  for (size_t i = 0; i < ids.size(); ++i) {
    const MediumOfToken medium = medium_of(config, ids[i]);
    if (medium.name == "image" ? media.images != nullptr
                               : medium.name == "sound" && media.sounds != nullptr)
      continue;
    MEGATRON_CHECK(medium.name.empty(), "token id ", ids[i], " at index ", i, " is that of ",
                   medium.name == "image" ? "an " : "a ", medium.name,
                   ", and there is none\nhint: ", medium.hint);
    MEGATRON_CHECK(ids[i] >= 0 && ids[i] < config.vocab_size, "token id ", ids[i], " at index ", i,
                   " is outside the vocabulary of ", config.vocab_size);
  }
  const at::Device device = device_of(model);
  const std::vector<int64_t> wide(ids.begin(), ids.end());
  const at::Tensor tokens = at::tensor(wide, at::dtype(at::kLong)).view({1, length}).to(device);
  ForwardContext context;
  context.place.position = at::arange(length, at::kLong).to(device);
  context.place.sample = at::zeros({1}, at::dtype(at::kLong).device(device));
  Batch batch;
  if (input.empty()) {
    batch.set("tokens", tokens);
    batch.place = context.place;
    batch.images = media.images;
    batch.sounds = media.sounds;
  } else {
    batch = pair_of(input, tokens, context);
  }
  const at::Tensor logits = model.logits(model.hidden(batch, {}, context).front());
  const at::Tensor valid = logits.select(1, 0).narrow(-1, 0, config.vocab_size);
  return valid.to(at::kCPU)
      .to(valid.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)
      .contiguous();
}

}  // namespace megatron
