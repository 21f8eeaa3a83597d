#include "megatron/serving/detail/request_members.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <random>

#include "megatron/serving/detail/response_grammar.h"

namespace megatron {
namespace {

// A member that exists elsewhere and would change the answer, and why it is not supported.
struct Unsupported {
  std::string_view name;
  std::string_view reason;
  std::string_view neutral = {};  // JSON text that asks for nothing, besides null, false and []
};
constexpr Unsupported kUnsupported[] = {
    {"suffix", "models here continue a text and do not fill gaps", "\"\""},
    {"functions", "give tools"},
    {"function_call", "give tool_choice", "\"none\""},
    {"modalities", "models here write text alone", "[\"text\"]"},
    {"audio", "models here write text alone"},
    {"prediction", "predicted outputs are not built"},
    {"web_search_options", "the server fetches nothing"},
    {"reasoning_effort", "chat_template_kwargs reach the template"},
    {"verbosity", "chat_template_kwargs reach the template"},
    {"use_beam_search", "beam search is not built"},
    {"length_penalty", "beam search, which it belongs to, is not built", "1"},
    {"early_stopping", "beam search, which it belongs to, is not built"},
    {"truncate_prompt_tokens", "prompts are taken whole or refused"},
    {"logits_processors", "a request carries no code"},
    {"chat_template", "a request carries no template"},
    {"documents", "chat_template_kwargs reach the template"},
    {"continue_final_message", "a reply begins with a new message"},
    {"prompt_embeds", "prompts are texts or token ids"},
    {"neighbors", "models that read neighbours are not served; give them to megatron generate"},
    {"multi_modal_data", "models here read text alone"},
    {"mm_processor_kwargs", "models here read text alone"},
    {"kv_transfer_params", "keys and values stay within a server"},
    {"bad_words", "give logit_bias"},
    {"allowed_token_ids", "give logit_bias"},
    {"guided_json", "give structured_outputs"},
    {"guided_regex", "give structured_outputs"},
    {"guided_choice", "give structured_outputs"},
    {"guided_grammar", "give structured_outputs"},
    {"streaming_interval", "each step's tokens are sent at once", "1"},
    {"skip_prompt_log_probs", "prompt_logprobs says whether they are reported", "true"},
    {"prevent_retokenization", "a conversation is rendered as a whole"},
    {"return_tokenized_data", "give return_token_ids"},
    {"return_raw_text", "tool calls are read out of the text"},
    {"detokenize", "text is always made", "true"},
};

// Members that say something about a request and nothing about its answer.
constexpr std::string_view kRemarks[] = {"user",
                                         "metadata",
                                         "store",
                                         "service_tier",
                                         "safety_identifier",
                                         "prompt_cache_key",
                                         "request_id",
                                         "prompt_cache_retention"};

bool asks_for_nothing(JsonElement element, std::string_view neutral) {
  const std::string text = json_text(element);
  return text == "false" || text == "[]" || text == "{}" || (!neutral.empty() && text == neutral);
}

void read_model(JsonObject& json, const ServedModel& model, GenerationRequest& request) {
  const std::string name = json.text("model").value_or("");
  request.model = model.name;
  // Megatron-LM's clients name none.
  if (name.empty() || name == model.name || name == "EMPTY") return;
  const auto found = std::find(model.adapters.begin(), model.adapters.end(), name);
  if (found == model.adapters.end())
    throw ApiError(
        404, "model",
        cat("there is no model \"", name.substr(0, 200), "\" here; GET /v1/models lists them"),
        "model_not_found");
  request.model = name;
  request.spec.adapter = static_cast<int32_t>(found - model.adapters.begin());
}

void read_logit_bias(JsonObject& json, const ServeLimits& limits, SamplingParameters& sampling) {
  const auto found = json.any("logit_bias");
  if (!found) return;
  simdjson::dom::object entries;
  if (found->get(entries) != simdjson::SUCCESS)
    throw ApiError(400, "logit_bias", "logit_bias is no object of token ids and numbers");
  if (static_cast<int64_t>(entries.size()) > limits.max_logit_bias)
    throw ApiError(400, "logit_bias",
                   cat("logit_bias has ", entries.size(), " entries, at most ",
                       limits.max_logit_bias, " are taken"));
  for (const auto [key, value] : entries) {
    int32_t id = 0;
    double bias = 0.0;
    const auto read = std::from_chars(key.data(), key.data() + key.size(), id);
    if (read.ec != std::errc() || read.ptr != key.data() + key.size())
      throw ApiError(400, "logit_bias",
                     cat("logit_bias: \"", key.substr(0, 40), "\" is no token id"));
    if (!value.is_number() || value.get(bias) != simdjson::SUCCESS)
      throw ApiError(400, "logit_bias", cat("logit_bias: the value of ", id, " is no number"));
    sampling.logit_bias.emplace_back(id, static_cast<float>(bias));
  }
  std::sort(sampling.logit_bias.begin(), sampling.logit_bias.end());
}

void read_sampling(JsonObject& json, const ServeLimits& limits, SamplingParameters& sampling) {
  sampling.temperature = json.number("temperature").value_or(1.0);
  const int64_t top_k = json.integer("top_k").value_or(0);
  if (top_k < -1 || top_k > INT32_MAX)
    throw ApiError(400, "top_k", cat("top_k ", top_k, " is outside [0, ", INT32_MAX, "]"));
  sampling.top_k = static_cast<int32_t>(std::max<int64_t>(0, top_k));
  sampling.top_p = json.number("top_p").value_or(1.0);
  sampling.min_p = json.number("min_p").value_or(0.0);
  sampling.repetition_penalty = json.number("repetition_penalty").value_or(1.0);
  sampling.presence_penalty = json.number("presence_penalty").value_or(0.0);
  sampling.frequency_penalty = json.number("frequency_penalty").value_or(0.0);
  read_logit_bias(json, limits, sampling);
  const auto seed = json.integer("seed");
  sampling.seed = seed ? static_cast<uint64_t>(*seed) : draw_seed();
}

void read_stops(JsonObject& json, const ServedModel& model, const ServeLimits& limits,
                GenerationRequest& request) {
  StopConditions& stop = request.spec.stop;
  stop.stop_texts = read_stop(json, limits);
  if (const auto ids = json.any("stop_token_ids"))
    stop.stop_tokens = read_ids(*ids, "stop_token_ids", model);
  stop.min_tokens = json.integer("min_tokens").value_or(0);
  stop.include_stop_text = json.boolean("include_stop_str_in_output").value_or(false);
  stop.skip_special_tokens = json.boolean("skip_special_tokens").value_or(true);
  if (!json.boolean("ignore_eos").value_or(false))
    stop.end_tokens =
        request.endpoint == Endpoint::kChat ? model.chat_end_tokens : model.end_tokens;
}

void read_streaming(JsonObject& json, GenerationRequest& request) {
  request.stream = json.boolean("stream").value_or(false);
  if (auto options = json.object("stream_options")) {
    if (!request.stream)
      throw ApiError(400, "stream_options", "stream_options has no effect without stream");
    request.include_usage = options->boolean("include_usage").value_or(false);
    request.continuous_usage = options->boolean("continuous_usage_stats").value_or(false);
    options->any("include_obfuscation");
    for (std::string& name : options->unknown()) request.ignored.push_back(std::move(name));
  }
}

}  // namespace

uint64_t draw_seed() {
  thread_local std::random_device device;
  return (static_cast<uint64_t>(device()) << 32 | device()) & ((uint64_t{1} << 48) - 1);
}

std::vector<std::string> read_stop(JsonObject& json, const ServeLimits& limits) {
  std::vector<std::string> texts;
  const auto found = json.any("stop");
  if (!found) return texts;
  simdjson::dom::array list;
  if (found->get(list) != simdjson::SUCCESS) {
    texts.push_back(*json.text("stop"));
  } else {
    if (static_cast<int64_t>(list.size()) > limits.max_stop_texts)
      throw ApiError(
          400, "stop",
          cat("stop has ", list.size(), " texts, at most ", limits.max_stop_texts, " are taken"));
    for (const JsonElement one : list) {
      std::string_view text;
      if (one.get(text) != simdjson::SUCCESS)
        throw ApiError(400, "stop", cat("stop has ", kind_of(one), "; expected texts"));
      texts.emplace_back(text);
    }
  }
  for (const std::string& text : texts) {
    if (text.empty()) throw ApiError(400, "stop", "a text of stop is empty");
    if (static_cast<int64_t>(text.size()) > limits.max_stop_text_bytes)
      throw ApiError(400, "stop",
                     cat("a text of stop has ", text.size(), " bytes, at most ",
                         limits.max_stop_text_bytes, " are taken"));
  }
  return texts;
}

std::vector<int32_t> read_ids(JsonElement element, const std::string& member,
                              const ServedModel& model) {
  simdjson::dom::array list;
  if (element.get(list) != simdjson::SUCCESS)
    throw ApiError(400, member, cat(member, " is ", kind_of(element), "; expected token ids"));
  std::vector<int32_t> ids;
  ids.reserve(list.size());
  for (const JsonElement one : list) {
    const auto id = as_integer(one);
    if (!id)
      throw ApiError(400, member, cat(member, " has ", kind_of(one), "; expected token ids"));
    if (*id < 0 || *id >= model.limits.vocab_size)
      throw ApiError(400, member,
                     cat(member, ": token id ", *id, " is outside the vocabulary, 0 to ",
                         model.limits.vocab_size - 1));
    ids.push_back(static_cast<int32_t>(*id));
  }
  return ids;
}

std::optional<int64_t> read_either(JsonObject& json, std::string_view first,
                                   std::string_view second, std::string& found) {
  const auto one = json.integer(first), other = json.integer(second);
  if (one && other && *one != *other)
    throw ApiError(400, std::string(second),
                   cat(first, " and ", second, " are both given and differ"));
  if (one)
    found = first;
  else if (other)
    found = second;
  return one ? one : other;
}

void read_common_members(JsonObject& json, const ServedModel& model, const ServeLimits& limits,
                         GenerationRequest& request) {
  read_model(json, model, request);
  read_sampling(json, limits, request.spec.sampling);
  read_stops(json, model, limits, request);
  read_streaming(json, request);
  request.spec.choices = static_cast<int32_t>(json.integer("n", 1, limits.max_choices).value_or(1));
  const auto best_of = json.integer("best_of");
  if (best_of && *best_of != request.spec.choices)
    throw ApiError(
        400, "best_of",
        "best_of differs from n: choosing among more texts than are returned is not built");
  request.spec.priority =
      static_cast<int32_t>(json.integer("priority", INT32_MIN, INT32_MAX).value_or(0));
  request.spec.cache_salt = json.text("cache_salt").value_or("");
  if (request.spec.cache_salt.size() > 256)
    throw ApiError(400, "cache_salt", "cache_salt is longer than 256 bytes");
  request.return_token_ids = json.boolean("return_token_ids").value_or(false);
  request.tokens_as_ids = json.boolean("return_tokens_as_token_ids").value_or(false);
  if (const auto prompt = json.integer("prompt_logprobs", 0, kMaxTopLogProbabilities)) {
    if (request.stream)
      throw ApiError(400, "prompt_logprobs", "prompt_logprobs and stream do not go together");
    request.prompt_logprobs = static_cast<int32_t>(*prompt);
  }
  read_response_grammar(json, model, request);
}

void finish_members(JsonObject& json, GenerationRequest& request) {
  for (const std::string_view name : kRemarks) json.any(name);
  for (const Unsupported& member : kUnsupported) {
    const auto found = json.any(member.name);
    if (found && !asks_for_nothing(*found, member.neutral))
      throw ApiError(400, json.path(member.name),
                     cat(member.name, " is not supported: ", member.reason), "unsupported");
  }
  for (std::string& name : json.unknown()) request.ignored.push_back(std::move(name));
  LogProbabilityWishes& wishes = request.spec.log_probabilities;
  wishes.output_top = request.logprobs;
  wishes.prompt_top =
      std::max(request.prompt_logprobs, request.echo ? request.logprobs : int32_t{-1});
  wishes.prompt_from = 1;
}

}  // namespace megatron
