#include "megatron/datasets/multimodal/multimodal_source.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/datasets/multimodal/energon/energon_source.h"
#include "megatron/datasets/multimodal/tar_reader.h"
#include "megatron/datasets/multimodal/webdataset.h"
#include "megatron/datasets/sources/document_source.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostRowBytes = size_t{1} << 30;

std::optional<SourceKind> source_kind_of(const fs::path& path) {
  std::string extension = path.extension().string();
  if (extension == ".gz" || extension == ".zst") extension = path.stem().extension().string();
  if (extension == ".tar") return SourceKind::kTar;
  if (extension == ".parquet") return SourceKind::kParquet;
  if (extension == ".json" || extension == ".jsonl") return SourceKind::kJson;
  return {};
}

std::string bytes_of(const MappedFile& file, const TarMember& member) {
  return {reinterpret_cast<const char*>(file.bytes().data()) + member.offset, member.size};
}

// Whether the JSON of a sample is a row of its own, and no list of facts beside a caption.
bool is_row(const std::string& json) {
  const auto object = nlohmann::json::parse(json, nullptr, false);
  return object.is_object() && (object.contains("conversations") || object.contains("messages") ||
                                object.contains("document"));
}

void add_container(const ShardSample& sample, const std::string& path, SourceRow& row) {
  for (const auto& [member_kind, kind] :
       {std::pair(MemberKind::kImage, MediaKind::kImage), {MemberKind::kSound, MediaKind::kSound}})
    for (const ShardMember* member : sample.media(member_kind)) {
      MEGATRON_CHECK(member->place.size > 0, row.name, ": byte ", member->place.offset, ": ",
                     member->place.name, " has 0 bytes");
      row.container.push_back({kind, member->place.name, {}});
      row.places.push_back({path, member->place.offset, member->place.size});
    }
}

void read_tar_file(const std::string& path, const std::function<void(SourceRow)>& emit) {
  const MappedFile file(path);
  for (const ShardSample& sample : group_members(read_tar(file.bytes(), path), path)) {
    SourceRow row;
    row.name = cat(path, ": ", sample.key);
    add_container(sample, path, row);
    const ShardMember *json = sample.find("json"), *text = sample.find("txt");
    MEGATRON_CHECK(json != nullptr || text != nullptr, row.name,
                   ": has neither a caption (.txt) nor a row (.json); it has ",
                   listed(sample.members, &ShardMember::extension));
    if (json != nullptr) row.json = bytes_of(file, json->place);
    if (text != nullptr && (json == nullptr || !is_row(row.json))) {
      row.json.clear();
      row.caption = bytes_of(file, text->place);
    }
    emit(std::move(row));
  }
}

std::string number_name(const std::string& path, const char* what, int64_t number) {
  return cat(path, ": ", what, " ", number);
}

// A list of objects, as LLaVA publishes them: its elements one after the other.
void read_json_list(const std::string& path, std::string_view text,
                    const std::function<void(SourceRow)>& emit) {
  int depth = 0;
  int64_t number = 0;
  size_t begin = 0;
  bool in_text = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    MEGATRON_CHECK(
        depth != 1 || in_text || std::string_view(" \t\r\n,{]").find(c) != std::string_view::npos,
        path, ": byte ", i, ": an element of the list of rows is no object");
    if (in_text) {
      if (c == '\\') ++i;
      if (c == '"') in_text = false;
    } else if (c == '"') {
      in_text = true;
    } else if (c == '[' || c == '{') {
      if (++depth == 2) begin = i;
    } else if (c == ']' || c == '}') {
      if (--depth == 1)
        emit({number_name(path, "row", ++number),
              std::string(text.substr(begin, i + 1 - begin)),
              {},
              {},
              {}});
      if (depth == 0) {
        MEGATRON_CHECK(text.find_first_not_of(" \t\r\n", i + 1) == std::string_view::npos, path,
                       ": byte ", i + 1, ": something follows the list of rows");
        return;
      }
    }
  }
  throw_error(cat(path, ": the list of rows is cut: it has no end; ", number, " rows are whole"));
}

void read_rows(const std::string& path, InputFormat format,
               const std::function<void(SourceRow)>& emit) {
  const DocumentFile file{path, format};
  ChunkOptions options;
  options.keys = {kAllColumnsAndBytes};
  options.max_line_bytes = kMostRowBytes;
  read_chunks({&file, 1}, options, [&](const Chunk& chunk) {
    if (format == InputFormat::kParquet) {
      int64_t begin = 0;
      for (size_t r = 0; r < chunk.ends.at(0).size(); begin = chunk.ends[0][r++])
        emit({number_name(path, "row", chunk.first_line + static_cast<int64_t>(r)),
              chunk.text.substr(static_cast<size_t>(begin),
                                static_cast<size_t>(chunk.ends[0][r] - begin)),
              {},
              {},
              {}});
      return true;
    }
    for_each_line_of(chunk.text, [&](std::string_view line, int64_t number) {
      if (line.find_first_not_of(" \t\r") != std::string_view::npos)
        emit({number_name(path, "line", chunk.first_line + number - 1),
              std::string(line),
              {},
              {},
              {}});
    });
    return true;
  });
}

// Whether a file of JSON is one list.
bool is_json_list(const std::string& path) {
  if (fs::path(path).extension() != ".json") return false;
  const MappedFile file(path);
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()),
                              file.bytes().size());
  const size_t first = text.find_first_not_of(" \t\r\n");
  return first != std::string_view::npos && text[first] == '[';
}

}  // namespace

SourceFiles list_source_files(const std::string& path, const std::string& part) {
  std::error_code error;
  if (is_energon(path)) {
    auto energon = open_energon(path, part);
    return {SourceKind::kTar, energon->shards(), energon};
  }
  MEGATRON_CHECK(fs::exists(path, error), path, ": there is no such file or folder");
  if (!fs::is_directory(path, error)) {
    const std::optional<SourceKind> kind = source_kind_of(path);
    MEGATRON_CHECK(kind.has_value(), path, ": is none of .tar, .parquet, .json and .jsonl");
    check_regular_file(path);
    return {*kind, {path}, nullptr};
  }
  std::vector<fs::path> files;
  for (const auto& entry :
       fs::recursive_directory_iterator(path, fs::directory_options::follow_directory_symlink))
    if (entry.is_regular_file() && source_kind_of(entry.path()) &&
        !entry.path().filename().string().starts_with("."))
      files.push_back(entry.path());
  std::sort(files.begin(), files.end(),
            [](const fs::path& a, const fs::path& b) { return a.native() < b.native(); });
  for (const SourceKind kind : {SourceKind::kTar, SourceKind::kParquet, SourceKind::kJson}) {
    SourceFiles out{kind, {}, nullptr};
    for (const fs::path& file : files)
      if (source_kind_of(file) == kind) out.paths.push_back(file.string());
    if (!out.paths.empty()) return out;
  }
  throw_error(cat(path, ": the folder has no .tar, .parquet, .json or .jsonl files"));
}

void read_source_file(const SourceFiles& files, size_t file,
                      const std::function<void(SourceRow)>& emit) {
  if (files.energon != nullptr) return files.energon->read(file, emit);
  read_source_file(files.kind, files.paths[file], emit);
}

void read_source_file(SourceKind kind, const std::string& path,
                      const std::function<void(SourceRow)>& emit) {
  if (kind == SourceKind::kTar) return read_tar_file(path, emit);
  if (kind == SourceKind::kParquet) return read_rows(path, InputFormat::kParquet, emit);
  if (!is_json_list(path)) return read_rows(path, InputFormat::kJsonl, emit);
  const MappedFile file(path);
  read_json_list(path, {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()},
                 emit);
}

SourceSample read_sample(const SourceRow& row, const fs::path& media_root) {
  SourceSample out;
  out.name = row.name;
  out.row = row.caption ? caption_row(*row.caption, row.container, row.name)
                        : parse_multimodal_row(row.json, row.name, row.container);
  for (const RowMedium& medium : out.row.media) {
    if (medium.path.empty()) {
      MEGATRON_CHECK(!medium.bytes.empty(), row.name, ": ", name_of(medium.kind), " ",
                     out.places.size() + 1, " has 0 bytes");
      out.places.emplace_back();
      continue;
    }
    const auto member =
        std::find_if(row.container.begin(), row.container.end(),
                     [&](const RowMedium& other) { return other.path == medium.path; });
    out.places.push_back(member != row.container.end()
                             ? row.places[static_cast<size_t>(member - row.container.begin())]
                             : file_below(media_root, medium.path, row.name));
  }
  return out;
}

}  // namespace megatron
