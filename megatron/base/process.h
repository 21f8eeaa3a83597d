// The identity of a process: machine, process id and start time, which distinguishes processes that
// reuse an id.
#pragma once

#include <cstdint>
#include <string>

namespace megatron {

// What this machine calls itself; "localhost" when it has no name.
std::string machine_name();

// The same in letters, digits, '.' and '_'.
std::string host_name();

// Start time of a process on this machine, in ticks since boot (field 22 of /proc/<pid>/stat); 0:
// no such process.
uint64_t process_start(int64_t pid);

double seconds_since_1970();

// Whether the process with this start time still exists on this machine.
bool process_is_alive(int64_t pid, uint64_t start);

}  // namespace megatron
