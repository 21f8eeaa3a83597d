"""Writes the goldens of models that read images: for each case a folder with a tiny random model as `transformers` saves it (config.json,
model.safetensors, bf16) and golden.safetensors: the inputs, and what `transformers` computes in fp32 with eager attention:

  text [1, s], text_logits [1, s, v]   text alone
  tokens [b, s], pixels [n, 3, h, w]   samples with one image and with several; the pictures of all images
  images [m, 6]                        of each image: its sample, its pictures, rows and columns of its tiles, height and width (tiles alone; of qwen2_vl and
                                       qwen2_5_vl rows and columns of its patches, and pixels [patches, elements], as its processor orders them)
  logits [b, s, v]
  prompt [p], generated [64]           the last sample up to its last image and two tokens more, and its greedy tokens, whatever they are
  margin [1]                           the least difference of the two largest logits there
  loss [1], grad/<name>                mean cross entropy of the places whose label is a text token, and its gradient, by the names in the files, packed (../packed_gradients.py)

Made with transformers 5.23.0, torch 2.11.0 (CPU), safetensors. Run: python make_vision_goldens.py [CASE]...
"""
import os
import sys

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
from packed_gradients import packed  # noqa: E402

LLAMA = dict(model_type="llama", vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=128, rms_norm_eps=1e-5)
MISTRAL = dict(model_type="mistral", vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
               num_key_value_heads=1, head_dim=8, max_position_embeddings=128, sliding_window=None)
CLIP = dict(model_type="clip_vision_model", hidden_size=12, intermediate_size=20, num_hidden_layers=3, num_attention_heads=2, image_size=12,
            patch_size=4, projection_dim=8)
QWEN2 = dict(model_type="qwen2", vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128, use_sliding_window=False, max_window_layers=2)
GEMMA3 = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
              max_position_embeddings=128, query_pre_attn_scalar=8, sliding_window=5,
              layer_types=["sliding_attention", "full_attention", "sliding_attention"])
SIGLIP = dict(model_type="siglip_vision_model", hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, image_size=16,
              patch_size=4)
INTERNVIT = dict(hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, image_size=[16, 16], patch_size=[4, 4])
QWEN2_VL = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                max_position_embeddings=128, rope_parameters=dict(rope_type="default", rope_theta=100.0, mrope_section=[1, 1, 2]))
IMAGE = 39
CASES = {
    "llava": ("Llava", dict(text_config=LLAMA, vision_config=CLIP, image_token_index=IMAGE), [[1], [2]]),
    # The class row is kept, the last layer taken, the projector without biases.
    "llava_full": ("Llava", dict(text_config=MISTRAL, vision_config=CLIP | dict(num_hidden_layers=1, hidden_act="gelu"), image_token_index=IMAGE,
                                 vision_feature_select_strategy="full", vision_feature_layer=-1, multimodal_projector_bias=False),
                   [[1], [2]]),
    # Images whose padding is odd, along rows, along columns; in each of the grids.
    "llava_next": ("LlavaNext", dict(text_config=LLAMA, vision_config=CLIP, image_token_index=IMAGE,
                                     image_grid_pinpoints=[[12, 24], [24, 12], [24, 24], [12, 36]]),
                   [[(10, 17)], [(31, 9), (40, 33)], [(7, 61)]]),
    # Images of one tile, and of tiles with the whole image last.
    "internvl": ("InternVL", dict(text_config=QWEN2, vision_config=INTERNVIT, image_token_id=IMAGE, tie_word_embeddings=False), [[3], [1, 4]]),
    "internvl_biases": ("InternVL", dict(text_config=LLAMA | dict(tie_word_embeddings=True), image_token_id=IMAGE, tie_word_embeddings=True,
                                         vision_config=INTERNVIT | dict(attention_bias=True, hidden_act="gelu_pytorch_tanh")), [[1], [2]]),
    # Images of 4 tokens, and of 16: longer than the window, with SigLIP's head, which is not computed.
    "gemma3": ("Gemma3", dict(text_config=GEMMA3, vision_config=SIGLIP | dict(vision_use_head=False), image_token_index=IMAGE,
                              mm_tokens_per_image=4), [[1], [1, 1]]),
    "gemma3_long": ("Gemma3", dict(text_config=GEMMA3 | dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]),
                                   vision_config=SIGLIP | dict(num_hidden_layers=1), image_token_index=IMAGE, mm_tokens_per_image=16), [[1], [1, 1]]),
    # Images of their own sizes, given in patches; neither square nor alike.
    "qwen2_vl": ("Qwen2VL", dict(text_config=QWEN2_VL, image_token_id=IMAGE, video_token_id=38, vision_start_token_id=37, vision_end_token_id=36,
                                 vision_config=dict(depth=2, embed_dim=16, hidden_size=16, num_heads=2, mlp_ratio=2, patch_size=4)),
                 [[(4, 6)], [(2, 2), (6, 2)], [(2, 8)]]),
    # Windows of 2 x 2 merged cells: pictures of one window, of several that borders cut, of one row; the second layer attends to whole pictures.
    "qwen2_5_vl": ("Qwen2_5_VL", dict(text_config=QWEN2_VL, image_token_id=IMAGE, video_token_id=38, vision_start_token_id=37,
                                      vision_end_token_id=36,
                                      vision_config=dict(depth=3, hidden_size=16, out_hidden_size=16, num_heads=2, intermediate_size=20,
                                                         patch_size=4, window_size=16, fullatt_block_indexes=[1])),
                   [[(6, 10)], [(2, 2), (10, 2)], [(2, 6), (4, 6)]]),
}
# Of models whose choices are seldom close in make_generations.py; 7 and the number of the case without one.
FIRST_SEEDS = {"qwen2_vl": 12, "qwen2_5_vl": 12}


def table_name(name, model_type):
    beginnings = (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."), ("model.", ""))
    if model_type.startswith("qwen2"):
        beginnings = (("model.language_model.", "model."), ("model.visual.", "visual."))
    for there, here in beginnings:
        if name.startswith(there):
            return here + name[len(there):]
    return name


def see(model, images, token):
    """The pictures, what the model takes of them, the row of `images` of each image and its number of tokens."""
    vision, sizes = model.config.vision_config, [size for sample in images for size in sample]
    if model.config.model_type in ("qwen2_vl", "qwen2_5_vl"):
        rows = [[i, 1, *size, 0, 0] for i, sample in enumerate(images) for size in sample]
        still = torch.randn(sum(h * w for h, w in sizes), 3, 1, vision.patch_size, vision.patch_size)
        pixels = still.expand(-1, -1, 2, -1, -1).flatten(1).contiguous()
        grid = torch.tensor([[1, *size] for size in sizes])
        return pixels, dict(pixel_values=pixels, image_grid_thw=grid), rows, [h * w // 4 for h, w in sizes]
    side = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
    patch = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
    sample_of = [i for i, sample in enumerate(images) for _ in sample]
    if isinstance(sizes[0], int):  # pictures
        pixels = torch.randn(sum(sizes), 3, side, side)
        one = (side // patch) ** 2 + (getattr(model.config, "vision_feature_select_strategy", "") == "full")
        if model.config.model_type == "internvl":
            one //= 4
        if model.config.model_type == "gemma3":
            one = model.config.mm_tokens_per_image
        return pixels, dict(pixel_values=pixels), [[i, n, 0, 0, 0, 0] for i, n in zip(sample_of, sizes)], [n * one for n in sizes]
    grids = [get_anyres_image_grid_shape(size, model.config.image_grid_pinpoints, side) for size in sizes]
    counts = [1 + rows * columns for rows, columns in grids]
    pixels = torch.randn(sum(counts), 3, side, side)
    padded = torch.zeros(len(sizes), max(counts), 3, side, side)
    for row, part in zip(padded, pixels.split(counts)):
        row[:len(part)] = part
    inputs = dict(pixel_values=padded, image_sizes=torch.tensor(sizes))
    lengths = [len(one) for one in model.model.get_image_features(**inputs).pooler_output]
    return pixels, inputs, [[i, n, *grid, *size] for i, n, grid, size in zip(sample_of, counts, grids, sizes)], lengths


def types_of(model, tokens, token):
    """What Gemma 3 asks for beside the tokens."""
    key = {"gemma3": "token_type_ids", "qwen2_vl": "mm_token_type_ids", "qwen2_5_vl": "mm_token_type_ids"}.get(model.config.model_type)
    return {key: (tokens == token).long()} if key else {}


def generate(model, inputs, images, tokens, token):
    last, count = tokens[-1], len(images[-1])
    prompt = last[:int((last == token).nonzero().max()) + 3]
    if "image_grid_thw" in inputs:
        own = dict(pixel_values=inputs["pixel_values"][-sum(h * w for h, w in images[-1]):], image_grid_thw=inputs["image_grid_thw"][-count:])
    elif "image_sizes" in inputs:
        own = {key: value[-count:] for key, value in inputs.items()}
    else:
        own = dict(pixel_values=inputs["pixel_values"][-sum(images[-1]):])
    own |= types_of(model, prompt[None], token)
    out = model.generate(prompt[None], **own, max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None, output_logits=True,
                         return_dict_in_generate=True)
    margin = min(float(two[0] - two[1]) for two in (step[0].topk(2).values for step in out.logits))
    return prompt, out.sequences[0, len(prompt):], margin


def make(name, family, settings, images, seed):
    """False: a choice of a greedy token is too close."""
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
    token = IMAGE
    pixels, inputs, rows, lengths = see(model, images, token)
    text = torch.randint(3, IMAGE, (1, 12))
    counts = iter(lengths)
    places = [[next(counts) for _ in sample] for sample in images]
    s = (max(sum(sample) + 2 * len(sample) for sample in places) + 10) // 2 * 2  # two ranks divide it
    samples = []
    for i, sample in enumerate(places):
        words = torch.randint(3, IMAGE, (s,))
        at = 2 + i
        for n in sample:  # begins at another place in each sample
            words[at:at + n] = token
            at += n + 2
        samples.append(words)
    tokens = torch.stack(samples)
    logits = model(input_ids=tokens, **inputs, **types_of(model, tokens, token)).logits
    prompt, generated, margin = generate(model, inputs, images, tokens, token)
    if margin < 1e-3 or len(set(generated.tolist())) < 5 or token in generated:
        return False
    labels = torch.cat([tokens[:, 1:], torch.randint(3, IMAGE, (tokens.shape[0], 1))], 1)
    labels = torch.where(labels == token, -100, labels)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    out = dict(text=text.int(), text_logits=model(input_ids=text, **types_of(model, text, token)).logits, tokens=tokens.int(), labels=labels.int(), pixels=pixels,
               images=torch.tensor(rows, dtype=torch.int32), logits=logits,
               prompt=prompt.int(), generated=generated.int(), margin=torch.tensor([margin]), loss=loss.reshape(1))
    out |= {"grad/" + table_name(key, model.config.model_type): p.grad for key, p in model.named_parameters() if p.grad is not None}
    save_file({key: value.detach().contiguous().clone() for key, value in packed(out).items()}, os.path.join(folder, "golden.safetensors"))
    for extra in os.listdir(folder):
        if extra not in ("config.json", "model.safetensors", "golden.safetensors"):
            os.remove(os.path.join(folder, extra))
    print(name, sum(p.numel() for p in model.parameters()), "parameters, loss", loss.item(), "margin", margin)
    return True


if __name__ == "__main__":
    for index, (case, (kind, more, pictures)) in enumerate(CASES.items()):
        if not sys.argv[1:] or case in sys.argv[1:]:
            first = FIRST_SEEDS.get(case, 7 + index)
            next(seed for seed in range(first, 1000, 100) if make(case, kind, more, pictures, seed))
