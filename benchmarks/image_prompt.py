#!/usr/bin/env python3
"""Milliseconds from a JPEG of 640x480 to the first token of a reply, of the shape of LLaVA 1.5 7B with random weights in bf16.

    python benchmarks/image_prompt.py folder DIR      writes a config.json, an image processor and a tokenizer
    megatron serve DIR --load-format dummy --dtype bf16 --port 8123 --inference-max-seq-length 2048
    python benchmarks/image_prompt.py ours http://127.0.0.1:8123
    python benchmarks/image_prompt.py peer DIR [--mode layers|whole|eager]     LlavaForConditionalGeneration of transformers with SDPA
"""
import argparse
import base64
import http.client
import io
import json
import os
import shutil
import statistics
import time
import urllib.parse

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "golden", "multimodal")
IMAGE_TOKEN = 260  # of the tokenizer there
TEXT = "What is in this picture?"
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("kind", choices=["folder", "ours", "peer"])
parser.add_argument("place")
parser.add_argument("--mode", choices=["layers", "whole", "eager"], default="layers")
parser.add_argument("--runs", type=int, default=20)
ARGS = parser.parse_args()


def picture(seed):
    """A JPEG of noise in blocks: no two prompts have the same image."""
    import numpy
    from PIL import Image
    blocks = numpy.random.default_rng(seed).integers(0, 256, (30, 40, 3), dtype=numpy.uint8)
    out = io.BytesIO()
    Image.fromarray(blocks).resize((640, 480), Image.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()


def told(name, times):
    print(f"{name}: first token after {statistics.median(times):.2f} ms (median of {len(times)}; least {min(times):.2f})", flush=True)


def folder():
    with open(os.path.join(GOLDEN, "expansions.json"), encoding="utf-8") as file:
        facts = {row["family"]: row for row in json.load(file)}["llava"]
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": IMAGE_TOKEN, "image_seq_length": 576,
              "projector_hidden_act": "gelu", "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
              "multimodal_projector_bias": True, "tie_word_embeddings": False,
              "text_config": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
                              "num_key_value_heads": 32, "vocab_size": 32064, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
                              "rope_theta": 10000.0, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
                              "tie_word_embeddings": False},
              "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                                "num_attention_heads": 16, "image_size": 336, "patch_size": 14, "projection_dim": 768, "hidden_act": "quick_gelu",
                                "layer_norm_eps": 1e-5, "num_channels": 3}}
    processor = {**facts["processor"], "size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    os.makedirs(ARGS.place, exist_ok=True)
    for name, text in {"config.json": json.dumps(config), "preprocessor_config.json": json.dumps(processor),
                       "chat_template.jinja": facts["template"]}.items():
        with open(os.path.join(ARGS.place, name), "w", encoding="utf-8") as file:
            file.write(text)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(os.path.join(GOLDEN, "tokenizer", name), os.path.join(ARGS.place, name))


def ours():
    url, times = urllib.parse.urlparse(ARGS.place), []
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=120)
    for run in range(ARGS.runs + 3):
        image = "data:image/jpeg;base64," + base64.b64encode(picture(run)).decode()
        body = json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": TEXT}]}],
                           "max_tokens": 1, "temperature": 0})
        start = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        times.append(1e3 * (time.perf_counter() - start))
        if answer.status != 200:
            raise SystemExit(text.decode())
    told(f"over HTTP, {json.loads(text)['usage']['prompt_tokens']} tokens", times[3:])


def peer():
    import torch
    import transformers
    from PIL import Image
    config = transformers.AutoConfig.from_pretrained(ARGS.place)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.LlavaForConditionalGeneration._from_config(config, attn_implementation="sdpa").eval()
        torch.set_default_dtype(torch.float32)
    processor = transformers.AutoImageProcessor.from_pretrained(ARGS.place)
    if ARGS.mode == "layers":
        for module in model.modules():
            if type(module).__name__ in ("LlamaDecoderLayer", "CLIPEncoderLayer"):
                module.compile()
    function = torch.compile(model) if ARGS.mode == "whole" else model
    ids = torch.tensor([[1] + [IMAGE_TOKEN] * 576 + list(range(2, 52))])
    times, begun = [], time.time()
    with torch.inference_mode():
        for run in range(ARGS.runs + 3):
            image = picture(run)
            start = time.perf_counter()
            pixels = processor(images=Image.open(io.BytesIO(image)), return_tensors="pt")["pixel_values"].to("cuda", torch.bfloat16)
            out = function(input_ids=ids.cuda(), pixel_values=pixels, attention_mask=torch.ones_like(ids).cuda(), use_cache=True, logits_to_keep=1)
            out.logits[0, -1].argmax().item()
            times.append(1e3 * (time.perf_counter() - start))
            if run == 0:
                first = time.time() - begun
    told(f"transformers {transformers.__version__} ({ARGS.mode}, first call {first:.0f} s), {ids.shape[1]} tokens", times[3:])


{"folder": folder, "ours": ours, "peer": peer}[ARGS.kind]()
