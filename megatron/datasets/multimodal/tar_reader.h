// The members of an uncompressed tar archive: where their bytes lie, without reading them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace megatron {

struct TarMember {
  std::string name;     // long names of GNU and pax included
  uint64_t offset = 0;  // of its bytes in the archive
  uint64_t size = 0;
};

// The regular files of an archive (POSIX ustar, GNU, pax, or of before POSIX) in their order;
// folders are left out. `name` is the archive's, for messages. Throws Error that names archive,
// byte and member: compressed files, sparse members, links and devices, a header whose checksum is
// wrong, members that go on behind the end, and archives without the two empty blocks at their end.
std::vector<TarMember> read_tar(std::span<const std::byte> archive, const std::string& name);

}  // namespace megatron
