#!/usr/bin/env bash
# scripts/clients.sh BINARY: runs tests/clients, which show our files to programs that are not ours. Installs what is missing:
# wandb in a virtual environment of its own under build/, promtool from the distribution.
set -euo pipefail
cd "$(dirname "$0")/.."

WANDB="wandb==0.31.0"
venv=build/clients-venv

[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check install --quiet "$WANDB"
if ! command -v promtool >/dev/null; then
  privileged=$([ "$(id -u)" = 0 ] || echo sudo)
  $privileged apt-get update -qq
  $privileged env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus >/dev/null
fi
export PATH="$PWD/$venv/bin:$PATH"
for test in tests/clients/*_test.py; do
  "$venv/bin/python" "$test" "$1"
done
