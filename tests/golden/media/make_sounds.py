#!/usr/bin/env python3
"""Writes sounds.json: small sound files with the samples that they hold, and Whisper's features of generated clips.

Made with soundfile 0.14 (libsndfile 1.2.2), transformers 5.23.0, numpy 2.4 (torch is not needed). Run: python make_sounds.py
"""

import base64
import io
import json
import pathlib
import zlib

import numpy as np
import soundfile
import transformers
from transformers import WhisperFeatureExtractor

assert transformers.__version__ == "5.23.0"
RATE = 16000


def chirp(samples):
    t = np.arange(samples) / RATE
    return 0.5 * np.sin(2 * np.pi * 440 * t) + 0.25 * np.sin(2 * np.pi * (1000 + 500 * t) * t)


def noise(samples):
    """The middle bits of a linear congruential generator, -1 to 1."""
    state, out = 1, np.empty(samples)
    for i in range(samples):
        state = (state * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        out[i] = (state >> 40) / 2**23 - 1
    return out


files = []
for format, subtype in (("WAV", "PCM_U8"), ("WAV", "PCM_16"), ("WAV", "PCM_24"), ("WAV", "PCM_32"), ("WAV", "FLOAT"), ("WAV", "DOUBLE"),
                        ("WAVEX", "PCM_16"), ("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("OGG", "VORBIS")):
    out = io.BytesIO()
    soundfile.write(out, 0.7 * chirp(500), RATE, format=format, subtype=subtype)
    samples, rate = soundfile.read(io.BytesIO(out.getvalue()), dtype="float32")
    files.append({"name": f"{format} {subtype}", "file": base64.b64encode(out.getvalue()).decode(), "samples": len(samples),
                  "crc": zlib.crc32(samples.tobytes()), "some": [float(x) for x in samples[::50]]})
for name, rate, channels in (("44.1 kHz", 44100, 1), ("stereo", RATE, 2)):
    out = io.BytesIO()
    soundfile.write(out, np.zeros((10, channels)), rate, format="WAV", subtype="PCM_16")
    files.append({"name": name, "file": base64.b64encode(out.getvalue()).decode()})

features = []
for name, clip in (("chirp", chirp(RATE)), ("noise", noise(5000)), ("long", np.tile(chirp(RATE), 30)), ("short", noise(1)), ("silence", np.zeros(RATE))):
    for mels in (80, 128):
        extractor = WhisperFeatureExtractor(feature_size=mels)
        made = extractor(clip.astype(np.float32), sampling_rate=RATE, return_tensors="np")["input_features"][0]
        assert made.shape == (mels, 3000)
        # Every 7th filter of every 307th frame, and the frames at the ends.
        frames = [0, 1, 2, 2998, 2999] + list(range(3, 2998, 307))
        some = made[::7][:, frames]
        features.append({"clip": name, "mels": mels, "frames": frames, "values": [round(float(x), 6) for x in some.ravel()], "largest": float(made.max())})
text = json.dumps({"files": files, "features": features}, separators=(",", ":"))
pathlib.Path(__file__).with_name("sounds.json").write_text(text.replace('},{', '},\n{') + "\n")
print(len(files), "files", len(features), "clips", len(text), "bytes")
