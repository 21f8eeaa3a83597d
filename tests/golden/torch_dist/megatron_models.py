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

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

CudaRNGStatesTracker.fork = lambda *arguments, **named: contextlib.nullcontext()  # dropout is off

POSITIONS = 48
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
}


def build(args):
    config = TransformerConfig(
        num_layers=args["num_layers"], hidden_size=args["hidden_size"], ffn_hidden_size=args["ffn_hidden_size"],
        num_attention_heads=args["num_attention_heads"],
        num_query_groups=args["num_query_groups"] if args["group_query_attention"] else args["num_attention_heads"],
        kv_channels=args["kv_channels"], normalization=args["normalization"], layernorm_epsilon=args["norm_epsilon"],
        add_bias_linear=args["add_bias_linear"], add_qkv_bias=args["add_qkv_bias"], qk_layernorm=args["qk_layernorm"],
        gated_linear_unit=args["swiglu"], activation_func=torch.nn.functional.silu if args["swiglu"] else torch.nn.functional.gelu,
        layernorm_zero_centered_gamma=args["apply_layernorm_1p"], hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(), use_cpu_initialization=True,
        bias_activation_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        apply_rope_fusion=False, persist_layer_norm=False)
    spec = get_gpt_layer_local_spec(qk_layernorm=args["qk_layernorm"], normalization=args["normalization"])
    return GPTModel(config, spec, vocab_size=args["padded_vocab_size"], max_sequence_length=args["max_position_embeddings"],
                    position_embedding_type=args["position_embedding_type"], rotary_base=args["rotary_base"],
                    rotary_percent=args["rotary_percent"], parallel_output=False,
                    share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"]).eval()


def logits(model, tokens):
    ids = torch.tensor([tokens])
    s = len(tokens)
    mask = torch.triu(torch.ones(1, 1, s, s, dtype=torch.bool), diagonal=1)
    with torch.no_grad():
        return model(input_ids=ids, position_ids=torch.arange(s).unsqueeze(0), attention_mask=mask)[0]


def namespace(args, tp):
    return argparse.Namespace(**{**args, "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": 1, "num_experts": None,
                                 "softmax_type": "vanilla", "params_dtype": torch.float32, "hidden_dropout": 0.0})


def start(tp):
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)


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
