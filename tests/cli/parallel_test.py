#!/usr/bin/env python3
"""`megatron pretrain` as several processes over Gloo: layouts against one rank, checkpoints between layouts, failures, restarts.

Usage: parallel_test.py BINARY [unittest arguments]. Needs nothing but the standard library: this script sets the variables that
torchrun sets. With MEGATRON_TORCHRUN=COMMAND (a torchrun that works) the ranks are started by that instead.
"""
import json
import math
import os
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

from ports import free_port

BINARY = ""

MODEL = ["--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--group-query-attention", "--num-query-groups", "2",
         "--seq-length", "32", "--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--hidden-dropout", "0.1",
         "--attention-dropout", "0"]
RUN = ["--tokenizer-type", "ByteLevelTokenizer", "--micro-batch-size", "1", "--global-batch-size", "12", "--train-iters", "6",
       "--lr", "1e-3", "--mock-data", "--log-interval", "1", "--eval-interval", "3", "--eval-iters", "1", "--device", "cpu",
       "--num-threads", "1", "--num-workers", "0", "--optimizer", "sgd", "--distributed-timeout-minutes", "1"]
TP, PP, CP, SP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size", "--sequence-parallel"
LAYOUTS = {
    "dp2_zero1": (2, ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]),
    "tp2_sp": (2, [TP, "2", SP]),
    "pp2_vpp2": (2, [PP, "2", "--num-virtual-stages-per-pipeline-rank", "2"]),
    "cp2": (2, [CP, "2"]),
    "dp3_zero3": (3, ["--use-megatron-fsdp", "--overlap-grad-reduce", "--overlap-param-gather"]),
    "tp2_pp2": (4, [TP, "2", SP, PP, "2"]),
}


def start(ranks, arguments, restart=0):
    command = [BINARY, *arguments]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if ranks == 1:
        return [subprocess.Popen(command, env=environment, **pipes)]
    torchrun = os.environ.get("MEGATRON_TORCHRUN")
    if torchrun:
        return [subprocess.Popen([*shlex.split(torchrun), "--no-python", "--nproc-per-node", str(ranks), *command], env=environment, **pipes)]
    port = free_port()
    processes = []
    for rank in range(ranks):
        environment.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks), GROUP_RANK="0",
                           MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RESTART_COUNT=str(restart))
        processes.append(subprocess.Popen(command, env=environment, **pipes))
    return processes


def finish(processes, timeout=120):
    outputs = [process.communicate(timeout=timeout) for process in processes]
    return [process.returncode for process in processes], "".join(out for out, _ in outputs), "".join(err for _, err in outputs)


def records(folder, kind="train"):
    with open(os.path.join(folder, "metrics.jsonl")) as file:
        lines = [json.loads(line) for line in file]
    return {r["iteration"]: r for r in lines if r["type"] == kind}


def tensors(folder, iteration):
    """Every logical tensor of a checkpoint, put together from its fragments: name -> (dtype, shape, bytes)."""
    directory = os.path.join(folder, "iter_%07d" % iteration)
    with open(os.path.join(directory, "manifest.json")) as file:
        manifest = json.load(file)
    out = {}
    sizes = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8}
    data = {}
    for name, tensor in manifest["tensors"].items():
        width = sizes[tensor["dtype"]]
        shape = tensor["shape"]
        whole = bytearray(width * math.prod(shape))
        for fragment in tensor["fragments"]:
            file_name = manifest["files"][fragment["file"]]["name"]
            if file_name not in data:
                with open(os.path.join(directory, file_name), "rb") as file:
                    blob = file.read()
                data[file_name] = blob[8 + struct.unpack("<Q", blob[:8])[0]:]
            offset, extent = fragment["box"]
            begin, end = fragment.get("flat", [0, math.prod(extent)])
            source = data[file_name][fragment["offset"]:fragment["offset"] + (end - begin) * width]
            for i in range(begin, end):  # row-major index in the box -> in the tensor
                rest, at = i, 0
                index = []
                for size in reversed(extent):
                    index.append(rest % size)
                    rest //= size
                for o, k, size in zip(offset, reversed(index), shape):
                    at = at * size + o + k
                whole[at * width:(at + 1) * width] = source[(i - begin) * width:(i - begin + 1) * width]
        out[name] = (tensor["dtype"], tuple(shape), bytes(whole))
    return out


class ParallelTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.shared = tempfile.mkdtemp()
        cls.serial = os.path.join(cls.shared, "serial")
        codes, _, err = finish(start(1, ["pretrain", *MODEL, *RUN, "--save", cls.serial]))
        assert codes == [0], err

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.shared)

    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def path(self, name):
        return os.path.join(self.folder, name)

    def train(self, ranks, *flags, timeout=120):
        codes, out, err = finish(start(ranks, ["pretrain", *MODEL, *RUN, *flags]), timeout)
        self.assertEqual(set(codes), {0}, err + out)
        return out, err

    def assert_same_losses(self, folder, reference, tolerance=2e-5):
        for kind in ("train", "evaluation"):
            ours, theirs = records(folder, kind), records(reference, kind)
            self.assertEqual(ours.keys(), theirs.keys())
            for iteration, record in theirs.items():
                for name in ("lm loss", "grad_norm"):
                    if name in record:
                        self.assertAlmostEqual(ours[iteration][name] / record[name], 1, delta=tolerance, msg=(iteration, name))

    def test_a_hugging_face_folder_is_read_by_every_rank(self):
        golden = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "hf", "gemma2")
        losses = {}
        for name, ranks, layout in (("one", 1, []), ("four", 4, [TP, "2", SP, PP, "2"])):
            folder = os.path.join(self.folder, "hf_" + name)
            flags = ["--load", golden, "--save", folder, "--seq-length", "32", "--micro-batch-size", "1", "--global-batch-size", "4",
                     "--train-iters", "2", "--lr", "1e-3", "--mock-data", "--log-interval", "1", "--eval-iters", "0", "--device", "cpu",
                     "--num-threads", "1", "--num-workers", "0", "--optimizer", "sgd", "--distributed-timeout-minutes", "1"]
            codes, out, error = finish(start(ranks, ["pretrain", *flags, *layout]))
            self.assertEqual(codes, [0] * ranks, out + error)
            losses[name] = [record["lm loss"] for record in records(folder).values()]
        self.assertEqual(len(losses["one"]), 2)
        for one, four in zip(losses["one"], losses["four"]):
            self.assertAlmostEqual(one, four, delta=1e-5 * one)

    def test_every_layout_has_the_losses_of_one_rank(self):
        for name, (ranks, flags) in LAYOUTS.items():
            with self.subTest(layout=name):
                out, _ = self.train(ranks, *flags, "--save", self.path(name))
                self.assertEqual(out.count("iteration        6/"), 1, "one rank prints")
                self.assert_same_losses(self.path(name), self.serial)
                (begun,) = records(self.path(name), "start").values()
                self.assertEqual([host["ranks"] for host in begun["hosts"]], ["0-%d" % (ranks - 1)])
                self.assertEqual((begun["world_size"], math.prod(begun["mesh"].values()), begun["launcher"]), (ranks, ranks, "torchrun"))

    def test_timers_and_memory_are_those_of_all_ranks(self):
        out, err = self.train(2, "--timing-log-level", "1", "--timing-log-option", "all", "--log-interval", "2", "--log-memory-interval", "2",
                              "--check-weight-hash-across-dp-replicas-interval", "2", "--train-iters", "4", "--eval-iters", "0",
                              "--run-dir", self.path("run"))
        self.assertRegex(out, r"times across ranks \(ms\):\n  forward-backward:\n     rank  0: [0-9.]+\n     rank  1: [0-9.]+\n  optimizer:")
        self.assertRegex(out, r"\[iteration 4\] memory \(MB\), most of 2 ranks \| resident on the host: [0-9.]+ \(rank [01]\)\n")
        self.assertRegex(err, r"copies of [0-9]+ tensors of this rank on other ranks are compared every 2 iterations")
        self.assertNotIn("[rank 1]", err)
        sections = records(self.path("run"), "sections")
        self.assertEqual(list(sections), [2, 4])
        for record in sections.values():
            for name in ("data", "forward", "backward", "communication", "optimizer", "host"):
                self.assertGreater(record[name + "_seconds"], 0, name)
                self.assertGreaterEqual(record[name + "_max_seconds"], record[name + "_seconds"], name)
                self.assertIn(record[name + "_max_rank"], (0, 1), name)

    def test_a_run_goes_on_bit_for_bit_under_its_own_layout(self):
        ranks, flags = LAYOUTS["tp2_pp2"]
        flags = [*flags, "--optimizer", "adam", "--async-save"]
        run = [f for f in RUN if f not in ("--optimizer", "sgd")]
        straight, stopped = self.path("straight"), self.path("stopped")
        for save, extra in ((straight, []), (stopped, ["--exit-interval", "4"]), (stopped, [])):
            codes, out, err = finish(start(ranks, ["pretrain", *MODEL, *run, *flags, "--save", save, "--start-mode", "resume-or-fresh", *extra]))
            self.assertEqual(set(codes), {0}, err + out)
        self.assertEqual(tensors(stopped, 6), tensors(straight, 6))

    def test_checkpoints_move_between_layouts_and_back(self):
        # Loading and saving without a step in between keeps every byte, moments included.
        first = self.path("first")
        adam = ["--optimizer", "adam"]
        run = [f for f in RUN if f not in ("--optimizer", "sgd")]
        ranks, flags = LAYOUTS["dp2_zero1"]
        codes, _, err = finish(start(ranks, ["pretrain", *MODEL, *run, *adam, *flags, "--save", first, "--exit-interval", "2"]))
        self.assertEqual(set(codes), {0}, err)
        expected = tensors(first, 2)
        previous = first
        for name in ("tp2_pp2", "dp3_zero3", "pp2_vpp2", "dp2_zero1"):
            ranks, flags = LAYOUTS[name]
            save = self.path("to_" + name)
            # A run whose length is what it has done already saves what it has loaded.
            flags = [*run, *adam, *flags, "--load", previous, "--save", save, "--override-opt-param-scheduler"]
            flags[flags.index("--train-iters") + 1] = "2"
            codes, out, err = finish(start(ranks, ["pretrain", *MODEL, *flags]))
            self.assertEqual(set(codes), {0}, err + out)
            self.assertEqual(tensors(save, 2), expected, name)
            previous = save

    def test_plain_replicas_divide_a_checkpoint_and_fall_back_together(self):
        # Three copies of the weights and of Adam's states: each rank writes a third and reads a third.
        run = [f for f in RUN if f not in ("--optimizer", "sgd")]
        common = ["pretrain", *MODEL, *run, "--save-interval", "2"]
        flags = [*common, "--save", self.path("run"), "--start-mode", "resume-or-fresh"]
        codes, out, err = finish(start(3, [*flags, "--exit-interval", "4"]))
        self.assertEqual(codes, [0] * 3, err + out)
        newest = os.path.join(self.path("run"), "iter_0000004")
        files = [os.path.join(newest, "rank_%05d.safetensors" % rank) for rank in range(3)]
        sizes = [os.path.getsize(file) for file in files]
        self.assertLess(max(sizes), 1.2 * min(sizes), sizes)
        codes, out, err = finish(start(3, [*common, "--save", self.path("straight"), "--load", self.path("run")]))
        self.assertEqual(codes, [0] * 3, err + out)
        # A flipped bit in the last rank's file: all ranks go back to the same checkpoint, and the end is the same.
        with open(files[2], "r+b") as file:
            file.seek(sizes[2] // 2)
            byte = file.read(1)
            file.seek(sizes[2] // 2)
            file.write(bytes([byte[0] ^ 4]))
        codes, out, err = finish(start(3, flags))
        self.assertEqual(codes, [0] * 3, err + out)
        self.assertEqual(err.count("iter_0000004/rank_00002.safetensors: the checksum of bytes"), 1 + 1, err)  # passed over, moved aside
        self.assertTrue(os.path.isdir(newest + ".unusable-0"))
        self.assertEqual(tensors(self.path("run"), 6), tensors(self.path("straight"), 6))

    def test_a_run_goes_on_under_another_layout(self):
        half = self.path("half")
        profile = ["--profile", "--profile-ranks", "1", "--profile-step-start", "1", "--profile-step-end", "2"]
        self.train(*[LAYOUTS["pp2_vpp2"][0]], *LAYOUTS["pp2_vpp2"][1], "--save", half, "--exit-interval", "3", *profile)
        self.assertEqual([name for name in os.listdir(half) if name.startswith("trace")], ["trace-rank-1.json"])
        codes, _, err = finish(start(1, ["pretrain", *MODEL, *RUN, "--load", half, "--use-mp-args-from-checkpoint-args"]))
        self.assertEqual(codes, [2])
        self.assertIn("1 ranks are not divisible by --tensor-model-parallel-size 1 x --pipeline-model-parallel-size 2", err)
        saved = ["--load", half, "--use-mp-args-from-checkpoint-args", "--hybrid-layer-pattern", "*-|*-"]
        codes, _, err = finish(start(2, ["pretrain", *MODEL, *RUN, *saved]))
        self.assertEqual(codes, [2] * 2)
        self.assertIn("has 2 segments, --num-virtual-stages-per-pipeline-rank 2 x --pipeline-model-parallel-size 2 asks for 4", err)
        self.assertIn("hint: the virtual stages are those of " + half, err)
        ranks, flags = LAYOUTS["dp3_zero3"]
        self.train(ranks, *flags, "--load", half, "--save", self.path("rest"))
        serial = records(self.serial)
        for iteration, record in records(self.path("rest")).items():
            self.assertAlmostEqual(record["lm loss"] / serial[iteration]["lm loss"], 1, delta=2e-5, msg=iteration)

    def test_a_killed_rank_ends_the_job_and_a_restart_goes_on(self):
        ranks, flags = LAYOUTS["tp2_pp2"]
        save = self.path("killed")
        arguments = ["pretrain", *MODEL, *RUN, *flags, "--save", save, "--save-interval", "1", "--start-mode", "resume-or-fresh"]
        long = list(arguments)
        long[long.index("--train-iters") + 1] = "100000"
        long += ["--lr-decay-style", "constant"]
        if os.environ.get("MEGATRON_TORCHRUN"):
            self.skipTest("the ranks are torchrun's children")
        processes = start(ranks, long)
        while "iteration        3/" not in processes[0].stdout.readline():
            self.assertIsNone(processes[0].poll(), "the job ended by itself")
        processes[2].send_signal(signal.SIGKILL)
        begin = time.monotonic()
        codes, _, err = finish(processes, timeout=60)
        self.assertLess(time.monotonic() - begin, 30)
        self.assertNotIn(0, codes)
        self.assertIn("rank 2", err)
        saved = [int(name[5:]) for name in os.listdir(save) if name.startswith("iter_") and "tmp" not in name]
        self.assertTrue(saved)
        again = [*long, "--exit-interval", "1"]
        codes, _, err = finish(start(ranks, again, restart=1))
        self.assertEqual(set(codes), {0}, err)
        self.assertIn("resuming from", err)

    def test_wrong_arguments_are_reported_once(self):
        codes, out, err = finish(start(2, ["pretrain", *MODEL, *RUN, TP, "3"]))
        self.assertEqual(codes, [2, 2])
        self.assertEqual((out + err).count("2 ranks are not divisible by --tensor-model-parallel-size 3"), 1, err)

    def test_prove_finds_nothing(self):
        result = subprocess.run([BINARY, "prove", "--world-size", "8", *MODEL, TP, "2", SP, PP, "2", "--micro-batch-size", "1",
                                 "--global-batch-size", "8", "--bf16", "--use-distributed-optimizer", "--json"], stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, timeout=120)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        report = json.loads(result.stdout)
        self.assertTrue(report["holds"])
        self.assertEqual([proof["dtype"] for proof in report["proofs"]], ["fp64", "bf16", "bf16", "fp64"])
        served = {line["quantity"]: line for line in report["proofs"][3]["lines"]}
        self.assertGreater(served["log-probability"]["compared"], 100)
        self.assertGreater(served["greedy tokens"]["compared"], 10)

    def test_prove_serves_uneven_stages(self):
        result = subprocess.run([BINARY, "prove", "--world-size", "2", "--num-layers", "3", "--decoder-first-pipeline-num-layers", "2", PP, "2",
                                 "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32", "--micro-batch-size", "1",
                                 "--global-batch-size", "4", "--steps", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertNotIn("not proved: serving", result.stdout)
        self.assertIn("greedy tokens", result.stdout)


class ProveTest(unittest.TestCase):
    """`megatron prove` as processes: the first rank prints, all leave with the verdict."""

    FLAGS = ["prove", "--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64", "--micro-batch-size",
             "1", "--untie-embeddings-and-output-weights", "--device", "cpu", "--num-threads", "1",
             "--steps", "2", "--distributed-timeout-minutes", "1"]

    def test_layouts_hold(self):
        for ranks, flags in ((2, [PP, "2", "--pipeline-vocab-parallel"]),
                             (4, [TP, "2", SP, PP, "2", "--pipeline-vocab-parallel"]),
                             (3, ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"])):
            with self.subTest(flags=flags):
                codes, out, err = finish(start(ranks, [*self.FLAGS, "--global-batch-size", str(4 * ranks), *flags]))
                self.assertEqual(codes, [0] * ranks if len(codes) > 1 else [0], err)
                self.assertEqual(out.count("%d ranks as processes against one" % ranks), 1)
                self.assertEqual(out.count("the layout changes nothing but rounding"), 1)
                self.assertNotIn("FAILS", out)

    def test_the_ranks_are_those_that_were_started(self):
        for flags, message in (([TP, "4"], "2 ranks are not divisible by --tensor-model-parallel-size 4"),
                               (["--world-size", "4"], "--world-size is 4, but 2 ranks were started"),
                               (["--max-axis", "2"], "--max-axis reduces the number of ranks")):
            codes, out, err = finish(start(2, [*self.FLAGS, *flags]))
            if len(codes) > 1:
                self.assertEqual(codes, [2, 2])
            self.assertEqual(err.count(message), 1, err)
            self.assertEqual(out, "")

    def test_one_rank_proves_on_its_gpu(self):
        flags = [*self.FLAGS, "--device", "cuda"]
        codes, out, err = finish(start(1, [*flags, "--world-size", "4"]))
        self.assertEqual(codes, [2])
        self.assertIn("--world-size is 4, but 1 rank was started", err)
        self.assertIn("start them with a launcher", err)
        codes, out, err = finish(start(1, flags))
        if "no usable GPU" not in err and "built without CUDA" not in err:
            self.assertEqual(codes, [0], err)
            self.assertIn("the layout changes nothing but rounding", out)


if __name__ == "__main__":
    BINARY = os.path.abspath(sys.argv.pop(1))
    unittest.main(verbosity=2)
