#include "megatron/datasets/answer_dataset.h"

#include <algorithm>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/datasets/sampler.h"

namespace megatron {
namespace {

int64_t answer_length(int64_t sequence_length) { return sequence_length / 2; }

Columns answer_columns(int64_t s) {
  const int64_t a = answer_length(s);
  MEGATRON_CHECK(a > 0, "answers need sequences of at least 2 tokens, got ", s);
  // Each context-parallel rank picks the answers of its own positions.
  return Columns({{.name = "tokens", .shape = {s}},
                  {.name = "answer", .shape = {a}, .split = false},
                  {.name = "answer_weight",
                   .type = ElementType::kFloat32,
                   .shape = {a},
                   .split = false,
                   .is_loss_weight = true}});
}

}  // namespace

int64_t first_answer(int64_t sequence_length) {
  return sequence_length - answer_length(sequence_length);
}

AnswerDataset::AnswerDataset(Source source, std::string name, int64_t num_pairs,
                             int64_t num_samples, const AnswerDatasetConfig& config)
    : Dataset(answer_columns(config.sequence_length)),
      source_(std::move(source)),
      name_(std::move(name)),
      num_pairs_(num_pairs),
      config_(config) {
  MEGATRON_CHECK(num_pairs > 0, name_, " holds no questions");
  for (int64_t epoch = 0; size() < num_samples; ++epoch)
    for (const int64_t pair : torch_randperm(num_pairs, static_cast<uint64_t>(config.seed + epoch)))
      if (size() < num_samples) order_.push_back(pair);
}

void AnswerDataset::read(int64_t index, const SampleSpans& out,
                         std::vector<int32_t>& document_starts) const {
  MEGATRON_CHECK(index >= 0 && index < size(), "there is no sample ", index, " of ", size());
  const QuestionAndAnswer pair = source_(order_[static_cast<size_t>(index)]);
  const std::span<int64_t> tokens = out.get<int64_t>("tokens"), answer = out.get<int64_t>("answer");
  const std::span<float> weight = out.get<float>("answer_weight");
  std::ranges::fill(tokens, config_.pad);
  std::ranges::fill(answer, config_.pad);
  std::ranges::fill(weight, 0.0F);
  const auto room = static_cast<size_t>(first_answer(config_.sequence_length)) + 1;
  const size_t asked = std::min(pair.question.size(), room),
               answered = std::min(pair.answer.size(), answer.size());
  std::copy(pair.question.end() - static_cast<std::ptrdiff_t>(asked), pair.question.end(),
            tokens.begin() + static_cast<std::ptrdiff_t>(room - asked));
  for (size_t k = 0; k < answered; ++k) {
    answer[k] = pair.answer[k];
    weight[k] = 1.0F / static_cast<float>(answered);
    if (k + 1 < answered) tokens[room + k] = pair.answer[k];
  }
  document_starts.assign(1, 0);
}

std::string AnswerDataset::description() const {
  JsonWriter json;
  json.begin_object().member("class", "AnswerDataset").key("source").raw(name_);
  json.member("pairs", num_pairs_).member("num_samples", size());
  json.member("sequence_length", config_.sequence_length).member("seed", config_.seed);
  json.member("pad", config_.pad).end_object();
  return json.text();
}

AnswerDataset::Source answers_of(std::shared_ptr<const IndexedDataset> file, int64_t first,
                                 int64_t last) {
  MEGATRON_CHECK(first >= 0 && first <= last && last <= file->num_documents(), "documents ", first,
                 " to ", last, " of ", file->num_documents());
  return [file = std::move(file), first](int64_t pair) {
    const std::span<const int64_t> borders = file->document_indices();
    const auto document = static_cast<size_t>(first + pair);
    const int64_t sequence = borders[document];
    MEGATRON_CHECK(borders[document + 1] - sequence == 2, file->prefix(), ": document ", document,
                   " has ", borders[document + 1] - sequence,
                   " sequences, expected a question and an answer");
    QuestionAndAnswer read = {file->read(sequence), file->read(sequence + 1)};
    MEGATRON_CHECK(!read.question.empty() && !read.answer.empty(), file->prefix(), ": document ",
                   document, " has an empty question or answer");
    return read;
  };
}

AnswerDataset::Source mock_answers(int64_t seed, int64_t vocab_size, int64_t sequence_length) {
  return [=](int64_t pair) {
    const auto draw = [&](int64_t purpose, int64_t below) {
      return torch_randperm(below, static_cast<uint64_t>((seed * 31 + purpose) * 1009 + pair))[0];
    };
    const auto below = static_cast<uint64_t>(vocab_size);
    QuestionAndAnswer made;
    const int64_t asked = 1 + draw(0, sequence_length), answered = 1 + draw(1, sequence_length / 2);
    const auto start = static_cast<uint64_t>(draw(2, vocab_size));
    for (int64_t i = 0; i < asked; ++i)
      made.question.push_back(static_cast<int64_t>((start + static_cast<uint64_t>(i * i)) % below));
    for (int64_t i = 0; i < answered; ++i)
      made.answer.push_back((made.question[static_cast<size_t>(i % asked)] + 1) % vocab_size);
    return made;
  };
}

}  // namespace megatron
