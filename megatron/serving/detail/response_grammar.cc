#include "megatron/serving/detail/response_grammar.h"

#include <array>
#include <utility>

#include "megatron/base/failure_class.h"
#include "megatron/base/json_writer.h"

namespace megatron {
namespace {

constexpr const char* kAnyObject = R"({"type": "object", "additionalProperties": true})";

// `where`: the member that the grammar is in, for messages.
void set_grammar(const GrammarText& grammar, const std::string& where, const ServedModel& model,
                 GenerationRequest& request) {
  if (model.grammars == nullptr)
    throw ApiError(400, where, cat(where, " is not supported: the engine follows no grammars"),
                   "unsupported");
  try {
    request.spec.grammar = model.grammars->compile(grammar);
  } catch (const GrammarError& error) {
    throw ApiError(400, where, cat(where, ": the grammar ", error.what()));
  } catch (const RetryError& error) {  // no fault of the request
    throw ApiError(503, where, cat(where, " cannot be followed now: ", error.what()));
  } catch (const Error& error) {
    throw ApiError(400, where, cat(where, " is not supported: ", error.what()), "unsupported");
  }
}

// A schema as an object or boolean, or as JSON in a text.
std::string schema_text(JsonElement schema, const std::string& where) {
  std::string_view text;
  if (schema.get(text) == simdjson::SUCCESS) return std::string(text);
  if (!schema.is_object() && !schema.is_bool())
    throw ApiError(400, where, cat(where, " is ", kind_of(schema), "; expected a JSON schema"));
  return json_text(schema);
}

void read_response_format(JsonObject& json, const ServedModel& model, GenerationRequest& request) {
  auto format = json.object("response_format");
  if (!format) return;
  const std::string type = format->text("type").value_or("");
  if (type == "text") return;
  if (type == "json_object")
    return set_grammar({GrammarKind::kJsonSchema, kAnyObject}, "response_format", model, request);
  if (type != "json_schema")
    throw ApiError(400, "response_format.type",
                   cat("response_format.type is \"", type.substr(0, 40),
                       "\"; expected text, json_object or json_schema"));
  auto described = format->object("json_schema");
  const auto schema = described ? described->any("schema") : std::nullopt;
  const std::string where = "response_format.json_schema.schema";
  if (!schema) throw ApiError(400, where, cat(where, " is missing"));
  if (!schema->is_object())
    throw ApiError(400, where, cat(where, " is ", kind_of(*schema), "; expected an object"));
  set_grammar({GrammarKind::kJsonSchema, json_text(*schema)}, where, model, request);
}

std::string choices_grammar(simdjson::dom::array choices, const std::string& where) {
  std::string grammar = "root ::= ";
  size_t count = 0;
  for (const JsonElement one : choices) {
    std::string_view text;
    if (one.get(text) != simdjson::SUCCESS || text.empty())
      throw ApiError(400, where, cat(where, " has ", kind_of(one), "; expected texts"));
    grammar += (count++ > 0 ? " | " : "") + json_quote(text);
  }
  if (count == 0) throw ApiError(400, where, cat(where, " is empty"));
  return grammar;
}

void read_structured_outputs(JsonObject& json, const ServedModel& model,
                             GenerationRequest& request) {
  auto wanted = json.object("structured_outputs");
  if (!wanted) return;
  constexpr std::array<std::string_view, 5> kNames = {"json", "json_object", "regex", "choice",
                                                      "grammar"};
  std::string_view name;
  for (const std::string_view one : kNames) {
    if (!wanted->has(one)) continue;
    if (!name.empty())
      throw ApiError(400, "structured_outputs",
                     cat("structured_outputs has ", name, " and ", one, "; expected one of them"));
    name = one;
  }
  if (const auto unknown = wanted->unknown(); !unknown.empty())
    throw ApiError(400, unknown[0], cat(unknown[0], " is not known"));
  if (name.empty())
    throw ApiError(400, "structured_outputs",
                   "structured_outputs asks for nothing; expected json, json_object, regex, choice "
                   "or grammar");
  if (request.spec.grammar)
    throw ApiError(400, "structured_outputs",
                   "structured_outputs and response_format do not go together");
  const std::string where = wanted->path(name);
  GrammarText grammar;
  if (name == "json") {
    grammar = {GrammarKind::kJsonSchema, schema_text(*wanted->any(name), where)};
  } else if (name == "json_object") {
    if (!*wanted->boolean(name)) return;
    grammar = {GrammarKind::kJsonSchema, kAnyObject};
  } else if (name == "choice") {
    grammar = {GrammarKind::kEbnf, choices_grammar(*wanted->array(name), where)};
  } else {
    grammar = {name == "regex" ? GrammarKind::kRegex : GrammarKind::kEbnf, *wanted->text(name)};
  }
  set_grammar(grammar, where, model, request);
}

// What stands around the arguments of a call, by the format; see ToolFormat.
struct CallFrame {
  std::string begin, end, content, separator;
};
CallFrame call_frame(ToolFormat format, const std::string& name) {
  switch (format) {
    case ToolFormat::kHermes:
      return {cat("<tool_call>\n{\"name\": ", json_quote(name), ", \"arguments\": "),
              "}\n</tool_call>", "json_schema", "\n"};
    case ToolFormat::kLlama3Json:
      return {cat("{\"name\": ", json_quote(name), ", \"parameters\": "), "}", "json_schema", "; "};
    case ToolFormat::kQwen3Coder:
      return {cat("<tool_call>\n<function=", name, ">\n"), "\n</function>\n</tool_call>",
              "qwen_xml_parameter", "\n"};
    case ToolFormat::kNone:
      break;
  }
  throw ApiError(400, "tools", "the form of calls is not known", "unsupported");
}

}  // namespace

void read_response_grammar(JsonObject& json, const ServedModel& model, GenerationRequest& request) {
  read_response_format(json, model, request);
  read_structured_outputs(json, model, request);
}

void require_tool_calls(simdjson::dom::array tools, const std::string& name,
                        const ServedModel& model, GenerationRequest& request) {
  if (request.spec.grammar)
    throw ApiError(400, "tool_choice",
                   "tool_choice asks for a call, which does not go together with a form of the "
                   "reply (response_format, structured_outputs)");
  JsonWriter out;
  std::string separator;
  out.begin_object();
  out.key("type").value("structural_tag");
  out.key("format").begin_object();
  out.key("type").value("tags_with_separator");
  out.key("tags").begin_array();
  for (const JsonElement one : tools) {
    const JsonElement function = one["function"];
    std::string_view function_name;
    if (function["name"].get(function_name) != simdjson::SUCCESS) continue;  // was checked
    if (!name.empty() && function_name != name) continue;
    const CallFrame frame = call_frame(model.tool_format, std::string(function_name));
    separator = frame.separator;
    JsonElement parameters;
    const bool has_schema =
        function["parameters"].get(parameters) == simdjson::SUCCESS && parameters.is_object();
    out.begin_object();
    out.key("type").value("tag");
    out.key("begin").value(frame.begin);
    out.key("content").begin_object();
    out.key("type").value(frame.content);
    out.key("json_schema").raw(has_schema ? json_text(parameters) : std::string(kAnyObject));
    out.end_object();
    out.key("end").value(frame.end);
    out.end_object();
  }
  out.end_array();
  out.key("separator").value(separator);
  out.key("at_least_one").value(true);
  out.key("stop_after_first").value(!request.parallel_tool_calls);
  out.end_object();
  out.end_object();
  set_grammar({GrammarKind::kStructuralTag, out.text()}, "tools", model, request);
}

}  // namespace megatron
