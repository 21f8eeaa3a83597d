#include "megatron/datasets/sources/document_source.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/datasets/sources/byte_source.h"
#include "megatron/datasets/sources/parquet_source.h"
#include "megatron/tokenizers/sentence_splitter.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

// The extension below .gz and .zst.
std::string inner_extension(const fs::path& path) {
  const std::string extension = path.extension().string();
  return extension == ".gz" || extension == ".zst" ? path.stem().extension().string() : extension;
}

InputFormat format_of(const fs::path& path, bool json_is_jsonl) {
  const std::string extension = inner_extension(path);
  if (extension == ".jsonl" || (extension == ".json" && json_is_jsonl)) return InputFormat::kJsonl;
  return extension == ".parquet" ? InputFormat::kParquet : InputFormat::kText;
}

std::vector<fs::path> files_below(const fs::path& folder) {
  std::vector<fs::path> out;
  const auto hidden = [](const fs::path& path) {
    return path.filename().string().starts_with(".");
  };
  auto entry =
      fs::recursive_directory_iterator(folder, fs::directory_options::follow_directory_symlink);
  for (; entry != fs::recursive_directory_iterator(); ++entry) {
    if (hidden(entry->path())) {
      if (entry->is_directory()) entry.disable_recursion_pending();
    } else if (entry->is_regular_file()) {
      out.push_back(entry->path());
    }
  }
  std::sort(out.begin(), out.end(),
            [](const fs::path& a, const fs::path& b) { return a.native() < b.native(); });
  return out;
}

void add_folder(const fs::path& folder, InputFormat format, std::vector<DocumentFile>& files) {
  const std::vector<fs::path> paths = files_below(folder);
  MEGATRON_CHECK(!paths.empty(), folder.string(), ": the folder holds no files");
  const bool all_json = std::all_of(paths.begin(), paths.end(), [](const fs::path& path) {
    return format_of(path, true) == InputFormat::kJsonl;
  });
  const size_t first = files.size();
  for (const fs::path& path : paths)
    files.push_back(
        {path.string(), format == InputFormat::kAuto ? format_of(path, all_json) : format});
  for (size_t i = first + 1; i < files.size(); ++i)
    MEGATRON_CHECK(files[i].format == files[first].format, folder.string(),
                   ": holds files of different kinds, such as ", files[first].path, " and ",
                   files[i].path,
                   "\nhint: say how to read them with --input-format text, jsonl or parquet");
}

bool is_ascii_alphanumeric(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

// The last position at or before `limit` where text may be split; 0 if there is none.
size_t last_cut(std::string_view text, size_t limit) {
  if (text.size() < 3) return 0;
  for (size_t i = std::min(limit, text.size() - 2); i > 0; --i)
    if (text[i] == ' ' && is_ascii_alphanumeric(text[i - 1]) && is_ascii_alphanumeric(text[i + 1]))
      return i;
  return 0;
}

constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

// Reads one file into chunks.
class FileReader {
 public:
  FileReader(const DocumentFile& file, const ChunkOptions& options,
             const std::function<bool(Chunk)>& emit)
      : file_(file), options_(options), emit_(emit), source_(open_bytes(file.path)) {}

  bool read_lines();
  bool read_text();
  bool read_sentence_pieces();

 private:
  // Appends up to `bytes` more; false at the end of the file.
  bool grow(size_t bytes);
  Chunk take(size_t bytes);

  const DocumentFile& file_;
  const ChunkOptions& options_;
  const std::function<bool(Chunk)>& emit_;
  std::unique_ptr<ByteSource> source_;
  std::string buffer_;
  uint64_t offset_ = 0;      // offset of the buffer in the file
  uint64_t file_bytes_ = 0;  // already accounted for
};

bool FileReader::grow(size_t bytes) {
  const size_t before = buffer_.size();
  buffer_.resize(before + bytes);
  const size_t got = source_->read(buffer_.data() + before, bytes);
  buffer_.resize(before + got);
  if (offset_ == 0 && before == 0 && std::string_view(buffer_).starts_with(kByteOrderMark)) {
    buffer_.erase(0, kByteOrderMark.size());
    offset_ = kByteOrderMark.size();
  }
  return got == bytes;
}

Chunk FileReader::take(size_t bytes) {
  Chunk chunk;
  chunk.file = &file_;
  chunk.text = buffer_.substr(0, bytes);
  chunk.offset = offset_;
  chunk.file_bytes = source_->file_bytes_read() - file_bytes_;
  file_bytes_ = source_->file_bytes_read();
  buffer_.erase(0, bytes);
  offset_ += bytes;
  return chunk;
}

bool FileReader::read_lines() {
  int64_t line = 1;
  for (bool more = true; more;) {
    const size_t searched = buffer_.size();
    more = grow(options_.chunk_bytes);
    const size_t newline = buffer_.rfind('\n');
    const bool whole = newline != std::string::npos && newline >= searched;
    MEGATRON_CHECK(whole || buffer_.size() <= options_.max_line_bytes, file_.path, ": line ", line,
                   " is longer than ", options_.max_line_bytes,
                   " bytes\nhint: allow longer lines with --max-line-mib");
    if (more && !whole) continue;
    Chunk chunk = take(more ? newline + 1 : buffer_.size());
    chunk.first_line = line;
    line += std::count(chunk.text.begin(), chunk.text.end(), '\n');
    if (!chunk.text.empty() && !emit_(std::move(chunk))) return false;
  }
  return true;
}

bool FileReader::read_text() {
  bool first = true;
  for (bool more = true; more;) {
    const size_t wanted = options_.text_piece_bytes;
    more = buffer_.size() > wanted ? more : grow(wanted + 1 - buffer_.size());
    size_t cut = more ? last_cut(buffer_, wanted) : buffer_.size();
    while (more && cut == 0) {
      MEGATRON_CHECK(buffer_.size() <= options_.max_line_bytes, file_.path,
                     ": the text from byte offset ", offset_,
                     " on has no space between two letters within ", options_.max_line_bytes,
                     " bytes\nhint: split the file, or allow more with --max-line-mib");
      more = grow(wanted);
      cut = more ? last_cut(buffer_, buffer_.size()) : buffer_.size();
    }
    Chunk chunk = take(cut);
    chunk.starts_document = std::exchange(first, false);
    chunk.ends_document = !more;
    if (!emit_(std::move(chunk))) return false;
  }
  return true;
}

bool FileReader::read_sentence_pieces() {
  constexpr size_t kWanted = 4 * SentenceSplitter::kPieceCharacters + 1;  // at most 4 bytes each
  bool first = true;
  for (bool more = true;;) {
    if (more && buffer_.size() < kWanted) more = grow(kWanted - buffer_.size());
    const size_t cut = SentenceSplitter::first_piece(buffer_);
    const bool last = !more && cut == buffer_.size();
    Chunk chunk = take(cut);
    chunk.starts_document = std::exchange(first, false);
    chunk.ends_document = last;
    if (!emit_(std::move(chunk))) return false;
    if (last) return true;
  }
}

}  // namespace

std::vector<DocumentFile> list_input_files(std::span<const std::string> inputs,
                                           InputFormat format) {
  std::vector<DocumentFile> files;
  for (const std::string& input : inputs) {
    if (fs::is_directory(input)) {
      add_folder(input, format, files);
    } else {
      MEGATRON_CHECK(fs::exists(input), "--input ", input, ": no such file or folder");
      check_regular_file(input);
      files.push_back({input, format == InputFormat::kAuto ? format_of(input, true) : format});
    }
  }
  return files;
}

void read_chunks(std::span<const DocumentFile> files, const ChunkOptions& options,
                 const std::function<bool(Chunk)>& emit) {
  for (const DocumentFile& file : files) {
    bool go_on = true;
    if (file.format == InputFormat::kParquet) {
      go_on = read_parquet(file, options, emit);
    } else if (file.format == InputFormat::kJsonl) {
      go_on = FileReader(file, options, emit).read_lines();
    } else if (options.sentence_pieces) {
      go_on = FileReader(file, options, emit).read_sentence_pieces();
    } else {
      go_on = FileReader(file, options, emit).read_text();
    }
    if (!go_on) return;
  }
}

}  // namespace megatron
