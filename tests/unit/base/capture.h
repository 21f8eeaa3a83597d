// Captures what a part of a test writes to a file descriptor.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <string>

namespace megatron {

class Capture {
 public:
  explicit Capture(int fd) : fd_(fd), file_(std::tmpfile()) {
    std::fflush(nullptr);
    saved_ = ::dup(fd);
    ::dup2(::fileno(file_), fd);
  }
  ~Capture() { finish(); }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  // Ends the capture and returns what was written.
  std::string finish() {
    if (file_ == nullptr) return {};
    std::fflush(nullptr);
    ::dup2(saved_, fd_);
    ::close(saved_);
    std::string text;
    std::rewind(file_);
    for (int c; (c = std::fgetc(file_)) != EOF;) text += static_cast<char>(c);
    std::fclose(file_);
    file_ = nullptr;
    return text;
  }

 private:
  int fd_;
  int saved_ = -1;
  std::FILE* file_;
};

}  // namespace megatron
