#!/usr/bin/env python3
"""check_replies.py MEGATRON MODEL: compares our greedy replies, their prompts' ids and logits with replies.json, id for id."""
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOKENS = "48"


def run(*arguments):
    return subprocess.run(arguments, check=True, stdout=subprocess.PIPE, text=True).stdout


def last_logits(path):
    """Of the last position, from a file that `megatron logits --output` has written."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    entry = json.loads(data[8:8 + length])["logits"]
    vocabulary, end = entry["shape"][1], 8 + length + entry["data_offsets"][1]
    return struct.unpack(f"<{vocabulary}f", data[end - 4 * vocabulary:end])


def main():
    megatron, model = sys.argv[1:]
    rows = [json.loads(line) for line in (HERE / "prompts.jsonl").read_text().splitlines()]
    expected = json.loads((HERE / "replies.json").read_text())
    assert len(rows) == len(expected) == 50
    found = [None] * len(rows)
    with tempfile.TemporaryDirectory() as folder:
        for key, flags in (("prompt", []), ("messages", ["--chat"])):
            which = [i for i, row in enumerate(rows) if key in row]
            path = Path(folder) / f"{key}.jsonl"
            path.write_text("".join(json.dumps(rows[i]) + "\n" for i in which))
            answers = json.loads(run(megatron, "generate", "--load", model, *flags, "--prompts-file", str(path), "--greedy", "--json",
                                     "--tokens-to-generate", TOKENS, "--device", "cpu", "--dtype", "fp32"))
            for i, answer in zip(which, answers, strict=True):
                found[i] = answer
    wrong = 0
    for i, (answer, theirs) in enumerate(zip(found, expected)):
        # transformers lists the token that ends a reply, too.
        reply = theirs["reply"][:-1] if theirs["reply"][-1] == 2 else theirs["reply"]
        ours = answer["tokens"][:-1] if answer["tokens"][-1:] == [2] else answer["tokens"]
        if answer.get("prompt_tokens", theirs["prompt"]) != theirs["prompt"] or ours != reply:
            wrong += 1
            print(f"{i + 1}: {answer['prompt']!r}\n  ours   {answer['tokens']}\n  theirs {theirs['reply']}")
    worst = 0.0
    for theirs in expected[::10]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "logits.safetensors"
            run(megatron, "logits", "--load", model, "--tokens", ",".join(map(str, theirs["prompt"])), "--output", str(path), "--device",
                "cpu", "--dtype", "fp32")
            last = last_logits(path)
        scale = max(abs(x) for x in theirs["logits"])
        worst = max([worst] + [abs(a - b) / scale for a, b in zip(last[::97], theirs["logits"], strict=True)])
    print(f"{len(rows) - wrong} of {len(rows)} replies equal those of transformers; logits differ by at most {worst:.1e} of the largest")
    sys.exit(wrong > 0 or worst > 1e-4)


if __name__ == "__main__":
    main()
