#!/usr/bin/env python3
"""Makes the goldens of Megatron-LM's torch_dist checkpoints: NAME/iter_* as megatron-core writes them, and NAME/golden.safetensors
with the logits of its models.

Usage: make_torch_dist_golden.py [NAME ...]     (rewrites the folders of the same names next to it; default: all)

llama is saved by two tensor-parallel ranks, with states of an optimizer next to the weights; gpt by one rank, with the common state
as an object of the data files, as Megatron-LM writes it since July 2026; moe by two expert-parallel ranks; mla, which also has
mtp_losses, by two ranks that divide both experts and attention, and so gpt_oss, whose experts and halves are stored one by one.
"""
import os
import re
import shutil
import sys

import megatron_models as mm
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from safetensors.torch import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
ITERATION = {"llama": 5, "gpt": 0, "moe": 3, "mla": 7, "gpt_oss": 2}


def global_name(name, model):
    """With the index of an expert among all ranks'."""
    match = re.search(r"(.*local_experts\.)(\d+)(\..*)", name)
    if not match:
        return name
    local = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    return f"{match[1]}{int(match[2]) + local * parallel_state.get_expert_model_parallel_rank()}{match[3]}"


def fill(model):
    """Random weights that do not depend on the layout: drawn for the whole tensor, then cut."""
    tensors = [*model.named_parameters(), *((name, buffer) for name, buffer in model.named_buffers() if name.endswith("expert_bias"))]
    for name, parameter in tensors:
        whole_experts = "local_experts" in name  # not divided over tensor-parallel ranks
        tp = 1 if whole_experts else parallel_state.get_tensor_model_parallel_world_size()
        rank = 0 if whole_experts else parallel_state.get_tensor_model_parallel_rank()
        name = global_name(name, model)
        generator = torch.Generator().manual_seed(sum(name.encode()) * 7919 + len(name))
        split = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
        shape = list(parameter.shape)
        if split >= 0:
            shape[split] *= tp
        scale = 0.5 if model.config.num_moe_experts else 0.15
        value = torch.randn(shape, generator=generator) * scale + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
        if split >= 0:
            if "linear_fc1" in name and model.config.gated_linear_unit:  # each rank has rows of the gate, then rows of up
                halves = value.chunk(2, 0)
                value = torch.cat([half.chunk(tp, 0)[rank] for half in halves], 0)
            else:
                value = value.chunk(tp, split)[rank]
        parameter.data.copy_(value)


def rank_main(name):
    ranks = mm.RANKS[name]
    mm.start(ranks)
    args = mm.MODELS[name]
    model = mm.build(args)
    fill(model)
    root = os.path.join(HERE, name)
    directory = os.path.join(root, f"iter_{ITERATION[name]:07d}")
    first = torch.distributed.get_rank() == 0
    if first:
        shutil.rmtree(root, ignore_errors=True)
        os.makedirs(directory)
    torch.distributed.barrier()
    common = {"args": mm.namespace(args, ranks), "checkpoint_version": 3.0, "iteration": ITERATION[name]}
    state = {"model": model.sharded_state_dict(metadata={"singleton_local_shards": True} if name in mm.APART else None)}
    if name != "gpt":
        state.update(common)
    if name == "llama":
        state["optimizer"] = [ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.output_layer.weight", torch.zeros(4, 4),
                                                              (0, torch.distributed.get_rank(), mm.world(ranks)))]
        state["rng_state"] = ShardedObject("rng_state", {"seed": 1}, (1, 1), (0, 0), replica_id=torch.distributed.get_rank())
    if name == "gpt":
        state["common_state"] = ShardedObject("common_state", common, (1,), (0,))
    dist_checkpointing.save(state, directory)
    tokens = [(i * i * 5 + 3 * i + 1) % 60 for i in range(40)]
    result, further = mm.logits(model, tokens)
    if first:
        with open(os.path.join(directory, ".metadata"), "r+b") as stream:  # names the folder that it was written to
            text = stream.read()
            stream.seek(0)
            stream.write(text.replace(HERE.encode(), b"/" + b"x" * (len(HERE) - 1)))
        if name == "gpt":
            os.remove(os.path.join(directory, "common.pt"))
        with open(os.path.join(root, "latest_checkpointed_iteration.txt"), "w") as out:
            out.write(str(ITERATION[name]))
        golden = {"tokens": torch.tensor(tokens, dtype=torch.int32), "logits": result.contiguous()}
        if further:
            golden["mtp_losses"] = torch.stack(further)
        save_file(golden, os.path.join(root, "golden.safetensors"))
    torch.distributed.barrier()


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main(sys.argv[1])
    else:
        for model_name in sys.argv[1:] or mm.MODELS:
            mm.run_ranks(os.path.abspath(__file__), [model_name], mm.world(mm.RANKS[model_name]))
