#!/usr/bin/env bash
# Trains a tiny GPT that reads neighbours on random passages, of which each stands in two documents, and the same GPT without them. Everything
# goes to runs/retrieval (or to $RETRIEVAL_DIR); a second run skips the steps that are done. Fails unless retrieval halves the loss on documents
# that it has not seen, whose passages stand in training documents, and unless that gain is gone with neighbours of other chunks.
set -euo pipefail
cd "$(dirname "$0")/.."

run=${RETRIEVAL_DIR:-runs/retrieval}
megatron=build/bin/megatron
steps=500

. scripts/steps.sh

say "1/5 text"
[ -f "$run/held_out.jsonl" ] || show python3 scripts/retrieval_texts.py write "$run"
for part in train held_out; do
  [ -f "$run/${part}_text_document.idx" ] || show $megatron preprocess-data --input "$run/$part.jsonl" --output-prefix "$run/$part" \
    --tokenizer-type ByteLevelTokenizer --append-eod
done

data=(--tokenizer-type ByteLevelTokenizer --train-data-path "$run/train_text_document" --valid-data-path "$run/held_out_text_document"
  --seq-length 128 --micro-batch-size 16 --global-batch-size 16 --train-iters $steps --eval-interval $steps --eval-iters 6)
model=(--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 128 --hidden-dropout 0 --attention-dropout 0
  --init-method-std 0.1 --lr 3e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 --adam-beta2 0.98 --weight-decay 0.01
  --clip-grad 1 --log-interval 100 --save-interval $steps)
retro=(--task retro --retro-chunk-length 8 --retro-num-neighbors 1 --retro-layers 1 --retro-encoder-num-layers 1 --retro-encoder-hidden-dropout 0
  --retro-encoder-attention-dropout 0)

# Texts that are equal have equal vectors whatever the encoder has learned.
say "2/5 a database and neighbours (half a minute on two cores)"
[ -d "$run/embedder" ] || show $megatron pretrain --task bert --bert-no-binary-head --mock-data --tokenizer-type BertWordPieceLowerCase \
  --vocab-file "$run/vocab.txt" --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 \
  --micro-batch-size 4 --global-batch-size 4 --train-iters 1 --lr 1e-4 --eval-iters 0 --save "$run/embedder"
show $megatron retro --retro-project-dir "$run/project" --retro-embedder "$run/embedder" --retro-chunk-length 8 \
  --retro-query-num-neighbors-query 20 --retro-query-num-neighbors-save 1 "${data[@]}"

say "3/5 without retrieval (a minute on two cores)"
trained "$run/gpt" $steps || show $megatron pretrain "${data[@]}" "${model[@]}" --save "$run/gpt" | tee "$run/gpt.log"

say "4/5 with retrieval (three minutes on two cores)"
trained "$run/retro" $steps || show $megatron pretrain "${retro[@]}" --retro-project-dir "$run/project" "${data[@]}" "${model[@]}" \
  --save "$run/retro" | tee "$run/retro.log"

say "5/5 neighbours of other chunks"
show python3 scripts/retrieval_texts.py exchange "$run/project" "$run/others"
show $megatron pretrain "${retro[@]}" --retro-project-dir "$run/others" "${data[@]}" "${model[@]}" --load "$run/retro" --skip-train |
  tee "$run/others.log"
show python3 scripts/retrieval_texts.py gain "$run/gpt.log" "$run/retro.log" "$run/others.log"
