#!/usr/bin/env python3
"""Shows what an addition costs: each folder here is a feature as a patch, which may change three existing lines.

Usage: run.py --check [--lint PROGRAM]            applies every patch to a copy of the tree and counts; PROGRAM: the lint_test, run on it
       run.py [NAME]... [--preset dev] [--work FOLDER]    builds each patch (all of them by default) and runs its tests and the lint

Fails when a patch does not apply, changes more than three existing lines (lines added to a file count, CMake files and generated
documents do not), has no test, or breaks the lint. README.md in this folder says what a patch consists of.
"""
import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from tree_copy import ROOT, copy_build, copy_sources, enter, list_files  # noqa: E402

MOST_LINES = 3
GENERATED_DOCUMENTS = {"docs/flags.md"}
INSIDE = "MEGATRON_EXTENSION_COPY"


class Refused(Exception):
    """A patch that breaks a rule; the text says which."""


def patches():
    return sorted(path.parent.name for path in HERE.glob("*/README.md"))


def is_cmake(name):
    return Path(name).name == "CMakeLists.txt" or name.endswith(".cmake")


def apply(patch, tree):
    """Adds the files of `patch`, a folder, to `tree` and makes its edits. A CMakeLists.txt is added to the end of the tree's."""
    files = patch / "files"
    for path in sorted(p for p in files.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        name = path.relative_to(files)
        target = tree / name
        if target.exists() and not is_cmake(name.name):
            raise Refused(f"files/{name} exists in the tree; existing lines are changed by edits.patch")
        target.parent.mkdir(parents=True, exist_ok=True)
        before = target.read_text() if target.exists() else ""
        target.write_text(before + path.read_text())
        target.chmod(path.stat().st_mode)
    edits = patch / "edits.patch"
    if edits.exists():
        # Not as part of a repository that the copy may lie in.
        environment = dict(os.environ, GIT_CEILING_DIRECTORIES=str(tree.resolve().parent))
        done = subprocess.run(["git", "apply", "--unidiff-zero", "--whitespace=nowarn", str(edits.resolve())], cwd=tree, env=environment,
                              capture_output=True, text=True)
        if done.returncode != 0:
            raise Refused("edits.patch does not apply\n" + done.stderr.strip())


def count_lines(before, after):
    """Lines added and removed, in {path: number}, of files of `before` that are not generated, as git counts them."""
    counts = {}
    for name in map(str, list_files(before)):
        if is_cmake(name) or name in GENERATED_DOCUMENTS:
            continue
        if (after / name).exists() and (after / name).read_bytes() == (before / name).read_bytes():
            continue
        other = after / name if (after / name).exists() else Path(os.devnull)
        out = subprocess.run(["git", "diff", "--no-index", "--numstat", str(before / name), str(other)], capture_output=True, text=True).stdout
        added, removed = out.split("\t")[:2]
        counts[name] = int(added) + int(removed)
    return counts


def tests_of(patch):
    """(targets to build, names for ctest) of the tests that a patch adds."""
    programs, scripts = [], []
    for path in sorted((patch / "files" / "tests").rglob("*")):
        if path.name == "CMakeLists.txt":
            programs += re.findall(r"\bmegatron_test\(\s*(\w+)", path.read_text())
        elif path.parent.name == "cli" and path.name.endswith("_test.py"):
            scripts.append("cli_" + path.stem)
    return programs, programs + scripts


def checked_tree(patch, tree):
    """Makes `tree` the patched tree and returns {path: changed lines}. Raises Refused."""
    copy_sources(ROOT, tree)
    apply(patch, tree)
    counts = count_lines(ROOT, tree)
    total = sum(counts.values())
    if total > MOST_LINES:
        lines = ", ".join(f"{path} {number}" for path, number in counts.items())
        raise Refused(f"{total} existing lines change, at most {MOST_LINES} may: {lines}")
    if not tests_of(patch)[1]:
        raise Refused("no test: files/tests/ holds no megatron_test() and no cli/*_test.py")
    return counts


def run_lint(program, tree):
    environment = dict(os.environ, MEGATRON_LINT_ROOT=str(tree))
    done = subprocess.run([program, "--gtest_brief=1"], env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise Refused("the lint fails\n" + done.stdout + done.stderr)


def check(names, lint):
    failed = 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                counts = checked_tree(HERE / name, Path(folder))
                if lint:
                    run_lint(lint, Path(folder))
                new = len([p for p in (HERE / name / "files").rglob("*") if p.is_file()])
                print(f"{name:12} {sum(counts.values())} existing lines in {len(counts)} files, {new} new files", flush=True)
            except Refused as refused:
                failed += 1
                print(f"{name:12} refused: {refused}", flush=True)
    return 1 if failed else 0


def build_and_test(name, preset):
    """In the copy, which is mounted in the place of the repository."""
    programs, tests = tests_of(HERE / name)
    begin = time.monotonic()
    subprocess.run(["scripts/build.sh", preset, "megatron", "lint_test", *programs], cwd=ROOT, check=True)
    built = time.monotonic()
    chosen = "|".join([*tests, "lint_test"])
    subprocess.run(["bash", "-c", '. .venv/toolchain.sh; "$CTEST" --preset "$1" -R "$2"', "bash", preset, f"^({chosen})$"], cwd=ROOT, check=True)
    print(f"{name}: built in {built - begin:.0f} s, {', '.join([*tests, 'lint_test'])} pass in {time.monotonic() - built:.0f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a patch: " + ", ".join(patches()))
    parser.add_argument("--check", action="store_true", help="apply and count, and build nothing")
    parser.add_argument("--lint", help="with --check: a built lint_test, which is run on each patched tree")
    parser.add_argument("--preset", default="dev")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "extension", help="folder of the copy, kept between runs")
    options = parser.parse_args()
    names = options.names or patches()
    unknown = sorted(set(names) - set(patches()))
    if unknown:
        raise SystemExit(f"error: no patch is called {unknown[0]}, expected one of {', '.join(patches())}")
    if options.check:
        return check(names, options.lint)
    if INSIDE in os.environ:
        try:
            build_and_test(names[0], options.preset)
        except subprocess.CalledProcessError as failed:
            raise SystemExit(f"error: {names[0]}: {failed.cmd[0]} ended with {failed.returncode}")
        return 0
    tree = options.work.resolve() / "tree"
    tree.mkdir(parents=True, exist_ok=True)
    copy_build(options.preset, tree)
    os.environ[INSIDE] = "1"
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                checked_tree(HERE / name, Path(folder))
            except Refused as refused:
                raise SystemExit(f"error: {name}: {refused}")
            copy_sources(Path(folder), tree)
        if os.fork() == 0:
            enter(tree, [str(HERE / "run.py"), name, "--preset", options.preset])
        if os.wait()[1] != 0:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
