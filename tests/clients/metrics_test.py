#!/usr/bin/env python3
"""What programs that are not ours make of the files that a run writes: wandb and promtool.

Usage: metrics_test.py BINARY [unittest arguments], with `wandb` and `promtool` on the PATH (make clients sets them up).
"""
import glob
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import support  # noqa: E402
import wandb_reader  # noqa: E402
import wandb_server  # noqa: E402

RUN = ["--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "16",
       "--tokenizer-type", "ByteLevelTokenizer", "--mock-data", "--micro-batch-size", "1", "--lr", "1e-3", "--log-interval", "2",
       "--eval-interval", "4", "--eval-iters", "1", "--device", "cpu", "--num-threads", "1"]


def wandb_files(folder):
    return sorted(glob.glob(os.path.join(folder, "wandb", "offline-run-*", "run-*.wandb")))


LOGS = tempfile.TemporaryDirectory()  # wandb writes its own into the current folder


def client(server, *command, **options):
    environment = dict(os.environ, WANDB_BASE_URL=server.url, WANDB_API_KEY="0" * 40, WANDB_ERROR_REPORTING="false")
    return subprocess.Popen(command, cwd=LOGS.name, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def rows(path):
    return [content for kind, content in wandb_reader.read(path) if kind == "history"]


class WandbTest(support.FolderTest):
    def start(self, *flags):
        return subprocess.Popen([support.BINARY, "pretrain", *RUN, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                text=True, env=dict(os.environ, OMP_NUM_THREADS="1"))

    def wait_for_bytes(self, process, size):
        deadline = time.monotonic() + 60
        while not (wandb_files(self.folder) and os.path.getsize(wandb_files(self.folder)[0]) > size):
            self.assertIsNone(process.poll())
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)

    def killed_run(self):
        """The file of a run that was killed with -9."""
        process = self.start("--run-dir", self.folder, "--wandb-project", "proj", "--train-iters", "1000000")
        self.wait_for_bytes(process, 100_000)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return wandb_files(self.folder)[0]

    def sync(self, server, *command):
        process = client(server, "wandb", *command)
        out, _ = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 0, out)
        self.assertEqual(server.unknown, [])
        return out

    def uploaded(self, server):
        (run,) = server.runs.values()
        return run, run.lines("wandb-history.jsonl")

    def test_sync_uploads_a_run_and_its_continuation(self):
        flags = ["--save", self.folder, "--wandb-project", "proj", "--wandb-entity", "us", "--wandb-exp-name", "shown",
                 "--train-iters", "6"]
        self.run_ok("pretrain", *RUN, *flags, "--exit-interval", "4")
        self.run_ok("pretrain", *RUN, *flags, "--start", "resume")
        with wandb_server.Server() as server:
            self.sync(server, "sync", *[os.path.dirname(path) for path in wandb_files(self.folder)])
            run, history = self.uploaded(server)
        self.assertEqual([row["_step"] for row in history], [1, 2, 3, 4, 5, 6])
        written = [row for path in wandb_files(self.folder) for row in rows(path)]
        for row, line in zip(written, history):
            self.assertEqual({key: line[key] for key in row if key != "_timestamp"},
                             {key: value for key, value in row.items() if key != "_timestamp"})
        self.assertEqual(run.upserts[0]["displayName"], "shown")
        self.assertEqual(run.upserts[0]["entity"], "us")
        config = run.config()
        self.assertEqual((config["hidden_size"], config["lr"]), (32, 1e-3))
        self.assertEqual(config["run"]["device"], "cpu")
        self.assertEqual(run.lines("wandb-summary.json")[-1]["lm loss"], history[-1]["lm loss"])
        self.assertEqual(run.final["exitcode"], 0)

    def test_sync_uploads_a_killed_run(self):
        path = self.killed_run()
        with wandb_server.Server() as server:
            self.sync(server, "sync", os.path.dirname(path))
            _, history = self.uploaded(server)
        self.assertEqual([row["_step"] for row in history], [row["_step"] for row in rows(path)])
        self.assertGreater(len(history), 100)

    def test_live_sync_follows_a_run(self):
        process = self.start("--run-dir", self.folder, "--wandb-project", "proj", "--train-iters", "1000000")
        self.wait_for_bytes(process, 20_000)
        with wandb_server.Server() as server:
            follower = client(server, "wandb", "beta", "sync", "--live", "--yes", self.folder + "/wandb")
            deadline = time.monotonic() + 90
            seen = 0
            while seen == 0 and time.monotonic() < deadline:  # rows arrive while the run goes on
                time.sleep(0.2)
                seen = sum(len(run.files.get("wandb-history.jsonl", {})) for run in list(server.runs.values()))
            self.assertIsNone(process.poll())
            process.send_signal(signal.SIGTERM)
            process.communicate()
            out, _ = follower.communicate(timeout=120)
            self.assertEqual(follower.returncode, 0, out)
            self.assertGreater(seen, 0, out)
            run, history = self.uploaded(server)
        self.assertEqual([row["_step"] for row in history], [row["_step"] for row in rows(wandb_files(self.folder)[0])])
        self.assertEqual(run.final["exitcode"], 0)

    def test_leet_reads_every_record(self):
        path = self.killed_run()
        for kind, extra in (("killed", []), ("finished", ["--wandb-save-dir", self.path("other")])):
            if extra:
                self.run_ok("pretrain", *RUN, "--run-dir", self.folder, "--wandb-project", "p", "--train-iters", "5", *extra)
                (path,) = wandb_files(self.path("other"))
            result = subprocess.run(["wandb", "leet", "inspect", "--json", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self.assertEqual((result.returncode, result.stderr.strip()), (0, ""), kind)
            shown = [json.loads(line) for line in result.stdout.splitlines()]
            written = wandb_reader.read(path)
            self.assertEqual([record["type"] for record in shown], [kind for kind, _ in written])
            self.assertEqual([record["history"]["item"]["lm loss"] for record in shown if record["type"] == "history"],
                             [row["lm loss"] for row in rows(path)])


class PrometheusTest(support.FolderTest):
    def test_promtool_finds_nothing_wrong(self):
        file = self.path("x.prom")
        self.run_ok("pretrain", *RUN, "--save", self.path("run"), "--train-iters", "4", "--prometheus-textfile", file,
                    "--log-memory-interval", "2")
        with open(file) as stream:
            result = subprocess.run(["promtool", "check", "metrics"], stdin=stream, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertEqual((result.returncode, result.stdout), (0, ""))


if __name__ == "__main__":
    support.main()
