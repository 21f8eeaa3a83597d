#include "megatron/datasets/sources/byte_source.h"

#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/files.h"

namespace megatron {
namespace {

constexpr size_t kBufferBytes = 1 << 18;

class PlainSource : public ByteSource {
 public:
  explicit PlainSource(const std::string& path) : path_(path), fd_(open_regular_file(path)) {}
  PlainSource(const PlainSource&) = delete;
  PlainSource& operator=(const PlainSource&) = delete;
  ~PlainSource() override { ::close(fd_); }

  size_t read(char* out, size_t capacity) override {
    size_t done = 0;
    while (done < capacity) {
      const ssize_t got = ::read(fd_, out + done, capacity - done);
      if (got < 0 && errno == EINTR) continue;
      MEGATRON_CHECK(got >= 0, path_, ": cannot read at byte offset ", bytes_, ": ",
                     std::strerror(errno));
      if (got == 0) break;
      done += got, bytes_ += got;
    }
    return done;
  }
  uint64_t file_bytes_read() const override { return bytes_; }
  void rewind() {
    ::lseek(fd_, 0, SEEK_SET);
    bytes_ = 0;
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int fd_ = -1;
  uint64_t bytes_ = 0;
};

// Compressed input, buffered.
class CompressedSource : public ByteSource {
 public:
  explicit CompressedSource(std::unique_ptr<PlainSource> file)
      : file_(std::move(file)), buffer_(kBufferBytes) {}
  uint64_t file_bytes_read() const override { return file_->file_bytes_read() - (end_ - begin_); }

 protected:
  // False at the end of the file.
  bool fill() {
    if (begin_ < end_) return true;
    begin_ = 0;
    end_ = file_->read(buffer_.data(), buffer_.size());
    return end_ > 0;
  }
  [[noreturn]] void truncated(const char* what) const {
    throw_error(cat(file_->path(), ": the ", what, " data ends at byte offset ", file_bytes_read(),
                    " before its end mark\nhint: the archive was cut short"));
  }
  [[noreturn]] void damaged(const char* what, const char* reason) const {
    throw_error(cat(file_->path(), ": damaged ", what, " data near byte offset ", file_bytes_read(),
                    ": ", reason));
  }

  std::unique_ptr<PlainSource> file_;
  std::vector<char> buffer_;
  size_t begin_ = 0, end_ = 0;
};

class GzipSource : public CompressedSource {
 public:
  explicit GzipSource(std::unique_ptr<PlainSource> file) : CompressedSource(std::move(file)) {
    MEGATRON_CHECK(::inflateInit2(&stream_, 15 + 16) == Z_OK, "zlib cannot be initialised");
  }
  ~GzipSource() override { ::inflateEnd(&stream_); }

  size_t read(char* out, size_t capacity) override {
    size_t done = 0;
    while (done < capacity) {
      if (!fill()) {
        if (inside_member_) truncated("gzip");
        break;
      }
      inside_member_ = true;
      stream_.next_in = reinterpret_cast<Bytef*>(buffer_.data() + begin_);
      stream_.avail_in = end_ - begin_;
      stream_.next_out = reinterpret_cast<Bytef*>(out + done);
      stream_.avail_out = std::min<size_t>(capacity - done, 1U << 30);
      const uInt room = stream_.avail_out;
      const int result = ::inflate(&stream_, Z_NO_FLUSH);
      begin_ = end_ - stream_.avail_in;
      done += room - stream_.avail_out;
      if (result == Z_STREAM_END) {  // another member may follow
        ::inflateReset(&stream_);
        inside_member_ = false;
      } else if (result != Z_OK && result != Z_BUF_ERROR) {
        damaged("gzip", stream_.msg ? stream_.msg : "unknown");
      }
    }
    return done;
  }

 private:
  z_stream stream_{};
  bool inside_member_ = false;
};

class ZstdSource : public CompressedSource {
 public:
  explicit ZstdSource(std::unique_ptr<PlainSource> file)
      : CompressedSource(std::move(file)), stream_(::ZSTD_createDStream()) {
    MEGATRON_CHECK(stream_ != nullptr, "zstd cannot be initialised");
  }
  ~ZstdSource() override { ::ZSTD_freeDStream(stream_); }

  size_t read(char* out, size_t capacity) override {
    ZSTD_outBuffer output{out, capacity, 0};
    while (output.pos < capacity) {
      // First drains zstd's buffered output, before more input is read.
      const bool more = fill();
      if (!more && !inside_frame_) break;
      ZSTD_inBuffer input{buffer_.data() + begin_, end_ - begin_, 0};
      const size_t before = output.pos;
      const size_t result = ::ZSTD_decompressStream(stream_, &output, &input);
      begin_ += input.pos;
      if (::ZSTD_isError(result)) damaged("zstd", ::ZSTD_getErrorName(result));
      inside_frame_ = result != 0;
      if (!more && output.pos == before) {
        if (inside_frame_) truncated("zstd");
        break;
      }
    }
    return output.pos;
  }

 private:
  ZSTD_DStream* stream_;
  bool inside_frame_ = false;
};

}  // namespace

std::unique_ptr<ByteSource> open_bytes(const std::string& path) {
  auto file = std::make_unique<PlainSource>(path);
  char mark[4] = {};
  const size_t got = file->read(mark, sizeof mark);
  file->rewind();
  if (got >= 2 && std::memcmp(mark, "\x1f\x8b", 2) == 0)
    return std::make_unique<GzipSource>(std::move(file));
  if (got == 4 && std::memcmp(mark, "\x28\xb5\x2f\xfd", 4) == 0)
    return std::make_unique<ZstdSource>(std::move(file));
  for (const char* extension : {".gz", ".zst"})
    MEGATRON_CHECK(!path.ends_with(extension), path, ": does not start like a ", extension, " file",
                   "\nhint: the archive is empty, was cut short, or is something else");
  return file;
}

}  // namespace megatron
