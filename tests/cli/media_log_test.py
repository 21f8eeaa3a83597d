"""What runs on images log: rates, how evenly replicas have patches, gradient norms of parts, samples left out; compared with counts by hand."""
import glob
import json
import math
import os
import subprocess

import support
from media_model import SAME, write_media_model
from mimo_test import IMAGES, MODEL, RUN
from ports import free_port

STEPS, PATCHES = 3, 4  # of an image of 28x28
PARTS = ("vision_model", "vision_projection", "language_model")


class MediaLogTest(support.FolderTest):
    def setUp(self):
        super().setUp()
        write_media_model(self.path("llava"), "llava")

    def rows(self, *counts):
        """A row with so many images each, longer than half a sequence; one that is too long, and one of which nothing counts."""
        texts = [{"images": [IMAGES[i % 4] for i in range(n)], "caption": "abcd" * (12 - n)} if n > 0 else
                 {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "abcd" * 10}]} for n in counts]
        texts += [{"image": IMAGES[0], "caption": 70 * "a"}, {"conversations": [{"from": "human", "value": "q"}]}]
        with open(self.path("rows.jsonl"), "w") as file:
            file.write("".join(json.dumps(row) + "\n" for row in texts))

    def train(self, name, ranks, *more):
        command = [support.BINARY, "pretrain", *RUN, *MODEL, "--data-path", self.path("rows.jsonl"), "--media-root",
                   os.path.join(SAME, "json", "media"), "--media-model", self.path("llava"), "--tokenizer-type", "HuggingFaceTokenizer",
                   "--tokenizer-model", self.path("llava"), "--train-iters", str(STEPS), "--save", self.path(name), "--sft-long-conversations", "drop",
                   "--hidden-dropout", "0", "--num-workers", "0", *more]
        environment = dict(os.environ, OMP_NUM_THREADS="1", WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), GROUP_RANK="0",
                           MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        if ranks == 1:
            environment = dict(os.environ, OMP_NUM_THREADS="1")
        processes = [subprocess.Popen(command, env=dict(environment, RANK=str(rank), LOCAL_RANK=str(rank)) if ranks > 1 else environment,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in range(ranks)]
        outputs = [process.communicate(timeout=120) for process in processes]
        self.assertEqual([process.returncode for process in processes], [0] * ranks, outputs)
        with open(os.path.join(self.path(name), "metrics.jsonl")) as file:
            records = [json.loads(line) for line in file]
        return outputs[0][0], [row for row in records if row["type"] == "train"], [row for row in records if row["type"] == "samples"]

    def check_rates(self, steps, images):
        self.assertEqual(len(steps), STEPS)
        for step in steps:
            self.assertAlmostEqual(step["images_per_second"] * step["seconds_per_iteration"], images, 6)
            self.assertAlmostEqual(step["patches_per_second"] * step["seconds_per_iteration"], images * PATCHES, 6)
            self.assertNotIn("sounds_per_second", step)
            # Without workers the loader decodes while the step waits.
            self.assertGreater(step["loader wait ms"], 0.01)
            self.assertLess(step["loader wait ms"], 1e3 * step["seconds_per_iteration"])

    def check_norms(self, steps):
        for step in steps:
            norms = [step["grad norm " + part] for part in PARTS]
            self.assertGreater(min(norms), 0)
            self.assertAlmostEqual(math.hypot(*norms) / step["grad_norm"], 1, 6)

    def test_two_replicas(self):
        # 8 images a step. Whoever has the row of 5, has another one of 1: 6 of 8.
        self.rows(1, 1, 1, 5)
        line, steps, samples = self.train("two", 2, "--wandb-project", "p", "--tensorboard-dir", self.path("tb"))
        self.check_rates(steps, 8)
        self.assertEqual([step["patches max/mean"] for step in steps], [1.5] * STEPS)
        self.check_norms(steps)
        self.assertEqual([{k: v for k, v in row.items() if k not in ("type", "time")} for row in samples],
                         [{"iteration": 0, "dropped_too_long": 1, "dropped_without_counted_tokens": 1, "with_bad_media": 0, "cut": 0}])
        for text in ("images per second: ", "patches per second: ", "patches max/mean: 1.500000E+00", "grad norm vision_model: "):
            self.assertIn(text, line)
        # The other sinks have the same numbers.
        with open(glob.glob(os.path.join(self.path("tb"), "events*"))[0], "rb") as file:
            events = file.read()
        with open(glob.glob(os.path.join(self.path("two"), "wandb", "offline-run-*", "run-*.wandb"))[0], "rb") as file:
            wandb = file.read()
        for name in ("images-per-second", "patches-per-second", "patches max/mean", "samples dropped_too_long",
                     *("grad norm " + part for part in PARTS)):
            self.assertIn(name.encode(), events)
            self.assertIn(name.encode(), wandb)
        # The same norms as of one rank, of each part.
        _, one, _ = self.train("one", 1)
        self.check_rates(one, 8)
        self.assertNotIn("patches max/mean", one[0])
        for part in PARTS:
            for own, whole in zip(steps, one):
                self.assertAlmostEqual(own["grad norm " + part] / whole["grad norm " + part], 1, 4)

    def test_balance_shows(self):
        self.rows(1, 2, 3, 4)
        _, steps, _ = self.train("even", 2, "--use-distributed-optimizer")
        self.check_rates(steps, 10)
        self.assertEqual([step["patches max/mean"] for step in steps], [1.0] * STEPS)
        self.check_norms(steps)

    def test_encoders_on_ranks_of_their_own(self):
        # A rank that encodes for two replicas, of which one at least has no image; 6 images a step.
        own = ("--encoder-data-parallel-size", "1")
        self.rows(0, 0, 1, 5)
        _, steps, _ = self.train("own", 3, *own)
        _, one, _ = self.train("one", 1)
        self.check_rates(steps, 6)
        self.check_norms(steps)
        self.assertEqual([step["patches max/mean"] for step in steps], [5 / 3] * STEPS)
        for ranks, whole in zip(steps, one):
            for key in ("lm loss", "grad_norm", *("grad norm " + part for part in PARTS)):
                self.assertAlmostEqual(ranks[key] / whole[key], 1, 4, key)
        # Each goes on with what the other saved, and no replica has an image.
        self.rows(0, 0, 0, 0)
        more = ("--start-mode", "resume", "--accept-new-data-order", "--use-checkpoint-opt-param-scheduler", "--train-iters", str(STEPS + 1))
        _, steps, _ = self.train("one", 3, *own, *more)
        _, one, _ = self.train("own", 1, *more)
        for step in (steps[-1], one[-1]):
            self.assertEqual((step["iteration"], step["grad norm vision_model"]), (STEPS + 1, 0))
        self.assertAlmostEqual(steps[-1]["lm loss"] / one[-1]["lm loss"], 1, 4)

    def test_frozen_parts_have_none(self):
        self.rows(1, 1, 1, 5)
        _, steps, _ = self.train("frozen", 1, "--freeze-except", "vision_projection")
        for step in steps:
            self.assertEqual((step["grad norm vision_model"], step["grad norm language_model"]), (0, 0))
            self.assertAlmostEqual(step["grad norm vision_projection"], step["grad_norm"], 9)


if __name__ == "__main__":
    support.main()
