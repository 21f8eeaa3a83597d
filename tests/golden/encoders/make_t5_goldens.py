"""Writes the goldens of T5 of Hugging Face: for each case a folder with a tiny random model (config.json, model.safetensors, bf16) and
golden.safetensors: the batch (input_ids, attention_mask [b, s_e], decoder_input_ids, labels [b, s_d] with -100 where no token is predicted),
and what `transformers` computes in fp32 with eager attention:

  logits [b, s_d, v]      0 where no token is predicted
  loss [1], grad/<name>   mean cross entropy of the labels, and its gradient, packed (../packed_gradients.py)
  generated [b, 64]       greedy tokens, whatever they are, from the id 0
  margin [1]              least difference of the two largest logits there

and buckets.json, the buckets that `transformers` gives distances. `transformers` 5 ties every head when it loads a model; the published
models of v1.1 have one of their own, as `t5_v1_1` here, whose head is set apart before anything is computed.

Made with transformers 5.23.0, torch 2.11.0 (CPU), safetensors. Run: python make_t5_goldens.py
"""
import json
import os
import sys

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from transformers.models.t5.modeling_t5 import T5Attention

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
from packed_gradients import packed  # noqa: E402

SMALL = dict(vocab_size=40, d_model=16, d_kv=6, d_ff=20, num_heads=4, num_layers=2, dropout_rate=0.0)
CASES = {
    "t5_v1_0": ("T5", dict(num_decoder_layers=2, feed_forward_proj="relu"), dict(), 140, 24),
    "t5_v1_1": ("T5", dict(num_decoder_layers=3, feed_forward_proj="gated-gelu", relative_attention_num_buckets=8, relative_attention_max_distance=12),
                dict(tie_word_embeddings=False), 30, 20),
    "mt5": ("MT5", dict(num_decoder_layers=1, feed_forward_proj="gated-gelu", relative_attention_num_buckets=16, relative_attention_max_distance=30),
            dict(), 40, 16),
}


def make(name, family, settings, saved, s_e, s_d, seed):
    torch.manual_seed(seed)
    cls = getattr(transformers, family + "ForConditionalGeneration")
    model = cls(cls.config_class(**(SMALL | settings))).eval()
    own_head = saved.get("tie_word_embeddings") is False
    if own_head:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
        model.config.scale_decoder_outputs = False
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * (0.4 if p.dim() > 1 else 0.2) + (1.0 if p.dim() == 1 else 0.0))
    model = model.bfloat16()
    folder = os.path.join(HERE, name)
    os.makedirs(folder, exist_ok=True)
    shared = {key: value for key, value in model.state_dict().items()
              if not key.endswith("embed_tokens.weight") and (own_head or key != "lm_head.weight")}
    save_file({key: value.contiguous().clone() for key, value in shared.items()}, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    config = json.loads(model.config.to_json_string()) | dict(architectures=[family + "ForConditionalGeneration"], decoder_start_token_id=0) | saved
    if saved:  # as folders of older versions of transformers
        del config["scale_decoder_outputs"]
    json.dump(config, open(os.path.join(folder, "config.json"), "w"), indent=2, sort_keys=True)
    model = model.float()
    model.set_attn_implementation("eager")
    b, lengths, targets = 3, [s_e, s_e - 9, s_e // 2], [s_d, s_d - 5, s_d // 2]
    mask = (torch.arange(s_e)[None] < torch.tensor(lengths)[:, None]).long()
    mask[0, 4] = 0
    ids = torch.where(mask == 1, torch.randint(2, SMALL["vocab_size"], (b, s_e)), 0)
    labels = torch.where(torch.arange(s_d)[None] < torch.tensor(targets)[:, None], torch.randint(1, SMALL["vocab_size"], (b, s_d)), -100)
    start = torch.cat([torch.zeros(b, 1, dtype=torch.long), labels[:, :-1].clamp_min(0)], 1)
    logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=start).logits
    loss = F.cross_entropy(logits.view(b * s_d, -1), labels.view(-1))
    loss.backward()
    tensors = dict(input_ids=ids, attention_mask=mask, decoder_input_ids=start, labels=labels)
    with torch.no_grad():
        out, margin = torch.zeros(b, 1, dtype=torch.long), float("inf")
        encoded = model.encoder(input_ids=ids, attention_mask=mask)
        for _ in range(64):
            last = model(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=out).logits[:, -1]
            top = last.topk(2).values
            margin = min(margin, (top[:, 0] - top[:, 1]).min().item())
            out = torch.cat([out, last.argmax(-1, keepdim=True)], 1)
    tensors["generated"] = out[:, 1:]
    print(name, "loss", loss.item(), "margin", margin, "distinct tokens", out.unique().numel())
    tensors = {key: value.int() for key, value in tensors.items()}
    tensors |= dict(logits=logits * (labels >= 0)[..., None], loss=loss.reshape(1), margin=torch.tensor([margin]))
    tensors |= {"grad/" + key: p.grad for key, p in model.named_parameters()}
    save_file({key: value.detach().contiguous().clone() for key, value in packed(tensors).items()}, os.path.join(folder, "golden.safetensors"))


def buckets():
    distances = [*range(-1100, 1101)]
    cases = []
    for both in (True, False):
        for count, most in ((32, 128), (32, 512), (16, 64), (64, 1024), (8, 12), (4, 7), (8, 7)):
            found = T5Attention._relative_position_bucket(torch.tensor(distances), both, count, most)
            # Each bucket where it begins, from the smallest distance on
            starts = [[d, b] for i, (d, b) in enumerate(zip(distances, found.tolist())) if i == 0 or b != found[i - 1]]
            cases.append(dict(bidirectional=both, buckets=count, max_distance=most, starts=starts))
    json.dump(dict(first=distances[0], last=distances[-1], cases=cases), open(os.path.join(HERE, "buckets.json"), "w"), separators=(",", ":"))


if __name__ == "__main__":
    buckets()
    for i, (case, (family, settings, saved, s_e, s_d)) in enumerate(CASES.items()):
        make(case, family, settings, saved, s_e, s_d, 31 + i)
