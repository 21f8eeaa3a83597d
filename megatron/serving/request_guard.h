// Who may call the server: API keys, and the names by which browsers may reach it.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/serving/api_error.h"
#include "megatron/serving/http/http_message.h"

namespace megatron {

// Keys of a file with a line NAME:KEY or NAME:KEY:admin for each client; blank lines and those
// that begin with # do not count. Thread safe.
class ApiKeys {
 public:
  ApiKeys() = default;  // none are asked for
  // Throws Error that names the file and the line: no key, a short one (under 16 characters), a
  // name or key twice. Warns of a file that every user of the machine may read.
  explicit ApiKeys(const std::filesystem::path& path);

  bool empty() const { return keys_.empty(); }

  struct Client {
    std::string name;
    bool admin = false;
  };
  // Whose key it is; null: nobody's. Takes a time that depends on the number of keys alone.
  std::optional<Client> find(std::string_view key) const;

 private:
  struct Key {
    Client client;
    std::string hash;  // keyed, so that comparing leaks nothing
  };
  std::string secret_;
  std::vector<Key> keys_;
};

// The key that a request brings: "Authorization: Bearer KEY", or Basic with the key as the
// password, which is what browsers ask their users for. Empty: none.
std::string key_of(const HttpRequest& request);

struct HostRules {
  bool loopback_only = true;       // the server listens on loopback
  bool any = false;                // every name: keys protect the server
  std::vector<std::string> names;  // further names
};

// Refuses a Host that is not one of this server's names, and an Origin that is another site: a page
// of another site could else reach a server on the user's machine, by a name that it makes point
// there.
std::optional<ApiError> check_host(const HttpRequest& request, const HostRules& rules);

}  // namespace megatron
