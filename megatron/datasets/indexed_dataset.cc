#include "megatron/datasets/indexed_dataset.h"

#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <mutex>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/threads.h"
#include "megatron/datasets/detail/once_per_node.h"
#include "megatron/datasets/index_cache.h"

namespace megatron {
namespace {

constexpr char kIndexMagic[] = "MMIDIDX\0";  // nine bytes with the terminating NUL
constexpr int64_t kIndexMagicBytes = 9, kHeaderBytes = 34;

template <class T>
T load(const std::byte* data) {
  T value;
  std::memcpy(&value, data, sizeof(T));
  return value;
}

// A file that is read with pread, for --no-mmap-bin-files.
class PositionalFile {
 public:
  explicit PositionalFile(const std::filesystem::path& path) : path_(path.string()) {
    fd_ = open_regular_file(path);
    struct stat info{};
    if (::fstat(fd_, &info) != 0) {
      const int error = errno;
      ::close(fd_);
      throw_error(cat(path_, ": cannot read its size: ", std::strerror(error)));
    }
    size_ = info.st_size;
  }
  PositionalFile(const PositionalFile&) = delete;
  PositionalFile& operator=(const PositionalFile&) = delete;
  ~PositionalFile() { ::close(fd_); }

  int64_t size() const { return size_; }
  void read(int64_t offset, int64_t bytes, void* out) const {
    auto* target = static_cast<char*>(out);
    while (bytes > 0) {
      const ssize_t got = ::pread(fd_, target, bytes, offset);
      if (got < 0 && errno == EINTR) continue;
      MEGATRON_CHECK(got >= 0, path_, ": cannot read at byte ", offset, ": ", std::strerror(errno));
      MEGATRON_CHECK(got > 0, path_, ": ends at byte ", offset, ", ", bytes,
                     " more bytes were expected", "\nhint: the file was cut while it was in use");
      offset += got, bytes -= got, target += got;
    }
  }

 private:
  std::string path_;
  int fd_ = -1;
  int64_t size_ = 0;
};

template <class T>
void widen(const std::byte* data, std::span<int64_t> out) {
  for (size_t i = 0; i < out.size(); ++i) out[i] = load<T>(data + i * sizeof(T));
}

void widen(IndexedType type, const std::byte* data, std::span<int64_t> out) {
  switch (type) {
    case IndexedType::kUInt8:
      return widen<uint8_t>(data, out);
    case IndexedType::kInt8:
      return widen<int8_t>(data, out);
    case IndexedType::kInt16:
      return widen<int16_t>(data, out);
    case IndexedType::kInt32:
      return widen<int32_t>(data, out);
    case IndexedType::kInt64:
      return widen<int64_t>(data, out);
    case IndexedType::kUInt16:
      return widen<uint16_t>(data, out);
    default:
      break;
  }
  throw_error(cat("elements of type ", to_string(type), " cannot be read as token ids"));
}

}  // namespace

int64_t size_of(IndexedType type) {
  switch (type) {
    case IndexedType::kUInt8:
    case IndexedType::kInt8:
      return 1;
    case IndexedType::kInt16:
    case IndexedType::kUInt16:
      return 2;
    case IndexedType::kInt32:
    case IndexedType::kFloat32:
      return 4;
    case IndexedType::kInt64:
    case IndexedType::kFloat64:
      return 8;
  }
  MEGATRON_ASSERT(false, "element type ", static_cast<int>(type));
  return 0;
}

std::string to_string(IndexedType type) {
  static constexpr const char* kNames[] = {"u8", "i8", "i16", "i32", "i64", "f64", "f32", "u16"};
  const int code = static_cast<int>(type);
  return code >= 1 && code <= 8 ? kNames[code - 1] : cat("type ", code);
}

IndexedType indexed_type_for_vocabulary(int64_t vocab_size) {
  return vocab_size < 65500 ? IndexedType::kUInt16 : IndexedType::kInt32;
}

std::filesystem::path bin_path(const std::string& prefix) { return prefix + ".bin"; }
std::filesystem::path idx_path(const std::string& prefix) { return prefix + ".idx"; }

void check_vocabulary(const IndexedDataset& data, int64_t sequence, int64_t offset,
                      std::span<const int64_t> tokens, int64_t vocab_size) {
  if (vocab_size <= 0 || tokens.empty()) return;
  const auto [low, high] = std::minmax_element(tokens.begin(), tokens.end());
  if (*low >= 0 && *high < vocab_size) return;
  const int64_t at = (*low < 0 ? low : high) - tokens.begin();
  throw_error(cat(bin_path(data.prefix()).string(), ": document ", data.document_of(sequence),
                  ", sequence ", sequence, ", offset ", offset + at, ": token id ",
                  tokens[static_cast<size_t>(at)], " is outside the vocabulary of ", vocab_size,
                  "\nhint: the data was written with another tokenizer; `megatron inspect-dataset "
                  "--verify` checks all of it"));
}

bool indexed_dataset_exists(const std::string& prefix) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(bin_path(prefix), ignored) &&
         std::filesystem::is_regular_file(idx_path(prefix), ignored);
}

struct IndexedDataset::Impl {
  std::string prefix, idx_name, bin_name;
  MappedFile idx, bin;
  std::unique_ptr<PositionalFile> bin_file;  // used instead of `bin`
  IndexedType type = IndexedType::kInt32;
  int64_t width = 4, num_sequences = 0, num_entries = 0, num_tokens = 0, bin_bytes = 0;
  bool multimodal = false;
  // The .idx file's arrays are unaligned, so aligned copies are kept of those exposed as spans.
  std::vector<int32_t> lengths;
  std::vector<int64_t> documents;
  const std::byte* pointers = nullptr;
  const std::byte* modes = nullptr;
  mutable std::once_flag hash_once;
  mutable uint64_t hash = 0;
  bool checked_here = true;

  void read_header();
  void read_arrays();
  void check_sequences() const;
  void check_documents() const;
  void check(std::span<const std::filesystem::path> folders);
  uint64_t compute_hash() const { return XXH3_64bits(idx.bytes().data(), idx.bytes().size()); }

  int64_t pointer(int64_t sequence) const { return load<int64_t>(pointers + 8 * sequence); }
};

// Checks the header, and that the arrays it describes are inside the file.
void IndexedDataset::Impl::read_header() {
  const auto bytes = idx.bytes();
  const int64_t size = bytes.size();
  MEGATRON_CHECK(size >= kHeaderBytes, idx_name, ": has ", size, " bytes, its header alone takes ",
                 kHeaderBytes, "\nhint: the file was cut short or is no .idx file");
  MEGATRON_CHECK(
      std::memcmp(bytes.data(), kIndexMagic, kIndexMagicBytes) == 0, idx_name,
      ": the 9 bytes at offset 0 are not the mark \"MMIDIDX\\0\\0\" of an indexed dataset");
  const auto version = load<uint64_t>(bytes.data() + 9);
  MEGATRON_CHECK(version == 1, idx_name, ": version at offset 9 is ", version, ", expected 1");
  const int code = std::to_integer<int>(bytes[17]);
  MEGATRON_CHECK(code >= 1 && code <= 8, idx_name, ": element type at offset 17 is ", code,
                 ", expected 1 to 8");
  type = static_cast<IndexedType>(code);
  width = size_of(type);
  const auto sequences = load<uint64_t>(bytes.data() + 18),
             entries = load<uint64_t>(bytes.data() + 26);
  const uint64_t room = size - kHeaderBytes;
  const uint64_t sequence_bytes = multimodal ? 13 : 12;
  MEGATRON_CHECK(sequences <= room / sequence_bytes, idx_name,
                 ": number of sequences at offset 18 is ", sequences, ", which needs ",
                 sequence_bytes, " bytes each; ", room, " bytes follow the header",
                 "\nhint: the file was cut short; write the dataset again");
  MEGATRON_CHECK(entries >= 1, idx_name,
                 ": number of document entries at offset 26 is 0, expected at least 1");
  MEGATRON_CHECK(entries <= (room - sequences * sequence_bytes) / 8, idx_name,
                 ": number of document entries at offset 26 is ", entries,
                 ", which needs 8 bytes each; ", room - sequences * sequence_bytes,
                 " bytes are left for them",
                 "\nhint: the file was cut short; write the dataset again");
  num_sequences = sequences;
  num_entries = entries;
}

void IndexedDataset::Impl::read_arrays() {
  const std::byte* at = idx.bytes().data() + kHeaderBytes;
  lengths.resize(num_sequences);
  if (num_sequences > 0) std::memcpy(lengths.data(), at, 4 * num_sequences);
  at += 4 * num_sequences;
  pointers = at;
  at += 8 * num_sequences;
  documents.resize(num_entries);
  std::memcpy(documents.data(), at, 8 * num_entries);
  at += 8 * num_entries;
  modes = multimodal ? at : nullptr;
}

// Sequences must be contiguous from the start of the .bin file to its end.
void IndexedDataset::Impl::check_sequences() const {
  int64_t next = 0;
  for (int64_t i = 0; i < num_sequences; ++i) {
    const int64_t length_at = kHeaderBytes + 4 * i,
                  pointer_at = kHeaderBytes + 4 * num_sequences + 8 * i;
    MEGATRON_CHECK(lengths[i] >= 0, idx_name, ": length of sequence ", i, " at offset ", length_at,
                   " is ", lengths[i], ", expected at least 0");
    MEGATRON_CHECK(pointer(i) == next, idx_name, ": position of sequence ", i, " at offset ",
                   pointer_at, " is ", pointer(i), ", expected ", next,
                   ", the end of the sequence before it");
    next += lengths[i] * width;
    MEGATRON_CHECK(next <= bin_bytes, bin_name, ": sequence ", i, " ends at byte ", next,
                   " but the file has ", bin_bytes,
                   " bytes\nhint: the file was cut short; write the dataset again");
  }
  MEGATRON_CHECK(next == bin_bytes, bin_name, ": has ", bin_bytes, " bytes, the sequences of ",
                 idx_name, " take ", next, "\nhint: the two files do not belong together");
}

void IndexedDataset::Impl::check_documents() const {
  const int64_t base = kHeaderBytes + 12 * num_sequences;
  MEGATRON_CHECK(documents[0] == 0, idx_name, ": document entry 0 at offset ", base, " is ",
                 documents[0], ", expected 0");
  for (int64_t i = 1; i < num_entries; ++i) {
    MEGATRON_CHECK(documents[i] >= documents[i - 1] && documents[i] <= num_sequences, idx_name,
                   ": document entry ", i, " at offset ", base + 8 * i, " is ", documents[i],
                   ", expected ", documents[i - 1], " to ", num_sequences);
  }
  MEGATRON_CHECK(documents.back() == num_sequences, idx_name, ": last document entry at offset ",
                 base + 8 * (num_entries - 1), " is ", documents.back(),
                 ", expected the number of sequences ", num_sequences);
}

void IndexedDataset::Impl::check(std::span<const std::filesystem::path> folders) {
  if (folders.empty()) {
    check_sequences();
    check_documents();
    return;
  }
  const std::filesystem::path files[] = {idx_name, bin_name};
  const std::string name = cat(std::filesystem::path(prefix).filename().string(), "-",
                               hash_text(std::filesystem::absolute(prefix).string()).substr(0, 16),
                               multimodal ? "-multimodal" : "", "-index");
  const NodeResult result = once_per_node(folders, name, files, [&] {
    check_sequences();
    check_documents();
    return std::to_string(compute_hash());
  });
  checked_here = result.computed_here;
  std::call_once(hash_once, [&] { hash = std::stoull(result.text); });
}

IndexedDataset::IndexedDataset(const std::string& prefix, const Options& options)
    : impl_(new Impl) {
  MEGATRON_CHECK(!prefix.ends_with(".bin") && !prefix.ends_with(".idx"), "dataset prefix \"",
                 prefix, "\" ends in .bin or .idx\nhint: give the path without the extension");
  impl_->prefix = prefix;
  impl_->idx_name = idx_path(prefix).string();
  impl_->bin_name = bin_path(prefix).string();
  impl_->multimodal = options.multimodal;
  for (const std::string& name : {impl_->idx_name, impl_->bin_name})
    MEGATRON_CHECK(std::filesystem::exists(name), "no such file: ", name,
                   "\nhint: a dataset is given by the path of its two files without .bin and .idx");
  impl_->idx = MappedFile(impl_->idx_name);
  impl_->read_header();
  impl_->read_arrays();
  if (options.mmap) {
    impl_->bin = MappedFile(impl_->bin_name);
    impl_->bin_bytes = impl_->bin.bytes().size();
  } else {
    impl_->bin_file = std::make_unique<PositionalFile>(impl_->bin_name);
    impl_->bin_bytes = impl_->bin_file->size();
  }
  impl_->check(options.check_folders);
  impl_->num_tokens = impl_->bin_bytes / impl_->width;
}

IndexedDataset::IndexedDataset(IndexedDataset&&) noexcept = default;
IndexedDataset& IndexedDataset::operator=(IndexedDataset&&) noexcept = default;
IndexedDataset::~IndexedDataset() = default;

const std::string& IndexedDataset::prefix() const { return impl_->prefix; }
IndexedType IndexedDataset::type() const { return impl_->type; }
int64_t IndexedDataset::num_sequences() const { return impl_->num_sequences; }
int64_t IndexedDataset::num_documents() const { return impl_->num_entries - 1; }
int64_t IndexedDataset::num_tokens() const { return impl_->num_tokens; }
int64_t IndexedDataset::num_tokens(int64_t first, int64_t last) const {
  MEGATRON_ASSERT(first >= 0 && first <= last && last <= impl_->num_sequences);
  const auto start = [&](int64_t sequence) {
    return sequence < impl_->num_sequences ? impl_->pointer(sequence) : impl_->bin_bytes;
  };
  return (start(last) - start(first)) / impl_->width;
}
bool IndexedDataset::checked_here() const { return impl_->checked_here; }
std::span<const int32_t> IndexedDataset::sequence_lengths() const { return impl_->lengths; }
std::span<const int64_t> IndexedDataset::document_indices() const { return impl_->documents; }

int IndexedDataset::mode(int64_t sequence) const {
  MEGATRON_CHECK(sequence >= 0 && sequence < impl_->num_sequences, impl_->prefix,
                 ": there is no sequence ", sequence, " of ", impl_->num_sequences);
  return impl_->modes ? load<int8_t>(impl_->modes + sequence) : 0;
}

uint64_t IndexedDataset::index_hash() const {
  std::call_once(impl_->hash_once, [this] { impl_->hash = impl_->compute_hash(); });
  return impl_->hash;
}

void IndexedDataset::read_bytes(int64_t sequence, int64_t offset, int64_t count, void* out) const {
  MEGATRON_CHECK(sequence >= 0 && sequence < impl_->num_sequences, impl_->prefix,
                 ": there is no sequence ", sequence, " of ", impl_->num_sequences);
  const int64_t length = impl_->lengths[sequence];
  MEGATRON_CHECK(offset >= 0 && count >= 0 && offset <= length && count <= length - offset,
                 impl_->prefix, ": elements [", offset, ", ", offset, " + ", count,
                 ") reach beyond sequence ", sequence, " of length ", length);
  if (count == 0) return;
  const int64_t start = impl_->pointer(sequence) + offset * impl_->width,
                bytes = count * impl_->width;
  // The files were checked when opened; this catches changes while they are in use.
  MEGATRON_CHECK(start >= 0 && start <= impl_->bin_bytes && bytes <= impl_->bin_bytes - start,
                 impl_->bin_name, ": sequence ", sequence, " starts at byte ", start, " of ",
                 impl_->bin_bytes, "\nhint: the data was written anew while it is in use");
  if (impl_->bin_file) {
    impl_->bin_file->read(start, bytes, out);
  } else {
    std::memcpy(out, impl_->bin.bytes().data() + start, bytes);
  }
}

void IndexedDataset::read(int64_t sequence, int64_t offset, std::span<int64_t> out) const {
  // The narrow elements are read into the end of `out` and widened from the front, which needs no
  // other memory.
  const int64_t count = out.size();
  auto* raw = reinterpret_cast<std::byte*>(out.data()) + count * (8 - impl_->width);
  read_bytes(sequence, offset, count, raw);
  widen(impl_->type, raw, out);
}

std::vector<int64_t> IndexedDataset::read(int64_t sequence) const {
  MEGATRON_CHECK(sequence >= 0 && sequence < impl_->num_sequences, impl_->prefix,
                 ": there is no sequence ", sequence, " of ", impl_->num_sequences);
  std::vector<int64_t> out(impl_->lengths[sequence]);
  read(sequence, 0, out);
  return out;
}

int64_t IndexedDataset::document_of(int64_t sequence) const {
  const auto& documents = impl_->documents;
  return std::upper_bound(documents.begin(), documents.end(), sequence) - documents.begin() - 1;
}

namespace {

struct RangeResult {
  int64_t min = std::numeric_limits<int64_t>::max(), max = std::numeric_limits<int64_t>::min(),
          bad = 0;
};

// Scans sequences [begin, end); messages of the first bad tokens go to `messages` as (sequence,
// text).
RangeResult scan_sequences(const IndexedDataset& dataset, int64_t begin, int64_t end,
                           int64_t vocab_size,
                           std::vector<std::pair<int64_t, std::string>>& messages) {
  constexpr int64_t kPiece = 1 << 16;
  RangeResult result;
  std::vector<int64_t> tokens(kPiece);
  for (int64_t sequence = begin; sequence < end; ++sequence) {
    const int64_t length = dataset.sequence_lengths()[sequence];
    for (int64_t offset = 0; offset < length; offset += kPiece) {
      const std::span<int64_t> piece(tokens.data(), std::min(kPiece, length - offset));
      dataset.read(sequence, offset, piece);
      const auto [low, high] = std::minmax_element(piece.begin(), piece.end());
      result.min = std::min(result.min, *low);
      result.max = std::max(result.max, *high);
      if (vocab_size <= 0 || (*low >= 0 && *high < vocab_size)) continue;
      for (size_t i = 0; i < piece.size(); ++i) {
        if (piece[i] >= 0 && piece[i] < vocab_size) continue;
        if (++result.bad <= 5)
          messages.emplace_back(
              sequence,
              cat(bin_path(dataset.prefix()).string(), ": document ", dataset.document_of(sequence),
                  ", sequence ", sequence, ", offset ", offset + static_cast<int64_t>(i),
                  ": token id ", piece[i], " is outside the vocabulary of ", vocab_size));
      }
    }
  }
  return result;
}

uint64_t hash_elements(const IndexedDataset& dataset) {
  XXH3_state_t* state = XXH3_createState();
  XXH3_64bits_reset(state);
  std::vector<std::byte> buffer;
  constexpr int64_t kPiece = 1 << 18;
  const int64_t width = size_of(dataset.type());
  for (int64_t sequence = 0; sequence < dataset.num_sequences(); ++sequence) {
    const int64_t length = dataset.sequence_lengths()[sequence];
    for (int64_t offset = 0; offset < length; offset += kPiece) {
      const int64_t count = std::min(kPiece, length - offset);
      buffer.resize(count * width);
      dataset.read_bytes(sequence, offset, count, buffer.data());
      XXH3_64bits_update(state, buffer.data(), buffer.size());
    }
  }
  const uint64_t hash = XXH3_64bits_digest(state);
  XXH3_freeState(state);
  return hash;
}

}  // namespace

VerifyResult verify_indexed_dataset(const IndexedDataset& dataset, int64_t vocab_size,
                                    int threads) {
  VerifyResult result;
  result.num_tokens = dataset.num_tokens();
  RangeResult total;
  std::vector<std::pair<int64_t, std::string>> messages;
  std::mutex mutex;
  parallel_for(
      dataset.num_sequences(), 256,
      [&](int64_t begin, int64_t end) {
        std::vector<std::pair<int64_t, std::string>> found;
        const RangeResult range = scan_sequences(dataset, begin, end, vocab_size, found);
        const std::lock_guard lock(mutex);
        total = {std::min(total.min, range.min), std::max(total.max, range.max),
                 total.bad + range.bad};
        messages.insert(messages.end(), found.begin(), found.end());
      },
      threads);
  std::stable_sort(messages.begin(), messages.end(),
                   [](auto& a, auto& b) { return a.first < b.first; });
  for (size_t i = 0; i < std::min<size_t>(messages.size(), 5); ++i)
    result.bad_tokens.push_back(messages[i].second);
  result.num_bad_tokens = total.bad;
  if (result.num_tokens > 0) result.min_token = total.min, result.max_token = total.max;
  result.hash = hash_elements(dataset);
  return result;
}

}  // namespace megatron
