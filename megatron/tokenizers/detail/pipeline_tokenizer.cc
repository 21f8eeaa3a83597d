#include "megatron/tokenizers/detail/pipeline_tokenizer.h"

#include <algorithm>
#include <array>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/tokenizers/detail/fingerprint.h"
#include "megatron/tokenizers/detail/text/byte_level.h"
#include "megatron/tokenizers/detail/text/utf8.h"
#include "megatron/tokenizers/detail/thread_states.h"

namespace megatron {

// Per-thread state kept between calls.
struct PipelineTokenizer::ThreadState {
  WordCache cache;
  ModelScratch model;
  PreTokenizer::Scratch pieces;
  Normalizer::Scratch normalizer;
  std::string repaired;
};

PipelineTokenizer::PipelineTokenizer(std::string_view type, const TokenizerDefinition& definition)
    : instance_(next_tokenizer_instance()),
      normalizer_(definition.normalizer),
      pre_tokenizer_(definition.steps, definition.steps_where),
      decoder_(definition.decoder),
      text_spells_no_special_(definition.text_spells_no_special),
      continuation_prefix_(definition.prefix),
      files_(definition.files) {
  joins_bytes_ =
      decoder_.steps().size() == 1 && decoder_.steps()[0].kind == DecoderStep::Kind::kByteLevel;
  build_model(definition);
  add_tokens(definition);
  MEGATRON_CHECK(!tokens_.empty(), definition.vocab_where, " is empty");
  bytes_.reserve(tokens_.size());
  for (const std::string& token : tokens_)
    bytes_.push_back(token.empty() ? std::string() : decoder_.piece(token));
  find_special_ids(definition);
  fingerprint_ = make_fingerprint(type, definition);
}

void PipelineTokenizer::build_model(const TokenizerDefinition& definition) {
  int32_t size = 0;
  for (const auto& entry : definition.vocab) size = std::max(size, entry.second + 1);
  tokens_.resize(static_cast<size_t>(size));
  std::vector<bool> taken(static_cast<size_t>(size));
  ids_.reserve(definition.vocab.size());
  for (const auto& [token, id] : definition.vocab) {
    MEGATRON_CHECK(ids_.emplace(token, id).second, definition.vocab_where, ": token \"", token,
                   "\" appears twice");
    MEGATRON_CHECK(!taken[id], definition.vocab_where, ": id ", id,
                   " is given to two tokens, one of them \"", token, "\"");
    taken[id] = true;
    tokens_[id] = token;
  }
  int32_t unknown = -1;
  if (definition.unk_token) {
    const auto found = ids_.find(*definition.unk_token);
    if (found != ids_.end()) unknown = found->second;
  }
  switch (definition.model) {
    case ModelKind::kBpe:
      build_bpe(definition, tokens_, unknown);
      break;
    case ModelKind::kUnigram:
      build_unigram(definition, tokens_, unknown);
      break;
    case ModelKind::kWordPiece:
      MEGATRON_CHECK(unknown >= 0, definition.vocab_where, " has no unk_token \"",
                     definition.unk_token.value_or(""), "\"");
      model_ = std::make_unique<WordPieceModel>(tokens_, definition.prefix, unknown,
                                                definition.max_input_chars_per_word);
      break;
    case ModelKind::kWordLevel:
      model_ = std::make_unique<WordLevelModel>(tokens_, unknown);
  }
}

std::array<int32_t, 256> PipelineTokenizer::byte_token_ids() const {
  std::array<int32_t, 256> ids{};
  for (int byte = 0; byte < 256; ++byte) {
    const auto found = ids_.find(byte_token(byte));
    ids[byte] = found == ids_.end() ? -1 : found->second;
  }
  return ids;
}

void PipelineTokenizer::build_bpe(const TokenizerDefinition& definition,
                                  std::vector<std::string> tokens, int32_t unknown) {
  BpeData data;
  data.symbols = definition.byte_level ? BpeData::Symbols::kBytes : BpeData::Symbols::kCharacters;
  data.ignore_merges = definition.ignore_merges;
  data.fuse_unknown = definition.fuse_unk;
  data.byte_fallback = definition.byte_fallback;
  data.prefix = definition.prefix;
  data.suffix = definition.suffix;
  data.unknown = unknown;
  data.byte_ids.fill(-1);
  data.is_word.resize(tokens.size());
  if (definition.byte_fallback) data.byte_ids = byte_token_ids();
  std::string bytes;
  for (size_t id = 0; id < tokens.size(); ++id) {
    data.is_word[id] = !tokens[id].empty();
    if (!definition.byte_level) continue;
    data.is_word[id] = parse_byte_level(tokens[id], bytes) && !bytes.empty();
    if (!data.is_word[id]) continue;
    if (bytes.size() == 1)
      data.byte_ids[static_cast<unsigned char>(bytes[0])] = static_cast<int32_t>(id);
    tokens[id] = bytes;
  }
  if (definition.merges_by_id) {
    std::vector<uint32_t> ranks(tokens.size());
    for (size_t id = 0; id < ranks.size(); ++id) ranks[id] = static_cast<uint32_t>(id);
    data.merges = merges_of_vocabulary(tokens, ranks, false);
  }
  data.merges.reserve(data.merges.size() + definition.merges.size());
  uint32_t rank = 0;
  const auto find = [&](const std::string& token) {
    const auto found = ids_.find(token);
    MEGATRON_CHECK(found != ids_.end(), definition.merges_where, ": merge ", rank, " (\"",
                   definition.merges[rank].first, "\", \"", definition.merges[rank].second,
                   "\") needs the token \"", token, "\", which the vocabulary lacks");
    return found->second;
  };
  for (const auto& [left, right] : definition.merges) {
    // A half that continues a word drops the prefix that marks this.
    const size_t mark = std::min(definition.prefix.size(), right.size());
    data.merges.push_back({find(left), find(right), find(left + right.substr(mark)), rank});
    ++rank;
  }
  data.tokens = std::move(tokens);
  auto model = std::make_unique<BpeModel>(std::move(data));
  if (!definition.byte_level && model->cutter().enabled()) cutter_ = &model->cutter();
  model_ = std::move(model);
}

void PipelineTokenizer::build_unigram(const TokenizerDefinition& definition,
                                      std::vector<std::string> tokens, int32_t unknown) {
  UnigramData data;
  data.tokens = std::move(tokens);
  data.scores = definition.scores;
  data.unknown = unknown;
  data.byte_fallback = definition.byte_fallback;
  data.byte_ids = byte_token_ids();
  const auto smallest = std::min_element(data.scores.begin(), data.scores.end());
  data.unknown_score = (smallest == data.scores.end() ? 0 : *smallest) - 10;
  unigram_ = std::make_unique<UnigramModel>(std::move(data));
}

void PipelineTokenizer::add_tokens(const TokenizerDefinition& definition) {
  std::vector<bool> added(tokens_.size());
  std::vector<bool> taken(tokens_.size());
  for (const auto& entry : definition.vocab) taken[entry.second] = true;
  special_.resize(tokens_.size());
  std::vector<AddedToken> raw, normalized;
  std::vector<std::string> raw_contents, normalized_contents;
  Normalizer::Scratch scratch;
  constexpr size_t kMostAddedBytes = size_t{64} << 20;
  size_t bytes = 0;
  for (size_t i = 0; i < definition.added_tokens.size(); ++i) {
    const AddedToken& token = definition.added_tokens[i];
    const auto where = [&] {
      return cat(definition.added_where, "[", i, "] \"", token.content, "\"");
    };
    if (token.content.empty()) continue;  // as in the tokenizers package
    const auto id = static_cast<size_t>(token.id);
    const auto [known, is_new] = ids_.emplace(token.content, token.id);
    MEGATRON_CHECK(known->second == token.id, where(), " has id ", token.id,
                   ", but the same token has id ", known->second, " already");
    MEGATRON_CHECK(!is_new || id >= taken.size() || !taken[id], where(), " has id ", token.id,
                   ", which another token has already");
    if (id >= tokens_.size()) {
      tokens_.resize(id + 1);
      special_.resize(id + 1);
      taken.resize(id + 1);
      added.resize(id + 1);
    }
    MEGATRON_CHECK(!added[id], where(), " appears twice");
    added[id] = taken[id] = true;
    special_[id] = token.special;
    tokens_[id] =
        token.normalized ? std::string(normalizer_.apply(token.content, scratch)) : token.content;
    bytes += tokens_[id].size();
    MEGATRON_CHECK(bytes <= kMostAddedBytes, where(), ": with it the added tokens take more than ",
                   kMostAddedBytes, " bytes after the normalizer");
    (token.normalized ? normalized : raw).push_back(token);
    (token.normalized ? normalized_contents : raw_contents).push_back(tokens_[id]);
  }
  raw_matcher_ = AddedTokenMatcher(std::move(raw), raw_contents);
  normalized_matcher_ = AddedTokenMatcher(std::move(normalized), normalized_contents);
}

// The tokens named by tokenizer_config.json; without it, well-known spellings among the special
// tokens.
void PipelineTokenizer::find_special_ids(const TokenizerDefinition& definition) {
  const auto find = [&](const std::string& token) {
    const auto id = token_to_id(token);
    MEGATRON_CHECK(id.has_value(), definition.special_where, ": token \"", token,
                   "\" is not in the vocabulary");
    return *id;
  };
  const auto choose = [&](const std::optional<std::string>& named,
                          std::initializer_list<const char*> usual) -> std::optional<int32_t> {
    if (named) return find(*named);
    for (const char* name : usual) {
      const auto id = token_to_id(name);
      if (id && is_special(*id)) return id;
    }
    return std::nullopt;
  };
  eod_ = choose(definition.eos, {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>"});
  bos_ = choose(definition.bos, {"<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>"});
  pad_ = choose(definition.pad, {"<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>"});
  cls_ = choose(definition.cls, {"[CLS]", "<cls>"});
  sep_ = choose(definition.sep, {"[SEP]", "<sep>"});
  mask_ = choose(definition.mask, {"[MASK]", "<mask>"});
  for (const std::string& token : definition.before) before_.push_back(find(token));
  for (const std::string& token : definition.after) after_.push_back(find(token));
}

std::string PipelineTokenizer::make_fingerprint(std::string_view type,
                                                const TokenizerDefinition& definition) const {
  Fingerprint print;
  const auto* bpe = dynamic_cast<const BpeModel*>(model_.get());
  for (const std::string& token : bpe != nullptr ? bpe->data().tokens : tokens_)
    print.string(token);
  if (bpe != nullptr) {
    for (const BpeData::Merge& merge : bpe->data().merges) {
      print.number(merge.left);
      print.number(merge.right);
      print.number(merge.result);
    }
    print.number(bpe->data().ignore_merges);
    print.number(bpe->data().unknown);
    print.number(bpe->data().fuse_unknown);
  }
  // The old fields of byte-level BPE keep their order: fingerprints are stored in data sets.
  const bool old = definition.byte_level &&
                   std::all_of(definition.normalizer.begin(), definition.normalizer.end(),
                               [](const NormalizerStep& step) {
                                 return step.kind == NormalizerStep::Kind::kNormalForm &&
                                        step.form == NormalForm::kNfc;
                               });
  if (old) {
    print.number(!definition.normalizer.empty());
  } else {
    print.number(static_cast<int>(definition.model));
    print.number(definition.byte_fallback);
    print.number(static_cast<int64_t>(definition.max_input_chars_per_word));
    print.string(definition.prefix);
    print.string(definition.suffix);
    print.string(definition.unk_token.value_or(""));
    for (const double score : definition.scores) print.real(score);
    for (const NormalizerStep& step : definition.normalizer) {
      print.number(static_cast<int>(step.kind) << 8 | static_cast<int>(step.form));
      print.string(step.pattern);
      print.string(step.content);
      print.number(step.left | step.right << 1 | step.clean_text << 2 | step.chinese << 3 |
                   step.strip_accents << 4 | step.lower << 5);
    }
  }
  for (const PreTokenizerStep& step : pre_tokenizer_.steps()) {
    print.number(static_cast<int>(step.kind));
    print.string(step.pattern);
    print.number(static_cast<int>(step.behavior));
    print.number(step.invert);
    if (step.kind == PreTokenizerStep::Kind::kMetaspace)
      print.number(static_cast<int>(step.prepend) << 1 | static_cast<int>(step.split));
  }
  for (const AddedToken& token : definition.added_tokens) {
    print.number(token.id);
    print.string(token.content);
    print.number(token.single_word | token.lstrip << 1 | token.rstrip << 2 | token.normalized << 3);
  }
  return cat(type, "-", print.digits());
}

void PipelineTokenizer::encode_append(std::string_view text, std::vector<int32_t>& out) const {
  ThreadState& state = thread_state<ThreadState>(instance_);
  if (valid_utf8_prefix(text) != text.size()) {
    state.repaired.clear();
    num_replaced_.fetch_add(append_repaired_utf8(text, state.repaired), std::memory_order_relaxed);
    text = state.repaired;
  }
  if (text.empty()) return;
  static const NoWordModel no_model;
  const WordModel* model = model_ != nullptr ? model_.get() : &no_model;
  WordEncoder words(*model, state.cache, state.model, out);
  if (raw_matcher_.empty() || text_spells_no_special_) {
    encode_segment(text, true, state, words, out);
    return;
  }
  raw_matcher_.split(
      text,
      [&](std::string_view part) {
        encode_segment(part, part.data() == text.data(), state, words, out);
      },
      [&](int32_t id) { out.push_back(id); });
}

std::vector<int32_t> PipelineTokenizer::encode_with_special(std::string_view text,
                                                            std::string_view mark) const {
  std::vector<int32_t> out;
  raw_matcher_.split(
      text,
      [&](std::string_view part) {
        std::string plain;
        for (size_t at; (at = part.find(mark)) != part.npos; part.remove_prefix(at + mark.size()))
          plain += part.substr(0, at);
        encode_append(plain += part, out);
      },
      [&](int32_t id) { out.push_back(id); });
  return out;
}

std::string PipelineTokenizer::with_marks(std::string_view text, std::string_view mark) const {
  std::string out;
  for (;;) {
    const size_t at = raw_matcher_.first_start(text);
    if (at == text.npos) return out += text;
    // Behind its first character; the next token may begin within this one.
    size_t first;
    decode_utf8(text.data() + at, first);
    out += text.substr(0, at + first);
    out += mark;
    text.remove_prefix(at + first);
  }
}

void PipelineTokenizer::encode_segment(std::string_view text, bool first, ThreadState& state,
                                       WordEncoder& words, std::vector<int32_t>& out) const {
  if (!normalizer_.empty()) text = normalizer_.apply(text, state.normalizer);
  if (normalized_matcher_.empty()) {
    encode_part(text, first, text, state, words, out);
    return;
  }
  normalized_matcher_.split(
      text,
      [&](std::string_view part) {
        encode_part(part, first && part.data() == text.data(), text, state, words, out);
      },
      [&](int32_t id) { out.push_back(id); });
}

// `readable`: the text that contains `part`.
void PipelineTokenizer::encode_part(std::string_view part, bool first, std::string_view readable,
                                    ThreadState& state, WordEncoder& words,
                                    std::vector<int32_t>& out) const {
  if (unigram_ != nullptr) {
    pre_tokenizer_.split(part, first, state.pieces, [&](const char* begin, const char* end) {
      unigram_->encode({begin, static_cast<size_t>(end - begin)}, state.cache, state.model, out);
    });
    return;
  }
  bool is_first = true;
  const auto set_readable = [&](const char* begin) {
    const bool moved = begin < part.data() || begin >= part.data() + part.size();
    words.set_readable_end(moved ? state.pieces.text.data() + state.pieces.text.size()
                                 : readable.data() + readable.size());
    is_first = false;
  };
  if (cutter_ != nullptr) {
    pre_tokenizer_.split(part, first, state.pieces, [&](const char* begin, const char* end) {
      if (is_first) set_readable(begin);
      cutter_->split({begin, static_cast<size_t>(end - begin)}, words);
    });
  } else {
    pre_tokenizer_.split(part, first, state.pieces, [&](const char* begin, const char* end) {
      if (is_first) set_readable(begin);
      words(begin, end);
    });
  }
  words.flush();
}

void PipelineTokenizer::check_id(int32_t id) const {
  MEGATRON_CHECK(id >= 0 && id < vocab_size(), "token id ", id, " is outside the vocabulary of ",
                 vocab_size());
}

std::string PipelineTokenizer::decode(std::span<const int32_t> ids,
                                      bool skip_special_tokens) const {
  if (joins_bytes_) {
    std::string bytes;
    for (const int32_t id : ids) {
      check_id(id);
      if (!(skip_special_tokens && special_[id])) bytes += bytes_[id];
    }
    if (valid_utf8_prefix(bytes) == bytes.size()) return bytes;
    std::string text;
    append_repaired_utf8(bytes, text);
    return text;
  }
  std::vector<std::string> tokens;
  tokens.reserve(ids.size());
  for (const int32_t id : ids) {
    check_id(id);
    // Ids in gaps of the vocabulary are skipped.
    if (!(skip_special_tokens && special_[id]) && !tokens_[id].empty())
      tokens.push_back(tokens_[id]);
  }
  return decoder_.decode(std::move(tokens));
}

std::string PipelineTokenizer::token_bytes(int32_t id) const {
  check_id(id);
  return bytes_[id];
}

bool PipelineTokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocab_size() && special_[id];
}

std::string PipelineTokenizer::id_to_token(int32_t id) const {
  check_id(id);
  return tokens_[id];
}

std::optional<int32_t> PipelineTokenizer::token_to_id(std::string_view token) const {
  const auto found = ids_.find(std::string(token));
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

}  // namespace megatron
