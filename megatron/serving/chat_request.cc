// Conversations of the OpenAI API: messages, tools, formats of replies.
#include <algorithm>
#include <ctime>
#include <iterator>

#include "megatron/base/json_writer.h"
#include "megatron/serving/detail/message_contents.h"
#include "megatron/serving/detail/request_members.h"
#include "megatron/serving/detail/response_grammar.h"

namespace megatron {
namespace {

constexpr size_t kMaxTools = 128;

// Arguments are JSON in a text for clients, and an object for templates.
void write_arguments(JsonElement arguments, const std::string& where, size_t max_depth,
                     JsonWriter& out) {
  std::string_view text;
  if (arguments.get(text) != simdjson::SUCCESS) {
    if (!arguments.is_object())
      throw ApiError(400, where,
                     cat(where, " is ", kind_of(arguments), "; expected JSON in a text"));
    out.raw(json_text(arguments));
    return;
  }
  if (text.empty()) {
    out.raw("{}");
    return;
  }
  simdjson::dom::parser parser;
  JsonElement parsed;
  if (parser.allocate(text.size(), max_depth) != simdjson::SUCCESS ||
      parser.parse(text.data(), text.size(), true).get(parsed) != simdjson::SUCCESS ||
      !parsed.is_object())
    throw ApiError(400, where, cat(where, " holds no JSON object"));
  out.raw(json_text(parsed));
}

void write_tool_calls(simdjson::dom::array calls, const std::string& where, size_t max_depth,
                      JsonWriter& out) {
  out.key("tool_calls").begin_array();
  size_t index = 0;
  for (const JsonElement one : calls) {
    const std::string place = cat(where, "[", index++, "]");
    simdjson::dom::object object;
    if (one.get(object) != simdjson::SUCCESS)
      throw ApiError(400, place, cat(place, " is ", kind_of(one), "; expected an object"));
    JsonObject call(object, place + ".");
    auto function = call.object("function");
    const auto name = function ? function->text("name") : std::nullopt;
    if (!name) throw ApiError(400, place, cat(place, " has no function with a name"));
    out.begin_object();
    if (const auto id = call.text("id")) out.member("id", *id);
    out.member("type", "function").key("function").begin_object().member("name", *name);
    out.key("arguments");
    const auto arguments = function->any("arguments");
    if (arguments)
      write_arguments(*arguments, place + ".function.arguments", max_depth, out);
    else
      out.raw("{}");
    out.end_object().end_object();
  }
  out.end_array();
}

std::string read_role(JsonObject& message, const std::string& where) {
  const std::string role = message.text("role").value_or("");
  constexpr std::string_view kRoles[] = {"system", "developer", "user", "assistant", "tool"};
  if (std::find(std::begin(kRoles), std::end(kRoles), role) == std::end(kRoles))
    throw ApiError(400, where + ".role",
                   cat(where, ".role is \"", role.substr(0, 40),
                       "\"; expected system, developer, user, assistant or tool"));
  return role == "developer" ? "system" : role;
}

void write_message(simdjson::dom::object object, const std::string& where, size_t max_depth,
                   MessageContents& contents, JsonWriter& out, std::vector<std::string>& ignored) {
  JsonObject message(object, where + ".");
  const std::string role = read_role(message, where);
  const auto content = message.any("content");
  const auto calls = message.array("tool_calls");
  if (!content && role != "assistant")
    throw ApiError(400, where + ".content", cat(where, ".content is missing"));
  const std::string text = content ? contents.read(*content, where + ".content") : "";
  if (calls && role != "assistant")
    throw ApiError(400, where + ".tool_calls",
                   cat(where, ".tool_calls: only the assistant calls tools"));
  const auto write_rest = [&](JsonWriter& json) {
    if (calls) write_tool_calls(*calls, where + ".tool_calls", max_depth, json);
    for (const char* const name : {"name", "tool_call_id", "reasoning_content"})
      if (const auto given = message.text(name)) json.member(name, *given);
    json.end_object();
  };
  out.begin_object().member("role", role).member("content", text);
  write_rest(out);
  JsonWriter rest;
  rest.begin_object().member("role", role);
  write_rest(rest);
  contents.end_message(rest.text(), role == "assistant");
  message.any("refusal");
  message.any("annotations");
  message.any("audio");
  for (std::string& name : message.unknown()) ignored.push_back(std::move(name));
}

void read_messages(JsonObject& json, const ServedModel& model, const ServeLimits& limits,
                   GenerationRequest& request) {
  const auto messages = json.array("messages");
  if (!messages) throw ApiError(400, "messages", "messages is missing");
  if (messages->size() == 0) throw ApiError(400, "messages", "messages is an empty list");
  MessageContents contents(model, limits);
  JsonWriter out;
  out.begin_array();
  size_t index = 0;
  for (const JsonElement one : *messages) {
    const std::string where = cat("messages[", index++, "]");
    simdjson::dom::object object;
    if (one.get(object) != simdjson::SUCCESS)
      throw ApiError(400, where, cat(where, " is ", kind_of(one), "; expected an object"));
    write_message(object, where, static_cast<size_t>(limits.max_json_depth), contents, out,
                  request.ignored);
  }
  request.chat.messages = out.end_array().text();
  if (model.media != nullptr && model.media->renders()) request.media = std::move(contents.row());
  request.chat.add_generation_prompt = json.boolean("add_generation_prompt").value_or(true);
  if (!request.chat.add_generation_prompt)
    throw ApiError(400, "add_generation_prompt",
                   "add_generation_prompt is not supported: a reply begins with a new message");
}

// Names of a function's parameters and their types, where the schema says them plainly.
std::map<std::string, std::string> parameter_types(JsonObject& function) {
  std::map<std::string, std::string> types;
  const auto schema = function.any("parameters");
  simdjson::dom::object properties;
  if (!schema || schema->at_key("properties").get(properties) != simdjson::SUCCESS) return types;
  for (const auto [name, property] : properties) {
    std::string_view type;
    if (property.is_object() && property.at_key("type").get(type) == simdjson::SUCCESS)
      types[std::string(name)] = std::string(type);
    else if (property.is_object())
      types[std::string(name)] = "any";
  }
  return types;
}

std::string read_tool(JsonElement element, const std::string& where, GenerationRequest& request) {
  simdjson::dom::object object;
  if (element.get(object) != simdjson::SUCCESS)
    throw ApiError(400, where, cat(where, " is ", kind_of(element), "; expected an object"));
  JsonObject tool(object, where + ".");
  const std::string type = tool.text("type").value_or("function");
  if (type != "function")
    throw ApiError(
        400, where + ".type",
        cat(where, ".type is \"", type.substr(0, 40), "\"; only functions are supported"));
  auto function = tool.object("function");
  const auto name = function ? function->text("name") : std::nullopt;
  if (!name || name->empty() || name->size() > 256)
    throw ApiError(400, where, cat(where, " has no function with a name of 1 to 256 bytes"));
  const auto parameters = function->any("parameters");
  if (parameters && !parameters->is_object())
    throw ApiError(
        400, where + ".function.parameters",
        cat(where, ".function.parameters is ", kind_of(*parameters), "; expected an object"));
  request.tool_parameters[*name] = parameter_types(*function);
  return *name;
}

// The function that must be called, if one is named.
std::string read_tool_choice(JsonObject& json, GenerationRequest& request) {
  const auto choice = json.any("tool_choice");
  std::string_view word;
  if (!choice) {
    request.tool_choice = request.has_tools ? ToolChoice::kAuto : ToolChoice::kNone;
    return "";
  }
  std::string named;
  if (choice->get(word) == simdjson::SUCCESS) {
    if (word == "none")
      request.tool_choice = ToolChoice::kNone;
    else if (word == "auto")
      request.tool_choice = ToolChoice::kAuto;
    else if (word == "required")
      request.tool_choice = ToolChoice::kRequired;
    else
      throw ApiError(
          400, "tool_choice",
          cat("tool_choice \"", word.substr(0, 40), "\" is none of none, auto, required"));
  } else {
    auto object = json.object("tool_choice");
    auto function = object->object("function");
    const auto name = function ? function->text("name") : std::nullopt;
    if (!name) throw ApiError(400, "tool_choice", "tool_choice names no function");
    if (!request.tool_parameters.contains(*name))
      throw ApiError(
          400, "tool_choice",
          cat("tool_choice names \"", name->substr(0, 200), "\", which is not among the tools"));
    request.tool_choice = ToolChoice::kNamed;
    named = *name;
  }
  if (request.tool_choice != ToolChoice::kNone && !request.has_tools)
    throw ApiError(400, "tool_choice", "tool_choice has no effect without tools");
  return named;
}

void read_tools(JsonObject& json, const ServedModel& model, GenerationRequest& request) {
  const auto tools = json.array("tools");
  request.has_tools = tools && tools->size() > 0;
  if (request.has_tools) {
    if (tools->size() > kMaxTools)
      throw ApiError(
          400, "tools",
          cat("tools has ", tools->size(), " entries, at most ", kMaxTools, " are taken"));
    size_t index = 0;
    for (const JsonElement one : *tools) read_tool(one, cat("tools[", index++, "]"), request);
    request.chat.tools = json_text(*json.any("tools"));
  }
  const std::string named = read_tool_choice(json, request);
  request.parallel_tool_calls = json.boolean("parallel_tool_calls").value_or(true);
  if (request.tool_choice == ToolChoice::kNone) {
    // The model does not hear of tools that it may not call.
    request.has_tools = false;
    request.chat.tools.clear();
  }
  if (request.has_tools && model.tool_format == ToolFormat::kNone)
    throw ApiError(400, "tools",
                   "tools are not supported: the model's chat template has no known form of calls; "
                   "--tool-call-parser names one",
                   "unsupported");
  if (request.tool_choice > ToolChoice::kAuto) require_tool_calls(*tools, named, model, request);
}

// Scalars for the template that are not the server's own.
void read_template_variables(JsonObject& json, GenerationRequest& request) {
  constexpr std::string_view kOwn[] = {
      "messages",  "tools",     "add_generation_prompt", "bos_token", "eos_token",  "pad_token",
      "unk_token", "documents", "chat_template",         "tokenize",  "date_string"};
  const auto found = json.any("chat_template_kwargs");
  if (!found) return;
  simdjson::dom::object variables;
  if (found->get(variables) != simdjson::SUCCESS)
    throw ApiError(400, "chat_template_kwargs",
                   cat("chat_template_kwargs is ", kind_of(*found), "; expected an object"));
  for (const auto [name, value] : variables) {
    const std::string member = cat("chat_template_kwargs.", name.substr(0, 64));
    if (name != "date_string" &&
        std::find(std::begin(kOwn), std::end(kOwn), name) != std::end(kOwn))
      throw ApiError(400, member, cat(member, " belongs to the server"));
    if (value.is_array() || value.is_object())
      throw ApiError(400, member, cat(member, " is ", kind_of(value), "; expected a scalar"));
  }
  request.chat.variables = json_text(*found);
}

void read_chat_logprobs(JsonObject& json, GenerationRequest& request) {
  const bool wanted = json.boolean("logprobs").value_or(false);
  const auto top = json.integer("top_logprobs", 0, kMaxTopLogProbabilities);
  if (top && *top > 0 && !wanted)
    throw ApiError(400, "top_logprobs", "top_logprobs has no effect without logprobs");
  if (wanted) request.logprobs = static_cast<int32_t>(top.value_or(0));
}

}  // namespace

GenerationRequest parse_chat(std::string_view body, const ServedModel& model,
                             const ServeLimits& limits) {
  const JsonDocument document(body, static_cast<size_t>(limits.max_json_depth));
  JsonObject json = document.root();
  GenerationRequest request;
  request.endpoint = Endpoint::kChat;
  read_common_members(json, model, limits, request);
  read_messages(json, model, limits, request);
  read_tools(json, model, request);
  read_template_variables(json, request);
  read_chat_logprobs(json, request);
  request.max_tokens =
      read_either(json, "max_completion_tokens", "max_tokens", request.max_tokens_member);
  request.add_special_tokens = json.boolean("add_special_tokens").value_or(false);
  if (json.boolean("add_BOS").value_or(false)) request.add_special_tokens = true;
  request.chat.now = static_cast<int64_t>(std::time(nullptr));
  finish_members(json, request);
  return request;
}

}  // namespace megatron
