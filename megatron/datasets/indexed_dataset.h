// Reader of token sequences on disk: `<prefix>.bin` (elements) and `<prefix>.idx` (lengths,
// positions, documents). The format is described in docs/formats/indexed_dataset.md.
//
// When opened, every field is checked against the sizes of both files, so that no later read can go
// out of bounds. If check folders are given, one process per node does so.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace megatron {

// Element type of the .bin file; the values are the codes in the .idx file.
enum class IndexedType : uint8_t {
  kUInt8 = 1,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat64,
  kFloat32,
  kUInt16
};

int64_t size_of(IndexedType type);
std::string to_string(IndexedType type);  // "u16", "i32", ...
// The type in which token ids of a vocabulary of this size are stored.
IndexedType indexed_type_for_vocabulary(int64_t vocab_size);

std::filesystem::path bin_path(const std::string& prefix);
std::filesystem::path idx_path(const std::string& prefix);

struct IndexedDatasetOptions {
  bool mmap = true;         // false: read the .bin file with pread (--no-mmap-bin-files)
  bool multimodal = false;  // the .idx file ends with one mode per sequence
  // Where to record that the files were checked, and the hash of the .idx file, valid while they do
  // not change: the first writable folder. Empty: each process reads all of the .idx file.
  std::vector<std::filesystem::path> check_folders;
};

class IndexedDataset {
 public:
  using Options = IndexedDatasetOptions;

  explicit IndexedDataset(const std::string& prefix, const Options& options = {});  // throws Error
  IndexedDataset(IndexedDataset&&) noexcept;
  IndexedDataset& operator=(IndexedDataset&&) noexcept;
  ~IndexedDataset();

  const std::string& prefix() const;
  IndexedType type() const;
  int64_t num_sequences() const;
  int64_t num_documents() const;
  int64_t num_tokens() const;
  int64_t num_tokens(int64_t first, int64_t last) const;  // tokens of sequences [first, last)
  std::span<const int32_t> sequence_lengths() const;      // [num_sequences], in elements
  std::span<const int64_t> document_indices()
      const;  // [num_documents + 1], sequence after the last of each document
  int mode(int64_t sequence) const;  // 0 unless multimodal
  // Hash of the .idx file's content, for fingerprints.
  uint64_t index_hash() const;
  // Whether this object read all of the .idx file; false: another process of the node did.
  bool checked_here() const;

  // Reads elements [offset, offset + out.size()) of a sequence, converted to int64. Throws Error if
  // they are outside the sequence or not integers.
  void read(int64_t sequence, int64_t offset, std::span<int64_t> out) const;
  std::vector<int64_t> read(int64_t sequence) const;
  // Reads the raw bytes of elements [offset, offset + count).
  void read_bytes(int64_t sequence, int64_t offset, int64_t count, void* out) const;

  // The document that contains a sequence.
  int64_t document_of(int64_t sequence) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Throws Error that names document, sequence and offset if a token that was read from `offset` of a
// sequence on is not in [0, vocab_size); 0: not checked.
void check_vocabulary(const IndexedDataset& data, int64_t sequence, int64_t offset,
                      std::span<const int64_t> tokens, int64_t vocab_size);

// Whether both files of a prefix exist.
bool indexed_dataset_exists(const std::string& prefix);

// The result of a full pass over the elements. Token ids are checked against [0, vocab_size) if
// vocab_size > 0.
struct VerifyResult {
  int64_t num_tokens = 0;
  int64_t min_token = 0, max_token = 0;
  uint64_t hash = 0;                    // of the .bin file's content
  int64_t num_bad_tokens = 0;           // outside the vocabulary
  std::vector<std::string> bad_tokens;  // the first few: file, document, offset, id
};
VerifyResult verify_indexed_dataset(const IndexedDataset& dataset, int64_t vocab_size,
                                    int threads = 0);

}  // namespace megatron
