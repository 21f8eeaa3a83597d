#include "megatron/tokenizers/detail/fingerprint.h"

#include <xxhash.h>

#include <cstdio>

namespace megatron {

std::string Fingerprint::digits() const {
  const XXH128_hash_t hash = XXH3_128bits(text_.data(), text_.size());
  char digits[33];
  std::snprintf(digits, sizeof(digits), "%016llx%016llx",
                static_cast<unsigned long long>(hash.high64),
                static_cast<unsigned long long>(hash.low64));
  return digits;
}

}  // namespace megatron
