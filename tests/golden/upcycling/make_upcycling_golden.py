#!/usr/bin/env python3
"""Makes upcycling_golden.safetensors: MLPs of one layer, and the experts that megatron-core makes of them.

For each case: CASE/dense/{linear_fc1,linear_fc2}.{weight,bias}, CASE/experts/... [experts, ...], and CASE/router_row [experts]: the row
of the untouched router that each row of the upcycled one equals.

Ran with megatron-core 0.16.1 and torch 2.11.0. Usage: make_upcycling_golden.py
"""
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "torch_dist"))
import megatron_models as mm  # noqa: E402
import torch  # noqa: E402
from megatron.core.activations import squared_relu  # noqa: E402
from megatron.core.transformer.mlp import MLP, MLPSubmodules  # noqa: E402
from megatron.core.transformer.moe import upcycling_utils  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from megatron.core.transformer.moe.experts import SequentialMLP  # noqa: E402
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

HIDDEN, WIDTH = 4, 6
CASES = {  # width of an expert: 6
    "swiglu": dict(activation="swiglu", bias=False, experts=4, granularity=2, topk=2, pre_softmax=False),
    "swiglu_before": dict(activation="swiglu", bias=False, experts=6, granularity=3, topk=2, pre_softmax=True),
    "gelu": dict(activation="gelu", bias=True, experts=4, granularity=2, topk=4, pre_softmax=False),
    "squared_relu": dict(activation="squared_relu", bias=True, experts=4, granularity=2, topk=2, pre_softmax=True),
    "whole": dict(activation="swiglu", bias=True, experts=3, granularity=1, topk=2, pre_softmax=False),
}


class Block(torch.nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp


def make(case):
    functions = {"swiglu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu, "squared_relu": squared_relu}
    common = dict(num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, add_bias_linear=case["bias"], use_cpu_initialization=True,
                  gated_linear_unit=case["activation"] == "swiglu", activation_func=functions[case["activation"]],
                  bias_activation_fusion=False, gradient_accumulation_fusion=False)
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    dense = Block(MLP(TransformerConfig(**common, ffn_hidden_size=WIDTH * case["granularity"]), linears))
    config = TransformerConfig(**common, ffn_hidden_size=WIDTH, num_moe_experts=case["experts"], moe_router_topk=case["topk"],
                               moe_router_pre_softmax=case["pre_softmax"], moe_router_load_balancing_type="none",
                               moe_ffn_hidden_size=WIDTH, moe_token_dispatcher_type="allgather")
    sparse = Block(MoELayer(config, MoESubmodules(experts=ModuleSpec(module=SequentialMLP, submodules=linears), router=TopKRouter)))
    generator = torch.Generator().manual_seed(len(case["activation"]))
    for parameter in [*dense.parameters(), *sparse.parameters()]:
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    made = upcycling_utils.upcycle_state_dict([sparse], [dense])["model"]
    out = {}
    for name, value in dense.state_dict().items():
        if value is not None:
            out["dense/" + name.removeprefix("mlp.")] = value
    for name in [name.removeprefix("dense/") for name in out]:
        parts = [made[f"mlp.experts.local_experts.{e}.{name}"] for e in range(case["experts"])]
        out["experts/" + name] = torch.stack(parts)
    router = sparse.mlp.router.weight.data
    rows = [int((router == row).all(1).nonzero()[0]) for row in made["mlp.router.weight"]]
    out["router_row"] = torch.tensor(rows, dtype=torch.int32)
    return out


if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611", RANK="0", WORLD_SIZE="1")
    mm.start({})
    tensors = {f"{name}/{key}": value.contiguous().clone() for name, case in CASES.items() for key, value in make(case).items()}
    save_file(tensors, os.path.join(HERE, "upcycling_golden.safetensors"), metadata={"cases": json.dumps(CASES)})
