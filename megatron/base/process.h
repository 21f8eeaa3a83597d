// Who a process is: its machine, its number and when it began, which tell apart processes of one
// number.
#pragma once

#include <cstdint>
#include <string>

namespace megatron {

// Name of this machine in letters, digits, '.' and '_'; "unknown" when it has none.
std::string host_name();

// When a process of this machine began, in ticks since boot (field 22 of /proc/<pid>/stat); 0:
// there is no such process.
uint64_t process_start(int64_t pid);

// Whether the process that began then still exists on this machine.
bool process_is_alive(int64_t pid, uint64_t start);

}  // namespace megatron
