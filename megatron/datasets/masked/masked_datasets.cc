#include "megatron/datasets/masked/masked_datasets.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/datasets/masked/bert_dataset.h"
#include "megatron/datasets/masked/packed_dataset.h"
#include "megatron/datasets/masked/t5_dataset.h"

namespace megatron {
namespace {

using Sentences = std::unique_ptr<const SentenceSource>;
// Makes a dataset of sentences that `open` gives for what the dataset needs of them.
using OpenSentences = std::function<Sentences(const SentenceSourceOptions&)>;
using MakeMasked = std::function<std::shared_ptr<const Dataset>(
    const std::shared_ptr<const MaskedTokens>&, const OpenSentences&)>;

MakeMasked make_bert(const MaskedModel& model, const MaskedDataConfig& masked,
                     const DatasetRequest& request, const SentenceSourceOptions& base) {
  BertDatasetConfig config;
  config.sequence_length = request.sequence_length;
  config.binary_head = model.binary_head;
  config.masking = masked.masking(MaskedKind::kBert);
  config.sentences = bert_sentences(config.sequence_length, config.binary_head, base);
  return [config](const std::shared_ptr<const MaskedTokens>& tokens, const OpenSentences& open) {
    return std::make_shared<const BertDataset>(open(config.sentences), tokens, config);
  };
}

MakeMasked make_t5(const MaskedModel& model, const MaskedDataConfig& masked,
                   const DatasetRequest& request, const SentenceSourceOptions& base,
                   const MaskedTokens& tokens) {
  T5DatasetConfig config;
  config.sequence_length = request.sequence_length;
  config.decoder_sequence_length = model.decoder_seq_length;
  config.masking = masked.masking(MaskedKind::kT5);
  config.sentences = t5_sentences(config.sequence_length, base);
  if (const std::string warning = t5_warning(config, tokens);
      !warning.empty() && !tokens.sentinels.empty())
    log_warning(warning);
  return [config](const std::shared_ptr<const MaskedTokens>& known, const OpenSentences& open) {
    return std::make_shared<const T5Dataset>(open(config.sentences), known, config);
  };
}

// Ids between the special tokens and the sentinels.
MockSentenceIds mock_ids(const MaskedTokens& tokens, const std::vector<int64_t>& lengths) {
  const int64_t specials = 1 + std::max({tokens.pad, tokens.cls, tokens.sep, tokens.mask});
  MockSentenceIds ids;
  ids.hole = tokens.pad;
  ids.first = specials < tokens.vocab_size / 2 ? specials : 0;
  ids.last = tokens.sentinels.empty()
                 ? tokens.vocab_size
                 : *std::min_element(tokens.sentinels.begin(), tokens.sentinels.end());
  if (ids.last <= ids.first) ids.last = tokens.vocab_size;
  if (!lengths.empty()) {
    ids.hole = -1;
    ids.least = lengths[0];
    ids.most = lengths[1];
  }
  return ids;
}

// What the tokenizer puts around a text, else [CLS] and [SEP].
PackedTextOptions packed_options(const MaskedTokens& tokens, const DatasetRequest& request,
                                 const SentenceSourceOptions& base) {
  check_bert_tokens(tokens);
  PackedTextOptions options;
  options.sequence_length = request.sequence_length;
  options.prefix = tokens.prefix;
  options.suffix = tokens.suffix;
  if (options.prefix.empty() && options.suffix.empty()) {
    options.prefix = {tokens.cls};
    options.suffix = {tokens.sep};
  }
  const size_t around = options.prefix.size() + options.suffix.size();
  MEGATRON_CHECK(static_cast<size_t>(request.sequence_length) > around, "sequence length is ",
                 request.sequence_length, ", the tokens around a document are ", around);
  options.seed = base.seed;
  options.vocab_size = base.vocab_size;
  options.cache_path = base.cache_path;
  return options;
}

void make_packed(const std::shared_ptr<const MaskedTokens>& tokens, const MaskedModel& model,
                 const MaskedDataConfig& masked, const SentenceSourceOptions& base,
                 DatasetRequest& request) {
  MEGATRON_CHECK(!model.binary_head,
                 "--bert-data packed: packed samples have no two halves, whose order the binary "
                 "head predicts\nhint: --bert-no-binary-head");
  const PackedTextOptions options = packed_options(*tokens, request, base);
  const auto make = [tokens, options, masking = masked.masking(MaskedKind::kBert)](
                        std::unique_ptr<const PackedText> text) {
    return std::make_shared<const PackedDataset>(std::move(text), tokens, masking, options);
  };
  request.make_member = [make, options](const MemberRequest& member) {
    PackedTextOptions own = options;
    own.threads = member.threads;
    return make(packed_text_of_file(member.open(member.path), member.bounds, member.split,
                                    member.num_samples, own));
  };
  request.make_mock = [make, options, ids = mock_ids(*tokens, masked.mock_lengths)](
                          Split split, int64_t num_samples) {
    return make(mock_packed_text(split, num_samples, ids, options));
  };
}

}  // namespace

TrainValidTestDatasets build_masked_datasets(const MaskedModel& model, const DataConfig& data,
                                             const MaskedDataConfig& masked,
                                             const DatasetRequest& given) {
  MEGATRON_ASSERT(given.text_tokenizer != nullptr);
  auto tokens = std::make_shared<MaskedTokens>(
      masked_tokens(*given.text_tokenizer, given.tokenizer.identity));
  if (data.mock_data) *tokens = mock_masked_tokens(*tokens);
  const SentenceSourceOptions base{.short_probability = masked.short_seq_prob,
                                   .seed = given.seed,
                                   .vocab_size = tokens->vocab_size,
                                   .cache_path = data.data_cache_path};
  DatasetRequest request = given;
  if (model.kind == MaskedKind::kBert && masked.bert_data == BertData::kPacked) {
    make_packed(tokens, model, masked, base, request);
    return build_train_valid_test_datasets(data, request);
  }
  const MakeMasked make = model.kind == MaskedKind::kBert
                              ? make_bert(model, masked, given, base)
                              : make_t5(model, masked, given, base, *tokens);
  request.make_member = [make, tokens](const MemberRequest& member) {
    return make(tokens, [&](const SentenceSourceOptions& options) {
      return sentences_of_file(member.open(member.path), member.bounds, member.split,
                               member.num_samples, options);
    });
  };
  request.make_mock = [make, tokens, lengths = masked.mock_lengths](Split split,
                                                                    int64_t num_samples) {
    return make(tokens, [&](const SentenceSourceOptions& options) {
      return mock_sentences(split, num_samples, mock_ids(*tokens, lengths), options);
    });
  };
  return build_train_valid_test_datasets(data, request);
}

}  // namespace megatron
