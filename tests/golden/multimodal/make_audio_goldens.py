"""Writes the goldens of models that hear: for each case a folder with a tiny random model as `transformers` saves it (config.json,
model.safetensors, bf16; positions of voxtral in fp32) and golden.safetensors: the inputs, and what `transformers` computes in fp32 with eager
attention from the features of its WhisperFeatureExtractor:

  text [1, s], text_logits [1, s, v]   text alone
  tokens [b, s]                        samples with one sound and with several
  sounds [m, 4]                        of each sound: its sample, its length n, and a and c: sample t of it is |p - 32768| / 32768 - 0.5 with
                                       p = (a t + (t t mod 2^20) c / 4096) mod 65536, in integers
  logits [k, v], logit_places [k]      at these places of tokens, counted row by row: the first 40, the last 12 and every 16th
  prompt [p], generated [64]           the last sample up to its last sound and two tokens more, and its greedy tokens, whatever they are
  margin [1]                           the least difference of the two largest logits there
  loss [1], grad/<name>                mean cross entropy of the places whose label is a text token, and its gradient, by the names in the files, packed (../packed_gradients.py)
                                       (positions of the encoder are never trained)

Made with transformers 5.23.0, torch 2.11.0 (CPU), safetensors. Run: python make_audio_goldens.py [CASE]...
"""
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
from packed_gradients import packed  # noqa: E402

AUDIO = 39
QWEN2 = dict(model_type="qwen2", vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=1024, use_sliding_window=False, max_window_layers=2, tie_word_embeddings=False)
LLAMA = dict(model_type="llama", vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=2048, rms_norm_eps=1e-5)
CASES = {
    # One second and a sample less, of as many tokens; the shortest with a token; a row that only others attend to; a whole clip.
    "qwen2_audio": ("Qwen2Audio", dict(text_config=QWEN2, audio_token_index=AUDIO,
                                       audio_config=dict(num_mel_bins=80, d_model=8, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=20)),
                    [[480000], [15999, 321], [16000, 16001]]),
    # Clips of 30 s, whatever the length; a sound of two.
    "voxtral": ("Voxtral", dict(text_config=LLAMA, audio_token_id=AUDIO,
                                audio_config=dict(num_mel_bins=128, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)),
                [[1, 16000], [480001]]),
}


def sound(n, a, c):
    t = np.arange(n, dtype=np.int64)
    p = (a * t + (t * t % 2**20) * c // 4096) % 65536
    return (np.abs(p - 32768) / 32768 - 0.5).astype(np.float32)


def features(model, sounds):
    """What the model takes of sounds, and their numbers of tokens."""
    bins = model.config.audio_config.num_mel_bins
    extractor = transformers.WhisperFeatureExtractor(feature_size=bins)
    if model.config.model_type == "voxtral":
        clips, counts = [], []
        for one in sounds:
            out = extractor(one, sampling_rate=16000, padding=True, truncation=False, pad_to_multiple_of=480000, return_tensors="pt").input_features
            clips.append(out.reshape(bins, -1, 3000).transpose(0, 1))
            counts.append(375 * len(clips[-1]))
        return dict(input_features=torch.cat(clips)), counts
    out = extractor(sounds, sampling_rate=16000, return_attention_mask=True, padding="max_length", return_tensors="pt")
    frames = out.attention_mask.sum(-1)
    assert frames.tolist() == [-(-len(one) // 160) for one in sounds]
    return (dict(input_features=out.input_features, feature_attention_mask=out.attention_mask),
            (((frames - 1) // 2 + 1 - 2) // 2 + 1).tolist())


def table_name(name):
    for there, here in (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."), ("model.", "")):
        if name.startswith(there):
            return here + name[len(there):]
    return name


def make(name, family, settings, lengths, seed):
    """False: a choice of a greedy token is too close."""
    torch.manual_seed(seed)
    cls = getattr(transformers, family + "ForConditionalGeneration")
    model = cls(cls.config_class(**settings)).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            norm = key.endswith("weight") and p.dim() == 1
            p.copy_(torch.randn(p.shape) * (0.3 if p.dim() > 1 else 0.2) + (1.0 if norm else 0.0))
    folder = os.path.join(HERE, name)
    model.bfloat16()
    if name == "voxtral":
        model.model.audio_tower.embed_positions.float()
    model.save_pretrained(folder)
    model = cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    rows = [(i, n, 100 * seed % 997 + 317 * k, 11 + 2 * k) for k, (i, n) in
            enumerate((i, n) for i, sample in enumerate(lengths) for n in sample)]
    sounds = [sound(*row[1:]) for row in rows]
    inputs, counts = features(model, sounds)
    text = torch.randint(3, AUDIO, (1, 12))
    left = iter(counts)
    places = [[next(left) for _ in sample] for sample in lengths]
    s = (max(sum(sample) + 2 * len(sample) for sample in places) + 10) // 2 * 2  # two ranks divide it
    samples = []
    for i, sample in enumerate(places):
        words = torch.randint(3, AUDIO, (s,))
        at = 2 + i
        for n in sample:
            words[at:at + n] = AUDIO
            at += n + 2
        samples.append(words)
    tokens = torch.stack(samples)
    out = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **inputs)
    logits = out.logits
    last = tokens[-1]
    prompt = last[:int((last == AUDIO).nonzero().max()) + 3]
    clips = sum(places[-1]) // 375 if name == "voxtral" else len(places[-1])
    own = {key: value[-clips:] for key, value in inputs.items()}
    generated = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **own, max_new_tokens=64, min_new_tokens=64, do_sample=False,
                               eos_token_id=None, output_logits=True, return_dict_in_generate=True)
    margin = min(float(two[0] - two[1]) for two in (step[0].topk(2).values for step in generated.logits))
    generated = generated.sequences[0, len(prompt):]
    if margin < 1e-3 or len(set(generated.tolist())) < 5 or AUDIO in generated:
        return False
    labels = torch.cat([tokens[:, 1:], torch.randint(3, AUDIO, (tokens.shape[0], 1))], 1)
    labels = torch.where(labels == AUDIO, -100, labels)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    column = torch.arange(s)
    kept = ((column < 40) | (column >= s - 12) | (column % 16 == 0)).expand(len(tokens), s).flatten().nonzero().flatten()
    out = dict(text=text.int(), text_logits=model(input_ids=text, attention_mask=torch.ones_like(text)).logits, tokens=tokens.int(), labels=labels.int(),
               sounds=torch.tensor(rows, dtype=torch.int32), logits=logits.flatten(0, 1)[kept], logit_places=kept.int(), prompt=prompt.int(),
               generated=generated.int(), margin=torch.tensor([margin]), loss=loss.reshape(1))
    out |= {"grad/" + table_name(key): p.grad for key, p in model.named_parameters() if not key.endswith("embed_positions.weight")}
    save_file({key: value.detach().contiguous().clone() for key, value in packed(out).items()}, os.path.join(folder, "golden.safetensors"))
    for extra in os.listdir(folder):
        if extra not in ("config.json", "model.safetensors", "golden.safetensors"):
            os.remove(os.path.join(folder, extra))
    print(name, sum(p.numel() for p in model.parameters()), "parameters, loss", loss.item(), "margin", margin, "seed", seed, "s", s)
    return True


def mixed():
    """A language model with both encoders: that of qwen2_audio with its own, and encoder and projector of the golden llava. Images have token 38.
    Besides what the others have: pixels [n, 3, h, w] and images [n] (the sample of each)."""
    torch.manual_seed(3)
    load = dict(dtype=torch.float32, attn_implementation="eager")
    audio = transformers.Qwen2AudioForConditionalGeneration.from_pretrained(os.path.join(HERE, "qwen2_audio"), **load).eval()
    image = transformers.LlavaForConditionalGeneration.from_pretrained(os.path.join(HERE, "llava"), **load).eval()
    rows = [(0, 4321, 900, 21), (1, 16000, 500, 12)]
    sounds, images = [sound(*row[1:]) for row in rows], [0, 1, 1]
    inputs, counts = features(audio, sounds)
    heard = []
    audio.model.multi_modal_projector.register_forward_hook(lambda module, given, out: heard.append(out))
    audio.model(input_ids=torch.full((1, sum(counts)), AUDIO), attention_mask=torch.ones(1, sum(counts)), **inputs)
    heard = torch.cat([one[:n] for one, n in zip(heard[0], counts)])
    pixels = torch.randn(len(images), 3, 12, 12)
    seen = torch.cat(list(image.model.get_image_features(pixel_values=pixels).pooler_output))
    tokens = torch.randint(3, 38, (2, 60))
    tokens[0, 3:12] = tokens[1, 1:10] = tokens[1, 40:49] = 38
    tokens[0, 15:15 + counts[0]] = tokens[1, 12:12 + counts[1]] = AUDIO
    x = audio.model.language_model.embed_tokens(tokens)
    x = x.masked_scatter((tokens == 38)[..., None], seen).masked_scatter((tokens == AUDIO)[..., None], heard)
    logits = audio.lm_head(audio.model.language_model(inputs_embeds=x).last_hidden_state)
    labels = torch.cat([tokens[:, 1:], torch.randint(3, 38, (2, 1))], 1)
    labels = torch.where(labels >= 38, -100, labels)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    out = dict(tokens=tokens.int(), labels=labels.int(), pixels=pixels, images=torch.tensor(images).int(), sounds=torch.tensor(rows).int(), logits=logits,
               loss=loss.reshape(1))
    of_image = {"grad/" + table_name(key): p.grad for key, p in image.named_parameters() if "language_model" not in key and p.grad is not None}
    out |= {key.replace("multi_modal_projector", "of_images.multi_modal_projector"): value for key, value in of_image.items()}
    out |= {"grad/" + table_name(key): p.grad for key, p in audio.named_parameters() if not key.endswith("embed_positions.weight")}
    folder = os.path.join(HERE, "image_and_sound")
    os.makedirs(folder, exist_ok=True)
    save_file({key: value.detach().contiguous().clone() for key, value in packed(out).items()}, os.path.join(folder, "golden.safetensors"))
    print("image_and_sound, loss", loss.item())


if __name__ == "__main__":
    for index, (case, (kind, more, lengths)) in enumerate(CASES.items()):
        if not sys.argv[1:] or case in sys.argv[1:]:
            next(seed for seed in range(7 + index, 1000, 100) if make(case, kind, more, lengths, seed))
    if not sys.argv[1:] or "image_and_sound" in sys.argv[1:]:
        mixed()
