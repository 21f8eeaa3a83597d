"""Tiny GPT models of megatron-core on CPU ranks, for make_torch_dist_golden.py and check_torch_dist_export.py.

Ran with megatron-core 0.16.1 and torch 2.11.0, layers without Transformer Engine. megatron-core asks for a GPU in a few places
where it only waits for one or names it; those calls are replaced here.
"""
import argparse
import contextlib
import os
import socket
import subprocess
import sys

import torch

torch.cuda.synchronize = lambda *arguments, **named: None
torch.cuda.current_device = lambda: torch.device("cpu")
ones = torch.ones
torch.ones = lambda *sizes, **named: ones(*sizes, **{**named, "device": None})  # of masks

from megatron.core import parallel_state  # noqa: E402
from megatron.core.fusions.fused_bias_geglu import quick_gelu  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.transformer import multi_latent_attention  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.mlp import MLP  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.multi_latent_attention import MLASelfAttention  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402

# Taken to be there although Transformer Engine is absent.
moe_utils.te_general_gemm = None
multi_latent_attention.HAVE_TE = False
CudaRNGStatesTracker.fork = lambda *arguments, **named: contextlib.nullcontext()  # dropout is off

POSITIONS = 48
COMMON = dict(hidden_size=16, num_attention_heads=4, kv_channels=4, seq_length=POSITIONS, max_position_embeddings=POSITIONS,
              untie_embeddings_and_output_weights=True, position_embedding_type="rope", rotary_base=500, rotary_percent=1.0,
              normalization="RMSNorm", norm_epsilon=1e-5, add_bias_linear=False, add_qkv_bias=False, swiglu=True,
              apply_layernorm_1p=False, padded_vocab_size=64)
# Arguments of Megatron-LM, by its names.
MODELS = {
    # RMSNorm, gated MLP, groups of queries, QK norm, rotary positions on half of each head, a head of its own.
    "llama": dict(num_layers=3, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, group_query_attention=True, num_query_groups=2,
                  kv_channels=8, seq_length=POSITIONS, max_position_embeddings=POSITIONS, untie_embeddings_and_output_weights=True,
                  position_embedding_type="rope", rotary_base=500, rotary_percent=0.5, normalization="RMSNorm", norm_epsilon=1e-5,
                  add_bias_linear=False, add_qkv_bias=True, qk_layernorm=True, swiglu=True, apply_layernorm_1p=False, padded_vocab_size=72),
    # LayerNorm, biases, learned positions, tied.
    "gpt": dict(num_layers=2, hidden_size=24, ffn_hidden_size=96, num_attention_heads=3, group_query_attention=False, num_query_groups=1,
                kv_channels=8, seq_length=POSITIONS, max_position_embeddings=POSITIONS, untie_embeddings_and_output_weights=False,
                position_embedding_type="learned_absolute", rotary_base=10000, rotary_percent=1.0, normalization="LayerNorm",
                norm_epsilon=1e-5, add_bias_linear=True, add_qkv_bias=False, qk_layernorm=False, swiglu=False, apply_layernorm_1p=False,
                bias_gelu_fusion=False, padded_vocab_size=64),
    # Experts in every layer, whose tensors are stacked with the layers'; a gated shared expert; softmax over the chosen ones.
    "moe": dict(COMMON, num_layers=2, ffn_hidden_size=24, group_query_attention=True, num_query_groups=2, qk_layernorm=True,
                num_experts=4, moe_layer_freq=1, moe_ffn_hidden_size=12, moe_router_topk=2, moe_router_score_function="softmax",
                moe_router_pre_softmax=False, moe_shared_expert_intermediate_size=20, moe_shared_expert_gate=True),
    # Latent attention with YaRN, a dense first layer, sigmoid scores with a bias, groups, a shared expert, and a layer that
    # predicts the token after the next one.
    "mla": dict(COMMON, num_layers=2, ffn_hidden_size=24, group_query_attention=False, num_query_groups=1, qk_layernorm=True,
                multi_latent_attention=True, q_lora_rank=12, kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=12,
                rope_type="yarn", rotary_scaling_factor=4.0, mscale=1.0, mscale_all_dim=0.7, num_experts=4, moe_layer_freq=[0, 1],
                moe_ffn_hidden_size=12, moe_router_topk=2, moe_router_score_function="sigmoid", moe_router_pre_softmax=False,
                moe_router_topk_scaling_factor=1.5, moe_router_num_groups=2, moe_router_group_topk=1,
                moe_router_enable_expert_bias=True, moe_shared_expert_intermediate_size=12, moe_shared_expert_gate=False,
                mtp_num_layers=1),
    # Sinks, windows in every other layer, biases everywhere, experts with a bounded gate; kept one by one, gate and up apart.
    "gpt_oss": dict(COMMON, num_layers=2, ffn_hidden_size=12, group_query_attention=True, num_query_groups=2, qk_layernorm=False,
                    add_bias_linear=True, swiglu=False, quick_geglu=True, glu_linear_offset=1.0, activation_func_clamp_value=0.9,
                    softmax_type="learnable", window_size=(8, 0), window_attn_skip_freq=2, num_experts=4, moe_layer_freq=1,
                    moe_ffn_hidden_size=12, moe_router_topk=2, moe_router_score_function="softmax", moe_router_pre_softmax=False),
}
APART = {"gpt_oss"}  # saved with a tensor for each expert and half
MOE_ARGUMENTS = ("moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax",
                 "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias",
                 "moe_shared_expert_intermediate_size", "moe_shared_expert_gate")
MLA_ARGUMENTS = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type", "rotary_scaling_factor",
                 "mscale", "mscale_all_dim", "rotary_base")
# Ranks of one job, by what they divide.
RANKS = {"llama": {"tensor": 2}, "gpt": {}, "moe": {"expert": 2}, "mla": {"tensor": 2, "expert": 2},
         "gpt_oss": {"tensor": 2, "expert": 2}}


class LatentDotProductAttention(DotProductAttention):
    """Megatron's own needs Transformer Engine for values of another width than the keys'."""

    def __init__(self, *arguments, k_channels=None, v_channels=None, **named):  # built once without them
        super().__init__(*arguments, **named)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


# The names that layers of Transformer Engine store, for layers without it: {theirs: without}.
NORMS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
LATENT_NORMS = {"self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
                "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_"}


def use_names_of_transformer_engine(spec):
    latent = spec.submodules.self_attention.module is MLASelfAttention
    names = {**LATENT_NORMS} if latent else {"input_layernorm.": NORMS["input_layernorm."]}
    if spec.submodules.mlp.module is MLP:
        names["pre_mlp_layernorm."] = NORMS["pre_mlp_layernorm."]
    spec.submodules.sharded_state_dict_keys_map = names


def build(args, transformer_engine_names=False):
    latent, experts = args.get("multi_latent_attention", False), args.get("num_experts")
    further = {}
    if experts:
        further.update({name: args.get(name) for name in MOE_ARGUMENTS if args.get(name) is not None}, num_moe_experts=experts,
                       moe_router_dtype="fp32", moe_router_load_balancing_type="none", moe_token_dispatcher_type="allgather",
                       expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(), expert_tensor_parallel_size=1)
    if latent:
        further.update({name: args[name] for name in MLA_ARGUMENTS})
    config = (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=args["num_layers"], hidden_size=args["hidden_size"], ffn_hidden_size=args["ffn_hidden_size"],
        num_attention_heads=args["num_attention_heads"],
        num_query_groups=args["num_query_groups"] if args["group_query_attention"] else args["num_attention_heads"],
        kv_channels=args["kv_channels"], normalization=args["normalization"], layernorm_epsilon=args["norm_epsilon"],
        add_bias_linear=args["add_bias_linear"], add_qkv_bias=args["add_qkv_bias"], qk_layernorm=args["qk_layernorm"],
        gated_linear_unit=args["swiglu"] or args.get("quick_geglu", False),
        activation_func=torch.nn.functional.silu if args["swiglu"] else quick_gelu if args.get("quick_geglu") else torch.nn.functional.gelu,
        **{name: args[name] for name in ("glu_linear_offset", "activation_func_clamp_value", "softmax_type", "window_size",
                                         "window_attn_skip_freq") if name in args},
        layernorm_zero_centered_gamma=args["apply_layernorm_1p"], hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(), use_cpu_initialization=True,
        bias_activation_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        apply_rope_fusion=False, persist_layer_norm=False, mtp_num_layers=args.get("mtp_num_layers"), **further)
    if experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args["normalization"])
        layers = spec.layer_specs
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=args["qk_layernorm"], normalization=args["normalization"])
        layers = [spec]
    for layer in layers:
        if latent:
            layer.submodules.self_attention.submodules.core_attention = LatentDotProductAttention
        if transformer_engine_names:
            use_names_of_transformer_engine(layer)
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if args.get("mtp_num_layers") else None
    return GPTModel(config, spec, vocab_size=args["padded_vocab_size"], max_sequence_length=args["max_position_embeddings"],
                    position_embedding_type=args["position_embedding_type"], rotary_base=args["rotary_base"],
                    rotary_percent=args["rotary_percent"], parallel_output=False, mtp_block_spec=mtp,
                    share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"]).eval()


def logits(model, tokens):
    """Logits [s, v]; and the mean cross entropy of each layer of multi-token prediction."""
    ids, s, scores = torch.tensor([tokens]), len(tokens), []

    def capture(labels, values):  # first of the layers of multi-token prediction, then of the decoder
        scores.append(values[:, 0])
        return torch.zeros_like(labels, dtype=torch.float32)

    model.compute_language_model_loss = capture
    mask = torch.triu(torch.ones(1, 1, s, s, dtype=torch.bool), diagonal=1)
    with torch.no_grad():
        model(input_ids=ids, position_ids=torch.arange(s).unsqueeze(0), attention_mask=mask, labels=ids.roll(-1, 1))
    del model.compute_language_model_loss
    further = [torch.nn.functional.cross_entropy(values[:s - 2 - depth], ids[0, 2 + depth:]) for depth, values in enumerate(scores[:-1])]
    return scores[-1], further


def namespace(args, ranks):
    return argparse.Namespace(**{"num_experts": None, **args, "tensor_model_parallel_size": ranks.get("tensor", 1),
                                 "pipeline_model_parallel_size": 1, "expert_model_parallel_size": ranks.get("expert", 1),
                                 "softmax_type": args.get("softmax_type", "vanilla"), "params_dtype": torch.float32, "hidden_dropout": 0.0, "attention_dropout": 0.0})


def world(ranks):
    return max([1, *ranks.values()])


def start(ranks):
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks.get("tensor", 1),
                                             expert_model_parallel_size=ranks.get("expert", 1), expert_tensor_parallel_size=1)


def run_ranks(script, arguments, ranks):
    """Runs a script as ranks of one job, and waits."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        environment = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                           MASTER_PORT=str(port), OMP_NUM_THREADS="1")
        processes.append(subprocess.Popen([sys.executable, script, *arguments], env=environment))
    if any([process.wait() for process in processes]):
        sys.exit("a rank failed")
