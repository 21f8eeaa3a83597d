// Reads SentencePiece's .model files: a protobuf message ModelProto, of which only what encoding
// and decoding need is read.
//
//   ModelProto      1 pieces*  2 trainer_spec  3 normalizer_spec  5 denormalizer_spec
//   SentencePiece   1 piece  2 score (float)  3 type
//   TrainerSpec     3 model_type  24 treat_whitespace_as_suffix  35 byte_fallback  44 unk_surface
//                   45 to 48 unk, bos, eos and pad piece
//   NormalizerSpec  2 precompiled_charsmap  3 add_dummy_prefix  4 remove_extra_whitespaces
//                   5 escape_whitespaces
//
// Source: sentencepiece_model.proto; the protobuf encoding guide.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace megatron {

struct SentencePieceFile {
  enum class ModelType { kUnigram = 1, kBpe = 2, kWord = 3, kCharacters = 4 };
  enum class PieceType {
    kNormal = 1,
    kUnknown = 2,
    kControl = 3,
    kUserDefined = 4,
    kUnused = 5,
    kByte = 6,
  };
  struct Piece {
    std::string text;
    float score = 0;
    PieceType type = PieceType::kNormal;
  };
  std::vector<Piece> pieces;  // by id
  ModelType model_type = ModelType::kUnigram;
  bool treat_whitespace_as_suffix = false;
  bool byte_fallback = false;
  std::string unk_surface = " \xe2\x81\x87 ";
  std::string bos_piece = "<s>", eos_piece = "</s>", pad_piece = "<pad>";
  std::string charsmap;
  bool add_dummy_prefix = true;
  bool remove_extra_whitespaces = true;
  bool escape_whitespaces = true;
};

// Throws Error that names the file and the byte or piece that is wrong or not supported.
SentencePieceFile read_sentencepiece_file(const std::filesystem::path& path);

}  // namespace megatron
