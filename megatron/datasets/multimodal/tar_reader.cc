// Source: POSIX.1-2017, pax ("ustar Interchange Format", "pax Interchange Format"); GNU tar 1.35
// manual, "Basic Tar Format".
#include "megatron/datasets/multimodal/tar_reader.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <string_view>

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr uint64_t kBlock = 512;
// Longer names and headers of pax are no names of files.
constexpr uint64_t kMostHeaderBytes = uint64_t{1} << 20;

// Fields of a header block: [begin, begin + size).
struct Field {
  size_t begin, size;
};
constexpr Field kName{0, 100}, kSize{124, 12}, kChecksum{148, 8}, kMagic{257, 6}, kPrefix{345, 155};
constexpr size_t kTypeByte = 156;

class TarReader {
 public:
  TarReader(std::span<const std::byte> archive, const std::string& name)
      : bytes_(reinterpret_cast<const char*>(archive.data()), archive.size()), name_(name) {}

  std::vector<TarMember> members();

 private:
  [[noreturn]] void fail(const std::string& text) const {
    throw_error(cat(name_, ": byte ", at_, ": ", text));
  }
  void check_kind_of_file() const;
  std::string_view block() const { return bytes_.substr(at_, kBlock); }
  // Up to the first zero byte.
  std::string_view text_of(Field field) const {
    const std::string_view text = block().substr(field.begin, field.size);
    return text.substr(0, text.find('\0'));
  }
  std::optional<uint64_t> octal(Field field) const;
  uint64_t number(Field field, const char* what) const;
  void check_checksum() const;
  std::string member_name() const;
  bool is_zero() const { return block().find_first_not_of('\0') == std::string_view::npos; }
  void read_header(std::vector<TarMember>& out);
  std::string_view content(uint64_t size, const std::string& member) const;
  void read_pax(std::string_view records, std::map<std::string, std::string>& into) const;

  const std::string_view bytes_;
  const std::string& name_;
  uint64_t at_ = 0;                                  // of the header that is read
  std::string long_name_;                            // GNU's, of the next member
  std::map<std::string, std::string> pax_, common_;  // of the next member; of all that follow
};

void TarReader::check_kind_of_file() const {
  constexpr std::pair<std::string_view, const char*> kOthers[] = {
      {"\x1f\x8b", "gzip"}, {"\x28\xb5\x2f\xfd", "zstd"}, {"\xfd\x37zXZ", "xz"},
      {"BZh", "bzip2"},     {"PK\x03\x04", "a zip file"},
  };
  for (const auto& [start, kind] : kOthers)
    if (bytes_.starts_with(start)) fail(cat("is ", kind, ", expected an uncompressed tar archive"));
}

std::optional<uint64_t> TarReader::octal(Field field) const {
  std::string_view text = block().substr(field.begin, field.size);
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  text = text.substr(0, text.find_first_of(std::string_view(" \0", 2)));
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 8);
  if (!text.empty() && (error != std::errc() || end != text.data() + text.size())) return {};
  return value;
}

// Octal digits, or, of GNU, big-endian bytes behind a first byte of 0x80.
uint64_t TarReader::number(Field field, const char* what) const {
  const std::string_view text = block().substr(field.begin, field.size);
  if ((static_cast<uint8_t>(text[0]) & 0x80) == 0) {
    const std::optional<uint64_t> value = octal(field);
    if (!value) fail(cat("the ", what, " of a member is no octal number"));
    return *value;
  }
  uint64_t value = static_cast<uint8_t>(text[0]) & 0x7f;
  for (const char c : text.substr(1)) {
    if (value >> 55 != 0) fail(cat("the ", what, " of a member is beyond 63 bits"));
    value = value << 8 | static_cast<uint8_t>(c);
  }
  return value;
}

void TarReader::check_checksum() const {
  int64_t as_unsigned = 0, as_signed = 0;
  for (size_t i = 0; i < kBlock; ++i) {
    const bool own = i >= kChecksum.begin && i < kChecksum.begin + kChecksum.size;
    const char c = own ? ' ' : block()[i];
    as_unsigned += static_cast<uint8_t>(c);
    as_signed += static_cast<signed char>(c);
  }
  const std::optional<uint64_t> stored = octal(kChecksum);
  if (!stored ||
      (static_cast<int64_t>(*stored) != as_unsigned && static_cast<int64_t>(*stored) != as_signed))
    fail(at_ == 0 ? "is no tar archive: the checksum of the first header is wrong"
                  : "the checksum of a header is wrong: the archive is damaged");
}

std::string TarReader::member_name() const {
  const auto path = pax_.find("path");
  if (path != pax_.end()) return path->second;
  if (!long_name_.empty()) return long_name_;
  const std::string_view prefix = text_of(kPrefix);
  // GNU keeps other things where POSIX has the prefix.
  const bool posix = block().substr(kMagic.begin, kMagic.size) == std::string_view("ustar\0", 6);
  if (!posix || prefix.empty()) return std::string(text_of(kName));
  return cat(prefix, "/", text_of(kName));
}

std::string_view TarReader::content(uint64_t size, const std::string& member) const {
  if (size > bytes_.size() - at_ - kBlock)
    fail(cat("the archive is cut: ", member, " has ", size, " bytes, ",
             bytes_.size() - at_ - kBlock, " are left"));
  return bytes_.substr(at_ + kBlock, size);
}

// "LENGTH KEY=VALUE\n", LENGTH of the whole record.
void TarReader::read_pax(std::string_view records, std::map<std::string, std::string>& into) const {
  while (!records.empty()) {
    size_t length = 0;
    const auto [end, error] =
        std::from_chars(records.data(), records.data() + records.size(), length);
    const auto digits = static_cast<size_t>(end - records.data());
    if (error != std::errc() || digits + 3 > length || length > records.size() ||
        records[digits] != ' ' || records[length - 1] != '\n')
      fail("a record of a pax header is damaged");
    const std::string_view record = records.substr(digits + 1, length - digits - 2);
    const size_t equals = record.find('=');
    if (equals == std::string_view::npos) fail("a record of a pax header has no \"=\"");
    into[std::string(record.substr(0, equals))] = record.substr(equals + 1);
    records.remove_prefix(length);
  }
}

void TarReader::read_header(std::vector<TarMember>& out) {
  check_checksum();
  const char type = block()[kTypeByte];
  uint64_t size = number(kSize, "size");
  const bool describes_next = type == 'x' || type == 'g' || type == 'L' || type == 'K';
  if (describes_next && size > kMostHeaderBytes)
    fail(cat("a header of ", size, " bytes, expected at most ", kMostHeaderBytes));
  if (!describes_next) {
    for (const auto* records : {&common_, &pax_}) {
      for (const auto& [key, value] : *records)
        if (key.starts_with("GNU.sparse.")) fail(cat(member_name(), " is sparse"));
      const auto given = records->find("size");
      if (given == records->end()) continue;
      const std::string& text = given->second;
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), size);
      if (error != std::errc() || end != text.data() + text.size())
        fail("the size in a pax header is no number");
    }
  }
  const std::string member = member_name();
  switch (type) {
    case 'L': {
      const std::string_view text = content(size, "a long name");
      long_name_ = text.substr(0, text.find('\0'));
      break;
    }
    case 'K':
      break;  // the long target of a link, which is refused
    case 'x':
      read_pax(content(size, "a pax header"), pax_);
      break;
    case 'g':
      read_pax(content(size, "a pax header"), common_);
      break;
    case '0':
    case '\0':
    case '7':
      // Archives of before POSIX mark folders by their names.
      if (!member.ends_with("/")) out.push_back({member, at_ + kBlock, size});
      break;
    case '5':
      break;
    case 'S':
      fail(cat(member, " is sparse"));
    case '1':
    case '2':
      fail(cat(member, " is a link\nhint: archive the files that links point to (tar -h)"));
    default:
      fail(cat(member, " is neither a file nor a folder: its type is \"",
               type >= ' ' && type <= '~' ? std::string(1, type) : "?", "\""));
  }
  if (type != '5')
    content(size, member);
  else
    size = 0;
  if (!describes_next) {
    pax_.clear();
    long_name_.clear();
  }
  at_ += kBlock + (size + kBlock - 1) / kBlock * kBlock;
}

std::vector<TarMember> TarReader::members() {
  std::vector<TarMember> out;
  check_kind_of_file();
  if (bytes_.empty()) fail("the file is empty, expected a tar archive");
  for (bool last_was_zero = false;;) {
    if (at_ > bytes_.size() || bytes_.size() - at_ < kBlock) {
      at_ = std::min<uint64_t>(at_, bytes_.size());
      fail("the archive is cut: it ends before the two empty blocks at an archive's end");
    }
    if (is_zero()) {
      if (last_was_zero) return out;
      last_was_zero = true;
      at_ += kBlock;
      continue;
    }
    if (last_was_zero) fail("a member follows an empty block: the archive is damaged");
    read_header(out);
  }
}

}  // namespace

std::vector<TarMember> read_tar(std::span<const std::byte> archive, const std::string& name) {
  return TarReader(archive, name).members();
}

}  // namespace megatron
