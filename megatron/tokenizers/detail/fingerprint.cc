#include "megatron/tokenizers/detail/fingerprint.h"

#include <xxhash.h>

#include "megatron/base/format.h"

namespace megatron {

std::string Fingerprint::digits() const {
  const XXH128_hash_t hash = XXH3_128bits(text_.data(), text_.size());
  return format_hex(hash.high64) + format_hex(hash.low64);
}

}  // namespace megatron
