#!/usr/bin/env python3
"""Loads a checkpoint that `megatron convert-checkpoint --to torch_dist` wrote into a model of megatron-core, strictly, on one or
several ranks, and compares the logits and the losses of multi-token prediction.

Usage: check_torch_dist_export.py FOLDER PROBE.safetensors [tensor=N] [expert=N]

The layers are those without Transformer Engine, which needs a GPU; they ask for the names that its layers have.
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
    model = mm.build(args, transformer_engine_names=True)
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")]
    for tensor in [*model.parameters(), *buffers]:
        tensor.data.fill_(float("nan"))
    # Everything that is asked for must be there, and nothing else but the states of Transformer Engine's norms. Megatron calls
    # missing what nobody asks for, and unexpected what the checkpoint does not hold.
    state, missing, unexpected = dist_checkpointing.load({"model": model.sharded_state_dict()}, directory, strict=StrictHandling.RETURN_ALL)
    assert not unexpected, unexpected
    assert all("norm._extra_state" in key for key in missing), missing
    model.load_state_dict(state["model"], strict=True)
    golden = load_file(probe)
    expected = golden["logits"]
    actual, further = mm.logits(model, golden["tokens"].tolist())
    actual = actual[:, :expected.shape[1]]
    worst = ((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
    assert worst < 1e-4, worst
    assert len(further) == len(golden.get("mtp_losses", [])), further
    for loss, value in zip(further, golden.get("mtp_losses", [])):
        assert abs(loss - value) < 1e-5, (loss, value)
    if torch.distributed.get_rank() == 0:
        print(f"{folder}: iteration {common['iteration']}, {ranks or 'one rank'}: logits differ by {worst:.2g}, "
              f"{len(further)} further losses")


if __name__ == "__main__":
    sizes = {name: int(size) for name, size in (argument.split("=") for argument in sys.argv[3:])}
    if "RANK" in os.environ:
        main(sys.argv[1], sys.argv[2], sizes)
    else:
        mm.run_ranks(os.path.abspath(__file__), sys.argv[1:], mm.world(sizes))
