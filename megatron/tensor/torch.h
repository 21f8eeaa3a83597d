// The libtorch boundary: the one header that includes more of torch than ATen/core/Tensor.h.
// Precompiled; sources include it explicitly, headers never do.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>
