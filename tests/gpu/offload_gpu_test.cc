// Activations offloaded to pinned host memory: copies on their own streams, overlapped with
// computation, change no bit, and device memory is freed however far the host runs ahead.
#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>

#include "megatron/distributed/distributed_data_parallel.h"
#include "megatron/models/gpt/gpt_model.h"
#include "megatron/nn/activation_offload.h"
#include "megatron/nn/placement.h"
#include "megatron/nn/recompute.h"
#include "megatron/tensor/host_copy.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

const at::Device kGpu(at::kCUDA, 0);

ModelConfig llama_config(const std::vector<std::string>& modules) {
  ModelConfig config;
  TransformerConfig& t = config.transformer;
  t.num_layers = 8;
  t.hidden_size = 1024;
  t.ffn_hidden_size = 2816;
  t.num_attention_heads = 8;
  t.seq_length = 2048;
  t.normalization = Normalization::kRMSNorm;
  t.swiglu = true;
  t.add_bias_linear = false;
  t.position_embedding_type = PositionEmbedding::kRope;
  t.hidden_dropout = t.attention_dropout = 0.0;
  t.fine_grained_activation_offloading = !modules.empty();
  t.offload_modules = modules;
  t.min_offloaded_tensor_size = 1024;
  t.finalize();
  config.vocab_size = config.padded_vocab_size = 1024;
  return config;
}

struct Trained {
  at::Tensor losses, grads;
  int64_t peak = 0;  // bytes, above what was there before the passes
  ActivationOffloadCounts counts;
};

// Several micro-batches forward, then back, as a pipeline stage runs them; nothing waits for the
// device in between.
Trained train(const ModelConfig& config, int passes) {
  const ParallelGroups groups;
  GPTModel model(config, groups);
  DistributedDataParallel store(model, groups, at::kBFloat16, kGpu);
  initialize_parameters(model, 7, groups);
  store.values_changed();
  store.zero_grad(passes);
  ActivationOffload offload(kGpu, {config.transformer.min_offloaded_tensor_size, 1});
  at::DeviceAllocator* allocator = at::getDeviceAllocator(c10::kCUDA);
  constexpr auto kAggregate = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  allocator->resetPeakStats(0);
  const int64_t before = allocator->getDeviceStats(0).allocated_bytes[kAggregate].current;
  const int64_t s = config.transformer.seq_length;
  std::vector<OffloadedPass> hosts(static_cast<size_t>(passes));
  std::vector<RecomputeTape> tapes(static_cast<size_t>(passes));
  std::vector<at::Tensor> losses;
  for (size_t i = 0; i < hosts.size(); ++i) {
    const at::Tensor text = at::arange(s + 1, at::dtype(at::kLong).device(kGpu))
                                .add(static_cast<int64_t>(i))
                                .mul(7)
                                .remainder(config.vocab_size)
                                .view({1, s + 1});
    ForwardContext context;
    context.training = true;
    context.place.sample =
        at::full({1}, static_cast<int64_t>(i), at::dtype(at::kLong).device(kGpu));
    context.place.position = at::arange(s, at::dtype(at::kLong).device(kGpu));
    context.tape = &tapes[i];
    if (config.transformer.offloads_activations()) {
      hosts[i] = OffloadedPass(offload);
      context.offload = &hosts[i];
    }
    losses.push_back(model
                         .loss(text.slice(1, 0, s).contiguous(), text.slice(1, 1).contiguous(),
                               at::ones({1, s}, at::dtype(at::kFloat).device(kGpu)), context)
                         .sum);
  }
  for (size_t i = 0; i < hosts.size(); ++i) {
    hosts[i].begin_backward();
    tapes[i].backward(losses[i]);
    hosts[i] = OffloadedPass();
    losses[i] = losses[i].detach();
  }
  store.finish_grad_sync();
  Trained out;
  out.losses = at::stack(losses).to(at::kCPU);
  out.grads = store.flat_grads().to(at::kCPU);
  out.peak = allocator->getDeviceStats(0).allocated_bytes[kAggregate].peak - before;
  out.counts = offload.counts();
  return out;
}

TEST(OffloadGpu, ChangesNoBitAndHoldsLess) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const Trained plain = train(llama_config({}), 3);
  ASSERT_TRUE(at::isfinite(plain.grads).all().item<bool>());
  struct Case {
    std::vector<std::string> modules, recomputed;
    double most;  // of the plain peak
  };
  for (const Case& c : {Case{{"core_attn", "attn_proj"}, {}, 0.85},
                        Case{{"attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm",
                              "mlp_fc1", "mlp_act", "mlp_fc2"},
                             {},
                             0.5},
                        Case{{"core_attn", "attn_proj", "mlp_norm"}, {"mlp"}, 0.4}}) {
    ModelConfig config = llama_config(c.modules);
    config.transformer.recompute_modules = c.recomputed;
    if (!c.recomputed.empty())
      config.transformer.recompute_granularity = RecomputeGranularity::kSelective;
    for (int repeat = 0; repeat < 2; ++repeat) {  // the second time pinned memory is used again
      const Trained offloaded = train(config, 3);
      EXPECT_TRUE(at::equal(plain.losses, offloaded.losses));
      EXPECT_TRUE(at::equal(plain.grads, offloaded.grads));
      EXPECT_EQ(offloaded.counts.late_groups, 0);
      EXPECT_EQ(offloaded.counts.host_bytes, 0);
      EXPECT_LT(static_cast<double>(offloaded.peak), c.most * static_cast<double>(plain.peak));
      std::printf("%zu modules: peak %.1f of %.1f MiB, %.1f MiB to the host, %.1f MiB back\n",
                  c.modules.size(), static_cast<double>(offloaded.peak) / 1048576,
                  static_cast<double>(plain.peak) / 1048576,
                  static_cast<double>(offloaded.counts.bytes_to_host) / 1048576,
                  static_cast<double>(offloaded.counts.bytes_from_host) / 1048576);
    }
  }
}

// What is uploaded lies where a tensor was that kernels still write: weights that a forward needs
// arrive while the layers before are computed.
TEST(HostCopiesGpu, UploadsWaitForWorkOnTheMemoryThatTheyTake) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  constexpr int64_t kElements = int64_t{1} << 26;
  const at::Tensor host = at::randn({kElements});
  at::Tensor value = host;
  upload({&value}, kGpu);  // page-locked memory is there from now on: allocating it takes a while
  EXPECT_TRUE(at::equal(value.cpu(), host));
  value.reset();
  at::Tensor busy = at::zeros({kElements}, at::dtype(at::kFloat).device(kGpu));
  const void* place = busy.const_data_ptr();
  for (int i = 0; i < 1000; ++i) busy.add_(1.0);
  busy.reset();
  value = host;
  upload({&value}, kGpu);
  EXPECT_EQ(value.const_data_ptr(), place);
  EXPECT_TRUE(at::equal(value.cpu(), host));
}

}  // namespace
}  // namespace megatron
