"""How many CPU threads commands use, seen by what libgomp shows of its teams; results do not depend on the number."""
import hashlib
import os
import re
import subprocess

import support

MODEL = ("--num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --micro-batch-size 4 --lr 1e-3 "
         "--tokenizer-type ByteLevelTokenizer --mock-data --train-iters 2").split()
NOTE = "1 CPU thread per rank, as OMP_NUM_THREADS says"


class ThreadsTest(support.FolderTest):
    def team(self, asked, *arguments):
        """The size of the largest team of a call under OMP_NUM_THREADS=`asked`, and its standard error."""
        environment = dict(os.environ, OMP_NUM_THREADS=asked, OMP_DISPLAY_AFFINITY="TRUE", OMP_AFFINITY_FORMAT="team of %N;")
        result = subprocess.run([support.BINARY, *arguments], capture_output=True, text=True, timeout=120, env=environment)
        self.assertEqual(result.returncode, 0, result.stderr)
        return max(map(int, re.findall(r"team of (\d+);", result.stderr)), default=1), result.stderr

    def weights(self, run):
        with open(os.path.join(run, "iter_0000002", "rank_00000.safetensors"), "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()

    def test_the_flag_comes_before_the_environment(self):
        text = self.path("text.txt")
        with open(text, "w") as file:
            file.write("a text to evaluate, with a few words more\n" * 5)
        runs = {}
        for asked, flags, expected in (("3", [], 3), ("3", ["--num-threads", "2"], 2), ("1", [], 1)):
            run = runs[expected] = self.path("run" + str(expected))
            size, said = self.team(asked, "pretrain", *MODEL, "--save", run, *flags)
            self.assertEqual(size, expected, said)
            self.assertEqual(NOTE in said, expected == 1 and len(os.sched_getaffinity(0)) > 1, said)
        self.assertEqual(len({self.weights(run) for run in runs.values()}), 1)

        for command in (["generate", "--prompt", "hello", "--tokens-to-generate", "2"], ["logits", "--prompt", "hello"],
                        ["evaluate", "--tasks", "perplexity=" + text]):
            self.assertEqual(self.team("1", *command, "--load", runs[1])[0], 1, command)
            self.assertEqual(self.team("1", *command, "--load", runs[1], "--num-threads", "3")[0], 3, command)

    def test_every_command_that_computes_has_the_flag(self):
        commands = ("pretrain finetune check prove generate logits evaluate convert-checkpoint bench preprocess-data "
                    "train-tokenizer").split()
        for command in commands:
            with self.subTest(command):
                self.assertIn("--num-threads", self.output(command, "--help", "all"))

    def test_a_negative_number_is_refused(self):
        for command in (["generate", "--load", "x", "--prompt", "x"], ["convert-checkpoint", "--load", "x", "--save", "y"],
                        ["pretrain", *MODEL]):
            result = support.call(*command, "--num-threads", "-1")
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn("--num-threads is -1", result.stderr)


if __name__ == "__main__":
    support.main()
