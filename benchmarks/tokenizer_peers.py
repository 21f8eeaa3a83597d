"""Tokenizers of every kind beside the packages `tokenizers`, `sentencepiece` and `tiktoken`: the same ids and text, and speed.

    python benchmarks/tokenizer_peers.py build/bin/bench_tokenizer --check [--megabytes 12] [--only KIND...]
    python benchmarks/tokenizer_peers.py build/bin/bench_tokenizer [--text FILE] [--only KIND...]
    python benchmarks/tokenizer_peers.py build/bin/bench_tokenizer --tokenizer tokenizer.json --text FILE

Tokenizers are trained for this (tests/golden/tokenizers/kinds.py names them). --check encodes hard text of all scripts, made here,
and compares the ids and the decoded text of every document. Without it the speed is measured, on FILE or on ordinary text made
here: one core, one run, processor time; every document is encoded three times by each program and the first time is not counted.
A tokenizer.json of one's own is compared with `tokenizers`.
"""

import argparse
import json
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import time

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests/golden/tokenizers"))
import hard_text  # noqa: E402
import kinds  # noqa: E402
import tokenizers  # noqa: E402


def cut(data, size=4000):
    documents, begin = [], 0
    while begin < len(data):
        end = min(begin + size, len(data))
        while end < len(data) and data[end] & 0xC0 == 0x80:
            end += 1
        documents.append(data[begin:end].decode())
        begin = end
    return documents


def read_documents(path):
    if path.endswith(".jsonl"):
        with open(path, encoding="utf-8", newline="\n") as lines:
            return [json.loads(line)["text"] for line in lines]
    return cut(pathlib.Path(path).read_bytes())


def ordinary_documents(seed, num_bytes):
    """Text with the word frequencies of a language (Zipf), three quarters Latin letters, the rest Cyrillic, Arabic and Chinese."""
    rng = random.Random(seed)

    def words(letters, count, longest):
        made = {"".join(rng.choice(letters) for _ in range(rng.randint(1, longest))) for _ in range(count)}
        return sorted(made, key=lambda w: (len(w), w))

    latin = words("eeeeetttaaooiinnsshhrrdlucmfwypvbgk", 30000, 11)
    others = [words("\u043e\u0435\u0430\u0438\u043d\u0442\u0441\u0440\u0432\u043b\u043a\u043c\u0434\u043f", 10000, 10),
              words("\u0627\u0644\u0645\u0646\u064a\u0648\u0631\u062a\u0628\u0629", 6000, 8),
              words([chr(0x4E00 + i) for i in range(2500)], 20000, 3)]
    documents = []
    while num_bytes > 0:
        vocabulary = latin if rng.random() < 0.75 else rng.choice(others)
        joint = "" if vocabulary is others[2] else " "
        parts = []
        for _ in range(rng.randint(60, 900)):
            word = vocabulary[min(int(rng.paretovariate(0.9)) - 1, len(vocabulary) - 1)]
            kind = rng.random()
            parts.append(word.capitalize() if kind < 0.08 else str(rng.randint(0, 2100)) if kind < 0.1 else word)
            parts.append(rng.choice([". ", ", ", ".\n", "\n\n"]) if rng.random() < 0.12 else joint)
        documents.append("".join(parts))
        num_bytes -= len(documents[-1].encode())
    return documents


def read_counted(path, width):
    data = pathlib.Path(path).read_bytes()
    at = 0
    while at < len(data):
        (count,) = struct.unpack_from("<i", data, at)
        yield data[at + 4 : at + 4 + count * width]
        at += 4 + count * width


def run(bench, kind, documents, folder, repeat):
    """Our ids, decoded text and report."""
    text, ids, decoded = (folder / name for name in ("text.jsonl", "ids", "decoded"))
    with open(text, "w", encoding="utf-8", newline="\n") as out:
        out.writelines(json.dumps({"text": document}) + "\n" for document in documents)
    command = [bench, "--input", text, "--ids", ids, "--decoded", decoded, "--repeat", repeat, *kind.flags, "--tokenizer-model", kind.path]
    done = subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True)
    ours = [list(struct.unpack(f"<{len(d) // 4}i", d)) for d in read_counted(ids, 4)]
    return ours, [d.decode() for d in read_counted(decoded, 1)], json.loads(done.stdout)


def compare(bench, kind, documents, folder):
    """Prints one line and up to three differences; returns the number of documents that differ."""
    ours, texts, _ = run(bench, kind, documents, folder, 0)
    expected = kind.encode_batch(documents)
    different = [i for i, (a, b) in enumerate(zip(ours, expected)) if a != b]
    undone = [i for i, (text, ids) in enumerate(zip(texts, ours)) if text != kind.decode(ids)]
    size = sum(len(d.encode()) for d in documents)
    print(f"{kind.name:22} {len(documents):6} documents {size / 1e6:6.1f} MB {sum(map(len, expected)):9} ids: "
          f"{len(different)} differ in ids, {len(undone)} in text", flush=True)
    for i in different[:3]:
        at = next((k for k, (a, b) in enumerate(zip(ours[i], expected[i])) if a != b), min(len(ours[i]), len(expected[i])))
        before = kind.decode(expected[i][max(0, at - 5) : at])
        print(f"  document {i}, id {at}, behind {before!r}: {ours[i][at : at + 6]} for {expected[i][at : at + 6]} "
              f"{kind.decode(expected[i][at : at + 6])!r}")
    for i in undone[:3]:
        wanted = kind.decode(ours[i])
        at = next((k for k, (a, b) in enumerate(zip(texts[i], wanted)) if a != b), min(len(texts[i]), len(wanted)))
        print(f"  document {i}, character {at}: {texts[i][at - 5 : at + 20]!r} for {wanted[at - 5 : at + 20]!r}")
    return len(different) + len(undone)


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


def own_tokenizer(path):
    package = tokenizers.Tokenizer.from_file(path)
    return kinds.Kind(
        pathlib.Path(path).name, pathlib.Path(path), ["--tokenizer-type", "HuggingFaceTokenizer"],
        lambda text: package.encode(text, add_special_tokens=False).ids, lambda ids: package.decode(ids, skip_special_tokens=False),
        lambda texts: [e.ids for e in package.encode_batch(texts, add_special_tokens=False)],
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--megabytes", type=float, default=12)
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--only", nargs="*", default=kinds.NAMES, choices=kinds.NAMES)
    parser.add_argument("--tokenizer")
    parser.add_argument("--text")
    parser.add_argument("--seed", type=int, default=11)
    arguments = parser.parse_args()
    make = hard_text.hard_documents if arguments.check else ordinary_documents
    documents = read_documents(arguments.text) if arguments.text else make(arguments.seed, int(arguments.megabytes * 1e6))
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if arguments.tokenizer:
            trained = [own_tokenizer(arguments.tokenizer)]
        else:
            texts = make(arguments.seed + 1, 400_000)
            trained = (kinds.train(kind, texts, arguments.vocab_size, folder) for kind in arguments.only)
        for kind in trained:
            texts = [kinds.assigned(d) for d in documents] if kind.name in kinds.NEEDS_PCRE2 else documents
            wrong += compare(arguments.bench, kind, texts, folder)
            if arguments.check:
                continue
            ours = run(arguments.bench, kind, texts, folder, 2)[2]["mb_per_core_second"]
            theirs = timed(kind.encode, texts)
            print(f"{'':22} megatron {ours:7.1f} MB/s, package {theirs:7.1f} MB/s: {ours / theirs:5.1f} times as fast", flush=True)
    raise SystemExit(wrong != 0)


if __name__ == "__main__":
    main()
