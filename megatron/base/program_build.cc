#include "megatron/base/program_build.h"

#include <link.h>

#include <cstring>
#include <filesystem>
#include <string_view>

namespace megatron {
namespace {

// The build id in the ELF notes of a loaded file; empty: none.
std::string build_id(const dl_phdr_info& file) {
  for (int i = 0; i < file.dlpi_phnum; ++i) {
    const ElfW(Phdr) & segment = file.dlpi_phdr[i];
    if (segment.p_type != PT_NOTE) continue;
    const size_t align = segment.p_align == 8 ? 8 : 4;
    const auto padded = [&](size_t bytes) { return (bytes + align - 1) / align * align; };
    const char* at = reinterpret_cast<const char*>(file.dlpi_addr + segment.p_vaddr);
    const char* const end = at + segment.p_memsz;
    while (at + sizeof(ElfW(Nhdr)) <= end) {
      ElfW(Nhdr) note;
      std::memcpy(&note, at, sizeof note);
      const char* const name = at + sizeof note;
      const char* const id = at + padded(sizeof note + note.n_namesz);
      if (id + note.n_descsz > end) break;
      if (note.n_type == NT_GNU_BUILD_ID &&
          std::string_view(name, note.n_namesz) == std::string_view("GNU\0", 4)) {
        std::string digits;
        for (size_t k = 0; k < note.n_descsz; ++k) {
          const auto byte = static_cast<unsigned char>(id[k]);
          digits += "0123456789abcdef"[byte >> 4];
          digits += "0123456789abcdef"[byte & 15];
        }
        return digits;
      }
      at = id + padded(note.n_descsz);  // a segment begins aligned, and so does each note
    }
  }
  return "";
}

struct Wanted {
  std::string file_name;  // prefix of the file name; empty: the program
  std::string found;
};

bool is_wanted(const dl_phdr_info& file, const Wanted& wanted) {
  const std::string_view path = file.dlpi_name == nullptr ? "" : file.dlpi_name;
  if (wanted.file_name.empty() || path.empty()) return wanted.file_name.empty() && path.empty();
  return path.substr(path.rfind('/') + 1).starts_with(wanted.file_name);
}

std::string find(const std::string& file_name) {
  const auto visit = [](dl_phdr_info* file, size_t, void* data) {
    Wanted& wanted = *static_cast<Wanted*>(data);
    if (!is_wanted(*file, wanted)) return 0;
    wanted.found = build_id(*file);
    if (wanted.found.empty()) {
      std::error_code error;
      const auto bytes = std::filesystem::file_size(
          wanted.file_name.empty() ? "/proc/self/exe" : file->dlpi_name, error);
      wanted.found = error ? "unknown" : std::to_string(bytes) + " bytes";
    }
    return 1;
  };
  Wanted wanted{file_name, ""};
  dl_iterate_phdr(visit, &wanted);
  return wanted.found;
}

}  // namespace

std::string program_build() { return find(""); }

std::string library_build(const std::string& file_name) { return find(file_name); }

}  // namespace megatron
