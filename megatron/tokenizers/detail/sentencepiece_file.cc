#include "megatron/tokenizers/detail/sentencepiece_file.h"

#include <cmath>
#include <cstring>
#include <set>
#include <string_view>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/tokenizers/detail/decoder.h"
#include "megatron/tokenizers/detail/text/utf8.h"

namespace megatron {
namespace {

enum class WireType { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

// One field of a message: its number, and its value in the member that its wire type selects.
struct Field {
  uint64_t number = 0;
  WireType type = WireType::kVarint;
  uint64_t integer = 0;
  std::string_view bytes;
};

// Iterates over the fields of a message.
class Message {
 public:
  // `base`: the whole file, for offsets in messages.
  Message(std::string_view bytes, const char* base, const std::string& file)
      : p_(bytes.data()), end_(bytes.data() + bytes.size()), base_(base), file_(file) {}

  bool next(Field& field) {
    if (p_ == end_) return false;
    const uint64_t tag = varint();
    field.number = tag >> 3;
    switch (tag & 7) {
      case 0:
        field.type = WireType::kVarint;
        field.integer = varint();
        return true;
      case 1:
        field.type = WireType::kFixed64;
        field.bytes = take(8);
        return true;
      case 2:
        field.type = WireType::kBytes;
        field.bytes = take(varint());
        return true;
      case 5:
        field.type = WireType::kFixed32;
        field.bytes = take(4);
        return true;
      default:
        fail();
    }
  }

  // The values of fields; each checks the wire type.
  std::string_view bytes(const Field& field) const {
    if (field.type != WireType::kBytes) fail();
    return field.bytes;
  }
  uint64_t integer(const Field& field) const {
    if (field.type != WireType::kVarint) fail();
    return field.integer;
  }
  float real(const Field& field) const {
    if (field.type != WireType::kFixed32) fail();
    float value;
    std::memcpy(&value, field.bytes.data(), sizeof(value));
    return value;
  }
  Message message(const Field& field) const { return {bytes(field), base_, file_}; }

 private:
  [[noreturn]] void fail() const {
    throw_error(cat(file_, ": byte ", p_ - base_,
                    " is not what a SentencePiece model has there\nhint: the file is damaged or no "
                    "SentencePiece model"));
  }
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (p_ == end_) fail();
      const auto byte = static_cast<unsigned char>(*p_++);
      value |= static_cast<uint64_t>(byte & 127) << shift;
      if (byte < 128) return value;
    }
    fail();
  }
  std::string_view take(uint64_t size) {
    if (size > static_cast<uint64_t>(end_ - p_)) fail();
    const std::string_view bytes(p_, size);
    p_ += size;
    return bytes;
  }

  const char* p_;
  const char* end_;
  const char* base_;
  const std::string& file_;
};

SentencePieceFile::Piece read_piece(Message message) {
  SentencePieceFile::Piece piece;
  Field field;
  while (message.next(field)) {
    if (field.number == 1) piece.text = message.bytes(field);
    if (field.number == 2) piece.score = message.real(field);
    if (field.number == 3)
      piece.type = static_cast<SentencePieceFile::PieceType>(message.integer(field));
  }
  return piece;
}

void read_trainer(Message message, SentencePieceFile& file) {
  Field field;
  while (message.next(field)) {
    switch (field.number) {
      case 3:
        file.model_type = static_cast<SentencePieceFile::ModelType>(message.integer(field));
        break;
      case 24:
        file.treat_whitespace_as_suffix = message.integer(field) != 0;
        break;
      case 35:
        file.byte_fallback = message.integer(field) != 0;
        break;
      case 44:
        file.unk_surface = message.bytes(field);
        break;
      case 46:
        if (!message.bytes(field).empty()) file.bos_piece = message.bytes(field);
        break;
      case 47:
        if (!message.bytes(field).empty()) file.eos_piece = message.bytes(field);
        break;
      case 48:
        if (!message.bytes(field).empty()) file.pad_piece = message.bytes(field);
        break;
      default:
        break;
    }
  }
}

void read_normalizer(Message message, SentencePieceFile& file) {
  Field field;
  while (message.next(field)) {
    if (field.number == 2) file.charsmap = message.bytes(field);
    if (field.number == 3) file.add_dummy_prefix = message.integer(field) != 0;
    if (field.number == 4) file.remove_extra_whitespaces = message.integer(field) != 0;
    if (field.number == 5) file.escape_whitespaces = message.integer(field) != 0;
  }
}

// A denormalizer would change decoded text.
bool has_rules(Message message) {
  Field field;
  bool found = false;
  while (message.next(field)) found |= field.number == 2 && !message.bytes(field).empty();
  return found;
}

void check(const SentencePieceFile& file, const std::string& name) {
  using PieceType = SentencePieceFile::PieceType;
  using ModelType = SentencePieceFile::ModelType;
  MEGATRON_CHECK(!file.pieces.empty(), name, ": the model has no pieces");
  MEGATRON_CHECK(file.pieces.size() < (size_t{1} << 24), name, ": the model has ",
                 file.pieces.size(), " pieces, expected fewer than ", 1 << 24);
  MEGATRON_CHECK(
      file.model_type != ModelType::kWord, name,
      ": models of type WORD are not supported\nhint: supported types: BPE, CHAR, UNIGRAM");
  MEGATRON_CHECK(file.model_type == ModelType::kUnigram || file.model_type == ModelType::kBpe ||
                     file.model_type == ModelType::kCharacters,
                 name, ": model_type is ", static_cast<int>(file.model_type),
                 ", expected 1 (UNIGRAM), 2 (BPE) or 4 (CHAR)");
  std::set<std::string_view> seen;
  int num_unknown = 0, num_bytes = 0;
  for (size_t id = 0; id < file.pieces.size(); ++id) {
    const SentencePieceFile::Piece& piece = file.pieces[id];
    const auto where = [&] { return cat(name, ": piece ", id, " \"", piece.text, "\""); };
    const int type = static_cast<int>(piece.type);
    MEGATRON_CHECK(type >= 1 && type <= 6, where(), " has type ", type, ", expected 1 to 6");
    MEGATRON_CHECK(!piece.text.empty() && piece.text.find('\0') == piece.text.npos, where(),
                   " is empty or holds a zero byte");
    MEGATRON_CHECK(valid_utf8_prefix(piece.text) == piece.text.size(), where(), " is not UTF-8");
    MEGATRON_CHECK(std::isfinite(piece.score), where(), " has a score that is not finite");
    MEGATRON_CHECK(seen.insert(piece.text).second, where(), " appears twice");
    MEGATRON_CHECK(piece.type != PieceType::kUnused || file.model_type != ModelType::kBpe, where(),
                   " is unused, which is not supported in a BPE model");
    MEGATRON_CHECK(piece.type != PieceType::kByte || parse_byte_token(piece.text) >= 0, where(),
                   " has type BYTE, expected <0x00> to <0xFF>");
    num_unknown += piece.type == PieceType::kUnknown;
    num_bytes += piece.type == PieceType::kByte;
  }
  MEGATRON_CHECK(num_unknown == 1 || (num_unknown == 0 && file.byte_fallback), name,
                 ": the model has ", num_unknown, " unknown pieces, expected one");
  MEGATRON_CHECK(num_bytes == (file.byte_fallback ? 256 : 0), name, ": the model has ", num_bytes,
                 " byte pieces, expected ", file.byte_fallback ? 256 : 0);
}

}  // namespace

SentencePieceFile read_sentencepiece_file(const std::filesystem::path& path) {
  const std::string name = path.string();
  const std::string bytes = read_file(path);
  SentencePieceFile file;
  Message message(bytes, bytes.data(), name);
  Field field;
  while (message.next(field)) {
    switch (field.number) {
      case 1:
        file.pieces.push_back(read_piece(message.message(field)));
        break;
      case 2:
        read_trainer(message.message(field), file);
        break;
      case 3:
        read_normalizer(message.message(field), file);
        break;
      case 5:
        MEGATRON_CHECK(!has_rules(message.message(field)), name,
                       ": denormalizer_spec has rules, which are not supported");
        break;
      default:
        break;
    }
  }
  check(file, name);
  return file;
}

}  // namespace megatron
