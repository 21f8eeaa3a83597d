// megatron generate: text generation from prompts, or chat.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/inference/chat.h"
#include "megatron/inference/generator.h"
#include "megatron/inference/images/image_prompts.h"
#include "megatron/inference/speculation/served_draft.h"
#include "tools/support/image_input.h"
#include "tools/support/input_path.h"
#include "tools/support/load_model_flags.h"
#include "tools/support/neighbor_lookup.h"

namespace megatron {
namespace {

struct GenerateConfig : Config {
  std::vector<std::string> prompt;
  std::string prompts_file;
  int64_t tokens_to_generate = 64;
  std::vector<std::string> stop;
  bool ignore_eod = false;
  bool chat = false;
  std::string system;
  std::string chat_template;
  bool json = false;
  ImageConfig images;
  std::string media_root;
  bool escape_modality_text = false;

  void fields(FieldVisitor& v) override {
    v.group("generate");
    v.field("prompt", prompt, "one or more texts to continue");
    v.field(
        "prompts_file", prompts_file,
        "a file of prompts (-: standard input), one a line; with .jsonl each line is an object "
        "with \"prompt\" or \"text\" and perhaps \"images\" or \"audios\" (paths), with --chat a "
        "conversation "
        "(\"messages\")");
    v.field({"tokens_to_generate", "--tokens-to-generate --num-tokens-to-generate"},
            tokens_to_generate, "tokens after each prompt");
    v.field({"stop", "--stop --stop-words"}, stop, "texts at which generation ends");
    v.field("ignore_eod", ignore_eod, "go on after the end-of-document token");
    v.field("chat", chat,
            "answer messages, by the tokenizer's chat template, until the turn ends: each --prompt "
            "is one of a user, --prompts-file holds conversations; with neither, each line of the "
            "standard input is the user's next message; a line `/image FILE` or "
            "`/audio FILE` adds an image or a sound to it");
    v.field("system", system, "with --chat: a system message at the start");
    v.field("chat_template", chat_template,
            "with --chat: a file with a template, or the template, in place of the tokenizer's");
    v.field("json", json, "print JSON");
    images.fields(v);
    v.field("media_root", media_root,
            "folder of the media that lines of --prompts-file name; empty: the file's folder");
    v.field("escape_modality_text", escape_modality_text,
            "with --chat and media: encode spellings of special tokens in messages as ordinary "
            "text; without it they are errors");
  }
  void validate(Violations& violations) const override {
    if (chat ? !prompt.empty() && !prompts_file.empty() : prompt.empty() == prompts_file.empty())
      violations.add(chat ? "--prompt and --prompts-file are both given, expected one or neither"
                          : "exactly one of --prompt and --prompts-file is needed");
    if (chat && ignore_eod)
      violations.add("--ignore-eod has no effect with --chat, where replies end with their turn");
    if (!chat && !system.empty()) violations.add("--system has no effect without --chat");
    if (!chat && !chat_template.empty())
      violations.add("--chat-template has no effect without --chat");
    validate_images(violations);
    if (tokens_to_generate <= 0)
      violations.add(cat("--tokens-to-generate ", tokens_to_generate, " must be positive"));
    for (const std::string& text : stop)
      if (text.empty()) violations.add("--stop: an empty text would end everything");
  }
  void validate_images(Violations& violations) const {
    const std::string name = images.image.empty() ? "audios" : "images";
    if (images.given() && !prompts_file.empty())
      violations.add(cat(images.flag(), " with --prompts-file"),
                     cat("lines of the file name their ", name));
    if (images.given() && prompt.size() > 1)
      violations.add(cat(images.flag(), " with ", prompt.size(), " prompts"),
                     cat("give one --prompt, or lines with \"", name, "\" in --prompts-file"));
    const bool media = chat || images.given() || !prompts_file.empty();
    if (!images.media_model.empty() && !media)
      violations.add("--media-model has no effect without images or sounds");
    if (!images.audio_media_model.empty() && !media)
      violations.add("--audio-media-model has no effect without images or sounds");
    if (!media_root.empty() && prompts_file.empty())
      violations.add("--media-root has no effect without --prompts-file");
    if (escape_modality_text && !chat)
      violations.add("--escape-modality-text has no effect without --chat");
  }
};

// A text to continue, and its media.
struct Prompt {
  std::string text;
  std::vector<RowMedium> media;
  std::string where;  // for errors
};

std::string prompt_of_line(const std::string& path, size_t number, const std::string& line) {
  const auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  MEGATRON_CHECK(object.is_object(), path, ":", number, ": expected a JSON object");
  for (const char* key : {"prompt", "text"})
    if (object.contains(key) && object[key].is_string()) return object[key];
  throw_error(cat(path, ":", number, ": no string under \"prompt\" or \"text\""));
}

std::vector<Prompt> read_prompts(const GenerateConfig& config) {
  std::vector<Prompt> prompts;
  if (config.prompts_file.empty()) {
    for (const std::string& text : config.prompt)
      prompts.push_back({text, config.images.read(), cat("prompt ", prompts.size() + 1)});
    return prompts;
  }
  const std::string& path = config.prompts_file;
  const std::string text = read_file(input_path(path));
  size_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    size_t end = text.find('\n', begin);
    if (end == std::string::npos) end = text.size();
    std::string line = text.substr(begin, end - begin);
    if (!line.empty() && line.back() == '\r') line.pop_back();
    ++number;
    begin = end + 1;
    if (line.empty()) continue;
    Prompt prompt{line, {}, cat(path, ":", number)};
    if (path.ends_with(".jsonl")) {
      prompt.text = prompt_of_line(path, number, line);
      if (names_media(line))
        prompt.media = read_media_of_row(line, path, config.media_root, prompt.where);
    }
    prompts.push_back(std::move(prompt));
  }
  MEGATRON_CHECK(!prompts.empty(), path, " holds no prompts");
  return prompts;
}

const char* name_of(FinishReason reason) {
  switch (reason) {
    case FinishReason::kLength:
      return "length";
    case FinishReason::kStopText:
      return "stop";
    case FinishReason::kEndToken:
      return "end_of_document";
    default:
      return "";
  }
}

void write_generation(const Generation& result, JsonWriter& json) {
  json.member("text", result.text).member("finish_reason", name_of(result.finish_reason));
  json.key("tokens").begin_array();
  for (const int32_t token : result.tokens) json.value(token);
  json.end_array();
}

void print_json(const std::vector<Prompt>& prompts, const std::vector<Generation>& results) {
  JsonWriter json(2);
  json.begin_array();
  for (size_t i = 0; i < results.size(); ++i) {
    json.begin_object().member("prompt", prompts[i].text);
    write_generation(results[i], json);
    json.end_object();
  }
  json.end_array();
  print_line(json.text());
}

// `continues`: the texts go on where the prompts end.
void print_text(const std::vector<Prompt>& prompts, const std::vector<Generation>& results,
                bool continues) {
  for (size_t i = 0; i < results.size(); ++i) {
    if (i > 0) print_line("---");
    print_line((continues ? prompts[i].text : "") + results[i].text);
  }
}

void print_now(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

// -- conversations

struct Asked {
  Conversation conversation;
  MultimodalRow row;  // the same, with its media
  std::string where;  // for errors
};

void add_message(Asked& asked, std::string_view role, std::string_view text,
                 std::vector<RowMedium> media = {}) {
  using Json = nlohmann::ordered_json;
  RowMessage message{Json{{"role", role}}.dump(), role == "assistant", {}};
  Json content = Json::array();
  for (RowMedium& medium : media) {
    const bool image = medium.kind == MediaKind::kImage;
    content.push_back({{"type", image ? "image" : "audio"}, {"path", medium.path}});
    message.parts.push_back({{}, std::ssize(asked.row.media)});
    asked.row.media.push_back(std::move(medium));
  }
  content.push_back({{"type", "text"}, {"text", text}});
  message.parts.push_back({std::string(text), -1});
  asked.conversation.messages.push_back(media.empty()
                                            ? chat_message(role, text)
                                            : Json{{"role", role}, {"content", content}}.dump(
                                                  -1, ' ', false, Json::error_handler_t::replace));
  asked.conversation.is_assistant.push_back(message.is_assistant);
  asked.row.messages.push_back(std::move(message));
}

// A conversation with no message except --system.
Asked start_conversation(const GenerateConfig& config, std::string where) {
  Asked asked;
  asked.where = std::move(where);
  if (!config.system.empty()) add_message(asked, "system", config.system);
  return asked;
}

// The conversation of a line behind --system. With `media` it has a row, too.
Asked read_conversation(const GenerateConfig& config, const std::string& line,
                        const std::string& where, bool media) {
  Asked asked = start_conversation(config, where);
  Conversation given = parse_conversation(line, where);
  Conversation& all = asked.conversation;
  MEGATRON_CHECK(config.system.empty() || given.messages.empty() ||
                     nlohmann::json::parse(given.messages[0])["role"] != "system",
                 where, ": has a system message of its own\nhint: leave out --system");
  given.messages.insert(given.messages.begin(), all.messages.begin(), all.messages.end());
  given.is_assistant.insert(given.is_assistant.begin(), all.is_assistant.begin(),
                            all.is_assistant.end());
  all = std::move(given);
  if (!media) return asked;
  MultimodalRow row = read_row_with_media(line, config.prompts_file, config.media_root, where);
  row.messages.insert(row.messages.begin(), asked.row.messages.begin(), asked.row.messages.end());
  asked.row = std::move(row);
  return asked;
}

// `rows`: they have rows even if no line names a medium.
std::vector<Asked> read_conversations(const GenerateConfig& config, bool rows = false) {
  std::vector<Asked> asked;
  for (size_t i = 0; i < config.prompt.size(); ++i) {
    asked.push_back(start_conversation(config, cat("--prompt ", i + 1)));
    add_message(asked.back(), "user", config.prompt[i], config.images.read());
  }
  if (config.prompts_file.empty()) return asked;
  const std::string text = read_file(input_path(config.prompts_file));
  std::vector<std::pair<std::string, std::string>> lines;
  size_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = std::string_view(text).substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    lines.emplace_back(line, cat(config.prompts_file, ":", number));
  }
  const bool media =
      rows || std::ranges::any_of(lines, [](const auto& l) { return names_media(l.first); });
  for (const auto& [line, where] : lines)
    asked.push_back(read_conversation(config, line, where, media));
  MEGATRON_CHECK(!asked.empty(), config.prompts_file, " holds no conversations");
  return asked;
}

bool has_media(const Asked& asked) { return !asked.row.media.empty(); }

// A reply and its conversation.
struct Answer {
  std::vector<std::string> messages;  // including the reply
  std::string prompt;
  Generation generation;
};

void print_answers(const std::vector<Answer>& answers) {
  JsonWriter json(2);
  json.begin_array();
  for (const Answer& answer : answers) {
    nlohmann::ordered_json messages = nlohmann::ordered_json::array();
    for (const std::string& message : answer.messages)
      messages.push_back(nlohmann::ordered_json::parse(message));
    json.begin_object().key("messages").raw(messages.dump());
    json.member("prompt", answer.prompt).key("prompt_tokens").begin_array();
    for (const int32_t token : answer.generation.prompt_tokens) json.value(token);
    json.end_array();
    write_generation(answer.generation, json);
    json.end_object();
  }
  json.end_array();
  print_line(json.text());
}

// Prompts with media for the loaded model, opened when the first medium is there.
class LazyImagePrompts {
 public:
  LazyImagePrompts(const GenerateConfig& config, LoadedModel& loaded)
      : config_(config), loaded_(loaded) {}

  // Whether the model reads media, and it is said how: then its template may take parts alone.
  bool available() const {
    if (!reads_media(loaded_.config, MediaKind::kImage) &&
        !reads_media(loaded_.config, MediaKind::kSound))
      return false;
    return has_media_folders(config_.images, loaded_);
  }

  const ImagePrompts& get() {
    if (!prompts_)
      prompts_.emplace(*loaded_.model, *loaded_.tokenizer, media_folders(config_.images, loaded_),
                       config_.chat_template, config_.escape_modality_text);
    return *prompts_;
  }

 private:
  const GenerateConfig& config_;
  LoadedModel& loaded_;
  std::optional<ImagePrompts> prompts_;
};

class ChatRun {
 public:
  ChatRun(const GenerateConfig& config, LoadedModel& loaded, GenerateOptions options)
      : config_(config),
        loaded_(loaded),
        chat_(*loaded.tokenizer,
              config.images.media_model.empty() ? loaded.chat_templates
                                                : TemplateSource(config.images.media_model),
              config.chat_template, loaded.end_of_text),
        options_(std::move(options)),
        images_(config, loaded) {
    options_.stop_tokens = chat_.stop_tokens();
    options_.skip_special_tokens = options_.rendered = true;
  }

  bool takes_media() const { return images_.available(); }

  // Answers all conversations in one batch.
  void answer_all(std::vector<Asked> asked) {
    const bool stream = asked.size() == 1 && !config_.json;
    std::vector<Answer> answers = run(asked, stream);
    for (size_t i = 0; i < answers.size(); ++i) {
      if (!config_.json && !stream)
        print_line(cat(i > 0 ? "---\n" : "", answers[i].generation.text));
      answers_.push_back(std::move(answers[i]));
    }
    if (config_.json) print_answers(answers_);
  }

  // One conversation; each line of standard input is a message, or names a medium of the next one.
  void converse() {
    constexpr std::pair<std::string_view, MediaKind> kLines[] = {{"/image ", MediaKind::kImage},
                                                                 {"/audio ", MediaKind::kSound}};
    const bool terminal = isatty(STDIN_FILENO) != 0;
    Asked asked = start_conversation(config_, "");
    std::vector<RowMedium> media = config_.images.read();
    std::string line;
    for (size_t turn = 1;
         terminal && !config_.json ? print_now("> ") : void(), std::getline(std::cin, line);) {
      if (line.ends_with('\r')) line.pop_back();
      if (line.empty()) continue;
      const auto* medium = std::ranges::find_if(kLines, [&](const auto& row) {
        return line.starts_with(row.first) && reads_media(loaded_.config, row.second);
      });
      if (medium != std::end(kLines)) {
        media.push_back(read_files(medium->second, {line.substr(medium->first.size())}).front());
        continue;
      }
      asked.where = cat("turn ", turn++);
      add_message(asked, "user", line, std::exchange(media, {}));
      Answer answer = std::move(run({&asked, 1}, !config_.json).front());
      add_message(asked, "assistant", answer.generation.text);
      answers_.push_back(std::move(answer));
    }
    if (terminal && !config_.json) print_line("");
    if (config_.json) print_answers(answers_);
  }

 private:
  std::vector<Answer> run(std::span<const Asked> asked, bool stream) {
    const bool media = std::ranges::any_of(asked, has_media) || images_.available();
    std::vector<std::string> texts;
    std::vector<Generation> starts;
    for (const Asked& one : asked) {
      if (!media) {
        texts.push_back(
            chat_.prompt(with_hidden_tokens(*loaded_.tokenizer, one.conversation), one.where));
        continue;
      }
      const ImagePrompt prompt = images_.get().of_conversation(one.row, chat_, one.where);
      texts.push_back(prompt.text);
      starts.push_back(images_.get().start(prompt, options_.tokens_to_generate, one.where));
    }
    const StreamCallback print = [](size_t, std::string_view piece) { print_now(piece); };
    const StreamCallback pieces = stream ? print : StreamCallback();
    Model& model = *loaded_.model;
    std::vector<Generation> results =
        media ? megatron::generate(model, *loaded_.tokenizer, std::move(starts), options_, pieces)
              : megatron::generate(model, *loaded_.tokenizer, texts, options_, pieces);
    if (stream) print_line("");
    std::vector<Answer> answers;
    for (size_t i = 0; i < results.size(); ++i) {
      std::vector<std::string> messages = asked[i].conversation.messages;
      messages.push_back(chat_message("assistant", results[i].text));
      answers.push_back({std::move(messages), texts[i], std::move(results[i])});
    }
    return answers;
  }

  const GenerateConfig& config_;
  LoadedModel& loaded_;
  const Chat chat_;
  GenerateOptions options_;
  LazyImagePrompts images_;
  std::vector<Answer> answers_;
};

// Continues texts.
std::vector<Generation> continue_prompts(const GenerateConfig& config, LoadedModel& loaded,
                                         const std::vector<Prompt>& prompts,
                                         const GenerateOptions& options, const FindNeighbors& find,
                                         const StreamCallback& pieces) {
  Model& model = *loaded.model;
  const Tokenizer& tokenizer = *loaded.tokenizer;
  if (std::ranges::any_of(prompts, [](const Prompt& prompt) { return !prompt.media.empty(); })) {
    LazyImagePrompts images(config, loaded);
    std::vector<Generation> starts;
    for (const Prompt& prompt : prompts) {
      MultimodalRow row;
      row.caption = prompt.text;
      row.media = prompt.media;
      starts.push_back(images.get().start(images.get().of_text(row, prompt.where),
                                          options.tokens_to_generate, prompt.where));
    }
    return generate(model, tokenizer, std::move(starts), options, pieces);
  }
  std::vector<std::string> texts;
  for (const Prompt& prompt : prompts) texts.push_back(prompt.text);
  return loaded.config.type == "retro"
             ? generate_with_neighbors(model, tokenizer, texts, options, find, pieces)
             : generate(model, tokenizer, texts, options, pieces);
}

}  // namespace

extern "C" int megatron_generate(int argc, char** argv) {
  LoadModelConfig load;
  GenerateConfig config;
  GenerateOptions options;
  NeighborLookupConfig lookup;
  Config* const configs[] = {
      &load, &config, &options.sampling, &options.states, &options.speculation, &lookup};
  if (!parse_or_help("megatron generate DIR [--chat] --prompt TEXT [flags]", configs, argc, argv,
                     {.positional = "load"}))
    return 0;
  std::vector<Asked> conversations;
  std::vector<Prompt> prompts;
  if (config.chat)
    conversations = read_conversations(config);
  else
    prompts = read_prompts(config);
  if (load.batch_invariant_mode) options.states.check_batch_invariant();
  const ParallelGroups groups;
  const std::unique_ptr<LoadedDraft> draft =
      load_draft(load_model_request(load), options.speculation);
  if (draft) options.draft = draft->loaded().model.get();
  std::vector<MediaKind> kinds;
  const auto note = [&](const std::vector<RowMedium>& media) {
    std::ranges::copy(kinds_of(media), std::back_inserter(kinds));
  };
  if (config.chat && conversations.empty()) note(config.images.read());
  for (const Asked& one : conversations) note(one.row.media);
  for (const Prompt& one : prompts) note(one.media);
  load.accept = [&, drafts = accepts_drafts(options.speculation, draft.get())](
                    const ModelConfig& model, const Tokenizer* tokenizer) {
    check_reads(kinds, model, load.load);
    drafts(model, tokenizer);
  };
  LoadedModel loaded = load_model(load, groups);
  const bool retrieves = loaded.config.type == "retro";
  FindNeighbors find;
  if (retrieves || lookup.given()) find = open_neighbors(lookup, loaded, load.device);
  MEGATRON_CHECK(!retrieves || !config.chat,
                 "--chat is not built for a model with retrieval\nhint: --prompt");
  options.tokens_to_generate = config.tokens_to_generate;
  options.stop = config.stop;
  options.stop_at_eod = !config.ignore_eod;
  options.decoder_start = loaded.decoder_start;
  if (!loaded.end_of_text.empty()) options.end_of_input = loaded.end_of_text.front();
  if (config.chat) {
    ChatRun run(config, loaded, options);
    if (run.takes_media() && std::ranges::none_of(conversations, has_media))
      conversations = read_conversations(config, /*rows=*/true);
    if (conversations.empty())
      run.converse();
    else
      run.answer_all(std::move(conversations));
    return 0;
  }

  const bool continues = loaded.model->sequence_input() != SequenceInputUse::kRequired,
             stream = prompts.size() == 1 && !config.json;
  bool started = false;  // nothing is printed for a rejected prompt
  const StreamCallback print = [&](size_t, std::string_view piece) {
    if (!std::exchange(started, true) && continues) print_now(prompts[0].text);
    print_now(piece);
  };
  const StreamCallback pieces = stream ? print : StreamCallback();
  const std::vector<Generation> results =
      continue_prompts(config, loaded, prompts, options, find, pieces);
  if (stream)
    print_line(started || !continues ? "" : prompts[0].text);
  else if (config.json)
    print_json(prompts, results);
  else
    print_text(prompts, results, continues);
  return 0;
}

}  // namespace megatron
