// Rendering of chat templates against transformers (tests/golden/chat), and the sources of
// templates.
#include "megatron/chat/chat_template.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "tests/unit/error_of.h"

namespace megatron {
namespace {

using Json = nlohmann::ordered_json;
using testing::HasSubstr;
namespace fs = std::filesystem;

const fs::path kGolden = fs::path(MEGATRON_SOURCE_DIR) / "tests" / "golden" / "chat";

std::vector<std::pair<std::string, std::string>> pairs(const Json& object) {
  std::vector<std::pair<std::string, std::string>> out;
  for (const auto& [key, value] : object.items()) out.emplace_back(key, value.get<std::string>());
  return out;
}

std::string text_of(const Json& json, const char* key) {
  return json.contains(key) ? json[key].dump() : "";
}

TEST(ChatTemplate, TextsAndRefusalsOfTransformers) {
  const Json golden = Json::parse(read_file(kGolden / "cases.json"));
  std::map<std::string, ChatTemplate> templates;
  int texts = 0, refusals = 0, spans = 0;
  for (const Json& c : golden["cases"]) {
    const std::string name = c["template"];
    auto found = templates.find(name);
    if (found == templates.end()) {
      found = templates.emplace(name, ChatTemplate(read_file(kGolden / "templates" / name), name))
                  .first;
      found->second.set_special_tokens(pairs(golden["tokens"]));
    }
    const Json& conversation = golden["conversations"][c["conversation"].get<std::string>()];
    SCOPED_TRACE(name + ", " + c["conversation"].get<std::string>() +
                 (c["add_generation_prompt"] ? ", prompt" : ""));
    ChatInput input;
    input.messages = conversation["messages"].dump();
    input.tools = text_of(conversation, "tools");
    input.variables = text_of(conversation, "variables");
    input.add_generation_prompt = c["add_generation_prompt"];
    input.now = golden["now"].get<int64_t>();
    if (c.contains("error")) {
      ++refusals;
      EXPECT_THROW(found->second.render(input), Error) << c["error"];
      continue;
    }
    ++texts;
    try {
      const RenderedChat chat = found->second.render(input);
      EXPECT_EQ(chat.text, c["text"].get<std::string>());
      EXPECT_EQ(found->second.marks_generation(), c.contains("generated"));
      if (!c.contains("generated")) continue;
      Json generated = Json::array();
      for (const auto& [begin, end] : chat.generated) generated.push_back({begin, end});
      EXPECT_EQ(generated, c["generated"]);
      spans += static_cast<int>(generated.size());
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  }
  EXPECT_GT(texts, 500);
  EXPECT_GT(refusals, 100);
  EXPECT_GT(spans, 30);
}

TEST(ChatTemplate, ErrorsNameLineColumnAndConstruct) {
  const auto made = [](const char* source) {
    return error_of([&] { ChatTemplate(source, "t.jinja"); });
  };
  EXPECT_EQ(made("a\n{% for x in y %}\nb"), "t.jinja:2:1: {% for %} is not closed by {% endfor %}");
  EXPECT_EQ(made("{% if a %}{% endfor %}"),
            "t.jinja:1:11: {% if %} is not closed by {% endif %}, found {% endfor %}");
  EXPECT_EQ(made("{{ a b }}"), "t.jinja:1:6: found b in an expression, expected its end");
  EXPECT_EQ(made("\u00e9\n  {{ 'open }}"), "t.jinja:2:6: a string is not closed");
  EXPECT_EQ(made("{% include 'x' %}"),
            "t.jinja:1:1: the statement {% include %} is not supported in chat templates");
  EXPECT_EQ(made("{% break %}"), "t.jinja:1:1: {% break %} outside a loop");
  EXPECT_EQ(made("{{ f(a=1, b) }}"), "t.jinja:1:11: a positional argument follows a named one");
  EXPECT_EQ(made("{{ a"), "t.jinja:1:1: an expression {{ is not closed");
  EXPECT_EQ(made("{# a"), "t.jinja:1:1: a comment {# is not closed");
  EXPECT_EQ(made("{{ )"), "t.jinja:1:4: unexpected )");
  EXPECT_THAT(made(("{{ " + std::string(5000, '(') + "1" + std::string(5000, ')') + " }}").c_str()),
              HasSubstr("is nested too deeply"));

  const auto rendered = [](const char* source) {
    return error_of(
        [&] { ChatTemplate(source, "t.jinja").render({.messages = "[{\"role\": \"user\"}]"}); });
  };
  EXPECT_EQ(rendered("\n{{ messages[0].content.strip() }}"),
            "t.jinja:2:23: the attribute strip: 'dict object' has no attribute 'content'");
  EXPECT_EQ(rendered("{{ nothing() }}"),
            "t.jinja:1:11: the call of nothing: 'nothing' is undefined");
  EXPECT_EQ(rendered("{{ 1 | nope }}"),
            "t.jinja:1:8: the filter nope: there is no filter named nope");
  EXPECT_EQ(rendered("{{ 1 is nope }}"), "t.jinja:1:6: the test nope: there is no test named nope");
  EXPECT_EQ(rendered("{{ 'a' + 1 }}"),
            "t.jinja:1:8: the operator +: can only concatenate str to str, not int");
  EXPECT_EQ(rendered("{{ raise_exception('no system role') }}"),
            "t.jinja:1:19: the call of raise_exception: the template refuses this conversation: no "
            "system role");
  EXPECT_EQ(rendered("{% for x in 5 %}{% endfor %}"),
            "t.jinja:1:1: {% for %}: 'int' object is not iterable");
  EXPECT_EQ(rendered("{% set messages.x = 1 %}"),
            "t.jinja:1:1: {% set %}: cannot set the attribute x of an object of type list, only of "
            "a namespace()");
  EXPECT_EQ(rendered("{{ messages.append(1) }}"),
            "t.jinja:1:12: the attribute append: a template cannot change a list with append()");
  EXPECT_THAT(rendered("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
              HasSubstr("macros call each other more than 100 times"));
  EXPECT_THAT(
      rendered("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
      HasSubstr("did not end within"));
  EXPECT_THAT(rendered("{{ 'x' * 100000000000 }}"), HasSubstr("the repeated text is too long"));
  EXPECT_EQ(error_of([] { ChatTemplate("x", "t.jinja").render({.messages = "[{"}); }),
            "the messages for t.jinja is no JSON");
}

class Folder {
 public:
  Folder() : path(fs::path(testing::TempDir()) / "chat_template_folder") {
    fs::remove_all(path);
    fs::create_directories(path);
  }
  void write(const char* name, const std::string& text) const {
    std::ofstream(path / name) << text;
  }
  std::string text(const std::string& given = "", bool tools = false) const {
    return load_chat_template(path, given, tools).render({.messages = "[]"}).text;
  }
  fs::path path;
};

TEST(ChatTemplate, ComesFromTheFolderOfTheTokenizer) {
  const Folder folder;
  EXPECT_THAT(error_of([&] { folder.text(); }),
              HasSubstr("holds no chat template\nhint: expected chat_template.jinja"));
  folder.write("tokenizer_config.json",
               R"({"chat_template": "{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}",
                   "bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>", "pad_token": null})");
  EXPECT_EQ(folder.text(), "<s>|</s>|False");
  EXPECT_EQ(folder.text("{{ eos_token }}!"), "</s>!") << "the template itself";
  folder.write("own.jinja", "own {{ bos_token }}\n");
  EXPECT_EQ(folder.text((folder.path / "own.jinja").string()), "own <s>");
  EXPECT_THAT(error_of([&] { folder.text("nowhere.jinja"); }),
              HasSubstr("--chat-template nowhere.jinja: there is no such file"));
  folder.write("chat_template.jinja", "newer");
  EXPECT_EQ(folder.text(), "newer");

  fs::remove(folder.path / "chat_template.jinja");
  folder.write(
      "tokenizer_config.json",
      R"({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]})");
  EXPECT_EQ(folder.text(), "D");
  EXPECT_EQ(folder.text("", /*tools=*/true), "T");
  folder.write("tokenizer_config.json", R"({"chat_template": [{"name": "rag", "template": "R"}]})");
  EXPECT_THAT(error_of([&] { folder.text(); }),
              HasSubstr("of the chat templates rag none is named default"));
}

}  // namespace
}  // namespace megatron
