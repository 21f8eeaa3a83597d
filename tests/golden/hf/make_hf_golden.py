"""Writes the goldens of Hugging Face models: for each family a folder with a tiny random model as `transformers` loads it
(config.json in one of the two dialects, safetensors in one file or in two with an index) and golden.safetensors with what
`transformers` computes with it:

  tokens, logits_short [12, v]       the first 12 tokens alone, all positions
  logits_long [positions, v]         all tokens, at the positions of `positions`: beyond windows and scaling thresholds
  greedy [64]                        continuation of the first 8 tokens
  mtp_loss [1]                       mean cross entropy of the layer that predicts the token after the next one (first 40 tokens)
  second, logits_second              of models with states: a sequence that is computed in one batch with that of `tokens`, and its
                                     logits at the same positions
  gradient_tokens [2, s]             of such models: what the gradients are of, both sequences in one batch, in the place of 40 tokens
  grad/<name> [elements, 3]          gradient of the summed cross entropy of tokens[1:] given tokens[:-1] (first 40 tokens), packed
                                     (../packed_gradients.py)

Mixtures of experts are stored under the names that transformers writes, an expert at a time; the gradients have these names, too.

Weights are bf16 (the bias that balances experts fp32); all is computed in fp32, gradients in fp64, with eager attention.
Made with transformers 5.23.0, torch 2.11.0 (CPU), safetensors. Run: python make_hf_golden.py [case ...]
"""
import json
import os
import shutil
import sys
import tempfile

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel
from transformers.utils import logging

logging.disable_progress_bar()
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
from packed_gradients import packed  # noqa: E402

LENGTH, SHORT, PROMPT, GENERATED, GRADIENT = 72, 12, 8, 64, 40
POSITIONS = [0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 70, 71]

SMALL = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=128, bos_token_id=1, eos_token_id=2)
SQUARE = {**SMALL, "hidden_size": 32}  # families without a head_dim of their own
del SQUARE["head_dim"]
DEEPSEEK = {**SQUARE, "hidden_size": 16, "num_hidden_layers": 3, "num_key_value_heads": 4, "hidden_act": "silu", "rms_norm_eps": 1e-4,
            "moe_intermediate_size": 8, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1,
            "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "attention_bias": False,
            "tie_word_embeddings": False}
NEOX = {key: value for key, value in SMALL.items() if key not in ("num_key_value_heads", "head_dim")}

# Three chunks and more of 8 rows.
BAMBA = {**SQUARE, "hidden_size": 16, "num_hidden_layers": 3, "hidden_act": "silu", "rms_norm_eps": 1e-5, "mamba_expand": 2,
         "mamba_n_heads": 8, "mamba_d_state": 6, "mamba_d_conv": 4, "mamba_chunk_size": 8, "mamba_conv_bias": True,
         "mamba_proj_bias": False, "attention_bias": False, "pad_token_id": 0}
GRANITE = {"model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "shared_intermediate_size": 24,
           "num_local_experts": 0, "num_experts_per_tok": 0}

CASES = {
    # The dialect of transformers 4.
    "llama2": {**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5,
               "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False, "mlp_bias": False,
               "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.44.0", "pretraining_tp": 1},
    "llama3": {**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5,
               "rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                                   "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
               "tie_word_embeddings": True, "dtype": "bfloat16"},
    "mistral": {**SMALL, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_act": "silu",
                "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 9, "tie_word_embeddings": False,
                "torch_dtype": "bfloat16"},
    "qwen2": {**SQUARE, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu",
              "rms_norm_eps": 1e-6, "rope_theta": 1000.0, "rope_scaling": {"type": "linear", "factor": 2.5},
              "use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1, "tie_word_embeddings": True,
              "torch_dtype": "bfloat16"},
    "qwen3": {**SMALL, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6,
              "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0,
                                  "original_max_position_embeddings": 32},
              "use_sliding_window": False, "sliding_window": None, "max_window_layers": 2, "tie_word_embeddings": False,
              "dtype": "bfloat16"},
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 40, "n_embd": 16, "n_layer": 2,
             "n_head": 2, "n_positions": 80, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
             "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "bos_token_id": 2, "eos_token_id": 2,
             "torch_dtype": "bfloat16"},
    "gpt_neox": {**NEOX, "num_attention_heads": 2, "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"],
                 "hidden_act": "gelu", "layer_norm_eps": 1e-5, "rotary_pct": 0.5, "rotary_emb_base": 10000,
                 "use_parallel_residual": True, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    "gpt_neox_sequential": {**NEOX, "num_attention_heads": 2, "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"],
                            "hidden_act": "gelu", "layer_norm_eps": 1e-5, "use_parallel_residual": False,
                            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
                            "tie_word_embeddings": False, "dtype": "bfloat16"},
    "phi3": {**SQUARE, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5,
             "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 32,
             "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.5, 3.0, 6.0]},
             "sliding_window": None, "tie_word_embeddings": False, "pad_token_id": 2, "torch_dtype": "bfloat16"},
    "gemma2": {**SMALL, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"],
               "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 9,
               "query_pre_attn_scalar": 6, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "pad_token_id": 0,
               "torch_dtype": "bfloat16"},
    "gemma3": {**SMALL, "num_hidden_layers": 3, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"],
               "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
               "rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "sliding_window": 9,
               "sliding_window_pattern": 3, "query_pre_attn_scalar": 8, "pad_token_id": 0, "torch_dtype": "bfloat16"},
    "olmo2": {**SQUARE, "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6,
              "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "attention_bias": False,
              "tie_word_embeddings": False, "pad_token_id": 2, "dtype": "bfloat16"},
    "starcoder2": {**SQUARE, "model_type": "starcoder2", "architectures": ["Starcoder2ForCausalLM"],
                   "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "rope_theta": 1000.0, "sliding_window": 9,
                   "use_bias": True, "residual_dropout": 0.0, "embedding_dropout": 0.0, "tie_word_embeddings": True,
                   "torch_dtype": "bfloat16"},
    "mixtral": {**SMALL, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_act": "silu",
                "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2,
                "router_aux_loss_coef": 0.02, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    "qwen2_moe": {**SQUARE, "num_hidden_layers": 3, "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"],
                  "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000.0, "use_sliding_window": False,
                  "sliding_window": 4096, "max_window_layers": 28, "num_experts": 6, "num_experts_per_tok": 3,
                  "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12, "norm_topk_prob": False,
                  "decoder_sparse_step": 1, "mlp_only_layers": [1], "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    "qwen3_moe": {**SMALL, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu",
                  "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
                  "attention_bias": False, "use_sliding_window": False, "num_experts": 8, "num_experts_per_tok": 3,
                  "moe_intermediate_size": 8, "norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [],
                  "tie_word_embeddings": False, "dtype": "bfloat16"},
    "olmoe": {**SQUARE, "intermediate_size": 8, "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "hidden_act": "silu",
              "rms_norm_eps": 1e-5, "rope_theta": 500.0, "attention_bias": False, "clip_qkv": None, "num_experts": 6,
              "num_experts_per_tok": 2, "norm_topk_prob": False, "tie_word_embeddings": False, "pad_token_id": 2,
              "torch_dtype": "bfloat16"},
    "deepseek_v2": {**DEEPSEEK, "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": 12,
                    "num_experts_per_tok": 3, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
                    "norm_topk_prob": False, "scoring_func": "softmax", "routed_scaling_factor": 1.5, "rope_theta": 10000,
                    "rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 8, "beta_slow": 1, "mscale": 1.0,
                                     "mscale_all_dim": 0.5, "original_max_position_embeddings": 32}, "torch_dtype": "bfloat16"},
    # Without a latent of queries; with YaRN that has no mscale_all_dim.
    "deepseek_v2_lite": {**DEEPSEEK, "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None,
                         "num_hidden_layers": 2, "num_experts_per_tok": 3, "topk_method": "greedy", "norm_topk_prob": False,
                         "scoring_func": "softmax", "routed_scaling_factor": 1.0,
                         "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "beta_fast": 8.0,
                                             "beta_slow": 1.0, "mscale": 0.3, "original_max_position_embeddings": 32},
                         "dtype": "bfloat16"},
    "deepseek_v3": {**DEEPSEEK, "num_hidden_layers": 2, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
                    "q_lora_rank": 12, "num_experts_per_tok": 4, "topk_method": "noaux_tc", "n_group": 4, "topk_group": 2,
                    "n_shared_experts": 1, "norm_topk_prob": True, "scoring_func": "sigmoid", "routed_scaling_factor": 2.5,
                    "num_nextn_predict_layers": 1, "rope_theta": 10000,
                    "rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 8, "beta_slow": 1, "mscale": 1.0,
                                     "mscale_all_dim": 1.0, "original_max_position_embeddings": 32}, "torch_dtype": "bfloat16"},
    # Half rotated, biases of queries, keys and values, QK norm, sigmoid scores with a bias.
    "glm4_moe": {**SMALL, "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5,
                 "rope_theta": 1000.0, "rope_scaling": None, "partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": True,
                 "moe_intermediate_size": 8, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1,
                 "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
                 "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    # Sinks, windows in every other layer, biases everywhere, a limit of the gate that is often reached.
    "gpt_oss": {**SMALL, "intermediate_size": 12, "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_act": "silu",
                "rms_norm_eps": 1e-5, "rope_theta": 1000, "attention_bias": True, "sliding_window": 9, "num_local_experts": 4,
                "num_experts_per_tok": 2, "experts_per_token": 2, "swiglu_limit": 0.7, "initial_context_length": 32,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0, "truncate": False,
                                 "original_max_position_embeddings": 32},
                "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    # Mamba-2 alone: several chunks of the scan, one group.
    "mamba2": {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 3,
               "expand": 2, "num_heads": 8, "head_dim": 4, "state_size": 6, "n_groups": 1, "conv_kernel": 4, "chunk_size": 8,
               "hidden_act": "silu", "layer_norm_epsilon": 1e-5, "residual_in_fp32": True, "use_bias": False, "use_conv_bias": True,
               "rms_norm": True, "time_step_limit": [0.0, {"__float__": "Infinity"}], "tie_word_embeddings": False, "bos_token_id": 1,
               "eos_token_id": 2, "pad_token_id": 0, "torch_dtype": "bfloat16"},
    # Mamba-2 with two groups, attention without positions, squared ReLU.
    "nemotron_h": {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "vocab_size": 40, "hidden_size": 16,
                   "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "linear_attention", "mlp"],
                   "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
                   "mamba_num_heads": 8, "mamba_head_dim": 6, "ssm_state_size": 6, "n_groups": 2, "conv_kernel": 4, "chunk_size": 8,
                   "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5, "residual_in_fp32": False,
                   "use_bias": False, "mlp_bias": False, "attention_bias": False, "mamba_proj_bias": False, "use_conv_bias": True,
                   "time_step_limit": [0.0, {"__float__": "Infinity"}], "time_step_min": 1e-30, "sliding_window": None,
                   "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
                   "torch_dtype": "bfloat16"},
    # Mamba-2 with two groups, and attention that rotates half of a head; each before an MLP. Names of transformers 4.
    "bamba": {**BAMBA, "model_type": "bamba", "architectures": ["BambaForCausalLM"], "intermediate_size": 24, "attn_layer_indices": [1],
              "mamba_n_groups": 2, "mamba_d_head": "auto", "rope_theta": 1000.0, "partial_rotary_factor": 0.5, "z_loss_coefficient": 0.0,
              "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    # Multipliers that are no powers of 2, no positions, a tied table; then positions, two groups and limits of time steps.
    "granitemoehybrid": {**BAMBA, **GRANITE, "layer_types": ["mamba", "attention", "mamba"], "mamba_n_groups": 1, "mamba_d_head": 4,
                         "position_embedding_type": "nope", "attention_multiplier": 0.3, "logits_scaling": 1.5, "residual_multiplier": 0.7,
                         "embedding_multiplier": 3, "tie_word_embeddings": True, "torch_dtype": "bfloat16"},
    "granitemoehybrid_rope": {**BAMBA, **GRANITE, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                              "mamba_n_groups": 2, "mamba_d_head": 4, "position_embedding_type": "rope", "attention_multiplier": 0.0625,
                              "logits_scaling": 0.5, "residual_multiplier": 0.22, "embedding_multiplier": 1.25,
                              "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
                              "time_step_limit": [0.25, 0.9], "tie_word_embeddings": False, "dtype": "bfloat16"},
    # Gated delta nets with more value heads than key heads, gated attention, weights of norms from 1. Norms of small outputs have large
    # gradients, which the epsilon bounds: fp32 is then within 2e-5 of fp64, else 8e-4.
    "qwen3_5_text": {**SMALL, "num_hidden_layers": 4, "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"],
                     "hidden_act": "silu", "rms_norm_eps": 1e-2, "attention_bias": False, "max_position_embeddings": 256,
                     "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
                     "linear_conv_kernel_dim": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 6, "linear_num_key_heads": 2,
                     "linear_num_value_heads": 4,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
                     "tie_word_embeddings": False, "dtype": "bfloat16"},
}
# Models with states: the length of both sequences, and of those that gradients are of. The rule of a gated delta net has chunks of 64.
STATES = {"mamba2": (72, 40), "nemotron_h": (72, 40), "bamba": (72, 40), "granitemoehybrid": (72, 40), "granitemoehybrid_rope": (72, 40),
          "qwen3_5_text": (152, 140)}
EXPERTS = ("mixtral", "moe", "deepseek", "gpt_oss", "nemotron")  # in model_type: files have other names than the model
EAGER = dict(attn_implementation="eager", experts_implementation="eager")
SHARDED = {"llama2", "gpt_neox"}


def fill(model, seed):
    """Weights large enough that every part of the model shows in the logits."""
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            x = torch.randn(parameter.shape, generator=gen)
            is_norm = parameter.dim() == 1 and ("norm" in name or ".ln_" in name) and name.endswith("weight")
            zero_centered = "gemma" in model.config.model_type or ("qwen3_5" in model.config.model_type and "linear_attn" not in name)
            x = 0.3 * x + (0.0 if zero_centered else 1.0) if is_norm else 0.3 * x
            parameter.copy_(x.bfloat16().float())
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=gen))


def has_experts(model):
    return any(word in model.config.model_type for word in EXPERTS)


def as_written(model):
    """The tensors of the model under the names that transformers writes."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(os.path.join(folder, "model.safetensors"))


def add_mtp(tensors, layers, seed):
    """The layer behind the last one becomes one of multi-token prediction, as DeepSeek stores it."""
    gen, prefix = torch.Generator().manual_seed(seed), f"model.layers.{layers}."
    h = tensors["model.norm.weight"].numel()
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{name}.weight"] = (1 + 0.3 * torch.randn(h, generator=gen)).bfloat16()
    tensors[prefix + "eh_proj.weight"] = (0.3 * torch.randn(h, 2 * h, generator=gen)).bfloat16()
    tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()


def save_model(case, folder, model):
    tied = model.config.tie_word_embeddings
    tensors = as_written(model) if has_experts(model) else model.state_dict()
    tensors = {name: (tensor if name.endswith("e_score_correction_bias") else tensor.detach().bfloat16()).contiguous()
               for name, tensor in tensors.items() if not (tied and name == "lm_head.weight")}
    if "num_nextn_predict_layers" in CASES[case]:
        add_mtp(tensors, CASES[case]["num_hidden_layers"], seed=500)
    if case not in SHARDED:
        save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
        return
    if case == "gpt_neox":  # as published; transformers 5 calls it lm_head, as the other golden of this family does
        tensors["embed_out.weight"] = tensors.pop("lm_head.weight")
    names, weight_map = list(tensors), {}
    halves = (names[:len(names) // 2], names[len(names) // 2:])
    for i, part in enumerate(halves, 1):
        file = f"model-{i:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, os.path.join(folder, file), metadata={"format": "pt"})
        weight_map.update({name: file for name in part})
    size = sum(tensor.numel() * 2 for tensor in tensors.values())
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as out:
        json.dump({"metadata": {"total_size": size}, "weight_map": weight_map}, out, indent=2)


def write(path, value):
    with open(path, "w") as out:
        json.dump(value, out, indent=2)
        out.write("\n")


def mtp_loss(model, tokens):
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}.*"]  # where these layers are
    mtp = MtpModel.from_pretrained(model, **EAGER, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = model.model(tokens[None, :-2]).last_hidden_state
        embedded, positions = model.model.embed_tokens(tokens[None, 1:-1]), torch.arange(len(tokens) - 2)[None]
        causal = torch.full((len(tokens) - 2,) * 2, float("-inf")).triu(1)[None, None]
        hidden = mtp.layers[0](embedded, hidden, model.model.rotary_emb(hidden, positions), causal, positions, None)
        return F.cross_entropy(model.lm_head(hidden)[0], tokens[2:])[None]


def positions_of(tokens):
    return POSITIONS + [64 + 7 * i for i in range(2, (len(tokens) - 65) // 7 + 1)]


def golden(model, tokens, second, gradient_length):
    positions = positions_of(tokens)
    out = {"tokens": tokens.to(torch.int32), "positions": torch.tensor(positions, dtype=torch.int32)}
    with torch.no_grad():
        out["logits_short"] = model(tokens[None, :SHORT]).logits[0]
        out["logits_long"] = model(tokens[None]).logits[0, positions]
        if second is not None:
            out["second"] = second.to(torch.int32)
            out["logits_second"] = model(torch.stack([tokens, second])).logits[1, positions]
    # Steps of a Mamba-2 in transformers heed no limits of time steps, as the whole sequence does.
    cached = list(getattr(model.config, "time_step_limit", None) or [0.0, float("inf")]) == [0.0, float("inf")]
    generated = model.generate(tokens[None, :PROMPT], max_new_tokens=GENERATED, min_new_tokens=GENERATED, do_sample=False,
                               eos_token_id=None, output_logits=True, return_dict_in_generate=True, use_cache=cached)
    # A choice that rounding could turn over would prove nothing.
    margin = min(float((t := step[0].topk(2).values)[0] - t[1]) for step in generated.logits)
    out["greedy"] = generated.sequences[0, PROMPT:].to(torch.int32)
    part = tokens[:gradient_length]
    if getattr(model.config, "num_nextn_predict_layers", 0) > 0:
        out["mtp_loss"] = mtp_loss(model, part)
    model.double()
    batch = part[None]
    if second is not None:
        batch = torch.stack([part, second[:gradient_length]])
        out["gradient_tokens"] = batch.to(torch.int32)
    F.cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    if has_experts(model):
        for parameter in model.parameters():
            parameter.data.copy_(parameter.grad)
        grads = {name: grad for name, grad in as_written(model).items() if not name.endswith("e_score_correction_bias")}
    return packed(out | {"grad/" + name: grad.flatten() for name, grad in grads.items()}), margin


def make(case):
    folder = os.path.join(HERE, case)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    write(os.path.join(folder, "config.json"), CASES[case])
    write(os.path.join(folder, "generation_config.json"), {"bos_token_id": 1, "eos_token_id": 2})
    for seed in range(100):
        config = AutoConfig.from_pretrained(folder)
        if "num_nextn_predict_layers" in CASES[case]:
            config.num_hidden_layers += 1
        model = AutoModelForCausalLM.from_config(config, **EAGER, dtype=torch.float32)
        fill(model, seed)
        save_model(case, folder, model)
        # What counts is the folder as transformers reads it.
        model = AutoModelForCausalLM.from_pretrained(folder, **EAGER, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None
        # Not the first ids: transformers computes no gradient for the embedding of the padding token.
        length, gradient = STATES.get(case, (LENGTH, GRADIENT))
        gen = torch.Generator().manual_seed(1000 + seed)
        tokens = torch.randint(3, config.vocab_size, (length,), generator=gen)
        second = torch.randint(3, config.vocab_size, (length,), generator=gen) if case in STATES else None
        out, margin = golden(model, tokens, second, gradient)
        if margin > 1e-3 and len(set(out["greedy"].tolist())) > 4:
            break
    save_file({name: tensor.contiguous() for name, tensor in out.items()}, os.path.join(folder, "golden.safetensors"))
    print(f"{case}: seed {seed}, margin {margin:.2e}, {len(set(out['greedy'].tolist()))} tokens in 64, "
          f"{sum(p.numel() for p in model.parameters())} parameters")


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        make(case)
