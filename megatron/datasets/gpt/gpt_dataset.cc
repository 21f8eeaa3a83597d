#include "megatron/datasets/gpt/gpt_dataset.h"

#include <algorithm>
#include <limits>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/json_writer.h"
#include "megatron/datasets/gpt/sample_order.h"

namespace megatron {
std::string to_string(Split split) {
  static constexpr const char* kNames[] = {"train", "valid", "test"};
  return kNames[static_cast<int>(split)];
}

std::vector<std::filesystem::path> index_folders(const std::string& prefix,
                                                 const std::string& cache_path,
                                                 const std::string& own_folder) {
  std::vector<std::filesystem::path> folders;
  if (!cache_path.empty()) folders.emplace_back(cache_path);
  if (cache_path.empty()) folders.push_back(std::filesystem::path(prefix) / "cache" / own_folder);
  if (const std::filesystem::path user = cache_folder(); !user.empty())
    folders.push_back(user / "indices");
  return folders;
}

struct GPTDataset::Impl {
  std::shared_ptr<const IndexedDataset> data;
  int64_t first, last;
  Split split;
  std::optional<int64_t> num_samples;
  GPTDatasetConfig config;
  int64_t extra, pad;
  std::optional<SampleOrder> order;

  bool drop_last() const {
    return split != Split::kValid || config.drop_last_partial_validation_sequence;
  }
  void check_request();
  void make_order(const std::string& description);
  GPTIndexInputs index_inputs() const;
  // Reads the pieces into `out` and pads the rest.
  void read_pieces(std::span<const SequencePiece> pieces, std::span<int64_t> out) const;
  void document_starts(std::span<const SequencePiece> pieces, std::span<const int64_t> tokens,
                       std::vector<int32_t>& starts) const;
};

void GPTDataset::Impl::check_request() {
  MEGATRON_CHECK(config.sequence_length > 0, "sequence length is ", config.sequence_length,
                 ", expected at least 1");
  MEGATRON_CHECK(config.sequence_length < std::numeric_limits<int32_t>::max(),
                 "sequence length is ", config.sequence_length, ", expected less than 2^31");
  MEGATRON_CHECK(config.seed >= 0 && config.seed <= 0xffffffffLL, "--seed is ", config.seed,
                 ", the order of samples needs 0 to 4294967295");
  MEGATRON_ASSERT(first >= 0 && first <= last && last <= data->num_sequences());
  const bool needs_eod =
      config.reset_position_ids || config.reset_attention_mask || config.eod_mask_loss;
  MEGATRON_CHECK(!needs_eod || config.tokenizer.eod >= 0,
                 "the tokenizer has no end-of-document token, which --reset-position-ids, "
                 "--reset-attention-mask and "
                 "--eod-mask-loss need");
  const int64_t tokens = data->num_tokens(first, last);
  const int64_t needed = (drop_last() ? config.sequence_length : 1) + extra;
  MEGATRON_CHECK(tokens >= needed, data->prefix(), ": the ", to_string(split), " split holds ",
                 tokens, " tokens in ", last - first, " sequences, one sample needs ", needed,
                 "\nhint: give more data, a larger share of --split, or a smaller --seq-length");
}

GPTIndexInputs GPTDataset::Impl::index_inputs() const {
  GPTIndexInputs inputs;
  inputs.first = first;
  inputs.last = last;
  inputs.lengths = data->sequence_lengths();
  inputs.sequence_length = config.sequence_length;
  inputs.extra = extra;
  inputs.num_samples = num_samples;
  inputs.seed = static_cast<uint32_t>(config.seed);
  inputs.drop_last = drop_last();
  inputs.threads = config.threads;
  return inputs;
}

void GPTDataset::Impl::make_order(const std::string& description) {
  SampleOrderOptions options;
  options.data = data->prefix();
  options.name = "GPTDataset-" + to_string(split);
  options.description = description;
  options.use_cache = config.use_cache;
  if (options.use_cache) options.folder = index_folders(data->prefix(), config.cache_path).front();
  order.emplace(index_inputs(), options);
}

GPTDataset::GPTDataset(std::shared_ptr<const IndexedDataset> data, int64_t first, int64_t last,
                       Split split, std::optional<int64_t> num_samples,
                       const GPTDatasetConfig& config)
    : Dataset(gpt_columns(config.sequence_length, config.own_positions())),
      impl_(new Impl{.data = std::move(data),
                     .first = first,
                     .last = last,
                     .split = split,
                     .num_samples = num_samples,
                     .config = config,
                     .extra = config.add_extra_token ? 1 : 0}) {
  const TokenizerFacts& facts = config.tokenizer;
  const bool ambiguous = facts.pad == facts.eod || facts.pad == facts.bos;
  impl_->pad = ambiguous && !config.allow_ambiguous_pad_tokens ? -1 : facts.pad;
  impl_->check_request();
  impl_->make_order(description());
}

GPTDataset::~GPTDataset() = default;

int64_t GPTDataset::size() const { return impl_->order->size(); }
int64_t GPTDataset::num_epochs() const { return impl_->order->num_epochs(); }
const IndexedDataset& GPTDataset::data() const { return *impl_->data; }

std::vector<int64_t> GPTDataset::sequences(int64_t index) const {
  std::vector<int64_t> out;
  for (const SequencePiece& piece : impl_->order->pieces(index)) out.push_back(piece.sequence);
  return out;
}

std::string GPTDataset::description() const {
  const Impl& d = *impl_;
  JsonWriter json;
  json.begin_object().member("class", "GPTDataset");
  json.member("file", std::filesystem::path(d.data->prefix()).filename().string());
  json.member("index_hash", d.data->index_hash()).member("num_tokens", d.data->num_tokens());
  json.member("split", to_string(d.split))
      .member("first_sequence", d.first)
      .member("last_sequence", d.last);
  json.member("sequence_length", d.config.sequence_length).member("extra_token", d.extra);
  if (d.num_samples) json.member("num_samples", *d.num_samples);
  json.member("random_seed", d.config.seed).member("drop_last", d.drop_last()).end_object();
  return json.text();
}

void GPTDataset::Impl::read_pieces(std::span<const SequencePiece> pieces,
                                   std::span<int64_t> out) const {
  int64_t at = 0;
  for (const SequencePiece& piece : pieces) {
    const auto target = out.subspan(at, piece.count);
    data->read(piece.sequence, piece.offset, target);
    check_vocabulary(*data, piece.sequence, piece.offset, target, config.tokenizer.vocab_size);
    at += piece.count;
  }
  std::fill(out.begin() + at, out.end(), pad);
}

// Document starts (inter-document masking): after end-of-document tokens, and at the start of
// sequences.
void GPTDataset::Impl::document_starts(std::span<const SequencePiece> pieces,
                                       std::span<const int64_t> tokens,
                                       std::vector<int32_t>& starts) const {
  starts.assign(1, 0);
  const int64_t length = tokens.size();
  if (config.inter_document_masking) {
    int64_t at = 0;
    for (const SequencePiece& piece : pieces) {
      at += piece.count;
      if (at < length) starts.push_back(static_cast<int32_t>(at));
    }
    // Padding after the last piece belongs to it.
    const int64_t read = at;
    if (read < length && starts.size() > 1) starts.pop_back();
  } else if (config.reset_attention_mask) {
    for (int64_t i = 0; i + 1 < length; ++i)
      if (tokens[i] == config.tokenizer.eod) starts.push_back(static_cast<int32_t>(i + 1));
  }
}

void GPTDataset::read(int64_t index, const SampleSpans& sample,
                      std::vector<int32_t>& document_starts) const {
  const Impl& d = *impl_;
  const GPTSpans out(sample);
  const int64_t length = d.config.sequence_length, eod = d.config.tokenizer.eod;
  MEGATRON_ASSERT(static_cast<int64_t>(out.tokens.size()) == length, "sample of ",
                  out.tokens.size(), " tokens");
  const std::vector<SequencePiece> pieces = d.order->pieces(index);
  std::vector<int64_t> text(length + d.extra);
  d.read_pieces(pieces, text);

  std::copy_n(text.begin(), length, out.tokens.begin());
  std::copy_n(text.begin() + 1, length - 1, out.labels.begin());
  out.labels[length - 1] = d.extra ? text[length] : d.pad;
  d.document_starts(pieces, out.tokens, document_starts);

  size_t piece = 0;
  int64_t start = 0;  // where the current document's positions start
  for (int64_t i = 0; i < length; ++i) {
    if (d.config.inter_document_masking && piece + 1 < document_starts.size() &&
        document_starts[piece + 1] == i)
      start = document_starts[++piece];
    out.position_ids[i] = i - start;
    const bool is_eod = out.tokens[i] == eod && eod >= 0;
    if (is_eod && d.config.reset_position_ids) start = i + 1;
    out.loss_mask[i] = out.labels[i] == d.pad || (is_eod && d.config.eod_mask_loss) ? 0.0F : 1.0F;
    if (out.tokens[i] == d.pad) out.tokens[i] = 0;
    if (out.labels[i] == d.pad) out.labels[i] = 0;
  }
}

}  // namespace megatron
