#include "tools/commands/evaluate_questions.h"

#include <algorithm>
#include <memory>
#include <span>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/inference/images/image_prompts.h"
#include "megatron/models/mimo/mimo_config.h"
#include "tools/support/image_input.h"

namespace megatron {
namespace {

// Questions whose images are in memory at one time.
constexpr size_t kTogether = 32;

class Questions {
 public:
  Questions(const QuestionConfig& config, LoadedModel& model, const QuestionTask& task)
      : format_(config.format()),
        model_(model),
        task_(task),
        images_(*model.model, *model.tokenizer, folders_of(config, model), config.chat_template,
                config.escape_modality_text) {
    if (!config.plain_prompts)
      chat_ = std::make_unique<const Chat>(
          *model.tokenizer,
          config.media_model.empty() ? model.chat_templates : TemplateSource(config.media_model),
          config.chat_template, model.end_of_text);
  }

  AskedQuestions answered(int64_t answer_tokens, const ScoringProgress& progress) {
    GenerateOptions options;
    options.sampling.greedy = true;
    options.tokens_to_generate = answer_tokens;
    options.skip_special_tokens = true;
    if (chat_)
      options.stop_tokens = chat_->stop_tokens();
    else
      options.stop = {"\n"};
    AskedQuestions out;
    std::vector<double> scores;
    for (const std::span<const Question> some : parts()) {
      std::vector<Generation> starts;
      std::vector<std::string> prompts;
      for (const Question& question : some) {
        const ImagePrompt prompt = prompt_of(question);
        prompts.push_back(prompt.text);
        starts.push_back(images_.start(prompt, answer_tokens, question.sample.name));
      }
      const std::vector<Generation> answers =
          generate(*model_.model, *model_.tokenizer, std::move(starts), options);
      for (size_t i = 0; i < some.size(); ++i) {
        scores.push_back(answer_score(task_, some[i], answers[i].text));
        out.samples.push_back(line_of_answer(some[i], prompts[i], answers[i].text, scores.back()));
      }
      if (progress) progress(some.size());
    }
    out.result = evaluate_answers(task_, scores);
    return out;
  }

  AskedQuestions chosen(const ParallelGroups& groups, int64_t batch_tokens,
                        const ScoringProgress& progress) {
    EvaluationRequests requests;
    std::vector<std::string> prompts;
    std::vector<Score> scores;
    ScoringOptions options;
    options.batch_tokens = batch_tokens;
    const MimoConfig& own_config = *model_.config.own.as<MimoConfig>();
    if (own_config.sees()) options.other_ids.push_back(own_config.image_token_id);
    if (own_config.hears()) options.other_ids.push_back(own_config.audio_token_id);
    options.add_columns = [&](std::span<const std::span<const int32_t>> rows, int64_t question,
                              Batch& batch) {
      const PromptMedia& own = read_[static_cast<size_t>(question)];
      const int64_t count = std::ssize(rows), length = batch["tokens"].size(1);
      if (own.images != nullptr)
        batch.images = std::make_shared<const PackedImages>(own.images->of_rows(count, length));
      if (own.sounds != nullptr)
        batch.sounds = std::make_shared<const PackedSounds>(own.sounds->of_rows(count, length));
    };
    for (const std::span<const Question> some : parts()) {
      const size_t before = requests.requests.size();
      read_.clear();
      for (const Question& question : some) prompts.push_back(add_requests(question, requests));
      const std::vector<Score> own =
          score(*model_.model, groups, std::span(requests.requests).subspan(before), options);
      scores.insert(scores.end(), own.begin(), own.end());
      if (progress) progress(some.size());
    }
    requests.first.push_back(requests.requests.size());
    const EvaluationTask task = task_of_choices(task_, format_);
    AskedQuestions out;
    out.result = evaluate(task, requests, scores);
    for (size_t i = 0; i < task.examples.size(); ++i)
      out.samples.push_back(line_of_choices(task.examples[i], prompts[i], requests, i, scores));
    return out;
  }

 private:
  std::vector<std::span<const Question>> parts() const {
    std::vector<std::span<const Question>> out;
    for (std::span<const Question> rest = task_.questions; !rest.empty();) {
      out.push_back(rest.first(std::min(kTogether, rest.size())));
      rest = rest.subspan(out.back().size());
    }
    return out;
  }

  static MediaFolders folders_of(const QuestionConfig& config, const LoadedModel& model) {
    ImageConfig images;
    images.media_model = config.media_model;
    images.audio_media_model = config.audio_media_model;
    return media_folders(images, model);
  }

  ImagePrompt prompt_of(const Question& question) const {
    const std::string& where = question.sample.name;
    MultimodalRow row = row_with_bytes(question.sample);
    if (row.messages.empty()) {
      const std::string text = question_text(question, format_);
      if (!chat_) {
        row.caption = text;
        return images_.of_text(row, where);
      }
      RowMessage message{R"({"role": "user"})", false, {}};
      for (int64_t i = 0; i < std::ssize(row.media); ++i) message.parts.push_back({{}, i});
      message.parts.push_back({text, -1});
      row.messages.push_back(std::move(message));
    }
    MEGATRON_CHECK(chat_ != nullptr, where,
                   ": has messages, which need a chat template\nhint: leave out --plain-prompts");
    return images_.of_conversation(row, *chat_, where);
  }

  // One request for each choice; the group of requests is the question's number in read_. Returns
  // the prompt.
  std::string add_requests(const Question& question, EvaluationRequests& out) {
    const ImagePrompt prompt = prompt_of(question);
    const int64_t group = std::ssize(read_), most = model_.config.transformer.seq_length;
    read_.push_back(prompt.media);
    out.first.push_back(out.requests.size());
    int64_t tokens = 0;
    for (const std::string& choice : scored_choices(question, format_)) {
      std::vector<int32_t> ids = prompt.ids;
      model_.tokenizer->encode_append((chat_ ? "" : " ") + choice, ids);
      const int64_t scored = std::ssize(ids) - std::ssize(prompt.ids);
      MEGATRON_CHECK(scored > 0, question.sample.name, ": the choice ", choice, " has no tokens");
      MEGATRON_CHECK(std::ssize(ids) <= most + 1, question.sample.name, " has ", std::ssize(ids),
                     " tokens with a choice, ", prompt.media_tokens, " of them of ", prompt.kinds(),
                     ", beyond the model's context of ", most);
      tokens += scored;
      out.texts.push_back(std::move(ids));
      out.requests.push_back({out.texts.back(), scored, group});
    }
    out.tokens.push_back(tokens);
    return prompt.text;
  }

  std::string line_of_answer(const Question& question, const std::string& prompt,
                             const std::string& answer, double score) const {
    JsonWriter json;
    json.begin_object().member("task", task_.name).member("where", question.sample.name);
    json.member("prompt", prompt).member("answer", answer).key("right").begin_array();
    for (const std::string& right : question.answers) json.value(right);
    return json.end_array().member("score", score).end_object().text();
  }

  std::string line_of_choices(const EvaluationExample& example, const std::string& prompt,
                              const EvaluationRequests& requests, size_t i,
                              std::span<const Score> scores) const {
    const auto own = scores.subspan(requests.first[i], example.choices.size());
    JsonWriter json;
    json.begin_object().member("task", task_.name).member("where", example.where);
    json.member("prompt", prompt).key("choices").begin_array();
    for (size_t c = 0; c < own.size(); ++c)
      json.begin_object()
          .member("text", example.choices[c])
          .member("logprob", own[c].logprob)
          .end_object();
    json.end_array().member("gold", example.gold);
    return json.member("chosen", most_likely_choice(own)).end_object().text();
  }

  const std::string format_;
  LoadedModel& model_;
  const QuestionTask& task_;
  const ImagePrompts images_;
  std::unique_ptr<const Chat> chat_;  // null: plain prompts
  std::vector<PromptMedia> read_;     // of questions that are scored together
};

}  // namespace

void QuestionConfig::fields(FieldVisitor& v) {
  v.group("evaluate: questions with images or sounds");
  v.field("media_root", media_root,
          "folder of the media that questions name; empty: the folder of their file");
  v.field("media_model", media_model,
          "folder of a Hugging Face model, whose config.json and image processor say what media "
          "become; empty: the model's own folder");
  v.field("audio_media_model", audio_media_model, kAudioMediaModelHelp);
  v.field("question_format", question_format,
          "what is asked: {question} stands for the question, {choices} for the choices behind "
          "letters, which are scored then; empty: {question}");
  v.field("chat_template", chat_template,
          "file with a chat template, or the template itself; empty: the tokenizer's");
  v.field("plain_prompts", plain_prompts,
          "no chat template: media, the text, and the answer behind it up to the end of the line");
  v.field("escape_modality_text", escape_modality_text,
          "encode spellings of special tokens in questions as ordinary text; without it they are "
          "errors");
  v.field("answer_tokens", answer_tokens, "tokens of an answer, at most");
}

void QuestionConfig::validate(Violations& v) const {
  v.require(answer_tokens > 0, cat("--answer-tokens is ", answer_tokens), "a positive number");
  v.require(question_format.empty() || question_format.find("{question}") != std::string::npos,
            "--question-format without {question}", "for example $'{question}\\nAnswer briefly.'");
  v.require(!plain_prompts || chat_template.empty(),
            "--chat-template has no effect with --plain-prompts");
}

AskedQuestions ask_questions(const QuestionConfig& config, LoadedModel& model,
                             const ParallelGroups& groups, const QuestionTask& task,
                             int64_t batch_tokens, const ScoringProgress& progress) {
  Questions questions(config, model, task);
  if (task.has_choices()) return questions.chosen(groups, batch_tokens, progress);
  MEGATRON_CHECK(groups.world.size() == 1, task.name,
                 ": answers are written by one rank\nhint: leave out torchrun; tasks of choices ",
                 "are shared by all ranks");
  return questions.answered(config.answer_tokens, progress);
}

}  // namespace megatron
