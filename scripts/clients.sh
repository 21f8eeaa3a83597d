#!/usr/bin/env bash
# scripts/clients.sh BINARY: runs tests/clients, which show our files and our server to programs that are not ours. Installs what is
# missing: wandb, openai, requests and websocket-client in a virtual environment of its own under build/, promtool, curl and
# chromium (where the distribution has it as a package) from the distribution.
set -euo pipefail
cd "$(dirname "$0")/.."

PACKAGES=(wandb==0.31.0 openai==3.54.0 requests websocket-client==1.9.2)
venv=build/clients-venv

[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check install --quiet "${PACKAGES[@]}"
privileged=$([ "$(id -u)" = 0 ] || echo sudo)
install() {  # install PROGRAM PACKAGE
  command -v "$1" >/dev/null || $privileged env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$2" >/dev/null
}
for program in promtool curl chromium; do
  command -v "$program" >/dev/null || { $privileged apt-get update -qq; break; }
done
install promtool prometheus
install curl curl
install chromium chromium || echo "no package of chromium here: the page is not opened in it"
export PATH="$PWD/$venv/bin:$PATH"
for test in tests/clients/*_test.py; do
  "$venv/bin/python" "$test" "$1"
done
