// The rows of the table. A row of a flag that a field has since come to own is dead, and may go.
#include "megatron/training/arguments/flag_table.h"

#include <array>

#include "megatron/base/check.h"
#include "megatron/training/arguments/detail/flag_claims.h"

namespace megatron {
namespace {

using namespace flag_claims;  // NOLINT: the claims are used by this table only

constexpr KnownFlag::Kind kNo = KnownFlag::Kind::kRefused;

// Reasons shared by several flags.
constexpr std::string_view kZeroBubble =
    "weight gradients of every layer are deferred by --pipeline-schedule zb-h1, zb-auto or zb-v";
constexpr std::string_view kGtp = "generalised tensor parallelism (weight shards) is not built yet";
constexpr std::string_view kOneFsdp =
    "there is one implementation of fully sharded data parallelism";
constexpr std::string_view kFsdpBuffers =
    "gathered layers come from the allocator; fixed or registered buffers are not built yet";
constexpr std::string_view kHybridFsdp =
    "instances hold copies (--num-distributed-optimizer-instances); sharding between them is not "
    "built yet";
constexpr std::string_view kMoe = "mixture of experts is not built yet";
constexpr std::string_view kMla = "multi-latent attention is not built yet";
constexpr std::string_view kMtp = "multi-token prediction is not built yet";
constexpr std::string_view kVariant = "sparse, gated-delta and linear attention are not built yet";
constexpr std::string_view kMhc = "multi-stream residual connections (mHC) are not built yet";
constexpr std::string_view kMup = "the maximal update parametrisation (muP) is not built yet";
constexpr std::string_view kSsm = "Mamba and hybrid models are not built yet";
constexpr std::string_view kQuantizer =
    "quantisers in Python do not run here; the recipes are built in";
constexpr std::string_view kMxfp8 =
    "MXFP8 needs the scaled products of Blackwell GPUs and is not built";
constexpr std::string_view kParamGather =
    "gathering weights in FP8 or FP4 is not built yet; they are gathered in bf16 and quantised "
    "then";
constexpr std::string_view kKitchen = "Kitchen is a closed library of NVIDIA";
constexpr std::string_view kOffloadBalance =
    "every stage offloads alike; --activation-offload-fraction says how much";
constexpr std::string_view kGraph = "CUDA graphs hold a whole micro-batch: --cuda-graph-impl local";
constexpr std::string_view kServe =
    "the batching inference engine and its server are not built yet";
constexpr std::string_view kInvariant = "batch-invariant kernels are not built yet";
constexpr std::string_view kRl = "reinforcement learning is not built yet";
constexpr std::string_view kVision = "vision models are not built yet";
constexpr std::string_view kRetriever = "biencoders and retrieval (ICT, REALM) are not built yet";
constexpr std::string_view kBert = "BERT is not built yet";
constexpr std::string_view kT5 = "T5 is not built yet";
constexpr std::string_view kMrope = "multimodal rotary positions are not built yet";
constexpr std::string_view kMuon = "of the optimizers, only adam and sgd are built";
constexpr std::string_view kFim = "fill-in-the-middle is not built yet";
constexpr std::string_view kDistill = "distillation from stored logits is not built yet";
constexpr std::string_view kTrace = "recording of router decisions is not built yet";
constexpr std::string_view kOneLogger = "one-logger is a service inside NVIDIA";
constexpr std::string_view kOtel = "OpenTelemetry export is not built yet";
constexpr std::string_view kStraggler = "the straggler detector with a control port is not built";
constexpr std::string_view kInspector = "the workload inspector is a Python service";
constexpr std::string_view kInProcess =
    "restart within the process is not built yet; torchrun restarts with --start-mode "
    "resume-or-fresh";
constexpr std::string_view kFt = "the fault-tolerance package is Python";
constexpr std::string_view kRerun =
    "the rerun engine (re-execution of suspect steps) is not built yet";
constexpr std::string_view kFault = "fault injection is not built yet";
constexpr std::string_view kMsc = "object stores are not read; give files";
constexpr std::string_view kAutoresume =
    "it belongs to one cluster of NVIDIA; --exit-signal-handler saves on a signal";
constexpr std::string_view kFormat =
    "checkpoints have one format, safetensors with a manifest (docs/formats/checkpoint.md)";
constexpr std::string_view kConvert =
    "a run does not convert checkpoints; megatron convert-checkpoint does";
constexpr std::string_view kTpParts =
    "which exchanges of sequence parallelism overlap is not a choice here; --no-peer-copies "
    "switches all off";
constexpr std::string_view kLocal = "local, in-memory and replicated checkpoints are not built yet";
constexpr std::string_view kDump = "writing out tensors of the training step is not built yet";
constexpr std::string_view kPyProfiler =
    "there is no Python profiler here; --profile is for Nsight Systems or writes trace.json";
constexpr std::string_view kMemory =
    "snapshots of the allocator are not built; --log-memory-interval reports memory";
constexpr std::string_view kSpm =
    "special tokens of a SentencePiece model are those that it was trained with";
constexpr std::string_view kQkClip = "clipping of queries and keys is not built yet";

// A flag that is accepted if the claim holds; `values`: accepted values, empty: any.
constexpr KnownFlag so(std::string_view flag, const FlagClaim& claim, int min_values = 0,
                       int max_values = 0, std::string_view values = {}) {
  return {flag, KnownFlag::Kind::kAlreadySo, claim.says, min_values, max_values, values, &claim};
}

constexpr std::array<KnownFlag, 610> kTable = {{
    // -- transformer configuration
    {"--tensor-parallel-num-weight-shards", kNo, kGtp, 1, 1},
    {"--pipeline-model-parallel-comm-backend", kNo,
     "transfers between pipeline stages use --distributed-backend", 1, 1},
    {"--expert-model-parallel-size", kNo, kMoe, 1, 1, "1"},
    {"--expert-tensor-parallel-size", kNo, kMoe, 1, 1, "1"},
    {"--expert-tensor-parallel-num-weight-shards", kNo, kGtp, 1, 1},
    {"--no-initialization", kNo,
     "weights are always drawn or loaded, never left as the memory was"},
    so("--use-cpu-initialization", kSameInit),
    so("--deterministic-mode", kDeterministic),
    so("--tp-comm-overlap", kExchangesOverlap),
    so("--no-tp-comm-bulk-wgrad --disable-tp-comm-bulk-wgrad", kNoExchangeOverlaps),
    so("--no-tp-comm-bulk-dgrad --disable-tp-comm-bulk-dgrad", kNoExchangeOverlaps),
    so("--no-tp-comm-overlap-ag --disable-tp-comm-overlap-ag", kNoExchangeOverlaps),
    so("--no-tp-comm-overlap-rs --disable-tp-comm-overlap-rs", kNoExchangeOverlaps),
    {"--tp-comm-overlap-rs-dgrad", kNo, kTpParts},
    so("--no-tp-comm-split-ag --disable-tp-comm-split-ag", kNoExchangeOverlaps),
    so("--no-tp-comm-split-rs --disable-tp-comm-split-rs", kNoExchangeOverlaps),
    so("--cross-entropy-loss-fusion", kFusedLoss),
    {"--tp-comm-bootstrap-backend", kNo,
     "buffers of Transformer Engine are not used; GPUs of one host copy to each "
     "other",
     1, 1, "nccl"},
    {"--overlap-moe-expert-parallel-comm", kNo, kMoe},
    {"--delay-wgrad-compute", kNo, kZeroBubble},
    {"--overlap-dispatch-backward-with-experts-wgrad", kNo, kMoe},
    {"--ep-overlap-early-attn-memory-release", kNo, kMoe},
    {"--use-ring-exchange-p2p", kNo,
     "transfers between pipeline stages have one communicator per direction"},
    {"--defer-embedding-wgrad-compute", kNo, kZeroBubble},
    {"--wgrad-deferral-limit", kNo, kZeroBubble, 1, 1, "0"},
    so("--overlap-p2p-communication-warmup-flush", kTransfersOverlap),
    {"--mtp-standalone", kNo, kMtp},
    so("--cpu-offloading-retain-pinned-cpu-buffers", kPinnedCache),
    {"--mtp-num-layers", kNo, kMtp, 1, 1},
    {"--mtp-loss-scaling-factor", kNo, kMtp, 1, 1, "0.1"},
    {"--mtp-use-repeated-layer", kNo, kMtp},
    {"--mtp-detach-heads", kNo, kMtp},
    {"--mtp-hsm", kNo, kMtp},
    {"--mtp-hybrid-override-pattern", kNo, kMtp, 1, 1},
    {"--flash-attention-version", kNo, "kernels are chosen by --attention-backend", 1, 1},
    {"--softmax-type", kNo, "softmax with an off-by-one or a learnable sink is not built yet", 1, 1,
     "vanilla"},
    {"--apply-residual-connection-post-layernorm", kNo,
     "a residual taken after the norm is not built yet"},
    {"--activation-func-clamp-value", kNo, "clamping of the activation is not built yet", 1, 1},
    {"--qk-l2-norm", kNo, "L2 norms of queries and keys are not built; --qk-layernorm is"},
    {"--qk-clip", kNo, kQkClip},
    {"--qk-clip-alpha", kNo, kQkClip, 1, 1, "0.5"},
    {"--qk-clip-threshold", kNo, kQkClip, 1, 1, "100"},
    {"--attention-output-gate", kNo, "gated attention outputs are not built yet"},
    {"--multi-latent-attention", kNo, kMla},
    {"--experimental-attention-variant", kNo, kVariant, 1, 1},
    {"--dsa-indexer-n-heads", kNo, kVariant, 1, 1},
    {"--dsa-indexer-head-dim", kNo, kVariant, 1, 1},
    {"--dsa-indexer-topk", kNo, kVariant, 1, 1},
    {"--dsa-indexer-topk-freq", kNo, kVariant, 1, 1, "1"},
    {"--dsa-indexer-skip-topk-offset", kNo, kVariant, 1, 1, "0"},
    {"--dsa-indexer-loss-coeff", kNo, kVariant, 1, 1},
    {"--dsa-indexer-use-sparse-loss", kNo, kVariant},
    {"--dsa-kernel-backend", kNo, kVariant, 1, 1, "none"},
    {"--dsa-indexer-rope-interleaved", kNo, kVariant},
    so("--no-dsa-indexer-rotate-activation --disable-dsa-indexer-rotate-activation", kDsaOff),
    so("--no-dsa-indexer-scoring-relu --disable-dsa-indexer-scoring-relu", kDsaOff),
    {"--dsa-indexer-k-norm-epsilon", kNo, kVariant, 1, 1},
    {"--dsa-indexer-k-norm-fp32", kNo, kVariant},
    {"--linear-conv-kernel-dim", kNo, kVariant, 1, 1, "4"},
    {"--linear-key-head-dim", kNo, kVariant, 1, 1, "128"},
    {"--linear-value-head-dim", kNo, kVariant, 1, 1, "128"},
    {"--linear-num-key-heads", kNo, kVariant, 1, 1, "16"},
    {"--linear-num-value-heads", kNo, kVariant, 1, 1, "32"},
    so("--init-model-with-meta-device", kAllocatedOnce),
    {"--use-mup", kNo, kMup},
    {"--mup-width-mult", kNo, kMup, 1, 1, "1.0"},
    {"--mup-base-hidden-size", kNo, kMup, 1, 1},
    {"--mup-embedding-mult", kNo, kMup, 1, 1, "1.0"},
    {"--mup-output-mult", kNo, kMup, 1, 1, "1.0"},
    {"--mup-base-head-dim", kNo, kMup, 1, 1},
    {"--mup-attn-scale-power", kNo, kMup, 1, 1, "1.0"},
    {"--apply-query-key-layer-scaling", kNo,
     "scaling by layer number is not built; softmax runs in fp32, which makes it needless"},
    {"--disable-bf16-reduced-precision-matmul", kNo,
     "this switch of the GEMM library is not offered"},
    {"--use-fused-weighted-squared-relu", kNo, kMoe},
    so("--fused-residual-rmsnorm", kFusedNorm),
    so("--use-transformer-engine-op-fuser", kFusedLayer),
    {"--fp8-quantizer-factory", kNo, kQuantizer, 1, 1},
    {"--fp8-interval", kNo, "delayed scales are updated every step", 1, 1, "1"},
    {"--fp8-output-proj", kNo,
     "the output layer multiplies in the model's type; in FP8 it is not built yet"},
    {"--use-kitchen-attention", kNo, kKitchen},
    {"--kitchen-attention-backend", kNo, kKitchen, 1, 1, "sdpa"},
    {"--fp4-quantizer-factory", kNo, kQuantizer, 1, 1},
    {"--high-priority-a2a-comm-stream", kNo, kMoe},
    {"--moe-shared-expert-intermediate-size", kNo, kMoe, 1, 1},
    {"--moe-shared-expert-gate", kNo, kMoe},
    {"--moe-shared-expert-overlap", kNo, kMoe},
    {"--use-grouped-gemm-for-shared-expert", kNo, kMoe},
    {"--moe-shared-expert-glu-interleave-size", kNo, kMoe, 1, 1},
    {"--moe-ffn-hidden-size", kNo, kMoe, 1, 1},
    {"--moe-router-topk", kNo, kMoe, 1, 1, "2"},
    {"--moe-enable-routing-replay", kNo, kMoe},
    {"--moe-router-padding-for-quantization", kNo, kMoe},
    {"--moe-router-padding-for-fp8", kNo, kMoe},
    {"--moe-router-num-groups", kNo, kMoe, 1, 1},
    {"--moe-router-group-topk", kNo, kMoe, 1, 1},
    {"--moe-router-pre-softmax", kNo, kMoe},
    {"--moe-router-topk-scaling-factor", kNo, kMoe, 1, 1},
    {"--moe-router-score-function", kNo, kMoe, 1, 1, "softmax"},
    {"--moe-router-dtype", kNo, kMoe, 1, 1},
    {"--moe-router-enable-expert-bias", kNo, kMoe},
    {"--moe-router-bias-update-rate", kNo, kMoe, 1, 1, "0.001"},
    {"--moe-router-quantile-balancing-ema", kNo, kMoe, 1, 1, "0.0"},
    {"--moe-router-force-load-balancing", kNo, kMoe},
    {"--moe-router-force-biased", kNo, kMoe, 1, 1},
    {"--use-grouped-gemm-for-dense-mlp", kNo, kMoe},
    {"--moe-grouped-gemm", kNo, kMoe},
    {"--moe-use-grouped-tensor", kNo, kMoe},
    {"--moe-single-grouped-weight", kNo, kMoe},
    {"--moe-single-grouped-bias", kNo, kMoe},
    {"--moe-z-loss-coeff", kNo, kMoe, 1, 1},
    {"--moe-input-jitter-eps", kNo, kMoe, 1, 1},
    {"--moe-token-dispatcher-type", kNo, kMoe, 1, 1, "allgather"},
    {"--moe-enable-deepep", kNo, kMoe},
    {"--moe-flex-dispatcher-backend", kNo, kMoe, 1, 1, "deepep"},
    {"--moe-permute-fusion-into-hybridep", kNo, kMoe},
    {"--moe-hybridep-pad-uneven-dispatch-inputs", kNo, kMoe},
    {"--moe-per-layer-logging", kNo, kMoe},
    {"--moe-expert-capacity-factor", kNo, kMoe, 1, 1},
    {"--moe-pad-expert-input-to-capacity", kNo, kMoe},
    {"--moe-pad-experts-for-cuda-graph-inference", kNo, kMoe},
    {"--moe-token-drop-policy", kNo, kMoe, 1, 1, "probs"},
    {"--moe-layer-recompute", kNo, kMoe},
    {"--moe-permute-fusion", kNo, kMoe},
    {"--moe-router-fusion", kNo, kMoe},
    {"--moe-apply-probs-on-input", kNo, kMoe},
    {"--moe-latent-size", kNo, kMoe, 1, 1},
    {"--gtp-remat-opt-in-modules", kNo, kGtp, 1, -1},
    {"--moe-flex-dispatcher-num-sms", kNo, kMoe, 1, 1},
    {"--moe-deepep-num-sms", kNo, kMoe, 1, 1},
    {"--moe-hybridep-num-sms", kNo, kMoe, 1, 1},
    {"--moe-hybridep-num-blocks-permute", kNo, kMoe, 1, 1},
    {"--moe-hybridep-num-blocks-unpermute", kNo, kMoe, 1, 1},
    {"--moe-hybridep-num-sms-preprocessing", kNo, kMoe, 1, 1, "108"},
    {"--moe-ncclep-zero-copy", kNo, kMoe},
    {"--moe-dispatch-fwd-dtype", kNo, kMoe, 1, 1, "bf16"},
    {"--moe-combine-bwd-dtype", kNo, kMoe, 1, 1, "bf16"},
    {"--moe-mlp-glu-interleave-size", kNo, kMoe, 1, 1},
    {"--moe-expert-rank-capacity-factor", kNo, kMoe, 1, 1},
    {"--external-cuda-graph", kNo, kGraph},
    {"--inference-cuda-graph-scope", kNo, kGraph, 1, 1},
    {"--enable-mhc-connections", kNo, kMhc},
    {"--mhc-num-residual-streams", kNo, kMhc, 1, 1, "4"},
    {"--mhc-sinkhorn-iterations", kNo, kMhc, 1, 1, "20"},
    {"--mhc-init-gating-factor", kNo, kMhc, 1, 1, "0.01"},
    {"--mhc-recompute-layer-num", kNo, kMhc, 1, 1},
    so("--no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding",
       kOwnRows),
    {"--config-logger-dir", kNo, "the resolved configuration is written beside the checkpoints", 1,
     1},
    {"--flash-decode", kNo, kServe},
    {"--batch-invariant-mode", kNo, kInvariant},
    {"--batch-invariant-backend", kNo, kInvariant, 1, 1, "te_native"},
    so("--use-te-activation-func", kFusedActivation),
    {"--symmetric-ar-type", kNo, "sums over symmetric memory are not built yet", 1, 1},
    {"--nccl-all-reduce-for-prefill", kNo, kServe},
    {"--inference-fuse-tp-communication", kNo, kServe},
    {"--inference-disable-triton-nvls-kernels", kNo, kServe},
    {"--inference-grouped-gemm-backend", kNo, kServe, 1, 1, "vllm"},
    {"--inference-moe-disable-fused-quant-kernels", kNo, kServe},
    {"--inference-moe-token-dispatcher-type", kNo, kServe, 1, 1, "nvls"},
    {"--mrope-section", kNo, kMrope, 1, -1},
    {"--is-hybrid-model", kNo, kSsm},
    {"--mamba-state-dim", kNo, kSsm, 1, 1, "128"},
    {"--mamba-head-dim", kNo, kSsm, 1, 1, "64"},
    {"--mamba-num-groups", kNo, kSsm, 1, 1, "8"},
    {"--mamba-num-heads", kNo, kSsm, 1, 1},
    {"--gdp-num-householder", kNo, kVariant, 1, 1, "3"},
    {"--disable-mamba-mem-eff-path", kNo, kSsm},
    {"--gdp-cutedsl-kernel", kNo, kVariant},
    {"--gdp-num-chunk-states-to-recompute", kNo, kVariant, 1, 1, "2"},
    {"--mlp-chunks-for-prefill", kNo,
     "computing the MLP in chunks of the sequence is not built yet", 1, 1, "1"},
    {"--mlp-chunks-for-training", kNo,
     "computing the MLP in chunks of the sequence is not built yet", 1, 1, "1"},
    so("--transformer-impl", kOneImplementation, 1, 1,
       "local transformer_engine inference_optimized"),
    {"--delay-offload-until-cuda-graph", kNo, kGraph},
    {"--delta-offload-bytes-across-pp-ranks", kNo, kOffloadBalance, 1, 1, "0"},
    {"--moe-paged-stash", kNo, kMoe},
    {"--moe-paged-stash-page-size", kNo, kMoe, 1, 1, "64"},
    {"--moe-paged-stash-buffer-size-factor-cuda", kNo, kMoe, 1, 1, "1.1"},
    {"--moe-paged-stash-buffer-size-factor-cpu", kNo, kMoe, 1, 1, "0.0"},
    // -- network size
    {"--encoder-num-layers", kNo, "give --num-layers; a GPT has one stack of layers", 1, 1},
    {"--decoder-num-layers", kNo, kT5, 1, 1},
    {"--relative-attention-num-buckets", kNo, kT5, 1, 1, "32"},
    {"--relative-attention-max-distance", kNo, kT5, 1, 1, "128"},
    {"--no-rope-freq", kNo, "layers without rotary positions are not built yet", 1, 1, "0"},
    {"--onnx-safe", kNo, "removed option: ONNX export is not offered", 1, 1},
    {"--bert-no-binary-head", kNo, kBert},
    // -- regularization
    {"--muon-momentum", kNo, kMuon, 1, 1, "0.9"},
    so("--muon-no-split-qkv", kMuonOff),
    {"--muon-nesterov", kNo, kMuon},
    {"--muon-scale-mode", kNo, kMuon, 1, 1, "spectral"},
    {"--muon-fp32-matmul-prec", kNo, kMuon, 1, 1, "medium"},
    {"--muon-coefficient-type", kNo, kMuon, 1, 1, "quintic"},
    {"--muon-num-ns-steps", kNo, kMuon, 1, 1, "5"},
    {"--muon-tp-mode", kNo, kMuon, 1, 1, "duplicated"},
    {"--muon-use-syrk", kNo, kMuon},
    {"--muon-extra-scale-factor", kNo, kMuon, 1, 1, "1.0"},
    {"--muon-scalar-optimizer", kNo, kMuon, 1, 1, "adam"},
    {"--lion-beta1", kNo, kMuon, 1, 1, "0.95"},
    {"--lion-beta2", kNo, kMuon, 1, 1, "0.98"},
    {"--no-weight-decay-cond-type", kNo, "give --apply-wd-to-qk-layernorm", 1, 1},
    // -- profiling
    {"--use-pytorch-profiler", kNo, kPyProfiler},
    {"--pytorch-profiler-collect-shapes", kNo, kPyProfiler},
    {"--pytorch-profiler-collect-callstack", kNo, kPyProfiler},
    {"--pytorch-profiler-collect-chakra", kNo, kPyProfiler},
    {"--record-memory-history", kNo, kMemory},
    {"--memory-snapshot-path", kNo, kMemory, 1, 1, "snapshot.pickle"},
    {"--record-shapes", kNo, kMemory},
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
    {"--result-rejected-tracker-filename", kNo, kRerun, 1, 1},
    {"--tp-comm-overlap-cfg", kNo, kTpParts, 1, 1},
    {"--checkpoint-activations", kNo,
     "removed option: give --recompute-granularity full --recompute-method uniform"},
    so("--no-masked-softmax-fusion", kFusedSoftmax),
    so("--no-bias-swiglu-fusion", kFusedActivation),
    so("--no-bias-dropout-fusion", kFusedDropout),
    so("--no-rope-fusion", kFusedRotary),
    {"--rope-type", kNo, "give --rope-scaling-type for scaled rotary positions", 1, 1},
    so("--use-flash-attn", kFlashAttention),
    {"--optimizer-cuda-graph", kNo, kGraph},
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
    {"--perform-rl-step", kNo, kRl},
    {"--rl-prompts-per-eval", kNo, kRl, 1, 1, "32"},
    {"--grpo-prompts-per-step", kNo, kRl, 1, 1, "32"},
    {"--grpo-group-size", kNo, kRl, 1, 1, "2"},
    {"--rl-generation-lag", kNo, kRl, 1, 1},
    {"--rl-max-inflight-requests", kNo, kRl, 1, 1},
    {"--rl-submission-granularity", kNo, kRl, 1, 1, "B"},
    {"--rl-consumption-granularity", kNo, kRl, 1, 1, "B"},
    {"--rl-durable-rollout-bank", kNo, kRl},
    {"--rl-rollout-bank-dir", kNo, kRl, 1, 1},
    {"--rl-rollout-bank-max-bytes", kNo, kRl, 1, 1, "0"},
    {"--grpo-iterations", kNo, kRl, 1, 1, "2"},
    {"--grpo-clamp-eps-lower", kNo, kRl, 1, 1, "0.01"},
    {"--grpo-clamp-eps-upper", kNo, kRl, 1, 1, "0.01"},
    {"--grpo-kl-beta", kNo, kRl, 1, 1, "0.001"},
    {"--grpo-entropy-term-weight", kNo, kRl, 1, 1, "0.0"},
    {"--grpo-filter-groups-with-same-reward", kNo, kRl},
    {"--langrl-env-config", kNo, kRl, 1, 1},
    {"--rl-default-temperature", kNo, kRl, 1, 1, "1.0"},
    {"--rl-default-top-p", kNo, kRl, 1, 1, "0"},
    {"--rl-default-top-k", kNo, kRl, 1, 1, "-1"},
    {"--rl-offload-optimizer-during-inference", kNo, kRl},
    {"--rl-kv-cache-management-mode", kNo, kRl, 1, 1, "persist"},
    {"--rl-persist-cuda-graphs", kNo, kRl},
    so("--no-rl-persist-cuda-graphs", kRlOff),
    {"--rl-partial-rollouts", kNo, kRl},
    so("--no-rl-partial-rollouts", kRlOff),
    {"--rl-inference-logprobs-is-correction", kNo, kRl},
    so("--no-rl-inference-logprobs-is-correction", kRlOff),
    {"--rl-importance-sampling-truncation-coef", kNo, kRl, 1, 1},
    {"--rl-use-sequence-packing", kNo, kRl},
    so("--no-rl-use-sequence-packing", kRlOff),
    {"--rl-sequence-packing-max-sequences-per-bin", kNo, kRl, 1, 1, "50"},
    {"--rl-sequence-packing-algo", kNo, kRl, 1, 1, "fifo"},
    {"--rl-training-cuda-graphs", kNo, kRl},
    so("--no-rl-training-cuda-graphs", kRlOff),
    {"--rl-inference-tensor-model-parallel-size", kNo, kRl, 1, 1},
    {"--rl-inference-pipeline-model-parallel-size", kNo, kRl, 1, 1},
    {"--rl-inference-expert-model-parallel-size", kNo, kRl, 1, 1},
    {"--rl-inference-expert-tensor-model-parallel-size", kNo, kRl, 1, 1},
    {"--rl-inference-model-unified-memory-level", kNo, kRl, 1, 1, "0"},
    {"--rl-offload-inference-model-weights-when-idle", kNo, kRl},
    so("--no-rl-offload-inference-model-weights-when-idle", kRlOff),
    {"--refit-method", kNo, kRl, 1, 1, "gloo"},
    {"--rl-verify-model-weights-swap", kNo, kRl},
    so("--no-rl-verify-model-weights-swap", kRlOff),
    {"--rl-skip-bos-token", kNo, kRl},
    so("--no-rl-skip-bos-token", kRlOff),
    {"--rl-profile", kNo, kRl},
    {"--rl-profile-dir", kNo, kRl, 1, 1},
    {"--rl-inference-parsers", kNo, kRl, 0, -1},
    // -- RNG and initialization
    so("--te-rng-tracker", kRng),
    so("--inference-rng-tracker", kRng),
    {"--data-parallel-random-init", kNo,
     "replicas that start from different weights are not built"},
    // -- learning rate and weight decay
    {"--warmup", kNo, "removed option: give --lr-warmup-fraction", 1, 1},
    // -- checkpointing
    {"--save-params-interval", kNo, kDump, 1, 1},
    {"--save-activations-interval", kNo, kDump, 1, 1},
    {"--save-tokens-per-expert-interval", kNo, kDump, 1, 1},
    {"--save-wgrads-interval", kNo, kDump, 1, 1},
    {"--save-dgrads-interval", kNo, kDump, 1, 1},
    {"--load-main-params-from-ckpt", kNo, "loading of main parameters alone is not built yet"},
    {"--non-persistent-save-interval", kNo, kLocal, 1, 1},
    {"--non-persistent-ckpt-type", kNo, kLocal, 1, 1},
    {"--non-persistent-global-ckpt-dir", kNo, kLocal, 1, 1},
    {"--non-persistent-local-ckpt-dir", kNo, kLocal, 1, 1},
    {"--non-persistent-local-ckpt-algo", kNo, kLocal, 1, 1, "fully_parallel"},
    {"--no-use-tokenizer-model-from-checkpoint-args "
     "--disable-use-tokenizer-model-from-checkpoint-args",
     kNo, "give the tokenizer flags: a flag wins over the checkpoint"},
    so("--exit-on-missing-checkpoint", kMissingIsAnError),
    {"--ckpt-format", kNo, kFormat, 1, 1},
    {"--auto-detect-ckpt-format", kNo, kFormat},
    {"--ckpt-convert-format", kNo, kConvert, 1, 1},
    {"--ckpt-convert-save", kNo, kConvert, 1, 1},
    {"--ckpt-convert-update-legacy-dist-opt-format", kNo, kConvert},
    so("--no-ckpt-fully-parallel-save", kWholeWriting),
    so("--async-strategy", kOneBackgroundWriter, 1, 1, "nvrx mcore"),
    so("--use-persistent-ckpt-worker", kPersistentWriter),
    {"--async-ckpt-cpu-priority", kNo, "the background writer is a thread of this process", 1, 1},
    {"--async-ckpt-io-priority", kNo, "the background writer is a thread of this process", 1, 1},
    {"--async-ckpt-use-cpu-shm", kNo, "the background writer is a thread of this process"},
    so("--ckpt-fully-parallel-load", kDividedReading),
    {"--ckpt-fully-parallel-load-exchange-algo", kNo,
     "each part is read by one rank and broadcast to those that hold the same", 1, 1},
    so("--ckpt-fully-parallel-load-per-rank-objects", kNoObjects),
    {"--ckpt-fully-parallel-save-process-group", kNo,
     "checkpoints are divided over the ranks of data parallelism", 1, 1, "dp"},
    {"--ckpt-fully-parallel-load-process-group", kNo,
     "checkpoints are divided over the ranks of data parallelism", 1, 1, "dp"},
    so("--ckpt-assume-constant-structure", kConstantStructure),
    {"--ckpt-pg-tensors-cache-path", kNo, "plans of checkpoints are not cached", 1, 1},
    {"--ckpt-pg-tensors-cache-create", kNo, "plans of checkpoints are not cached"},
    {"--no-ckpt-load-validate-sharding-integrity "
     "--disable-ckpt-load-validate-sharding-integrity",
     kNo, "a checkpoint is always verified"},
    {"--no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load", kNo,
     "checkpoints do not depend on the sharding; there is no DTensor format"},
    {"--dist-ckpt-strictness", kNo, "a checkpoint that lacks or adds tensors is refused", 1, 1,
     "raise_all"},
    {"--dist-ckpt-save-pre-mcore-014", kNo, kFormat},
    so("--dist-ckpt-optim-fully-reshardable", kAnyLayout),
    so("--distrib-optim-fully-reshardable-mem-efficient", kAnyLayout),
    {"--no-save-tokenizer-assets --disable-save-tokenizer-assets", kNo,
     "the tokenizer's files are always stored beside the weights"},
    {"--replication", kNo, kLocal},
    {"--replication-jump", kNo, kLocal, 1, 1},
    {"--replication-factor", kNo, kLocal, 1, 1, "2"},
    so("--verify-integrity", kVerified),
    so("--no-save-rng", kRng),
    so("--no-load-rng", kRng),
    {"--override-ckpt-iteration", kNo,
     "changing the iteration of a checkpoint is not built; --finetune starts at 0", 1, 1},
    so("--use-dist-ckpt", kDistributedCheckpoint),
    {"--dist-ckpt-format", kNo, kFormat, 1, 1},
    {"--dist-ckpt-workers", kNo, "the number of writers is not a choice here", 1, 1},
    so("--ckpt-fully-parallel-save", kDividedWriting),
    so("--ckpt-drop-redundant-extra-state", kNoExtraState),
    // -- mixed precision
    so("--attention-softmax-in-fp32", kFp32Softmax),
    so("--accumulate-allreduce-grads-in-fp32", kFp32Sums),
    {"--fp16-lm-cross-entropy", kNo, "the loss is computed in fp32"},
    {"--output-logit-dtype", kNo, "the type of logits is that of the model", 1, 1},
    {"--reuse-grad-buf-for-mxfp8-param-ag", kNo, kMxfp8},
    {"--mamba-training-ssm-states-dtype", kNo, kSsm, 1, 1},
    // -- distributed init
    so("--no-align-grad-reduce --disable-align-grad-reduce", kUnalignedReduce),
    {"--local-rank", kNo, "launchers pass it in the environment", 1, 1, "0"},
    {"--lazy-mpu-init", kNo, "groups of ranks are always made at the start of a run"},
    {"--use-torch-fsdp2", kNo, "FSDP2 is Python; --use-megatron-fsdp shards parameters"},
    {"--nccl-communicator-config-path", kNo,
     "files of settings of NCCL are not read; its environment variables work", 1, 1},
    so("--disable-gloo-process-groups", kNoGloo),
    {"--use-sharp", kNo, "sums inside of network switches (SHARP) are not built"},
    {"--sharp-enabled-group", kNo, "sums inside of network switches (SHARP) are not built", 1, 1},
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
    {"--gtp-remat-reduce-scatter-with-fp32-accumulation", kNo, kGtp},
    so("--ddp-param-name-patterns-for-fp32-local-accumulation", kFp32Accumulation, 1, -1),
    {"--ddp-average-in-collective", kNo,
     "gradients are sums, divided once by the weight of all tokens of the step"},
    {"--overlap-param-gather-with-optimizer-step", kNo,
     "all chunks of a rank are updated in one step; --overlap-param-gather gathers during the "
     "forward"},
    so("--no-align-param-gather", kUnalignedGather),
    {"--megatron-fsdp-version", kNo, kOneFsdp, 1, 1, "1"},
    so("--no-use-layer-wise-param-layout", kLayerWiseOff),
    {"--use-nccl-ub", kNo, "registering buffers with NCCL is not built yet"},
    so("--disable-symmetric-registration", kNoSymmetricRegistration),
    {"--gtp-remat-nccl-ub", kNo, kGtp},
    {"--gtp-expert-remat-nccl-ub", kNo, kGtp},
    {"--fsdp-manual-registration", kNo, kFsdpBuffers},
    {"--create-all-gather-group", kNo,
     "gathers and sums over the same ranks share one communicator"},
    {"--outer-dp-sharding-strategy", kNo, kHybridFsdp, 1, 1, "no_shard"},
    so("--no-gradient-reduce-div-fusion", kNoDivision),
    {"--fsdp-double-buffer", kNo, kFsdpBuffers},
    {"--suggested-communication-unit-size", kNo,
     "with --use-megatron-fsdp a layer is gathered and reduced at a time", 1, 1},
    {"--keep-fp8-transpose-cache", kNo,
     "the codes of whole weights are kept in both orientations; gathered ones are made for each "
     "pass"},
    {"--enable-full-sharding-in-hsdp", kNo, kHybridFsdp},
    so("--torch-fsdp2-no-reshard-after-forward", kFsdp2Off),
    {"--fake-process-group", kNo,
     "a layout is tried without its ranks by megatron check, and by megatron prove with threads"},
    // -- validation
    {"--test-mode", kNo, "a test of single batches is not built yet"},
    // -- data and dataloader
    {"--phase-transition-iterations", kNo,
     "stops at phase boundaries are not built; give --exit-interval", 1, 1},
    {"--per-dataset-sequences-path", kNo, "the sizes are read from each index", 1, 1},
    {"--dataloader-fast-cache-load", kNo,
     "cached sample orders are mapped at once, after one process of a node compared their hashes"},
    {"--dataloader-defer-npy-index-mmap", kNo,
     "cached sample orders are mapped at once, after one process of a node compared their hashes"},
    {"--encoder-seq-length", kNo, "give --seq-length; a GPT has one sequence", 1, 1},
    {"--decoder-seq-length", kNo, kT5, 1, 1},
    {"--sample-rate", kNo, kRetriever, 1, 1, "1.0"},
    {"--mask-prob", kNo, kBert, 1, 1, "0.15"},
    {"--short-seq-prob", kNo, kBert, 1, 1, "0.1"},
    so("--no-create-attention-mask-in-dataloader", kDerivedMasks),
    {"--object-storage-cache-path", kNo, kMsc, 1, 1},
    {"--fim-data", kNo, kFim},
    {"--fim-rate", kNo, kFim, 1, 1, "0.5"},
    {"--fim-spm-rate", kNo, kFim, 1, 1, "0.5"},
    {"--fim-split-sample", kNo, kFim, 1, 1},
    {"--fim-fragment-rate", kNo, kFim, 1, 1},
    {"--fim-no-prefix", kNo, kFim, 1, 1},
    {"--fim-prefix-token", kNo, kFim, 1, 1, "<fim_prefix>"},
    {"--fim-middle-token", kNo, kFim, 1, 1, "<fim_middle>"},
    {"--fim-suffix-token", kNo, kFim, 1, 1, "<fim_suffix>"},
    {"--fim-pad-token", kNo, kFim, 1, 1, "<fim_pad>"},
    {"--fim-eod-token", kNo, kFim, 1, 1, "<|endoftext|>"},
    // -- tokenizer
    {"--tokenizer-metadata", kNo, "tokenizers describe themselves in tokenizer.json", 1, 1},
    {"--tokenizer-sentencepiece-legacy", kNo, kSpm},
    {"--no-tokenizer-sentencepiece-ignore-extra-whitespaces "
     "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces",
     kNo, "the model itself says what becomes of repeated spaces"},
    {"--tokenizer-hf-no-use-fast", kNo,
     "there is one implementation of a tokenizer.json, the fast one"},
    {"--tokenizer-hf-no-include-special-tokens", kNo,
     "tokenizers describe themselves in tokenizer.json"},
    {"--trust-remote-code", kNo, "no Python code of a model is ever run"},
    {"--use-gigatoken", kNo, "Gigatoken is a Python library"},
    // -- autoresume
    {"--adlr-autoresume", kNo, kAutoresume},
    {"--adlr-autoresume-interval", kNo, kAutoresume, 1, 1, "1000"},
    // -- biencoder
    {"--ict-head-size", kNo, kRetriever, 1, 1},
    {"--biencoder-projection-dim", kNo, kRetriever, 1, 1, "0"},
    {"--biencoder-shared-query-context-model", kNo, kRetriever},
    {"--ict-load", kNo, kRetriever, 1, 1},
    {"--bert-load", kNo, kRetriever, 1, 1},
    {"--titles-data-path", kNo, kRetriever, 1, 1},
    {"--query-in-block-prob", kNo, kRetriever, 1, 1, "0.1"},
    {"--use-one-sent-docs", kNo, kRetriever},
    {"--evidence-data-path", kNo, kRetriever, 1, 1},
    {"--retriever-report-topk-accuracies", kNo, kRetriever, 1, -1},
    {"--retriever-score-scaling", kNo, kRetriever},
    {"--block-data-path", kNo, kRetriever, 1, 1},
    {"--embedding-path", kNo, kRetriever, 1, 1},
    {"--indexer-batch-size", kNo, kRetriever, 1, 1, "128"},
    {"--indexer-log-interval", kNo, kRetriever, 1, 1, "1000"},
    // -- vision
    {"--num-classes", kNo, kVision, 1, 1, "1000"},
    {"--img-h", kNo, kVision, 1, 1, "224"},
    {"--img-w", kNo, kVision, 1, 1, "224"},
    {"--num-channels", kNo, kVision, 1, 1, "3"},
    {"--patch-dim", kNo, kVision, 1, 1, "16"},
    {"--classes-fraction", kNo, kVision, 1, 1, "1.0"},
    {"--data-per-class-fraction", kNo, kVision, 1, 1, "1.0"},
    {"--head-lr-mult", kNo, kVision, 1, 1, "1.0"},
    {"--vision-pretraining", kNo, kVision},
    {"--vision-pretraining-type", kNo, kVision, 1, 1, "classify"},
    {"--vision-backbone-type", kNo, kVision, 1, 1, "vit"},
    {"--swin-backbone-type", kNo, kVision, 1, 1, "tiny"},
    {"--mask-type", kNo, kVision, 1, 1, "random"},
    {"--mask-factor", kNo, kVision, 1, 1, "1.0"},
    {"--iter-per-epoch", kNo, kVision, 1, 1, "1250"},
    {"--dino-local-img-size", kNo, kVision, 1, 1, "96"},
    {"--dino-local-crops-number", kNo, kVision, 1, 1, "10"},
    {"--dino-head-hidden-size", kNo, kVision, 1, 1, "2048"},
    {"--dino-bottleneck-size", kNo, kVision, 1, 1, "256"},
    {"--dino-freeze-last-layer", kNo, kVision, 1, 1, "1"},
    {"--dino-norm-last-layer", kNo, kVision},
    {"--dino-warmup-teacher-temp", kNo, kVision, 1, 1, "0.04"},
    {"--dino-teacher-temp", kNo, kVision, 1, 1, "0.07"},
    {"--dino-warmup-teacher-temp-epochs", kNo, kVision, 1, 1, "30"},
    // -- moe
    {"--num-experts", kNo, kMoe, 1, 1, "0 none"},
    {"--moe-layer-freq", kNo, kMoe, 1, 1, "1"},
    {"--moe-use-upcycling", kNo, kMoe},
    {"--moe-router-load-balancing-type", kNo, kMoe, 1, -1, "aux_loss"},
    {"--moe-aux-loss-coeff", kNo, kMoe, 1, -1, "0.0"},
    {"--moe-upcycling-granularity", kNo, kMoe, 1, 1, "1"},
    // -- mla
    {"--q-lora-rank", kNo, kMla, 1, 1},
    {"--kv-lora-rank", kNo, kMla, 1, 1, "32"},
    {"--qk-head-dim", kNo, kMla, 1, 1, "128"},
    {"--qk-pos-emb-head-dim", kNo, kMla, 1, 1, "64"},
    {"--v-head-dim", kNo, kMla, 1, 1, "128"},
    {"--rotary-scaling-factor", kNo, kMla, 1, 1, "1.0"},
    {"--mscale", kNo, kMla, 1, 1, "1.0"},
    {"--mscale-all-dim", kNo, kMla, 1, 1, "0.0"},
    {"--cache-mla-latents", kNo, kMla},
    {"--mla-down-proj-fusion", kNo, kMla},
    // -- experimental_attention_variant
    {"--linear-attention-freq", kNo, kVariant, 1, 1},
    // -- heterogeneous architecture
    {"--heterogeneous-layers-config-path", kNo, "heterogeneous layers are not built yet", 1, 1},
    {"--heterogeneous-layers-config-encoded-json", kNo, "heterogeneous layers are not built yet", 1,
     1},
    // -- logging
    {"--log-device-memory-used", kNo, "--log-memory-interval reports the memory of this process"},
    {"--log-max-attention-logit", kNo, "the largest attention logit is not recorded yet"},
    so("--no-barrier-with-level-1-timing", kNoTimerBarrier),
    {"--logging-level", kNo, "the level of the log is fixed", 1, 1, "20"},
    {"--log-energy", kNo, "energy is not measured"},
    {"--moe-routing-trace-path", kNo, kTrace, 1, 1},
    {"--moe-routing-trace-max-training-iters", kNo, kTrace, 1, 1},
    {"--moe-routing-trace-capture-logits", kNo, kTrace},
    {"--moe-routing-trace-capture-hidden-states", kNo, kTrace},
    {"--moe-routing-trace-dump-weights", kNo, kTrace},
    // -- opentelemetry
    {"--otel-enabled", kNo, kOtel},
    {"--otel-service-name", kNo, kOtel, 1, 1},
    {"--otel-span-groups", kNo, kOtel, 1, 1},
    // -- Logits Distillation
    {"--logits-save-top-k", kNo, kDistill, 1, 1},
    {"--logits-save-top-p", kNo, kDistill, 1, 1},
    {"--logits-save-top-p-min-k", kNo, kDistill, 1, 1, "1"},
    {"--logits-save-dir", kNo, kDistill, 1, 1},
    {"--logits-save-dtype", kNo, kDistill, 1, 1, "fp16"},
    {"--logits-load-dir", kNo, kDistill, 1, 1},
    {"--logits-load-decode-threads", kNo, kDistill, 1, 1, "4"},
    {"--logits-load-prefetch-factor", kNo, kDistill, 1, 1, "3"},
    {"--logits-load-msc-prefetch-depth", kNo, kDistill, 1, 1, "2"},
    {"--logits-load-kd-loss-alpha", kNo, kDistill, 1, 1, "1.0"},
    {"--logits-load-ignore-errors", kNo, kDistill},
    // -- straggler
    {"--log-straggler", kNo, kStraggler},
    {"--straggler-ctrlr-port", kNo, kStraggler, 1, 1, "65535"},
    {"--straggler-minmax-count", kNo, kStraggler, 1, 1, "1"},
    so("--disable-straggler-on-startup", kStragglerOff),
    // -- workload inspector
    {"--run-workload-inspector-server", kNo, kInspector},
    // -- inference
    {"--inference-batch-times-seqlen-threshold", kNo, kServe, 1, 1, "-1"},
    {"--max-tokens-to-oom", kNo, kServe, 1, 1, "12000"},
    {"--output-bert-embeddings", kNo, kBert},
    {"--bert-embedder-type", kNo, kBert, 1, 1, "megatron"},
    {"--cuda-graph-scope", kNo, kGraph, 1, -1},
    {"--cuda-graph-modules", kNo, kGraph, 1, -1},
    {"--use-legacy-static-engine", kNo, "there is one engine"},
    {"--inference-max-requests", kNo, kServe, 1, 1, "8"},
    {"--inference-max-seq-length", kNo, kServe, 1, 1, "2560"},
    {"--inference-dynamic-batching", kNo, kServe},
    {"--inference-dynamic-batching-buffer-size-gb", kNo, kServe, 1, 1, "40.0"},
    {"--inference-dynamic-batching-paused-buffer-size-gb", kNo, kServe, 1, 1},
    {"--inference-dynamic-batching-mamba-memory-ratio", kNo, kServe, 1, 1},
    {"--inference-dynamic-batching-block-size", kNo, kServe, 1, 1, "256"},
    {"--inference-dynamic-batching-max-requests", kNo, kServe, 1, 1},
    {"--inference-dynamic-batching-max-tokens", kNo, kServe, 1, 1},
    {"--inference-dynamic-batching-num-cuda-graphs", kNo, kServe, 1, 1, "16"},
    {"--inference-dynamic-batching-track-paused-request-events", kNo, kServe},
    {"--inference-dynamic-batching-track-generated-token-events", kNo, kServe},
    {"--decode-only-cuda-graphs", kNo, kServe},
    {"--inference-cuda-graph-all-prefills", kNo, kGraph},
    {"--inference-cuda-graph-max-tokens", kNo, kGraph, 1, 1, "512"},
    {"--inference-dynamic-batching-unified-memory-level", kNo, kServe, 1, 1, "0"},
    {"--enable-chunked-prefill", kNo, kServe},
    {"--num-speculative-tokens", kNo, kServe, 1, 1, "0"},
    {"--inference-dynamic-batching-prefix-caching", kNo, kServe},
    so("--no-inference-dynamic-batching-prefix-caching", kServeOff),
    {"--inference-dynamic-batching-prefix-caching-eviction-policy", kNo, kServe, 1, 1, "ref_zero"},
    {"--inference-dynamic-batching-prefix-caching-coordinator-policy", kNo, kServe, 1, 1,
     "load_balanced"},
    {"--inference-dynamic-batching-prefix-caching-routing-alpha", kNo, kServe, 1, 1, "0.5"},
    {"--inference-dynamic-batching-prefix-caching-mamba-gb", kNo, kServe, 1, 1},
    {"--inference-dynamic-batching-cuda-graph-mixed-prefill-count", kNo, kServe, 1, 1, "16"},
    {"--inference-dynamic-batching-cuda-graph-sizing-distribution", kNo, kServe, 1, 1,
     "exponential"},
    {"--inference-dynamic-batching-sampling-backend", kNo, kServe, 1, 1, "torch"},
    {"--use-same-sampling-seed-across-dp-ranks", kNo, kServe},
    {"--inference-dynamic-batching-async-sched-mode", kNo, kServe, 1, 1, "legacy"},
    {"--inference-dynamic-batching-logprobs-mode", kNo, kServe, 1, 1, "raw_logprobs"},
    {"--inference-logging-step-interval", kNo, kServe, 1, 1, "0"},
    {"--inference-text-gen-server-logging", kNo, kServe},
    so("--no-inference-text-gen-server-logging", kServeOff),
    {"--inference-wandb-logging", kNo, kServe},
    so("--no-inference-wandb-logging", kServeOff),
    {"--inference-coordinator-port", kNo, kServe, 1, 1},
    {"--mamba-inference-conv-states-dtype", kNo, kSsm, 1, 1, "bf16"},
    {"--mamba-inference-ssm-states-dtype", kNo, kSsm, 1, 1, "bf16"},
    {"--inference-use-synchronous-zmq-collectives", kNo, kServe},
    so("--no-inference-use-synchronous-zmq-collectives", kServeOff),
    {"--inference-disable-ep-consensus", kNo, kServe},
    so("--no-inference-disable-ep-consensus", kServeOff),
    {"--inference-shards", kNo, kServe, 1, 1},
    // -- Transformer-Engine
    {"--fp4-param-gather", kNo, kParamGather},
    {"--fp8-param-gather", kNo, kParamGather},
    {"--te-precision-config-file", kNo,
     "precision is set by --fp8-format, --fp4-format and --first-last-layers-bf16; files of "
     "Transformer Engine are not read",
     1, 1},
    // -- experimental
    so("--enable-experimental", kNothingHidden),
    {"--spec", kNo, "layers are described by flags, not by Python objects", 0, -1},
    {"--hybrid-layer-pattern", kNo, kSsm, 1, 1},
    {"--hybrid-override-pattern", kNo, kSsm, 1, 1},
    {"--yaml-cfg", kNo, "give --config FILE", 1, 1},
    {"--megatron-fsdp-main-params-dtype", kNo,
     "--main-params-dtype is the setting for every kind of sharding", 1, 1, "fp32"},
    {"--megatron-fsdp-main-grads-dtype", kNo,
     "--main-grads-dtype is the setting for every kind of sharding", 1, 1, "auto fp32"},
    {"--megatron-fsdp-grad-comm-dtype", kNo,
     "--grad-reduce-in-bf16 is the setting for every kind of sharding", 1, 1, "auto"},
    {"--megatron-fsdp-enable-fine-grained-param-gather", kNo, "a layer is gathered at a time"},
    {"--megatron-fsdp-max-pool-double-buffer", kNo, kFsdpBuffers},
    {"--fsdp-db-use-persist-buf-on-alloc-fail", kNo, kFsdpBuffers},
    // -- one logger
    so("--no-one-logger", kOneLoggerOff),
    {"--one-logger-project", kNo, kOneLogger, 1, 1, "megatron-lm"},
    {"--one-logger-run-name", kNo, kOneLogger, 1, 1},
    {"--one-logger-async", kNo, kOneLogger},
    {"--app-tag-run-name", kNo, kOneLogger, 1, 1},
    {"--app-tag-run-version", kNo, kOneLogger, 1, 1, "0.0.0"},
    // -- In-process restart
    {"--inprocess-restart", kNo, kInProcess},
    {"--inprocess-max-iterations", kNo, kInProcess, 1, 1},
    {"--inprocess-monitor-thread-interval", kNo, kInProcess, 1, 1, "1.0"},
    {"--inprocess-monitor-process-interval", kNo, kInProcess, 1, 1, "1.0"},
    {"--inprocess-progress-watchdog-interval", kNo, kInProcess, 1, 1, "1.0"},
    {"--inprocess-heartbeat-interval", kNo, kInProcess, 1, 1, "30"},
    {"--inprocess-soft-timeout", kNo, kInProcess, 1, 1, "60"},
    {"--inprocess-hard-timeout", kNo, kInProcess, 1, 1, "90"},
    {"--inprocess-heartbeat-timeout", kNo, kInProcess, 1, 1, "60"},
    {"--inprocess-barrier-timeout", kNo, kInProcess, 1, 1, "120"},
    {"--inprocess-completion-timeout", kNo, kInProcess, 1, 1, "120"},
    {"--inprocess-last-call-wait", kNo, kInProcess, 1, 1, "1"},
    {"--inprocess-termination-grace-time", kNo, kInProcess, 1, 1, "1"},
    {"--inprocess-granularity", kNo, kInProcess, 1, 1, "node"},
    {"--inprocess-active-world-size", kNo, kInProcess, 1, 1, "1"},
    {"--inprocess-empty-cuda-cache", kNo, kInProcess},
    // -- ft_package
    {"--enable-ft-package", kNo, kFt},
    {"--calc-ft-timeouts", kNo, kFt},
    {"--ft-num-warmup-iters", kNo, kFt, 1, 1, "5"},
    // -- rerun engine
    {"--error-injection-rate", kNo, kRerun, 1, 1, "0"},
    {"--error-injection-type", kNo, kRerun, 1, 1, "transient_error"},
    {"--rerun-mode", kNo, kRerun, 1, 1, "disabled"},
    {"--check-for-spiky-loss", kNo, kRerun},
    // -- msc
    {"--enable-msc", kNo, kMsc},
    so("--disable-msc", kMscOff),
    // -- fault injector
    {"--fault-injector-ranks", kNo, kFault, 1, 1},
    {"--fault-injector-num-ranks", kNo, kFault, 1, 1},
    {"--fault-injector-fault-types", kNo, kFault, 1, 1},
    {"--fault-injector-fault-probabilities", kNo, kFault, 1, 1},
    {"--fault-injector-fault-delay", kNo, kFault, 1, 1},
    {"--fault-injector-delay-start-iteration", kNo, kFault, 1, 1},
    {"--fault-injector-mtti-seconds", kNo, kFault, 1, 1},
    {"--fault-injector-offset-seconds", kNo, kFault, 1, 1},
    {"--fault-injector-seed", kNo, kFault, 1, 1},
}};

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
    {"--position-embedding-type", "mrope", kMrope},
    {"--position-embedding-type", "relative", kT5},
    {"--cuda-graph-impl", "transformer_engine full_iteration",
     "a CUDA graph holds forward and backward of one micro-batch: local"},
};

}  // namespace

std::span<const RefusedValue> refused_values() { return kRefusedValues; }

std::span<const KnownFlag> flag_table() { return kTable; }

FlagVerdict judge_flag(const KnownFlag& flag, const Arguments& arguments) {
  if (flag.kind == KnownFlag::Kind::kRefused) return {false, std::string(flag.reason)};
  const FlagClaim* claim = flag.claim;
  if (claim == nullptr || claim->holds == nullptr || claim->holds(arguments))
    return {true, std::string(flag.reason)};
  return {false, std::string(claim->otherwise)};
}

std::string flag_condition(const KnownFlag& flag) {
  if (flag.claim == nullptr || flag.claim->holds == nullptr) return {};
  return cat(flag.claim->when, "; else: ", flag.claim->otherwise);
}

void use_flag_table(ParseOptions& options, const Arguments& arguments) {
  options.known = kTable;
  options.refused_values = kRefusedValues;
  options.judge = [&arguments](const KnownFlag& flag) { return judge_flag(flag, arguments); };
}

}  // namespace megatron
