#!/usr/bin/env bash
# Trains a small GPT on this repository's own text and lets it write. Everything goes to runs/quickstart (or to
# $QUICKSTART_DIR); a second run skips the steps that are done.
set -euo pipefail
cd "$(dirname "$0")/.."

run=${QUICKSTART_DIR:-runs/quickstart}
megatron=build/bin/megatron
recipe=recipes/quickstart.yaml
iterations=$(sed -n 's/^train_iters: *\([0-9]*\).*/\1/p' $recipe)

. scripts/steps.sh

# Text and source of this repository, without goldens of tests and docs/flags.md: numbers and tables.
list_texts() {
  if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git ls-files
  else
    find . -type f -not -path './build/*' -not -path './.venv/*' -not -path './runs/*' -printf '%P\n'
  fi | grep -E '\.(md|h|cc|cu|cuh|py|sh|cmake|yaml|flags)$|CMakeLists\.txt$|^(Makefile|LICENSE)$' | grep -vE '^(tests/golden/|docs/flags.md)' | LC_ALL=C sort
}

say "1/5 text"
if [ ! -d "$run/text" ]; then
  rm -rf "$run/text.tmp"
  mkdir -p "$run/text.tmp"
  list_texts | while read -r file; do
    [ ! -f "$file" ] || cp "$file" "$run/text.tmp/${file//\//__}"
  done
  mv "$run/text.tmp" "$run/text"
fi
echo "$(ls "$run/text" | wc -l) files of this repository, $(($(cat "$run"/text/* | wc -c) / 1024)) KiB, in $run/text"

say "2/5 tokenizer"
if [ ! -f "$run/tokenizer.json" ]; then
  show $megatron train-tokenizer --input "$run/text" --vocab-size 4096 --output "$run/tokenizer.json"
else
  echo "$run/tokenizer.json is there"
fi

say "3/5 tokens"
if [ ! -f "$run/data_text_document.idx" ]; then
  show $megatron preprocess-data --input "$run/text" --output-prefix "$run/data" --overwrite --append-eod --workers "$(nproc)" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$run/tokenizer.json"
else
  echo "$run/data_text_document.bin is there"
fi

say "4/5 training ($recipe; two minutes on two cores; Ctrl-C saves, the next run goes on from there)"
latest=$(cat "$run/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)
if [ "$latest" != "$iterations" ]; then
  show $megatron pretrain --config $recipe --tokenizer-model "$run/tokenizer.json" \
    --data-path "$run/data_text_document" --save "$run/checkpoints" --load "$run/checkpoints" --start-mode resume-or-fresh
  latest=$(cat "$run/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)
  if [ "$latest" != "$iterations" ]; then
    echo "stopped after $latest of $iterations steps; \`make quickstart\` goes on from there"
    exit 0
  fi
else
  echo "trained: $iterations steps, $run/checkpoints"
fi

say "5/5 a sample"
show $megatron generate --load "$run/checkpoints" --prompt "// The" --tokens-to-generate 120 --temperature 0.8 --top-k 40 --seed 1

cat <<TEXT

Next:
  $megatron generate --load $run/checkpoints --prompt "# Architecture"    # your own prompt
  $megatron report $run/checkpoints                                       # loss curves as a page
  $megatron pretrain --help                                             # the flags that matter most; your text: see README.md
TEXT
