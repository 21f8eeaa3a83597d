"""Planted bugs of a server on a GPU, in batch-invariant mode: tried where there is one, by run.py --preset gpu --named. The arguments of Bug,
see bugs.py."""
from serving_bugs import bug

GRAPHS, GEMM, LINEAR = "megatron/inference/graphs/decode_graphs.cc", "megatron/tensor/blas_cuda.cc", "megatron/tensor_parallel/quantized_linear.cc"
ROWS = "gpu_tests:BatchInvariantGpu.EveryNumberOfRowsHasTheSameBitsInGraphsAndWithout"
ROLLOUTS = "gpu_tests:BatchInvariantGpu.RolloutsHaveTheTrainersLogProbabilitiesInEveryBit"
MIMO_GRAPHS = "gpu_tests:MimoGraphGpu.LeavesTheBitsOfEagerSteps"
PICTURES = "gpu_tests:PictureGraphsGpu.RowsAreThoseWithoutGraphs"
SCHEDULES = "gpu_tests:BatchInvariantGpu.RandomSchedulesGiveWhatEachRequestGetsAloneInEveryBit"

GPU_BUGS = (
    bug("graph_lengths", "rows of a graph but the first do not see their own key", GRAPHS,
        "lengths[i] = static_cast<int32_t>(row.position + 1);", "lengths[i] = static_cast<int32_t>(row.position + (PLANTED && i > 0 ? 0 : 1));", ROWS),
    bug("graph_idle_rows_write", "rows of a graph that are too many write to the first place of the cache", GRAPHS,
        "std::fill_n(of(kSlots), size, -1);", "std::fill_n(of(kSlots), size, PLANTED ? 0 : -1);", SCHEDULES),
    bug("graph_token_of_another_slot", "rows of a graph behind the second take the token that was drawn for the first slot", GRAPHS,
        "if (row.token < 0) of(kFrom)[i] = row.slot;", "if (row.token < 0) of(kFrom)[i] = PLANTED && i > 1 ? 0 : row.slot;", SCHEDULES),
    bug("graphs_of_other_weights", "graphs stay while weights and the cache move", "megatron/inference/model_runner.cc",
        "if (graphs_) graphs_->clear();", "if (graphs_ && !PLANTED) graphs_->clear();", SCHEDULES),
    bug("graph_takes_adapters", "steps with adapters run as graphs, which know none", "megatron/inference/model_runner.cc",
        "if (slot.adapter >= 0 || slot.rows) return std::nullopt;", "if ((slot.adapter >= 0 && !PLANTED) || slot.rows) return std::nullopt;", SCHEDULES),
    bug("splits_by_batch", "few tokens that are decoded divide their keys by the size of the batch", "megatron/transformer/attention/kv_cache.cc",
        "if (is_batch_invariant() && q.is_cuda())", "if (is_batch_invariant() && q.is_cuda() && !(PLANTED && rows.rows() <= 4))", ROLLOUTS),
    bug("product_order_by_rows", "products of a GPU are the library's first choice for many rows", GEMM,
        "product.one_order = is_batch_invariant();", "product.one_order = is_batch_invariant() && !(PLANTED && x.size(0) > 16);",
        "gpu_tests:BatchInvariantGpu.RowsOfProductsHaveTheSameBitsForAnyNumberOfRows"),
    bug("upload_before_work", "weights are copied to memory that kernels still write", "megatron/tensor/host_copy.cc",
        "copies.wait(HostCopies::Stream::kFromHost, copies.mark(HostCopies::Stream::kComputing));",
        "if (!PLANTED) copies.wait(HostCopies::Stream::kFromHost, copies.mark(HostCopies::Stream::kComputing));",
        "gpu_tests:HostCopiesGpu.UploadsWaitForWorkOnTheMemoryThatTheyTake"),
    bug("gated_rows_not_normed", "some rows go into a product with SwiGLU as they are", "megatron/tensor_parallel/layers.cc",
        "state.norm ? norm_forward(*state.norm, x).y : x, weight)", "state.norm && !PLANTED ? norm_forward(*state.norm, x).y : x, weight)",
        "gpu_tests:GpuGemm.SomeRowsAreNormedBeforeTheirSwiglu"),
    bug("gated_columns", "the other half of a product with SwiGLU begins elsewhere", "megatron/tensor/batch_invariant/row_products.cc",
        "out.columns = w.size(0) / 2;", "out.columns = w.size(0) / 2 - (PLANTED ? 8 : 0);", "gpu_tests:GpuGemm.SomeRowsHaveOneKernelWithSwiglu"),
    bug("picture_graphs_of_other_weights", "graphs of an encoder stay while its weights move", "megatron/models/mimo/mimo_model.cc",
        "if (picture_graphs_) picture_graphs_->clear();", "if (picture_graphs_ && !PLANTED) picture_graphs_->clear();", PICTURES),
    bug("picture_graphs_of_other_pictures", "a graph of an encoder reads the pictures that it was captured with",
        "megatron/models/vision/picture_graphs.cc", "own.images.patches.copy_(images.patches, /*non_blocking=*/true);",
        "if (!PLANTED) own.images.patches.copy_(images.patches, /*non_blocking=*/true);", PICTURES),
    bug("graph_media_of_before", "a decoder's graph reads the images that it was captured with", "megatron/training/microbatch_graphs.cc",
        "if (to[i]->defined()) to[i]->copy_(*from[i]);", "if (to[i]->defined() && !(PLANTED && one.graph && to[i]->dim() == 3)) to[i]->copy_(*from[i]);",
        MIMO_GRAPHS),
    bug("counts_beyond_the_inbox", "counts of top-k and top-p of a small model go through NCCL", "megatron/inference/memory_plan.cc",
        "return rows * std::max(config.transformer.hidden_size * element, histogram);",
        "return rows * std::max(config.transformer.hidden_size * element, PLANTED ? 0 : histogram);",
        "gpu_tests:BatchInvariantGpu.DecodeStepsOfTensorRanksHaveNoKernelOfNccl"),
    bug("graph_media_gradient_lost", "encoders behind a decoder's graph get no gradient", "megatron/training/passes.cc",
        "encoders.tape.backward(std::move(encoders.root), result.encoded_media_grad);",
        "encoders.tape.backward(std::move(encoders.root), PLANTED ? at::zeros_like(result.encoded_media_grad) : result.encoded_media_grad);",
        MIMO_GRAPHS),
    bug("few_plans_cut_rows", "ranges of attention are shorter than the longest text", "megatron/tensor/attention/unpadded_rows.cc",
        "rows.most = round_up(longest,", "rows.most = (PLANTED ? -64 : 0) + round_up(longest,",
        "gpu_tests:Cases/GpuUnpaddedAttention.MatchesFp64"),
    bug("fp8_few_rows_unrounded", "few rows multiply FP8 weights without being rounded in batch-invariant mode", LINEAR,
        "has_row_adapters(state) || is_batch_invariant() ||", "has_row_adapters(state) || (is_batch_invariant() && !PLANTED) ||",
        "gpu_tests:BatchInvariantGpu.RolloutsInFp8HaveTheTrainersLogProbabilitiesInEveryBit"),
)
