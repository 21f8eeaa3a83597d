#include "megatron/training/arguments/retro_rules.h"

#include <algorithm>

#include "megatron/base/format.h"
#include "megatron/models/retro/retro_config.h"

namespace megatron {

void RetroDataConfig::fields(FieldVisitor& v) {
  v.group("retro");
  v.role(FieldRole::kRun);
  v.field("retro_project_dir", retro_project_dir,
          "folder of the retrieval database and of what was found in it (megatron retro)");
}

void validate_neighbor_modules(const Arguments& a, Violations& v) {
  v.require(!a.transformer.recomputes("retro_encoder") || a.training.task == "retro",
            "--recompute-modules retro_encoder needs --task retro");
}

void validate_retro(const Arguments& a, Violations& v) {
  const auto& own = own_config<RetroConfig>(a.own);
  const TransformerConfig& t = a.transformer;
  const int64_t m = own.retro_chunk_length, tp = a.parallel.tensor_model_parallel_size;
  if (m <= 0 || t.num_layers <= 0) return;  // their own rules report it
  if (t.seq_length % m != 0)
    v.add(cat("--seq-length ", t.seq_length, " is no multiple of --retro-chunk-length ", m),
          cat("--seq-length ", (t.seq_length / m + 1) * m));
  const std::vector<int64_t> layers = own.layers(t.num_layers);
  if (layers.empty())
    v.add(cat("of --num-layers ", t.num_layers, " none reads neighbours: the first one is the 6th"),
          "more layers, or --retro-layers with their numbers");
  else if (layers.back() > t.num_layers)
    v.add(cat("--retro-layers names layer ", layers.back(), " of ", t.num_layers));
  if (a.parallel.context_parallel_size > 1)
    v.add(cat("--context-parallel-size above 1 with --task ", a.training.task,
              " is not built: chunks would lie on several ranks"),
          "leave one of them out");
  if (a.parallel.sequence_parallel && tp > 1 && m % tp != 0)
    v.add(cat("--retro-chunk-length ", m, " is not divisible by --tensor-model-parallel-size ", tp,
              ", which --sequence-parallel splits it over"),
          cat("--retro-chunk-length ", (m / tp + 1) * tp));
  if (t.position_embedding_type == PositionEmbedding::kLearnedAbsolute &&
      t.max_position_embeddings < own.retrieved_length())
    v.add(cat("--max-position-embeddings ", t.max_position_embeddings, " is below the ",
              own.retrieved_length(), " tokens of a neighbour, 2 x --retro-chunk-length"));
  if (a.data.reset_position_ids || a.data.reset_attention_mask ||
      a.data.dataloader_inter_document_masking)
    v.add(cat("--task ", a.training.task,
              " with --reset-position-ids, --reset-attention-mask or "
              "--dataloader-inter-document-masking is not built"),
          "leave them out");
  if (!a.data.mock_data && own_config<RetroDataConfig>(a.own).retro_project_dir.empty())
    v.add("--retro-project-dir is required", "the folder that megatron retro made for this run");
}

namespace {

// The longest chunk of which a sequence has three or, if there is none, two, and that `ranks`
// divide.
int64_t short_chunk(int64_t length, int64_t ranks) {
  for (const int64_t least : {3, 2, 1})
    for (int64_t m = length / least; m > 0; --m)
      if (length % m == 0 && m % ranks == 0) return m;
  return length;
}

}  // namespace

void shrink_retro(Arguments& a, const Arguments& before, Shrinker& shrinker) {
  auto& own = own_config<RetroConfig>(a.own);
  TransformerConfig& t = a.transformer;
  const int64_t tp = a.parallel.sequence_parallel ? a.parallel.tensor_model_parallel_size : 1;
  shrinker.set("--retro-chunk-length", own.retro_chunk_length, short_chunk(t.seq_length, tp));
  shrinker.set("--retro-num-neighbors", own.retro_num_neighbors,
               one_or_several(own.retro_num_neighbors));
  shrinker.set("--retro-encoder-num-layers", own.retro_encoder_num_layers,
               one_or_several(own.retro_encoder_num_layers));
  if (t.max_position_embeddings > 0)
    t.max_position_embeddings = std::max(t.max_position_embeddings, own.retrieved_length());
  const int64_t all = before.transformer.num_layers;
  const std::vector<int64_t> layers = own.layers(all);
  if (t.num_layers == all || layers.empty()) return;
  // The same share of the layers comes before the first one; the last one stays or does not stay
  // behind it.
  const auto place = [&](int64_t layer) {
    return std::clamp<int64_t>((layer * t.num_layers + all - 1) / all, 1, t.num_layers);
  };
  const int64_t first =
      std::min(place(layers.front()),
               layers.size() > 1 ? std::max<int64_t>(t.num_layers - 1, 1) : t.num_layers);
  own.retro_layers = {first};
  if (layers.size() > 1 && t.num_layers > first)
    own.retro_layers.push_back(std::max(first + 1, place(layers.back())));
  shrinker.keep_several("layers that read neighbours", std::ssize(layers),
                        std::ssize(own.retro_layers));
  shrinker.note(cat("--retro-layers ", listed(own.retro_layers, {}, " ")));
}

}  // namespace megatron
