#!/usr/bin/env python3
"""Makes the goldens of Megatron-LM's torch_dist checkpoints: NAME/iter_* as megatron-core writes them, and NAME/golden.safetensors
with the logits of its models.

Usage: make_torch_dist_golden.py     (rewrites the folders llama and gpt beside it)

llama is saved by two tensor-parallel ranks, with states of an optimizer beside the weights; gpt by one rank, with the common state
as an object of the data files, as Megatron-LM writes it since July 2026.
"""
import os
import shutil
import sys

import megatron_models as mm
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from safetensors.torch import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
RANKS = {"llama": 2, "gpt": 1}
ITERATION = {"llama": 5, "gpt": 0}


def fill(model):
    """Random weights that do not depend on the layout: drawn for the whole tensor, then cut."""
    tp, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in sorted(model.named_parameters()):
        generator = torch.Generator().manual_seed(sum(name.encode()) * 7919 + len(name))
        split = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
        shape = list(parameter.shape)
        if split >= 0:
            shape[split] *= tp
        value = torch.randn(shape, generator=generator) * 0.15 + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
        if split >= 0:
            if "linear_fc1" in name and model.config.gated_linear_unit:  # each rank has rows of the gate, then rows of up
                halves = value.chunk(2, 0)
                value = torch.cat([half.chunk(tp, 0)[rank] for half in halves], 0)
            else:
                value = value.chunk(tp, split)[rank]
        parameter.data.copy_(value)


def rank_main(name):
    mm.start(RANKS[name])
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
    common = {"args": mm.namespace(args, RANKS[name]), "checkpoint_version": 3.0, "iteration": ITERATION[name]}
    state = {"model": model.sharded_state_dict()}
    if name == "llama":
        state.update(common)
        state["optimizer"] = [ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.output_layer.weight", torch.zeros(4, 4),
                                                              (0, torch.distributed.get_rank(), RANKS[name]))]
        state["rng_state"] = ShardedObject("rng_state", {"seed": 1}, (1, 1), (0, 0), replica_id=torch.distributed.get_rank())
    else:
        state["common_state"] = ShardedObject("common_state", common, (1,), (0,))
    dist_checkpointing.save(state, directory)
    tokens = [(i * i * 5 + 3 * i + 1) % 60 for i in range(40)]
    result = mm.logits(model, tokens)
    if first:
        with open(os.path.join(directory, ".metadata"), "r+b") as stream:  # names the folder that it was written to
            text = stream.read()
            stream.seek(0)
            stream.write(text.replace(HERE.encode(), b"/" + b"x" * (len(HERE) - 1)))
        if name == "gpt":
            os.remove(os.path.join(directory, "common.pt"))
        with open(os.path.join(root, "latest_checkpointed_iteration.txt"), "w") as out:
            out.write(str(ITERATION[name]))
        save_file({"tokens": torch.tensor(tokens, dtype=torch.int32), "logits": result.contiguous()},
                  os.path.join(root, "golden.safetensors"))
    torch.distributed.barrier()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank_main(sys.argv[1])
    else:
        for model_name, ranks in RANKS.items():
            mm.run_ranks(os.path.abspath(__file__), [model_name], ranks)
