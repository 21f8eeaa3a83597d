#include "megatron/datasets/reading_summary.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/datasets/blended_dataset.h"
#include "megatron/datasets/gpt/gpt_dataset.h"

namespace megatron {

namespace {

std::string grouped(int64_t count) { return format_count(static_cast<uint64_t>(count)); }

// For a dataset that holds whole epochs.
std::string epochs_text(const GPTDataset& data, int64_t num_samples) {
  const double epoch = static_cast<double>(data.size()) / static_cast<double>(data.num_epochs());
  return format_text(", %.2f epochs", static_cast<double>(num_samples) / std::max(1.0, epoch));
}

std::string epochs_text(const BlendedDataset& blend) {
  int64_t most = 0;
  for (const std::shared_ptr<const Dataset>& member : blend.members())
    if (const auto* data = dynamic_cast<const GPTDataset*>(member.get()))
      most = std::max(most, data->num_epochs());
  if (most == 0) return {};
  return cat(", of each member ",
             most == 1 ? "less than an epoch" : cat("at most ", most, " epochs"));
}

}  // namespace

std::string reading_summary(const Dataset& dataset, int64_t num_samples) {
  std::string text =
      cat("reads ", grouped(num_samples * dataset.sequence_length()), " tokens (",
          grouped(num_samples), " samples of ", grouped(dataset.sequence_length()), ")");
  if (const auto* data = dynamic_cast<const GPTDataset*>(&dataset))
    return text + epochs_text(*data, num_samples);
  if (const auto* blend = dynamic_cast<const BlendedDataset*>(&dataset))
    return text + epochs_text(*blend);
  return text;
}

}  // namespace megatron
