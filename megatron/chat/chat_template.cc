#include "megatron/chat/chat_template.h"

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/chat/detail/jinja_runtime.h"
#include "megatron/chat/python_text.h"

namespace megatron {
namespace {

using Json = nlohmann::ordered_json;
using Variables = std::vector<std::pair<std::string, JinjaValue>>;

constexpr int64_t kLongestRange = 100'000;  // as Jinja's sandbox
constexpr int kMostNamespaces = 4000;       // they can be nested, and are freed recursively
constexpr uint64_t kMostTemplateBytes = uint64_t{16} << 20;

// The budget of a rendering: templates that build their text with + need its square, those that
// output it a small multiple.
uint64_t most_bytes(const ChatInput& input) {
  return (uint64_t{128} << 20) +
         64 * (input.messages.size() + input.tools.size() + input.variables.size());
}

std::string place_of(const std::string& name, const std::string& source, size_t offset) {
  offset = std::min(offset, source.size());
  const auto line =
      1 + std::count(source.begin(), source.begin() + static_cast<std::ptrdiff_t>(offset), '\n');
  const size_t newline = offset == 0 ? std::string::npos : source.rfind('\n', offset - 1);
  const size_t begin = newline == std::string::npos ? 0 : newline + 1;
  return cat(name, ":", line, ":",
             1 + python_length(std::string_view(source).substr(begin, offset - begin)));
}

bool has_generation(const JinjaBody& body) {
  return std::any_of(
      body.begin(), body.end(), [](const std::unique_ptr<JinjaStatement>& statement) {
        return statement->kind == JinjaStatement::Kind::kGeneration ||
               std::any_of(statement->bodies.begin(), statement->bodies.end(), has_generation);
      });
}

JinjaValue range_of(JinjaArguments& arguments) {
  int64_t bounds[3] = {0, 0, 1};
  const size_t count = arguments.positional.size();
  if (count < 1 || count > 3) throw JinjaError{cat("takes 1 to 3 arguments, got ", count)};
  for (size_t i = 0; i < count; ++i) {
    const JinjaValue& value = arguments.positional[i];
    if (!value.is_integer() && !value.is_bool())
      throw JinjaError{cat("takes integers, got ", value.type_name())};
    bounds[count == 1 ? 1 : i] = value.integer();
  }
  const auto [first, last, step] = bounds;
  if (step == 0) throw JinjaError{"the step is zero"};
  std::vector<JinjaValue> items;
  for (int64_t i = first; step > 0 ? i < last : i > last; i += step) {
    if (static_cast<int64_t>(items.size()) == kLongestRange)
      throw JinjaError{cat("the range is longer than ", kLongestRange)};
    items.emplace_back(i);
    if (step > 0 ? i > INT64_MAX - step : i < INT64_MIN - step) break;
  }
  return JinjaValue::list(std::move(items));
}

JinjaValue mapping_of(JinjaArguments& arguments, bool is_namespace) {
  auto mapping = std::make_shared<JinjaMapping>();
  for (const JinjaValue& given : arguments.positional) {
    if (!given.is_mapping()) throw JinjaError{cat("takes a dict, got ", given.type_name())};
    for (const auto& [key, value] : given.mapping()->entries) mapping->set(key, value);
  }
  for (const auto& [key, value] : arguments.named) mapping->set(JinjaValue::text(key), value);
  mapping->is_namespace = is_namespace;
  return mapping;
}

JinjaValue time_text(std::optional<int64_t> now, JinjaArguments& arguments) {
  const JinjaValue* format = arguments.find(0, "format");
  if (format == nullptr || !format->is_string()) throw JinjaError{"takes a format"};
  const std::time_t seconds = now ? static_cast<std::time_t>(*now) : std::time(nullptr);
  std::tm parts{};
  now ? gmtime_r(&seconds, &parts) : localtime_r(&seconds, &parts);
  char text[512];
  const size_t length = std::strftime(text, sizeof text, format->string().c_str(), &parts);
  return std::string(text, length);
}

JinjaValue parsed(const std::string& json, const char* what, const std::string& name) {
  try {
    return jinja_from_json(json);
  } catch (const JinjaError& error) {
    throw_error(cat("the ", what, " for ", name, " ", error.message));
  }
}

// A token of tokenizer_config.json: a string, or an object with its content.
std::string token_text(const Json& token) {
  if (token.is_string()) return token.get<std::string>();
  return token.is_object() && token.contains("content") && token["content"].is_string()
             ? token["content"].get<std::string>()
             : std::string();
}

// tokenizer_config.json; empty: there is none.
Json read_config(const TemplateSource& from, const std::string& name) {
  const bool in_folder = !from.folder.empty();
  if (in_folder ? !std::filesystem::is_regular_file(name) : from.config.empty())
    return Json::object();
  const Json json = Json::parse(in_folder ? read_file(name) : from.config, nullptr,
                                /*allow_exceptions=*/false);
  MEGATRON_CHECK(json.is_object(), name, ": is no JSON object");
  return json;
}

// The template of tokenizer_config.json; empty: none.
std::string configured_template(const Json& config, const std::string& path, bool has_tools) {
  const auto found = config.find("chat_template");
  if (found == config.end() || found->is_null()) return "";
  if (found->is_string()) return found->get<std::string>();
  MEGATRON_CHECK(found->is_array(), path, ": chat_template is neither text nor a list");
  std::string names, chosen;
  for (const char* wanted : {"default", "tool_use"}) {
    if (wanted == std::string_view("tool_use") && !has_tools) continue;
    for (const Json& entry : *found) {
      const std::string name = entry.value("name", "");
      names += cat(names.empty() ? "" : ", ", name);
      if (name == wanted) chosen = entry.value("template", "");
    }
  }
  MEGATRON_CHECK(!chosen.empty(), path, ": of the chat templates ", names,
                 " none is named default\nhint: give one with --chat-template FILE");
  return chosen;
}

// How mistral-common writes conversations with a tekken.json from version 7 on, which comes without
// a template: each message alone, of texts and sounds; not those with tools.
constexpr int64_t kTekkenVersion = 7;
#define TEKKEN_CONTENT                                                                      \
  "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"  \
  "{% if p['type'] == 'text' %}{{ p['text'] }}{% elif p['type'] == 'audio' %}"              \
  "[BEGIN_AUDIO][AUDIO]{% else %}{{ raise_exception('a part is neither text nor audio') }}" \
  "{% endif %}{% endfor %}{% endif %}"
constexpr std::string_view kTekkenTemplate =
    "{% if tools %}{{ raise_exception('tools need a --chat-template') }}{% endif %}<s>"
    "{% for m in messages %}{% if m['tool_calls'] %}"
    "{{ raise_exception('tool calls need a --chat-template') }}{% endif %}"
    "{% if m['role'] == 'assistant' %}{% generation %}" TEKKEN_CONTENT
    "</s>{% endgeneration %}"
    "{% elif m['role'] == 'system' %}[SYSTEM_PROMPT]" TEKKEN_CONTENT
    "[/SYSTEM_PROMPT]"
    "{% elif m['role'] == 'user' %}[INST]" TEKKEN_CONTENT
    "[/INST]"
    "{% else %}{{ raise_exception('the role of a message is neither system, user nor assistant') }}"
    "{% endif %}{% endfor %}";
#undef TEKKEN_CONTENT

// Whether a tokenizer of the folder is such a file.
bool has_tekken(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "tekken.json";
  if (folder.empty() || !std::filesystem::is_regular_file(path) ||
      std::filesystem::is_regular_file(folder / "tokenizer.json"))
    return false;
  const Json file = Json::parse(read_file(path), nullptr, /*allow_exceptions=*/false);
  MEGATRON_CHECK(file.is_object(), path.string(), ": is no JSON object");
  const auto config = file.find("config");
  const std::string version = config == file.end() ? "" : config->value("version", "");
  return version.starts_with("v") && std::atoll(version.c_str() + 1) >= kTekkenVersion;
}

}  // namespace

struct ChatTemplate::Impl {
  std::string source;  // normalized
  std::string name;
  JinjaBody body;
  bool marks_generation = false;
  Variables special_tokens;
};

ChatTemplate::ChatTemplate(std::string_view source, std::string name)
    : impl_(std::make_unique<Impl>()) {
  impl_->source = normalized_jinja(source);
  impl_->name = std::move(name);
  try {
    impl_->body = parse_jinja(impl_->source);
  } catch (const JinjaSyntaxError& error) {
    throw_error(cat(place_of(impl_->name, impl_->source, error.offset), ": ", error.message));
  }
  impl_->marks_generation = has_generation(impl_->body);
}

ChatTemplate::~ChatTemplate() = default;
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;

bool ChatTemplate::marks_generation() const { return impl_->marks_generation; }
const std::string& ChatTemplate::source() const { return impl_->source; }
const std::string& ChatTemplate::name() const { return impl_->name; }

void ChatTemplate::set_special_tokens(std::vector<std::pair<std::string, std::string>> tokens) {
  impl_->special_tokens.clear();
  for (auto& [name, text] : tokens) impl_->special_tokens.emplace_back(name, std::move(text));
}

RenderedChat ChatTemplate::render(const ChatInput& input) const {
  // Later definitions take precedence.
  Variables variables;
  const auto set = [&](const std::string& name, JinjaValue value) {
    variables.emplace(variables.begin(), name, std::move(value));
  };
  set("raise_exception", jinja_function([](JinjaArguments& arguments) -> JinjaValue {
        throw JinjaError{cat("the template refuses this conversation: ",
                             jinja_text(arguments.get(0, "message", JinjaValue::text(""))))};
      }));
  set("strftime_now",
      jinja_function([now = input.now](JinjaArguments& a) { return time_text(now, a); }));
  set("range", jinja_function(range_of));
  set("dict", jinja_function([](JinjaArguments& a) { return mapping_of(a, false); }));
  set("namespace", jinja_function([made = 0](JinjaArguments& a) mutable {
        if (++made > kMostNamespaces)
          throw JinjaError{cat("the template makes more than ", kMostNamespaces, " namespaces")};
        return mapping_of(a, true);
      }));
  for (const auto& [name, text] : impl_->special_tokens) set(name, text);
  set("tools",
      input.tools.empty() ? JinjaValue(JinjaNone{}) : parsed(input.tools, "tools", impl_->name));
  set("documents", JinjaNone{});
  set("add_generation_prompt", input.add_generation_prompt);
  set("messages", parsed(input.messages, "messages", impl_->name));
  if (!input.variables.empty()) {
    const JinjaValue more = parsed(input.variables, "variables", impl_->name);
    MEGATRON_CHECK(more.is_mapping(), "the variables for ", impl_->name, " are no JSON object");
    for (const auto& [key, value] : more.mapping()->entries) set(key.string(), value);
  }
  try {
    JinjaOutput output = render_jinja(impl_->body, std::move(variables), most_bytes(input));
    return {std::move(output.text), std::move(output.generated)};
  } catch (const JinjaRuntimeError& error) {
    throw_error(cat(place_of(impl_->name, impl_->source, error.offset), ": ", error.construct, ": ",
                    error.message));
  }
}

ChatTemplate load_chat_template(const TemplateSource& from, const std::string& given,
                                bool has_tools) {
  std::vector<std::pair<std::string, std::string>> tokens;
  std::string source, name;
  const std::filesystem::path jinja = from.folder / "chat_template.jinja";
  const bool has_jinja = !from.folder.empty() && std::filesystem::is_regular_file(jinja);
  const std::string config_name =
      from.folder.empty() ? from.config_name : (from.folder / "tokenizer_config.json").string();
  const Json config = read_config(from, config_name);
  for (const char* token :
       {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"})
    if (config.contains(token))
      if (std::string text = token_text(config[token]); !text.empty())
        tokens.emplace_back(token, std::move(text));
  if (given.empty() && has_jinja) {
    source = read_file(jinja, kMostTemplateBytes);
    name = jinja.string();
  } else if (given.empty()) {
    source = configured_template(config, config_name, has_tools);
    name = config_name + ": chat_template";
    if (source.empty() && has_tekken(from.folder)) {
      source = kTekkenTemplate;
      name = (from.folder / "tekken.json").string();
    }
  } else if (given.find('{') != std::string::npos) {
    source = given;
    name = "--chat-template";
  } else {
    MEGATRON_CHECK(std::filesystem::exists(given), "--chat-template ", given,
                   ": there is no such file\nhint: give a file, or the template itself");
    source = read_file(given, kMostTemplateBytes);
    name = given;
  }
  MEGATRON_CHECK(
      !source.empty(),
      from.empty()
          ? "the tokenizer comes from no folder and holds no chat template"
          : (from.folder.empty() ? config_name : from.folder.string()) + ": holds no chat template",
      from.folder.empty() && !from.empty()
          ? "\nhint: give one with --chat-template FILE"
          : "\nhint: expected chat_template.jinja, or chat_template in tokenizer_config.json; or "
            "give one with --chat-template FILE");
  ChatTemplate out(source, name);
  out.set_special_tokens(std::move(tokens));
  return out;
}

}  // namespace megatron
