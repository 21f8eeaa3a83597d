#!/usr/bin/env python3
"""Fourteen ways to meet a full disk: saves, tools and standard output.

Usage: full_disk_test.py BINARY [unittest arguments]. Each full disk is a small tmpfs of its own; for that the script starts
itself again in a mount namespace (as root, or with user namespaces). Where neither is allowed, the trials on a tmpfs are skipped.
"""
import json
import os
import subprocess
import sys
import unittest

import support

INSIDE = "MEGATRON_FULL_DISK_INSIDE"
RUN = ["pretrain", "--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "16", "--tokenizer-type",
       "ByteLevelTokenizer", "--mock-data", "--device", "cpu", "--num-threads", "1", "--num-workers", "0", "--micro-batch-size", "2",
       "--lr", "1e-3", "--log-interval", "1", "--eval-iters", "0", "--train-iters", "4", "--save-interval", "2"]
GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "hf", "llama3")


def in_mount_namespace():
    """The words that start a program where it may mount; None where that is impossible."""
    probe = 'd=$(mktemp -d) && mount -t tmpfs -o size=64k none "$d" && umount "$d"; s=$?; rmdir "$d"; exit $s'
    for words in (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]):
        try:
            if subprocess.run([*words, "sh", "-c", probe], capture_output=True, timeout=60).returncode == 0:
                return words
        except OSError:
            pass
    return None


def size_of(folder):
    return sum(os.path.getsize(os.path.join(root, name)) for root, _, names in os.walk(folder) for name in names)


class FullDiskTest(support.FolderTest):
    def disk(self, size):
        """A disk of so many bytes."""
        if os.environ.get(INSIDE) != "1":
            self.skipTest("a tmpfs cannot be mounted here: neither root nor user namespaces")
        path = self.path("disk")
        os.makedirs(path, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=%d" % size, "none", path], check=True)
        self.addCleanup(subprocess.run, ["umount", path], check=True)
        return path

    def fails(self, *arguments, stdout=subprocess.PIPE, says="No space left on device"):
        result = subprocess.run([support.BINARY, *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120)
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn("error: ", result.stderr)
        self.assertIn(says, result.stderr)
        return result

    @classmethod
    def checkpoint_bytes(cls):
        if not hasattr(cls, "bytes_"):
            test = cls("skip")
            test.setUp()
            test.run_ok(*RUN, "--save", test.path("s"))
            cls.bytes_ = size_of(os.path.join(test.path("s"), "iter_0000002"))
            test.doCleanups()
        return cls.bytes_

    def skip(self):
        pass

    def outcome(self, save):
        with open(os.path.join(save, "outcome.json")) as file:
            return json.load(file)

    def checkpoints(self, save):
        return sorted(name for name in os.listdir(save) if name.startswith("iter_"))

    def save_trial(self, failure, background):
        save = os.path.join(self.disk(self.checkpoint_bytes() * 3 // 2 + 60000), "s")
        result = self.fails(*RUN, "--save", save, "--save-failure", failure, *background)
        self.assertIn("the checkpoint of iteration 4 was not saved", result.stderr)
        self.assertIn("iteration        4/       4", result.stdout)
        self.assertEqual(self.checkpoints(save), ["iter_0000002"], "nothing half-written stays")
        self.run_ok("inspect-checkpoint", save)
        outcome = self.outcome(save)
        self.assertEqual((outcome["outcome"], outcome["class"], outcome["last_saved_iteration"]), ("failed", "do-not-retry", 2))
        if failure == "continue":
            self.assertIn("the final state, of iteration 4, was not saved", result.stderr)
            self.assertIn("the newest checkpoint is iteration 2", result.stderr)

    def test_01_stop(self):
        self.save_trial("stop", [])

    def test_02_stop_in_the_background(self):
        self.save_trial("stop", ["--async-save"])

    def test_03_continue(self):
        self.save_trial("continue", [])

    def test_04_continue_in_the_background(self):
        self.save_trial("continue", ["--async-save"])

    def test_05_retention_frees_in_time(self):
        save = os.path.join(self.disk(self.checkpoint_bytes() * 5 // 2 + 100000), "s")
        flags = list(RUN)
        flags[flags.index("--train-iters") + 1] = "12"
        self.run_ok(*flags, "--save", save, "--keep-last-checkpoints", "1")
        self.assertEqual(self.checkpoints(save), ["iter_0000012"])
        self.assertEqual(self.outcome(save)["outcome"], "finished")

    def text(self):
        path = self.path("text.jsonl")
        with open(path, "w") as file:
            for i in range(3000):
                file.write(json.dumps({"text": "document %d of a text that fills more than a small disk %d" % (i, i * i)}) + "\n")
        return path

    def assert_empty(self, disk):
        self.assertEqual(os.listdir(disk), [], "nothing half-written stays")

    def test_06_preprocess_data(self):
        disk = self.disk(40960)
        self.fails("preprocess-data", "--input", self.text(), "--output-prefix", os.path.join(disk, "d"), "--tokenizer-type",
                   "ByteLevelTokenizer")
        self.assert_empty(disk)

    def test_07_train_tokenizer(self):
        disk = self.disk(4096)
        with open(os.path.join(disk, "filler"), "wb") as filler:
            filler.write(b"x" * 4096)
        self.fails("train-tokenizer", "--input", self.text(), "--vocab-size", "300", "--output", os.path.join(disk, "t"))
        os.remove(os.path.join(disk, "filler"))
        self.assertEqual([name for _, _, names in os.walk(disk) for name in names], [])

    def test_08_convert_checkpoint(self):
        disk = self.disk(8192)
        self.fails("convert-checkpoint", "--load", GOLDEN, "--save", os.path.join(disk, "c"))
        self.assertEqual([name for _, _, names in os.walk(disk) for name in names], [])

    def test_09_logits(self):
        disk = self.disk(4096)
        self.fails("logits", "--load", GOLDEN, "--dtype", "fp32", "--device", "cpu", "--tokens", ",".join(["3"] * 64), "--output",
                   os.path.join(disk, "l.safetensors"))
        self.assert_empty(disk)

    def to_full_output(self, *arguments):
        with open("/dev/full", "w") as full:
            return self.fails(*arguments, stdout=full, says="cannot write to standard output: No space left on device")

    def test_10_help(self):
        self.to_full_output("--help")

    def test_11_help_of_a_command(self):
        self.to_full_output("inspect-dataset", "--help")

    def test_12_version(self):
        self.to_full_output("version")

    def test_13_tokenize(self):
        self.to_full_output("tokenize", "--tokenizer-type", "ByteLevelTokenizer", "some text")

    def test_14_pretrain_goes_on_to_the_end(self):
        save = self.path("s")
        self.to_full_output(*RUN, "--save", save)
        self.assertEqual(self.outcome(save)["outcome"], "finished")
        self.assertEqual(self.checkpoints(save), ["iter_0000002", "iter_0000004"])


if __name__ == "__main__":
    if INSIDE not in os.environ:
        words = in_mount_namespace()
        if words is None:
            print("a tmpfs cannot be mounted here: only standard output is tried")
        os.environ[INSIDE] = "0" if words is None else "1"
        words = [*(words or []), sys.executable, *sys.argv]
        os.execvp(words[0], words)
    support.main()
