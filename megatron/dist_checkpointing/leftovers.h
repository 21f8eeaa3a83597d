// What interrupted writers and moved directories leave in a folder of checkpoints, to be inspected
// and removed by users.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace megatron {

struct Leftover {
  enum class Kind {
    kUnfinished,  // `<name>.tmp-...`: being written, or left by a killed writer
    kSetAside,    // `<name>.unusable-<n>`, `<name>.replaced-<n>`: moved aside by a save
  };
  enum class Owner {
    kNone,     // no writer: set aside
    kAlive,    // its writer is alive
    kGone,     // its writer is certainly gone
    kUnknown,  // writer on another or an unknown machine, and changed recently
  };
  std::filesystem::path path;
  Kind kind = Kind::kUnfinished;
  Owner owner = Owner::kNone;
  std::string writer;      // "process 4711 on node3"; empty: none
  uint64_t bytes = 0;      // total size of its files
  double age_seconds = 0;  // since the latest change in it
  bool is_dead() const { return owner == Owner::kNone || owner == Owner::kGone; }
};

// The leftovers of a folder, by name. Writers on this machine are identified by pid and start time
// and by their lock on the directory; one on another machine counts as gone if no process holds the
// lock and nothing changed for a day. A file that is written and renamed
// (config.yaml.tmp-<pid>-<n>) does not name its machine: its writer counts as gone if no process of
// this machine has the pid and nothing changed for an hour. Throws Error if the folder cannot be
// read.
std::vector<Leftover> find_leftovers(const std::filesystem::path& root);

// Removes a dead leftover, after checking it again. Returns whether it was removed. Throws Error if
// it cannot be.
bool remove_leftover(const Leftover& leftover);

}  // namespace megatron
