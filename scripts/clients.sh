#!/usr/bin/env bash
# scripts/clients.sh BINARY [TEST ...]: runs tests/clients (or some of them: serving, load, routers, metrics), which show our files and our
# server to programs that are not ours, the server with SmolLM2. Installs what is missing: Python packages in virtual environments of
# their own under build/venv/, promtool, curl, haproxy and chromium (where the distribution has it as a package) from the distribution.
set -euo pipefail
cd "$(dirname "$0")/.."

# By environment: the requirements of some packages contradict each other.
declare -A PACKAGES=(
  [clients]="wandb==0.31.0 openai==3.54.0 lm-eval[api]==0.4.13 pydantic requests websocket-client==1.9.2"
  [aiperf]="aiperf==0.13.0"
  [router]="vllm-router==0.1.17"
)
for name in "${!PACKAGES[@]}"; do
  venv=build/venv/$name
  [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
  # shellcheck disable=SC2086
  "$venv/bin/python" -m pip --disable-pip-version-check install --quiet ${PACKAGES[$name]}
done
privileged=$([ "$(id -u)" = 0 ] || echo sudo)
install() {  # install PROGRAM PACKAGE
  command -v "$1" >/dev/null || $privileged env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$2" >/dev/null
}
for program in promtool curl haproxy chromium; do
  command -v "$program" >/dev/null || { $privileged apt-get update -qq; break; }
done
install promtool prometheus
install curl curl
install haproxy haproxy
install chromium chromium || echo "no package of chromium here: the page is not opened in it"
export PATH="$PWD/build/venv/clients/bin:$PATH:$PWD/build/venv/aiperf/bin:$PWD/build/venv/router/bin"
SMOLLM2="$PWD/$(scripts/chat.sh --fetch)"
export SMOLLM2
binary=$1
shift
for name in "${@:-serving routers load metrics}"; do
  # shellcheck disable=SC2086
  for test in $name; do
    build/venv/clients/bin/python "tests/clients/${test}_test.py" "$binary"
  done
done
