#!/usr/bin/env python3
"""How runs end: exit codes, outcome.json, one writer per folder, crashes, readers and folders that are gone.

Usage: ending_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import json
import os
import resource
import signal
import socket
import subprocess
import time
import unittest

import support
from ports import free_port

MODEL = ["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16",
         "--tokenizer-type", "ByteLevelTokenizer", "--mock-data", "--device", "cpu", "--num-threads", "1", "--num-workers", "0"]
RUN = ["pretrain", *MODEL, "--micro-batch-size", "2", "--global-batch-size", "4", "--lr", "1e-3", "--log-interval", "1", "--eval-iters", "0",
       "--lr-decay-style", "constant"]
def with_value(flags, flag, value):
    at = flags.index(flag) + 1
    return [*flags[:at], value, *flags[at + 1:]]


ENDLESS = [*RUN, "--train-iters", "1000000"]
DIVERGING = [*with_value(RUN, "--lr", "1e38"), "--train-iters", "50", "--max-consecutive-bad-steps", "2"]


def rank_environments(ranks):
    port = free_port()
    for rank in range(ranks):
        yield dict(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks), GROUP_RANK="0",
                   MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


class EndingTest(support.FolderTest):
    def start(self, *arguments, environment=None, **options):
        options = dict(dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True), **options)
        process = subprocess.Popen([support.BINARY, *arguments], env=dict(os.environ, OMP_NUM_THREADS="1", **(environment or {})), **options)
        self.addCleanup(self.clean_up, process)
        return process

    @staticmethod
    def clean_up(process):
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()

    def run_to_end(self, *arguments, **options):
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def wait_for_step(self, process, iteration=2):
        for line in process.stdout:
            if "iteration %8d/" % iteration in line:
                return
        self.fail(process.stderr.read())

    def outcome(self, save):
        with open(os.path.join(save, "outcome.json")) as file:
            return json.load(file)

    def assert_outcome(self, save, **expected):
        outcome = self.outcome(save)
        self.assertEqual({name: outcome[name] for name in expected}, expected, outcome)
        return outcome

    # -- codes and outcome.json

    def test_finished_and_stopped(self):
        save = self.path("s")
        flags = [*RUN, "--train-iters", "4", "--save", save, "--start", "resume-or-fresh"]
        code, _, err = self.run_to_end(*flags, "--exit-interval", "2", "--stopped-exit-code", "85")
        self.assertEqual(code, 85, err)
        self.assert_outcome(save, **{"outcome": "stopped", "class": "stopped", "exit_code": 85, "iteration": 2, "last_saved_iteration": 2,
                                     "last_saved_directory": os.path.join(save, "iter_0000002"), "attempt": 1, "failed_rank": None,
                                     "reason": "stopped by --exit-interval"})
        code, _, err = self.run_to_end(*flags, "--stopped-exit-code", "85")
        self.assertEqual(code, 0, err)
        self.assert_outcome(save, **{"outcome": "finished", "class": "finished", "exit_code": 0, "iteration": 4, "attempt": 2})
        self.assertFalse(os.path.exists(os.path.join(save, "run.lock")))

    def test_a_signal(self):
        for number, flags, expected in ((signal.SIGTERM, [], 0), (signal.SIGUSR1, ["--exit-signal", "SIGUSR1", "--stopped-exit-code", "85"], 85)):
            save = self.path("s%d" % number)
            process = self.start(*ENDLESS, "--save", save, *flags)
            self.wait_for_step(process)
            self.assert_outcome(save, **{"outcome": "running", "pid": process.pid, "exit_code": None})
            process.send_signal(number)
            _, err = process.communicate(timeout=60)
            self.assertEqual(process.returncode, expected, err)
            outcome = self.assert_outcome(save, **{"outcome": "stopped", "exit_code": expected, "reason": "stopped by signal %d" % number})
            self.assertEqual(outcome["iteration"], outcome["last_saved_iteration"])

    def test_a_second_signal(self):
        save = self.path("s")
        process = self.start(*with_value(ENDLESS, "--global-batch-size", "40000"), "--save", save)
        for line in process.stderr:
            if "starting from" in line:
                break
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        self.assertEqual(process.returncode, 128 + signal.SIGTERM)
        outcome = self.assert_outcome(save, **{"outcome": "failed", "class": "retry", "exit_code": 143, "last_saved_iteration": None})
        self.assertIn("signal 15 (SIGTERM)", outcome["reason"])

    def test_kill_9_leaves_running_and_the_next_run_takes_over(self):
        save = self.path("s")
        process = self.start(*ENDLESS, "--save", save, "--save-interval", "1")
        self.wait_for_step(process, 3)
        process.kill()
        process.communicate()
        outcome = self.assert_outcome(save, outcome="running", pid=process.pid, attempt=1)
        self.assertFalse(os.path.exists("/proc/%d" % outcome["pid"]))
        code, _, err = self.run_to_end(*ENDLESS, "--save", save, "--start", "resume-or-fresh", "--exit-interval", "1")
        self.assertEqual(code, 0, err)
        self.assertIn("ended without a word: process %d on " % process.pid, err)
        self.assertGreaterEqual(self.assert_outcome(save, outcome="stopped", attempt=2)["iteration"], 3)

    def test_failures_that_would_come_again(self):
        save = self.path("s")
        code, _, err = self.run_to_end(*DIVERGING, "--save", save)
        self.assertEqual(code, 1, err)
        outcome = self.assert_outcome(save, **{"outcome": "failed", "class": "do-not-retry", "exit_code": 1, "failed_rank": 0})
        self.assertIn("was not finite for 2 iterations in a row", outcome["reason"])

        save = self.path("data")
        code, _, err = self.run_to_end(*[f for f in RUN if f != "--mock-data"], "--train-iters", "2", "--save", save, "--data-path",
                                       self.path("nothing"))
        self.assertEqual(code, 1, err)
        self.assertIn("nothing", self.assert_outcome(save, **{"class": "do-not-retry"})["reason"])

    def test_a_usage_error_owes_no_file(self):
        save = self.path("s")
        code, _, err = self.run_to_end(*RUN, "--save", save, "--train-iters", "nope")
        self.assertEqual(code, 2, err)
        self.assertFalse(os.path.exists(save))
        for value in ("1", "2", "3", "75", "126", "-1"):
            code, _, err = self.run_to_end(*RUN, "--train-iters", "2", "--stopped-exit-code", value)
            self.assertEqual(code, 2)
            self.assertIn("--stopped-exit-code is " + value, err)

    def test_torchrun_takes_every_other_code_for_a_failure(self):
        torchrun = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        flags = [*RUN, "--train-iters", "1", "--stopped-exit-code"]
        code, _, err = self.run_to_end(*flags, "85", environment=torchrun)
        self.assertEqual(code, 2)
        self.assertIn("--stopped-exit-code is given under torchrun", err)
        self.assertEqual(self.run_to_end(*flags, "0", environment=torchrun)[0], 0)

    def test_the_codes_are_in_the_help(self):
        for command in ("pretrain", "finetune"):
            self.assertIn("  75    failed, but may succeed when started again", self.output(command, "--help"))

    # -- several ranks

    def start_ranks(self, ranks, *flags):
        return [self.start(*flags, "--distributed-timeout-minutes", "1", environment=e) for e in rank_environments(ranks)]

    def finish(self, processes):
        outputs = [process.communicate(timeout=120) for process in processes]
        return [process.returncode for process in processes], "".join(err for _, err in outputs)

    def test_all_ranks_leave_with_the_class_of_the_failure(self):
        save = self.path("nan")
        codes, err = self.finish(self.start_ranks(2, *DIVERGING, "--save", save))
        self.assertEqual(codes, [1, 1], err)
        self.assertIn("was not finite", self.assert_outcome(save, **{"class": "do-not-retry", "exit_code": 1})["reason"])

    def test_a_lost_rank_may_be_retried_and_is_named(self):
        for victim in (1, 0):
            with self.subTest(victim=victim):
                save = self.path("lost%d" % victim)
                processes = self.start_ranks(2, *ENDLESS, "--save", save, "--save-interval", "2")
                self.wait_for_step(processes[0], 3)
                processes[victim].kill()
                codes, err = self.finish(processes)
                self.assertEqual(codes[1 - victim], 75, err)
                outcome = self.assert_outcome(save, **{"outcome": "failed", "class": "retry", "exit_code": 75, "failed_rank": victim,
                                                       "rank": 1 - victim, "attempt": 1})
                self.assertGreaterEqual(outcome["last_saved_iteration"], 2)
                self.assertIn("is gone", outcome["reason"])

    @unittest.skipIf(os.environ.get("MEGATRON_SANITIZE"), "AddressSanitizer catches the signal itself")
    def test_a_crash_of_a_rank_says_who_and_where(self):
        save = self.path("s")
        processes = self.start_ranks(2, *ENDLESS, "--save", save)
        self.wait_for_step(processes[0])
        processes[1].send_signal(signal.SIGSEGV)
        codes, err = self.finish(processes)
        self.assertEqual(codes, [75, -signal.SIGSEGV], err)
        self.assertIn("fatal: [rank 1] crashed with SIGSEGV", err)
        self.assertIn("detail: backtrace", err)
        self.assert_outcome(save, **{"class": "retry", "failed_rank": 1})

    # -- one writer

    def test_a_second_writer_is_refused_and_the_first_goes_on(self):
        model = self.path("model")
        self.run_ok(*RUN, "--train-iters", "1", "--save", model)
        save = self.path("s")
        first = self.start(*ENDLESS, "--save", save, "--run-dir", self.path("run"))
        self.wait_for_step(first)
        second = [[*ENDLESS, "--save", save], [*ENDLESS, "--save", save, "--start", "resume-or-fresh"], [*ENDLESS, "--run-dir", self.path("run")],
                  ["finetune", "--load", model, "--train-data-path", self.path("x.jsonl"), "--save", save, "--seq-length", "16",
                   "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-3", "--device", "cpu"]]
        for flags in second:
            code, out, err = self.run_to_end(*flags)
            self.assertEqual(code, 1, err)
            self.assertIn(" is in use by another run: process %d on %s since " % (first.pid, socket.gethostname()), err)
            self.assertNotIn("iteration", out)
        self.assert_outcome(self.path("run"), outcome="running", pid=first.pid)
        first.send_signal(signal.SIGTERM)
        _, err = first.communicate(timeout=60)
        self.assertEqual(first.returncode, 0, err)
        with open(os.path.join(self.path("run"), "metrics.jsonl")) as file:
            self.assertEqual([json.loads(line)["type"] for line in file].count("start"), 1)

    def test_a_refused_job_of_several_ranks_leaves_the_owner_alone(self):
        save = self.path("s")
        first = self.start(*ENDLESS, "--save", save)
        self.wait_for_step(first)
        codes, err = self.finish(self.start_ranks(2, *ENDLESS, "--save", save))
        self.assertEqual(codes, [1, 1], err)
        self.assertIn("is in use by another run", err)
        self.assert_outcome(save, outcome="running", pid=first.pid)

    def test_another_hosts_run_is_refused_until_it_is_silent(self):
        save = self.path("s")
        os.mkdir(save)
        lock = os.path.join(save, "run.lock")
        with open(lock, "w") as file:
            json.dump({"host": "node7", "pid": 1, "start": 1, "since": 1700000000, "run_id": "", "restart_count": 0}, file)
        code, _, err = self.run_to_end(*RUN, "--train-iters", "1", "--save", save)
        self.assertEqual(code, 75, err)
        self.assertIn("process 1 on node7 since 2023-11-14 22:13:20 UTC, last sign of life ", err)
        self.assertEqual(os.listdir(save), ["run.lock"])
        os.utime(lock, (time.time() - 1000,) * 2)
        code, _, err = self.run_to_end(*RUN, "--train-iters", "1", "--save", save)
        self.assertEqual(code, 0, err)

    # -- what ends processes otherwise

    def test_the_reader_of_standard_output_may_go(self):
        save = self.path("s")
        process = self.start(*RUN, "--train-iters", "20", "--save", save)
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
        self.assertEqual(process.wait(timeout=60), 0, err)
        self.assertEqual(err.count("the reader of standard output is gone"), 1, err)
        self.assert_outcome(save, outcome="finished", iteration=20)
        with open(os.path.join(save, "metrics.jsonl")) as file:
            self.assertEqual([json.loads(line)["type"] for line in file].count("train"), 20)

    def test_a_limit_on_file_sizes_is_an_error_of_the_save(self):
        save = self.path("s")
        code, _, err = self.run_to_end(*RUN, "--train-iters", "4", "--save", save, "--save-interval", "2",
                                       preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)))
        self.assertEqual(code, 1, err)
        self.assertIn("the checkpoint of iteration 2 was not saved", err)
        self.assertIn("ulimit -f", err)
        self.assertEqual([name for name in os.listdir(save) if name.startswith("iter_")], [])
        self.assert_outcome(save, **{"class": "do-not-retry"})

    def test_a_final_state_that_is_on_no_disk_is_an_error(self):
        limit = dict(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)))
        for background in ([], ["--async-save"]):
            save = self.path("s%d" % len(background))
            flags = [*RUN, "--save", save, "--save-interval", "2", "--save-failure", "continue", "--start", "resume-or-fresh", *background]
            code, out, err = self.run_to_end(*flags, "--train-iters", "4", **limit)
            self.assertEqual(code, 1, err)
            self.assertIn("iteration        4/       4", out)
            self.assertIn("the final state, of iteration 4, was not saved (--save-failure continue)", err)
            self.assertIn("holds no checkpoint of this run", err)
            self.assertNotIn("finished at", err)
            self.assert_outcome(save, outcome="failed", iteration=4)
            code, _, err = self.run_to_end(*flags, "--train-iters", "4", "--exit-interval", "2")
            self.assertEqual(code, 0, err)
            code, _, err = self.run_to_end(*flags, "--train-iters", "4", **limit)
            self.assertEqual(code, 1, err)
            self.assertIn("the newest checkpoint is iteration 2", err)

    @unittest.skipIf(os.environ.get("MEGATRON_SANITIZE"), "AddressSanitizer catches the signal itself")
    def test_a_crash_says_where_and_is_an_outcome(self):
        save = self.path("s")
        process = self.start(*ENDLESS, "--save", save)
        self.wait_for_step(process)
        process.send_signal(signal.SIGBUS)
        _, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, -signal.SIGBUS)
        self.assertIn("fatal: crashed with SIGBUS", err)
        self.assertIn("of process %d on " % process.pid, err)
        outcome = self.assert_outcome(save, **{"outcome": "failed", "class": "retry", "exit_code": 128 + signal.SIGBUS})
        self.assertIn("SIGBUS", outcome["reason"])

    def test_a_deleted_working_directory(self):
        gone = self.path("gone")
        os.mkdir(gone)
        result = subprocess.run(["sh", "-c", 'cd "$1" && rmdir "$1" && shift && exec "$@"', "sh", gone, support.BINARY, *RUN, "--train-iters", "1"],
                                capture_output=True, text=True, timeout=60)
        self.assertEqual(result.returncode, 1)
        self.assertTrue(result.stderr.startswith("error: the working directory cannot be used: "), result.stderr)


if __name__ == "__main__":
    support.main()
