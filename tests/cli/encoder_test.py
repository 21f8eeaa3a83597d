#!/usr/bin/env python3
"""`megatron pretrain --task bert` and `t5`: from sentences to a model, the bits of resumed runs, what checkpoints hold, what is refused.

Usage: encoder_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import json
import os
import pathlib
import shutil

import parallel_test as ranks
import support

GOLDEN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "golden", "encoders")
SAVE_EVERY = 3
SHARDED = ["--use-megatron-fsdp", "--overlap-grad-reduce", "--overlap-param-gather"]
T5 = ["--task", "t5", "--encoder-num-layers", "1", "--decoder-num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4",
      "--seq-length", "32", "--decoder-seq-length", "16", "--hidden-dropout", "0.1", "--attention-dropout", "0.1"]


class EncoderTest(support.FolderTest):
    def start(self, count, *flags, model=ranks.MODEL):
        ranks.BINARY = support.BINARY
        run = ["pretrain", *model, *ranks.RUN, "--optimizer", "adam", "--save-interval", str(SAVE_EVERY)]
        return ranks.finish(ranks.start(count, [*run, *flags]))

    def train(self, count, *flags):
        codes, out, error = self.start(count, "--task", "bert", *flags)
        self.assertEqual(set(codes), {0}, error + out)

    def train_t5(self, count, *flags):
        codes, out, error = self.start(count, *flags, model=T5)
        self.assertEqual(set(codes), {0}, error + out)

    def refused(self, *flags):
        codes, _, error = self.start(1, *flags)
        self.assertEqual(codes, [2], error)
        return error

    def test_resumed_runs_have_the_same_bits(self):
        for count, flags in ((1, []), (2, SHARDED)):
            with self.subTest(ranks=count):
                whole, resumed = self.path(f"whole{count}"), self.path(f"resumed{count}")
                self.train(count, *flags, "--save", whole)
                name = f"iter_{SAVE_EVERY:07}"
                shutil.copytree(os.path.join(whole, name), os.path.join(resumed, name))
                self.train(count, *flags, "--load", resumed, "--save", resumed)
                self.assertEqual(ranks.tensors(resumed, 2 * SAVE_EVERY), ranks.tensors(whole, 2 * SAVE_EVERY))
                losses, again = ranks.records(whole), ranks.records(resumed)
                for iteration in range(SAVE_EVERY + 1, 2 * SAVE_EVERY + 1):
                    for loss in ("lm loss", "sop loss"):
                        self.assertEqual(again[iteration][loss], losses[iteration][loss])

    def test_sentences_are_learned(self):
        words = "one two three four five six seven eight".split()
        pathlib.Path(self.path("vocab.txt")).write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *words]) + "\n")
        tokenizer = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", self.path("vocab.txt")]
        # Sentences that follow each other: every word, and which half is first, follows from its neighbours.
        with open(self.path("text.jsonl"), "w") as file:
            for i in range(64):
                sentences = [" ".join(words[(i + j + k) % 8] for k in range(4)).capitalize() + "." for j in range(6)]
                file.write(json.dumps({"text": " ".join(sentences)}) + "\n")
        self.output("preprocess-data", "--input", self.path("text.jsonl"), "--output-prefix", self.path("text"), "--split-sentences",
                    "--punkt-params", "none", *tokenizer)
        saved = self.path("saved")
        self.output("pretrain", "--task", "bert", "--data-path", self.path("text_text_sentence"), "--split", "100,0,0", *tokenizer,
                    "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32",
                    "--position-embedding-type", "rope", "--hidden-dropout", "0", "--attention-dropout", "0", "--micro-batch-size", "8",
                    "--global-batch-size", "32", "--train-iters", "180", "--lr", "3e-3", "--init-method-std", "0.1", "--masking-max-ngram", "1",
                    "--eval-iters", "0", "--log-interval", "1",
                    "--num-workers", "0", "--num-threads", "1", "--device", "cpu", "--save", saved)
        losses = ranks.records(saved)
        lm, order = (sum(losses[i][loss] for i in range(161, 181)) / 20 for loss in ("lm loss", "sop loss"))
        self.assertLess(lm, 1.2)  # the entropy of eight words and a full stop: 2.2
        self.assertLess(order, 0.6)  # two classes: 0.69

    def test_checkpoints_say_what_they_hold(self):
        saved = self.path("saved")
        self.train(1, "--save", saved, "--bert-no-binary-head")
        stored = pathlib.Path(saved, f"iter_{2 * SAVE_EVERY:07}", "config.yaml").read_text()
        self.assertIn("model_type: bert\n", stored)
        self.assertIn("bert_binary_head: false\n", stored)
        self.assertNotIn("sop loss", ranks.records(saved)[1])
        names = ranks.tensors(saved, 2 * SAVE_EVERY)
        self.assertFalse([name for name in names if "tokentype" in name or "binary_head" in name or "pooler" in name])
        codes, _, error = self.start(1, "--load", saved, "--finetune", "--save", self.path("gpt"))
        self.assertEqual(codes, [1])
        self.assertIn("holds a model of type bert, expected one of type gpt", error)
        done = support.call("generate", "--load", saved, "--prompt", "Once")
        self.assertEqual(done.returncode, 1)
        self.assertIn("an encoder continues no text", done.stderr)

    def test_resumed_runs_of_t5_have_the_same_bits(self):
        recompute = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
        stages = ["--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", "Eet|tL"]
        for layout, flags in (("sharded", [*SHARDED, *recompute]), ("stages", stages)):
            with self.subTest(layout=layout):
                whole, resumed = self.path(f"whole_{layout}"), self.path(f"resumed_{layout}")
                self.train_t5(2, *flags, "--save", whole)
                name = f"iter_{SAVE_EVERY:07}"
                shutil.copytree(os.path.join(whole, name), os.path.join(resumed, name))
                self.train_t5(2, *flags, "--load", resumed, "--save", resumed)
                self.assertEqual(ranks.tensors(resumed, 2 * SAVE_EVERY), ranks.tensors(whole, 2 * SAVE_EVERY))
                losses, again = ranks.records(whole), ranks.records(resumed)
                for iteration in range(SAVE_EVERY + 1, 2 * SAVE_EVERY + 1):
                    self.assertEqual(again[iteration]["lm loss"], losses[iteration]["lm loss"])

    def test_checkpoints_of_t5_say_what_they_hold(self):
        saved = self.path("saved")
        self.train_t5(1, "--save", saved)
        stored = pathlib.Path(saved, f"iter_{2 * SAVE_EVERY:07}", "config.yaml").read_text()
        for line in ("model_type: t5\n", "num_layers: 3\n", "encoder_num_layers: 1\n", "decoder_num_layers: 2\n", "decoder_seq_length: 16\n"):
            self.assertIn(line, stored)
        names = ranks.tensors(saved, 2 * SAVE_EVERY)
        for name in ("encoder.layers.0.self_attention.linear_qkv.weight", "encoder.final_layernorm.weight",
                     "decoder.layers.1.pre_cross_attn_layernorm.weight", "decoder.layers.1.cross_attention.linear_kv.weight",
                     "lm_head.output_layer.bias", "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"):
            self.assertIn(name, names)
        self.assertFalse([name for name in names if name.startswith(("encoder.layers.1", "encoder.layers.0.cross_attention"))])
        # The same flags from the checkpoint; --num-layers, without a spelling of T5's own, would be those of the encoder.
        codes, _, error = self.start(1, "--task", "t5", "--load", saved, "--use-checkpoint-args", "--finetune", model=[])
        self.assertEqual(codes, [0], error)
        self.assert_error(1, "the tokenizer has neither a first token nor a padding token for the decoder to start from", "generate",
                          "--load", saved, "--prompt", "Once", "--tokens-to-generate", "4")

    def test_folders_of_t5_are_read_trained_and_written(self):
        folder = os.path.join(GOLDEN, "t5_v1_1")
        # The prompt alone, and beside a longer one.
        flags = ["--tokens-to-generate", "5", "--greedy", "--ignore-eod", "--json"]
        alone = json.loads(self.output("generate", "--load", folder, "--prompt", "5 6 7", *flags))[0]["tokens"]
        both = json.loads(self.output("generate", "--load", folder, "--prompt", "5 6 7", "9 8 7 6 5 4 3", *flags))
        self.assertEqual(len(alone), 5)
        self.assertEqual(both[0]["tokens"], alone)
        self.assertNotEqual(both[1]["tokens"], alone)
        self.assert_error(1, "prompt 1 has 513 tokens, the encoder reads 512", "generate", "--load", folder, "--prompt", " ".join(["5"] * 512), *flags)
        run = ["--mock-data", "--seq-length", "32", "--decoder-seq-length", "16", "--micro-batch-size", "2", "--global-batch-size", "2",
               "--train-iters", "2", "--lr", "1e-3", "--eval-iters", "0", "--num-workers", "0", "--device", "cpu", "--num-threads", "1"]
        done = support.call("pretrain", "--task", "t5", "--load", folder, "--save", self.path("run"), *run)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(f"starting from the weights of {folder}", done.stdout + done.stderr)
        self.output("convert-checkpoint", "--load", self.path("run"), "--save", self.path("out"))
        theirs, ours = (support.read_safetensors(os.path.join(path, "model.safetensors")) for path in (folder, self.path("out")))
        self.assertEqual({name: tensor[0] for name, tensor in theirs.items()}, {name: tensor[0] for name, tensor in ours.items()})

    def test_bad_flags_are_named(self):
        self.assertIn("--mask-prob is 0", self.refused("--task", "bert", "--mask-prob", "0"))
        self.assertIn("--mask-prob has no effect with --task gpt", self.refused("--mask-prob", "0.2"))
        self.assertIn("--bert-no-binary-head has no effect with --task gpt", self.refused("--bert-no-binary-head"))
        self.assertIn("--eod-mask-loss has no effect with --task bert", self.refused("--task", "bert", "--eod-mask-loss"))
        packed = self.refused("--task", "bert", "--bert-data", "packed", "--remove-padding", "true", "--short-seq-prob", "0.2")
        self.assertIn("--bert-data packed with the binary head: packed samples have no two halves", packed)
        self.assertIn("--remove-padding true: samples of --bert-data packed have no padding", packed)
        self.assertIn("--short-seq-prob has no effect with --bert-data packed", packed)
        self.assertIn("--bert-data has no effect with --task t5", self.refused("--task", "t5", "--bert-data", "packed"))

    def test_a_plan_counts_the_logits_of_masked_tokens(self):
        flags = ["--world-size", "1", "--task", "bert", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "30521",
                 "--num-layers", "24", "--hidden-size", "1024", "--num-attention-heads", "16", "--seq-length", "512",
                 "--max-position-embeddings", "512", "--micro-batch-size", "4", "--global-batch-size", "4", "--train-iters", "1",
                 "--lr", "1e-4", "--make-vocab-size-divisible-by", "8"]
        text = self.output("check", *flags)
        # BERT-large: embeddings, 24 layers, both heads
        h, v = 1024, 30528
        layer = 12 * h * h + 13 * h
        count = v * h + 512 * h + 2 * h + 24 * layer + 2 * h + (h * h + h) + 2 * h + v + (h * h + h) + 2 * h + 2
        self.assertIn(f"{count:,}", text)


if __name__ == "__main__":
    support.main()
