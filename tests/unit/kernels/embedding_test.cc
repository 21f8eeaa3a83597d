#include "megatron/kernels/embedding.h"

#include "tests/unit/kernels/testing.h"

namespace megatron {
namespace {

constexpr int64_t kVocabulary = 9, kColumns = 21;
const std::vector<int64_t> kIds = {3, -1, 8, 3, 0, -5, 3};

class EmbeddingKernels : public FloatingTypes {};

TEST_P(EmbeddingKernels, ForwardCopiesRows) {
  const Elements weight(GetParam(), normal_values(kVocabulary * kColumns, 1));
  const int64_t count = static_cast<int64_t>(kIds.size());
  Elements out(GetParam(), count * kColumns);
  EmbeddingForward args;
  args.row_bytes = kColumns * size_of(GetParam());
  args.count = count;
  args.weight = weight.data();
  args.ids = kIds.data();
  args.out = out.data();
  embedding_forward_cpu(args, 0, 4);
  EXPECT_TRUE(std::isnan(out.values().back()));
  embedding_forward_cpu(args, 4, count);
  Doubles expected;
  for (const int64_t id : kIds) {
    const Doubles row =
        id < 0 ? Doubles(kColumns, 0.0) : slice(weight.values(), id * kColumns, kColumns);
    expected.insert(expected.end(), row.begin(), row.end());
  }
  EXPECT_EQ(out.values(), expected);
}

TEST_P(EmbeddingKernels, BackwardAddsToItsRows) {
  const int64_t count = static_cast<int64_t>(kIds.size());
  for (const DType target_type : {wide(GetParam()), DType::kFloat64}) {
    const Elements dy(GetParam(), normal_values(count * kColumns, 2));
    Elements target(target_type, Doubles(kVocabulary * kColumns, 1.0));
    EmbeddingBackward args;
    args.dtype = GetParam();
    args.target_dtype = target_type;
    args.columns = kColumns;
    args.count = count;
    args.vocabulary = kVocabulary;
    args.dy = dy.data();
    args.ids = kIds.data();
    args.target = target.data();
    Doubles expected(kVocabulary * kColumns, 1.0);
    const auto add = [&](int64_t begin, int64_t end) {
      embedding_backward_cpu(args, begin, end);
      for (int64_t i = 0; i < count; ++i) {
        if (kIds[i] < begin || kIds[i] >= end) continue;
        for (int64_t j = 0; j < kColumns; ++j)
          expected[kIds[i] * kColumns + j] += dy[i * kColumns + j];
      }
      expect_near(target, expected, tolerance(target_type), "target");
    };
    add(0, 3);
    add(3, kVocabulary);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, EmbeddingKernels, kFloatingTypes, type_name);

}  // namespace
}  // namespace megatron
