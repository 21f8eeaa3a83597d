// A small key-value store that all ranks of a job share: ranks use it to find one another, agree
// and report failures. Never used for training data.
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
// holds up the calls of other threads on the same object and on its views: a thread that waits
// takes a connection of its own, or waits on a view.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual std::optional<std::string> find(const std::string& key) = 0;  // does not wait
  // Throws Error at the deadline
  virtual std::string wait(const std::string& key, double timeout_seconds) = 0;
  virtual int64_t add(const std::string& key, int64_t amount) = 0;  // returns the new sum
  // Appends to the value of the key
  virtual void append(const std::string& key, const std::string& value) = 0;
  // Sets the key unless it is set; returns its value.
  virtual std::string claim(const std::string& key, const std::string& value) = 0;
  virtual void erase(const std::string& key) = 0;
  // Another connection to the same table, which sees the keys under `prefix`. The process that
  // holds the table keeps a socket for each connection of each rank.
  virtual std::shared_ptr<Store> connection(const std::string& prefix) = 0;
  // The keys under `prefix` over this same connection, which it keeps alive. Its calls that wait,
  // also those of native(), ask again and again, with growing pauses, and so hold up nobody.
  virtual std::shared_ptr<Store> view(const std::string& prefix) = 0;
  // What c10d's process groups take.
  virtual c10d::Store* native() = 0;
};

// A store in this process, for ranks that are threads.
std::shared_ptr<Store> make_local_store();

struct StoreAddress {
  std::string host = "127.0.0.1";
  int port = 0;
  // This process hosts the store; otherwise it connects, waiting until the host is available
  bool host_here = false;
  // With host_here: the address to listen on; empty: all of this machine's
  std::string bind_address;
  std::string prefix;  // only keys with this prefix are visible; empty: all
  double timeout_seconds = 600;
};

// Throws Error at the deadline, or if another kind of server has the port.
std::shared_ptr<Store> make_tcp_store(const StoreAddress& address);

// Raises this process's limit of open files to the maximum that the system allows and returns it:
// rank 0's store needs several sockets for each rank of the job.
int64_t raise_open_files_limit();

}  // namespace megatron
