// Rows that tensor ranks divide between products: what an MLP gives then, and how long it takes.
#include <gtest/gtest.h>

#include <iostream>
#include <string>

#include "megatron/base/format.h"
#include "megatron/comm/one_shot/peer_collectives.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/nn/forward_parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/tensor_parallel/divided_rows.h"
#include "megatron/tensor_parallel/layers.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/gpu/timing.h"

namespace megatron {
namespace {

// x + fc2(swiglu(fc1(norm(x)))), as it is served.
class TwoLinears : public Module {
 public:
  TwoLinears(int64_t hidden, int64_t ffn, const QuantizationOptions& quantization,
             const ParallelGroups& groups)
      : fc1_("fc1", hidden, 2 * ffn, options(quantization, ffn, nullptr), groups),
        fc2_("fc2", ffn, hidden, options(quantization, 0, &fc1_), groups) {
    add("fc1", &fc1_);
    add("fc2", &fc2_);
  }
  at::Tensor forward(const at::Tensor& x) {
    const SublayerOutput inner = fc1_.forward_with_residual(x);
    return fc2_.forward(inner.output, inner.residual);
  }

 private:
  static LinearOptions options(const QuantizationOptions& quantization, int64_t ffn,
                               ColumnParallelLinear* from) {
    LinearOptions options;
    options.bias = false;
    options.init = Init::normal(0.1);
    options.quantization = quantization;
    options.input_norm = from == nullptr;
    options.norm.kind = Normalization::kRMSNorm;
    if (from == nullptr) {
      options.parts = {ffn, ffn};
    } else {
      options.input_activation = Activation::kSwiglu;
      options.input_from = from;
    }
    return options;
  }
  ColumnParallelLinear fc1_;
  RowParallelLinear fc2_;
};

struct Tried {
  const ParallelGroups& groups;
  TwoLinears& layer;
  PeerMailbox& mailbox;
};

at::Tensor divided(const Tried& on, const at::Tensor& x) {
  const DividedRows rows(x.size(0), on.groups.tp);
  return rows.all(on.layer.forward(rows.own(x)));
}

void on_two_gpus(int64_t hidden, int64_t ffn, int64_t most_rows, QuantizationRecipe recipe,
                 const std::function<void(const Tried&, at::Device)>& body) {
  run_gpu_ranks(2, [&](const std::shared_ptr<Backend>& world, at::Device device) {
    const at::NoGradGuard no_grad;
    ParallelConfig parallel;
    parallel.tensor_model_parallel_size = 2;
    const ParallelGroups groups = make_parallel_groups(parallel, world);
    const std::shared_ptr<PeerMailbox> mailbox = groups.tp.mailbox();
    QuantizationOptions quantization;
    quantization.recipe = recipe;
    TwoLinears layer(hidden, ffn, quantization, groups);
    ForwardParameterStore store(layer, at::kBFloat16, device);
    initialize_parameters(layer, 3, groups);
    store.place();
    mailbox->open(device, DividedRows::count_of(most_rows, 2) * hidden * 2);
    ASSERT_EQ(mailbox->obstacle(), "");
    body({groups, layer, *mailbox}, device);
  });
}

// The same on all ranks, which are threads.
at::Tensor rows_for(int64_t rows, int64_t hidden, at::Device device) {
  const at::Tensor x = at::arange(rows * hidden, at::kDouble).mul_(0.7).sin_().mul_(1e4);
  return x.sub(x.floor()).sub_(0.5).view({rows, 1, hidden}).to(device, at::kBFloat16);
}

TEST(DividedRowsGpu, GiveWhatWholeRowsGive) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  for (const QuantizationRecipe recipe :
       {QuantizationRecipe::kNone, QuantizationRecipe::kTensorwise, QuantizationRecipe::kDelayed})
    on_two_gpus(512, 1024, 4096, recipe, [&](const Tried& on, at::Device device) {
      for (const int64_t rows : {1024, 1500, 2047, 4096, 33}) {
        const at::Tensor x = rows_for(rows, 512, device), whole = on.layer.forward(x);
        const int64_t before = on.mailbox.exchanges();
        const at::Tensor got = divided(on, x);
        EXPECT_EQ(got.sizes(), x.sizes());
        EXPECT_EQ(on.mailbox.exchanges() - before, recipe == QuantizationRecipe::kTensorwise ? 4
                                                   : recipe == QuantizationRecipe::kNone     ? 3
                                                                                             : 2);
        const auto norm = [](const at::Tensor& t) {
          return t.to(at::kFloat).norm().item<double>();
        };
        EXPECT_GT(norm(whole - x), norm(x));
        EXPECT_LT(norm(got - whole), 6e-3 * norm(whole))
            << rows << " rows, recipe " << static_cast<int>(recipe);
      }
    });
}

// What 400 rows give, whose products have the scales of rows.
struct ManyRows {
  at::Tensor in, out;
  ManyRows(TwoLinears& layer, at::Device device)
      : in(rows_for(400, 512, device)), out(layer.forward(in)) {}
};

// Products of up to 256 rows have none: they are applied behind them.
void expect_rows_alone(TwoLinears& layer, const ManyRows& all, const std::string& what) {
  for (const int64_t rows : {5, 16, 100, 256}) {
    const at::Tensor some = layer.forward(all.in.narrow(0, 0, rows)),
                     expected = all.out.narrow(0, 0, rows);
    const auto norm = [](const at::Tensor& t) { return t.to(at::kFloat).norm().item<double>(); };
    EXPECT_LT(norm(some - expected), 6e-3 * norm(expected)) << rows << " rows, " << what;
  }
}

// Ranks that share a GPU leave one another room for their products while a sum waits: 400 rows are
// summed by collectives.
TEST(DividedRowsGpu, RowsOfFp8DoNotDependOnTheirNumber) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  on_two_gpus(512, 1024, 4096, QuantizationRecipe::kTensorwise,
              [&](const Tried& on, at::Device device) {
                const ManyRows all(on.layer, device);
                expect_rows_alone(on.layer, all, "summed by collectives");
                const auto peers = on.groups.tp.peer_collectives();
                peers->open(device, 1 << 20);
                expect_rows_alone(on.layer, all, "summed by a kernel");
              });
  const at::NoGradGuard no_grad;
  const ParallelGroups one;
  QuantizationOptions quantization;
  quantization.recipe = QuantizationRecipe::kTensorwise;
  TwoLinears layer(512, 1024, quantization, one);
  ForwardParameterStore store(layer, at::kBFloat16, at::Device(at::kCUDA, 0));
  initialize_parameters(layer, 3, one);
  store.place();
  expect_rows_alone(layer, ManyRows(layer, at::Device(at::kCUDA, 0)), "of one rank");
}

// One layer of Llama 3 70B, beside one rank's products without any exchange.
TEST(DividedRowsGpu, Rates) {
  if (c10::cuda::device_count() < 2) GTEST_SKIP() << "fewer than two GPUs";
  for (const QuantizationRecipe recipe :
       {QuantizationRecipe::kNone, QuantizationRecipe::kTensorwise})
    on_two_gpus(8192, 28672, 8192, recipe, [&](const Tried& on, at::Device device) {
      const ParallelGroups one;
      QuantizationOptions quantization;
      quantization.recipe = recipe;
      TwoLinears half(8192, 14336, quantization, one);
      ForwardParameterStore store(half, at::kBFloat16, device);
      initialize_parameters(half, 4, one);
      store.place();
      for (const int64_t rows : {512, 1024, 2048, 4096, 8192}) {
        const at::Tensor x = rows_for(rows, 8192, device);
        const std::vector<double> ms =
            milliseconds(x, {[&] { half.forward(x); }, [&] { divided(on, x); }});
        if (device.index() == 0)
          std::cout << (recipe == QuantizationRecipe::kNone ? "bf16, " : "FP8, ") << rows
                    << " rows: products alone " << ms[0] << " ms, divided " << ms[1] << std::endl;
      }
    });
}

// Sums over all GPUs of the machine.
TEST(PeerCollectivesGpu, RatesOfSums) {
  const int ranks = c10::cuda::device_count();
  if (ranks < 2) GTEST_SKIP() << "fewer than two GPUs";
  run_gpu_ranks(ranks, [&](const std::shared_ptr<Backend>& world, at::Device device) {
    const ProcessGroup group(world, "tp");
    const auto peers = group.peer_collectives();
    peers->open(device, 4 << 20);
    for (const int64_t kib : {8, 16, 64, 256, 1024, 2048, 4096}) {
      const at::Tensor x = at::zeros({kib * 512}, at::dtype(at::kBFloat16).device(device));
      const std::vector<double> ms = milliseconds(x, {[&] {
                                                    for (int i = 0; i < 20; ++i)
                                                      peers->all_reduce(x, ReduceOp::kSum, x);
                                                  }});
      if (device.index() == 0)
        std::cout << kib << " KiB over " << ranks << " ranks: " << ms[0] * 50 << " us" << std::endl;
    }
  });
}

}  // namespace
}  // namespace megatron
