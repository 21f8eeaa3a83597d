#!/usr/bin/env bash
# Formats the sources with the one version of clang-format that everybody uses; installs it into .venv when it is missing.
#
#   scripts/format.sh           writes
#   scripts/format.sh --check   fails and names the files that differ
set -euo pipefail
cd "$(dirname "$0")/.."

VERSION=20.1.8
TOOL=.venv/bin/clang-format

if ! "$TOOL" --version 2>/dev/null | grep -q "version $VERSION"; then
  .venv/bin/python -m pip --quiet --disable-pip-version-check install "clang-format==$VERSION" || {
    echo "error: clang-format $VERSION could not be installed from PyPI" >&2
    echo "hint: check the network and the proxy settings; make setup makes .venv" >&2
    exit 1
  }
fi

sources() { git ls-files -z '*.h' '*.cc' '*.cu' '*.cuh' | xargs -0 -P "$(nproc)" -n 64 "$@"; }

if [ "${1:-}" != --check ]; then
  sources "$TOOL" -i
elif ! found=$(sources "$TOOL" --dry-run -Werror 2>&1); then
  echo "error: not formatted: $(grep -o '^[^ :]*:[0-9]*:[0-9]*: error' <<<"$found" | cut -d: -f1 | sort -u | tr '\n' ' ')" >&2
  echo "hint: make format" >&2
  exit 1
fi
