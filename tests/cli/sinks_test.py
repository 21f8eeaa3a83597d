#!/usr/bin/env python3
"""Where a run's numbers go: the file of Weights & Biases, the file for Prometheus, and sinks that fail.

Usage: sinks_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import glob
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import unittest

import support
import wandb_reader

RUN = ["--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "16",
       "--tokenizer-type", "ByteLevelTokenizer", "--mock-data", "--micro-batch-size", "1", "--lr", "1e-3", "--log-interval", "2",
       "--eval-interval", "4", "--eval-iters", "1", "--device", "cpu", "--num-threads", "1"]


def wandb_files(folder):
    return sorted(glob.glob(os.path.join(folder, "wandb", "offline-run-*", "run-*.wandb")))


def of_kind(records, kind):
    return [content for k, content in records if k == kind]


def metrics(folder):
    with open(os.path.join(folder, "metrics.jsonl")) as file:
        return [json.loads(line) for line in file]


class SinksTest(support.FolderTest):
    def train(self, *flags):
        return self.run_ok("pretrain", *RUN, *flags)

    def start(self, *flags):
        """A run in the background; its lines go to the file `out`."""
        with open(self.path("out"), "w") as out:
            process = subprocess.Popen([support.BINARY, "pretrain", *RUN, *flags], stdout=out, stderr=subprocess.PIPE, text=True,
                                       env=dict(os.environ, OMP_NUM_THREADS="1"))
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def lines(self):
        with open(self.path("out")) as file:
            return [line for line in file if " iteration " in line and "consumed samples" in line]

    def wait_until(self, process, condition):
        deadline = time.monotonic() + 60
        while not condition():
            self.assertIsNone(process.poll())
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)

    # -- Weights & Biases

    def test_a_run_in_wandb(self):
        save = self.path("run")
        flags = ["--save", save, "--wandb-project", "small models", "--wandb-entity", "us", "--wandb-exp-name", "first \u03b2",
                 "--train-iters", "6"]
        self.train(*flags, "--exit-interval", "4")
        (first,) = wandb_files(save)
        self.assertRegex(first, r"/offline-run-\d{8}_\d{6}-([a-z0-9]{8})/run-\1\.wandb$")
        records = wandb_reader.read(first)
        self.assertEqual([kind for kind, _ in records[:2]], ["header", "run"])
        run = records[1][1]
        self.assertEqual((run["entity"], run["project"], run["name"], run["host"], run["resume"]),
                         ("us", "small models", "first \u03b2", socket.gethostname(), 1))
        self.assertLess(abs(run["time"] - time.time()), 600)
        self.assertEqual((run["config"]["hidden_size"], run["config"]["lr"], run["config"]["mock_data"]), (32, 1e-3, True))
        self.assertEqual(of_kind(records, "config")[0]["run"]["device"], "cpu")
        rows = of_kind(records, "history")
        self.assertEqual([row["_step"] for row in rows], [1, 2, 3, 4])
        for row in rows:
            for key in ("lm loss", "learning-rate", "grad-norm", "_timestamp", "_runtime", "consumed_samples"):
                self.assertIn(key, row)
        # The row of a step also has what was measured at it.
        self.assertIn("lm loss validation", rows[3])
        by_iteration = {r["iteration"]: r for r in metrics(save) if r["type"] == "train"}
        self.assertEqual(rows[0]["lm loss"], by_iteration[1]["lm loss"])
        self.assertEqual(of_kind(records, "summary")[-1]["lm loss"], rows[-1]["lm loss"])
        self.assertEqual(records[-1][0], "exit")
        self.assertEqual(records[-1][1][1], 0)

        # Resumed: the same run in a new file.
        self.train(*flags, "--start", "resume")
        second = [path for path in wandb_files(save) if path != first]
        self.assertEqual(len(second), 1)
        later = wandb_reader.read(second[0])
        self.assertEqual(later[1][1]["id"], run["id"])
        self.assertEqual([row["_step"] for row in of_kind(later, "history")], [5, 6])

        # A new run is another one, and a resumed run of another project, too.
        self.train("--save", self.path("other"), "--wandb-save-dir", save, "--wandb-project", "small models", "--train-iters", "1")
        self.train("--load", save, "--save", self.path("third"), "--wandb-save-dir", save, "--wandb-project", "p",
                   "--train-iters", "6")
        ids = {wandb_reader.read(path)[1][1]["id"] for path in wandb_files(save)}
        self.assertEqual((len(wandb_files(save)), len(ids)), (4, 3))

    def test_a_killed_run_is_whole_up_to_a_row(self):
        save = self.path("run")
        # Each file is written by a thread of its own: a step takes longer than a thread waits for its turn.
        process = self.start("--run-dir", save, "--wandb-project", "p", "--train-iters", "100000", "--global-batch-size", "8")
        self.wait_until(process, lambda: wandb_files(save) and os.path.getsize(wandb_files(save)[0]) > 100_000)
        process.send_signal(signal.SIGKILL)
        process.wait()
        records = wandb_reader.read(wandb_files(save)[0])
        steps = [row["_step"] for row in of_kind(records, "history")]
        self.assertEqual(steps, list(range(1, len(steps) + 1)))
        self.assertGreater(len(steps), 100)
        self.assertEqual(of_kind(records, "exit"), [])
        # And what metrics.jsonl says was reported is in it, but for the row that may still grow.
        self.assertGreaterEqual(steps[-1], metrics(save)[-2]["iteration"] - 1)

    def test_an_error_is_in_the_exit_record(self):
        save = self.path("run")
        run = ["1e30" if flag == "1e-3" else flag for flag in RUN]
        result = support.call("pretrain", *run, "--run-dir", save, "--wandb-project", "p", "--train-iters", "50", "--clip-grad", "0",
                              "--max-consecutive-bad-steps", "1")
        self.assertNotEqual(result.returncode, 0)
        self.assertEqual(wandb_reader.read(wandb_files(save)[-1])[-1][1][1], 1)

    def test_wandb_flags_that_would_do_nothing(self):
        result = support.call("pretrain", *RUN, "--train-iters", "1", "--wandb-entity", "us")
        self.assertIn("have no effect without --wandb-project", result.stderr)
        result = support.call("pretrain", *RUN, "--train-iters", "1", "--wandb-project", "p")
        self.assertIn("--wandb-project has no folder to write to\nhint: give --wandb-save-dir", result.stderr)

    # -- Prometheus

    def test_a_file_for_prometheus(self):
        save, file = self.path("run"), self.path("megatron.prom")
        self.train("--save", save, "--train-iters", "4", "--prometheus-textfile", file, "--log-memory-interval", "2")
        with open(file) as stream:
            text = stream.read()
        values, described = {}, set()
        for line in text.splitlines():
            if line.startswith("# "):
                described.add(line.split()[2])
                continue
            name, labels, value = re.fullmatch(r'(\w+)(\{(?:\w+="[^"]*",?)+\})? (\S+)', line).groups()
            self.assertIn(name, described)
            values[name + (labels or "")] = float(value)
        last = [r for r in metrics(save) if r["type"] == "train"][-1]
        self.assertEqual(values["megatron_up"], 0)
        self.assertEqual(values["megatron_iteration"], 4)
        self.assertEqual(values['megatron_loss{name="lm loss"}'], last["lm loss"])
        self.assertEqual(values["megatron_gradient_norm"], last["grad_norm"])
        self.assertEqual(values["megatron_checkpoint_iteration"], 4)
        self.assertIn('megatron_evaluation_loss{split="validation",set=""}', values)
        self.assertGreater(values["megatron_resident_memory_bytes"], 1e6)
        self.assertEqual(os.listdir(self.folder).count("megatron.prom"), 1)
        self.assertEqual([name for name in os.listdir(self.folder) if ".tmp" in name], [])
        result = support.call("pretrain", *RUN, "--train-iters", "1", "--prometheus-textfile", self.path("x.txt"))
        self.assertIn("does not end in .prom", result.stderr)

    # -- names of validation sets

    def test_validation_sets_have_their_names(self):
        for name in ("a", "b", "c"):
            with open(self.path(name + ".jsonl"), "w") as file:
                for i in range(30):
                    file.write(json.dumps({"text": "%s %d " % (name, i) * 20}) + "\n")
            self.run_ok("preprocess-data", "--input", self.path(name + ".jsonl"), "--output-prefix", self.path(name),
                        "--tokenizer-type", "ByteLevelTokenizer", "--append-eod")
        run = [flag for flag in RUN if flag != "--mock-data"]
        prefix = {}
        for path in os.listdir(self.folder):
            if path.endswith(".idx"):
                prefix[path[0]] = self.path(path[:-4])
        flags = ["--train-data-path", prefix["a"], "--valid-data-path", prefix["b"], prefix["c"], "--multiple-validation-sets",
                 "--train-iters", "4"]
        for names, expected in (([], ("0", "1")), (["--validation-set-names", "books", "code"], ("books", "code"))):
            folder, tb = self.path("run" + expected[0]), self.path("tb" + expected[0])
            out = self.output("pretrain", *run, *flags, *names, "--run-dir", folder, "--tensorboard-dir", tb)
            (events,) = glob.glob(os.path.join(tb, "*"))
            with open(events, "rb") as file:
                data = file.read()
            for name in expected:
                self.assertIn(" validation-%s loss at iteration 4 | lm loss value: " % name, out)
                self.assertIn(b"lm loss validation-" + name.encode(), data)
            if names:
                self.assertEqual({r["set"] for r in metrics(folder) if r["type"] == "evaluation"}, {"books", "code"})
                self.assertNotIn("validation-0", out)

    # -- the log line

    def test_the_log_line_ends_with_pace_and_time_left(self):
        out = self.train("--train-iters", "6").stdout
        lines = [line for line in out.splitlines() if " iteration " in line and "consumed samples" in line]
        self.assertRegex(lines[0], r"number of nan iterations:   0 \| tokens per second: \d+\.\d \|$")
        for line in lines[1:]:
            self.assertRegex(line, r"number of nan iterations:   0 \| tokens per second: \d+\.\d \| ETA: \d+:\d\d \|$")
        self.assertTrue(lines[-1].endswith("ETA: 0:00 |"))

    # -- sinks that fail

    def test_deleted_files_and_folders_stop_no_run(self):
        run, save = self.path("run"), self.path("save")
        os.mkdir(self.path("prom"))
        process = self.start("--run-dir", run, "--save", save, "--train-iters", "100000", "--tensorboard-dir", self.path("tb"),
                             "--tensorboard-queue-size", "1", "--wandb-project", "p", "--wandb-save-dir", self.path("wb"),
                             "--prometheus-textfile", self.path("prom/x.prom"))
        self.wait_until(process, lambda: len(self.lines()) > 10)
        os.remove(os.path.join(run, "metrics.jsonl"))
        for name in ("tb", "wb", "prom"):
            os.rename(self.path(name), self.path(name) + "_gone")  # nothing new gets into it while it is deleted
            shutil.rmtree(self.path(name) + "_gone")
        before = len(self.lines())
        self.wait_until(process, lambda: len(self.lines()) > before + 20)  # it goes on
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 0, errors)
        for name in ("metrics.jsonl was deleted", "events.out.tfevents", ".wandb was deleted", "x.prom"):
            self.assertEqual(len([line for line in errors.splitlines() if name in line and "continues without" in line]), 1, errors)
        self.assertIn("metrics.jsonl is incomplete", errors)

    def test_everything_is_flushed_at_a_signal(self):
        run = self.path("run")
        process = self.start("--run-dir", run, "--train-iters", "100000", "--tensorboard-dir", self.path("tb"))
        self.wait_until(process, lambda: len(self.lines()) > 10)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 0, errors)
        records = metrics(run)
        self.assertEqual((records[-1]["type"], records[-1]["reason"]), ("end", "stopped by signal 15"))
        self.assertEqual(len([r for r in records if r["type"] == "train"]), len(self.lines()))
        self.assertGreater(sum(os.path.getsize(path) for path in glob.glob(self.path("tb/*"))), 1000)


if __name__ == "__main__":
    support.main()
