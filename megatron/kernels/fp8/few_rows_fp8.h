// Products of few rows with a matrix of FP8 codes on a Hopper GPU (few_rows_product.h). x is not
// rounded to FP8: with few rows only the weights' bytes count.
#pragma once

#include "megatron/kernels/few_rows_product.h"

namespace megatron {

// Of those that has_few_rows_product() checks, whether this one is right for codes too: `columns`
// are a multiple of 8, `inner` of 16.
bool has_few_rows_fp8_product(const FewRowsProduct& args);
void few_rows_fp8_product_cuda(const FewRowsProduct& args, void* stream);

}  // namespace megatron
