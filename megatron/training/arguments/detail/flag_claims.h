// Claims of the flag table: why an accepted flag that no field owns has no effect, because the run
// does what it asks for anyway.
#pragma once

#include "megatron/kernels/sum_parts.h"
#include "megatron/training/arguments/arguments.h"
#include "megatron/training/arguments/flag_table.h"

namespace megatron::flag_claims {

// Whether sequence parallelism communicates by peer-to-peer copies on one host, which overlap with
// the GEMMs.
inline bool overlaps_exchanges(const Arguments& a) {
  const int64_t ranks = a.parallel.tensor_model_parallel_size;
  return ranks > 1 && ranks <= kMaxSumParts && a.parallel.sequence_parallel && a.ddp.peer_copies &&
         a.training.device != DeviceChoice::kCpu;
}

inline int64_t replicas(const Arguments& a) {
  return a.data_parallel_size() * a.parallel.context_parallel_size;
}

// Whether several ranks hold the same weights; they then share the reading and writing of a
// checkpoint.
inline bool divides_checkpoints(const Arguments& a) { return replicas(a) > 1; }

// -- numbers
constexpr FlagClaim kSameInit{
    "initial weights are a function of seed, name and position, and the same on every device",
    "test InitializeParameters.FollowsLawsSeedsAndNames"};
constexpr FlagClaim kDeterministic{
    "every kernel sums in a fixed order; products keep the algorithms of ~/.cache/megatron",
    "test GpuAttentionMode.BackwardIsBitEqualInEveryRun",
    [](const Arguments& a) { return !a.transformer.fast; }, "without --fast",
    "--fast lets the backward of attention sum in any order"};
constexpr FlagClaim kFusedLoss{
    "the loss and its gradient are one fused operation",
    "test VocabParallelCrossEntropy.EqualsLogSoftmaxOverAnyNumberOfRanks"};
constexpr FlagClaim kFp32Softmax{"softmax of attention is computed in fp32",
                                 "test Attention.ForwardAndGradientsMatchTheFormula"};
constexpr FlagClaim kFp32Sums{
    "gradients are accumulated, and summed over the ranks, in fp32", "field grad_reduce_in_bf16",
    [](const Arguments& a) { return !a.ddp.grad_reduce_in_bf16; }, "without --grad-reduce-in-bf16",
    "--grad-reduce-in-bf16 rounds gradients for the sums over the ranks"};
constexpr FlagClaim kFp32Accumulation{"every rank accumulates gradients in fp32",
                                      "source megatron/distributed/reduction_domain.cc: "
                                      "dtype == at::kDouble ? at::kDouble : at::kFloat"};
constexpr FlagClaim kNoDivision{
    "gradients are summed, and divided once by the weight of all tokens of the step",
    "refused --ddp-average-in-collective"};
constexpr FlagClaim kRng{
    "random numbers are a function of seed, step and position; there is no generator state",
    "test Dropout.DoesNotDependOnHowTheBatchIsCut"};

// -- fusion: the flags ask how operations are fused, which changes no result
constexpr std::string_view kFusion =
    "which operations are fused is not a choice here; the results are those of the single ones";
constexpr FlagClaim kFusedNorm{kFusion, "test Norm.EqualsTheFormulaForwardAndBackward"};
constexpr FlagClaim kFusedLayer{kFusion, "test RowParallelLinear.ContainsAnActivation"};
constexpr FlagClaim kFusedActivation{kFusion, "test ActivationKernels.ForwardAndBackward"};
constexpr FlagClaim kFusedSoftmax{kFusion, "test Attention.ForwardAndGradientsMatchTheFormula"};
constexpr FlagClaim kFusedDropout{kFusion, "test Dropout.SumsInTheResidualsType"};
constexpr FlagClaim kFusedRotary{kFusion, "test RotaryKernel.TurnsPairs"};
constexpr FlagClaim kFusedAccumulation{kFusion, "test Gemm.WeightGradientAccumulatesInTheTarget"};
constexpr FlagClaim kFlashAttention{
    "flash attention runs wherever the shapes and the device allow it", "field attention_backend",
    [](const Arguments& a) {
      return a.transformer.attention_backend == AttentionBackend::kAuto ||
             a.transformer.attention_backend == AttentionBackend::kFlash;
    },
    "with --attention-backend auto or flash", "--attention-backend names other kernels"};
constexpr FlagClaim kFusedDownProjections{
    kFusion, "test MultiLatentAttention.EqualsTheFormula",
    [](const Arguments& a) { return a.transformer.multi_latent_attention; },
    "with --multi-latent-attention", "without --multi-latent-attention there are no latents"};
inline bool has_experts(const Arguments& a) { return a.transformer.has_moe(); }
constexpr std::string_view kNoExperts = "without --num-experts there are no experts";
constexpr FlagClaim kGroupedProducts{"the products of all experts of a rank are one launch",
                                     "test GroupedGemmOf.EveryExpertMultipliesItsRows", has_experts,
                                     "with --num-experts", kNoExperts};
constexpr FlagClaim kOneExpertWeight{"the experts of a layer share one parameter per matrix",
                                     "test RoutedExperts.GoldenValues", has_experts,
                                     "with --num-experts", kNoExperts};
constexpr FlagClaim kFusedExperts{kFusion, "test RoutedExperts.GoldenValues", has_experts,
                                  "with --num-experts", kNoExperts};
constexpr FlagClaim kOneFlex{
    "--moe-token-dispatcher-type flex has one implementation: tokens are written into the memory "
    "of their experts' ranks",
    "test RoutedExperts.SameBitsByAlltoallAndFlex",
    [](const Arguments& a) {
      return a.transformer.has_moe() &&
             a.transformer.moe_token_dispatcher_type == TokenDispatcherType::kFlex;
    },
    "with --moe-token-dispatcher-type flex",
    "it takes --num-experts and --moe-token-dispatcher-type flex"};
constexpr FlagClaim kGradientsBesideRows{
    "weight gradients of experts are computed while the gradients of their rows travel",
    "source megatron/transformer/moe/token_dispatcher_rows.cc: if (meanwhile) meanwhile();",
    [](const Arguments& a) {
      return a.transformer.has_moe() && a.parallel.expert_model_parallel_size > 1 &&
             a.transformer.moe_token_dispatcher_type != TokenDispatcherType::kAllgather;
    },
    "with --expert-model-parallel-size above 1 and --moe-token-dispatcher-type alltoall or flex",
    "rows of experts travel with --expert-model-parallel-size above 1 and "
    "--moe-token-dispatcher-type alltoall or flex"};
constexpr FlagClaim kNoJit{"there is no just-in-time compiler", "absent torch::jit"};
constexpr FlagClaim kNoGc{"there is no garbage collector", "absent Py_Initialize"};
constexpr FlagClaim kOneImplementation{"each layer has one implementation",
                                       "absent inference_optimized"};
constexpr FlagClaim kOneSetOfModels{"there is one set of models", "absent use_mcore_models"};
constexpr FlagClaim kNothingHidden{"no feature waits for a switch of experiments",
                                   "absent enable_experimental"};
constexpr FlagClaim kAllocatedOnce{"parameters are allocated once, on the device that uses them",
                                   "test PlainParameterStore.AllocatesZerosAndAccumulates"};

// -- communication
constexpr FlagClaim kExchangesOverlap{
    "exchanges of sequence parallelism overlap with the products where the GPUs of one host can "
    "copy to each other",
    "field peer_copies", overlaps_exchanges,
    "with --sequence-parallel over 2 to 16 tensor ranks on GPUs, without --no-peer-copies",
    "there is no exchange to overlap: it takes --sequence-parallel over 2 to 16 tensor ranks on "
    "GPUs, without --no-peer-copies"};
constexpr FlagClaim kNoExchangeOverlaps{
    "no exchange between tensor ranks overlaps with a product it is needed for",
    "field peer_copies", [](const Arguments& a) { return !overlaps_exchanges(a); },
    "without --sequence-parallel over several tensor ranks, or with --no-peer-copies",
    "exchanges of sequence parallelism overlap with the products; --no-peer-copies switches that "
    "off"};
constexpr FlagClaim kTransfersOverlap{
    "transfers overlap with computation from the first micro-batch of a step to its last",
    "test Replay.OverlapHidesTransfers",
    [](const Arguments& a) {
      return a.parallel.pipeline_model_parallel_size == 1 || a.pipeline.overlap_p2p_communication;
    },
    "without --no-overlap-p2p-communication",
    "--no-overlap-p2p-communication switches the overlap off"};
constexpr FlagClaim kOwnRows{
    "sequence-parallel ranks get their rows of the embedding by a reduce-scatter, in memory of "
    "their own",
    "source megatron/tensor_parallel/mappings.cc: scatter_rows(x.contiguous(), part"};
constexpr FlagClaim kUnalignedReduce{
    "a bucket is reduced as soon as it is full; pipeline stages do not wait for each other",
    "absent align_grad_reduce"};
constexpr FlagClaim kUnalignedGather{
    "a bucket is gathered as soon as the step is over; pipeline stages do not wait for each other",
    "absent align_param_gather"};
constexpr FlagClaim kNoGloo{"between GPUs there are no Gloo groups", "field distributed_backend",
                            [](const Arguments& a) {
                              return a.world_size == 1 ||
                                     (a.comm.distributed_backend != DistributedBackend::kGloo &&
                                      a.training.device != DeviceChoice::kCpu);
                            },
                            "with one rank, or on GPUs", "Gloo is what connects ranks on CPUs"};
constexpr FlagClaim kNoTimeoutReport{
    "a run of one rank waits for no other rank",
    "source megatron/runtime/job.cc: if (launch.world_size == 1) return with_own_errors(",
    [](const Arguments& a) { return a.world_size == 1; }, "with one rank",
    "a rank that waits past the timeout always reports why"};
constexpr FlagClaim kFinishedCalls{
    "the report of a failure also uses the last finished collectives",
    "test CollectiveHistory.RemembersTheLastCallsOnly"};
constexpr FlagClaim kNoExtraReport{"collectives are reported at failures only",
                                   "absent extra_dump_on_exec"};
constexpr FlagClaim kNoSymmetricRegistration{"buffers are not registered with NCCL",
                                             "refused --use-nccl-ub"};
constexpr FlagClaim kNoTimerBarrier{"timers wait for no other rank",
                                    "lacks megatron/reporting/timers.cc: barrier"};

// -- memory
constexpr FlagClaim kPinnedCache{"pinned host memory is kept and used again",
                                 "source megatron/tensor/host_copy.cc: pinned_memory(true)"};
constexpr FlagClaim kHostOverlap{
    "with --optimizer-cpu-offload, copies to and from the host overlap with the update",
    "test DataParallel.AnOffloadedOptimizerGivesTheSameBits"};
constexpr FlagClaim kNothingPinned{
    "no state of the optimizer lies in host memory", "field optimizer_cpu_offload",
    [](const Arguments& a) { return !a.optimizer.optimizer_cpu_offload; },
    "without --optimizer-cpu-offload", "the copies of --optimizer-cpu-offload need pinned memory"};

constexpr FlagClaim kLatentCache{
    "decoding keeps the latents of earlier positions, not keys and values",
    "test MultiLatentAttention.DecodesFromLatents",
    [](const Arguments& a) { return a.transformer.multi_latent_attention; },
    "with --multi-latent-attention", "without --multi-latent-attention there are no latents"};

// -- checkpoints, data, signals
constexpr FlagClaim kMissingIsAnError{
    "a checkpoint that is not there is an error", "test Folder.ResumeNeedsAUsableCheckpoint",
    [](const Arguments& a) {
      const StartChoice start = a.training.start;
      return start == StartChoice::kResume ||
             (start == StartChoice::kAuto && a.training.pretrained_checkpoint.empty());
    },
    "with --start-mode resume, or auto without --pretrained-checkpoint",
    "--start-mode fresh, resume-or-fresh and --pretrained-checkpoint say what to start from "
    "instead"};
constexpr FlagClaim kDividedWriting{"ranks of data parallelism divide the writing of checkpoints",
                                    "test CheckpointLayouts.ThereAndBackIsTheSame",
                                    divides_checkpoints, "with several data or context ranks",
                                    "no other rank holds the same"};
constexpr FlagClaim kDividedReading{"ranks of data parallelism divide the reading of checkpoints",
                                    "test CheckpointLayouts.ThereAndBackIsTheSame",
                                    divides_checkpoints, "with several data or context ranks",
                                    "no other rank holds the same"};
constexpr FlagClaim kWholeWriting{
    "a rank writes all that it holds, which no other rank holds",
    "test CheckpointLayouts.ThereAndBackIsTheSame",
    [](const Arguments& a) { return !divides_checkpoints(a); }, "with one data and context rank",
    "ranks of data parallelism always divide the writing of checkpoints"};
constexpr FlagClaim kNoObjects{"checkpoints hold tensors and one state, no objects of ranks",
                               "test Reshard.AnyLayoutReadsWhatAnyLayoutWrote"};
constexpr FlagClaim kOneBackgroundWriter{"checkpoints in the background have one implementation",
                                         "test AsyncSaver.SavesInOrderAndReportsErrors"};
constexpr FlagClaim kPersistentWriter{"the background writer lives as long as the run",
                                      "test AsyncSaver.SavesInOrderAndReportsErrors"};
constexpr FlagClaim kConstantStructure{
    "names, shapes and places of tensors follow from the layout and stay for the whole run",
    "test LayoutPlan.WeightsGradientsAndStatesAreThoseOfTheRealRanks"};
constexpr FlagClaim kAnyLayout{"checkpoints do not depend on the layout of ranks",
                               "test Reshard.AnyLayoutReadsWhatAnyLayoutWrote"};
constexpr FlagClaim kDistributedCheckpoint{"every checkpoint is a distributed one",
                                           "test Reshard.AnyLayoutReadsWhatAnyLayoutWrote"};
constexpr FlagClaim kNoExtraState{"checkpoints hold no extra state of Transformer Engine",
                                  "lacks megatron/training/checkpoint_state.cc: extra_state"};
constexpr FlagClaim kVerified{"every block has a checksum, verified before training starts",
                              "test Corruption.OneFlippedBitInAnyFile"};
constexpr FlagClaim kDerivedMasks{"masks are derived from positions and never stored",
                                  "test TransformerBlock.MaskAndResetPositionsSeparateDocuments"};
constexpr FlagClaim kSignals{
    "one handler serves all threads; the run saves and stops at the next step",
    "test Signals.TheFirstIsRemembered",
    [](const Arguments& a) { return a.training.exit_signal_handler; },
    "without --no-exit-signal-handler", "--no-exit-signal-handler switches the handling off"};

// -- models with media
constexpr FlagClaim kShapeByFlags{"the flags of the network say what the language model is",
                                  "absent language_model_type"};
constexpr FlagClaim kConsumedSamples{
    "the place in the data is the number of consumed samples, which every checkpoint holds",
    "test DataLoader.ContinuesAnywhere"};
constexpr FlagClaim kPackedMedia{
    "samples with media are packed into sequences, and attend to themselves alone",
    "test Indexed.PatchesOfASequenceStayWithinTheirCapacity"};
constexpr FlagClaim kNoBroadcast{"each rank reads its samples itself",
                                 "lacks megatron/datasets/data_loader.cc: broadcast"};

// -- switches of features that are not built: the flags that switch them on are refused
constexpr FlagClaim kRlOff{"reinforcement learning is not built", "refused"};
constexpr FlagClaim kServeOff{"the batching inference engine is not built", "refused"};
inline bool is_hybrid(const Arguments& a) { return a.transformer.is_hybrid(); }
constexpr FlagClaim kHybridModel{
    "a model with --hybrid-layer-pattern is one", "field hybrid_layer_pattern", is_hybrid,
    "with --hybrid-layer-pattern", "which layers it has is said by --hybrid-layer-pattern"};
constexpr FlagClaim kHybridSpec{
    "layers are described by --hybrid-layer-pattern, as hybrid_stack_spec and mamba_stack_spec ask",
    "field hybrid_layer_pattern", is_hybrid, "with --hybrid-layer-pattern",
    "layers are described by flags, not by Python objects"};
constexpr FlagClaim kDsaOff{"sparse attention is not built", "refused --dsa-indexer-topk"};
constexpr FlagClaim kMuonOff{"Muon is not built", "refused --muon-nesterov"};
constexpr FlagClaim kLayerWiseOff{"there is no optimizer that works layer by layer",
                                  "refused --muon-nesterov"};
constexpr FlagClaim kFsdp2Off{"FSDP2 is not built", "refused --use-torch-fsdp2"};
constexpr FlagClaim kStragglerOff{"the straggler detector with a control port is not built",
                                  "refused --log-straggler"};
constexpr FlagClaim kOneLoggerOff{"one-logger, a service inside NVIDIA, is never called",
                                  "refused --one-logger-async"};
constexpr FlagClaim kMscOff{"object stores are not read", "refused --enable-msc"};

}  // namespace megatron::flag_claims
