// The rows of the table. A row of a flag that a field has since come to own is dead, and may go.
#include "megatron/training/arguments/flag_table.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "megatron/training/arguments/detail/flag_claims.h"

namespace megatron {
namespace {

using namespace flag_claims;  // NOLINT: the claims are used by this table only

constexpr KnownFlag::Kind kNo = KnownFlag::Kind::kRefused;

// Reasons of rows and of refused values.
constexpr std::string_view kRl = "reinforcement learning is not built yet";
constexpr std::string_view kMuon = "of the optimizers, only adam and sgd are built";

// A flag that is accepted if the claim holds; `values`: accepted values, empty: any.
constexpr KnownFlag so(std::string_view flag, const FlagClaim& claim, int min_values = 0,
                       int max_values = 0, std::string_view values = {}) {
  return {flag, KnownFlag::Kind::kAlreadySo, claim.says, min_values, max_values, values, &claim};
}

constexpr KnownFlag kRows[] = {
    // -- transformer configuration
    {"--pipeline-model-parallel-comm-backend", kNo,
     "transfers between pipeline stages use --distributed-backend", 1, 1},
    {"--no-initialization", kNo,
     "weights are always drawn or loaded, never left as the memory was"},
    so("--use-cpu-initialization", kSameInit),
    so("--deterministic-mode", kDeterministic),
    so("--tp-comm-overlap", kExchangesOverlap),
    so("--no-tp-comm-bulk-wgrad --disable-tp-comm-bulk-wgrad", kNoExchangeOverlaps),
    so("--no-tp-comm-bulk-dgrad --disable-tp-comm-bulk-dgrad", kNoExchangeOverlaps),
    so("--no-tp-comm-overlap-ag --disable-tp-comm-overlap-ag", kNoExchangeOverlaps),
    so("--no-tp-comm-overlap-rs --disable-tp-comm-overlap-rs", kNoExchangeOverlaps),
    so("--no-tp-comm-split-ag --disable-tp-comm-split-ag", kNoExchangeOverlaps),
    so("--no-tp-comm-split-rs --disable-tp-comm-split-rs", kNoExchangeOverlaps),
    so("--cross-entropy-loss-fusion", kFusedLoss),
    {"--tp-comm-bootstrap-backend", kNo,
     "buffers of Transformer Engine are not used; GPUs of one host copy to each other", 1, 1,
     "nccl"},
    {"--use-ring-exchange-p2p", kNo,
     "transfers between pipeline stages have one communicator per direction"},
    so("--overlap-p2p-communication-warmup-flush", kTransfersOverlap),
    so("--cpu-offloading-retain-pinned-cpu-buffers", kPinnedCache),
    {"--flash-attention-version", kNo, "kernels are chosen by --attention-backend", 1, 1},
    {"--apply-residual-connection-post-layernorm", kNo,
     "a residual taken after the norm is not built yet"},
    {"--qk-l2-norm", kNo, "L2 norms of queries and keys are not built; --qk-layernorm is"},
    so("--no-dsa-indexer-rotate-activation --disable-dsa-indexer-rotate-activation", kDsaOff),
    so("--no-dsa-indexer-scoring-relu --disable-dsa-indexer-scoring-relu", kDsaOff),
    so("--init-model-with-meta-device", kAllocatedOnce),
    {"--apply-query-key-layer-scaling", kNo,
     "scaling by layer number is not built; softmax runs in fp32, which makes it needless"},
    {"--disable-bf16-reduced-precision-matmul", kNo,
     "this switch of the GEMM library is not offered"},
    so("--fused-residual-rmsnorm", kFusedNorm),
    so("--use-transformer-engine-op-fuser", kFusedLayer),
    {"--fp8-interval", kNo, "delayed scales are updated every step", 1, 1, "1"},
    {"--fp8-output-proj", kNo,
     "the output layer multiplies in the model's type; in FP8 it is not built yet"},
    so("--no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding",
       kOwnRows),
    {"--config-logger-dir", kNo, "the resolved configuration is written beside the checkpoints", 1,
     1},
    so("--use-te-activation-func", kFusedActivation),
    {"--symmetric-ar-type", kNo, "sums over symmetric memory are not built yet", 1, 1},
    so("--cache-mla-latents", kLatentCache),
    so("--mla-down-proj-fusion", kFusedDownProjections),
    so("--transformer-impl", kOneImplementation, 1, 1,
       "local transformer_engine inference_optimized"),
    {"--delta-offload-bytes-across-pp-ranks", kNo,
     "every stage offloads alike; --activation-offload-fraction says how much", 1, 1, "0"},
    // -- network size
    {"--no-rope-freq", kNo, "layers without rotary positions are not built yet", 1, 1, "0"},
    {"--onnx-safe", kNo, "removed option: ONNX export is not offered", 1, 1},
    // -- regularization
    so("--muon-no-split-qkv", kMuonOff),
    {"--no-weight-decay-cond-type", kNo, "give --apply-wd-to-qk-layernorm", 1, 1},
    // -- profiling
    {"--nvtx-ranges", kNo, "give --profile, which marks the steps for Nsight Systems"},
    // -- training
    {"--rampup-batch-size", kNo, "give --step-batch-size-schedule", 3, 3},
    {"--empty-unused-memory-level", kNo, "memory is kept between steps, never returned", 1, 1, "0"},
    {"--gpu-sniff-test-interval", kNo, "a self-test of the GPU during training is not built yet", 1,
     1},
    {"--train-sync-interval", kNo, "the device is never waited for on a schedule", 1, 1},
    so("--exit-signal-handler-for-dataloader", kSignals),
    so("--exit-signal-handler-for-training", kSignals),
    so("--manual-gc", kNoGc),
    so("--manual-gc-interval", kNoGc, 1, 1),
    so("--no-manual-gc-eval --disable-manual-gc-eval", kNoGc),
    {"--iterations-to-skip", kNo, "skipping of named iterations is not built yet", 1, -1},
    {"--batch-size", kNo, "removed option: give --micro-batch-size", 1, 1},
    {"--check-for-large-grads", kNo,
     "a check for large gradients is not built yet; --clip-grad bounds them"},
    {"--checkpoint-activations", kNo,
     "removed option: give --recompute-granularity full --recompute-method uniform"},
    so("--no-masked-softmax-fusion", kFusedSoftmax),
    so("--no-bias-swiglu-fusion", kFusedActivation),
    so("--no-bias-dropout-fusion", kFusedDropout),
    so("--no-rope-fusion", kFusedRotary),
    so("--use-flash-attn", kFlashAttention),
    {"--use-torch-optimizer-for-cpu-offload", kNo,
     "states in host memory are updated by the kernels of this program"},
    so("--overlap-cpu-optimizer-d2h-h2d", kHostOverlap),
    {"--dump-param-to-param-group-map", kNo, "a list of parameter groups is not built yet", 1, 1},
    so("--no-pin-cpu-grads", kNothingPinned),
    so("--no-pin-cpu-params", kNothingPinned),
    so("--no-persist-layer-norm", kFusedNorm),
    so("--no-gradient-accumulation-fusion", kFusedAccumulation),
    so("--use-mcore-models", kOneSetOfModels),
    // -- rl
    so("--no-rl-persist-cuda-graphs", kRlOff),
    so("--no-rl-partial-rollouts", kRlOff),
    so("--no-rl-inference-logprobs-is-correction", kRlOff),
    so("--no-rl-use-sequence-packing", kRlOff),
    so("--no-rl-training-cuda-graphs", kRlOff),
    so("--no-rl-offload-inference-model-weights-when-idle", kRlOff),
    so("--no-rl-verify-model-weights-swap", kRlOff),
    so("--no-rl-skip-bos-token", kRlOff),
    {"--rl-inference-parsers", kNo, kRl, 0, -1},
    // -- RNG and initialization
    so("--te-rng-tracker", kRng),
    so("--inference-rng-tracker", kRng),
    {"--data-parallel-random-init", kNo,
     "replicas that start from different weights are not built"},
    // -- learning rate and weight decay
    {"--warmup", kNo, "removed option: give --lr-warmup-fraction", 1, 1},
    // -- checkpointing
    {"--load-main-params-from-ckpt", kNo, "loading of main parameters alone is not built yet"},
    {"--no-use-tokenizer-model-from-checkpoint-args "
     "--disable-use-tokenizer-model-from-checkpoint-args",
     kNo, "give the tokenizer flags: a flag wins over the checkpoint"},
    so("--exit-on-missing-checkpoint", kMissingIsAnError),
    so("--no-ckpt-fully-parallel-save", kWholeWriting),
    so("--async-strategy", kOneBackgroundWriter, 1, 1, "nvrx mcore"),
    so("--use-persistent-ckpt-worker", kPersistentWriter),
    so("--ckpt-fully-parallel-load", kDividedReading),
    {"--ckpt-fully-parallel-load-exchange-algo", kNo,
     "each part is read by one rank and broadcast to those that hold the same", 1, 1},
    so("--ckpt-fully-parallel-load-per-rank-objects", kNoObjects),
    so("--ckpt-assume-constant-structure", kConstantStructure),
    {"--no-ckpt-load-validate-sharding-integrity --disable-ckpt-load-validate-sharding-integrity",
     kNo, "a checkpoint is always verified"},
    {"--no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load", kNo,
     "checkpoints do not depend on the sharding; there is no DTensor format"},
    {"--dist-ckpt-strictness", kNo, "a checkpoint that lacks or adds tensors is refused", 1, 1,
     "raise_all"},
    so("--dist-ckpt-optim-fully-reshardable", kAnyLayout),
    so("--distrib-optim-fully-reshardable-mem-efficient", kAnyLayout),
    {"--no-save-tokenizer-assets --disable-save-tokenizer-assets", kNo,
     "the tokenizer's files are always stored beside the weights"},
    so("--verify-integrity", kVerified),
    so("--no-save-rng", kRng),
    so("--no-load-rng", kRng),
    {"--override-ckpt-iteration", kNo,
     "changing the iteration of a checkpoint is not built; --finetune starts at 0", 1, 1},
    so("--use-dist-ckpt", kDistributedCheckpoint),
    {"--dist-ckpt-workers", kNo, "the number of writers is not a choice here", 1, 1},
    so("--ckpt-fully-parallel-save", kDividedWriting),
    so("--ckpt-drop-redundant-extra-state", kNoExtraState),
    // -- mixed precision
    so("--attention-softmax-in-fp32", kFp32Softmax),
    so("--accumulate-allreduce-grads-in-fp32", kFp32Sums),
    {"--fp16-lm-cross-entropy", kNo, "the loss is computed in fp32"},
    {"--output-logit-dtype", kNo, "the type of logits is that of the model", 1, 1},
    {"--reuse-grad-buf-for-mxfp8-param-ag", kNo,
     "MXFP8 needs the scaled products of Blackwell GPUs and is not built"},
    // -- distributed init
    so("--no-align-grad-reduce --disable-align-grad-reduce", kUnalignedReduce),
    {"--local-rank", kNo, "launchers pass it in the environment", 1, 1, "0"},
    {"--lazy-mpu-init", kNo, "groups of ranks are always made at the start of a run"},
    {"--use-torch-fsdp2", kNo, "FSDP2 is Python; --use-megatron-fsdp shards parameters"},
    {"--nccl-communicator-config-path", kNo,
     "files of settings of NCCL are not read; its environment variables work", 1, 1},
    so("--disable-gloo-process-groups", kNoGloo),
    {"--high-priority-stream-groups", kNo, "which streams have priority is not a choice here", 1,
     -1},
    {"--flight-recorder-dump-path", kNo,
     "the report of a failure goes to standard error, not to files", 1, 1},
    {"--flight-recorder-trace-buffer-size", kNo,
     "how many finished collectives a rank remembers is fixed", 1, 1},
    so("--no-flight-recorder-dump-on-timeout --disable-flight-recorder-dump-on-timeout",
       kNoTimeoutReport),
    {"--flight-recorder-include-stack-trace", kNo,
     "the report of a failure names collectives, not stack frames"},
    so("--no-flight-recorder-include-only-active --disable-flight-recorder-include-only-active",
       kFinishedCalls),
    so("--no-flight-recorder-extra-dump-on-exec --disable-flight-recorder-extra-dump-on-exec",
       kNoExtraReport),
    so("--disable-jit-fuser", kNoJit),
    {"--model-parallel-size", kNo, "removed option: give --tensor-model-parallel-size", 1, 1},
    {"--ddp-reduce-scatter-with-fp32-accumulation", kNo,
     "sums are fp32 by default; with --grad-reduce-in-bf16 the sum itself is bf16"},
    so("--ddp-param-name-patterns-for-fp32-local-accumulation", kFp32Accumulation, 1, -1),
    {"--ddp-average-in-collective", kNo,
     "gradients are sums, divided once by the weight of all tokens of the step"},
    {"--overlap-param-gather-with-optimizer-step", kNo,
     "all chunks of a rank are updated in one step; --overlap-param-gather gathers during the "
     "forward"},
    so("--no-align-param-gather", kUnalignedGather),
    {"--megatron-fsdp-version", kNo,
     "there is one implementation of fully sharded data parallelism", 1, 1, "1"},
    so("--no-use-layer-wise-param-layout", kLayerWiseOff),
    {"--use-nccl-ub", kNo, "registering buffers with NCCL is not built yet"},
    so("--disable-symmetric-registration", kNoSymmetricRegistration),
    {"--create-all-gather-group", kNo,
     "gathers and sums over the same ranks share one communicator"},
    so("--no-gradient-reduce-div-fusion", kNoDivision),
    {"--suggested-communication-unit-size", kNo,
     "with --use-megatron-fsdp a layer is gathered and reduced at a time", 1, 1},
    {"--keep-fp8-transpose-cache", kNo,
     "the codes of whole weights are kept in both orientations; gathered ones are made for each "
     "pass"},
    so("--torch-fsdp2-no-reshard-after-forward", kFsdp2Off),
    {"--fake-process-group", kNo,
     "a layout is tried without its ranks by megatron check, and by megatron prove with threads"},
    // -- validation
    {"--test-mode", kNo, "a test of single batches is not built yet"},
    // -- data and dataloader
    {"--phase-transition-iterations", kNo,
     "stops at phase boundaries are not built; give --exit-interval", 1, 1},
    {"--per-dataset-sequences-path", kNo, "the sizes are read from each index", 1, 1},
    so("--no-create-attention-mask-in-dataloader", kDerivedMasks),
    // -- tokenizer
    {"--tokenizer-sentencepiece-legacy", kNo,
     "special tokens of a SentencePiece model are those that it was trained with"},
    {"--no-tokenizer-sentencepiece-ignore-extra-whitespaces "
     "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces",
     kNo, "the model itself says what becomes of repeated spaces"},
    {"--tokenizer-hf-no-use-fast", kNo,
     "there is one implementation of a tokenizer.json, the fast one"},
    {"--trust-remote-code", kNo, "no Python code of a model is ever run"},
    {"--use-gigatoken", kNo, "Gigatoken is a Python library"},
    // -- moe
    so("--moe-grouped-gemm", kGroupedProducts),
    so("--moe-use-grouped-tensor", kGroupedProducts),
    so("--moe-single-grouped-weight", kOneExpertWeight),
    so("--moe-single-grouped-bias", kOneExpertWeight),
    so("--moe-permute-fusion", kFusedExperts),
    so("--moe-router-fusion", kFusedExperts),
    so("--use-fused-weighted-squared-relu", kFusedExperts),
    so("--moe-flex-dispatcher-backend", kOneFlex, 1, 1, "deepep hybridep ncclep"),
    so("--moe-enable-deepep", kOneFlex),
    so("--overlap-dispatch-backward-with-experts-wgrad", kGradientsBesideRows),
    // -- logging
    {"--log-device-memory-used", kNo, "--log-memory-interval reports the memory of this process"},
    {"--log-max-attention-logit", kNo, "the largest attention logit is not recorded yet"},
    so("--no-barrier-with-level-1-timing", kNoTimerBarrier),
    {"--logging-level", kNo, "the level of the log is fixed", 1, 1, "20"},
    {"--log-energy", kNo, "energy is not measured"},
    // -- straggler
    so("--disable-straggler-on-startup", kStragglerOff),
    // -- workload inspector
    {"--run-workload-inspector-server", kNo, "the workload inspector is a Python service"},
    // -- inference
    {"--use-legacy-static-engine", kNo, "there is one engine"},
    so("--no-inference-dynamic-batching-prefix-caching", kServeOff),
    so("--no-inference-text-gen-server-logging", kServeOff),
    so("--no-inference-wandb-logging", kServeOff),
    so("--no-inference-use-synchronous-zmq-collectives", kServeOff),
    so("--no-inference-disable-ep-consensus", kServeOff),
    // -- Transformer-Engine
    {"--te-precision-config-file", kNo,
     "precision is set by --fp8-format, --fp4-format and --first-last-layers-bf16; files of "
     "Transformer Engine are not read",
     1, 1},
    // -- experimental
    so("--enable-experimental", kNothingHidden),
    so("--spec", kHybridSpec, 0, -1),
    so("--is-hybrid-model", kHybridModel),
    {"--yaml-cfg", kNo, "give --config FILE", 1, 1},
    {"--megatron-fsdp-main-params-dtype", kNo,
     "--main-params-dtype is the setting for every kind of sharding", 1, 1, "fp32"},
    {"--megatron-fsdp-main-grads-dtype", kNo,
     "--main-grads-dtype is the setting for every kind of sharding", 1, 1, "auto fp32"},
    {"--megatron-fsdp-grad-comm-dtype", kNo,
     "--grad-reduce-in-bf16 is the setting for every kind of sharding", 1, 1, "auto"},
    {"--megatron-fsdp-enable-fine-grained-param-gather", kNo, "a layer is gathered at a time"},
    // -- one logger
    so("--no-one-logger", kOneLoggerOff),
    // -- msc
    so("--disable-msc", kMscOff),
    // -- multimodal examples
    so("--use-te", kOneImplementation),
    so("--language-model-type", kShapeByFlags, 1, 1),
    so("--dataloader-save", kConsumedSamples, 1, 1),
    so("--use-packed-sequence", kPackedMedia),
    so("--optimize-broadcast", kNoBroadcast),
    so("--enable-fusions", kFusedLayer),
};

// Flags that are refused for one reason: "--x" is a switch, "--x=" takes a value, "--x=8" one that
// asks for nothing if it is 8, and "--x=..." any number of values.
struct Refusal {
  std::string_view reason;
  std::string_view flags;  // separated by one space
};
constexpr Refusal kRefusals[] = {
    {"generalised tensor parallelism (weight shards) is not built yet",
     "--tensor-parallel-num-weight-shards= --expert-tensor-parallel-num-weight-shards= "
     "--gtp-remat-opt-in-modules=... --gtp-remat-reduce-scatter-with-fp32-accumulation "
     "--gtp-remat-nccl-ub --gtp-expert-remat-nccl-ub"},
    {"of experts, this is not built yet",
     "--high-priority-a2a-comm-stream --ep-overlap-early-attn-memory-release "
     "--moe-router-quantile-balancing-ema=0.0 --use-grouped-gemm-for-dense-mlp"},
    {"quantised products pad the rows of an expert themselves, so that no router need do so",
     "--moe-router-padding-for-quantization --moe-router-padding-for-fp8"},
    {"exchanges of tokens overlap with work of the same micro-batch, not with another one's",
     "--overlap-moe-expert-parallel-comm"},
    {"--moe-expert-rank-capacity-factor bounds the memory of experts by computing in rounds",
     "--moe-paged-stash --moe-paged-stash-page-size=64 "
     "--moe-paged-stash-buffer-size-factor-cuda=1.1 "
     "--moe-paged-stash-buffer-size-factor-cpu=0.0"},
    {"tokens are exchanged by NCCL; there is no DeepEP or HybridEP to configure",
     "--moe-flex-dispatcher-num-sms= --moe-deepep-num-sms= --moe-hybridep-num-sms= "
     "--moe-hybridep-num-blocks-permute= --moe-hybridep-num-blocks-unpermute= "
     "--moe-hybridep-num-sms-preprocessing=108 --moe-permute-fusion-into-hybridep "
     "--moe-hybridep-pad-uneven-dispatch-inputs --moe-ncclep-zero-copy"},
    {"rows of experts travel in the model's type",
     "--moe-dispatch-fwd-dtype=bf16 --moe-combine-bwd-dtype=bf16"},
    {"rows of gate and up lie in two blocks, as in checkpoints",
     "--moe-mlp-glu-interleave-size= --moe-shared-expert-glu-interleave-size="},
    {"the shared expert is one MLP, with products of its own",
     "--use-grouped-gemm-for-shared-expert"},
    {"experts are padded for no kernel", "--moe-pad-experts-for-cuda-graph-inference"},
    {"which exchanges of sequence parallelism overlap is not a choice here; --no-peer-copies "
     "switches all off",
     "--tp-comm-overlap-rs-dgrad --tp-comm-overlap-cfg="},
    {"weight gradients of every layer are deferred by --pipeline-schedule zb-h1, zb-auto or zb-v",
     "--delay-wgrad-compute --defer-embedding-wgrad-compute --wgrad-deferral-limit=0"},
    {"multi-token prediction stands on the last pipeline stage, next to the output layer",
     "--mtp-standalone"},
    {"detached heads need a gradient norm to clip by that is their own; there is one for all "
     "parameters",
     "--mtp-detach-heads"},
    {"layers of multi-token prediction are of the kind of the decoder's last one",
     "--mtp-hybrid-override-pattern="},
    {"the hidden states of multi-token prediction are those of the layer before", "--mtp-hsm"},
    {"clipping of queries and keys is not built yet",
     "--qk-clip --qk-clip-alpha=0.5 --qk-clip-threshold=100"},
    {"sparse attention is not built yet",
     "--dsa-indexer-n-heads= --dsa-indexer-head-dim= --dsa-indexer-topk= --dsa-indexer-topk-freq=1 "
     "--dsa-indexer-skip-topk-offset=0 --dsa-indexer-loss-coeff= --dsa-indexer-use-sparse-loss "
     "--dsa-kernel-backend=none --dsa-indexer-rope-interleaved --dsa-indexer-k-norm-epsilon= "
     "--dsa-indexer-k-norm-fp32"},
    {"gated delta nets are the letter G of a pattern: gdn with --linear-attention-freq 4 is "
     "--hybrid-layer-pattern G-G-G-*- over and over",
     "--experimental-attention-variant= --linear-attention-freq="},
    {"gated delta products are not built",
     "--gdp-num-householder=3 --gdp-cutedsl-kernel --gdp-num-chunk-states-to-recompute=2"},
    {"the maximal update parametrisation (muP) is not built yet",
     "--use-mup --mup-width-mult=1.0 --mup-base-hidden-size= --mup-embedding-mult=1.0 "
     "--mup-output-mult=1.0 --mup-base-head-dim= --mup-attn-scale-power=1.0"},
    {"quantisers in Python do not run here; the recipes are built in",
     "--fp8-quantizer-factory= --fp4-quantizer-factory="},
    {"Kitchen is a closed library of NVIDIA",
     "--use-kitchen-attention --kitchen-attention-backend=sdpa"},
    {"CUDA graphs hold a whole micro-batch: --cuda-graph-impl local",
     "--external-cuda-graph --inference-cuda-graph-scope= --delay-offload-until-cuda-graph "
     "--optimizer-cuda-graph --cuda-graph-scope=... --cuda-graph-modules=... "
     "--inference-cuda-graph-all-prefills --inference-cuda-graph-max-tokens=512"},
    {"multi-stream residual connections (mHC) are not built yet",
     "--enable-mhc-connections --mhc-num-residual-streams=4 --mhc-sinkhorn-iterations=20 "
     "--mhc-init-gating-factor=0.01 --mhc-recompute-layer-num="},
    {"the engine is that of megatron serve, which takes this flag or says why not",
     "--flash-decode --nccl-all-reduce-for-prefill --inference-fuse-tp-communication "
     "--inference-disable-triton-nvls-kernels --inference-grouped-gemm-backend=vllm "
     "--inference-moe-disable-fused-quant-kernels --inference-moe-token-dispatcher-type=nvls "
     "--inference-batch-times-seqlen-threshold=-1 --max-tokens-to-oom=12000 "
     "--inference-max-requests=8 --inference-max-seq-length=2560 --inference-dynamic-batching "
     "--inference-dynamic-batching-buffer-size-gb=40.0 "
     "--inference-dynamic-batching-paused-buffer-size-gb= "
     "--inference-dynamic-batching-mamba-memory-ratio= --inference-dynamic-batching-block-size=256 "
     "--inference-dynamic-batching-max-requests= --inference-dynamic-batching-max-tokens= "
     "--inference-dynamic-batching-num-cuda-graphs=16 "
     "--inference-dynamic-batching-track-paused-request-events "
     "--inference-dynamic-batching-track-generated-token-events --decode-only-cuda-graphs "
     "--inference-dynamic-batching-unified-memory-level=0 --enable-chunked-prefill "
     "--num-speculative-tokens=0 --inference-dynamic-batching-prefix-caching "
     "--inference-dynamic-batching-prefix-caching-eviction-policy=ref_zero "
     "--inference-dynamic-batching-prefix-caching-coordinator-policy=load_balanced "
     "--inference-dynamic-batching-prefix-caching-routing-alpha=0.5 "
     "--inference-dynamic-batching-prefix-caching-mamba-gb= "
     "--inference-dynamic-batching-cuda-graph-mixed-prefill-count=16 "
     "--inference-dynamic-batching-cuda-graph-sizing-distribution=exponential "
     "--inference-dynamic-batching-sampling-backend=torch --use-same-sampling-seed-across-dp-ranks "
     "--inference-dynamic-batching-async-sched-mode=legacy "
     "--inference-dynamic-batching-logprobs-mode=raw_logprobs --inference-logging-step-interval=0 "
     "--inference-text-gen-server-logging --inference-wandb-logging --inference-coordinator-port= "
     "--inference-use-synchronous-zmq-collectives --inference-disable-ep-consensus "
     "--inference-shards= --mamba-inference-conv-states-dtype= "
     "--mamba-inference-ssm-states-dtype="},
    {"batch-invariant mode has one backend", "--batch-invariant-backend=te_native"},
    {"Mamba-2 layers have one path, which keeps states in fp32 and rows of convolutions in the "
     "type of the model",
     "--disable-mamba-mem-eff-path --mamba-training-ssm-states-dtype="},
    {"computing the MLP in chunks of the sequence is not built yet",
     "--mlp-chunks-for-prefill=1 --mlp-chunks-for-training=1"},
    {"training writes no vectors of texts; `megatron embed` does",
     "--output-bert-embeddings --bert-embedder-type=megatron"},
    {kMuon,
     "--muon-momentum=0.9 --muon-nesterov --muon-scale-mode=spectral "
     "--muon-fp32-matmul-prec=medium --muon-coefficient-type=quintic --muon-num-ns-steps=5 "
     "--muon-tp-mode=duplicated --muon-use-syrk --muon-extra-scale-factor=1.0 "
     "--muon-scalar-optimizer=adam --lion-beta1=0.95 --lion-beta2=0.98"},
    {"there is no Python profiler here; --profile is for Nsight Systems or writes trace.json",
     "--use-pytorch-profiler --pytorch-profiler-collect-shapes "
     "--pytorch-profiler-collect-callstack --pytorch-profiler-collect-chakra"},
    {"snapshots of the allocator are not built; --log-memory-interval reports memory",
     "--record-memory-history --memory-snapshot-path=snapshot.pickle --record-shapes"},
    {"the rerun engine (re-execution of suspect steps) is not built yet",
     "--result-rejected-tracker-filename= --error-injection-rate=0 "
     "--error-injection-type=transient_error --rerun-mode=disabled --check-for-spiky-loss"},
    {kRl,
     "--perform-rl-step --rl-prompts-per-eval=32 --grpo-prompts-per-step=32 --grpo-group-size=2 "
     "--rl-generation-lag= --rl-max-inflight-requests= --rl-submission-granularity=B "
     "--rl-consumption-granularity=B --rl-durable-rollout-bank --rl-rollout-bank-dir= "
     "--rl-rollout-bank-max-bytes=0 --grpo-iterations=2 --grpo-clamp-eps-lower=0.01 "
     "--grpo-clamp-eps-upper=0.01 --grpo-kl-beta=0.001 --grpo-entropy-term-weight=0.0 "
     "--grpo-filter-groups-with-same-reward --langrl-env-config= --rl-default-temperature=1.0 "
     "--rl-default-top-p=0 --rl-default-top-k=-1 --rl-offload-optimizer-during-inference "
     "--rl-kv-cache-management-mode=persist --rl-persist-cuda-graphs --rl-partial-rollouts "
     "--rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef= "
     "--rl-use-sequence-packing --rl-sequence-packing-max-sequences-per-bin=50 "
     "--rl-sequence-packing-algo=fifo --rl-training-cuda-graphs "
     "--rl-inference-tensor-model-parallel-size= --rl-inference-pipeline-model-parallel-size= "
     "--rl-inference-expert-model-parallel-size= --rl-inference-expert-tensor-model-parallel-size= "
     "--rl-inference-model-unified-memory-level=0 --rl-offload-inference-model-weights-when-idle "
     "--refit-method=gloo --rl-verify-model-weights-swap --rl-skip-bos-token --rl-profile "
     "--rl-profile-dir="},
    {"writing out tensors of the training step is not built yet",
     "--save-params-interval= --save-activations-interval= "
     "--save-wgrads-interval= --save-dgrads-interval="},
    {"local, in-memory and replicated checkpoints are not built yet",
     "--non-persistent-save-interval= --non-persistent-ckpt-type= "
     "--non-persistent-global-ckpt-dir= --non-persistent-local-ckpt-dir= "
     "--non-persistent-local-ckpt-algo=fully_parallel --replication --replication-jump= "
     "--replication-factor=2"},
    {"checkpoints have one format, safetensors with a manifest (docs/formats/checkpoint.md)",
     "--ckpt-format= --auto-detect-ckpt-format --dist-ckpt-save-pre-mcore-014 --dist-ckpt-format="},
    {"a run does not convert checkpoints; megatron convert-checkpoint does",
     "--ckpt-convert-format= --ckpt-convert-save= --ckpt-convert-update-legacy-dist-opt-format"},
    {"the background writer is a thread of this process",
     "--async-ckpt-cpu-priority= --async-ckpt-io-priority= --async-ckpt-use-cpu-shm"},
    {"checkpoints are divided over the ranks of data parallelism",
     "--ckpt-fully-parallel-save-process-group=dp --ckpt-fully-parallel-load-process-group=dp"},
    {"plans of checkpoints are not cached",
     "--ckpt-pg-tensors-cache-path= --ckpt-pg-tensors-cache-create"},
    {"sums inside of network switches (SHARP) are not built", "--use-sharp --sharp-enabled-group="},
    {"gathered layers come from the allocator; fixed or registered buffers are not built yet",
     "--fsdp-manual-registration --fsdp-double-buffer --megatron-fsdp-max-pool-double-buffer "
     "--fsdp-db-use-persist-buf-on-alloc-fail"},
    {"instances hold copies (--num-distributed-optimizer-instances); sharding between them is not "
     "built yet",
     "--outer-dp-sharding-strategy=no_shard --enable-full-sharding-in-hsdp"},
    {"cached sample orders are mapped at once, after one process of a node compared their hashes",
     "--dataloader-fast-cache-load --dataloader-defer-npy-index-mmap"},
    {"biencoders and retrieval (ICT, REALM) are not built yet",
     "--sample-rate=1.0 --ict-head-size= --biencoder-projection-dim=0 "
     "--biencoder-shared-query-context-model --ict-load= --bert-load= --titles-data-path= "
     "--query-in-block-prob=0.1 --use-one-sent-docs --evidence-data-path= "
     "--retriever-report-topk-accuracies=... --retriever-score-scaling --block-data-path= "
     "--embedding-path= --indexer-batch-size=128 --indexer-log-interval=1000"},
    {"object stores are not read; give files", "--object-storage-cache-path= --enable-msc"},
    {"fill-in-the-middle is not built yet",
     "--fim-data --fim-rate=0.5 --fim-spm-rate=0.5 --fim-split-sample= --fim-fragment-rate= "
     "--fim-no-prefix= --fim-prefix-token=<fim_prefix> --fim-middle-token=<fim_middle> "
     "--fim-suffix-token=<fim_suffix> --fim-pad-token=<fim_pad> --fim-eod-token=<|endoftext|>"},
    {"tokenizers describe themselves in tokenizer.json",
     "--tokenizer-metadata= --tokenizer-hf-no-include-special-tokens"},
    {"it belongs to one cluster of NVIDIA; --exit-signal-handler saves on a signal",
     "--adlr-autoresume --adlr-autoresume-interval=1000"},
    {"classifiers of images and DINO are not built",
     "--num-classes=1000 --num-channels=3 "
     "--classes-fraction=1.0 --data-per-class-fraction=1.0 --head-lr-mult=1.0 --vision-pretraining "
     "--vision-pretraining-type=classify --vision-backbone-type=vit --swin-backbone-type=tiny "
     "--mask-type=random --mask-factor=1.0 --iter-per-epoch=1250 --dino-local-img-size=96 "
     "--dino-local-crops-number=10 --dino-head-hidden-size=2048 --dino-bottleneck-size=256 "
     "--dino-freeze-last-layer=1 --dino-norm-last-layer --dino-warmup-teacher-temp=0.04 "
     "--dino-teacher-temp=0.07 --dino-warmup-teacher-temp-epochs=30"},
    {"RADIO is not built",
     "--radio-force-eval-mode --radio-force-cpe-eval-mode --radio-interpolate-only-cpe "
     "--radio-cpe-aspect-ratio-select --radio-disable-cpe"},
    {"the processor of --media-model says how images are cut into tiles",
     "--use-tiling --max-num-tiles=1 --use-thumbnail --use-area-weighted-aspect-ratio"},
    {"the processor of --media-model says what stands around the tokens of an image",
     "--use-tile-tags --image-tag-type="},
    {"give --vision-model-type qwen2 or qwen2_5; their processor bounds the sizes of images",
     "--dynamic-resolution --dynamic-resolution-min-patches=0 --dynamic-resolution-max-patches=0 "
     "--dynamic-resolution-min-side= --match-tiling-dynamic-resolution "
     "--masked-tiling-dynamic-resolution"},
    {"merging by convolution is not built; --pixel-shuffle is",
     "--conv-merging --allow-missing-conv-merge-checkpoint"},
    {"videos are not read; give frames as images",
     "--num-frames=1 --video-min-num-frames=8 --video-max-num-frames=32 --video-default-fps=2 "
     "--video-frame-temporal-jitter --video-target-img-size= --video-target-num-patches= "
     "--video-maintain-aspect-ratio --video-temporal-patch-size=1 --video-prompt-version=2 "
     "--allow-checkpoint-without-temporal-compression --separate-video-embedder "
     "--allow-large-videos --efficient-video-sampling-variant="},
    {"the encoder of sounds is that of --audio-model-type, in clips of 30 s at 16 kHz",
     "--sound-model-type= --sound-target-rate=16000 --sound-embedding-size=750 "
     "--sound-clip-duration=30 --sound-min-duration=0.1 --sound-pad-to-clip-duration "
     "--sound-batch-split=1"},
    {"give --freeze audio_model or audio_projection",
     "--freeze-sound-model --freeze-sound-projection"},
    {"a checkpoint that lacks tensors of the model is refused",
     "--allow-missing-vision-projection-checkpoint --allow-missing-sound-projection-checkpoint "
     "--allow-missing-sound-model-checkpoint"},
    {"sequences are packed to --seq-length", "--packing-seq-length=0"},
    {"samples of a sequence never attend to each other", "--allow-cross-sample-attention"},
    {"prompts are part of the rows of --data-path", "--prompt-path="},
    {"weights of turns by their lengths are not built", "--use-loss-scaling"},
    {"rows are not chosen by their media; leave those without images out of the data",
     "--only-keep-samples-with-img"},
    {"heterogeneous layers are not built yet",
     "--heterogeneous-layers-config-path= --heterogeneous-layers-config-encoded-json="},
    {"recording of router decisions is not built yet",
     "--moe-routing-trace-path= --moe-routing-trace-max-training-iters= "
     "--moe-routing-trace-capture-logits --moe-routing-trace-capture-hidden-states "
     "--moe-routing-trace-dump-weights"},
    {"OpenTelemetry export is not built yet",
     "--otel-enabled --otel-service-name= --otel-span-groups="},
    {"distillation from stored logits is not built yet",
     "--logits-save-top-k= --logits-save-top-p= --logits-save-top-p-min-k=1 --logits-save-dir= "
     "--logits-save-dtype=fp16 --logits-load-dir= --logits-load-decode-threads=4 "
     "--logits-load-prefetch-factor=3 --logits-load-msc-prefetch-depth=2 "
     "--logits-load-kd-loss-alpha=1.0 --logits-load-ignore-errors"},
    {"the straggler detector with a control port is not built",
     "--log-straggler --straggler-ctrlr-port=65535 --straggler-minmax-count=1"},
    {"gathering weights in FP8 or FP4 is not built yet; they are gathered in bf16 and quantised "
     "then",
     "--fp4-param-gather --fp8-param-gather"},
    {"one-logger is a service inside NVIDIA",
     "--one-logger-project=megatron-lm --one-logger-run-name= --one-logger-async "
     "--app-tag-run-name= --app-tag-run-version=0.0.0"},
    {"restart within the process is not built yet; torchrun restarts with --start-mode "
     "resume-or-fresh",
     "--inprocess-restart --inprocess-max-iterations= --inprocess-monitor-thread-interval=1.0 "
     "--inprocess-monitor-process-interval=1.0 --inprocess-progress-watchdog-interval=1.0 "
     "--inprocess-heartbeat-interval=30 --inprocess-soft-timeout=60 --inprocess-hard-timeout=90 "
     "--inprocess-heartbeat-timeout=60 --inprocess-barrier-timeout=120 "
     "--inprocess-completion-timeout=120 --inprocess-last-call-wait=1 "
     "--inprocess-termination-grace-time=1 --inprocess-granularity=node "
     "--inprocess-active-world-size=1 --inprocess-empty-cuda-cache"},
    {"the fault-tolerance package is Python",
     "--enable-ft-package --calc-ft-timeouts --ft-num-warmup-iters=5"},
    {"fault injection is not built yet",
     "--fault-injector-ranks= --fault-injector-num-ranks= --fault-injector-fault-types= "
     "--fault-injector-fault-probabilities= --fault-injector-fault-delay= "
     "--fault-injector-delay-start-iteration= --fault-injector-mtti-seconds= "
     "--fault-injector-offset-seconds= --fault-injector-seed="},
};

std::vector<KnownFlag> all_rows() {
  std::vector<KnownFlag> rows(std::begin(kRows), std::end(kRows));
  for (const auto& [reason, flags] : kRefusals)
    for (size_t begin = 0, end = 0; begin < flags.size(); begin = end + 1) {
      end = std::min(flags.find(' ', begin), flags.size());
      const std::string_view text = flags.substr(begin, end - begin);
      const size_t equals = text.find('=');
      KnownFlag& row = rows.emplace_back(KnownFlag{text.substr(0, equals), kNo, reason});
      if (equals == text.npos) continue;
      const bool list = text.ends_with("=...");
      row.min_values = 1;
      row.max_values = list ? -1 : 1;
      if (!list) row.neutral = text.substr(equals + 1);
    }
  return rows;
}

constexpr std::string_view kStateRange =
    "fp16 and fp8 do not span the magnitudes of optimizer states without scales";

// Values of Megatron's flags that our fields do not have.
constexpr RefusedValue kRefusedValues[] = {
    {"--optimizer", "muon dist_muon lion soap adaptive_muon", kMuon},
    {"--dataloader-type", "external", "loaders in Python do not run here"},
    {"--main-grads-dtype", "bf16 fp16 fp8", "gradients are accumulated in fp32"},
    {"--main-params-dtype", "fp16 fp8", kStateRange},
    {"--exp-avg-dtype", "fp16 fp8", kStateRange},
    {"--exp-avg-sq-dtype", "fp16 fp8", kStateRange},
    {"--experimental-attention-variant", "gdn2",
     "gated delta nets of the second kind are not built"},
    {"--experimental-attention-variant", "dsa", "sparse attention is not built"},
    {"--vision-model-type", "radio radio-g cradio-g", "RADIO is not built"},
    {"--vision-model-type", "internvit300M", "give internvit and the flags of its shape"},
    {"--spec", "gdp_stack_spec gated_delta_product_stack_spec",
     "gated delta products are not built"},
    {"--cuda-graph-impl", "transformer_engine full_iteration",
     "a CUDA graph holds forward and backward of one micro-batch: local"},
};

}  // namespace

std::span<const KnownFlag> flag_table() {
  static const std::vector<KnownFlag> rows = all_rows();
  return rows;
}

FlagVerdict judge_flag(const KnownFlag& flag, const Arguments& arguments) {
  if (flag.kind == KnownFlag::Kind::kRefused) return {false, std::string(flag.reason)};
  const FlagClaim* claim = flag.claim;
  if (claim == nullptr || claim->holds == nullptr || claim->holds(arguments))
    return {true, std::string(flag.reason)};
  return {false, std::string(claim->otherwise)};
}

void use_flag_table(ParseOptions& options, const Arguments& arguments) {
  options.known = flag_table();
  options.refused_values = kRefusedValues;
  options.judge = [&arguments](const KnownFlag& flag) { return judge_flag(flag, arguments); };
}

}  // namespace megatron
