#!/usr/bin/env bash
# Trains a small BERT on this repository's own text, then tells with it whether eight lines are C++, Python, Markdown or CMake. Everything
# goes to runs/encoder (or to $ENCODER_DIR); a second run skips the steps that are done. Fails if the masked loss is not below the entropy of
# single tokens, or if fewer than 95% of the held-out texts of a class are told.
set -euo pipefail
cd "$(dirname "$0")/.."

run=${ENCODER_DIR:-runs/encoder}
megatron=build/bin/megatron
steps=700 class_steps=300

. scripts/steps.sh

say "1/5 text"
[ -f "$run/classes.jsonl" ] || show python3 scripts/encoder_texts.py write "$run"

say "2/5 tokens"
tokenizer=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$run/tokenizer.json")
[ -f "$run/tokenizer.json" ] || show $megatron train-tokenizer --input "$run/train.jsonl" --vocab-size 2048 \
  --special-tokens "[PAD]" "[CLS]" "[SEP]" "[MASK]" --output "$run/tokenizer.json"
for part in train held_out; do
  [ -f "$run/${part}_text_document.idx" ] || show $megatron preprocess-data --input "$run/$part.jsonl" --output-prefix "$run/$part" \
    --overwrite --workers "$(nproc)" "${tokenizer[@]}"
done

model=(--seq-length 128 --micro-batch-size 32 --global-batch-size 32 --lr-decay-style cosine --min-lr 1e-5 --lr-warmup-fraction 0.05
  --weight-decay 0.01 --clip-grad 1 --log-interval 50 --eval-iters 8)

say "3/5 masked tokens (three minutes on two cores)"
if ! trained "$run/bert" $steps; then
  rm -rf "$run/bert"
  show $megatron pretrain --task bert --bert-no-binary-head "${tokenizer[@]}" --train-data-path "$run/train_text_document" \
    --valid-data-path "$run/held_out_text_document" --num-layers 2 --hidden-size 192 --num-attention-heads 4 --max-position-embeddings 128 \
    --hidden-dropout 0 --attention-dropout 0 --short-seq-prob 0 --init-method-std 0.05 "${model[@]}" --lr 2e-3 --train-iters $steps --eval-interval $steps \
    --save-interval $steps --save "$run/bert"
fi
show python3 scripts/encoder_texts.py margin "$run/held_out_text_document" "$run/bert/metrics.jsonl"

say "4/5 classes (a minute on two cores)"
if ! trained "$run/classifier" $class_steps; then
  rm -rf "$run/classifier"
  show $megatron finetune --task classify --load "$run/bert" --bert-classes 4 --train-data-path "$run/classes.jsonl" \
    --valid-data-path "$run/held_out.jsonl" --hidden-dropout 0.1 --attention-dropout 0.1 "${model[@]}" --lr 5e-4 --train-iters $class_steps \
    --eval-interval $class_steps --save-interval $class_steps --save "$run/classifier"
fi

say "5/5 held-out files"
show $megatron classify "$run/classifier" --input "$run/held_out.jsonl" --log-samples "$run/predictions.jsonl"
show python3 scripts/encoder_texts.py classes "$run/predictions.jsonl" "$run/held_out.jsonl"
