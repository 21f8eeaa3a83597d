#!/usr/bin/env python3
"""recipes/slurm/pretrain.sbatch under a played Slurm: sbatch is this script, srun, scontrol and scancel are programs on PATH.

Usage: slurm_test.py BINARY [unittest arguments]. Needs bash and the standard library.
"""
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
import unittest

import support

RECIPE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "recipes", "slurm", "pretrain.sbatch")
RANKS = 2
FLAGS = ["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16", "--tokenizer-type",
         "ByteLevelTokenizer", "--mock-data", "--device", "cpu", "--num-threads", "1", "--num-workers", "0", "--micro-batch-size", "2",
         "--global-batch-size", "16", "--lr-decay-style", "constant", "--log-interval", "1", "--eval-iters", "0",
         "--train-iters", "150", "--distributed-timeout-minutes", "1"]

# Starts the tasks with Slurm's variables, notes their processes and leaves with the highest code, as srun does.
SRUN = """#!{python}
import os, subprocess, sys
arguments = sys.argv[1:]
while arguments[0].startswith("--"):
    arguments.pop(0)
tasks = int(os.environ["SLURM_NTASKS"])
running = []
for rank in range(tasks):
    environment = dict(os.environ, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), SLURM_NODEID="0", SLURM_STEP_ID="0",
                       SLURM_STEP_NUM_TASKS=str(tasks), SLURM_STEP_TASKS_PER_NODE=str(tasks), SLURM_STEP_NODELIST="node1")
    running.append(subprocess.Popen(arguments, env=environment))
with open(os.environ["PLAYED_SLURM"] + "/tasks.tmp", "w") as file:
    file.write(" ".join(str(task.pid) for task in running))
os.rename(file.name, os.environ["PLAYED_SLURM"] + "/tasks")
codes = [task.wait() for task in running]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = """#!{python}
import os, sys
assert sys.argv[1:] == ["requeue", os.environ["SLURM_JOB_ID"]], sys.argv
open(os.environ["PLAYED_SLURM"] + "/requeued", "w").close()
"""
SCANCEL = """#!{python}
import os, signal, sys
assert sys.argv[1:] == ["--signal=TERM", os.environ["SLURM_JOB_ID"]], sys.argv
with open(os.environ["PLAYED_SLURM"] + "/tasks") as file:
    for pid in file.read().split():
        os.kill(int(pid), signal.SIGTERM)
"""


class Attempt:
    """One start of the job by the played Slurm."""

    def __init__(self, slurm, save, restart, flags, **environment):
        self.slurm, self.save = slurm, save
        for name in ("tasks", "requeued"):
            if os.path.exists(os.path.join(slurm, name)):
                os.remove(os.path.join(slurm, name))
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "RANK", "WORLD_SIZE"))}
        variables.update(PATH=os.path.join(slurm, "bin") + ":" + os.environ["PATH"], PLAYED_SLURM=slurm, SLURM_JOB_ID="4711",
                         SLURM_NTASKS=str(RANKS), SLURM_RESTART_COUNT=str(restart), MASTER_PORT=str(port), OMP_NUM_THREADS="1",
                         SAVE=save, MEGATRON=support.BINARY, **environment)
        self.batch = subprocess.Popen(["bash", RECIPE, *flags], env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def tasks(self):
        with open(os.path.join(self.slurm, "tasks")) as file:
            return [int(pid) for pid in file.read().split()]

    def wait_for_iterations(self, count):
        """Until this attempt has done so many iterations."""
        path = os.path.join(self.save, "metrics.jsonl")
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline and self.batch.poll() is None:
            try:
                with open(path) as file:
                    records = [json.loads(line) for line in file if line.endswith("\n")]
            except OSError:
                records = []
            since_start = []
            for record in records:
                since_start = [] if record["type"] == "start" else since_start + [record["type"]]
            if since_start.count("train") >= count and self.is_running_attempt(records):
                return
            time.sleep(0.02)
        raise AssertionError("no iterations: " + self.batch.communicate()[0])

    def is_running_attempt(self, records):
        with open(os.path.join(self.save, "outcome.json")) as file:
            outcome = json.load(file)
        starts = [record["time"] for record in records if record["type"] == "start"]
        return outcome["outcome"] == "running" and starts[-1] > outcome["started"]

    def finish(self):
        """(exit code, whether the job was queued again, what it printed)"""
        out, _ = self.batch.communicate(timeout=120)
        return self.batch.returncode, os.path.exists(os.path.join(self.slurm, "requeued")), out


class SlurmTest(support.FolderTest):
    def setUp(self):
        super().setUp()
        self.slurm = self.path("slurm")
        os.makedirs(os.path.join(self.slurm, "bin"))
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
            path = os.path.join(self.slurm, "bin", name)
            with open(path, "w") as file:
                file.write(text.replace("{python}", sys.executable))
            os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)
        self.save = self.path("save")

    def attempt(self, restart, *flags, lr="1e-3", **environment):
        return Attempt(self.slurm, self.save, restart, [*FLAGS, "--lr", lr, *flags], **environment)

    def outcome(self):
        with open(os.path.join(self.save, "outcome.json")) as file:
            return json.load(file)

    def weights(self, save):
        with open(os.path.join(save, "iter_0000150", "rank_00000.safetensors"), "rb") as file:
            return file.read()

    def test_a_job_is_stopped_and_requeued_until_it_has_finished_bit_equal(self):
        with open(RECIPE) as file:
            signals = re.findall(r"^#SBATCH --signal=(\w+)@\d+$", file.read(), re.MULTILINE)
        self.assertEqual(signals, ["TERM"], "the ranks are signalled, not the script")
        saved = 0
        for restart, to_script in enumerate((False, True)):
            job = self.attempt(restart)
            job.wait_for_iterations(3)
            if to_script:  # --signal=B:TERM@300
                job.batch.send_signal(signal.SIGTERM)
            else:
                for pid in job.tasks():
                    os.kill(pid, signal.SIGTERM)
            code, requeued, out = job.finish()
            self.assertEqual((code, requeued), (85, True), out)
            self.assertEqual((self.outcome()["outcome"], self.outcome()["attempt"]), ("stopped", restart + 1))
            self.assertGreater(self.outcome()["last_saved_iteration"], saved)
            saved = self.outcome()["last_saved_iteration"]
        self.assertLess(saved, 150)
        code, requeued, out = self.attempt(2).finish()
        self.assertEqual((code, requeued), (0, False), out)
        self.assertIn("at iteration %d of 150" % saved, out)
        self.assertEqual(self.outcome()["outcome"], "finished")
        stopped = self.save
        self.save = self.path("straight")
        code, requeued, out = self.attempt(0).finish()
        self.assertEqual((code, requeued), (0, False), out)
        self.assertEqual(self.weights(stopped), self.weights(self.save))

    def test_a_killed_rank_is_retried_but_not_for_ever(self):
        for restart in range(3):
            job = self.attempt(restart, MAX_RETRIES="2")
            job.wait_for_iterations(1)
            os.kill(job.tasks()[1], signal.SIGKILL)
            code, requeued, out = job.finish()
            self.assertEqual((code, requeued), (137, restart < 2), out)
            self.assertEqual(self.outcome()["class"], "retry")
        self.assertIn("giving up", out)

    def test_what_would_fail_again_is_not_requeued(self):
        code, requeued, out = self.attempt(0, "--max-consecutive-bad-steps", "2", lr="1e38").finish()
        self.assertEqual((code, requeued), (1, False), out)
        self.assertIn("was not finite", self.outcome()["reason"])
        code, requeued, out = self.attempt(1, "--save-interval", "nope").finish()
        self.assertEqual((code, requeued), (2, False), out)


if __name__ == "__main__":
    support.main()
