#include "megatron/tokenizers/detail/sentencepiece_tokenizer.h"

#include <algorithm>
#include <cfloat>
#include <map>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/tokenizers/detail/decoder.h"
#include "megatron/tokenizers/detail/fingerprint.h"
#include "megatron/tokenizers/detail/text/utf8.h"
#include "megatron/tokenizers/detail/thread_states.h"

namespace megatron {

struct SentencePieceTokenizer::ThreadState {
  WordCache cache;
  ModelScratch model;
  std::string repaired, normalized;
};

SentencePieceTokenizer::SentencePieceTokenizer(std::string_view type,
                                               const std::filesystem::path& path)
    : instance_(next_tokenizer_instance()), path_(path), file_(read_sentencepiece_file(path)) {
  space_ = file_.escape_whitespaces ? kMetaspace : std::string_view(" ");
  if (!file_.charsmap.empty())
    charsmap_ = Charsmap(file_.charsmap, path.string() + ": precompiled_charsmap");
  std::vector<std::pair<std::string_view, int32_t>> user_defined;
  std::array<bool, 128> starts{};
  for (size_t id = 0; id < file_.pieces.size(); ++id) {
    const Piece& piece = file_.pieces[id];
    ids_.emplace(piece.text, static_cast<int32_t>(id));
    if (piece.type != PieceType::kUserDefined) continue;
    user_defined.emplace_back(piece.text, static_cast<int32_t>(id));
    const auto byte = static_cast<unsigned char>(piece.text[0]);
    if (byte < starts.size()) starts[byte] = true;
  }
  user_defined_ = DoubleArray(std::move(user_defined));
  for (unsigned char c = 0; c < 128; ++c)
    copied_[c] = c != ' ' && !starts[c] && (charsmap_.empty() || charsmap_.is_plain(c));
  if (file_.model_type == SentencePieceFile::ModelType::kUnigram) {
    build_unigram();
  } else {
    build_bpe();
  }
  fingerprint_ = make_fingerprint(type);
}

void SentencePieceTokenizer::build_unigram() {
  UnigramData data;
  data.sentencepiece = true;
  data.byte_fallback = file_.byte_fallback;
  data.byte_ids.fill(-1);
  float smallest = FLT_MAX;
  for (size_t id = 0; id < file_.pieces.size(); ++id) {
    const Piece& piece = file_.pieces[id];
    const bool matches = piece.type == PieceType::kNormal || piece.type == PieceType::kUserDefined;
    data.tokens.push_back(matches ? piece.text : std::string());
    // A user-defined piece scores higher than any segmentation of its text.
    const auto bonus = static_cast<float>(0.1 * (static_cast<int>(piece.text.size()) - 1));
    data.scores.push_back(piece.type == PieceType::kUserDefined ? bonus : piece.score);
    if (piece.type == PieceType::kNormal) smallest = std::min(smallest, piece.score);
    if (piece.type == PieceType::kUnknown) data.unknown = static_cast<int32_t>(id);
    if (piece.type == PieceType::kByte)
      data.byte_ids[parse_byte_token(piece.text)] = static_cast<int32_t>(id);
  }
  // Without an unknown piece, an unused id stands for characters that become bytes.
  if (data.unknown < 0) data.unknown = static_cast<int32_t>(file_.pieces.size());
  data.unknown_score = static_cast<double>(smallest - 10.0f);
  unigram_ = std::make_unique<UnigramModel>(std::move(data));
}

// Pieces of type CHAR are BPE without merges.
void SentencePieceTokenizer::build_bpe() {
  BpeData data;
  data.symbols = BpeData::Symbols::kPieces;
  data.byte_fallback = file_.byte_fallback;
  data.byte_ids.fill(-1);
  data.num_pieces = static_cast<int32_t>(file_.pieces.size());
  std::map<float, uint32_t, std::greater<>> ranks;
  for (const Piece& piece : file_.pieces) ranks.emplace(piece.score, 0);
  uint32_t next = 0;
  for (auto& [score, rank] : ranks) rank = next++;
  std::vector<uint32_t> rank_of;
  for (size_t id = 0; id < file_.pieces.size(); ++id) {
    const Piece& piece = file_.pieces[id];
    const bool matches = piece.type == PieceType::kNormal || piece.type == PieceType::kUserDefined;
    data.tokens.push_back(matches ? piece.text : std::string());
    const bool merges = matches && file_.model_type == SentencePieceFile::ModelType::kBpe;
    rank_of.push_back(merges ? ranks.at(piece.score) : kNeverMerged);
    if (piece.type == PieceType::kUnknown) data.unknown = static_cast<int32_t>(id);
    if (piece.type == PieceType::kByte)
      data.byte_ids[parse_byte_token(piece.text)] = static_cast<int32_t>(id);
  }
  data.merges = merges_of_vocabulary(data.tokens, rank_of, true);
  for (const std::string& token : data.tokens) data.is_word.push_back(!token.empty());
  bpe_ = std::make_unique<BpeModel>(std::move(data));
}

std::string SentencePieceTokenizer::make_fingerprint(std::string_view type) const {
  Fingerprint print;
  for (const Piece& piece : file_.pieces) {
    print.string(piece.text);
    print.real(piece.score);
    print.number(static_cast<int>(piece.type));
  }
  print.number(static_cast<int>(file_.model_type));
  print.string(file_.charsmap);
  print.number(file_.treat_whitespace_as_suffix | file_.byte_fallback << 1 |
               file_.add_dummy_prefix << 2 | file_.remove_extra_whitespaces << 3 |
               file_.escape_whitespaces << 4);
  return cat(type, "-", print.digits());
}

std::optional<int32_t> SentencePieceTokenizer::control(const std::string& piece) const {
  const auto found = ids_.find(piece);
  if (found == ids_.end()) return std::nullopt;
  if (file_.pieces[found->second].type != PieceType::kControl) return std::nullopt;
  return found->second;
}

std::string_view SentencePieceTokenizer::normalize_prefix(std::string_view text,
                                                          size_t& length) const {
  if (user_defined_.find_longest(text, length) >= 0) return text.substr(0, length);
  std::string_view replacement;
  length = charsmap_.find_longest(text, replacement);
  if (length > 0) return replacement;
  decode_utf8(text.data(), length);
  return text.substr(0, length);
}

// Source: Normalizer::Normalize of SentencePiece.
void SentencePieceTokenizer::normalize(std::string_view text, std::string& out) const {
  out.clear();
  size_t length;
  if (file_.remove_extra_whitespaces) {
    while (!text.empty() && normalize_prefix(text, length) == " ") text.remove_prefix(length);
  }
  if (text.empty()) return;
  if (!file_.treat_whitespace_as_suffix && file_.add_dummy_prefix) out += space_;
  bool space_before = file_.remove_extra_whitespaces;
  while (!text.empty()) {
    size_t copied = 0;
    while (copied + 1 < text.size() && static_cast<signed char>(text[copied]) >= 0 &&
           copied_[static_cast<unsigned char>(text[copied])] &&
           static_cast<signed char>(text[copied + 1]) >= 0) {
      ++copied;
    }
    if (copied > 0) {
      out.append(text.substr(0, copied));
      text.remove_prefix(copied);
      space_before = false;
    }
    std::string_view part = normalize_prefix(text, length);
    text.remove_prefix(length);
    while (space_before && part.starts_with(' ')) part.remove_prefix(1);
    if (!part.empty()) {
      for (const char c : part) {
        if (c == ' ') {
          out += space_;
        } else {
          out += c;
        }
      }
      space_before = part.ends_with(' ');
    }
    if (!file_.remove_extra_whitespaces) space_before = false;
  }
  if (file_.remove_extra_whitespaces) {
    while (out.ends_with(space_)) out.resize(out.size() - space_.size());
  }
  if (file_.treat_whitespace_as_suffix && file_.add_dummy_prefix) out += space_;
}

void SentencePieceTokenizer::encode_append(std::string_view text, std::vector<int32_t>& out) const {
  ThreadState& state = thread_state<ThreadState>(instance_);
  if (valid_utf8_prefix(text) != text.size()) {
    state.repaired.clear();
    num_replaced_.fetch_add(append_repaired_utf8(text, state.repaired), std::memory_order_relaxed);
    text = state.repaired;
  }
  normalize(text, state.normalized);
  std::string_view rest = state.normalized;
  if (rest.empty()) return;
  if (unigram_ != nullptr) {
    unigram_->encode(rest, state.cache, state.model, out);
    return;
  }
  WordEncoder words(*bpe_, state.cache, state.model, out);
  words.set_readable_end(rest.data() + rest.size());
  // User-defined pieces are kept as they are and are never merged.
  size_t done = 0, length;
  const auto encode_words = [&](size_t end) {
    if (done < end) bpe_->cutter().split(rest.substr(done, end - done), words);
    words.flush();
  };
  if (!user_defined_.empty()) {
    for (size_t at = 0; at < rest.size();) {
      const int32_t id = user_defined_.find_longest(rest.substr(at), length);
      if (id < 0) {
        decode_utf8(rest.data() + at, length);
        at += length;
        continue;
      }
      encode_words(at);
      out.push_back(id);
      done = at += length;
    }
  }
  encode_words(rest.size());
}

const SentencePieceTokenizer::Piece& SentencePieceTokenizer::piece(int32_t id) const {
  MEGATRON_CHECK(id >= 0 && id < vocab_size(), "token id ", id, " is outside the vocabulary of ",
                 vocab_size());
  return file_.pieces[id];
}

// Source: SentencePieceProcessor::DecodeOptimized.
std::string SentencePieceTokenizer::decode(std::span<const int32_t> ids, bool) const {
  std::string text, bytes;
  bool at_start = true;
  const auto flush_bytes = [&] {
    for (std::string_view rest = bytes; !rest.empty();) {
      const size_t valid = valid_utf8_prefix(rest);
      text.append(rest.substr(0, valid));
      rest.remove_prefix(valid);
      if (rest.empty()) break;
      text += "\xef\xbf\xbd";
      rest.remove_prefix(1);
    }
    bytes.clear();
  };
  for (const int32_t id : ids) {
    const Piece& p = piece(id);
    if (p.type == PieceType::kByte) {
      bytes += static_cast<char>(parse_byte_token(p.text));
      continue;
    }
    flush_bytes();
    if (!text.empty()) at_start = false;
    if (p.type == PieceType::kControl) continue;
    std::string_view part = p.text;
    bool dropped = false;
    if (at_start && (file_.add_dummy_prefix || file_.remove_extra_whitespaces) &&
        part.starts_with(kMetaspace)) {
      part.remove_prefix(kMetaspace.size());
      dropped = !file_.remove_extra_whitespaces;
    }
    if (p.type == PieceType::kUnknown) {
      text += file_.unk_surface;
    } else {
      for (size_t at; (at = part.find(kMetaspace)) != part.npos;
           part.remove_prefix(at + kMetaspace.size())) {
        text.append(part.substr(0, at));
        text += ' ';
      }
      text += part;
    }
    if (dropped || !text.empty()) at_start = false;
  }
  flush_bytes();
  return text;
}

std::string SentencePieceTokenizer::token_bytes(int32_t id) const {
  const Piece& p = piece(id);
  if (p.type == PieceType::kControl) return "";
  if (p.type == PieceType::kUnknown) return file_.unk_surface;
  if (p.type == PieceType::kByte)
    return std::string(1, static_cast<char>(parse_byte_token(p.text)));
  std::string text = p.text;
  for (size_t at = 0; (at = text.find(kMetaspace, at)) != text.npos; ++at)
    text.replace(at, kMetaspace.size(), " ");
  return text;
}

bool SentencePieceTokenizer::is_special(int32_t id) const {
  if (id < 0 || id >= vocab_size()) return false;
  const PieceType type = file_.pieces[id].type;
  return type == PieceType::kControl || type == PieceType::kUnknown;
}

std::optional<int32_t> SentencePieceTokenizer::token_to_id(std::string_view token) const {
  const auto found = ids_.find(token);
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

}  // namespace megatron
