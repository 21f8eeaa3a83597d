#include "megatron/datasets/tuning/preference_dataset.h"

#include <algorithm>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/datasets/sampler.h"

namespace megatron {

PreferenceDataset::PreferenceDataset(std::shared_ptr<const std::vector<PreferencePair>> pairs,
                                     int64_t num_samples, PreferenceDatasetConfig config)
    : Dataset(gpt_columns(config.sequence_length)),
      pairs_(std::move(pairs)),
      in_order_(num_samples == 0),
      num_samples_(in_order_ ? 2 * static_cast<int64_t>(pairs_->size()) : num_samples),
      config_(std::move(config)) {
  MEGATRON_CHECK(!pairs_->empty(), "there are no pairs of responses");
  MEGATRON_CHECK(num_samples_ % 2 == 0, num_samples_, " samples are no whole number of pairs");
  const auto longest = static_cast<size_t>(config_.sequence_length) + 1;
  for (size_t i = 0; i < pairs_->size(); ++i) {
    const PreferencePair& pair = (*pairs_)[i];
    for (const std::vector<int32_t>* response : {&pair.chosen, &pair.rejected}) {
      MEGATRON_CHECK(!pair.prompt.empty() && !response->empty(), "pair ", i,
                     ": prompt and responses must have tokens");
      MEGATRON_CHECK(pair.prompt.size() + response->size() <= longest, "pair ", i,
                     ": prompt and "
                     "response have ",
                     pair.prompt.size() + response->size(), " tokens, samples of ",
                     config_.sequence_length, " have room for ", longest);
    }
  }
  const auto count = static_cast<int64_t>(pairs_->size());
  const int64_t needed = num_samples_ / 2;
  order_.reserve(static_cast<size_t>(needed));
  for (int64_t epoch = 0; static_cast<int64_t>(order_.size()) < needed; ++epoch) {
    std::vector<int64_t> permutation(static_cast<size_t>(count));
    if (in_order_) {
      for (int64_t i = 0; i < count; ++i) permutation[static_cast<size_t>(i)] = i;
    } else {
      permutation = torch_randperm(count, static_cast<uint64_t>(config_.seed + epoch));
    }
    for (const int64_t pair : permutation)
      if (static_cast<int64_t>(order_.size()) < needed)
        order_.push_back(static_cast<int32_t>(pair));
  }
}

void PreferenceDataset::read(int64_t index, const SampleSpans& sample,
                             std::vector<int32_t>& document_starts) const {
  const GPTSpans out(sample);
  MEGATRON_CHECK(index >= 0 && index < num_samples_, "there is no sample ", index, " of ",
                 num_samples_);
  const PreferencePair& pair =
      (*pairs_)[static_cast<size_t>(order_[static_cast<size_t>(index / 2)])];
  const std::vector<int32_t>& response = index % 2 == 0 ? pair.chosen : pair.rejected;
  const size_t length = pair.prompt.size() + response.size();
  const auto id = [&](size_t at) -> int64_t {
    if (at >= length) return config_.pad;
    return at < pair.prompt.size() ? pair.prompt[at] : response[at - pair.prompt.size()];
  };
  const auto s = static_cast<size_t>(config_.sequence_length);
  for (size_t i = 0; i < s; ++i) {
    out.tokens[i] = id(i);
    out.labels[i] = id(i + 1);
    out.position_ids[i] = static_cast<int64_t>(i);
    out.loss_mask[i] = i + 1 >= pair.prompt.size() && i + 1 < length ? 1.0F : 0.0F;
  }
  document_starts.assign(1, 0);
}

std::string PreferenceDataset::description() const {
  JsonWriter json;
  json.begin_object().member("class", "PreferenceDataset");
  json.member("pairs", static_cast<int64_t>(pairs_->size()));
  json.member("num_samples", num_samples_).member("in_order", in_order_);
  json.member("sequence_length", config_.sequence_length).member("seed", config_.seed);
  json.member("pad", config_.pad).member("source", config_.description);
  json.end_object();
  return json.text();
}

}  // namespace megatron
