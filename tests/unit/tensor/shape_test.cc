#include "megatron/tensor/shape.h"

#include "megatron/base/check.h"
#include "tests/unit/tensor/testing.h"

namespace megatron {
namespace {

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const InternalError& error) {
    return error.what();
  }
  return "";
}

TEST(CheckShape, AcceptsAnySizeForMinusOne) {
  EXPECT_NO_THROW(check_shape("x", at::zeros({2, 3}), {2, -1}));
  EXPECT_NO_THROW(check_shape("x", at::zeros({}), {}));
}

TEST(CheckShape, NamesBothShapes) {
  EXPECT_EQ(message_of([] { check_shape("MLP x", at::zeros({2, 3}), {2, -1, 4}); }),
            "internal error: MLP x has shape [2, 3], expected [2, *, 4]");
  EXPECT_EQ(message_of([] { check_shape("MLP x", at::zeros({2, 3}), {2, 4}); }),
            "internal error: MLP x has shape [2, 3], expected [2, 4]");
  EXPECT_EQ(message_of([] { check_shape("MLP x", at::Tensor(), {2}); }),
            "internal error: MLP x has shape (undefined), expected [2]");
}

TEST(ScalarTypes, RoundTrip) {
  for (DType dtype :
       {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kInt64,
        DType::kInt32, DType::kInt16, DType::kInt8, DType::kUInt8, DType::kBool}) {
    EXPECT_EQ(to_dtype(to_scalar_type(dtype)), dtype);
    EXPECT_EQ(at::elementSize(to_scalar_type(dtype)), static_cast<size_t>(size_of(dtype)));
  }
  EXPECT_NE(message_of([] { to_dtype(at::kComplexFloat); }).find("ComplexFloat"),
            std::string::npos);
}

}  // namespace
}  // namespace megatron
