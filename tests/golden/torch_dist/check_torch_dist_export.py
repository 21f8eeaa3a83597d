#!/usr/bin/env python3
"""Loads a checkpoint that `megatron convert-checkpoint --to torch_dist` wrote into a model of megatron-core, strictly, on one or
several tensor-parallel ranks, and compares the logits.

Usage: check_torch_dist_export.py FOLDER PROBE.safetensors [RANKS]
"""
import os
import sys

import megatron_models as mm
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from safetensors.torch import load_file


def main(folder, probe, ranks):
    mm.start(ranks)
    with open(os.path.join(folder, "latest_checkpointed_iteration.txt")) as stream:
        directory = os.path.join(folder, f"iter_{int(stream.read()):07d}")
    common = dist_checkpointing.load_common_state_dict(directory)
    args = vars(common["args"])
    args["max_position_embeddings"] = args["max_position_embeddings"] or args["seq_length"]
    model = mm.build(args)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    # Everything that is asked for must be there, and nothing else but the states of Transformer Engine's norms. Megatron calls
    # missing what nobody asks for, and unexpected what the checkpoint does not hold.
    state, missing, unexpected = dist_checkpointing.load({"model": model.sharded_state_dict()}, directory, strict=StrictHandling.RETURN_ALL)
    assert not unexpected, unexpected
    assert all("norm._extra_state" in key for key in missing), missing
    model.load_state_dict(state["model"], strict=True)
    golden = load_file(probe)
    expected = golden["logits"]
    actual = mm.logits(model, golden["tokens"].tolist())[:, :expected.shape[1]]
    worst = ((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
    assert worst < 1e-4, worst
    if torch.distributed.get_rank() == 0:
        print(f"{folder}: iteration {common['iteration']}, {ranks} ranks: logits differ by {worst:.2g}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(sys.argv[1], sys.argv[2], int(os.environ["WORLD_SIZE"]))
    else:
        mm.run_ranks(os.path.abspath(__file__), sys.argv[1:3], int(sys.argv[3]) if len(sys.argv) > 3 else 1)
