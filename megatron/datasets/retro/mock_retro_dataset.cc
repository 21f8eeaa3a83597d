#include "megatron/datasets/retro/mock_retro_dataset.h"

#include <algorithm>

#include "megatron/base/json_writer.h"
#include "megatron/datasets/detail/numpy_random.h"
#include "megatron/datasets/retro/retro_dataset.h"

namespace megatron {

MockRetroDataset::MockRetroDataset(std::shared_ptr<const Dataset> samples, int64_t chunk_length,
                                   int64_t neighbors, const GPTDatasetConfig& config)
    : Dataset(retro_columns(samples->columns(), chunk_length, neighbors)),
      samples_(std::move(samples)),
      neighbors_(neighbors),
      vocab_size_(config.tokenizer.vocab_size),
      seed_(config.seed) {}

void MockRetroDataset::read(int64_t index, const SampleSpans& out,
                            std::vector<int32_t>& document_starts) const {
  samples_->read(index, out, document_starts);
  const auto tokens = out.get<int64_t>("neighbor_tokens");
  const auto mask = out.get<uint8_t>("neighbor_mask");
  NumpyRandom random(static_cast<uint32_t>(seed_ * 7919 + index));
  std::generate(tokens.begin(), tokens.end(), [&] { return random.randint(0, vocab_size_); });
  const auto k = static_cast<size_t>(neighbors_);
  for (size_t chunk = 0; chunk * k < mask.size(); ++chunk) {
    // of one chunk in eight none is there, of others all or the first ones
    const auto there = random.randint(0, 8) == 0 ? 0 : random.randint(1, neighbors_ + 1);
    for (size_t i = 0; i < k; ++i) mask[chunk * k + i] = static_cast<int64_t>(i) < there ? 1 : 0;
  }
}

std::string MockRetroDataset::description() const {
  JsonWriter json;
  json.begin_object().member("class", "MockRetroDataset");
  json.member("columns", columns().text()).member("vocab_size", vocab_size_);
  json.member("random_seed", seed_).key("samples").raw(samples_->description()).end_object();
  return json.text();
}

}  // namespace megatron
