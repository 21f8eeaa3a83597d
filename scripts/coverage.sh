#!/usr/bin/env bash
# Line coverage of the folders without libtorch, by their tests: a table per file, the total per folder at the end.
# Fails when a folder has less than 85 %. Of folders that need libtorch only the rest is built and shown, without a floor:
# their tests are not in this build.
set -euo pipefail
cd "$(dirname "$0")/.."
. .venv/toolchain.sh

scripts/build.sh coverage
find build/coverage -name '*.gcda' -delete
"$CTEST" --preset coverage -j "$(nproc)"
# In an environment of its own: in .venv pip would complain about what torch leaves out there.
gcovr=build/gcovr/bin/gcovr
if ! "$gcovr" --help 2>/dev/null | grep -q -e --merge-lines; then
  python3 -m venv build/gcovr
  build/gcovr/bin/python -m pip --disable-pip-version-check install --quiet 'gcovr>=8.5,<9'
fi
gcov=gcov
case "$CXX" in *-[0-9]*) gcov=gcov-${CXX##*-} ;; esac
# --merge-lines: a line of a template counts once, not once per instantiation.
"$gcovr" --merge-lines --gcov-executable "$gcov" --root . --object-directory build/coverage --filter megatron/ \
  --exclude-throw-branches --gcov-ignore-parse-errors=negative_hits.warn \
  --json-summary build/coverage/summary.json --html-details build/coverage/index.html --txt -
echo "pages: build/coverage/index.html"
python3 - <<'PYTHON'
import json
import sys
from collections import defaultdict

MINIMUM = 85
FOLDERS = ("base", "chat", "comm", "datasets", "dist_checkpointing", "kernels", "scheduling", "serving", "tokenizers")

covered, total = defaultdict(int), defaultdict(int)
for file in json.load(open("build/coverage/summary.json"))["files"]:
    for folder in (file["filename"].split("/")[1], "all"):
        covered[folder] += file["line_covered"]
        total[folder] += file["line_total"]
for folder in sorted(total, key=lambda f: (f == "all", f)):
    print(f"{folder:20} {covered[folder]:6} of {total[folder]:6} lines  {100 * covered[folder] / total[folder]:5.1f} %")
low = [folder for folder in FOLDERS if 100 * covered[folder] < MINIMUM * total[folder]]
if low:
    sys.exit(f"error: line coverage below {MINIMUM} %: {', '.join(low)}")
PYTHON
