"""Writes the goldens of models that read images: for each case a folder with a tiny random model as `transformers` saves it (config.json,
model.safetensors, bf16) and golden.safetensors: the inputs, and what `transformers` computes in fp32 with eager attention:

  text [1, s], text_logits [1, s, v]   text alone
  tokens [b, s], pixels [n, 3, h, w]   samples with one image and with several
  logits [b, s, v]
  loss [1], grad/<name>                mean cross entropy of the places whose label is a text token, and its gradient, by the names in the files

Made with transformers 5.23.0, torch 2.11.0 (CPU), safetensors. Run: python make_vision_goldens.py [CASE]...
"""
import os
import sys

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
LLAMA = dict(model_type="llama", vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=128, rms_norm_eps=1e-5)
MISTRAL = dict(model_type="mistral", vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
               num_key_value_heads=1, head_dim=8, max_position_embeddings=128, sliding_window=None)
CLIP = dict(model_type="clip_vision_model", hidden_size=12, intermediate_size=20, num_hidden_layers=3, num_attention_heads=2, image_size=12,
            patch_size=4, projection_dim=8)
IMAGE = 39
CASES = {
    "llava": ("Llava", dict(text_config=LLAMA, vision_config=CLIP, image_token_index=IMAGE), [[1], [2]]),
    # The class row is kept, the last layer taken, the projector without biases.
    "llava_full": ("Llava", dict(text_config=MISTRAL, vision_config=CLIP | dict(num_hidden_layers=1, hidden_act="gelu"), image_token_index=IMAGE,
                                 vision_feature_select_strategy="full", vision_feature_layer=-1, multimodal_projector_bias=False),
                   [[1], [2]]),
}


def table_name(name):
    for there, here in (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."), ("model.", "")):
        if name.startswith(there):
            return here + name[len(there):]
    return name


def features(model):
    config = model.config
    vision = config.vision_config
    return (vision.image_size // vision.patch_size) ** 2 + (config.vision_feature_select_strategy == "full")


def make(name, family, settings, images, seed):
    torch.manual_seed(seed)
    cls = getattr(transformers, family + "ForConditionalGeneration")
    model = cls(cls.config_class(**settings)).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            norm = key.endswith("weight") and p.dim() == 1
            p.copy_(torch.randn(p.shape) * (0.3 if p.dim() > 1 else 0.2) + (1.0 if norm else 0.0))
    folder = os.path.join(HERE, name)
    model.bfloat16().save_pretrained(folder)
    model = cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    token, n, s = settings["image_token_index"], features(model), 34
    count = sum(number for sample in images for number in sample)
    size = model.config.vision_config.image_size
    pixels = torch.randn(count, 3, size, size)
    text = torch.randint(3, IMAGE, (1, 12))
    samples = []
    for i, numbers in enumerate(images):
        words = torch.randint(3, IMAGE, (s,))
        at = 2 + i
        for number in numbers:
            for _ in range(number):  # neighbours of different samples begin at different places
                words[at:at + n] = token
                at += n + 1 + i
        samples.append(words)
    tokens = torch.stack(samples)
    logits = model(input_ids=tokens, pixel_values=pixels).logits
    labels = torch.cat([tokens[:, 1:], torch.randint(3, IMAGE, (tokens.shape[0], 1))], 1)
    labels = torch.where(labels == token, -100, labels)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    out = dict(text=text.int(), text_logits=model(input_ids=text).logits, tokens=tokens.int(), labels=labels.int(), pixels=pixels, logits=logits,
               loss=loss.reshape(1))
    out |= {"grad/" + table_name(key): p.grad for key, p in model.named_parameters() if p.grad is not None}
    save_file({key: value.detach().contiguous().clone() for key, value in out.items()}, os.path.join(folder, "golden.safetensors"))
    for extra in os.listdir(folder):
        if extra not in ("config.json", "model.safetensors", "golden.safetensors"):
            os.remove(os.path.join(folder, extra))
    print(name, sum(p.numel() for p in model.parameters()), "parameters, loss", float(loss))


if __name__ == "__main__":
    for index, (case, (kind, more, pictures)) in enumerate(CASES.items()):
        if not sys.argv[1:] or case in sys.argv[1:]:
            make(case, kind, more, pictures, 7 + index)
