#include "megatron/models/common/encoder_part.h"

#include "megatron/base/check.h"
#include "megatron/pipeline_parallel/stage_layout.h"

namespace megatron {

EncoderPart encoder_part(const StageSlice& slice, int64_t layers) {
  if (slice.all_parts == 0) return {0, slice.embedding ? layers : 0};
  MEGATRON_CHECK(slice.all_parts == 1 || slice.all_parts == layers, slice.all_parts,
                 " V for an encoder of ", layers, " layers: one for all of them, or one for each");
  if (slice.all_parts == 1) return {0, slice.num_parts > 0 ? layers : 0};
  return {slice.first_part, slice.num_parts, slice.first_part == 0,
          slice.first_part + slice.num_parts == layers};
}

}  // namespace megatron
