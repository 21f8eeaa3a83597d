#include "megatron/serving/request_guard.h"

#include <openssl/crypto.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>

#include "megatron/base/files.h"
#include "megatron/base/log.h"

namespace megatron {
namespace {

constexpr size_t kMinKeyBytes = 16;
constexpr size_t kHashBytes = 32;

std::string keyed_hash(const std::string& secret, std::string_view text) {
  std::string hash(kHashBytes, '\0');
  unsigned int length = 0;
  HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()),
       reinterpret_cast<const unsigned char*>(text.data()), text.size(),
       reinterpret_cast<unsigned char*>(hash.data()), &length);
  return hash;
}

int base64_digit(char c) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const size_t at = kDigits.find(c);
  return at == std::string_view::npos ? -1 : static_cast<int>(at);
}

std::string decode_base64(std::string_view text) {
  std::string out;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    const int digit = base64_digit(c);
    if (digit < 0) break;
    bits = bits << 6 | static_cast<uint32_t>(digit);
    count += 6;
    if (count < 8) continue;
    count -= 8;
    out += static_cast<char>(bits >> count & 0xFF);
  }
  return out;
}

std::string_view trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\r");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r") + 1 - begin);
}

// "name:port" without its port, "[::1]:80" without brackets and port; empty: malformed.
std::string_view host_name_of(std::string_view host) {
  std::string_view port;
  if (host.starts_with('[')) {
    const size_t end = host.find(']');
    if (end == std::string_view::npos) return {};
    port = host.substr(end + 1);
    host = host.substr(1, end - 1);
  } else if (const size_t colon = host.find(':'); colon != std::string_view::npos) {
    port = host.substr(colon);
    host = host.substr(0, colon);
  }
  if (!port.empty() &&
      (port[0] != ':' || port.find_first_not_of("0123456789", 1) != std::string_view::npos))
    return {};
  return host;
}

bool is_loopback_name(std::string_view name) {
  return equal_ignoring_case(name, "localhost") || name == "::1" || name == "127.0.0.1";
}

bool is_address(std::string_view name) {
  return !name.empty() && (name.find(':') != std::string_view::npos ||
                           name.find_first_not_of("0123456789.") == std::string_view::npos);
}

bool is_listed(std::string_view name, const HostRules& rules) {
  return std::any_of(rules.names.begin(), rules.names.end(),
                     [&](const std::string& listed) { return equal_ignoring_case(name, listed); });
}

}  // namespace

ApiKeys::ApiKeys(const std::filesystem::path& path) : secret_(kHashBytes, '\0') {
  MEGATRON_CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(secret_.data()),
                            static_cast<int>(secret_.size())) == 1,
                 "the system gives no random bytes");
  struct stat status{};
  if (::stat(path.c_str(), &status) == 0 && (status.st_mode & 07) != 0)
    log_warning(cat(path.string(), " holds keys and may be read by every user of this machine"));
  const std::string text = read_file(path, 1 << 20);
  size_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    std::string_view line = trimmed(std::string_view(text).substr(begin, end - begin));
    begin = end + 1;
    ++number;
    if (line.empty() || line.starts_with('#')) continue;
    const std::string where = cat(path.string(), ":", number, ": ");
    Client client;
    if (line.ends_with(":admin")) {
      client.admin = true;
      line.remove_suffix(6);
    }
    const size_t colon = line.find(':');
    MEGATRON_CHECK(colon != std::string_view::npos && colon > 0, where,
                   "expected NAME:KEY or NAME:KEY:admin");
    client.name = line.substr(0, colon);
    const std::string_view key = line.substr(colon + 1);
    MEGATRON_CHECK(key.size() >= kMinKeyBytes, where, "the key has ", key.size(),
                   " characters, expected at least ", kMinKeyBytes);
    MEGATRON_CHECK(key.find_first_of(": \t") == std::string_view::npos, where,
                   "the key has a colon or a blank");
    MEGATRON_CHECK(!find(key), where, "this key is given twice");
    MEGATRON_CHECK(std::none_of(keys_.begin(), keys_.end(),
                                [&](const Key& other) { return other.client.name == client.name; }),
                   where, "the name ", client.name, " is given twice");
    keys_.push_back({client, keyed_hash(secret_, key)});
  }
  MEGATRON_CHECK(!keys_.empty(), path.string(), " holds no keys");
}

std::optional<ApiKeys::Client> ApiKeys::find(std::string_view key) const {
  const std::string hash = keyed_hash(secret_, key);
  const Key* found = nullptr;
  for (const Key& one : keys_) {
    // Every entry is looked at, and each comparison takes the same time.
    const bool same = CRYPTO_memcmp(one.hash.data(), hash.data(), hash.size()) == 0;
    found = same ? &one : found;
  }
  return found != nullptr ? std::optional(found->client) : std::nullopt;
}

std::string key_of(const HttpRequest& request) {
  const std::string_view given = request.header("Authorization");
  const size_t blank = given.find(' ');
  if (blank == std::string_view::npos) return {};
  const std::string_view scheme = given.substr(0, blank), rest = trimmed(given.substr(blank));
  if (equal_ignoring_case(scheme, "Bearer")) return std::string(rest);
  if (!equal_ignoring_case(scheme, "Basic")) return {};
  const std::string pair = decode_base64(rest);
  const size_t colon = pair.find(':');
  return colon == std::string::npos ? std::string() : pair.substr(colon + 1);
}

std::optional<ApiError> check_host(const HttpRequest& request, const HostRules& rules) {
  const std::string_view host = request.header("Host"), name = host_name_of(host);
  const bool own = is_loopback_name(name) || is_listed(name, rules) ||
                   (!rules.loopback_only && is_address(name)) || (rules.any && !name.empty()) ||
                   (request.version == 10 && host.empty());
  if (!own)
    return ApiError(403, "",
                    "the Host header is not a name of this server; names of it are given "
                    "by --allowed-hosts",
                    "host_not_allowed");
  const std::string* const origin = find_header(request.headers, "Origin");
  if (origin == nullptr) return std::nullopt;
  const size_t scheme = origin->find("://");
  const std::string_view site = scheme == std::string::npos
                                    ? std::string_view()
                                    : std::string_view(*origin).substr(scheme + 3);
  if (!site.empty() && (equal_ignoring_case(site, host) || is_listed(host_name_of(site), rules)))
    return std::nullopt;
  return ApiError(403, "", "a page of another origin may not call this server",
                  "origin_not_allowed");
}

}  // namespace megatron
