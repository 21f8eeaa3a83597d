#include "megatron/tokenizers/detail/text/text_blocks.h"

#include <simdjson.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string_view>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/tokenizers/parse_json.h"

namespace megatron {
namespace {

constexpr size_t kBlockBytes = size_t{1} << 20;
constexpr size_t kMaxLineBytes = size_t{1} << 30;

// A file as a stream of its (decompressed) bytes.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  virtual size_t read(char* to, size_t size) = 0;  // 0 at the end
};

struct FileCloser {
  void operator()(std::FILE* file) const { std::fclose(file); }
};

class PlainSource : public ByteSource {
 public:
  explicit PlainSource(const std::filesystem::path& path)
      : path_(path), file_(::fdopen(open_input_file(path), "rb")) {
    MEGATRON_CHECK(file_ != nullptr, path.string(), ": cannot be opened: ", std::strerror(errno));
  }
  size_t read(char* to, size_t size) override {
    const size_t got = std::fread(to, 1, size, file_.get());
    MEGATRON_CHECK(got == size || std::ferror(file_.get()) == 0, path_.string(),
                   ": cannot be read: ", std::strerror(errno));
    return got;
  }

 private:
  std::filesystem::path path_;
  std::unique_ptr<std::FILE, FileCloser> file_;
};

class GzipSource : public ByteSource {
 public:
  explicit GzipSource(const std::filesystem::path& path)
      : path_(path), file_(gzdopen(open_input_file(path), "rb")) {
    MEGATRON_CHECK(file_ != nullptr, path.string(), ": cannot be opened: ", std::strerror(errno));
    gzbuffer(file_, 1 << 18);
  }
  ~GzipSource() override { gzclose(file_); }
  size_t read(char* to, size_t size) override {
    const int got = gzread(file_, to, static_cast<unsigned>(size));
    int code = Z_OK;
    const char* reason = gzerror(file_, &code);
    MEGATRON_CHECK(got >= 0 && code != Z_BUF_ERROR, path_.string(),
                   ": the gzip data ends early or is damaged (", reason, ")");
    MEGATRON_CHECK(got == 0 || gzdirect(file_) == 0, path_.string(), ": not a gzip file");
    return static_cast<size_t>(got);
  }

 private:
  std::filesystem::path path_;
  gzFile file_;
};

class ZstdSource : public ByteSource {
 public:
  explicit ZstdSource(const std::filesystem::path& path)
      : path_(path),
        file_(path),
        stream_(ZSTD_createDStream(), &ZSTD_freeDStream),
        input_(ZSTD_DStreamInSize()) {
    MEGATRON_CHECK(stream_ != nullptr, "out of memory for zstd");
  }
  size_t read(char* to, size_t size) override {
    ZSTD_outBuffer out{to, size, 0};
    while (out.pos == 0) {
      if (pending_.pos == pending_.size) {
        pending_ = {input_.data(), file_.read(input_.data(), input_.size()), 0};
        if (pending_.size == 0) {
          MEGATRON_CHECK(state_ == 0, path_.string(), ": the zstd data ends early");
          return 0;
        }
      }
      state_ = ZSTD_decompressStream(stream_.get(), &out, &pending_);
      MEGATRON_CHECK(!ZSTD_isError(state_), path_.string(), ": the zstd data is damaged (",
                     ZSTD_getErrorName(state_), ")");
    }
    return out.pos;
  }

 private:
  std::filesystem::path path_;
  PlainSource file_;
  std::unique_ptr<ZSTD_DStream, decltype(&ZSTD_freeDStream)> stream_;
  std::vector<char> input_;
  ZSTD_inBuffer pending_{nullptr, 0, 0};
  size_t state_ = 0;  // 0: at the end of a frame
};

std::unique_ptr<ByteSource> open_source(const std::filesystem::path& path) {
  if (path.extension() == ".gz") return std::make_unique<GzipSource>(path);
  if (path.extension() == ".zst") return std::make_unique<ZstdSource>(path);
  return std::make_unique<PlainSource>(path);
}

bool is_json_lines(const std::filesystem::path& path, bool in_folder) {
  std::filesystem::path name = path.filename();
  if (name.extension() == ".gz" || name.extension() == ".zst") name = name.stem();
  const std::filesystem::path extension = name.extension();
  return extension == ".jsonl" || extension == ".ndjson" || (extension == ".json" && !in_folder);
}

bool looks_binary(const std::filesystem::path& path) {
  char head[8192];
  const size_t got = open_source(path)->read(head, sizeof(head));
  return std::memchr(head, 0, got) != nullptr;
}

// Regular files below `folder` in sorted order.
void list_folder(const std::filesystem::path& folder, std::vector<std::filesystem::path>& files) {
  std::vector<std::filesystem::path> entries;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    entries.push_back(entry.path());
  std::sort(entries.begin(), entries.end());
  for (const std::filesystem::path& entry : entries) {
    if (entry.filename().string().starts_with('.')) continue;
    const auto status = std::filesystem::symlink_status(entry);
    if (std::filesystem::is_directory(status)) {
      list_folder(entry, files);
    } else if (std::filesystem::is_regular_file(status) && !looks_binary(entry)) {
      files.push_back(entry);
    }
  }
}

}  // namespace

struct TextBlockReader::Impl {
  struct File {
    std::filesystem::path path;
    bool json_lines;
  };
  std::vector<File> files;
  size_t at = 0;  // index of the current file
  std::unique_ptr<ByteSource> source;
  std::string buffer;  // read but not yet returned
  bool at_end = false;
  int64_t line = 1;

  // Reads on until the buffer holds `size` bytes or the file ends.
  void fill(size_t size) {
    while (buffer.size() < size && !at_end) {
      const size_t before = buffer.size();
      buffer.resize(std::max(size, before + (size_t{1} << 16)));
      const size_t got = source->read(buffer.data() + before, buffer.size() - before);
      buffer.resize(before + got);
      at_end = got == 0;
    }
  }

  size_t cut_lines() {
    for (size_t from = kBlockBytes;; from = buffer.size()) {
      fill(from + 1);
      const size_t newline = buffer.find('\n', from - 1);
      if (newline != buffer.npos) return newline + 1;
      if (at_end) return buffer.size();
      MEGATRON_CHECK(buffer.size() < kMaxLineBytes, files[at].path.string(), ": line ", line,
                     " is longer than 1 GiB");
    }
  }

  // Splits after a newline followed by a visible character, else (in the next mebibyte) between
  // characters.
  size_t cut_text() {
    fill(2 * kBlockBytes);
    if (buffer.size() <= kBlockBytes) return buffer.size();
    for (size_t i = kBlockBytes; i + 1 < buffer.size(); ++i) {
      if (buffer[i] == '\n' && static_cast<unsigned char>(buffer[i + 1]) > ' ') return i + 1;
    }
    size_t end = buffer.size();
    if (!at_end) {
      while (end > kBlockBytes && (static_cast<unsigned char>(buffer[end - 1]) & 0xc0) == 0x80)
        --end;
      if (end > kBlockBytes && static_cast<unsigned char>(buffer[end - 1]) >= 0xc0) --end;
    }
    return end;
  }
};

TextBlockReader::TextBlockReader(const std::vector<std::filesystem::path>& paths)
    : impl_(std::make_unique<Impl>()) {
  for (const std::filesystem::path& path : paths) {
    MEGATRON_CHECK(std::filesystem::exists(path), path.string(), ": no such file or folder");
    std::vector<std::filesystem::path> found;
    const bool folder = std::filesystem::is_directory(path);
    if (folder) {
      list_folder(path, found);
      MEGATRON_CHECK(!found.empty(), path.string(), ": the folder holds no text files");
    } else {
      found.push_back(path);
    }
    for (const std::filesystem::path& file : found)
      impl_->files.push_back({file, is_json_lines(file, folder)});
  }
}

TextBlockReader::~TextBlockReader() = default;

int64_t TextBlockReader::num_files() const { return static_cast<int64_t>(impl_->files.size()); }

bool TextBlockReader::next(TextBlock& block) {
  Impl& s = *impl_;
  while (s.at < s.files.size()) {
    const Impl::File& file = s.files[s.at];
    if (s.source == nullptr) {
      s.source = open_source(file.path);
      s.buffer.clear();
      s.at_end = false;
      s.line = 1;
    }
    const size_t end = file.json_lines ? s.cut_lines() : s.cut_text();
    if (end == 0) {
      s.source.reset();
      ++s.at;
      continue;
    }
    block = {s.buffer.substr(0, end), &file.path, file.json_lines, s.line};
    s.line += std::count(block.bytes.begin(), block.bytes.end(), '\n');
    s.buffer.erase(0, end);
    return true;
  }
  return false;
}

std::vector<std::string> block_documents(const TextBlock& block,
                                         const std::vector<std::string>& keys) {
  if (!block.json_lines) return {block.bytes};
  std::vector<std::string> documents;
  simdjson::dom::parser parser;
  std::string_view rest = block.bytes;
  for (int64_t line_number = block.first_line; !rest.empty(); ++line_number) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    const std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (line.find_first_not_of(" \t\r") == line.npos) continue;
    const auto where = [&] { return cat(block.path->string(), ": line ", line_number); };
    simdjson::dom::element element;
    const simdjson::error_code error = parse_json(parser, line, line.size(), element);
    MEGATRON_CHECK(error != simdjson::UTF8_ERROR, where(), ": is not UTF-8");
    MEGATRON_CHECK(!error, where(), ": is no JSON: ", simdjson::error_message(error));
    simdjson::dom::object object;
    MEGATRON_CHECK(element.get(object) == simdjson::SUCCESS, where(), " is not a JSON object");
    for (const std::string& key : keys) {
      std::string_view text;
      const auto found = object[key];
      MEGATRON_CHECK(found.error() == simdjson::SUCCESS, where(), " has no \"", key, "\"");
      MEGATRON_CHECK(found.get(text) == simdjson::SUCCESS, where(), ": \"", key,
                     "\" is not a string");
      documents.emplace_back(text);
    }
  }
  return documents;
}

}  // namespace megatron
