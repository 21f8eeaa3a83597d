"""Encoding speed beside the `tokenizers` and `tiktoken` packages: one core, one run, processor time, the same ids.

    python benchmarks/tokenizer_peers.py build/bin/bench_tokenizer tokenizer.json text.txt

TEXT is cut into documents of 4,000 bytes, or read as JSON lines when its name ends in .jsonl. Every document is encoded three
times by each program; the first time is not counted. Ids are compared with both packages; tiktoken is left out for tokenizers
with added tokens that are not special, a normalizer or ignore_merges, which it does not have in the same form. --check
compares ids and decoded text only (no tiktoken).
"""

import argparse
import json
import os
import struct
import subprocess
import tempfile
import time

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
import tiktoken  # noqa: E402
import tokenizers  # noqa: E402


def read_documents(path):
    if path.endswith(".jsonl"):
        with open(path, encoding="utf-8", newline="\n") as lines:
            return [json.loads(line)["text"] for line in lines]
    with open(path, "rb") as file:
        text = file.read()
    documents, begin = [], 0
    while begin < len(text):
        end = min(begin + 4000, len(text))
        while end < len(text) and text[end] & 0xC0 == 0x80:
            end += 1
        documents.append(text[begin:end].decode())
        begin = end
    return documents


def read_ids(path):
    with open(path, "rb") as file:
        data = file.read()
    at = 0
    while at < len(data):
        (count,) = struct.unpack_from("<i", data, at)
        yield list(struct.unpack_from(f"<{count}i", data, at + 4))
        at += 4 + 4 * count


def timed(encode, documents):
    """MB per second of processor time; the second and third pass count."""
    size = sum(len(d.encode()) for d in documents)
    for document in documents:
        encode(document)
    start = time.process_time()
    for _ in range(2):
        for document in documents:
            encode(document)
    return 2 * size / 1e6 / (time.process_time() - start)


def tiktoken_encoding(model):
    """The same vocabulary in tiktoken, None when it would give other ids."""
    if model["normalizer"] or any(not t["special"] for t in model["added_tokens"]):
        return None
    steps = model["pre_tokenizer"].get("pretokenizers", [])
    pattern = steps[0]["pattern"]["Regex"] if steps else (
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )
    alphabet = {}
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    for byte in printable:
        alphabet[chr(byte)] = byte
    for i, byte in enumerate(b for b in range(256) if b not in printable):
        alphabet[chr(256 + i)] = byte
    special = {t["content"]: t["id"] for t in model["added_tokens"]}
    ranks = {
        bytes(alphabet[c] for c in token): rank
        for token, rank in model["model"]["vocab"].items()
        if token not in special
    }
    return tiktoken.Encoding("same", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench")
    parser.add_argument("tokenizer")
    parser.add_argument("text")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    documents = read_documents(arguments.text)
    package = tokenizers.Tokenizer.from_file(arguments.tokenizer)
    with tempfile.NamedTemporaryFile() as ids:
        command = [arguments.bench, arguments.tokenizer, arguments.text, "--ids", ids.name, "--repeat", "2"]
        ours = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        our_ids = list(read_ids(ids.name))
    expected = [e.ids for e in package.encode_batch(documents, add_special_tokens=False)]
    different = sum(a != b for a, b in zip(our_ids, expected))
    print(f"{len(documents)} documents, {ours['bytes'] / 1e6:.1f} MB, {sum(map(len, expected))} ids, "
          f"vocabulary {ours['vocab_size']}: {different} documents differ from tokenizers {tokenizers.__version__}")
    if arguments.check:
        raise SystemExit(different != 0)
    speeds = {"megatron": ours["mb_per_core_second"]}
    speeds["tokenizers"] = timed(lambda text: package.encode(text, add_special_tokens=False), documents)
    with open(arguments.tokenizer, encoding="utf-8") as file:
        peer = tiktoken_encoding(json.load(file))
    if peer is not None:
        same = sum(peer.encode(d, allowed_special="all") != i for d, i in zip(documents, our_ids))
        print(f"{same} documents differ from tiktoken {tiktoken.__version__}")
        speeds["tiktoken"] = timed(lambda text: peer.encode(text, allowed_special="all"), documents)
    for name, speed in speeds.items():
        print(f"{name:12} {speed:8.1f} MB/s   megatron is {speeds['megatron'] / speed:5.1f} times as fast")
    raise SystemExit(different != 0)


if __name__ == "__main__":
    main()
