// Human-readable numbers: "1.2 GB", "81,204", "1:02:03".
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace megatron {

// Decimal units with about three significant digits: "512 B", "31.0 MB", "2.8 GB".
std::string format_bytes(double bytes);

// Thousands separated by commas.
std::string format_count(uint64_t count);

// "0:52", "12:04", "1:02:03", "2 days 3:04:05"; rounded to seconds.
std::string format_duration(double seconds);

// With so many digits after the point: "3.14".
std::string format_fixed(double value, int digits);

// "[2,3,4]", as JSON has it.
std::string format_shape(std::span<const int64_t> sizes);

// "1, 2, 3, 6": the numbers that divide n.
std::string format_divisors(int64_t n);

}  // namespace megatron
