// Weights of Hugging Face that are codes with scales, as the numbers that they stand for.
#pragma once

#include "megatron/interop/huggingface/hf_folder.h"

namespace megatron {

// Puts numbers in the place of codes and scales, under the names of weights that are not quantised;
// they are computed as they are read, a code times its scale, rounded to model.dtype.
//
//   fp8    X [r, c] E4M3 and X_scale_inv [r / 128, c / 128] fp32, rounded up    -> X [r, c]
//   mxfp4  X_blocks [.., r, g, 16], two codes of E2M1 in a byte, the lower half first, and X_scales
//          [.., r, g], an exponent of 2 plus 127 of 32 codes    -> X [.., r, 32 g], which is not
//          transposed as the weights of such files otherwise are
//
// Codes without scales, and scales of another shape or type, become problems of the source.
void dequantise(HfSource& source);

}  // namespace megatron
