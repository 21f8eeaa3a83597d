#include "megatron/training/arguments/arguments.h"

#include <algorithm>
#include <bit>
#include <iterator>

#include "megatron/base/check.h"
#include "megatron/base/field_info.h"
#include "megatron/base/format.h"
#include "megatron/datasets/masked/bert_dataset.h"
#include "megatron/kernels/sum_parts.h"
#include "megatron/models/bert/bert_model.h"
#include "megatron/models/mimo/mimo_config.h"
#include "megatron/models/model_table.h"
#include "megatron/models/t5/t5_config.h"
#include "megatron/optimizer/optimizer_param_scheduler.h"
#include "megatron/pipeline_parallel/stage_layout.h"
#include "megatron/training/arguments/batch_invariant_rules.h"
#include "megatron/training/arguments/dpo_config.h"
#include "megatron/training/arguments/expert_rules.h"
#include "megatron/training/arguments/microbatches.h"
#include "megatron/training/arguments/mimo_rules.h"
#include "megatron/training/arguments/padding_rules.h"
#include "megatron/training/arguments/quantization_rules.h"
#include "megatron/training/arguments/retro_rules.h"
#include "megatron/training/arguments/t5_rules.h"
#include "megatron/training/arguments/task_heads.h"
#include "megatron/transformer/config/letters.h"
#include "megatron/transformer/config/lora.h"
#include "megatron/transformer/config/lora_modules.h"
#include "megatron/transformer/context_parallel/context_parallel.h"

namespace megatron {

namespace {

// -- rules that involve more than one struct, or more than one flag of the run

void batch_sizes_divide(const Arguments& a, Violations& v) {
  if (a.training.micro_batch_size <= 0 || a.transformer.seq_length <= 0) return;
  try {
    a.microbatches();
  } catch (const UsageError& error) {
    const std::string text = error.what();
    const size_t hint = text.find("\nhint: ");
    v.add(text.substr(0, hint), hint == std::string::npos ? "" : text.substr(hint + 7));
  }
}

void evaluation_batch_divides(const Arguments& a, Violations& v) {
  const int64_t ranks = a.data_parallel_size(), unit = a.eval_micro_batch_size() * ranks;
  if (unit <= 0 || a.eval_global_batch_size() % unit == 0) return;
  const TrainingConfig& t = a.training;
  const bool own_size = t.eval_global_batch_size.has_value(),
             own_micro = t.eval_micro_batch_size.has_value();
  // The training batch is not divisible either; its own rule reports that
  if (!own_size && !own_micro) return;
  v.add(cat(own_size ? "--eval-global-batch-size " : "--global-batch-size ",
            a.eval_global_batch_size(), own_size ? "" : ", also of evaluations,",
            " is not divisible by ", own_micro ? "--eval-micro-batch-size " : "--micro-batch-size ",
            a.eval_micro_batch_size(), ranks > 1 ? cat(" x ", ranks, " data-parallel ranks") : ""),
        cat("give a multiple of ", unit, own_size ? "" : " with --eval-global-batch-size"));
}

void data_is_given(const Arguments& a, Violations& v) {
  const DataConfig& d = a.data;
  if (!d.mock_data && d.data_path.empty() && d.data_args_path.empty() &&
      d.train_data_path.empty() && d.valid_data_path.empty() && d.test_data_path.empty() &&
      d.per_split_data_args_path.empty())
    v.add("no data is given", "--data-path PREFIX, --train-data-path PREFIX, or --mock-data");
}

void tokenizer_is_given(const Arguments& a, Violations& v) {
  if (a.tokenizer.tokenizer_type.empty())
    v.add("--tokenizer-type is not given",
          "for example HuggingFaceTokenizer, SentencePieceTokenizer, TikTokenizer, "
          "ByteLevelTokenizer or NullTokenizer");
}

void schedule_fits(const Arguments& a, Violations& v) {
  if (a.training.train_iters.has_value() == a.training.train_samples.has_value()) return;
  validate_schedule(
      a.optimizer,
      {a.training.train_iters, a.training.train_samples, a.training.global_batch_size.value_or(1)},
      v);
}

void preferences_are_data(const Arguments& a, Violations& v) {
  const DpoConfig none;
  const auto& given = own_config<DpoConfig>(a.own);
  const bool asked = given.dpo_beta != none.dpo_beta ||
                     given.dpo_label_smoothing != none.dpo_label_smoothing ||
                     given.dpo_sft_weight != none.dpo_sft_weight;
  if (asked && a.training.task != "dpo")
    v.add(
        "--dpo-beta, --dpo-label-smoothing or --dpo-sft-weight has no effect on other data than "
        "pairs of responses",
        "give --task dpo");
}

// Conversations are separated without the flags for documents.
void conversations_are_data(const Arguments& a, Violations& v) {
  const SftConfig none;
  const bool asked = !a.sft.chat_template.empty() ||
                     a.sft.sft_tokenizer_prompt_format != none.sft_tokenizer_prompt_format ||
                     a.sft.sft_loss_on != none.sft_loss_on ||
                     a.sft.sft_long_conversations != none.sft_long_conversations;
  if (!a.sft.sft && asked && a.training.task == "gpt")
    v.add(
        "--chat-template, --sft-tokenizer-prompt-format, --sft-loss-on or --sft-long-conversations "
        "has no effect on text",
        "give --sft, or --task sft");
  if (a.sft.sft &&
      (a.data.reset_position_ids || a.data.reset_attention_mask || a.data.eod_mask_loss))
    v.add(
        "--reset-position-ids, --reset-attention-mask or --eod-mask-loss has no effect on "
        "conversations",
        "leave it out: conversations are separated anyway, and --sft-loss-on selects the tokens of "
        "the loss");
}

// The flags whose values are not those of a new C.
template <class C>
std::vector<std::string> flags_given(C config) {
  C none;
  Config *const given[] = {&config}, *const defaults[] = {&none};
  const std::vector<FieldInfo> all = describe_fields(given), plain = describe_fields(defaults);
  std::vector<std::string> flags;
  for (size_t i = 0; i < all.size(); ++i)
    if (all[i].value != plain[i].value) flags.push_back(all[i].flags.front());
  return flags;
}

void images_are_read(const Arguments& a, Violations& v) {
  if (a.training.task == "mimo") return;
  std::vector<std::string> given = flags_given(own_config<MimoConfig>(a.own));
  std::ranges::copy(flags_given(own_config<MimoDataConfig>(a.own)), std::back_inserter(given));
  if (!given.empty())
    v.add(cat(listed(given), " has no effect with --task ", a.training.task),
          "leave it out, or give --task mimo");
}

// Samples of sentences are masked, and have neither documents inside nor their positions.
void masked_tokens_are_data(const Arguments& a, Violations& v) {
  const std::string& task = a.training.task;
  const bool masks = task == "bert" || task == "t5";
  MaskedDataConfig read = masks ? MaskedDataConfig() : a.masked;
  if (task == "t5") {
    read.mlm_replace = a.masked.mlm_replace;  // spans become sentinels
    read.bert_data = a.masked.bert_data;
  }
  std::vector<std::string> given = flags_given(read);
  if (task != "bert" && heads_of_task(task).empty())
    std::ranges::copy(flags_given(own_config<BertConfig>(a.own)), std::back_inserter(given));
  if (!trains_t5(task))
    std::ranges::copy(flags_given(own_config<T5Config>(a.own)), std::back_inserter(given));
  if (!given.empty())
    v.add(cat(listed(given), " has no effect with --task ", task),
          "leave it out, or give --task bert or t5");
  const bool one_document = masks || trains_t5(task) || !heads_of_task(task).empty();
  if (one_document &&
      (a.data.reset_position_ids || a.data.reset_attention_mask || a.data.eod_mask_loss))
    v.add(cat("--reset-position-ids, --reset-attention-mask or --eod-mask-loss has no effect with "
              "--task ",
              task),
          "leave it out: a sample is from one document");
}

void packed_text_is_built(const Arguments& a, Violations& v) {
  if (!a.packs_masked_text()) return;
  if (own_config<BertConfig>(a.own).bert_binary_head)
    v.add(
        "--bert-data packed with the binary head: packed samples have no two halves, whose order "
        "it predicts",
        "--bert-no-binary-head");
  if (a.parallel.hybrid_context_parallel)
    v.add("--bert-data packed with --hybrid-context-parallel is not built");
}

void learning_rate_is_given(const Arguments& a, Violations& v) {
  if (!a.optimizer.lr && !a.training.skip_train)
    v.add("--lr is not given", "for example --lr 3e-4");
}

void fp32_residual_needs_half_precision(const Arguments& a, Violations& v) {
  if (a.transformer.fp32_residual_connection && !a.optimizer.fp16 && !a.optimizer.bf16)
    v.add("--fp32-residual-connection has no effect in fp32",
          "give --bf16 or --fp16, or leave it out");
}

void background_save_needs_a_folder(const Arguments& a, Violations& v) {
  if (a.training.async_save && a.training.save.empty())
    v.add("--async-save is given without --save");
}

void retention_needs_a_folder(const Arguments& a, Violations& v) {
  if ((a.training.keep_last_checkpoints || a.training.save_retain_interval) &&
      a.training.save.empty())
    v.add("--keep-last-checkpoints or --save-retain-interval is given without --save");
}

void finetuning_has_its_own_folder(const Arguments& a, Violations& v) {
  if (a.training.finetune && !a.training.save.empty() && a.training.save == a.training.load)
    v.add(cat("--finetune would write into the folder it starts from, ", a.training.save),
          "give another --save");
}

void parameter_schedule_comes_from_one_place(const Arguments& a, Violations& v) {
  if (a.optimizer.override_opt_param_scheduler && a.optimizer.use_checkpoint_opt_param_scheduler)
    v.add("--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler are both given",
          "give one of them");
}

void adapter_has_a_base(const Arguments& a, Violations& v) {
  if (!a.training.adapter.empty() && a.transformer.lora_rank == 0)
    v.add(cat("--adapter ", a.training.adapter, " is given without its base model"),
          "--load or --pretrained-checkpoint with a folder of Hugging Face, or with a checkpoint "
          "and --use-checkpoint-args");
}

void adapters_of_modules_need_modules(const Arguments& a, Violations& v) {
  if (a.training.task == "mimo") return;
  for (const std::string& target : a.transformer.lora_targets)
    if (names_module(target))
      v.add(cat("--lora-targets ", target, " names a module, which models of --task mimo have"),
            "the name of a linear, for example linear_q");
}

// The nearest numbers to `value` that `divides` accepts, for hints of divisibility rules.
std::string nearest(int64_t value, bool (*divides)(int64_t candidate, int64_t unit), int64_t unit) {
  std::string text;
  for (int64_t distance = 1, found = 0; distance < value + unit && found < 4; ++distance)
    for (const int64_t candidate : {value - distance, value + distance}) {
      if (candidate < 1 || !divides(candidate, unit)) continue;
      text += cat(text.empty() ? "nearest that fit: " : ", ", candidate);
      ++found;
    }
  return text;
}

bool is_divisor(int64_t candidate, int64_t of) { return of % candidate == 0; }
bool is_multiple(int64_t candidate, int64_t of) { return candidate % of == 0; }

void world_divides(const Arguments& a, Violations& v) {
  const int64_t model = a.parallel.tensor_model_parallel_size *
                        a.parallel.pipeline_model_parallel_size * a.parallel.context_parallel_size;
  const int64_t encoder = a.encoder_ranks().count(), ranks = a.world_size - encoder;
  if (model < 1 || (ranks >= model && ranks % model == 0)) return;
  if (encoder > 0) {
    v.add(
        cat(a.world_size, " ranks, of which the encoders take ", encoder, ", leave ",
            std::max<int64_t>(ranks, 0), " for the language model, not a multiple of its ", model),
        cat("start ", encoder, " + a multiple of ", model, " ranks"));
    return;
  }
  v.add(cat(a.world_size, " ranks are not divisible by --tensor-model-parallel-size ",
            a.parallel.tensor_model_parallel_size, " x --pipeline-model-parallel-size ",
            a.parallel.pipeline_model_parallel_size, " x --context-parallel-size ",
            a.parallel.context_parallel_size, " = ", model),
        cat(nearest(a.world_size, is_multiple, model), " ranks"));
}

void instances_divide(const Arguments& a, Violations& v) {
  const int64_t ranks =
      a.data_parallel_size() * std::max<int64_t>(1, a.parallel.context_parallel_size);
  const int64_t instances = a.ddp.num_distributed_optimizer_instances;
  if (instances < 1 || ranks % instances == 0) return;
  v.add(cat("--num-distributed-optimizer-instances ", instances, " does not divide the ", ranks,
            " ranks of data and context"),
        nearest(instances, is_divisor, ranks));
}

// Heads, groups and features of a layer must be divisible by the tensor ranks.
void layer_divides(const Arguments& a, Violations& v) {
  const int64_t tp = a.parallel.tensor_model_parallel_size;
  const TransformerConfig& t = a.transformer;
  if (tp <= 1) return;
  const auto check = [&](const char* flag, int64_t value) {
    if (value > 0 && value % tp != 0)
      v.add(cat(flag, " ", value, " is not divisible by --tensor-model-parallel-size ", tp),
            cat("--tensor-model-parallel-size: ", nearest(tp, is_divisor, value), "; ", flag, ": ",
                nearest(value, is_multiple, tp)));
  };
  check("--num-attention-heads", t.num_attention_heads);
  check("--ffn-hidden-size", t.ffn_hidden_size);
  const int64_t groups = t.query_groups();
  if (t.qk_layernorm_over_heads && groups > 0 && groups < tp)
    v.add(cat("--qk-layernorm-over-heads with fewer --num-query-groups (", groups,
              ") than --tensor-model-parallel-size (", tp, ") is not built"),
          cat("--tensor-model-parallel-size: ", groups, " or a divisor of it"));
  if (groups > 0 && groups % tp != 0 && tp % groups != 0)
    v.add(cat("--num-query-groups ", groups, " and --tensor-model-parallel-size ", tp,
              " do not divide each other"),
          cat("--tensor-model-parallel-size: ", nearest(tp, is_divisor, groups)));
  // Ranks that share a KV group split all of its rows (queries, keys and values together) evenly.
  const int64_t rows = (t.num_attention_heads + 2 * groups) * t.kv_channels;
  if (groups > 0 && groups < tp && tp % groups == 0 && t.num_attention_heads % tp == 0 &&
      rows % tp != 0)
    v.add(cat("the ", rows, " rows of queries, keys and values (--num-attention-heads ",
              t.num_attention_heads, ", --num-query-groups ", groups, ", --kv-channels ",
              t.kv_channels, ") are not divisible by --tensor-model-parallel-size ", tp),
          cat("--tensor-model-parallel-size: ", nearest(tp, is_divisor, groups)));
}

// Ranks that share a KV group split its rows regardless of which are queries, so adapters of single
// parts do not fit.
void adapters_divide(const Arguments& a, Violations& v) {
  const int64_t tp = a.parallel.tensor_model_parallel_size, groups = a.transformer.query_groups();
  const size_t parts = lora_adapters(a.transformer, "linear_qkv").size();
  const bool whole =
      parts == 0 || parts == 3 || lora_adapters(a.transformer, "linear_qkv")[0] == "linear_qkv";
  if (whole || groups < 1 || groups % tp == 0) return;
  v.add(cat("--lora-targets with some of queries, keys and values, with --num-query-groups ",
            groups, " fewer than --tensor-model-parallel-size ", tp, ", is not built"),
        "--lora-targets linear_q linear_k linear_v, or linear_qkv");
}

// The tokens of one context rank must be divisible by the sequence-parallel ranks.
void sequence_divides(const Arguments& a, Violations& v) {
  const int64_t cp = a.parallel.context_parallel_size, tp = a.parallel.tensor_model_parallel_size;
  const int64_t s = a.transformer.seq_length;
  if (!a.parallel.sequence_parallel || cp < 1 || tp < 1 || s < 1 || s % (cp * tp) == 0) return;
  v.add(cat("--seq-length ", s, " is not divisible by --tensor-model-parallel-size ", tp,
            " x --context-parallel-size ", cp, ", which --sequence-parallel splits it over"),
        nearest(s, is_multiple, (cp > 1 ? 2 : 1) * cp * tp));
}

void saved_activations_can_be_distributed(const Arguments& a, Violations& v) {
  if (!a.transformer.distribute_saved_activations) return;
  if (a.parallel.tensor_model_parallel_size <= 1)
    v.add("--distribute-saved-activations has no effect at one tensor-parallel rank",
          "give --tensor-model-parallel-size, or leave it out");
  if (a.parallel.sequence_parallel)
    v.add(
        "--distribute-saved-activations has no effect with --sequence-parallel, which divides "
        "saved inputs already",
        "leave it out");
}

void copies_can_be_switched_off(const Arguments& a, Violations& v) {
  if (!a.ddp.peer_copies && a.ddp.strategy() == ShardingStrategy::kNoShard &&
      !a.parallel.sequence_parallel)
    v.add("--no-peer-copies has no effect here: no sharded optimizer and no sequence parallelism",
          "leave it out, or give --use-distributed-optimizer, --use-megatron-fsdp or "
          "--sequence-parallel");
}

void layers_are_offloaded_by_one_stage(const Arguments& a, Violations& v) {
  if (a.transformer.cpu_offloading_num_layers > 0 && a.parallel.pipeline_model_parallel_size > 1)
    v.add(
        "--cpu-offloading-num-layers counts the layers of one stage, but "
        "--pipeline-model-parallel-size is above 1",
        "give --fine-grained-activation-offloading with --offload-modules, which every stage "
        "follows");
}

// DPO keeps the two responses of a pair in one micro-batch, needs plain log-probabilities, and
// whole sequences at once.
void preferences_fit(const Arguments& a, Violations& v) {
  if (a.training.task != "dpo") return;
  const auto even = [&](const char* flag, int64_t size) {
    if (size % 2 == 0) return true;
    v.add(cat(flag, " ", size, " is odd, preference optimisation needs whole pairs"),
          "it counts sequences, two for each pair");
    return false;
  };
  if (even("--micro-batch-size", a.training.micro_batch_size))
    even("--eval-micro-batch-size", a.eval_micro_batch_size());
  if (a.transformer.z_loss_coeff != 0)
    v.add(
        "--z-loss-coeff cannot be used with --task dpo, whose loss needs plain log-probabilities");
  if (a.data.dataloader_type != DataloaderType::kSingle)
    v.add("--dataloader-type cyclic would split preference pairs", "single");
  if (a.data.reset_position_ids || a.data.reset_attention_mask ||
      a.data.dataloader_inter_document_masking)
    v.add(
        "--reset-position-ids, --reset-attention-mask and --dataloader-inter-document-masking "
        "have no effect on pairs, "
        "which are one document each");
  if (a.pipeline.pipeline_vocab_parallel)
    v.add("--pipeline-vocab-parallel with --task dpo is not built", "leave one of them out");
  if (a.parallel.hybrid_context_parallel)
    v.add("--hybrid-context-parallel with --task dpo is not built", "leave one of them out");
}

void fused_loss_knows_its_gradient(const Arguments& a, Violations& v) {
  if (a.transformer.cross_entropy_fusion_impl == CrossEntropyFusion::kLinear &&
      !a.training.calculate_per_token_loss)
    v.add("--cross-entropy-fusion-impl linear with --no-calculate-per-token-loss is not built",
          "leave one of them out");
  if (a.transformer.cross_entropy_fusion_impl == CrossEntropyFusion::kLinear &&
      a.pipeline.pipeline_vocab_parallel)
    v.add("--cross-entropy-fusion-impl linear with --pipeline-vocab-parallel is not built",
          "leave one of them out");
}

// A CUDA graph holds kernels of one rank without host work in between, on fixed memory.
void graphs_hold_whole_passes(const Arguments& a, Violations& v) {
  if (!a.training.uses_cuda_graphs()) return;
  const auto refuse = [&](const std::string& what) {
    v.add(cat("--cuda-graph-impl local with ", what, " is not built"), "leave one of them out");
  };
  if (a.parallel.pipeline_model_parallel_size > 1) refuse("--pipeline-model-parallel-size above 1");
  if (a.parallel.tensor_model_parallel_size > 1) refuse("--tensor-model-parallel-size above 1");
  if (a.parallel.context_parallel_size > 1) refuse("--context-parallel-size above 1");
  if (a.parallel.hybrid_context_parallel) refuse("--hybrid-context-parallel");
  if (a.training.task == "dpo") refuse("--task dpo");
  if (a.ddp.strategy() >= ShardingStrategy::kOptimGrads && a.data_parallel_size() > 1)
    refuse("sharded gradients");
  if (a.transformer.offloads_activations()) refuse("offloaded activations");
  if (a.transformer.fp8_format != Fp8Format::kNone) refuse("--fp8-format");
  if (a.training.timing_log_level > 1)
    refuse("--timing-log-level 2, which waits for the device in every pass,");
  if (a.training.device == DeviceChoice::kCpu)
    v.add("--cuda-graph-impl local needs a GPU, but --device is cpu", "leave one of them out");
}

void context_ranks_fit(const Arguments& a, Violations& v) {
  validate_context_parallel(a.transformer, a.parallel, v);
}

void layers_divide_over_stages(const Arguments& a, Violations& v) {
  validate_pipeline(a.pipeline, a.parallel.pipeline_model_parallel_size, a.transformer.num_layers,
                    v);
}

// Flags that --hybrid-context-parallel requires, and those it is not built with.
void documents_can_have_their_own_width(const Arguments& a, Violations& v) {
  if (!a.parallel.hybrid_context_parallel) return;
  const std::string flag = "--hybrid-context-parallel";
  const TransformerConfig& t = a.transformer;
  if (!a.data.reset_attention_mask && !a.data.dataloader_inter_document_masking)
    v.add(flag + " computes documents apart, but tokens see other documents of their sequence",
          "--reset-attention-mask or --dataloader-inter-document-masking");
  if (a.parallel.pipeline_model_parallel_size > 1)
    v.add(flag +
          " with --pipeline-model-parallel-size above 1 is not built: ranks run different numbers "
          "of passes");
  if (!a.training.calculate_per_token_loss)
    v.add(flag +
          " with --no-calculate-per-token-loss is not built: passes are documents, which have no "
          "mean of their own");
  if (a.ddp.strategy() >= ShardingStrategy::kOptimGrads)
    v.add(flag + " with sharded gradients is not built: ranks run different numbers of passes",
          "--use-distributed-optimizer");
  if (a.ddp.overlap_grad_reduce)
    v.add(flag +
          " with --overlap-grad-reduce is not built: ranks end their last pass at different times");
  if (t.attention_dropout > 0.0)
    v.add(flag + " with --attention-dropout above 0 is not built", "--attention-dropout 0");
  if (t.rope_scaling_type == RopeScaling::kLongRope)
    v.add(flag + " with --rope-scaling-type longrope is not built");
  for (int64_t layer = 1; layer <= t.num_layers; ++layer) {
    const ContextParallelType type = t.context_parallel_type(layer);
    if (type == ContextParallelType::kA2A || type == ContextParallelType::kA2AP2P) {
      v.add(flag + " with --cp-comm-type a2a or a2a+p2p is not built",
            "--cp-comm-type p2p or all_gather");
      break;
    }
    if (type == ContextParallelType::kP2P && !t.window(layer).empty() && t.window(layer)[0] >= 0) {
      v.add("--window-size cannot be used with the ring of --cp-comm-type p2p",
            "--cp-comm-type all_gather");
      break;
    }
  }
  const int64_t ranks =
      a.data_parallel_size() * std::max<int64_t>(1, a.parallel.context_parallel_size);
  const int64_t widest = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(ranks)));
  const int64_t most = a.parallel.max_seqlen_per_dp_cp_rank.value_or(t.seq_length);
  if (most > 0 && most * widest < t.seq_length)
    v.add(cat("a document may have --seq-length ", t.seq_length, " tokens, of which ", widest,
              " of the ", ranks, " ranks of data and context hold ", most * widest,
              " with --max-seqlen-per-dp-cp-rank ", most),
          cat("--max-seqlen-per-dp-cp-rank ", (t.seq_length + widest - 1) / widest));
}

void layouts_know_the_stacks(const Arguments& a, Violations& v) {
  const std::string& layout = a.pipeline.pipeline_model_parallel_layout;
  Violations others;
  layers_divide_over_stages(a, others);  // reports a layout that cannot be read
  const std::string& task = a.training.task;
  if (task != "mimo" && a.pipeline.account_for_encoder_in_pipeline_split > 0)
    v.add(cat("--account-for-encoder-in-pipeline-split has no effect with --task ", task),
          "leave it out: it counts encoders of images and sounds");
  if (layout.empty() || !others.empty()) return;
  if (task != "mimo" && count_layout_letters(layout, 'V') > 0)
    v.add(cat("--pipeline-model-parallel-layout \"", layout,
              "\" has V, encoders of images or sounds, which --task ", task, " has not"),
          "E as the first letter, or --task mimo");
  if (trains_t5(task) || task == "bert" || !heads_of_task(task).empty()) return;
  if (count_layout_letters(layout, 'e') > 0)
    v.add(cat("--pipeline-model-parallel-layout \"", layout,
              "\" has e, layers of an encoder, which --task ", task, " has not"),
          "t for each layer");
}

void tokens_ahead_can_be_predicted(const Arguments& a, Violations& v) {
  const TransformerConfig& t = a.transformer;
  const std::string& layout = a.pipeline.pipeline_model_parallel_layout;
  Violations others;
  layers_divide_over_stages(a, others);  // reports a layout that cannot be read
  const int64_t named = others.empty() && !layout.empty() ? count_layout_letters(layout, 'm') : 0;
  if (named > 0 && named != t.mtp_num_layers)
    v.add(cat("--pipeline-model-parallel-layout \"", layout, "\" has ", named,
              " m, --mtp-num-layers is ", t.mtp_num_layers),
          "as many m, directly before L, or none");
  if (t.mtp_num_layers <= 0) return;
  const int64_t tp = a.parallel.tensor_model_parallel_size;
  if (tp > 1 && t.hidden_size % tp != 0)
    v.add(cat("--mtp-num-layers needs --hidden-size ", t.hidden_size,
              " to be divisible by --tensor-model-parallel-size ", tp));
  if (a.training.task == "dpo")
    v.add("--mtp-num-layers with --task dpo is not built", "leave one of them out");
  if (a.parallel.hybrid_context_parallel)
    v.add(
        "--mtp-num-layers with --hybrid-context-parallel is not built: passes are documents, whose "
        "weights are not those of their sequences",
        "leave one of them out");
  if (a.pipeline.pipeline_vocab_parallel)
    v.add("--mtp-num-layers with --pipeline-vocab-parallel is not built", "leave one of them out");
  if (a.parallel.pipeline_model_parallel_size > 1 &&
      schedule_placement(a.pipeline.pipeline_schedule) == ChunkPlacement::kVShaped &&
      t.position_embedding_type == PositionEmbedding::kLearnedAbsolute)
    v.add(
        "--mtp-num-layers with learned positions is not built for schedules whose first and last "
        "segment are on one rank (--pipeline-schedule zb-v)",
        "--position-embedding-type rope, or another schedule");
}

void states_divide(const Arguments& a, Violations& v) {
  if (!a.transformer.is_given()) return;
  validate_letter_ranks(a.transformer, a.parallel.tensor_model_parallel_size, v);
}

// Models of other tasks have layers of their own.
void layers_of_a_pattern_can_be_trained(const Arguments& a, Violations& v) {
  if (!a.transformer.is_hybrid()) return;
  const std::string& task = a.training.task;
  if (trains_t5(task) || task == "bert" || !heads_of_task(task).empty())
    v.add(cat("--hybrid-layer-pattern with --task ", task, " is not built"),
          "leave one of them out");
}

void sections_turn_with_images(const Arguments& a, Violations& v) {
  if (!a.transformer.mrope_section.empty() && a.training.task != "mimo")
    v.add(cat("--position-embedding-type mrope has no effect with --task ", a.training.task,
              ": of tokens without images all three positions are the same"),
          "--position-embedding-type rope");
}

void stages_can_share_the_vocabulary(const Arguments& a, Violations& v) {
  if (!a.splits_vocabulary()) return;
  if (!a.transformer.untie_embeddings_and_output_weights)
    v.add(
        "--pipeline-vocab-parallel divides an output layer of its own over the stages, but the "
        "embedding's table is used",
        "--untie-embeddings-and-output-weights");
  const int64_t tp = a.parallel.tensor_model_parallel_size,
                pp = a.parallel.pipeline_model_parallel_size;
  const int64_t rows = a.tokenizer.padded_vocab_size.value_or(0), unit = tp * pp;
  if (rows > 0 && tp > 0 && rows % unit != 0)
    v.add(cat("--padded-vocab-size ", rows, " is not divisible by --tensor-model-parallel-size ",
              tp, " x --pipeline-model-parallel-size ", pp,
              ", which --pipeline-vocab-parallel divides it over"),
          nearest(rows, is_multiple, unit));
}

void microbatches_feed_the_pipeline(const Arguments& a, Violations& v) {
  const int64_t pp = a.parallel.pipeline_model_parallel_size;
  if (pp <= 1 || a.training.micro_batch_size < 1) return;
  Violations others;
  batch_sizes_divide(a, others);
  a.pipeline.validate(others);
  layers_divide_over_stages(a, others);
  if (!others.empty()) return;  // their own rules report it
  const StageLayout layout = make_stage_layout(a.pipeline, pp, a.transformer.num_layers);
  try {
    make_schedule(a.pipeline.pipeline_schedule,
                  a.pipeline.shape(pp, layout.num_chunks(), a.microbatches().num_microbatches(0)));
  } catch (const UsageError& error) {
    v.add(error.what());
  }
}

using Rule = void (*)(const Arguments&, Violations&);
constexpr Rule kRules[] = {world_divides,
                           instances_divide,
                           layer_divides,
                           adapters_divide,
                           adapters_of_modules_need_modules,
                           sequence_divides,
                           saved_activations_can_be_distributed,
                           copies_can_be_switched_off,
                           layers_are_offloaded_by_one_stage,
                           context_ranks_fit,
                           graphs_hold_whole_passes,
                           fused_loss_knows_its_gradient,
                           layouts_know_the_stacks,
                           tokens_ahead_can_be_predicted,
                           layers_of_a_pattern_can_be_trained,
                           states_divide,
                           validate_served_bits,
                           preferences_fit,
                           sections_turn_with_images,
                           stages_can_share_the_vocabulary,
                           documents_can_have_their_own_width,
                           microbatches_feed_the_pipeline,
                           validate_quantization,
                           validate_padding,
                           batch_sizes_divide,
                           evaluation_batch_divides,
                           data_is_given,
                           conversations_are_data,
                           preferences_are_data,
                           masked_tokens_are_data,
                           packed_text_is_built,
                           images_are_read,
                           layers_divide_over_stages,
                           validate_experts,
                           validate_neighbor_modules,
                           tokenizer_is_given,
                           schedule_fits,
                           learning_rate_is_given,
                           fp32_residual_needs_half_precision,
                           adapter_has_a_base,
                           background_save_needs_a_folder,
                           retention_needs_a_folder,
                           finetuning_has_its_own_folder,
                           parameter_schedule_comes_from_one_place};

bool is_resume(StartChoice start) {
  return start == StartChoice::kResume || start == StartChoice::kResumeOrFresh;
}

}  // namespace

std::vector<Config*> Arguments::configs() {
  std::vector<Config*> all = {&transformer, &tokenizer, &data, &sft, &masked};
  for (OwnConfig& config : own) all.push_back(config.config());
  all.insert(all.end(), {&optimizer, &parallel, &pipeline, &ddp, &comm, &training});
  return all;
}

std::vector<Config*> Arguments::model_configs() {
  std::vector<Config*> all = {&transformer, &tokenizer};
  for (const ModelType* type : model_types())
    for (OwnConfig& config : own)
      if (config.same_type(type->config)) all.push_back(config.config());
  return all;
}

EncoderRanks Arguments::encoder_ranks() const {
  if (training.task != "mimo") return {};
  const auto& mimo = own_config<MimoConfig>(own);
  return {mimo.encoder_tensor_model_parallel_size, mimo.encoder_data_parallel_size};
}

int64_t Arguments::data_parallel_size() const {
  const int64_t model = parallel.tensor_model_parallel_size *
                        parallel.pipeline_model_parallel_size * parallel.context_parallel_size;
  const int64_t ranks = world_size - encoder_ranks().count();
  return model >= 1 && ranks >= model && ranks % model == 0 ? ranks / model : 1;
}

int64_t Arguments::mailbox_part_bytes(int64_t type_bytes) const {
  const int64_t tp = parallel.tensor_model_parallel_size;
  if (!parallel.sequence_parallel || !ddp.peer_copies || tp > kMaxSumParts) return 0;
  return transformer.seq_length / (tp * parallel.context_parallel_size) *
         training.micro_batch_size * transformer.hidden_size * type_bytes;
}

int64_t Arguments::most_masked_by_bert() const {
  if (packs_masked_text())
    return most_masked(masked.masking(MaskedKind::kBert), transformer.seq_length);
  return megatron::most_masked_by_bert(masked.masking(MaskedKind::kBert), transformer.seq_length);
}

bool Arguments::packs_masked_text() const {
  return training.task == "bert" && masked.bert_data == BertData::kPacked;
}

void Arguments::finalize() {
  training.finalize();
  finalize_task(*this);
  transformer.finalize();
  pipeline.hybrid = transformer.is_hybrid();
  pipeline.hybrid_letters = transformer.hybrid_letters();
  pipeline.hybrid_segments = transformer.hybrid_segments();
  if (parallel.tensor_model_parallel_size == 1) parallel.sequence_parallel = false;
  if (training.step_batch_size_schedule.empty() && !training.global_batch_size &&
      training.micro_batch_size > 0)
    training.global_batch_size = training.micro_batch_size * data_parallel_size();
  if (training.load.empty() && is_resume(training.start)) training.load = training.save;
  if (training.skip_train || training.finetune) training.no_load_optim = true;
  if (sft.sft) training.task = "sft";
  sft.sft = training.task == "sft";
  if (packs_masked_text()) data.dataloader_inter_document_masking = true;
  if (sft.sft)
    data.dataloader_inter_document_masking = !data.reset_position_ids && !data.reset_attention_mask;
}

void Arguments::validate(Violations& violations) const {
  for (const Rule rule : kRules) rule(*this, violations);
  validate_task(*this, violations);
}

MicrobatchCalculator Arguments::microbatches() const {
  MicrobatchCalculator::Options options;
  options.micro_batch_size = training.micro_batch_size;
  options.data_parallel_size = data_parallel_size();
  options.decrease_if_needed = training.decrease_batch_size_if_needed;
  if (training.step_batch_size_schedule.empty()) {
    options.global_batch_size = training.global_batch_size.value_or(0);
  } else {
    options.schedule =
        parse_batch_size_schedule(training.step_batch_size_schedule, transformer.seq_length);
  }
  return MicrobatchCalculator(std::move(options));
}

int64_t Arguments::train_iters() const {
  if (training.train_iters) return *training.train_iters;
  return microbatches().iterations_of_samples(training.train_samples.value_or(0));
}

TrainLength Arguments::train_length() const {
  return {training.train_iters, training.train_samples, microbatches().global_batch_size(0)};
}

int64_t Arguments::eval_micro_batch_size() const {
  return training.eval_micro_batch_size.value_or(training.micro_batch_size);
}

int64_t Arguments::eval_global_batch_size() const {
  if (training.eval_global_batch_size) return *training.eval_global_batch_size;
  if (training.global_batch_size) {
    const int64_t unit = eval_micro_batch_size() * data_parallel_size();
    const bool round = training.decrease_batch_size_if_needed && unit > 0;
    return round ? *training.global_batch_size / unit * unit : *training.global_batch_size;
  }
  return eval_micro_batch_size() * data_parallel_size();
}

}  // namespace megatron
