#include "megatron/serving/generation_request.h"

#include <algorithm>
#include <utility>

#include "megatron/serving/detail/request_members.h"
#include "megatron/tokenizers/rendered_text.h"

namespace megatron {
namespace {

void too_many_prompts(const char* member, size_t given, int64_t limit) {
  if (static_cast<int64_t>(given) > limit)
    throw ApiError(400, member,
                   cat(member, " has ", given, " prompts, at most ", limit, " are taken"));
}

// A text, token ids, or a list of either.
void read_prompts(JsonElement prompt, const ServedModel& model, const ServeLimits& limits,
                  GenerationRequest& request) {
  std::string_view text;
  if (prompt.get(text) == simdjson::SUCCESS) {
    request.prompts.push_back({.text = std::string(text)});
    return;
  }
  simdjson::dom::array list;
  if (prompt.get(list) != simdjson::SUCCESS)
    throw ApiError(400, "prompt",
                   cat("prompt is ", kind_of(prompt), "; expected a text, token ids or a list"));
  if (list.size() == 0) throw ApiError(400, "prompt", "prompt is an empty list");
  if (list.at(0).value().is_number()) {
    request.prompts.push_back({.ids = read_ids(prompt, "prompt", model), .is_text = false});
    return;
  }
  too_many_prompts("prompt", list.size(), limits.max_prompts);
  for (const JsonElement one : list) {
    if (one.get(text) == simdjson::SUCCESS) {
      request.prompts.push_back({.text = std::string(text)});
      continue;
    }
    request.prompts.push_back({.ids = read_ids(one, "prompt", model), .is_text = false});
    if (request.prompts.back().ids.empty())
      throw ApiError(400, "prompt", "prompt has an empty list of token ids");
  }
}

// A number of top log-probabilities, or Megatron-LM's true: of the chosen token.
int32_t read_logprobs(JsonObject& json) {
  const auto given = json.any("logprobs");
  bool flag = false;
  if (given && given->get(flag) == simdjson::SUCCESS) return flag ? 0 : -1;
  return static_cast<int32_t>(json.integer("logprobs", 0, kMaxTopLogProbabilities).value_or(-1));
}

// The token that begins a text of its own, where the model has one.
std::optional<int32_t> start_token(const Tokenizer& tokenizer) {
  const auto bos = tokenizer.bos();
  return bos ? bos : tokenizer.eod();
}

void encode_prompt(PromptInput& prompt, bool add_special_tokens, const ServedModel& model) {
  if (prompt.is_text) {
    if (add_special_tokens) prompt.ids = model.tokenizer->prefix_ids();
    const std::vector<int32_t> ids = prompt.rendered
                                         ? encode_rendered(*model.tokenizer, prompt.text)
                                         : model.tokenizer->encode(prompt.text);
    prompt.ids.insert(prompt.ids.end(), ids.begin(), ids.end());
  }
  if (!prompt.ids.empty() || !prompt.is_text) return;
  const auto start = start_token(*model.tokenizer);
  if (!start)
    throw ApiError(400, "prompt",
                   "the prompt is empty, and the model has no token that begins a text");
  prompt.ids.push_back(*start);
}

// A prompt of an encoder has no token of a language model before it.
void encode_input(PromptInput& prompt, const GenerationRequest& request, const ServedModel& model) {
  const char* const member = request.endpoint == Endpoint::kChat ? "messages" : "prompt";
  if (prompt.is_text) {
    model.tokenizer->encode_append(prompt.text, prompt.ids);
    if (model.encoder->end) prompt.ids.push_back(*model.encoder->end);
  }
  if (prompt.ids.empty()) throw ApiError(400, member, "the prompt is empty");
  if (std::ssize(prompt.ids) > model.encoder->max_tokens)
    throw ApiError(400, member,
                   cat("the prompt has ", prompt.ids.size(), " tokens, the encoder reads ",
                       model.encoder->max_tokens));
  for (const int32_t id : prompt.ids)
    if (id >= model.limits.vocab_size)
      throw ApiError(400, member,
                     cat("the prompt has the token id ", id, ", the model's vocabulary has ",
                         model.limits.vocab_size));
}

void refuse_echo(const GenerationRequest& request) {
  if (!request.echo && request.prompt_logprobs < 0) return;
  throw ApiError(400,
                 request.endpoint == Endpoint::kApi ? "prompts"
                 : request.echo                     ? "echo"
                                                    : "prompt_logprobs",
                 "the model's encoder reads the prompts, which its texts do not continue");
}

// A text that spells the token of a medium brings none.
void check_no_media(const GenerationRequest& request, const PromptInput& prompt,
                    const ServedModel& model) {
  if (model.media == nullptr || request.media) return;
  for (const int32_t id : prompt.ids)
    if (const std::string_view medium = model.media->medium_of(id); !medium.empty())
      throw ApiError(400, request_member(request, "prompt"),
                     cat("the prompt has the token of ", medium == "image" ? "an " : "a ", medium,
                         ", ", id, ", and no ", medium, " in its place"));
}

void refuse_beside_media(const GenerationRequest& request) {
  if (request.prompt_logprobs >= 0 && !request.media->media.empty())
    throw ApiError(400, "prompt_logprobs",
                   "prompt_logprobs is not supported for prompts with images or sounds");
}

// The conversation with its media.
void read_media(GenerationRequest& request, const ServedModel& model) {
  refuse_beside_media(request);
  MultimodalRow& row = *request.media;
  row.tools = request.chat.tools;
  row.variables = request.chat.variables;
  try {
    MediaPrompt prompt = model.media->prompt(row, !request.ids_alone);
    request.prompts.push_back(
        {.text = std::move(prompt.text), .ids = std::move(prompt.ids), .rows = prompt.rows});
  } catch (const ApiError&) {
    throw;
  } catch (const Error& error) {
    const std::string message = error.what();
    throw ApiError(400, "messages", message.substr(0, message.find('\n')));
  }
  row.media.clear();  // encoded
}

void render_conversation(GenerationRequest& request, const ServedModel& model) {
  const ChatTemplate* const chat = request.has_tools ? model.tool_template : model.chat_template;
  if (chat == nullptr)
    throw ApiError(400, "messages", cat("the model has no chat template: ", model.why_no_template));
  ChatInput input = request.chat;
  for (std::string* json : {&input.messages, &input.tools, &input.variables})
    *json = hide_special_tokens(*model.tokenizer, *json);
  try {
    request.prompts.push_back({.text = chat->render(input).text, .rendered = true});
  } catch (const Error& error) {
    throw ApiError(400, "messages", error.what());
  }
}

}  // namespace

GenerationRequest parse_completion(std::string_view body, const ServedModel& model,
                                   const ServeLimits& limits) {
  const JsonDocument document(body, static_cast<size_t>(limits.max_json_depth));
  JsonObject json = document.root();
  GenerationRequest request;
  read_common_members(json, model, limits, request);
  const auto prompt = json.any("prompt");
  if (!prompt) throw ApiError(400, "prompt", "prompt is missing");
  read_prompts(*prompt, model, limits, request);
  request.max_tokens = json.integer("max_tokens");
  request.echo = json.boolean("echo").value_or(false);
  request.add_special_tokens = json.boolean("add_special_tokens").value_or(true);
  request.logprobs = read_logprobs(json);
  finish_members(json, request);
  return request;
}

namespace {

void read_api_prompts(JsonObject& json, const ServedModel& model, const ServeLimits& limits,
                      GenerationRequest& request) {
  for (const char* const old : {"max_len", "sentences"})
    if (json.has(old))
      throw ApiError(400, old,
                     cat(old, " is not used any more; expected ",
                         std::string_view(old) == "max_len" ? "tokens_to_generate" : "prompts"));
  if (json.has("beam_width"))
    throw ApiError(400, "beam_width", "beam_width is not supported: beam search is not built");
  const auto prompts = json.array("prompts");
  if (!prompts) throw ApiError(400, "prompts", "prompts is missing");
  if (prompts->size() == 0) throw ApiError(400, "prompts", "prompts is empty");
  constexpr int64_t kMostPrompts = 128;
  too_many_prompts("prompts", prompts->size(), std::min(kMostPrompts, limits.max_prompts));
  const bool add_bos = json.boolean("add_BOS").value_or(false);
  const auto start = start_token(*model.tokenizer);
  if (add_bos && !start)
    throw ApiError(400, "add_BOS", "add_BOS: the model has no token that begins a text");
  for (const JsonElement one : *prompts) {
    std::string_view text;
    if (one.get(text) != simdjson::SUCCESS)
      throw ApiError(400, "prompts", cat("prompts has ", kind_of(one), "; expected texts"));
    request.prompts.push_back({.text = std::string(text)});
    if (add_bos) request.prompts.back().ids = {*start};
  }
}

void read_api_sampling(JsonObject& json, SamplingParameters& sampling) {
  sampling.temperature = json.number("temperature").value_or(1.0);
  sampling.top_k = static_cast<int32_t>(json.integer("top_k", 0, 1000).value_or(0));
  const double top_p = json.number("top_p").value_or(0.0);
  if (!(top_p >= 0.0 && top_p <= 1.0))
    throw ApiError(400, "top_p", cat("top_p ", top_p, " is outside [0, 1]"));
  if (top_p > 0.0 && sampling.top_k > 0)
    throw ApiError(400, "top_p", "top_p and top_k are both given; expected one of them");
  sampling.top_p = top_p > 0.0 ? top_p : 1.0;
  const auto seed = json.integer("random_seed", 0, INT64_MAX);
  sampling.seed = seed ? static_cast<uint64_t>(*seed) : draw_seed();
  // What Megatron-LM's server checks and then does not use.
  struct Unused {
    const char* name;
    double neutral;
  };
  for (const Unused& unused :
       {Unused{"top_p_decay", 0.0}, Unused{"top_p_bound", 0.0}, Unused{"length_penalty", 1.0}}) {
    const auto given = json.number(unused.name);
    if (given && *given != unused.neutral)
      throw ApiError(400, unused.name, cat(unused.name, " is not supported: leave it out"));
  }
  if (json.boolean("prevent_newline_after_colon").value_or(false))
    throw ApiError(400, "prevent_newline_after_colon",
                   "prevent_newline_after_colon is not supported: leave it out");
}

void read_api_stops(JsonObject& json, const ServedModel& model, StopConditions& stop) {
  stop.end_tokens = model.end_tokens;
  stop.include_stop_text = true;
  if (const auto id = json.integer("stop_token")) {
    if (*id < 0 || *id >= model.limits.vocab_size)
      throw ApiError(400, "stop_token",
                     cat("stop_token ", *id, " is outside the vocabulary, 0 to ",
                         model.limits.vocab_size - 1));
    stop.stop_tokens.push_back(static_cast<int32_t>(*id));
  }
  if (json.boolean("stop_on_double_eol").value_or(false)) stop.stop_texts.push_back("\n\n");
  if (json.boolean("stop_on_eol").value_or(false)) stop.stop_texts.push_back("\n");
}

}  // namespace

GenerationRequest parse_api(std::string_view body, const ServedModel& model,
                            const ServeLimits& limits) {
  const JsonDocument document(body, static_cast<size_t>(limits.max_json_depth));
  JsonObject json = document.root();
  GenerationRequest request;
  request.endpoint = Endpoint::kApi;
  request.model = model.name;
  request.add_special_tokens = false;
  request.echo = true;
  request.max_tokens_member = "tokens_to_generate";
  read_api_prompts(json, model, limits, request);
  request.max_tokens = json.integer("tokens_to_generate", 0, INT32_MAX).value_or(64);
  request.tokens_and_segments = json.boolean("logprobs").value_or(false);
  if (request.tokens_and_segments) request.logprobs = request.prompt_logprobs = 0;
  read_api_sampling(json, request.spec.sampling);
  read_api_stops(json, model, request.spec.stop);
  finish_members(json, request);
  return request;
}

void prepare(GenerationRequest& request, const ServedModel& model, int64_t default_max_tokens) {
  if (request.media)
    read_media(request, model);
  else if (request.endpoint == Endpoint::kChat)
    render_conversation(request, model);
  if (model.encoder) {
    refuse_echo(request);
    request.decoder_start = model.encoder->decoder_start;
  }
  for (PromptInput& prompt : request.prompts) {
    if (model.encoder)
      encode_input(prompt, request, model);
    else if (!request.media)
      encode_prompt(prompt, request.add_special_tokens, model);
    check_no_media(request, prompt, model);
    const int64_t length = model.encoder ? 1 : static_cast<int64_t>(prompt.ids.size());
    if (!request.max_tokens && request.endpoint == Endpoint::kChat) {
      request.max_tokens = std::max<int64_t>(1, model.limits.max_positions - length);
      if (default_max_tokens > 0)
        request.max_tokens = std::min(*request.max_tokens, default_max_tokens);
    }
  }
  if (!request.max_tokens) request.max_tokens = 16;  // as OpenAI's
  // The prompt alone: the engine is asked for numbers, reported or not.
  LogProbabilityWishes& wishes = request.spec.log_probabilities;
  if (*request.max_tokens == 0 && request.echo) wishes.prompt_top = std::max(0, wishes.prompt_top);
  if (request.media && request.ids_alone) return;
  for (size_t i = 0; i < request.prompts.size(); ++i)
    if (const auto refusal = check_request(spec_of(request, i), model.limits)) {
      ApiError error = api_error(*refusal);
      error.member = request_member(request, error.member);
      throw error;
    }
}

RequestSpec spec_of(const GenerationRequest& request, size_t prompt) {
  RequestSpec spec = request.spec;
  const PromptInput& input = request.prompts[prompt];
  spec.rows = input.rows;
  spec.prompt.assign(input.ids.begin() + (input.rows ? input.rows->count : 0), input.ids.end());
  if (request.decoder_start)
    spec.state_input = std::make_shared<const StateInput>(
        StateInput{std::exchange(spec.prompt, {*request.decoder_start}), {}, {}});
  spec.stop.max_tokens = request.max_tokens.value_or(16);
  return spec;
}

std::string request_member(const GenerationRequest& request, const std::string& member) {
  if (member == "max_tokens") return request.max_tokens_member;
  if (member == "prompt")
    return request.endpoint == Endpoint::kChat  ? "messages"
           : request.endpoint == Endpoint::kApi ? "prompts"
                                                : "prompt";
  if (member == "top_logprobs" && request.endpoint == Endpoint::kCompletions) return "logprobs";
  return member;
}

}  // namespace megatron
