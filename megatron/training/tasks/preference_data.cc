#include "megatron/training/tasks/preference_data.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/datasets/sources/byte_source.h"
#include "megatron/tokenizers/rendered_text.h"

namespace megatron {
namespace {

using nlohmann::ordered_json;

// Calls `use` with each line and its number, from 1.
void for_each_line(const std::string& path,
                   const std::function<void(std::string_view, int64_t)>& use) {
  const std::unique_ptr<ByteSource> source = open_bytes(path);
  std::string pending;
  std::vector<char> block(1 << 20);
  int64_t number = 0;
  for (size_t count; (count = source->read(block.data(), block.size())) > 0;) {
    pending.append(block.data(), count);
    size_t begin = 0;
    for (size_t end; (end = pending.find('\n', begin)) != std::string::npos; begin = end + 1)
      use(std::string_view(pending).substr(begin, end - begin), ++number);
    pending.erase(0, begin);
  }
  if (!pending.empty()) use(pending, ++number);
}

class PreferenceReader {
 public:
  PreferenceReader(const std::string& path, const Tokenizer& tokenizer,
                   const PreferenceOptions& options)
      : path_(path), tokenizer_(tokenizer), options_(options) {}

  PreferenceFile run() {
    for_each_line(path_, [&](std::string_view line, int64_t number) {
      if (line.find_first_not_of(" \t\r") == std::string_view::npos) return;
      where_ = cat(path_, ":", number);
      add(pair_of(line));
    });
    MEGATRON_CHECK(!file_.pairs.empty(), path_, ": holds no pair of responses",
                   file_.num_long > 0 ? cat(" that fits --seq-length ", options_.sequence_length,
                                            " (", file_.num_long, " are longer)")
                                      : std::string());
    return std::move(file_);
  }

 private:
  void add(PreferencePair pair) {
    const size_t longest = pair.prompt.size() + std::max(pair.chosen.size(), pair.rejected.size());
    if (longest > static_cast<size_t>(options_.sequence_length) + 1) {
      ++file_.num_long;
      return;
    }
    file_.pairs.push_back(std::move(pair));
  }

  PreferencePair pair_of(std::string_view line) const {
    const auto json = ordered_json::parse(line, nullptr, /*allow_exceptions=*/false);
    MEGATRON_CHECK(json.is_object(), where_, ": is no JSON object");
    for (const char* key : {"chosen", "rejected"})
      MEGATRON_CHECK(json.contains(key), where_, ": has no \"", key, "\"");
    const ordered_json &chosen = json["chosen"], &rejected = json["rejected"];
    const ordered_json prompt = json.value("prompt", ordered_json());
    if (chosen.is_string() && rejected.is_string() && prompt.is_string())
      return of_texts(prompt.get<std::string>(), chosen.get<std::string>(),
                      rejected.get<std::string>());
    const bool lists =
        chosen.is_array() && rejected.is_array() && (prompt.is_array() || prompt.is_null());
    MEGATRON_CHECK(lists, where_,
                   ": \"prompt\", \"chosen\" and \"rejected\" must be three texts, or lists of "
                   "messages");
    return of_messages(prompt, chosen, rejected);
  }

  PreferencePair of_texts(const std::string& prompt, const std::string& chosen,
                          const std::string& rejected) const {
    const std::optional<int32_t> eod = tokenizer_.eod();
    MEGATRON_CHECK(eod.has_value(), path_,
                   ": the tokenizer has no end-of-document token to append to a response");
    PreferencePair pair;
    tokenizer_.encode_append(prompt, pair.prompt);
    tokenizer_.encode_append(chosen, pair.chosen);
    tokenizer_.encode_append(rejected, pair.rejected);
    MEGATRON_CHECK(!pair.prompt.empty(), where_, ": the prompt is empty");
    pair.chosen.push_back(*eod);
    pair.rejected.push_back(*eod);
    return pair;
  }

  PreferencePair of_messages(ordered_json prompt, const ordered_json& chosen,
                             const ordered_json& rejected) const {
    MEGATRON_CHECK(options_.render, where_, ": holds messages, which need a chat template",
                   "\nhint: give --chat-template, or a tokenizer whose folder has one");
    size_t common = 0;  // number of common messages, which are the prompt
    if (prompt.is_null()) {
      prompt = ordered_json::array();
      while (common < chosen.size() && common < rejected.size() &&
             chosen[common] == rejected[common])
        prompt.push_back(chosen[common++]);
    }
    MEGATRON_CHECK(!prompt.empty(), where_, ": has no message before the responses");
    for (const auto& [name, list] :
         {std::pair{"chosen", &chosen}, std::pair{"rejected", &rejected}})
      MEGATRON_CHECK(list->size() > common, where_, ": \"", name,
                     "\" has no message after the prompt");
    const auto render = [&](const ordered_json& messages, bool add_generation_prompt) {
      return options_.render(hide_special_tokens(tokenizer_, messages.dump()),
                             add_generation_prompt);
    };
    const std::string start = render(prompt, /*add_generation_prompt=*/true);
    const auto response = [&](const char* name, const ordered_json& messages) {
      ordered_json all = prompt;
      for (size_t i = common; i < messages.size(); ++i) all.push_back(messages[i]);
      const std::string text = render(all, /*add_generation_prompt=*/false);
      MEGATRON_CHECK(text.starts_with(start) && text.size() > start.size(), where_, ": with \"",
                     name, "\" the chat template does not continue the text of the prompt",
                     "\nhint: it changes earlier turns, or opens the model's turn in another way "
                     "than it writes one");
      return encode_rendered(tokenizer_, std::string_view(text).substr(start.size()));
    };
    PreferencePair pair;
    pair.chosen = response("chosen", chosen);
    pair.rejected = response("rejected", rejected);
    pair.prompt = encode_rendered(tokenizer_, start);
    MEGATRON_CHECK(!pair.prompt.empty(), where_, ": the prompt is empty");
    return pair;
  }

  const std::string& path_;
  const Tokenizer& tokenizer_;
  const PreferenceOptions& options_;
  std::string where_;
  PreferenceFile file_;
};

}  // namespace

PreferenceFile read_preferences(const std::string& path, const Tokenizer& tokenizer,
                                const PreferenceOptions& options) {
  return PreferenceReader(path, tokenizer, options).run();
}

}  // namespace megatron
