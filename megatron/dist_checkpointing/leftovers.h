// What interrupted writers and moved directories leave in a folder of checkpoints, for people to
// look at and to remove.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace megatron {

struct Leftover {
  enum class Kind {
    kUnfinished,  // `<name>.tmp-...`: being written, or left by a killed writer
    kSetAside,    // `<name>.unusable-<n>`, `<name>.replaced-<n>`: was in the way of a save
  };
  enum class Owner {
    kNone,     // nobody's: set aside
    kAlive,    // its writer lives
    kGone,     // its writer is surely gone
    kUnknown,  // of another machine, or without a name of one, and changed not long ago
  };
  std::filesystem::path path;
  Kind kind = Kind::kUnfinished;
  Owner owner = Owner::kNone;
  std::string writer;      // "process 4711 on node3"; empty: nobody's
  uint64_t bytes = 0;      // of all files in it
  double age_seconds = 0;  // since anything in it changed
  bool is_dead() const { return owner == Owner::kNone || owner == Owner::kGone; }
};

// Those of a folder, by name. Writers of this machine are known by pid and start time and by their
// lock on the directory; one of another machine counts as gone when nobody holds the lock and
// nothing changed for a day. A file that is written and renamed (config.yaml.tmp-<pid>-<n>) does
// not name its machine: its writer counts as gone when no process of this machine has the pid and
// nothing changed for an hour. Throws Error when the folder cannot be read.
std::vector<Leftover> find_leftovers(const std::filesystem::path& root);

// Removes one that is dead, after having looked again. Returns whether it was removed. Throws Error
// when it cannot be.
bool remove_leftover(const Leftover& leftover);

}  // namespace megatron
