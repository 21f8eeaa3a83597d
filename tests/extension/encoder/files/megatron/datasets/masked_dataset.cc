#include "megatron/datasets/masked_dataset.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/datasets/sampler.h"

namespace megatron {
namespace {

Columns masked_columns(int64_t s) {
  MEGATRON_CHECK(s >= 5, "two halves and three special tokens need --seq-length 5 or more, got ",
                 s);
  return Columns(
      {{.name = "tokens", .shape = {s}},
       {.name = "types", .shape = {s}},
       {.name = "labels", .shape = {s}},
       {.name = "loss_mask", .type = ElementType::kFloat32, .shape = {s}, .is_loss_weight = true},
       {.name = "is_random", .shape = {1}, .split = false},
       {.name = "num_masked",
        .type = ElementType::kFloat32,
        .shape = {1},
        .split = false,
        .is_loss_weight = true}});
}

}  // namespace

MaskedDataset::MaskedDataset(Windows windows, std::string name, std::optional<int64_t> num_samples,
                             const MaskedDatasetConfig& config)
    : Dataset(masked_columns(config.sequence_length)),
      windows_(std::move(windows)),
      name_(std::move(name)),
      config_(config) {
  MEGATRON_CHECK(windows_.count > 0, name_, " holds no sequence of ", config.window(), " tokens");
  const int64_t count = num_samples.value_or(windows_.count);
  for (int64_t epoch = 0; size() < count; ++epoch)
    for (const int64_t window :
         torch_randperm(windows_.count, static_cast<uint64_t>(config.seed + epoch)))
      if (size() < count) order_.push_back(window);
}

void MaskedDataset::read(int64_t index, const SampleSpans& out,
                         std::vector<int32_t>& document_starts) const {
  MEGATRON_CHECK(index >= 0 && index < size(), "there is no sample ", index, " of ", size());
  const auto tokens = out.get<int64_t>("tokens"), types = out.get<int64_t>("types"),
             labels = out.get<int64_t>("labels");
  const auto loss_mask = out.get<float>("loss_mask");
  std::vector<int64_t> text = windows_.read(order_[static_cast<size_t>(index)]);
  std::mt19937_64 draw(static_cast<uint64_t>(config_.seed + index));

  auto pivot = static_cast<int64_t>(1 + draw() % (text.size() - 1));
  const bool swapped = draw() % 2 == 1;
  if (swapped) {
    std::rotate(text.begin(), text.begin() + pivot, text.end());
    pivot = static_cast<int64_t>(text.size()) - pivot;
  }
  tokens.front() = config_.cls;
  auto end = std::copy(text.begin(), text.begin() + pivot, tokens.begin() + 1);
  *end++ = config_.sep;
  std::copy(text.begin() + pivot, text.end(), end);
  tokens.back() = config_.sep;
  for (size_t i = 0; i < types.size(); ++i) types[i] = i > static_cast<size_t>(pivot) + 1;

  std::ranges::fill(labels, -1);
  std::ranges::fill(loss_mask, 0.0F);
  std::vector<size_t> places;
  for (size_t i = 1; i + 1 < tokens.size(); ++i)
    if (i != static_cast<size_t>(pivot) + 1) places.push_back(i);
  for (size_t i = places.size(); i > 1; --i) std::swap(places[i - 1], places[draw() % i]);
  const auto chosen = std::clamp<size_t>(
      static_cast<size_t>(std::lround(static_cast<double>(tokens.size()) * config_.mask_prob)), 1,
      places.size());
  for (const size_t i : std::span(places).first(chosen)) {
    labels[i] = tokens[i];
    loss_mask[i] = 1.0F;
    const uint64_t what = draw() % 10;
    if (what < 8)
      tokens[i] = config_.mask;
    else if (what == 8)
      tokens[i] = static_cast<int64_t>(draw() % static_cast<uint64_t>(config_.vocab_size));
  }
  out.get<int64_t>("is_random")[0] = swapped ? 1 : 0;
  out.get<float>("num_masked")[0] = static_cast<float>(chosen);
  document_starts.assign(1, 0);
}

std::string MaskedDataset::description() const {
  JsonWriter json;
  json.begin_object().member("class", "MaskedDataset").key("source").raw(name_);
  json.member("windows", windows_.count).member("num_samples", size());
  json.member("sequence_length", config_.sequence_length).member("seed", config_.seed);
  json.member("mask_prob", config_.mask_prob).member("vocab_size", config_.vocab_size);
  json.member("cls", config_.cls).member("sep", config_.sep).member("mask", config_.mask);
  json.end_object();
  return json.text();
}

Windows windows_of(const std::shared_ptr<const IndexedDataset>& file, int64_t first, int64_t last,
                   const MaskedDatasetConfig& config) {
  MEGATRON_CHECK(first >= 0 && first <= last && last <= file->num_sequences(), "sequences ", first,
                 " to ", last, " of ", file->num_sequences());
  const int64_t length = config.window();
  std::vector<std::pair<int64_t, int64_t>> places;  // sequence, first token
  for (int64_t k = first; k < last; ++k)
    for (int64_t i = 0; i + length <= file->sequence_lengths()[static_cast<size_t>(k)]; i += length)
      places.emplace_back(k, i);
  const auto count = static_cast<int64_t>(places.size());
  return {count, [file, length, places = std::move(places)](int64_t window) {
            const auto [sequence, begin] = places[static_cast<size_t>(window)];
            std::vector<int64_t> tokens(static_cast<size_t>(length));
            file->read(sequence, begin, tokens);
            return tokens;
          }};
}

Windows mock_windows(const MaskedDatasetConfig& config) {
  const int64_t words = config.vocab_size - 3;  // without the special ids
  MEGATRON_CHECK(words >= 2, "--mock-data needs a vocabulary of at least 5 tokens, got ",
                 config.vocab_size);
  return {words, [=](int64_t window) {
            std::vector<int64_t> tokens(static_cast<size_t>(config.window()));
            std::iota(tokens.begin(), tokens.end(), window);
            for (int64_t& token : tokens) token %= words;
            return tokens;
          }};
}

}  // namespace megatron
