#include "megatron/comm/store.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/failure_class.h"
#include "megatron/comm/detail/store_probe.h"

namespace megatron {
namespace {

std::chrono::milliseconds wait_of(double seconds) {
  return std::chrono::milliseconds(std::max<int64_t>(1, static_cast<int64_t>(seconds * 1000)));
}

// First line of a libtorch message, without the stack of frames below it.
std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

// The keys under a prefix over somebody else's connection. c10d's stores keep their connection to
// themselves while they wait; this one asks in between, with pauses of an eighth of what it has
// waited.
class SharedStore final : public c10d::PrefixStore {
 public:
  SharedStore(std::string prefix, c10::intrusive_ptr<c10d::Store> store)
      : PrefixStore(std::move(prefix), std::move(store)), limit_(store_->getTimeout()) {}

  std::vector<uint8_t> get(const std::string& key) override {
    wait({key});
    return PrefixStore::get(key);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    wait(keys);
    return PrefixStore::multiGet(keys);
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, limit_); }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    using std::chrono::microseconds;
    const auto begin = std::chrono::steady_clock::now();
    while (!check(keys)) {
      const auto waited =
          std::chrono::duration_cast<microseconds>(std::chrono::steady_clock::now() - begin);
      if (timeout != kNoTimeout && waited >= timeout)
        C10_THROW_ERROR(DistStoreError,
                        cat("nobody wrote ", keys.front(), " within ", timeout.count(), " ms"));
      std::this_thread::sleep_for(
          std::clamp<microseconds>(waited / 8, microseconds(500), microseconds(500'000)));
    }
  }
  // Of this view alone
  const std::chrono::milliseconds& getTimeout() const noexcept override { return limit_; }
  void setTimeout(const std::chrono::milliseconds& timeout) override { limit_ = timeout; }

 private:
  std::chrono::milliseconds limit_;
};

class C10dStore final : public Store, public std::enable_shared_from_this<C10dStore> {
 public:
  // `parent`: the store that this is a connection to; it may be its host.
  C10dStore(c10::intrusive_ptr<c10d::Store> store, std::string where,
            std::shared_ptr<Store> parent = nullptr)
      : parent_(std::move(parent)), store_(std::move(store)), where_(std::move(where)) {}

  void set(const std::string& key, const std::string& value) override {
    guarded([&] { store_->set(key, value); });
  }
  std::optional<std::string> find(const std::string& key) override {
    std::optional<std::string> value;
    guarded([&] {
      if (store_->check({key})) value = store_->get_to_str(key);
    });
    return value;
  }
  std::string wait(const std::string& key, double timeout_seconds) override {
    try {
      store_->wait({key}, wait_of(timeout_seconds));
      return store_->get_to_str(key);
    } catch (const std::exception& error) {
      throw RetryError(cat("no rank wrote ", key, " to the store at ", where_, " within ",
                           timeout_seconds, " s\ndetail: ", first_line(error)));
    }
  }
  int64_t add(const std::string& key, int64_t amount) override {
    int64_t sum = 0;
    guarded([&] { sum = store_->add(key, amount); });
    return sum;
  }
  void append(const std::string& key, const std::string& value) override {
    guarded([&] { store_->append(key, std::vector<uint8_t>(value.begin(), value.end())); });
  }
  std::string claim(const std::string& key, const std::string& value) override {
    std::string standing;
    guarded([&] { standing = store_->compareSet(key, std::string(), value); });
    return standing;
  }
  void erase(const std::string& key) override {
    guarded([&] { store_->deleteKey(key); });
  }
  std::shared_ptr<Store> connection(const std::string& prefix) override {
    std::shared_ptr<Store> copy;
    guarded([&] {
      copy = std::make_shared<C10dStore>(
          c10::make_intrusive<c10d::PrefixStore>(prefix, store_->clone()), where_,
          shared_from_this());
    });
    return copy;
  }
  std::shared_ptr<Store> view(const std::string& prefix) override {
    return std::make_shared<C10dStore>(c10::make_intrusive<SharedStore>(prefix, store_), where_,
                                       shared_from_this());
  }
  c10d::Store* native() override { return store_.get(); }

 private:
  template <class Body>
  void guarded(const Body& body) {
    try {
      body();
    } catch (const std::exception& error) {
      throw RetryError(
          cat("the store at ", where_, " cannot be reached\ndetail: ", first_line(error)));
    }
  }

  std::shared_ptr<Store> parent_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::string where_;
};

// Opens a socket that listens at the address; on failure errno says why.
int listen_at(const addrinfo& address) {
  const int fd = socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const int on = 1, off = 0;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  // Accept IPv4, too
  if (address.ai_family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  if (bind(fd, address.ai_addr, address.ai_addrlen) == 0 && listen(fd, 4096) == 0) return fd;
  const int reason = errno;
  close(fd);
  errno = reason;
  return -1;
}

// A socket that listens on one address, or, if it is empty, on all addresses of this machine.
int listening_socket(const std::string& address, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failed = getaddrinfo(address.empty() ? nullptr : address.c_str(),
                                 std::to_string(port).c_str(), &hints, &found);
  MEGATRON_CHECK(!failed, "address ", address,
                 " to listen on is not known: ", gai_strerror(failed));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> guard(found, freeaddrinfo);
  int reason = 0;
  // An IPv6 wildcard socket also accepts IPv4
  for (const int family : {AF_INET6, AF_INET}) {
    for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
      if (at->ai_family != family) continue;
      const int fd = listen_at(*at);
      if (fd >= 0) return fd;
      if (reason == 0 || errno == EADDRINUSE) reason = errno;
    }
    if (reason == EADDRINUSE) break;
  }
  throw_error(cat("rank 0 cannot listen on ", address.empty() ? "port " : address + ":", port, ": ",
                  std::strerror(reason),
                  "\nhint: give another port with MASTER_PORT; another job, or a second process "
                  "with RANK 0, may use this one"));
}

}  // namespace

std::shared_ptr<Store> make_local_store() {
  return std::make_shared<C10dStore>(c10::make_intrusive<c10d::HashStore>(), "this process");
}

std::shared_ptr<Store> make_tcp_store(const StoreAddress& address) {
  const std::string where = cat(address.host, ":", address.port);
  // The host's own connection needs no host name.
  const std::string host = !address.host_here             ? address.host
                           : address.bind_address.empty() ? "127.0.0.1"
                                                          : address.bind_address;
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(address.port);
  options.isServer = address.host_here;
  options.waitWorkers = false;
  options.timeout = wait_of(address.timeout_seconds);
  if (address.host_here)
    options.masterListenFd = listening_socket(address.bind_address, address.port);
  else
    wait_for_store(address.host, address.port, address.timeout_seconds);
  try {
    c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::TCPStore>(host, options);
    if (!address.prefix.empty())
      store = c10::make_intrusive<c10d::PrefixStore>(address.prefix, std::move(store));
    return std::make_shared<C10dStore>(std::move(store), where);
  } catch (const std::exception& error) {
    throw RetryError(cat(address.host_here ? "rank 0 cannot open the store at " : "the store at ",
                         where, address.host_here ? "" : " does not answer",
                         "\ndetail: ", first_line(error),
                         "\nhint: MASTER_ADDR and MASTER_PORT must name the machine of rank 0 and "
                         "a free port that every rank can reach"));
  }
}

int64_t raise_open_files_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
  const rlim_t before = limit.rlim_cur;
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) limit.rlim_cur = before;
  return limit.rlim_cur > 1 << 30 ? 1 << 30 : static_cast<int64_t>(limit.rlim_cur);
}

}  // namespace megatron
