// Tokenises chunks of input: the task of one worker of preprocess-data.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/datasets/indexed_dataset.h"
#include "megatron/datasets/sources/document_source.h"
#include "megatron/tokenizers/sentence_splitter.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {

// Tokens of a chunk for one key, already of the element type of the .bin file.
struct EncodedKey {
  std::vector<std::byte> elements;
  std::vector<int64_t> sequence_lengths;
  std::vector<int64_t> document_sequences;  // number of sequences of each document
};

struct EncodedChunk {
  std::vector<EncodedKey> keys;
  // Part of a document that may begin and end in other chunks: of its only sequence, or with
  // `sentences` some of its sequences
  bool is_text = false, sentences = false;
  bool ends_document = true;
  uint64_t file_bytes = 0, text_bytes = 0;
};

class ChunkEncoder {
 public:
  // A negative `eod` is not appended. `splitter`: each sentence of a text is a sequence; null: each
  // text is one.
  ChunkEncoder(const Tokenizer& tokenizer, std::vector<std::string> keys, int64_t eod,
               IndexedType type, const SentenceSplitter* splitter = nullptr);
  ~ChunkEncoder();
  ChunkEncoder(const ChunkEncoder&) = delete;
  ChunkEncoder& operator=(const ChunkEncoder&) = delete;

  EncodedChunk encode(Chunk chunk);

 private:
  struct Parser;
  void encode_text(const Chunk& chunk, EncodedChunk& out);
  void encode_rows(const Chunk& chunk, EncodedChunk& out);
  void encode_lines(Chunk& chunk, EncodedChunk& out);
  void encode_line(std::string_view line, size_t room, const std::string& where, EncodedChunk& out);
  // Appends a text, divided into sentences if asked for; returns the number of its sequences.
  int64_t add_text(std::string_view text, EncodedKey& out);
  // Appends one sequence; returns whether it has tokens.
  bool add_sentence(std::string_view text, EncodedKey& out);
  // Closes a document of `sequences` sequences.
  void end_document(int64_t sequences, EncodedKey& out);
  void append_elements(const std::vector<int32_t>& ids, EncodedKey& out);

  const Tokenizer& tokenizer_;
  std::vector<std::string> keys_;
  int64_t eod_;
  IndexedType type_;
  const SentenceSplitter* splitter_;
  std::unique_ptr<Parser> parser_;
  std::vector<std::string_view> sentences_;
  std::vector<int32_t> ids_;
};

// Nothing but spaces, tabs and carriage returns.
bool is_blank(std::string_view line);

// Offset of the first byte of `text` that is not well-formed UTF-8, or npos.
size_t find_ill_formed_utf8(std::string_view text);

}  // namespace megatron
