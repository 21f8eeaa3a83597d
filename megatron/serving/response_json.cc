#include "megatron/serving/response_json.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/serving/detail/log_probability_json.h"

namespace megatron {
namespace {

void write_ids(const std::vector<GeneratedToken>& tokens, JsonWriter& json) {
  json.begin_array();
  for (const GeneratedToken& token : tokens) json.value(token.id);
  json.end_array();
}

void write_usage(const UsageSums& usage, JsonWriter& json) {
  json.begin_object()
      .member("prompt_tokens", usage.prompt_tokens)
      .member("completion_tokens", usage.output_tokens)
      .member("total_tokens", usage.prompt_tokens + usage.output_tokens);
  json.key("prompt_tokens_details").begin_object().member("cached_tokens", usage.cached_tokens);
  json.end_object();
  if (usage.drafts > 0)
    json.key("completion_tokens_details")
        .begin_object()
        .member("accepted_prediction_tokens", usage.accepted_drafts)
        .member("rejected_prediction_tokens", usage.drafts - usage.accepted_drafts)
        .end_object();
  json.end_object();
}

// What matched, where it was a stop that the request asked for.
void write_stop_reason(const std::optional<Finish>& finish, JsonWriter& json) {
  json.key("stop_reason");
  if (finish && finish->reason == FinishReason::kStopText)
    json.value(finish->stop_text);
  else if (finish && finish->reason == FinishReason::kStopToken)
    json.value(finish->stop_token);
  else
    json.null();
}

// The prompt as text, for `echo`.
std::string prompt_text(const PromptInput& prompt, const Tokenizer& tokenizer) {
  return prompt.is_text ? prompt.text : text_of(tokenizer, prompt.ids);
}

}  // namespace

Choice::Choice(const GenerationRequest& request, const ServedModel& model, int32_t index,
               size_t prompt)
    : index(index), prompt(prompt), parallel_calls_(request.parallel_tool_calls) {
  if (request.has_tools)
    parser_ = make_tool_call_parser(model.tool_format, request.tool_parameters);
}

ChoiceDelta Choice::take(Event event, bool keep) {
  ChoiceDelta delta;
  output_tokens += static_cast<int64_t>(event.tokens.size());
  if (parser_) {
    ToolCallText parsed = parser_->push(event.text);
    if (event.finish) {
      ToolCallText rest = parser_->finish();
      parsed.content += rest.content;
      std::move(rest.calls.begin(), rest.calls.end(), std::back_inserter(parsed.calls));
    }
    delta.content = std::move(parsed.content);
    for (ToolCallDelta& call : parsed.calls) {
      if (call.index > 0 && !parallel_calls_) continue;
      if (!call.name.empty()) ++num_calls_;
      delta.calls.push_back(std::move(call));
    }
  } else {
    delta.content = std::move(event.text);
  }
  delta.tokens = std::move(event.tokens);
  if (event.finish) finish = std::move(event.finish);
  if (!keep) return delta;
  content += delta.content;
  for (ToolCallDelta& call : delta.calls) {
    if (!call.name.empty()) calls.push_back({call.name, {}});
    calls[static_cast<size_t>(call.index)].arguments += call.arguments;
  }
  std::move(delta.tokens.begin(), delta.tokens.end(), std::back_inserter(tokens));
  return {};
}

std::string_view Choice::finish_reason() const {
  if (finish->reason == FinishReason::kLength) return "length";
  return num_calls_ > 0 ? "tool_calls" : "stop";
}

ResponseJson::ResponseJson(const GenerationRequest& request, const ServedModel& model,
                           std::string id, int64_t created)
    : request_(request), model_(model), id_(std::move(id)), created_(created) {
  const bool chat = request.endpoint == Endpoint::kChat;
  JsonWriter json;
  json.begin_object()
      .member("id", id_)
      .member("object", chat ? "chat.completion.chunk" : "text_completion")
      .member("created", created_)
      .member("model", request_.model);
  json.end_object();
  chunk_head_ = "data: " + json.text();
  chunk_head_.pop_back();
}

std::string ResponseJson::call_id(const Choice& choice, size_t call) const {
  return cat("call_", id_.substr(id_.find('-') + 1), "_", choice.index, "_", call);
}

std::string ResponseJson::chunk(Choice& choice, const ChoiceDelta& delta,
                                const UsageSums& usage) const {
  const bool chat = request_.endpoint == Endpoint::kChat;
  JsonWriter json;
  json.begin_object().member("index", choice.index);
  if (chat) {
    json.key("delta").begin_object();
    if (!choice.begun) json.member("role", "assistant");
    if (!delta.content.empty() || (!choice.begun && delta.calls.empty()))
      json.member("content", delta.content);
    if (!delta.calls.empty()) {
      json.key("tool_calls").begin_array();
      for (const ToolCallDelta& call : delta.calls) {
        json.begin_object().member("index", call.index);
        if (!call.name.empty())
          json.member("id", call_id(choice, static_cast<size_t>(call.index)))
              .member("type", "function");
        json.key("function").begin_object();
        if (!call.name.empty()) json.member("name", call.name);
        json.member("arguments", call.arguments).end_object().end_object();
      }
      json.end_array();
    }
    json.end_object();
  } else {
    json.member("text", delta.content);
  }
  choice.begun = true;
  json.key("logprobs");
  if (request_.logprobs < 0) {
    json.null();
  } else if (chat) {
    write_chat_logprobs(delta.tokens, *model_.tokenizer, request_.tokens_as_ids, json);
  } else {
    ScoredTokens scored;
    scored.add(delta.tokens);
    write_completion_logprobs(scored, *model_.tokenizer, request_.tokens_as_ids,
                              request_.logprobs > 0, choice.next_offset, json);
  }
  json.key("finish_reason");
  choice.finish ? json.value(choice.finish_reason()) : json.null();
  write_stop_reason(choice.finish, json);
  if (request_.return_token_ids) {
    json.key("token_ids");
    write_ids(delta.tokens, json);
  }
  json.end_object();
  std::string out = cat(chunk_head_, ",\"choices\":[", json.text(), "]");
  if (request_.continuous_usage) {
    JsonWriter sums;
    write_usage(usage, sums);
    out += cat(",\"usage\":", sums.text());
  } else if (request_.include_usage) {
    out += ",\"usage\":null";
  }
  return out + "}\n\n";
}

std::string ResponseJson::echo_chunk(
    Choice& choice, const std::vector<PositionLogProbabilities>& prompt_numbers) const {
  const PromptInput& prompt = request_.prompts[choice.prompt];
  JsonWriter json;
  json.begin_object()
      .member("index", choice.index)
      .member("text", prompt_text(prompt, *model_.tokenizer))
      .key("logprobs");
  if (request_.logprobs < 0) {
    json.null();
  } else {
    ScoredTokens scored;
    scored.add(prompt.ids, prompt_numbers);
    write_completion_logprobs(scored, *model_.tokenizer, request_.tokens_as_ids,
                              request_.logprobs > 0, choice.next_offset, json);
  }
  json.key("finish_reason").null().end_object();
  choice.begun = true;
  return cat(chunk_head_, ",\"choices\":[", json.text(), "]}\n\n");
}

std::string ResponseJson::usage_chunk(const UsageSums& usage) const {
  JsonWriter sums;
  write_usage(usage, sums);
  return cat(chunk_head_, ",\"choices\":[],\"usage\":", sums.text(), "}\n\n");
}

std::string ResponseJson::error_event(const std::string& error_json) {
  return cat("event: error\ndata: ", error_json, "\n\n");
}

void ResponseJson::write_choice(const Choice& choice,
                                const std::vector<PositionLogProbabilities>& numbers,
                                JsonWriter& json) const {
  const PromptInput& prompt = request_.prompts[choice.prompt];
  const Tokenizer& tokenizer = *model_.tokenizer;
  json.begin_object().member("index", choice.index);
  if (request_.endpoint == Endpoint::kChat) {
    json.key("message").begin_object().member("role", "assistant").key("content");
    choice.content.empty() && !choice.calls.empty() ? json.null() : json.value(choice.content);
    json.key("refusal").null();
    if (!choice.calls.empty()) {
      json.key("tool_calls").begin_array();
      for (size_t i = 0; i < choice.calls.size(); ++i) {
        json.begin_object().member("id", call_id(choice, i)).member("type", "function");
        json.key("function").begin_object().member("name", choice.calls[i].name);
        json.member("arguments", choice.calls[i].arguments).end_object().end_object();
      }
      json.end_array();
    }
    json.end_object().key("logprobs");
    if (request_.logprobs < 0)
      json.null();
    else
      write_chat_logprobs(choice.tokens, tokenizer, request_.tokens_as_ids, json);
  } else {
    json.member("text", (request_.echo ? prompt_text(prompt, tokenizer) : "") + choice.content);
    json.key("logprobs");
    if (request_.logprobs < 0) {
      json.null();
    } else {
      ScoredTokens scored;
      if (request_.echo) scored.add(prompt.ids, numbers);
      scored.add(choice.tokens);
      size_t offset = 0;
      write_completion_logprobs(scored, tokenizer, request_.tokens_as_ids, request_.logprobs > 0,
                                offset, json);
    }
  }
  json.member("finish_reason", choice.finish_reason());
  write_stop_reason(choice.finish, json);
  if (request_.return_token_ids) {
    json.member("prompt_token_ids", prompt.ids).key("token_ids");
    write_ids(choice.tokens, json);
    json.key("weights_versions").begin_array();
    for (const GeneratedToken& token : choice.tokens) json.value(token.weights_version);
    json.end_array();
  }
  if (request_.prompt_logprobs >= 0) {
    json.key("prompt_logprobs");
    write_prompt_logprobs(prompt.ids, numbers, tokenizer, json);
  }
  if (request_.megatron_extras) {
    if (!request_.return_token_ids) json.member("prompt_token_ids", prompt.ids);
    json.key("generation_token_ids");
    write_ids(choice.tokens, json);
    if (request_.logprobs >= 0) {
      json.key("generation_log_probs").begin_array();
      for (const GeneratedToken& token : choice.tokens)
        json.value(json_log_probability(
            token.log_probabilities ? token.log_probabilities->chosen.log_probability : 0.0f));
      json.end_array();
    }
  }
  json.end_object();
}

std::string ResponseJson::whole(
    const std::vector<Choice>& choices, const UsageSums& usage,
    const std::vector<std::vector<PositionLogProbabilities>>& prompt_numbers) const {
  if (request_.endpoint == Endpoint::kApi) return api_response(choices, prompt_numbers);
  JsonWriter json;
  json.begin_object()
      .member("id", id_)
      .member("object",
              request_.endpoint == Endpoint::kChat ? "chat.completion" : "text_completion")
      .member("created", created_)
      .member("model", request_.model);
  json.key("choices").begin_array();
  for (const Choice& choice : choices) write_choice(choice, prompt_numbers[choice.prompt], json);
  json.end_array().key("usage");
  write_usage(usage, json);
  json.member("seed", request_.spec.sampling.seed);
  return json.end_object().text();
}

std::string ResponseJson::api_response(
    const std::vector<Choice>& choices,
    const std::vector<std::vector<PositionLogProbabilities>>& prompt_numbers) const {
  const Tokenizer& tokenizer = *model_.tokenizer;
  JsonWriter json;
  json.begin_object().key("text").begin_array();
  for (const Choice& choice : choices)
    json.value(prompt_text(request_.prompts[choice.prompt], tokenizer) + choice.content);
  json.end_array().key("segments").begin_array();
  for (const Choice& choice : choices) {
    json.begin_array();
    for (const int32_t id : request_.prompts[choice.prompt].ids)
      json.value(token_text(tokenizer, id, false));
    for (const GeneratedToken& token : choice.tokens)
      json.value(token_text(tokenizer, token.id, false));
    json.end_array();
  }
  json.end_array();
  if (request_.tokens_and_segments) {
    json.key("tokens").begin_array();
    for (const Choice& choice : choices) {
      json.begin_array();
      for (const int32_t id : request_.prompts[choice.prompt].ids) json.value(id);
      for (const GeneratedToken& token : choice.tokens) json.value(token.id);
      json.end_array();
    }
    json.end_array().key("logprobs").begin_array();
    for (const Choice& choice : choices) {
      ScoredTokens scored;
      scored.add(request_.prompts[choice.prompt].ids, prompt_numbers[choice.prompt]);
      scored.add(choice.tokens);
      json.begin_array();
      // One number for each token but the first, which nothing predicts.
      for (size_t i = 1; i < scored.tokens.size(); ++i)
        json.value(scored.tokens[i].numbers != nullptr
                       ? json_log_probability(scored.tokens[i].numbers->chosen.log_probability)
                       : 0.0);
      json.end_array();
    }
    json.end_array();
  }
  return json.end_object().text();
}

}  // namespace megatron
