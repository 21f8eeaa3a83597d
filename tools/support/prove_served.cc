#include "tools/support/prove_served.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/comm/thread_backend.h"
#include "megatron/inference/evaluation/served_proof.h"
#include "megatron/interop/load_model.h"
#include "megatron/models/model_table.h"
#include "megatron/nn/forward_parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr int64_t kProofPositions = 40;
constexpr uint32_t kProofSeed = 5;
constexpr double kProofRankSeconds = 120.0;

// A model of one rank, or of one rank's part, with random weights in fp64.
struct ProofModel {
  ProofModel(const PretrainTask& task, const Arguments& arguments, const Vocabulary& vocabulary,
             const ParallelGroups& groups, const StageSlice& slice)
      : model(task.model_provider(arguments, vocabulary, groups, slice, {})),
        store(*model, at::kDouble, at::kCPU) {
    initialize_parameters(*model, kProofSeed, groups);
    store.place();
  }
  std::unique_ptr<Model> model;
  ForwardParameterStore store;
};

// The same model on these ranks alone.
Arguments served_arguments(const Arguments& arguments, int64_t tensor, int64_t stages) {
  Arguments a = serial_arguments(arguments);
  a.transformer.remove_quantization();
  a.parallel.tensor_model_parallel_size = tensor;
  a.parallel.pipeline_model_parallel_size = stages;
  a.world_size = tensor * stages;
  a.finalize();
  return a;
}

// Why a model is not served as it is trained on so many stages; "": it is.
std::string not_served(const Model& model, int64_t stages) {
  const TransformerConfig& t = model.config().transformer;
  const bool reads_input = model.sequence_input() == SequenceInputUse::kRequired;
  if (const ModelType& type = find_model_type(model.config().type); !type.decodes && !reads_input)
    return cat("serving: a model of type ", type.title, " is not served");
  if (reads_input && t.num_layers % stages != 0)
    return cat("serving: the stages of a server of two stacks have as many layers each, and ",
               stages, " do not divide ", t.num_layers);
  if (t.moe_expert_capacity_factor || t.moe_expert_rank_capacity_factor)
    return "serving: which tokens an expert drops depends on those beside them, and a server has "
           "others beside them";
  return "";
}

std::vector<ServedText> served_texts(const PretrainTask& task, const Arguments& a,
                                     const Vocabulary& vocabulary, const ModelConfig& config,
                                     const ServedWorkload& workload) {
  LocalLinks links(static_cast<int>(a.world_size));
  std::vector<ServedText> texts;
  run_ranks(
      static_cast<int>(a.world_size),
      [&](const std::shared_ptr<Backend>& world) {
        const ParallelGroups groups = make_parallel_groups(a.parallel, world);
        ProofModel own(task, a, vocabulary, groups,
                       served_slice(config, groups.pp.rank(), groups.pp.size()));
        std::vector<ServedText> got = serve_workload(*own.model, workload, links, world->rank());
        if (world->rank() == 0) texts = std::move(got);
      },
      kProofRankSeconds);
  return texts;
}

ProofLine line_of(const char* quantity, const ServedComparison::Line& line) {
  return {quantity, line.worst, line.compared, line.failed, line.difference, line.allowed};
}

}  // namespace

Proof prove_served(const PretrainTask& task, const Arguments& arguments) {
  Proof proof;
  proof.dtype = "fp64";
  proof.claim = "served as trained, up to the fp32 of log-probabilities";
  const int64_t tensor = arguments.parallel.tensor_model_parallel_size,
                stages = arguments.parallel.pipeline_model_parallel_size;
  const Arguments whole = served_arguments(arguments, 1, 1);
  const int64_t vocab = 61;
  const Vocabulary vocabulary{vocab, (vocab + 3 * tensor - 1) / tensor * tensor};
  const ParallelGroups one;
  ProofModel reference(task, whole, vocabulary, one,
                       StageLayout(whole.transformer.num_layers).slice(0, 0));
  if (std::string why = not_served(*reference.model, stages); !why.empty()) {
    proof.not_proved = {std::move(why)};
    return proof;
  }
  const bool reads_input = reference.model->sequence_input() == SequenceInputUse::kRequired;
  const int64_t length = whole.transformer.seq_length;
  const ServedWorkload workload = served_workload(vocab, std::min(kProofPositions, length),
                                                  kProofSeed, reads_input ? length : 0);
  try {
    const std::vector<ServedText> texts =
        served_texts(task, served_arguments(arguments, tensor, stages), vocabulary,
                     reference.model->config(), workload);
    const ServedComparison compared = compare_served(*reference.model, texts, kServedBand);
    proof.lines = {line_of("log-probability", compared.log_probabilities),
                   line_of("greedy tokens", compared.greedy_tokens)};
  } catch (const Error& error) {
    proof.faults.push_back(cat("serving: ", error.what()));
  }
  return proof;
}

}  // namespace megatron
