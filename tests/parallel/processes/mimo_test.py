#!/usr/bin/env python3
"""A GPT that reads images on ranks that are processes over Gloo: losses and gradient norms of each row against one rank; runs that are killed
and go on with other data-parallel sizes and workers.

Usage: mimo_test.py MEGATRON [unittest arguments]. MEGATRON_MIMO_KILLS: how often each series is killed (default 2); MEGATRON_MIMO_KILLS_SEED.
"""
import json
import os
import random
import re
import shutil
import tempfile
import time

import training
from media_model import SAME, write_media_model
from support import read_safetensors

KILLS = int(os.environ.get("MEGATRON_MIMO_KILLS", "2"))

TP, PP, SP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--sequence-parallel"


class Mimo(training.Training):
    MODEL = ["--task", "mimo", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "24",
             "--position-embedding-type", "rope", "--attention-dropout", "0.1", "--vision-model-type", "clip", "--vision-num-layers", "2",
             "--vision-hidden-size", "16", "--vision-ffn-hidden-size", "24", "--vision-num-attention-heads", "2", "--img-h", "8", "--img-w",
             "8", "--patch-dim", "4", "--disable-vision-class-token", "--image-token-id", "500", "--micro-batch-size", "2",
             "--global-batch-size", "8", "--device", "cpu", "--num-threads", "1", "--distributed-timeout-minutes", "1"]

    def test_rows_train_what_one_rank_trains(self):
        zero3 = ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params", "--overlap-grad-reduce",
                 "--overlap-param-gather"]
        rows = {"tp2_sp_pp2": (4, [TP, "2", SP, PP, "2"]), "tp2_dp2_zero3": (4, [TP, "2", *zero3]),
                "cp2": (2, ["--context-parallel-size", "2"]),
                "v_pp2": (2, [PP, "2", "--pipeline-model-parallel-layout", "V|EttL"])}
        self.compare(rows, self.train(1), ("lm loss", "grad_norm"))


class Killed(training.Training):
    """Every loss is a function of the tokens and pixels of a global batch and of those before it."""
    STEPS = 8 + 2 * KILLS
    FLAGS = ["pretrain", *Mimo.MODEL, "--vision-hidden-size", "32", "--img-h", "28", "--img-w", "28", "--patch-dim", "14", "--seq-length",
             "40", "--image-token-id", "260", "--micro-batch-size", "1", "--global-batch-size", "6", "--train-iters", str(STEPS), "--lr",
             "1e-3", "--log-interval", "1", "--eval-iters", "0", "--split", "100,0,0", "--save-interval", "1", "--start-mode",
             "resume-or-fresh"]

    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        model, rows = os.path.join(self.folder, "llava"), os.path.join(self.folder, "rows.jsonl")
        write_media_model(model, "llava")
        with open(rows, "w", encoding="utf-8") as file:
            for i in range(40):
                image = ["0_img1.png", "1_img1.jpg", "3_img1.png"][i % 3]
                file.write(json.dumps({"image": image, "caption": "xyzw"[i % 4] * (1 + i % 11)}) + "\n")
        self.flags = [*self.FLAGS, "--data-path", rows, "--media-root", os.path.join(SAME, "json", "media"), "--media-model", model,
                      "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", model]
        self.chance = random.Random(int(os.environ.get("MEGATRON_MIMO_KILLS_SEED", "1")))
        self.whole = self.finish("whole", 1, 0)

    def path(self, name):
        return os.path.join(self.folder, name)

    def losses(self, name):
        """(iteration, loss) of all lines: a step that was made again has several."""
        with open(os.path.join(self.path(name), "metrics.jsonl"), encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        return [(line["iteration"], line["lm loss"]) for line in lines if line["type"] == "train"]

    def finish(self, name, ranks, workers):
        codes, out, err = training.run(ranks, [*self.flags, "--save", self.path(name), "--num-workers", str(workers)])
        self.assertEqual(codes, [0] * ranks, out + err)
        return dict(self.losses(name))

    def saved(self, name):
        """Published checkpoints; what a kill left of another one has another name."""
        return [f for f in (os.listdir(self.path(name)) if os.path.exists(self.path(name)) else []) if re.fullmatch(r"iter_\d{7}", f)]

    def kill(self, name, ranks, workers):
        """Kills all ranks a moment after a checkpoint appeared."""
        before = len(self.saved(name))
        with open(self.path("output"), "w+", encoding="utf-8") as output:
            processes = training.start(ranks, [*self.flags, "--save", self.path(name), "--num-workers", str(workers)], output)
            while len(self.saved(name)) == before and processes[0].poll() is None:
                time.sleep(0.002)
            time.sleep(self.chance.random() * 0.05)
            for process in processes:
                process.kill()
            for process in processes:
                process.wait(timeout=60)
            output.seek(0)
            self.assertGreater(len(self.saved(name)), before, output.read())

    def test_the_stream_goes_on_with_other_ranks_and_workers(self):
        for _ in range(KILLS):
            self.kill("mixed", self.chance.choice([1, 2, 3]), self.chance.choice([0, 1, 4]))
        self.finish("mixed", 3, 1)
        seen = self.losses("mixed")
        self.assertEqual({step for step, _ in seen}, set(range(1, self.STEPS + 1)))
        for step, loss in seen:
            self.assertAlmostEqual(loss / self.whole[step], 1, delta=2e-5, msg=str(step))

    def test_the_same_layout_has_the_same_bits(self):
        for _ in range(KILLS):
            self.kill("same", 1, self.chance.choice([0, 1, 4]))
        self.finish("same", 1, 2)
        for step, loss in self.losses("same"):
            self.assertEqual(loss, self.whole[step], step)
        last = f"iter_{self.STEPS:07d}"
        parts = [name for name in os.listdir(os.path.join(self.path("same"), last)) if name.endswith(".safetensors")]
        self.assertTrue(parts)
        for part in parts:
            ours, theirs = (read_safetensors(os.path.join(self.path(name), last, part)) for name in ("same", "whole"))
            self.assertEqual(ours, theirs, part)


if __name__ == "__main__":
    training.main()
