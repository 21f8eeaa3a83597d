// A request for text, read from JSON of the OpenAI API or of Megatron-LM's, and checked as far as
// that is possible without its tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "megatron/chat/chat_template.h"
#include "megatron/datasets/multimodal/multimodal_row.h"
#include "megatron/scheduling/request.h"
#include "megatron/serving/serve_config.h"
#include "megatron/serving/served_model.h"
#include "megatron/serving/tool_calls.h"

namespace megatron {

enum class Endpoint {
  kCompletions,  // /v1/completions
  kChat,         // /v1/chat/completions
  kApi,          // PUT /api
};

// What a model may answer where tools are given.
enum class ToolChoice { kNone, kAuto, kRequired, kNamed };

struct PromptInput {
  std::string text;
  std::vector<int32_t> ids;
  bool is_text = true;                              // `ids` are of `text` once it has been encoded
  std::shared_ptr<const GivenRows> rows = nullptr;  // in the place of the first ids; null: none
  bool rendered = false;                            // `text` is a chat template's
};

struct GenerationRequest {
  Endpoint endpoint = Endpoint::kCompletions;
  std::string model;  // as responses name it
  RequestSpec spec;   // for each prompt; its prompt and max_tokens are set by prepare()
  std::vector<PromptInput> prompts;
  std::optional<int32_t> decoder_start;  // the prompts are an encoder's; set by prepare()
  std::optional<int64_t> max_tokens;
  std::string max_tokens_member = "max_tokens";  // how the request spells it

  bool stream = false, include_usage = false, continuous_usage = false;
  bool echo = false, add_special_tokens = true;
  bool return_token_ids = false, tokens_as_ids = false;
  int32_t logprobs = -1;         // top log-probabilities to report; -1: none
  int32_t prompt_logprobs = -1;  // the same of the prompt, under its own member

  // Conversations.
  ChatInput chat;
  std::optional<MultimodalRow> media;  // the same with images and sounds, of models that read some
  bool ids_alone = false;              // prepare() gives ids, and encodes no media
  bool has_tools = false, parallel_tool_calls = true;
  ToolChoice tool_choice = ToolChoice::kNone;
  ToolParameters tool_parameters;

  bool megatron_extras = false;      // ids and numbers in choices, as Megatron-LM's server has them
  bool tokens_and_segments = false;  // /api: "tokens" and "logprobs"
  std::vector<std::string> ignored;  // members that nobody knows
};

// Read a body; `now_s`: seconds since 1970 for templates. Throw ApiError that names the member.
GenerationRequest parse_completion(std::string_view body, const ServedModel& model,
                                   const ServeLimits& limits);
GenerationRequest parse_chat(std::string_view body, const ServedModel& model,
                             const ServeLimits& limits);
GenerationRequest parse_api(std::string_view body, const ServedModel& model,
                            const ServeLimits& limits);

// Renders the conversation, encodes texts, and sets what depends on their lengths; afterwards
// spec_of() gives what the engine is asked for. Takes time. Throws ApiError.
void prepare(GenerationRequest& request, const ServedModel& model, int64_t default_max_tokens);
RequestSpec spec_of(const GenerationRequest& request, size_t prompt);

// The member of the request that RequestSpec's `member` came from ("prompt" of a conversation is
// "messages").
std::string request_member(const GenerationRequest& request, const std::string& member);

}  // namespace megatron
