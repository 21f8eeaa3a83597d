#include "megatron/serving/detail/engine_commands.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "megatron/base/json_writer.h"
#include "megatron/serving/detail/json_input.h"

namespace megatron {
namespace {

constexpr size_t kMaxDepth = 8;

template <class E, size_t kSize>
E read_choice(JsonObject& json, std::string_view member, const std::string_view (&words)[kSize],
              E by_default) {
  const auto given = json.text(member);
  if (!given) return by_default;
  const auto* const found = std::find(std::begin(words), std::end(words), *given);
  if (found != std::end(words)) return static_cast<E>(found - std::begin(words));
  std::string list;
  for (const std::string_view word : words) list += cat(list.empty() ? "" : ", ", word);
  throw ApiError(400, std::string(member),
                 cat(member, " is \"", given->substr(0, 40), "\"; expected one of ", list));
}

constexpr std::string_view kModes[] = {"finish", "keep", "abort"};
constexpr std::string_view kLevels[] = {"keep", "offload", "drop"};

EngineCommand read_command(std::string_view name, JsonObject& json) {
  if (name == "pause") return PauseCommand{read_choice(json, "mode", kModes, PauseMode::kKeep)};
  if (name == "resume") return ResumeCommand{};
  if (name == "suspend")
    return SuspendCommand{read_choice(json, "cache", kLevels, MemoryLevel::kOffload),
                          read_choice(json, "weights", kLevels, MemoryLevel::kOffload)};
  if (name == "drain") return DrainCommand{json.boolean("abort_queued").value_or(false)};
  UpdateWeightsCommand update;
  const auto source = json.text("source");
  if (!source || source->empty()) throw ApiError(400, "source", "source is missing");
  const auto version = json.integer("version", 0, INT64_MAX);
  if (!version) throw ApiError(400, "version", "version is missing");
  update.source = *source;
  update.version = *version;
  update.recompute = json.boolean("recompute").value_or(false);
  return update;
}

std::string_view word_of(CommandOutcome::Kind kind) {
  constexpr std::string_view kWords[] = {"done", "refused", "timed_out", "failed"};
  return kWords[static_cast<size_t>(kind)];
}

}  // namespace

EngineCommandRequest parse_engine_command(std::string_view name, std::string_view body) {
  const JsonDocument document(body.empty() ? "{}" : body, kMaxDepth);
  JsonObject json = document.root();
  EngineCommandRequest request;
  request.command = read_command(name, json);
  const double seconds = json.number("timeout_seconds").value_or(60.0);
  if (!(seconds > 0.0 && seconds <= 1e6))
    throw ApiError(400, "timeout_seconds",
                   cat("timeout_seconds ", seconds, " is outside (0, 1000000]"));
  request.timeout_ns = std::llround(seconds * 1e9);
  // A command that was misspelled in part should not be carried out in part.
  if (const auto unknown = json.unknown(); !unknown.empty())
    throw ApiError(400, unknown.front().substr(0, 64),
                   cat("there is no member ", unknown.front().substr(0, 64)));
  return request;
}

HttpResponse command_response(const CommandOutcome& outcome) {
  if (outcome.kind != CommandOutcome::Kind::kDone) {
    const int status = outcome.kind == CommandOutcome::Kind::kRefused    ? 409
                       : outcome.kind == CommandOutcome::Kind::kTimedOut ? 504
                                                                         : 500;
    JsonWriter json;
    json.begin_object().key("error").begin_object();
    json.member("message", outcome.message)
        .member("type", "engine_error")
        .key("param")
        .null()
        .member("code", word_of(outcome.kind));
    json.end_object().member("state", name(outcome.state)).key("rank");
    outcome.rank < 0 ? json.null() : json.value(outcome.rank);
    json.key("unfinished").begin_array();
    for (const RequestId id : outcome.unfinished) json.value(static_cast<uint64_t>(id));
    return {.status = status, .body = json.end_array().end_object().text()};
  }
  JsonWriter json;
  json.begin_object().member("state", name(outcome.state)).key("unfinished").begin_array();
  for (const RequestId id : outcome.unfinished) json.value(static_cast<uint64_t>(id));
  return {.body = json.end_array().end_object().text()};
}

std::string status_json(const EngineStats& stats, size_t open_requests, const HttpCounts& http) {
  JsonWriter json;
  json.begin_object()
      .member("state", name(stats.state))
      .member("failure", stats.failure)
      .member("weights_version", stats.weights_version)
      .member("queued", stats.queued)
      .member("running", stats.running)
      .member("preempted", stats.preempted)
      .member("max_running", stats.max_running)
      .member("blocks_free", stats.blocks_free)
      .member("blocks_held", stats.blocks_held)
      .member("blocks_cached", stats.blocks_cached)
      .member("block_tokens", stats.block_size)
      .member("steps", stats.steps)
      .member("prompt_tokens", stats.prompt_tokens)
      .member("cached_tokens", stats.cached_tokens)
      .member("output_tokens", stats.output_tokens)
      .member("preemptions", stats.preemptions)
      .member("open_requests", open_requests)
      .member("connections", http.open);
  json.key("finished").begin_object();
  for (size_t i = 0; i < stats.finished.size(); ++i)
    json.member(name(static_cast<FinishReason>(i)), stats.finished[i]);
  return json.end_object().end_object().text();
}

}  // namespace megatron
