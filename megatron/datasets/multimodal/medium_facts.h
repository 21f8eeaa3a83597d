// What the headers of a medium say of it.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "megatron/datasets/multimodal/media_tokens.h"
#include "megatron/media/media_source.h"

namespace megatron {

// Throws MediaError that begins with `name`: files that are damaged where headers lie, of other
// formats, beyond a limit; sound of another rate or of several channels.
MediumFacts read_medium_facts(MediaKind kind, std::span<const uint8_t> bytes,
                              const std::string& name, const MediaLimits& limits = {});

}  // namespace megatron
