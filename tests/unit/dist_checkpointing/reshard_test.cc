// Any layout writes, any layout reads: random boxes, flat ranges, paddings and ranks against a
// dense reference.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/dist_checkpointing/detail/geometry.h"
#include "test_support.h"
#include "tests/unit/thread_agreement.h"

namespace megatron {
namespace {

using testing::HasSubstr;
using Shape = std::vector<int64_t>;

// The local tensor of one rank with its memory.
struct Local {
  ShardedTensor tensor;
  std::vector<double> memory;
};

using Random = std::mt19937_64;
int64_t below(Random& random, int64_t limit) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
}

// Cuts a shape into boxes that tile it, by random cuts of random dimensions.
std::vector<Box> tile(Random& random, const Shape& shape, int cuts) {
  std::vector<Box> boxes = {{Shape(shape.size(), 0), shape}};
  for (int i = 0; i < cuts && !shape.empty(); ++i) {
    Box& box = boxes[static_cast<size_t>(below(random, static_cast<int64_t>(boxes.size())))];
    const size_t d = static_cast<size_t>(below(random, static_cast<int64_t>(shape.size())));
    if (box.shape[d] < 2) continue;
    Box other = box;
    const int64_t at = 1 + below(random, box.shape[d] - 1);
    box.shape[d] = at;
    other.offset[d] += at;
    other.shape[d] -= at;
    boxes.push_back(other);
  }
  std::shuffle(boxes.begin(), boxes.end(), random);
  return boxes;
}

template <class Visit>
void for_each_element(const Shape& shape, const Visit& visit) {
  int64_t total = 1;
  for (int64_t extent : shape) total *= extent;
  for (int64_t flat = 0; flat < total; ++flat) {
    Shape at(shape.size());
    int64_t rest = flat;
    for (size_t d = shape.size(); d-- > 0;) {
      at[d] = rest % shape[d];
      rest /= shape[d];
    }
    visit(at);
  }
}

int64_t flat_of(const Shape& shape, const Shape& at) {
  int64_t flat = 0;
  for (size_t d = 0; d < shape.size(); ++d) flat = flat * shape[d] + at[d];
  return flat;
}

int64_t value_at(const Shape& shape, const Shape& at) { return flat_of(shape, at) + 1; }

// Spreads the boxes of a tiling over local tensors: each holds one or two boxes, stacked along
// dimension 0 with padding rows between and around them; each local tensor is then cut into flat
// ranges, one per (data) rank.
std::vector<Local> random_layout(Random& random, const Shape& shape) {
  const std::vector<Box> boxes = tile(random, shape, static_cast<int>(below(random, 6)));
  std::vector<Local> locals;
  for (size_t i = 0; i < boxes.size();) {
    ShardedTensor tensor;
    tensor.key = "x";
    tensor.dtype = DType::kFloat64;
    tensor.global_shape = shape;
    const size_t count =
        shape.empty()
            ? 1
            : std::min<size_t>(boxes.size() - i, 1 + static_cast<size_t>(below(random, 2)));
    tensor.local_shape = shape.empty() ? Shape{} : Shape(shape.size(), 0);
    for (size_t k = 0; k < count; ++k) {
      Shape offset(shape.size(), 0);
      for (size_t d = 0; d < shape.size(); ++d) {
        offset[d] = below(random, 2) + (d == 0 ? tensor.local_shape[0] : 0);
        tensor.local_shape[d] =
            std::max(tensor.local_shape[d], offset[d] + boxes[i + k].shape[d] + below(random, 2));
      }
      tensor.pieces.push_back({boxes[i + k], offset});
    }
    i += count;
    int64_t total = 1;
    for (int64_t extent : tensor.local_shape) total *= extent;
    std::vector<int64_t> cuts = {0, total};
    for (int64_t n = below(random, 3); n > 0; --n) cuts.push_back(below(random, total + 1));
    std::sort(cuts.begin(), cuts.end());
    for (size_t c = 0; c + 1 < cuts.size(); ++c) {
      Local local{tensor,
                  std::vector<double>(static_cast<size_t>(cuts[c + 1] - cuts[c]) + 1, -7.0)};
      local.tensor.flat_begin = cuts[c];
      local.tensor.flat_end = cuts[c + 1];
      locals.push_back(std::move(local));
    }
  }
  for (Local& local : locals) local.tensor.data = local.memory.data();
  return locals;
}

// What the local memory must hold: the tensor's values in its pieces, zero elsewhere; and the guard
// behind it.
std::vector<double> expected_memory(const Local& local) {
  const ShardedTensor& t = local.tensor;
  std::vector<double> expected(local.memory.size(), 0.0);
  expected.back() = -7.0;
  for (const ShardPiece& piece : t.pieces) {
    for_each_element(piece.global.shape, [&](const Shape& at) {
      Shape global = at, inside = at;
      for (size_t d = 0; d < at.size(); ++d) {
        global[d] += piece.global.offset[d];
        inside[d] += piece.local_offset[d];
      }
      const int64_t flat = flat_of(t.local_shape, inside);
      if (flat >= t.flat_begin && flat < t.flat_end)
        expected[static_cast<size_t>(flat - t.flat_begin)] =
            static_cast<double>(value_at(t.global_shape, global));
    });
  }
  return expected;
}

// Deals the local tensors to ranks and saves from as many threads.
void save_from_ranks(Random& random, std::vector<Local>& locals, const std::filesystem::path& root,
                     int num_ranks) {
  std::vector<SaveRequest> requests(static_cast<size_t>(num_ranks));
  for (Local& local : locals)
    requests[static_cast<size_t>(below(random, num_ranks))].tensors.push_back(local.tensor);
  ThreadAgreement::Room room(num_ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank)
    threads.emplace_back([&, rank] {
      ThreadAgreement agreement(room, rank);
      SaveRequest& request = requests[static_cast<size_t>(rank)];
      request.root = root;
      request.iteration = 1;
      request.agreement = &agreement;
      request.replace_existing = true;
      save_checkpoint(request);
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(Reshard, AnyLayoutReadsWhatAnyLayoutWrote) {
  Random random(20240511);
  const std::vector<Shape> shapes = {{},      {1},       {17},         {5, 7},
                                     {16, 4}, {3, 5, 4}, {2, 3, 2, 5}, {6, 1, 7}};
  ScratchFolder folder;
  for (int round = 0; round < 120; ++round) {
    const Shape& shape = shapes[static_cast<size_t>(round) % shapes.size()];
    std::vector<Local> written = random_layout(random, shape);
    for (Local& local : written) local.memory = expected_memory(local);
    for (Local& local : written) local.tensor.data = local.memory.data();
    save_from_ranks(random, written, folder.path(), 1 + static_cast<int>(below(random, 3)));
    const Checkpoint checkpoint(folder.path() / checkpoint_name(1));
    for (int repeat = 0; repeat < 3; ++repeat) {
      std::vector<Local> read = random_layout(random, shape);
      std::vector<ShardedTensor> wanted;
      for (const Local& local : read) wanted.push_back(local.tensor);
      checkpoint.load(wanted, {.threads = 1});
      for (const Local& local : read)
        ASSERT_EQ(local.memory, expected_memory(local)) << "round " << round;
    }
  }
}

TEST(Reshard, SplitsColumnsAcrossManyBlocks) {
  // 5 MiB in one tensor: column slices touch every block, and reading a few rows reads only their
  // blocks.
  const int64_t rows = 640, columns = 1024;
  std::vector<double> dense(static_cast<size_t>(rows * columns));
  std::iota(dense.begin(), dense.end(), 0.0);
  ScratchFolder folder;
  SaveRequest request;
  request.root = folder.path();
  request.tensors = {
      {"w", DType::kFloat64, {rows, columns}, {rows, columns}, {}, 0, -1, 0, dense.data()}};
  const Checkpoint checkpoint(save_checkpoint(request).directory);
  const int64_t begin = 331, width = 97;  // a split that divides nothing
  std::vector<double> slice(static_cast<size_t>(rows * width));
  ShardedTensor wanted{"w",
                       DType::kFloat64,
                       {rows, columns},
                       {rows, width},
                       {{{{0, begin}, {rows, width}}, {0, 0}}},
                       0,
                       -1,
                       0,
                       slice.data()};
  EXPECT_EQ(checkpoint.load(std::vector<ShardedTensor>{wanted}).bytes_read,
            dense.size() * sizeof(double));
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < width; ++c)
      ASSERT_EQ(slice[static_cast<size_t>(r * width + c)],
                static_cast<double>(r * columns + begin + c));
  wanted.local_shape = {3, columns};
  wanted.pieces = {{{{500, 0}, {3, columns}}, {0, 0}}};
  EXPECT_EQ(checkpoint.load(std::vector<ShardedTensor>{wanted}).bytes_read, kCheckpointBlockBytes);
  EXPECT_EQ(slice[0], 500.0 * columns);
}

TEST(Reshard, VocabularyPaddingStaysZero) {
  // 10 rows padded to 12 over 2 ranks of 6, read as 16 over 4 ranks of 4.
  std::vector<float> table(60);
  std::iota(table.begin(), table.end(), 1.0f);
  std::vector<float> first(table.begin(), table.begin() + 30),
      second(table.begin() + 30, table.end());
  second.resize(30, 99.0f);  // rows of padding
  for (size_t i = 20; i < 30; ++i) second[i] = 99.0f;
  ScratchFolder folder;
  SaveRequest request;
  request.root = folder.path();
  const auto shard = [](int64_t row, int64_t count, int64_t local_rows, float* data) {
    return ShardedTensor{"embedding",
                         DType::kFloat32,
                         {10, 5},
                         {local_rows, 5},
                         {{{{row, 0}, {count, 5}}, {0, 0}}},
                         0,
                         -1,
                         0,
                         data};
  };
  request.tensors = {shard(0, 6, 6, first.data()), shard(6, 4, 6, second.data())};
  const Checkpoint checkpoint(save_checkpoint(request).directory);
  std::vector<float> third(20, 7.0f), fourth(20, 7.0f);
  ShardedTensor beyond = shard(8, 0, 4, fourth.data());  // a rank that holds padding only
  beyond.pieces = {{{{10, 0}, {0, 5}}, {0, 0}}};
  checkpoint.load(std::vector<ShardedTensor>{shard(8, 2, 4, third.data()), beyond});
  EXPECT_EQ(third, (std::vector<float>{41, 42, 43, 44, 45, 46, 47, 48, 49, 50,
                                       0,  0,  0,  0,  0,  0,  0,  0,  0,  0}));
  EXPECT_EQ(fourth, std::vector<float>(20, 0.0f));
}

TEST(Reshard, MergeFindsContradictionsBetweenRanks) {
  ScratchFolder folder;
  const auto errors_of = [&](const std::vector<ShardedTensor>& one_per_rank) {
    const int num_ranks = static_cast<int>(one_per_rank.size());
    ThreadAgreement::Room room(num_ranks);
    std::vector<std::string> errors(one_per_rank.size());
    std::vector<std::thread> threads;
    for (int rank = 0; rank < num_ranks; ++rank)
      threads.emplace_back([&, rank] {
        ThreadAgreement agreement(room, rank);
        SaveRequest request;
        request.root = folder.path();
        request.agreement = &agreement;
        request.tensors = {one_per_rank[static_cast<size_t>(rank)]};
        errors[static_cast<size_t>(rank)] = error_of([&] { save_checkpoint(request); });
      });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(errors[0], errors.back());  // every rank learns the reason
    EXPECT_TRUE(names_in(folder.path()).empty());
    return errors[0];
  };
  std::vector<float> data(8);
  const auto rows = [&](int64_t begin, int64_t count) {
    return ShardedTensor{
        "w", DType::kFloat32, {4, 2}, {count, 2}, {{{{begin, 0}, {count, 2}}, {0, 0}}}, 0, -1,
        0,   data.data()};
  };
  EXPECT_THAT(errors_of({rows(0, 2), rows(2, 1)}),
              HasSubstr("tensor w: its fragments hold 6 of its 8 elements"));
  EXPECT_THAT(errors_of({rows(0, 3), rows(2, 2)}),
              HasSubstr("its fragments hold more than its 8 elements"));
  EXPECT_THAT(errors_of({rows(0, 2), rows(1, 2)}), HasSubstr("given twice"));
  ShardedTensor half = rows(2, 2);
  half.dtype = DType::kBFloat16;
  EXPECT_THAT(errors_of({rows(0, 2), half}),
              HasSubstr("rank 1 describes w as BF16 [4, 2], a lower rank as F32 [4, 2]"));
  ShardedTensor broken = rows(2, 2);
  broken.data = nullptr;
  EXPECT_THAT(errors_of({rows(0, 2), broken}), HasSubstr("rank 1: w has no memory"));
}

TEST(Geometry, CountBeforeEqualsCounting) {
  Random random(5);
  for (int round = 0; round < 300; ++round) {
    const size_t dims = static_cast<size_t>(below(random, 4));
    Shape local, offset, box;
    for (size_t d = 0; d < dims; ++d) {
      local.push_back(1 + below(random, 5));
      box.push_back(below(random, local[d] + 1));
      offset.push_back(below(random, local[d] - box[d] + 1));
    }
    int64_t total = 1;
    for (int64_t extent : local) total *= extent;
    for (int64_t position = 0; position <= total; ++position) {
      int64_t count = 0;
      for_each_element(box, [&](const Shape& at) {
        Shape inside = at;
        for (size_t d = 0; d < dims; ++d) inside[d] += offset[d];
        count += flat_of(local, inside) < position;
      });
      ASSERT_EQ(count_before(local, offset, box, position), count);
    }
  }
}

}  // namespace
}  // namespace megatron
