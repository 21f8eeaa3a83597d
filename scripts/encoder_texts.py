#!/usr/bin/env python3
"""Texts for `make encoder`, and what its steps reached. Python's standard library only.

    encoder_texts.py write FOLDER                       texts of this repository as JSON lines
    encoder_texts.py margin DATA METRICS                masked loss of the validation below the entropy of single tokens
    encoder_texts.py classes PREDICTIONS HELD_OUT       accuracy of each class
"""
import array
import hashlib
import json
import math
import pathlib
import random
import re
import subprocess
import sys

CLASSES = {"C++": r"\.(cc|h|cu|cuh)$", "Python": r"\.py$", "Markdown": r"\.md$", "CMake": r"(^|/)CMakeLists\.txt$|\.cmake$"}
LINES = 8  # of a text
HELD_OUT = 8  # one file of so many
OF_CLASS = 2400  # texts of each class that the classifier learns from
WANTED = 0.95


def files():
    root = pathlib.Path(__file__).resolve().parent.parent
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=False)
    names = listed.stdout.split("\n") if listed.returncode == 0 else [
        str(path.relative_to(root)) for path in root.rglob("*") if not set(path.relative_to(root).parts) & {"build", ".venv", "runs"}]
    for name in sorted(names):
        kind = [i for i, pattern in enumerate(CLASSES.values()) if re.search(pattern, name)]
        # Tables of numbers are no text of their class.
        if kind and not name.startswith("tests/golden/") and name != "docs/flags.md" and (root / name).is_file():
            lines = [line for line in (root / name).read_text(errors="replace").split("\n") if line.strip()]
            yield name, kind[0], lines


def blocks(lines, step):
    return ["\n".join(lines[i:i + LINES]) for i in range(0, len(lines) - LINES + 1, step)]


def write_lines(path, records):
    with open(path, "w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")


def write(folder):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(1)
    texts, learned = {"train": [], "held_out": []}, [[] for _ in CLASSES]
    for name, kind, lines in files():
        held_out = int(hashlib.sha1(name.encode()).hexdigest(), 16) % HELD_OUT == 0
        texts["held_out" if held_out else "train"] += [{"text": text, "label": kind} for text in blocks(lines, LINES)]
        if not held_out:
            learned[kind] += [{"text": text, "label": kind} for text in blocks(lines, 1)]
    for part, records in texts.items():
        write_lines(folder / f"{part}.jsonl", records)
        counts = [sum(record["label"] == kind for record in records) for kind in range(len(CLASSES))]
        print(f"{part}: {len(records)} texts of {LINES} lines ({', '.join(f'{c} {n}' for c, n in zip(counts, CLASSES))})")
    # As many texts of each class; those of a small class come again.
    balanced = []
    for records in learned:
        draw.shuffle(records)
        balanced += [records[i % len(records)] for i in range(OF_CLASS)]
    draw.shuffle(balanced)
    write_lines(folder / "classes.jsonl", balanced)


def margin(data, metrics):
    """`data`.bin holds the tokens of the held-out texts as 16-bit numbers."""
    ids = array.array("H")
    content = pathlib.Path(data + ".bin").read_bytes()
    ids.frombytes(content[:len(content) // 2 * 2])
    counts = {}
    for token in ids:
        counts[token] = counts.get(token, 0) + 1
    entropy = -sum(count / len(ids) * math.log(count / len(ids)) for count in counts.values())
    with open(metrics, encoding="utf-8") as file:
        validations = [record for record in map(json.loads, file) if record["type"] == "evaluation" and record["split"] == "validation"]
    loss = validations[-1]["lm loss"]
    print(f"masked loss {loss:.3f}, entropy of single tokens {entropy:.3f}: {entropy - loss:.3f} below it")
    return loss < entropy


def classes(predictions, held_out):
    """Predictions are in the order of the texts."""
    with open(predictions, encoding="utf-8") as file:
        told = [json.loads(line)["prediction"] for line in file]
    with open(held_out, encoding="utf-8") as file:
        labels = [json.loads(line)["label"] for line in file]
    reached = True
    for kind, name in enumerate(CLASSES):
        right = [a == b for a, b in zip(told, labels, strict=True) if b == kind]
        share = sum(right) / len(right)
        print(f"{name:9} {sum(right):5} of {len(right):5}: {100 * share:.1f}%")
        reached &= share >= WANTED
    return reached


if __name__ == "__main__":
    command = {"write": write, "margin": margin, "classes": classes}[sys.argv[1]]
    sys.exit(0 if command(*sys.argv[2:]) in (None, True) else 1)
