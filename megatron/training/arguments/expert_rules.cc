#include "megatron/training/arguments/expert_rules.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/base/format.h"

namespace megatron {
namespace {

bool is_named(const std::vector<std::string>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

void only_experts_have_ranks(const Arguments& a, Violations& v) {
  for (const char* module : {"moe", "moe_act", "shared_experts"})
    v.require(!a.transformer.recomputes(module),
              cat("--recompute-modules ", module, " needs --num-experts"));
  for (const char* module : {"expert_fc1", "moe_act"})
    v.require(!is_named(a.transformer.offload_modules, module),
              cat("--offload-modules ", module, " needs --num-experts"));
  const int64_t size = a.parallel.expert_model_parallel_size;
  v.require(size <= 1, cat("--expert-model-parallel-size ", size, " needs --num-experts"),
            "--expert-model-parallel-size 1");
  v.require(!a.training.save_tokens_per_expert_interval,
            "--save-tokens-per-expert-interval has no effect without --num-experts");
  v.require(a.training.moe_routing_record.empty() && a.training.moe_routing_replay.empty(),
            "--moe-routing-record and --moe-routing-replay have no effect without --num-experts");
  v.require(!a.training.moe_use_upcycling, "--moe-use-upcycling needs --num-experts");
  v.require(!a.parallel.expert_tensor_parallel_size,
            "--expert-tensor-parallel-size has no effect without --num-experts");
}

void grids_fit(const Arguments& a, Violations& v) {
  const ParallelConfig& p = a.parallel;
  const int64_t stage =
                    p.tensor_model_parallel_size * p.context_parallel_size * a.data_parallel_size(),
                expert = p.expert_model_parallel_size, tensor = p.expert_tensor_size();
  if (expert < 1 || tensor < 1) return;
  if (stage % (expert * tensor) != 0) {
    const std::string by_default =
        p.expert_tensor_parallel_size ? "" : ", which is --tensor-model-parallel-size by default";
    v.add(cat("the ", stage, " ranks of a pipeline stage are not divisible by ",
              "--expert-model-parallel-size ", expert, " x --expert-tensor-parallel-size ", tensor,
              by_default),
          cat("a product that divides: ", format_divisors(stage)));
    return;
  }
  const int64_t data = stage / (expert * tensor),
                instances = a.ddp.num_distributed_optimizer_instances;
  v.require(instances < 1 || data % instances == 0,
            cat("--num-distributed-optimizer-instances ", instances, " does not divide the ", data,
                " ranks that hold the same experts"),
            cat("numbers that divide them: ", format_divisors(data)));
  v.require(!p.use_tp_pp_dp_mapping || stage / (expert * tensor) == a.data_parallel_size(),
            cat("--use-tp-pp-dp-mapping needs --expert-model-parallel-size ", expert,
                " x --expert-tensor-parallel-size ", tensor,
                " to be --tensor-model-parallel-size x --context-parallel-size, ",
                stage / a.data_parallel_size()));
}

void sizes_divide(const Arguments& a, Violations& v) {
  const TransformerConfig& t = a.transformer;
  const int64_t experts = a.parallel.expert_model_parallel_size,
                expert_tensor = a.parallel.expert_tensor_size(),
                tensor = a.parallel.tensor_model_parallel_size;
  const auto divides = [&](const char* what, int64_t size, const char* flag, int64_t ranks) {
    v.require(ranks < 1 || size % ranks == 0,
              cat(what, " ", size, " is not divisible by ", flag, " ", ranks),
              cat("sizes that divide it: ", format_divisors(size)));
  };
  divides("--num-experts", t.num_experts, "--expert-model-parallel-size", experts);
  divides(t.moe_ffn_hidden_size ? "--moe-ffn-hidden-size" : "--ffn-hidden-size",
          t.expert_ffn_size(t), "--expert-tensor-parallel-size", expert_tensor);
  if (t.moe_shared_expert_intermediate_size)
    divides("--moe-shared-expert-intermediate-size", *t.moe_shared_expert_intermediate_size,
            "--tensor-model-parallel-size", tensor);
  v.require(!t.add_bias_linear || expert_tensor == 1,
            cat("biases of experts with --expert-tensor-parallel-size ", expert_tensor,
                " are not built: every rank would add them"),
            "--disable-bias-linear, or --expert-tensor-parallel-size 1");
  v.require(!t.add_bias_linear || !t.moe_shared_expert_intermediate_size,
            "--moe-shared-expert-intermediate-size with biases is not built",
            "--disable-bias-linear");
  v.require(tensor == 1 || a.parallel.sequence_parallel,
            cat("experts with --tensor-model-parallel-size ", tensor,
                " need --sequence-parallel: tensor ranks would send the same tokens"));
}

// --hybrid-context-parallel: ranks run different numbers of passes, each over a document.
void passes_are_documents(const Arguments& a, Violations& v) {
  const TransformerConfig& t = a.transformer;
  const int64_t ranks = a.parallel.expert_model_parallel_size * a.parallel.expert_tensor_size();
  v.require(ranks == 1,
            cat("--hybrid-context-parallel with experts on ", ranks,
                " ranks is not built: ranks run different numbers of passes, and each pass would "
                "exchange tokens with all of them"),
            "--expert-model-parallel-size 1 --expert-tensor-parallel-size 1");
  const bool balances = t.balance_coefficient("aux_loss") != 0 ||
                        t.balance_coefficient("seq_aux_loss") != 0 ||
                        t.balance_coefficient("global_aux_loss") != 0;
  v.require(
      !balances && !t.uses_sinkhorn() && !t.moe_expert_capacity_factor,
      "--hybrid-context-parallel with losses of balance, sinkhorn or a capacity is not built: "
      "these look at sequences, micro-batches or steps, and a pass is one document",
      "--moe-router-enable-expert-bias, --moe-z-loss-coeff");
  v.require(
      a.training.moe_routing_record.empty(),
      "--hybrid-context-parallel with --moe-routing-record is not built: documents are padded "
      "with rows that have no position of their own");
}

// What stands beside experts elsewhere and is not built with them.
void parts_are_built(const Arguments& a, Violations& v) {
  const TransformerConfig& t = a.transformer;
  const auto not_built = [&](bool given, const char* flag) {
    v.require(!given, cat(flag, " with --num-experts is not built yet"));
  };
  not_built(t.fp4_format != Fp4Format::kNone, "--fp4-format");
  if (a.parallel.hybrid_context_parallel) passes_are_documents(a, v);
}

// Parts of layers that are named exist in this model.
void named_parts_exist(const Arguments& a, Violations& v) {
  const TransformerConfig& t = a.transformer;
  v.require(!t.recomputes("shared_experts") || t.moe_shared_expert_intermediate_size,
            "--recompute-modules shared_experts needs --moe-shared-expert-intermediate-size");
  const bool only_experts =
      t.num_moe_layers(t.num_layers) == t.num_layers && !t.moe_shared_expert_intermediate_size;
  for (const char* module : {"mlp_fc1", "mlp_act", "mlp_fc2"})
    v.require(!only_experts || !is_named(t.offload_modules, module),
              cat("--offload-modules ", module, " has no effect: every layer has experts"),
              "expert_fc1, moe_act");
}

// A graph holds no work of the host: no exchange of counts, no draw for a step.
void graphs_hold_experts(const Arguments& a, Violations& v) {
  if (!a.training.uses_cuda_graphs()) return;
  v.require(a.parallel.expert_model_parallel_size == 1,
            cat("--cuda-graph-impl local with --expert-model-parallel-size ",
                a.parallel.expert_model_parallel_size,
                " is not built: a graph holds the work of one rank, and every layer exchanges rows "
                "with others"),
            "--expert-model-parallel-size 1, or no graphs");
  v.require(
      a.training.moe_routing_record.empty() && a.training.moe_routing_replay.empty(),
      "--cuda-graph-impl local with --moe-routing-record or --moe-routing-replay is not built: "
      "choices are read and written on the host",
      "leave one of them out");
  v.require(!a.transformer.moe_router_force_load_balancing,
            "--cuda-graph-impl local with --moe-router-force-load-balancing is not built: a graph "
            "would draw the same numbers in every step",
            "leave one of them out");
}

void dense_model_becomes_experts(const Arguments& a, Violations& v) {
  const TrainingConfig& run = a.training;
  const TransformerConfig& t = a.transformer;
  if (!run.moe_use_upcycling) return;
  v.require(
      (!run.load.empty() || !run.pretrained_checkpoint.empty()) && run.start != StartChoice::kFresh,
      "--moe-use-upcycling has no dense checkpoint to start from",
      "name it with --load, or with --pretrained-checkpoint");
  v.require(!run.save.empty(), "--moe-use-upcycling has no folder for the model with experts",
            "give --save");
  const int64_t parts = run.moe_upcycling_granularity;
  v.require(parts < 1 || t.num_experts % parts == 0,
            cat("--num-experts ", t.num_experts,
                " is not divisible by --moe-upcycling-granularity ", parts),
            cat("granularities that divide it: ", format_divisors(t.num_experts)));
  const auto not_built = [&](bool given, const char* flag, const char* why) {
    v.require(!given, cat(flag, " with --moe-use-upcycling is not built: ", why),
              "leave one of them out");
  };
  not_built(t.moe_shared_expert_intermediate_size.has_value(),
            "--moe-shared-expert-intermediate-size", "a dense model has no such expert");
  not_built(t.moe_latent_size.has_value(), "--moe-latent-size",
            "the MLP of a dense model reads no latents");
  not_built(run.task == "dpo", "--task dpo", "the reference model would be the dense one");
}

}  // namespace

void validate_experts(const Arguments& a, Violations& v) {
  if (!a.transformer.has_moe()) return only_experts_have_ranks(a, v);
  grids_fit(a, v);
  sizes_divide(a, v);
  parts_are_built(a, v);
  named_parts_exist(a, v);
  graphs_hold_experts(a, v);
  v.require(a.training.moe_routing_replay.empty() || !a.transformer.moe_router_force_load_balancing,
            "--moe-router-force-load-balancing has no effect with --moe-routing-replay",
            "leave one of them out");
  dense_model_becomes_experts(a, v);
  v.require(!a.training.save_tokens_per_expert_interval || !a.training.run_folder().empty(),
            "--save-tokens-per-expert-interval has no folder for metrics.jsonl",
            "give --run-dir or --save");
}

}  // namespace megatron
