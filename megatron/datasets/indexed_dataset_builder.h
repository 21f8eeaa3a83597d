// Writer of indexed datasets (docs/formats/indexed_dataset.md). All files have temporary names
// until finish() renames them; a builder that is destroyed before leaves no files. Memory does not
// grow with the number of sequences.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "megatron/datasets/dataset_description.h"
#include "megatron/datasets/indexed_dataset.h"

namespace megatron {

class IndexedDatasetBuilder {
 public:
  IndexedDatasetBuilder(std::string prefix, IndexedType type, bool multimodal = false);
  ~IndexedDatasetBuilder();
  IndexedDatasetBuilder(const IndexedDatasetBuilder&) = delete;
  IndexedDatasetBuilder& operator=(const IndexedDatasetBuilder&) = delete;

  // Appends elements to the open sequence; throws Error if one does not fit the element type.
  void append(std::span<const int64_t> elements);
  void append(std::span<const int32_t> elements);
  // The same for elements that already have the element type.
  void append_bytes(std::span<const std::byte> elements);
  // Closes the open sequence (which may be empty).
  void end_sequence(int8_t mode = 0);
  // Closes the document: the sequences since the last call, possibly none.
  void end_document();
  // Appends a whole sequence.
  void add_sequence(std::span<const int64_t> elements, int8_t mode = 0);
  // Appends all sequences and documents of another dataset of the same element type.
  void add_dataset(const std::string& prefix);

  int64_t num_sequences() const;
  int64_t num_documents() const;
  int64_t num_tokens() const;

  // Publishes both files, and <prefix>.json if there is a description, whose counts and element
  // type are set here; an old description is removed. Throws Error if sequences follow the last
  // end_document().
  void finish(std::optional<DatasetDescription> description = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Concatenates datasets of one element type and one tokenizer. `program`: for the description.
void merge_indexed_datasets(std::span<const std::string> inputs, const std::string& output_prefix,
                            bool multimodal = false, const std::string& program = "");

}  // namespace megatron
