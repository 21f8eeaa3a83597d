// Chat templates: they render a conversation as the text that a model was trained on. They are
// Jinja templates, published in tokenizer_config.json or chat_template.jinja next to a tokenizer.
//
// Supported is what `transformers` sets up for them: the statements if, for, set, macro, call,
// filter, with, break, continue, raw and generation; Jinja's expressions, filters and tests;
// Python's methods of strings and dicts; raise_exception, strftime_now, range, namespace, dict.
// Templates cannot access files or run for long. Source: Jinja 3.1
// (https://jinja.palletsprojects.com/en/stable/templates/); transformers, "Chat templates".
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace megatron {

struct ChatInput {
  std::string messages;   // JSON: a list of objects with role and content
  std::string tools;      // JSON: a list of functions; empty: none
  std::string variables;  // JSON: an object with more variables for the template; empty: none
  bool add_generation_prompt = false;
  std::optional<int64_t> now;  // seconds since 1970 for strftime_now; default: the clock
};

struct RenderedChat {
  std::string text;
  // [begin, end) bytes of the text between {% generation %} and {% endgeneration %}, ascending.
  std::vector<std::pair<size_t, size_t>> generated;
};

// Thread safe.
class ChatTemplate {
 public:
  // `name` is used in errors. Throws Error that names line, column and construct.
  ChatTemplate(std::string_view source, std::string name);
  ~ChatTemplate();
  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;

  // Throws Error that names line, column and construct, also if the template itself rejects the
  // conversation.
  RenderedChat render(const ChatInput& input) const;

  // Whether the template marks the text that the model writes.
  bool marks_generation() const;
  const std::string& source() const;
  const std::string& name() const;

  // Special tokens by their names in templates (bos_token, eos_token, ...), spelled like JSON
  // strings.
  void set_special_tokens(std::vector<std::pair<std::string, std::string>> tokens);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Where a tokenizer's templates and special tokens are: in its folder, or in the text of a
// tokenizer_config.json that lies in none.
struct TemplateSource {
  TemplateSource() = default;
  TemplateSource(std::filesystem::path folder) : folder(std::move(folder)) {}  // NOLINT: implicit
  // `name` is used in errors.
  TemplateSource(std::string config, std::string name)
      : config(std::move(config)), config_name(std::move(name)) {}
  bool empty() const { return folder.empty() && config.empty(); }

  std::filesystem::path folder;
  std::string config, config_name;
};

// The template of a tokenizer: `given` (a file, or the template itself if it contains a brace),
// else chat_template.jinja or the "chat_template" of tokenizer_config.json in `source`, which also
// has the special tokens. Of several templates the one named "default" is used (with `has_tools`,
// "tool_use" if there is one). Throws Error if there is none.
ChatTemplate load_chat_template(const TemplateSource& source, const std::string& given,
                                bool has_tools = false);

}  // namespace megatron
