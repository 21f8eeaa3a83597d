#!/usr/bin/env bash
# Trains a tiny T5 to reverse texts of 12 symbols, then lets it write the reversals of texts that it has not seen. Everything goes to
# runs/reversal (or to $REVERSAL_DIR); a second run skips the steps that are done. Fails if fewer than 95% are exact.
set -euo pipefail
cd "$(dirname "$0")/.."

run=${REVERSAL_DIR:-runs/reversal}
megatron=build/bin/megatron
steps=800

. scripts/steps.sh

say "1/3 texts"
[ -f "$run/unseen.jsonl" ] || show python3 scripts/reversal_pairs.py write "$run"

say "2/3 training (half a minute on two cores)"
if ! trained "$run/t5" $steps; then
  rm -rf "$run/t5"
  show $megatron pretrain --task seq2seq --tokenizer-type BertWordPieceLowerCase --vocab-file "$run/vocab.txt" \
    --train-data-path "$run/train.jsonl" --valid-data-path "$run/unseen.jsonl" --encoder-num-layers 2 --decoder-num-layers 2 \
    --hidden-size 64 --num-attention-heads 4 --seq-length 13 --decoder-seq-length 13 --max-position-embeddings 16 \
    --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 64 --lr 3e-3 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.05 \
    --weight-decay 0.01 --clip-grad 1 --train-iters $steps --log-interval 100 --eval-interval $steps --eval-iters 4 --save-interval $steps \
    --save "$run/t5"
fi

say "3/3 texts that it has not seen"
show $megatron seq2seq "$run/t5" --input "$run/unseen.jsonl" --log-samples "$run/predictions.jsonl"
show python3 scripts/reversal_pairs.py told "$run/predictions.jsonl"
