// Helpers of the tests of rows with media: golden archives, own archives, rows as text.
#pragma once

#include <zlib.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/datasets/multimodal/multimodal_row.h"
#include "megatron/datasets/multimodal/multimodal_source.h"
#include "megatron/datasets/multimodal/tar_reader.h"
#include "megatron/datasets/multimodal/webdataset.h"

namespace megatron::testing_multimodal {

inline const std::string kGoldens = std::string(MEGATRON_SOURCE_DIR) + "/tests/golden/multimodal/";

inline std::string inflated(const std::string& hex) {
  std::string packed;
  for (size_t i = 0; i < hex.size(); i += 2)
    packed += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  std::string out(size_t{1} << 17, '\0');
  uLongf size = out.size();
  if (uncompress(reinterpret_cast<Bytef*>(out.data()), &size,
                 reinterpret_cast<const Bytef*>(packed.data()), packed.size()) != Z_OK)
    throw_error("an archive of the goldens is damaged");
  out.resize(size);
  return out;
}

struct GoldenArchive {
  std::string name, bytes;
  nlohmann::json facts;
};

inline std::vector<GoldenArchive> golden_archives() {
  std::vector<GoldenArchive> out;
  for (const auto& row : nlohmann::json::parse(read_file(kGoldens + "archives.json")))
    out.push_back({row.at("name"), inflated(row.at("file")), row});
  return out;
}

inline std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// An archive of small files in POSIX's form; `type` of the last one.
inline std::string tar_of(const std::vector<std::pair<std::string, std::string>>& files,
                          char type = '0') {
  std::string out;
  for (size_t i = 0; i < files.size(); ++i) {
    const auto& [name, content] = files[i];
    std::string header(512, '\0');
    header.replace(0, name.size(), name);
    std::string size(11, '0');
    size_t at = 11;
    for (size_t rest = content.size(); rest > 0; rest /= 8)
      size[--at] = static_cast<char>('0' + rest % 8);
    header.replace(124, 11, size);
    header[156] = i + 1 == files.size() ? type : '0';
    header.replace(257, 8, std::string("ustar\00000", 8));
    header.replace(148, 8, "        ");
    unsigned sum = 0;
    for (const char c : header) sum += static_cast<uint8_t>(c);
    std::string digits(6, '0');
    for (size_t d = 6; d > 0; sum /= 8) digits[--d] = static_cast<char>('0' + sum % 8);
    header.replace(148, 7, digits + std::string(1, '\0'));
    out += header + content + std::string((512 - content.size() % 512) % 512, '\0');
  }
  return out + std::string(1024, '\0');
}

// Removed with its content at the end.
class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "multimodal-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw_error("no temporary folder");
    path_ = name;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string write(const std::string& name, const std::string& content) const {
    const std::filesystem::path path = path_ / name;
    std::filesystem::create_directories(path.parent_path());
    write_file_atomically(path, content);
    return path.string();
  }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

// A row on one line: "user [image:a.png] words | assistant ...".
inline std::string text_of(const MultimodalRow& row) {
  std::string out;
  const auto medium = [&](int64_t number) {
    const RowMedium& one = row.media.at(static_cast<size_t>(number));
    out += cat("[", name_of(one.kind), ":", one.path.empty() ? one.bytes : one.path, "]");
  };
  for (const RowMessage& message : row.messages) {
    out += cat(out.empty() ? "" : " | ",
               nlohmann::json::parse(message.json).at("role").get<std::string>(), " ");
    for (const RowPart& part : message.parts) {
      if (part.medium < 0)
        out += part.text;
      else
        medium(part.medium);
    }
  }
  for (const RowPart& part : row.document) {
    if (part.medium < 0)
      out += part.text;
    else
      medium(part.medium);
  }
  if (!row.messages.empty() || !row.document.empty()) return out;
  for (int64_t i = 0; i < std::ssize(row.media); ++i) medium(i);
  return out + " " + row.caption;
}

inline std::vector<SourceSample> read_all(const std::string& path, const std::string& root) {
  std::vector<SourceSample> out;
  const SourceFiles files = list_source_files(path);
  for (const std::string& file : files.paths)
    read_source_file(files.kind, file,
                     [&](const SourceRow& row) { out.push_back(read_sample(row, root)); });
  return out;
}

}  // namespace megatron::testing_multimodal
