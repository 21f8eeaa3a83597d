#!/usr/bin/env python3
"""Shows that the equivalence matrix and `megatron prove` have teeth: each bug of bugs.py makes both fail, or, where it stands in what
the matrix cannot have, `prove` and a unit test that it names. What only rounds more than it should says how far below the limits of
`prove` that is.

Usage: run.py [--preset dev] [--work FOLDER] [--only NAME,...] [--named] [--table FILE]      plants, builds, tries every bug
       run.py --check                                                                       only looks whether the edits still apply
--named plants the chosen bugs alone and tries the rows and proofs that they name, and no others. With --preset gpu, on a machine with a
GPU, those of gpu_bugs.py are tried, and without it all others.

The repository with its build folder is copied to --work (default build/planted), and the copy is mounted in the place of the
repository, seen by this script and its children alone: what is built there needs no new configuration, and the tree itself stays as it
is. All bugs are compiled in at once behind a switch, MEGATRON_PLANTED_BUG=NAME, so that only the sources that have one are compiled
again. Without the switch everything must hold; then every bug is tried by itself. Fails when an edit does not apply, when the planted
build without a bug fails, or when one of the two checks of a bug lets it pass.
"""
import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from bugs import BUGS, PROOFS

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tree_copy import ROOT, copy_build, copy_sources, enter  # noqa: E402

HEADER = "megatron/base/planted_bug.h"
SWITCH = """// Whether the bug of this name is switched on; part of the copy that tests/parallel/planted_bugs builds.
#pragma once

#include <cstdlib>
#include <cstring>

inline bool planted_bug(const char* name) {
  static const char* const bug = std::getenv("MEGATRON_PLANTED_BUG");
  return bug != nullptr && std::strcmp(bug, name) == 0;
}
"""
PROVE_FLAGS = ["--lr", "1e-3", "--train-iters", "10"]
SECONDS = 1800  # for one run, of which the whole matrix is the longest


def find_code(text, code):
    """Where the code stands, [begin, end), however it is laid out in lines."""
    return [found.span() for found in re.finditer(r"\s*".join(re.escape(c) for c in re.sub(r"\s", "", code)), text)]


def planted_sources(root, bugs=BUGS):
    """The changed files, by path; raises when an edit does not apply."""
    texts = {}
    for bug in bugs:
        for path, old, new in bug.edits:
            text = texts.get(path) or (root / path).read_text()
            places = find_code(text, old)
            if len(places) != 1:
                raise SystemExit(f"error: {bug.name}: the text to replace occurs {len(places)} times in {path}, expected once:\n{old}")
            begin, end = places[0]
            texts[path] = text[:begin] + new.replace("PLANTED", f'planted_bug("{bug.name}")') + text[end:]
        if not any("PLANTED" in new for _, _, new in bug.edits):
            raise SystemExit(f"error: {bug.name}: no edit depends on PLANTED")
        unknown = [name for name in proofs_of(bug) if name not in PROOFS]
        if unknown:
            raise SystemExit(f"error: {bug.name}: bugs.py has no proof {unknown[0]}")
        if bool(bug.prove) == bool(bug.unproved):
            raise SystemExit(f"error: {bug.name}: names neither proofs nor why there are none, or both")
        if bool(bug.rows) + bool(bug.unit_test) + bool(bug.unmatched) > 1:
            raise SystemExit(f"error: {bug.name}: names more than one of rows of the matrix, a unit test, why there is neither")
        if bug.unit_test and not has_unit_test(root, bug.unit_test):
            raise SystemExit(f"error: {bug.name}: tests/ has no {bug.unit_test}, expected PROGRAM:Suite.Name or PROGRAM:Prefix/Suite.Name/case")
    include = '#include "megatron/base/planted_bug.h"\n'
    return {path: include + text for path, text in texts.items()}


def proofs_of(bug):
    return [name.strip() for name in bug.prove.split(",")] if bug.prove else []


def has_unit_test(root, unit_test):
    """Whether a source of the program defines the test."""
    program, suite, name = re.fullmatch(r"(\w*):(?:\w*/)?(\w*)\.(\w*)(?:/\w*)?", unit_test).groups()
    for cmake in (root / "tests").rglob("CMakeLists.txt"):
        for sources in re.findall(rf"(?:megatron_test|add_executable)\({program}\b([^)]*)\)", cmake.read_text()):
            for source in re.findall(r"[\w/.]+_test\.cc", sources):
                if re.search(rf"\bTEST\w*\({suite},\s*{name}\)", (cmake.parent / source).read_text()):
                    return True
    return False


def enter_copy(work, preset):
    """Copies the repository and starts this script again where the copy is mounted over it."""
    copy = work / "tree"
    if not (copy / "build" / preset).exists() and not (ROOT / "build" / preset / "tests" / "equivalence_test").exists():
        raise SystemExit(f"error: build/{preset} holds no equivalence_test\nhint: scripts/build.sh {preset} equivalence_test megatron")
    copy_sources(ROOT, copy)
    copy_build(preset, copy)
    os.environ["MEGATRON_PLANTED_COPY"] = "1"
    enter(copy, [str(ROOT / "tests/parallel/planted_bugs/run.py"), *sys.argv[1:]])


def write_if_changed(path, text):
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def build(preset, bugs):
    for path, text in planted_sources(ROOT, bugs).items():
        write_if_changed(ROOT / path, text)
    write_if_changed(ROOT / HEADER, SWITCH)
    programs = sorted({bug.unit_test.split(":")[0] for bug in bugs if bug.unit_test})
    subprocess.run(["scripts/build.sh", preset, "equivalence_test", "megatron", *programs], cwd=ROOT, check=True)


def run(command, bug):
    environment = dict(os.environ, OMP_NUM_THREADS="1", MEGATRON_MATRIX="whole")
    environment.pop("MEGATRON_PLANTED_BUG", None)
    if bug:
        environment["MEGATRON_PLANTED_BUG"] = bug
    try:
        done = subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True, timeout=SECONDS)
        return done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        return None, "", ""


def told(error):
    """What an error says, in one line and without the folders of this machine."""
    lines = [line for line in error.strip().split("\n") if line and not line.startswith("hint:")]
    return lines[-1].replace(f"{ROOT}/", "") if lines else "ended without a word"


def run_matrix(preset, bug, rows):
    """None when the rows hold, else what failed first, 'row: tensor'. A run that does not end has caught nothing."""
    test = ROOT / "build" / preset / "tests" / "equivalence_test"
    chosen = ":".join(f"*/*Layouts.*/{row}" for row in rows) if rows else "*"
    code, out, _ = run([test, f"--gtest_filter={chosen}", "--gtest_fail_fast"], bug)
    if code == 0:
        ran = re.search(r"\[  PASSED  \] (\d+) test", out)
        if not ran or int(ran[1]) == 0:
            raise SystemExit(f"error: the matrix has no rows {' '.join(rows)}")
        return None
    if code is None:
        raise SystemExit(f"error: {bug or 'without a bug'}: the matrix did not end within {SECONDS} s")
    row = re.search(r"\[  FAILED  \] \w*/\w*Layouts\.(\w+)/(\w+)", out)
    difference = re.search(r'Which is: "(?: *)(.*?)(?:\\n|")', out)
    exception = re.search(r'exception with description "([^"]*)"', out)
    what = re.sub(r": [^:]* > .*", "", difference[1]) if difference else told(exception[1]) if exception else f"ended with {code}"
    return f"{row[2]} ({row[1].lower()}): {what}" if row else f"{rows[0] if rows else ''}: ended with {code}"


def run_unit_test(preset, bug, unit_test):
    """None when it passes, else its name."""
    program, name = unit_test.split(":")
    code, out, _ = run([ROOT / "build" / preset / "tests" / program, f"--gtest_filter={name}"], bug)
    if code is None:
        raise SystemExit(f"error: {bug or 'without a bug'}: {unit_test} did not end within {SECONDS} s")
    if code == 0 and not re.search(r"\[  PASSED  \] [1-9]", out):
        raise SystemExit(f"error: {program} has no test {name}")
    return None if code == 0 else f"unit test {name}"


def run_prove(preset, bug, name):
    ranks, flags = PROOFS[name]
    binary = ROOT / "build" / preset / "bin" / "megatron"
    code, out, err = run([binary, "prove", "--json", "--world-size", ranks, *PROVE_FLAGS, *shlex.split(flags)], bug)
    if code == 0:
        return None
    if code is None:
        raise SystemExit(f"error: {bug or 'without a bug'}: the proof {name} did not end within {SECONDS} s")
    if out.startswith("{"):
        for proof in json.loads(out)["proofs"]:
            for fault in proof["faults"]:
                return f"{name}: {proof['dtype']} {fault}"
            failed = {line["quantity"]: line["worst"] for line in proof["lines"] if line["failed"]}
            if failed:
                return f"{name}: {proof['dtype']} {failed.get('gradients') or next(iter(failed.values()))}"
    if code == 2:
        raise SystemExit(f"error: the proof {name} is refused: {err}")
    return f"{name}: {told(err)}"


def brief(caught):
    """As it stands in the table."""
    text = caught or "NOT CAUGHT"
    for long, short in ((": copies on different ranks differ", ", copies differ"),
                        (": no rank holds all of it, or it is not a number", ", in parts on no rank"),
                        ("error: internal error: ", ""), ("internal error: ", ""), ("grad 0 ", "step 1 gradient of ")):
        text = text.replace(long, short)
    return text


def first_caught(checks):
    for check in checks:
        caught = check()
        if caught:
            return caught
    return None


def matrix_of(preset, bug, named):
    if bug.unit_test:
        return run_unit_test(preset, bug.name, bug.unit_test)
    sets = [bug.rows.split()] + ([] if named else [[]])
    return first_caught([lambda rows=rows: run_matrix(preset, bug.name, rows) for rows in sets])


def proof_of(preset, bug, named):
    names = proofs_of(bug) + [name for name in PROOFS if name not in proofs_of(bug) and not named]
    return first_caught([lambda name=name: run_prove(preset, bug.name, name) for name in names])


def hold_without_bug(preset, bugs, named):
    rows = sorted({row for bug in bugs for row in bug.rows.split()}) if named else []
    failed = run_matrix(preset, None, rows) if rows or not named else None
    if failed:
        raise SystemExit(f"error: without a bug the matrix fails: {failed}")
    for bug in bugs:
        failed = bug.unit_test and run_unit_test(preset, None, bug.unit_test)
        if failed:
            raise SystemExit(f"error: without a bug a test fails: {failed}")
    proofs = sorted({name for bug in bugs for name in proofs_of(bug)}) if named else list(PROOFS)
    for name in proofs:
        failed = run_prove(preset, None, name)
        if failed:
            raise SystemExit(f"error: without a bug a proof fails: {failed}")
    print(f"without a bug {f'{len(rows)} rows' if named else 'the matrix'} and {len(proofs)} proofs hold", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="dev")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "planted")
    parser.add_argument("--only", default="", help="names of bugs, separated by commas")
    parser.add_argument("--named", action="store_true", help="try the rows and proofs that the bugs name, and no others")
    parser.add_argument("--table", type=Path, help="file for the table, as Markdown")
    parser.add_argument("--check", action="store_true", help="look whether every edit applies, and build nothing")
    parser.add_argument("--skip-clean", action="store_true", help="do not run everything without a bug first")
    options = parser.parse_args()
    if "MEGATRON_PLANTED_COPY" not in os.environ:
        sources = planted_sources(ROOT)
        print(f"{len(BUGS)} bugs apply to {len(sources)} files", flush=True)
        if not options.check:
            enter_copy(options.work.resolve(), options.preset)
        return 0
    there = [bug for bug in BUGS if bug.unit_test.startswith("gpu_tests:") == (options.preset == "gpu")]
    chosen = [bug for bug in there if not options.only or bug.name in options.only.split(",")]
    build(options.preset, chosen if options.named else there)
    if not options.skip_clean:
        hold_without_bug(options.preset, chosen if options.named else there, options.named)
    lines, uncaught = ["| bug | matrix, or unit test | prove |", "| --- | --- | --- |"], []
    for bug in chosen:
        begin = time.monotonic()
        matrix = bug.unmatched or matrix_of(options.preset, bug, options.named)
        proof = bug.unproved or proof_of(options.preset, bug, options.named)
        lines.append(f"| {bug.what} | {brief(matrix)} | {brief(proof)} |")
        print(f"{bug.name} ({time.monotonic() - begin:.0f} s)\n  matrix: {matrix or 'NOT CAUGHT'}\n  prove:  {proof or 'NOT CAUGHT'}", flush=True)
        if not (matrix and proof):
            uncaught.append(bug.name)
    if options.table:
        options.table.write_text("\n".join(lines) + "\n")
    rounding = sum(bool(bug.unproved) for bug in chosen)
    print(f"{len(chosen) - len(uncaught)} of {len(chosen)} bugs caught by both" + (f", {rounding} of them without a proof" if rounding else "") +
          (f"; not: {', '.join(uncaught)}" if uncaught else ""))
    return 1 if uncaught else 0


if __name__ == "__main__":
    sys.exit(main())
