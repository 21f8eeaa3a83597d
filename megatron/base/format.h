// Human-readable numbers: "1.2 GB", "81,204", "1:02:03".
#pragma once

#include <cstdint>
#include <string>

namespace megatron {

// Decimal units with about three significant digits: "512 B", "31.0 MB", "2.8 GB".
std::string format_bytes(double bytes);

// Thousands separated by commas.
std::string format_count(uint64_t count);

// "0:52", "12:04", "1:02:03", "2 days 3:04:05"; rounded to seconds.
std::string format_duration(double seconds);

}  // namespace megatron
