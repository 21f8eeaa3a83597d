"""Routing, capacity, losses and bias by megatron-core's moe_utils, for
tests/unit/transformer/moe/routing_golden_test.cc.

Made with megatron-core 0.16.1 and torch 2.8.0 (CPU), Python 3.11:
    python tests/golden/moe/make_routing_golden.py > tests/golden/moe/routing_golden.json

The logits follow a formula that the test repeats, without ties; the gradient is that of
sum_ij c_ij probs_ij, c_ij = cos(0.3 i + j).
"""

import json

import torch
from megatron.core.transformer.moe import moe_utils

ROWS, EXPERTS = 10, 8
I = torch.arange(ROWS, dtype=torch.float64).unsqueeze(1)
J = torch.arange(EXPERTS, dtype=torch.float64).unsqueeze(0)
LOGITS = 2.0 * torch.sin(1.7 * I + 0.9 * J + 0.31 * I * J)
COEFFICIENTS = torch.cos(0.3 * I + J)
BIAS = 0.2 * torch.sin(torch.arange(EXPERTS, dtype=torch.float64))

ROUTINGS = {
    "after": dict(topk=2),
    "before": dict(topk=3, use_pre_softmax=True, scaling_factor=2.5),
    "sigmoid": dict(topk=3, score_function="sigmoid"),
    "sigmoid_one": dict(topk=1, score_function="sigmoid"),
    "sigmoid_biased": dict(topk=2, score_function="sigmoid", expert_bias=BIAS, scaling_factor=1.5),
    "grouped_before": dict(topk=4, use_pre_softmax=True, num_groups=4, group_topk=2),
    "grouped_biased": dict(topk=4, score_function="sigmoid", expert_bias=BIAS, num_groups=4, group_topk=2),
}


def numbers(tensor):
    return [round(x, 9) for x in tensor.detach().double().flatten().tolist()]


def routing(options):
    logits = LOGITS.clone().requires_grad_()
    probs, chosen = moe_utils.topk_routing_with_score_function(logits, **options)
    (probs * COEFFICIENTS).sum().backward()
    out = {"probs": numbers(probs), "grad": numbers(logits.grad)}
    # Not "position": which rows are first is left to torch.topk, all values being equal
    for factor in [0.5, 1.0]:
        kept, _ = moe_utils.apply_router_token_dropping(probs.detach(), chosen, options["topk"], factor, "probs")
        out[f"probs_{factor}"] = numbers(kept)
    return out


def losses(score_function):
    logits = LOGITS.clone().requires_grad_()
    chosen, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, 2, score_function)
    loss = moe_utils.switch_load_balancing_loss_func(scores, chosen.sum(0), ROWS, 2, EXPERTS, 0.3)
    loss.backward()
    return {"value": loss.item(), "grad": numbers(logits.grad)}


def z_loss():
    logits = LOGITS.clone().requires_grad_()
    loss = moe_utils.z_loss_func(logits, 0.3)
    loss.backward()
    return {"value": loss.item(), "grad": numbers(logits.grad)}


print(
    json.dumps(
        {
            "routings": {name: routing(options) for name, options in ROUTINGS.items()},
            "micro_softmax": losses("softmax"),
            "micro_sigmoid": losses("sigmoid"),
            "z": z_loss(),
            "sinkhorn": numbers(moe_utils.sinkhorn(LOGITS)),
        },
        separators=(",", ":"),
    )
)
