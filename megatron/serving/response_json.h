// Responses to requests for text: whole ones, and the pieces of streams.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "megatron/serving/generation_request.h"
#include "megatron/serving/tool_calls.h"

namespace megatron {

struct ToolCall {
  std::string name, arguments;
};

// What one event adds to a choice.
struct ChoiceDelta {
  std::string content;
  std::vector<ToolCallDelta> calls;
  std::vector<GeneratedToken> tokens;
  bool empty() const { return content.empty() && calls.empty() && tokens.empty(); }
};

// One text of a response, as it grows.
class Choice {
 public:
  // `index`: among the choices of the response; `prompt`: of the request.
  Choice(const GenerationRequest& request, const ServedModel& model, int32_t index, size_t prompt);

  // Takes an event of this choice. `keep`: text and tokens are kept for a whole response.
  ChoiceDelta take(Event event, bool keep);

  int32_t index = 0;
  size_t prompt = 0;
  std::string content;
  std::vector<ToolCall> calls;
  std::vector<GeneratedToken> tokens;
  std::optional<Finish> finish;
  int64_t output_tokens = 0;
  size_t next_offset = 0;  // of the next token's text, in characters
  bool begun = false;      // its first chunk was written

  // OpenAI's word for the finish.
  std::string_view finish_reason() const;

 private:
  std::unique_ptr<ToolCallParser> parser_;
  bool parallel_calls_;
  size_t num_calls_ = 0;
};

// Sums over prompts and choices.
struct UsageSums {
  int64_t prompt_tokens = 0, cached_tokens = 0, output_tokens = 0;
  int64_t drafts = 0, accepted_drafts = 0;
};

class ResponseJson {
 public:
  // The request and the model must outlive it. `id`: "cmpl-..." or "chatcmpl-...".
  ResponseJson(const GenerationRequest& request, const ServedModel& model, std::string id,
               int64_t created);

  // Server-sent events of a stream: the piece of a choice, with its end if it has ended; the sums,
  // where they are asked for; the end.
  std::string chunk(Choice& choice, const ChoiceDelta& delta, const UsageSums& usage) const;
  std::string usage_chunk(const UsageSums& usage) const;
  static std::string error_event(const std::string& error_json);
  static std::string done_event() { return "data: [DONE]\n\n"; }

  // The text of the prompt and its log-probabilities, with which a stream of completions begins if
  // `echo` asks for it.
  std::string echo_chunk(Choice& choice,
                         const std::vector<PositionLogProbabilities>& prompt_numbers) const;

  // All of it; `prompt_numbers`: by prompt.
  std::string whole(const std::vector<Choice>& choices, const UsageSums& usage,
                    const std::vector<std::vector<PositionLogProbabilities>>& prompt_numbers) const;

  const std::string& id() const { return id_; }

 private:
  std::string api_response(
      const std::vector<Choice>& choices,
      const std::vector<std::vector<PositionLogProbabilities>>& prompt_numbers) const;
  void write_choice(const Choice& choice, const std::vector<PositionLogProbabilities>& numbers,
                    class JsonWriter& json) const;
  std::string call_id(const Choice& choice, size_t call) const;

  const GenerationRequest& request_;
  const ServedModel& model_;
  std::string id_;
  int64_t created_;
  std::string chunk_head_;  // what every chunk begins with
};

}  // namespace megatron
