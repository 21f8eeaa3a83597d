#include "megatron/datasets/detail/encoder.h"

#include <simdjson.h>

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/base/utf8.h"
#include "megatron/tokenizers/parse_json.h"

namespace megatron {
namespace {

constexpr size_t kLargeLine = size_t{4} << 20;

// The texts of one key of a JSON object: a string, or a list of strings.
using Sentences = std::vector<std::string_view>;

std::string type_name(simdjson::dom::element_type type) {
  switch (type) {
    case simdjson::dom::element_type::ARRAY:
      return "a list";
    case simdjson::dom::element_type::OBJECT:
      return "an object";
    case simdjson::dom::element_type::STRING:
      return "a string";
    case simdjson::dom::element_type::BOOL:
      return "a truth value";
    case simdjson::dom::element_type::NULL_VALUE:
      return "null";
    default:
      return "a number";
  }
}

std::string_view text_of(simdjson::dom::element string) {
  std::string_view text;
  MEGATRON_ASSERT(!string.get_string().get(text));
  return text;
}

void read_sentences(simdjson::dom::element value, const std::string& key, const std::string& where,
                    Sentences& out) {
  out.clear();
  if (value.is_string()) {
    out.push_back(text_of(value));
    return;
  }
  MEGATRON_CHECK(value.is_array(), where, ": \"", key, "\" is ", type_name(value.type()),
                 ", expected a string or a list of strings");
  simdjson::dom::array items;
  MEGATRON_ASSERT(!value.get_array().get(items));
  for (const simdjson::dom::element item : items) {
    MEGATRON_CHECK(item.is_string(), where, ": an element of \"", key, "\" is ",
                   type_name(item.type()), ", expected a string");
    out.push_back(text_of(item));
  }
}

}  // namespace

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r") == std::string_view::npos;
}

size_t find_ill_formed_utf8(std::string_view text) {
  if (simdjson::validate_utf8(text.data(), text.size())) return std::string_view::npos;
  for (size_t at = 0; at < text.size();) {
    const Utf8Character character = decode_utf8(text, at);
    if (!character.valid) return at;
    at += character.bytes;
  }
  return std::string_view::npos;
}

struct ChunkEncoder::Parser {
  simdjson::dom::parser json;
  Sentences sentences;
};

ChunkEncoder::ChunkEncoder(const Tokenizer& tokenizer, std::vector<std::string> keys, int64_t eod,
                           IndexedType type, const SentenceSplitter* splitter)
    : tokenizer_(tokenizer),
      keys_(std::move(keys)),
      eod_(eod),
      type_(type),
      splitter_(splitter),
      parser_(new Parser) {}

ChunkEncoder::~ChunkEncoder() = default;

EncodedChunk ChunkEncoder::encode(Chunk chunk) {
  EncodedChunk out;
  out.keys.resize(keys_.size());
  out.file_bytes = chunk.file_bytes;
  out.text_bytes = chunk.text.size();
  switch (chunk.file->format) {
    case InputFormat::kJsonl:
      encode_lines(chunk, out);
      break;
    case InputFormat::kParquet:
      encode_rows(chunk, out);
      break;
    default:
      encode_text(chunk, out);
  }
  return out;
}

void ChunkEncoder::append_elements(const std::vector<int32_t>& ids, EncodedKey& out) {
  const size_t width = size_of(type_), before = out.elements.size();
  out.elements.resize(before + ids.size() * width);
  std::byte* target = out.elements.data() + before;
  if (type_ == IndexedType::kInt32) {
    std::memcpy(target, ids.data(), ids.size() * width);
    return;
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto id = static_cast<uint16_t>(ids[i]);
    MEGATRON_ASSERT(id == ids[i], "token id ", ids[i], " of a vocabulary of ",
                    tokenizer_.vocab_size());
    std::memcpy(target + 2 * i, &id, 2);
  }
}

int64_t ChunkEncoder::add_text(std::string_view text, EncodedKey& out) {
  if (splitter_ == nullptr) return add_sentence(text, out);
  sentences_.clear();
  splitter_->split(text, sentences_);
  int64_t sequences = 0;
  for (const std::string_view sentence : sentences_) sequences += add_sentence(sentence, out);
  return sequences;
}

bool ChunkEncoder::add_sentence(std::string_view text, EncodedKey& out) {
  ids_.clear();
  tokenizer_.encode_append(text, ids_);
  if (ids_.empty()) return false;
  append_elements(ids_, out);
  out.sequence_lengths.push_back(static_cast<int64_t>(ids_.size()));
  return true;
}

void ChunkEncoder::end_document(int64_t sequences, EncodedKey& out) {
  if (sequences > 0 && eod_ >= 0) {
    append_elements({static_cast<int32_t>(eod_)}, out);
    ++out.sequence_lengths.back();
  }
  out.document_sequences.push_back(sequences);
}

void ChunkEncoder::encode_text(const Chunk& chunk, EncodedChunk& out) {
  const size_t bad = find_ill_formed_utf8(chunk.text);
  MEGATRON_CHECK(bad == std::string_view::npos, chunk.file->path, ": the byte at offset ",
                 chunk.offset + bad,
                 " is not UTF-8\nhint: convert the file, for example with iconv -t UTF-8");
  out.is_text = true;
  out.ends_document = chunk.ends_document;
  if (splitter_ != nullptr) {
    out.sentences = true;
    add_text(chunk.text, out.keys[0]);
    return;
  }
  ids_.clear();
  tokenizer_.encode_append(chunk.text, ids_);
  append_elements(ids_, out.keys[0]);
}

void ChunkEncoder::encode_rows(const Chunk& chunk, EncodedChunk& out) {
  int64_t begin = 0;
  for (size_t key = 0; key < keys_.size(); ++key) {
    for (size_t r = 0; r < chunk.ends[key].size(); ++r) {
      const std::string_view text =
          std::string_view(chunk.text).substr(begin, chunk.ends[key][r] - begin);
      const size_t bad = find_ill_formed_utf8(text);
      MEGATRON_CHECK(bad == std::string_view::npos, chunk.file->path, ": row ",
                     chunk.first_line + static_cast<int64_t>(r), ", column \"", keys_[key],
                     "\": the byte at offset ", bad, " is not UTF-8");
      end_document(add_text(text, out.keys[key]), out.keys[key]);
      begin = chunk.ends[key][r];
    }
  }
}

void ChunkEncoder::encode_lines(Chunk& chunk, EncodedChunk& out) {
  const size_t size = chunk.text.size();
  chunk.text.append(simdjson::SIMDJSON_PADDING, ' ');
  int64_t line = chunk.first_line;
  for (size_t begin = 0; begin < size; ++line) {
    const size_t end = std::min(chunk.text.find('\n', begin), size);
    const std::string_view text(chunk.text.data() + begin, end - begin);
    if (!is_blank(text))
      encode_line(text, chunk.text.size() - begin, cat(chunk.file->path, ": line ", line), out);
    begin = end + 1;
  }
}

// `room` bytes may be read from the start of `line`.
void ChunkEncoder::encode_line(std::string_view line, size_t room, const std::string& where,
                               EncodedChunk& out) {
  MEGATRON_ASSERT(room >= line.size() + simdjson::SIMDJSON_PADDING);
  simdjson::dom::element root;
  const simdjson::error_code error = parse_json(parser_->json, line, room, root);
  if (error == simdjson::UTF8_ERROR) {
    throw_error(cat(where, ": the byte at offset ", find_ill_formed_utf8(line),
                    " of the line is not UTF-8"));
  }
  MEGATRON_CHECK(!error, where, ": is no JSON: ", simdjson::error_message(error));
  MEGATRON_CHECK(root.is_object(), where, ": is ", type_name(root.type()), ", expected an object");
  simdjson::dom::object fields;
  MEGATRON_ASSERT(!root.get_object().get(fields));
  for (size_t key = 0; key < keys_.size(); ++key) {
    simdjson::dom::element value;
    bool found = false;
    for (const auto field : fields)  // the last of equal keys counts, as in Python
      if (field.key == keys_[key]) value = field.value, found = true;
    MEGATRON_CHECK(found, where, ": has no key \"", keys_[key], "\"",
                   "\nhint: name the keys that hold text with --json-keys");
    read_sentences(value, keys_[key], where, parser_->sentences);
    int64_t sequences = 0;
    if (value.is_string()) {
      sequences = add_text(parser_->sentences[0], out.keys[key]);
    } else {
      for (const std::string_view sentence : parser_->sentences)
        sequences += add_sentence(sentence, out.keys[key]);
    }
    end_document(sequences, out.keys[key]);
  }
  if (line.size() > kLargeLine) parser_ = std::make_unique<Parser>();  // frees its memory
}

}  // namespace megatron
