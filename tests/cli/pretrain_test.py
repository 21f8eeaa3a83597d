#!/usr/bin/env python3
"""End-to-end tests of `megatron pretrain` and `megatron report` on the real binary.

Usage: pretrain_test.py BINARY [unittest arguments]. Needs nothing but the standard library.
"""
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

BINARY = ""

MODEL = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "32"]
TOKENIZER = ["--tokenizer-type", "ByteLevelTokenizer"]
RUN = ["--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "8", "--lr", "1e-3", "--lr-warmup-iters", "2",
       "--mock-data", "--log-interval", "1", "--eval-interval", "3", "--eval-iters", "2", "--device", "cpu", "--num-threads", "1"]


def call(*arguments, **options):
    return subprocess.run([BINARY, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120, **options)


def metrics(folder):
    """(type, iteration, split) -> the numbers of the last record."""
    out = {}
    with open(os.path.join(folder, "metrics.jsonl")) as file:
        for line in file:
            record = json.loads(line)
            if record["type"] in ("train", "evaluation"):
                key = (record["type"], record["iteration"], record.get("split"))
                out.setdefault(key, set()).add(tuple(record.get(name) for name in ("lm loss", "grad_norm", "learning_rate")))
    return out


def read(path):
    with open(path) as file:
        return file.read()


def weights(folder, iteration=8):
    with open(os.path.join(folder, "iter_%07d" % iteration, "rank_00000.safetensors"), "rb") as file:
        return file.read()


class PretrainTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.shared = tempfile.mkdtemp()
        cls.reference = os.path.join(cls.shared, "reference")
        result = call("pretrain", *MODEL, *TOKENIZER, *RUN, "--save", cls.reference, "--save-interval", "4")
        assert result.returncode == 0, result.stderr

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.shared)

    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def path(self, name):
        return os.path.join(self.folder, name)

    def train(self, *flags, expect=0, model=MODEL, run=RUN, **options):
        result = call("pretrain", *model, *TOKENIZER, *run, *flags, **options)
        self.assertEqual(result.returncode, expect, result.stderr + result.stdout)
        return result

    def assert_same_run(self, folder):
        self.assertEqual(metrics(folder), metrics(self.reference))
        self.assertEqual(weights(folder), weights(self.reference))

    # -- resuming

    def test_the_loss_falls(self):
        losses = [value for key, values in sorted(metrics(self.reference).items()) if key[0] == "train" for value, *_ in values]
        self.assertEqual(len(losses), 8)
        self.assertLess(losses[-1], losses[0])

    def test_resuming_is_bit_equal_wherever_a_run_stops(self):
        for stop in (1, 3, 4, 7):
            for background in ([], ["--async-save"]):
                with self.subTest(stop=stop, background=background):
                    save = self.path("stop%d%s" % (stop, len(background)))
                    flags = ["--save", save, "--start", "resume-or-fresh", *background]
                    self.train(*flags, "--exit-interval", str(stop))
                    self.assertTrue(os.path.isdir(os.path.join(save, "iter_%07d" % stop)))
                    self.assertIn("resuming from", self.train(*flags).stderr)
                    self.assert_same_run(save)

    def test_a_signal_saves_and_leaves_with_0_and_the_run_goes_on_bit_equal(self):
        save = self.path("signal")
        longer = RUN + ["--save", save, "--start", "resume-or-fresh"]
        longer[longer.index("--train-iters") + 1] = "100000"
        longer += ["--lr-decay-style", "constant"]
        process = subprocess.Popen([BINARY, "pretrain", *MODEL, *TOKENIZER, *longer], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while "iteration        3/" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0, err)
        self.assertIn("stopped by signal 15", err)
        saved = int(read(os.path.join(save, "latest_checkpointed_iteration.txt")))
        self.assertGreaterEqual(saved, 3)
        long_run = [("100000" if f == "8" else f) for f in RUN] + ["--lr-decay-style", "constant"]
        again = self.train("--save", save, "--start", "resume", "--exit-interval", "1", run=long_run)
        self.assertIn("at iteration %d of" % saved, again.stderr)
        straight = self.path("straight")
        self.train("--save", straight, "--exit-interval", str(saved + 1), run=long_run)
        self.assertEqual(weights(save, saved + 1), weights(straight, saved + 1))

    def test_killing_it_again_and_again_loses_nothing(self):
        save = self.path("killed")
        flags = ["pretrain", *MODEL, *TOKENIZER, *RUN, "--save", save, "--save-interval", "1", "--start", "resume-or-fresh", "--async-save"]
        for attempt in range(40):
            process = subprocess.Popen([BINARY, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            # At least one step is made before the kill, at an instant that moves through the step and its save.
            while (line := process.stdout.readline()) and "iteration" not in line:
                pass
            time.sleep(0.002 * attempt)
            process.kill()
            _, err = process.communicate(timeout=60)
            self.assertIn(process.returncode, (0, -signal.SIGKILL), err)
            if process.returncode == 0:
                break
        self.train("--save", save, "--save-interval", "1", "--start", "resume-or-fresh")
        self.assertEqual(weights(save), weights(self.reference))

    def test_a_second_signal_leaves_at_once(self):
        flags = list(RUN)
        flags[flags.index("--train-iters") + 1] = "1000"
        flags[flags.index("--global-batch-size") + 1] = "20000"
        process = subprocess.Popen([BINARY, "pretrain", *MODEL, *TOKENIZER, *flags, "--save", self.path("s")],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while "starting from" not in process.stderr.readline():
            pass
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 128 + signal.SIGTERM, err)
        self.assertIn("second signal", err)

    def test_the_resolved_configuration_can_be_fed_back(self):
        save = self.path("again")
        result = call("pretrain", "--config", os.path.join(self.reference, "config.yaml"), "--save", save)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assert_same_run(save)

    def test_resume_needs_a_checkpoint(self):
        result = self.train("--load", self.path("nothing"), expect=1)
        self.assertIn("nothing", result.stderr)
        self.train("--load", self.path("nothing"), "--start", "resume-or-fresh", "--exit-interval", "1")

    def test_a_fresh_start_does_not_write_over_checkpoints(self):
        save = self.path("copy")
        shutil.copytree(self.reference, save)
        self.assertIn(save, self.train("--save", save, expect=1).stderr)

    def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(self):
        save = self.path("damaged")
        shutil.copytree(self.reference, save)
        file = os.path.join(save, "iter_0000008", "rank_00000.safetensors")
        with open(file, "r+b") as handle:
            handle.seek(-5, os.SEEK_END)
            byte = handle.read(1)
            handle.seek(-5, os.SEEK_END)
            handle.write(bytes([byte[0] ^ 1]))
        result = self.train("--save", save, "--start", "resume")
        self.assertIn("iter_0000008", result.stderr)
        self.assertIn("resuming from %s at iteration 4 of 8" % os.path.join(save, "iter_0000004"), result.stderr)
        self.assertEqual(weights(save), weights(self.reference))

    def test_ckpt_step_takes_that_iteration(self):
        result = self.train("--load", self.reference, "--ckpt-step", "4", "--save", self.path("step"))
        self.assertIn("at iteration 4 of 8", result.stderr)
        self.assertEqual(weights(self.path("step")), weights(self.reference))
        self.assertIn("5", self.train("--load", self.reference, "--ckpt-step", "5", expect=1).stderr)

    def test_another_data_order_is_refused_by_name(self):
        save = self.path("order")
        self.train("--save", save, "--exit-interval", "3")
        result = self.train("--save", save, "--start", "resume", "--seed", "99", expect=1)
        self.assertIn("its order is another", result.stderr)
        self.assertIn("seed", result.stderr)
        self.assertIn("--accept-new-data-order", result.stderr)
        self.train("--save", save, "--start", "resume", "--seed", "99", "--accept-new-data-order")

    def test_a_shorter_run_keeps_the_stored_order(self):
        save = self.path("shorter")
        flags = ["--lr-decay-iters", "8", "--save", save]
        self.train(*flags, "--exit-interval", "3")
        self.train(*flags, "--start", "resume", "--train-iters", "6", run=[f for i, f in enumerate(RUN) if "--train-iters" not in RUN[max(0, i - 1):i + 1]])
        self.assertEqual({k: v for k, v in metrics(save).items() if k[0] == "train"},
                         {k: v for k, v in metrics(self.reference).items() if k[0] == "train" and k[1] <= 6})

    def test_another_model_is_refused_naming_the_tensors(self):
        wide = [("64" if f == "32" and MODEL[i - 1] == "--hidden-size" else f) for i, f in enumerate(MODEL)]
        result = self.train("--load", self.reference, "--train-iters", "9", model=wide, expect=1,
                            run=[f for i, f in enumerate(RUN) if "--train-iters" not in RUN[max(0, i - 1):i + 1]] + ["--accept-new-data-order", "--override-opt-param-scheduler"])
        self.assertIn("embedding.word_embeddings.weight", result.stderr)

    # -- starting from weights

    def test_finetuning_starts_anew_from_the_weights(self):
        save = self.path("tuned")
        result = self.train("--load", self.reference, "--finetune", "--save", save)
        self.assertIn("starting from the weights of", result.stderr)
        tuned, first = metrics(save), metrics(self.reference)
        self.assertLess(min(tuned[("train", 1, None)])[0], min(first[("train", 1, None)])[0])
        self.assertIn("another --save", self.train("--load", self.reference, "--finetune", "--save", save, expect=1).stderr)

    def test_pretrained_checkpoint_is_the_fallback_of_an_empty_load(self):
        save = self.path("fallback")
        flags = ["--load", save, "--save", save, "--pretrained-checkpoint", self.reference]
        self.assertIn("starting from the weights of", self.train(*flags, "--exit-interval", "2").stderr)
        self.assertIn("resuming from", self.train(*flags).stderr)

    def test_no_load_optim_keeps_the_iteration_and_starts_moments_anew(self):
        save = self.path("nooptim")
        result = self.train("--load", self.reference, "--ckpt-step", "4", "--no-load-optim", "--save", save)
        self.assertIn("at iteration 4 of 8", result.stderr)
        self.assertNotEqual(weights(save), weights(self.reference))
        numbers = metrics(save)
        for iteration in (5, 8):
            self.assertEqual(min(numbers[("train", iteration, None)])[2], min(metrics(self.reference)[("train", iteration, None)])[2])

    def test_no_save_optim(self):
        save = self.path("small")
        self.train("--save", save, "--no-save-optim", "--exit-interval", "4")
        self.assertLess(len(weights(save, 4)), len(weights(self.reference, 4)) / 2)
        self.assertIn("--no-load-optim", self.train("--save", save, "--start", "resume", expect=1).stderr)
        self.train("--save", save, "--start", "resume", "--no-load-optim")

    def test_use_checkpoint_args(self):
        result = call("pretrain", *RUN, "--load", self.reference, "--ckpt-step", "4", "--use-checkpoint-args", "--save", self.path("args"))
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(weights(self.path("args")), weights(self.reference))

    def test_skip_train_evaluates(self):
        result = self.train("--load", self.reference, "--skip-train")
        self.assertIn("validation loss at iteration 8 on validation set", result.stdout)

    # -- saving

    def test_retention_keeps_the_newest(self):
        save = self.path("kept")
        self.train("--save", save, "--save-interval", "1", "--keep-last-checkpoints", "2")
        self.assertEqual(sorted(name for name in os.listdir(save) if name.startswith("iter_")), ["iter_0000007", "iter_0000008"])

    def test_a_full_disk_stops_or_not_as_configured(self):
        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, 64 * 1024))

        for background in ([], ["--async-save"]):
            with self.subTest(background=background):
                save = self.path("full%d" % len(background))
                result = self.train("--save", save, "--save-interval", "4", *background, expect=1, preexec_fn=limit)
                self.assertIn("was not saved", result.stderr)
                self.assertIn("--save-failure continue", result.stderr)
                result = self.train("--save", save, "--save-interval", "4", "--save-failure", "continue", *background, expect=1,
                                    preexec_fn=limit)
                self.assertIn("training continues", result.stderr)
                self.assertIn("the final state, of iteration 8, was not saved", result.stderr)
                self.assertIn("iteration        8/       8", result.stdout)
                self.assertEqual([name for name in os.listdir(save) if name.startswith("iter_") and "tmp" not in name], [])

    def test_an_unwritable_folder_is_found_before_training(self):
        result = self.train("--save", "/proc/nowhere/run", expect=1)
        self.assertIn("/proc/nowhere/run", result.stderr)
        self.assertNotIn("iteration        1/", result.stdout)

    # -- ways to compute

    def first_losses(self, folder):
        return [min(values)[0] for key, values in sorted(metrics(folder).items(), key=str) if key[0] == "train"]

    def test_micro_batches_give_the_same_losses(self):
        run = list(RUN)
        run[run.index("--micro-batch-size") + 1] = "4"
        self.train("--run-dir", self.path("m"), "--eval-micro-batch-size", "2", run=run)
        for a, b in zip(self.first_losses(self.path("m")), self.first_losses(self.reference)):
            self.assertAlmostEqual(a, b, delta=2e-4)

    def test_recomputation_changes_nothing(self):
        for flags in (["--recompute-granularity", "full"], ["--recompute-granularity", "selective"]):
            folder = self.path(flags[1])
            self.train("--run-dir", folder, *flags)
            for a, b in zip(self.first_losses(folder), self.first_losses(self.reference)):
                self.assertAlmostEqual(a, b, delta=1e-5)

    def test_host_memory_changes_no_bit_and_no_checkpoint(self):
        activations = ["--fine-grained-activation-offloading", "--min-offloaded-tensor-size", "0", "--offload-modules",
                       "attn_norm", "core_attn", "attn_proj", "mlp_act", "mlp_fc2"]
        optimizer = ["--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.6"]
        for name, first, second in (("there", activations + optimizer, []), ("back", [], activations + optimizer)):
            save = self.path("host_" + name)
            self.train("--save", save, "--exit-interval", "3", *first)
            self.train("--save", save, "--start", "resume", *second)
            self.assertEqual(weights(save), weights(self.reference))

    def test_half_precision(self):
        for dtype in ("--bf16", "--fp16"):
            save = self.path(dtype)
            self.train(dtype, "--save", save, "--start", "resume-or-fresh", "--exit-interval", "5")
            self.train(dtype, "--save", save, "--start", "resume-or-fresh")
            other = self.path(dtype + "straight")
            self.train(dtype, "--save", other)
            self.assertEqual(weights(save), weights(other))
            self.assertEqual(metrics(save), metrics(other))

    def test_mean_of_means(self):
        self.train("--run-dir", self.path("means"), "--no-calculate-per-token-loss")
        # Without masked tokens the two definitions agree up to rounding.
        for a, b in zip(self.first_losses(self.path("means")), self.first_losses(self.reference)):
            self.assertAlmostEqual(a, b, delta=2e-4)

    def test_batch_size_schedule(self):
        run = [f for i, f in enumerate(RUN) if "--global-batch-size" not in RUN[max(0, i - 1):i + 1]]
        save = self.path("grow")
        result = self.train("--step-batch-size-schedule", "0:2 128:4", "--save", save, run=run)
        self.assertIn("global batch size:     2 |", result.stdout)
        self.assertIn("global batch size:     4 |", result.stdout)
        self.assertIn("the global batch size grows from 2 to 4", result.stderr)
        self.assertTrue(os.path.isdir(os.path.join(save, "iter_0000002")))

    def test_full_validation_reads_the_same_samples_each_time(self):
        result = self.train("--run-dir", self.path("full"), "--full-validation", "--lr", "1e-30",
                            run=[f for i, f in enumerate(RUN) if "--lr" not in RUN[max(0, i - 1):i + 1]])
        values = {min(v) for k, v in metrics(self.path("full")).items() if k[2] == "validation"}
        self.assertEqual(len(values), 1, result.stdout)

    # -- what a user sees

    def test_profile_timers_and_memory(self):
        folder = self.path("profile")
        result = self.train("--run-dir", folder, "--profile", "--profile-step-start", "2", "--profile-step-end", "4", "--timing-log-level", "2",
                            "--log-memory-interval", "4", "--log-params-norm", "--log-num-zeros-in-grad", "--log-throughput",
                            "--tensorboard-dir", self.path("tb"))
        for text in ("forward-backward ....", "optimizer ....", "memory (MB) | resident on the host:", "params norm: ", "num zeros: ",
                     "throughput per GPU (TFLOP/s/GPU): "):
            self.assertIn(text, result.stdout)
        with open(os.path.join(folder, "trace.json")) as file:
            names = [event["name"] for event in json.load(file)["traceEvents"]]
        self.assertEqual(names.count("optimizer"), 2)
        self.assertTrue(os.listdir(self.path("tb"))[0].startswith("events.out.tfevents."))

    def test_the_start_record_says_who_and_where(self):
        with open(os.path.join(self.reference, "metrics.jsonl")) as file:
            records = [json.loads(line) for line in file]
        start, startup = records[0], next(record for record in records if record["type"] == "startup")
        self.assertEqual((start["world_size"], start["launcher"], start["attempt"]), (1, "none", 1))
        self.assertEqual(start["mesh"], {"tensor": 1, "context": 1, "data": 1, "pipeline": 1})
        self.assertEqual([(h["host"], h["ranks"], h["device"]) for h in start["hosts"]], [(socket.gethostname(), "0", "cpu")])
        self.assertIn("--save-interval 4", start["command"])
        self.assertEqual(call("version").stdout.split()[1], start["build"]["megatron"])
        self.assertRegex(start["libraries"]["libtorch"], r"^\d+\.\d+")
        stages = startup["seconds"]
        self.assertEqual(list(stages), ["program and rendezvous", "tokenizer", "checkpoint chosen", "data", "model and weights",
                                        "loaders and announcement", "first step"])
        first = next(record for record in records if record["type"] == "train")
        self.assertLess(sum(stages.values()), 120)
        self.assertGreater(stages["program and rendezvous"], 0)
        self.assertLessEqual(first["seconds_per_iteration"], stages["first step"] + 0.5)

    def test_every_violation_is_reported_at_once(self):
        result = call("pretrain", "--num-layers", "2", "--hidden-sise", "32", "--moe-token-dispatcher-type", "alltoall",
                      "--micro-batch-size", "0")
        self.assertEqual(result.returncode, 2)
        for text in ("unknown flag --hidden-sise; did you mean --hidden-size?", "--num-attention-heads", "--micro-batch-size is 0",
                     "--train-iters", "--lr is not given", "no data is given"):
            self.assertIn(text, result.stderr)

    def test_help_and_already_so(self):
        result = call("pretrain", "--help")
        self.assertEqual(result.returncode, 0)
        self.assertIn("--num-layers", result.stdout)
        self.assertIn("more: --help GROUP", result.stdout)
        self.assertLess(result.stdout.count("\n"), 105)
        self.assertIn("--lora-alpha", call("pretrain", "--help", "lora").stdout)
        self.assertIn("--yarn-beta-fast", call("pretrain", "--help", "all").stdout)
        log = self.train("--transformer-impl", "local", "--exit-interval", "3", "--exit-interval", "1").stderr
        self.assertIn("--transformer-impl local is already so", log)
        self.assertIn("--exit-interval is given more than once; the last one counts: --exit-interval 1", log)
        result = call("pretrain", "--deterministic-mode", "--fast")
        self.assertIn("--deterministic-mode is refused: --fast", result.stderr)
        result = call("pretrain", "--config", self.path("nope.yaml"))
        self.assertEqual(result.stderr.count("error:"), 1, result.stderr)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        result = call("pretrain", "--per_device_train_batch_size", "4", "--learning_rate", "1e-4")
        for hint in ("did you mean --micro-batch-size?", "did you mean --lr?"):
            self.assertIn(hint, result.stderr)

    def test_report(self):
        page = self.path("report.html")
        result = call("report", self.reference, "--output", page)
        self.assertEqual(result.returncode, 0, result.stderr)
        text = read(page)
        self.assertEqual(text.count("<svg"), 5)
        for part in ("validation, at the end", "Where the time went", "<td>seq_length</td><td class=\"num\">32</td>"):
            self.assertIn(part, text)
        for address in ("http://", "https://", "src=", "@import"):
            self.assertNotIn(address, text)
        summary = json.loads(call("report", self.reference, "--json").stdout)
        self.assertEqual(summary["iteration"], 8)
        self.assertEqual([c["iteration"] for c in summary["checkpoints"]], [4, 8])
        # The evaluation at the end reads other samples than the last one between iterations.
        self.assertEqual([(e["iteration"], e["at_end"]) for e in summary["evaluations"] if e["split"] == "validation"],
                         [(3, False), (6, False), (8, True)])
        self.assertIn("metrics.jsonl", call("report", self.path("nothing")).stderr)
        other = self.path("other")
        self.train("--run-dir", other, "--seed", "2", "--exit-interval", "4")
        self.assertEqual(call("report", self.reference, other, "--output", page).returncode, 0)
        text = read(page)
        self.assertIn("<td>seed</td><td class=\"num\">1234</td><td class=\"num\">2</td>", text)
        self.assertIn('data-name="other"', text)
        both = json.loads(call("report", self.reference, other, "--json").stdout)
        self.assertEqual((both["reference"]["iteration"], both["other"]["iteration"]), (8, 4))


if __name__ == "__main__":
    BINARY = os.path.abspath(sys.argv[1])
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]], verbosity=2)
