#include "megatron/tensor/hash.h"

#include <gtest/gtest.h>

#include "megatron/kernels/hash.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// Word by word.
int64_t naive_hash(const at::Tensor& tensor) {
  const auto* data = static_cast<const unsigned char*>(tensor.const_data_ptr());
  uint64_t sum = 0;
  for (size_t word = 0; 8 * word < tensor.nbytes(); ++word) {
    uint64_t value = 0;
    for (size_t i = 0; i < 8 && 8 * word + i < tensor.nbytes(); ++i)
      value |= static_cast<uint64_t>(data[8 * word + i]) << (8 * i);
    sum += hash_word(value, word);
  }
  return static_cast<int64_t>(sum);
}

TEST(TensorHashes, OfAnyTypeSizeAndPlaceOnAnyNumberOfThreads) {
  at::manual_seed(1);
  const at::Tensor whole = at::randn({300'000});
  std::vector<at::Tensor> tensors = {whole,
                                     at::empty({0}),
                                     whole.narrow(0, 3, 70'001),
                                     whole.to(at::kBFloat16).narrow(0, 1, 131),
                                     at::randn({5, 7}, at::kDouble),
                                     at::arange(3).to(at::kByte)};
  std::vector<int64_t> expected;
  for (const at::Tensor& tensor : tensors) expected.push_back(naive_hash(tensor));
  const TensorHashes hashes(tensors);
  const int threads = at::get_num_threads();
  for (const int count : {1, 3}) {
    at::set_num_threads(count);
    at::Tensor out = at::full({hashes.size()}, -1, at::kLong);
    hashes.compute(out);
    EXPECT_TRUE(at::equal(out, at::tensor(expected, at::kLong))) << out;
  }
  at::set_num_threads(threads);
  // The tensors as they are when it is called.
  whole[299'999].zero_();
  at::Tensor out = at::empty({hashes.size()}, at::kLong);
  hashes.compute(out);
  EXPECT_NE(out[0].item<int64_t>(), expected[0]);
  EXPECT_EQ(out[2].item<int64_t>(), expected[2]);
}

}  // namespace
}  // namespace megatron
