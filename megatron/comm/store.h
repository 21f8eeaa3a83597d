// A small table of strings that all ranks of a job share: how ranks find one another, agree and
// report failures. Never used for training data.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace c10d {
class Store;
}

namespace megatron {

// Every call throws Error when the table cannot be reached. Thread safe, but a call that waits
// holds up the calls of other threads on the same object: each thread that waits takes a connection
// of its own.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual std::optional<std::string> find(const std::string& key) = 0;  // does not wait
  // Throws Error at the deadline
  virtual std::string wait(const std::string& key, double timeout_seconds) = 0;
  virtual int64_t add(const std::string& key, int64_t amount) = 0;  // returns the sum
  // To what the key holds
  virtual void append(const std::string& key, const std::string& value) = 0;
  // Sets the key if nobody has; returns the value that stands.
  virtual std::string claim(const std::string& key, const std::string& value) = 0;
  virtual void erase(const std::string& key) = 0;
  // Another connection to the same table, which sees the keys under `prefix`.
  virtual std::shared_ptr<Store> connection(const std::string& prefix) = 0;
  // What c10d's process groups take.
  virtual c10d::Store* native() = 0;
};

// A table in this process, for ranks that are threads.
std::shared_ptr<Store> make_local_store();

struct StoreAddress {
  std::string host = "127.0.0.1";
  int port = 0;
  // This process holds the table; otherwise it connects and waits until the host is there
  bool host_here = false;
  // With host_here: the address to listen on; empty: all of this machine's
  std::string bind_address;
  std::string prefix;  // of the keys that are seen; empty: all keys
  double timeout_seconds = 600;
};

// Throws Error at the deadline, or when the port is held by something else than a store.
std::shared_ptr<Store> make_tcp_store(const StoreAddress& address);

// Raises the limit of open files of this process to what the system allows and returns it: rank 0's
// store has some sockets for each rank of the job.
int64_t raise_open_files_limit();

}  // namespace megatron
