#include "megatron/datasets/indexed_dataset_builder.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>

#include "megatron/base/check.h"
#include "megatron/base/files.h"

namespace megatron {
namespace {

// A buffered unnamed file in the folder of `near`: gone when it is closed, however the process
// ends.
class SpillFile {
 public:
  explicit SpillFile(const std::filesystem::path& near) {
    std::string name = near.string() + ".spill-XXXXXX";
    fd_ = ::mkostemp(name.data(), O_CLOEXEC);
    MEGATRON_CHECK(fd_ >= 0, near.string(),
                   ": cannot create a temporary file next to it: ", std::strerror(errno));
    ::unlink(name.c_str());
    path_ = near.string();
    buffer_.reserve(kBufferBytes);
  }
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;
  ~SpillFile() { ::close(fd_); }

  template <class T>
  void push(T value) {
    const auto* bytes = reinterpret_cast<const char*>(&value);
    buffer_.insert(buffer_.end(), bytes, bytes + sizeof(T));
    if (buffer_.size() >= kBufferBytes) flush();
  }

  // Calls fn(bytes) for all pushed data, in order.
  template <class Fn>
  void for_each_piece(Fn fn) {
    flush();
    std::vector<char> piece(kBufferBytes), pending;
    int64_t offset = 0;
    for (;;) {
      const ssize_t got = ::pread(fd_, piece.data(), piece.size(), offset);
      if (got < 0 && errno == EINTR) continue;
      MEGATRON_CHECK(got >= 0, path_,
                     ": cannot read a temporary file next to it: ", std::strerror(errno));
      if (got == 0) break;
      offset += got;
      // Pieces end between elements, whatever size pread returns.
      pending.insert(pending.end(), piece.data(), piece.data() + got);
      const size_t whole = pending.size() / 8 * 8;
      fn(std::span<const char>(pending.data(), whole));
      pending.erase(pending.begin(), pending.begin() + whole);
    }
    fn(std::span<const char>(pending));
  }

 private:
  static constexpr size_t kBufferBytes = 1 << 20;

  void flush() {
    size_t done = 0;
    while (done < buffer_.size()) {
      const ssize_t wrote = ::write(fd_, buffer_.data() + done, buffer_.size() - done);
      if (wrote < 0 && errno == EINTR) continue;
      MEGATRON_CHECK(wrote > 0, path_,
                     ": cannot write a temporary file next to it: ", std::strerror(errno));
      done += wrote;
    }
    buffer_.clear();
  }

  int fd_ = -1;
  std::string path_;
  std::vector<char> buffer_;
};

template <class T>
void append_narrow(AtomicFileWriter& out, std::span<const int64_t> values,
                   const std::string& path) {
  T buffer[4096];
  for (size_t begin = 0; begin < values.size(); begin += 4096) {
    const size_t count = std::min<size_t>(4096, values.size() - begin);
    for (size_t i = 0; i < count; ++i) {
      buffer[i] = static_cast<T>(values[begin + i]);
      MEGATRON_CHECK(static_cast<int64_t>(buffer[i]) == values[begin + i], path, ": token id ",
                     values[begin + i], " does not fit the element type, whose largest value is ",
                     static_cast<int64_t>(std::numeric_limits<T>::max()));
    }
    out.write(buffer, count * sizeof(T));
  }
}

void create_folder_of(const std::string& prefix) {
  const auto folder = std::filesystem::path(prefix).parent_path();
  if (folder.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  MEGATRON_CHECK(!error, folder.string(), ": cannot create the folder: ", error.message());
}

}  // namespace

struct IndexedDatasetBuilder::Impl {
  Impl(const std::string& prefix, IndexedType type, bool multimodal)
      : prefix(prefix),
        type(type),
        width(size_of(type)),
        multimodal(multimodal),
        bin(bin_path(prefix)),
        lengths(idx_path(prefix)),
        documents(idx_path(prefix)),
        modes(idx_path(prefix)) {}

  void write_index(AtomicFileWriter& idx);

  std::string prefix;
  IndexedType type;
  int64_t width;
  bool multimodal;
  AtomicFileWriter bin;
  SpillFile lengths, documents, modes;
  int64_t num_sequences = 0, num_documents = 0, num_tokens = 0;
  int64_t open_tokens = 0;         // tokens of the open sequence
  int64_t document_sequences = 0;  // number of sequences at the last end_document()
};

IndexedDatasetBuilder::IndexedDatasetBuilder(std::string prefix, IndexedType type,
                                             bool multimodal) {
  MEGATRON_CHECK(!prefix.empty() && !prefix.ends_with('/'), "output prefix \"", prefix,
                 "\" names no file");
  create_folder_of(prefix);
  impl_ = std::make_unique<Impl>(prefix, type, multimodal);
}

IndexedDatasetBuilder::~IndexedDatasetBuilder() = default;

void IndexedDatasetBuilder::append(std::span<const int64_t> elements) {
  const std::string path = bin_path(impl_->prefix).string();
  switch (impl_->type) {
    case IndexedType::kUInt8:
      append_narrow<uint8_t>(impl_->bin, elements, path);
      break;
    case IndexedType::kInt8:
      append_narrow<int8_t>(impl_->bin, elements, path);
      break;
    case IndexedType::kInt16:
      append_narrow<int16_t>(impl_->bin, elements, path);
      break;
    case IndexedType::kUInt16:
      append_narrow<uint16_t>(impl_->bin, elements, path);
      break;
    case IndexedType::kInt32:
      append_narrow<int32_t>(impl_->bin, elements, path);
      break;
    case IndexedType::kInt64:
      append_narrow<int64_t>(impl_->bin, elements, path);
      break;
    default:
      throw_error(cat(path, ": token ids cannot be written as ", to_string(impl_->type)));
  }
  impl_->open_tokens += elements.size();
}

void IndexedDatasetBuilder::append(std::span<const int32_t> elements) {
  int64_t wide[1024];
  for (size_t begin = 0; begin < elements.size(); begin += 1024) {
    const size_t count = std::min<size_t>(1024, elements.size() - begin);
    std::copy_n(elements.begin() + begin, count, wide);
    append(std::span<const int64_t>(wide, count));
  }
}

void IndexedDatasetBuilder::append_bytes(std::span<const std::byte> elements) {
  MEGATRON_ASSERT(elements.size() % impl_->width == 0, elements.size(), " bytes of elements of ",
                  impl_->width);
  impl_->bin.write(elements.data(), elements.size());
  impl_->open_tokens += elements.size() / impl_->width;
}

void IndexedDatasetBuilder::end_sequence(int8_t mode) {
  MEGATRON_CHECK(impl_->open_tokens <= std::numeric_limits<int32_t>::max(), impl_->prefix,
                 ": sequence ", impl_->num_sequences, " has ", impl_->open_tokens,
                 " tokens, the format allows ", std::numeric_limits<int32_t>::max(),
                 "\nhint: split the document");
  impl_->lengths.push(static_cast<int32_t>(impl_->open_tokens));
  if (impl_->multimodal) impl_->modes.push(mode);
  impl_->num_tokens += impl_->open_tokens;
  impl_->open_tokens = 0;
  ++impl_->num_sequences;
}

void IndexedDatasetBuilder::end_document() {
  MEGATRON_ASSERT(impl_->open_tokens == 0, "a sequence is open");
  impl_->documents.push(impl_->num_sequences);
  impl_->document_sequences = impl_->num_sequences;
  ++impl_->num_documents;
}

void IndexedDatasetBuilder::add_sequence(std::span<const int64_t> elements, int8_t mode) {
  append(elements);
  end_sequence(mode);
}

void IndexedDatasetBuilder::add_dataset(const std::string& prefix) {
  const IndexedDataset other(prefix, {.mmap = true, .multimodal = impl_->multimodal});
  MEGATRON_CHECK(other.type() == impl_->type, prefix, ": has elements of type ",
                 to_string(other.type()), ", the output has ", to_string(impl_->type),
                 "\nhint: datasets are merged only when their element types are equal");
  std::vector<std::byte> buffer;
  constexpr int64_t kPiece = 1 << 18;
  int64_t document = 0;
  const auto documents = other.document_indices();
  for (int64_t sequence = 0;; ++sequence) {
    for (; document < other.num_documents() && documents[document + 1] == sequence; ++document)
      end_document();
    if (sequence == other.num_sequences()) break;
    const int64_t length = other.sequence_lengths()[sequence];
    for (int64_t offset = 0; offset < length; offset += kPiece) {
      const int64_t count = std::min(kPiece, length - offset);
      buffer.resize(count * impl_->width);
      other.read_bytes(sequence, offset, count, buffer.data());
      append_bytes(buffer);
    }
    end_sequence(static_cast<int8_t>(other.mode(sequence)));
  }
}

int64_t IndexedDatasetBuilder::num_sequences() const { return impl_->num_sequences; }
int64_t IndexedDatasetBuilder::num_documents() const { return impl_->num_documents; }
int64_t IndexedDatasetBuilder::num_tokens() const { return impl_->num_tokens + impl_->open_tokens; }

void IndexedDatasetBuilder::Impl::write_index(AtomicFileWriter& idx) {
  const uint64_t version = 1, sequences = num_sequences, entries = num_documents + 1;
  const auto code = static_cast<uint8_t>(type);
  idx.write(std::string_view("MMIDIDX\0\0", 9));
  idx.write(&version, 8);
  idx.write(&code, 1);
  idx.write(&sequences, 8);
  idx.write(&entries, 8);
  lengths.for_each_piece(
      [&](std::span<const char> piece) { idx.write(piece.data(), piece.size()); });
  int64_t position = 0;
  lengths.for_each_piece([&](std::span<const char> piece) {
    for (size_t i = 0; i + 4 <= piece.size(); i += 4) {
      int32_t length;
      std::memcpy(&length, piece.data() + i, 4);
      idx.write(&position, 8);
      position += length * width;
    }
  });
  const int64_t zero = 0;
  idx.write(&zero, 8);
  documents.for_each_piece(
      [&](std::span<const char> piece) { idx.write(piece.data(), piece.size()); });
  modes.for_each_piece([&](std::span<const char> piece) { idx.write(piece.data(), piece.size()); });
}

void IndexedDatasetBuilder::finish(std::optional<DatasetDescription> description) {
  MEGATRON_ASSERT(impl_->open_tokens == 0, "a sequence is open");
  MEGATRON_CHECK(impl_->document_sequences == impl_->num_sequences, impl_->prefix, ": ",
                 impl_->num_sequences - impl_->document_sequences,
                 " sequences follow the end of the last document");
  AtomicFileWriter idx(idx_path(impl_->prefix));
  impl_->write_index(idx);
  // An old .idx must never be combined with the new .bin, so it is removed first; readers refuse a
  // dataset without .idx.
  std::error_code error;
  std::filesystem::remove(idx_path(impl_->prefix), error);
  MEGATRON_CHECK(!error, idx_path(impl_->prefix).string(),
                 ": cannot replace it: ", error.message());
  const std::filesystem::path description_file = description_path(impl_->prefix);
  if (read_description(impl_->prefix)) std::filesystem::remove(description_file, error);
  MEGATRON_CHECK(!error, description_file.string(), ": cannot replace it: ", error.message());
  impl_->bin.commit();
  if (description) {
    description->element_type = to_string(impl_->type);
    description->num_documents = num_documents();
    description->num_sequences = num_sequences();
    description->num_tokens = num_tokens();
    write_file_atomically(description_file, description_json(*description));
  }
  idx.commit();
}

void merge_indexed_datasets(std::span<const std::string> inputs, const std::string& output_prefix,
                            bool multimodal, const std::string& program) {
  MEGATRON_CHECK(!inputs.empty(), "there are no datasets to merge");
  const std::optional<DatasetDescription> description = merged_description(inputs, program);
  const IndexedDataset first(inputs[0], {.mmap = true, .multimodal = multimodal});
  IndexedDatasetBuilder builder(output_prefix, first.type(), multimodal);
  for (const std::string& prefix : inputs) builder.add_dataset(prefix);
  builder.finish(description);
}

}  // namespace megatron
