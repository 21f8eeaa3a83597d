// Products in 8-bit integers against PyTorch (tests/golden/int8), and of a row alone and among
// others.
#include "megatron/tensor/decoding/int8_weight.h"

#include <gtest/gtest.h>

#include "megatron/dist_checkpointing/safetensors.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

at::Tensor golden(const std::string& name) {
  const SafetensorsFile file(MEGATRON_SOURCE_DIR "/tests/golden/int8/int8.safetensors");
  const SafetensorsEntry& entry = file.entry(name);
  at::Tensor out = at::empty(entry.shape, to_scalar_type(entry.dtype));
  file.read(entry, out.data_ptr());
  return out;
}

TEST(Int8Weight, ProductsAreThoseOfPyTorch) {
  const at::Tensor x = golden("x"), w = golden("w"), bias = golden("bias"), y = golden("y");
  const Int8Weight weight = to_int8(w);
  EXPECT_EQ(int8_bytes(w.size(0), w.size(1)),
            static_cast<int64_t>(weight.panels.nbytes() + weight.scales.nbytes()));
  const at::Tensor got = int8_product(x, weight, bias, {});
  EXPECT_LT((got - y).abs().max().item<double>(), 1e-6);
  EXPECT_LT((int8_product(x.to(at::kDouble), weight, bias, y) - 2 * y).abs().max().item<double>(),
            2e-6);
  // The comparison can tell 8 bits from fp32.
  EXPECT_GT((at::linear(x, w, bias) - y).abs().max().item<double>(), 1e-3);
}

TEST(Int8Weight, ARowHasTheSameBitsAloneAndAmongOthers) {
  at::manual_seed(1);
  const at::Tensor x = at::randn({3, 19, 768}, at::kFloat), w = at::randn({300, 768}, at::kFloat);
  const Int8Weight weight = to_int8(w);
  const at::Tensor all = int8_product(x, weight, {}, {}).view({-1, 300});
  for (int64_t row = 0; row < all.size(0); row += 7)
    EXPECT_TRUE(at::equal(int8_product(x.view({-1, 768})[row], weight, {}, {}), all[row])) << row;
  const at::Tensor narrow = int8_product(x.to(at::kBFloat16), to_int8(w.to(at::kBFloat16)), {}, {});
  EXPECT_EQ(narrow.scalar_type(), at::kBFloat16);
  const at::Tensor exact = x.matmul(w.t()), error = narrow.to(at::kFloat) - exact;
  EXPECT_LT((error.norm() / exact.norm()).item<double>(), 0.02);
}

}  // namespace
}  // namespace megatron
