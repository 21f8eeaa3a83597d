#!/usr/bin/env python3
"""Moves files by a list of `old new` lines (files without ending mean every file of that stem) and rewrites what names them:
include lines, source lists of CMake, paths in scripts, tests and documents. Changes nothing else.

Usage: move_files.py LIST
"""
import os
import re
import subprocess
import sys

LISTS = ("CMakeLists.txt",)
TEXTS = (".h", ".cc", ".cu", ".cuh", ".py", ".md", ".txt", ".cmake", ".in", ".sh", "Makefile", ".flags", ".yml", ".yaml")


def tracked():
    return subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True).stdout.split("\n")[:-1]


def moves_of(lines, files):
    """Old path -> new path, of single files."""
    moves = {}
    for line in lines:
        words = line.split("#")[0].split()
        if not words:
            continue
        old, new = words
        if old in files:
            found = {old: new}
        else:
            found = {f: new + f[len(old):] for f in files if f.startswith(old + ".") or f.startswith(old + "/")}
        if not found:
            sys.exit(f"error: {old} is not here")
        moves.update(found)
    return moves


def rewrite_list(path, folder_before, moves, text):
    """Sources of a CMakeLists.txt are relative to its folder, which may itself have moved."""
    folder = os.path.dirname(moves.get(path, path))

    def relative(match):
        word = match.group(0)
        old = os.path.normpath(os.path.join(folder_before, word))
        return os.path.relpath(moves[old], folder) if old in moves else word

    return re.sub(r"(?<![\w/.$}{])[\w./]+\.(?:cc|cu|h|py|in)\b", relative, text)


def main():
    files = tracked()
    with open(sys.argv[1]) as lines:
        moves = moves_of(lines, set(files))
    # Without ending too, for texts such as `megatron/training/job.{h,cc}` and include guards of documents.
    stems = {}
    for old, new in moves.items():
        stems.setdefault(os.path.splitext(old)[0], os.path.splitext(new)[0])
    names = sorted({*moves, *stems}, key=len, reverse=True)
    shorts = {}  # "training/job.h", as comments say
    for old, new in moves.items():
        if old.startswith("megatron/"):
            shorts[old[len("megatron/"):]] = new[len("megatron/"):] if new.startswith("megatron/") else new
    full = re.compile(r"(?:(?<![\w/.])|(?<=SOURCE_DIR}/))(" + "|".join(re.escape(n) for n in names) + r")(?![\w/])")
    short = re.compile(r"(?<![\w/.])(" + "|".join(re.escape(n) for n in sorted(shorts, key=len, reverse=True)) + r")(?![\w/])")
    for path in files:
        if not path.endswith(TEXTS) or os.path.islink(path):
            continue
        try:
            with open(path, encoding="utf8") as f:
                before = f.read()
        except UnicodeDecodeError:
            continue
        text = before
        if os.path.basename(path) in LISTS:
            text = rewrite_list(path, os.path.dirname(path), moves, text)
        text = full.sub(lambda m: moves.get(m.group(1)) or stems[m.group(1)], text)
        if shorts:
            text = short.sub(lambda m: shorts[m.group(1)], text)
        if text != before:
            with open(path, "w", encoding="utf8") as f:
                f.write(text)
    for old, new in moves.items():
        os.makedirs(os.path.dirname(new), exist_ok=True)
        subprocess.run(["git", "mv", old, new], check=True)


main()
