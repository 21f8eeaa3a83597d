#!/usr/bin/env python3
"""Every line of the documents that starts torchrun, given to a real torchrun; and no flag of ours that torchrun takes for its own.

Usage: launch_lines_test.py BINARY [unittest arguments]. torchrun is .venv/bin/torchrun, or MEGATRON_TORCHRUN=COMMAND.
"""
import concurrent.futures
import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest
import urllib.request

from ports import free_port

BINARY = ""
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DOCUMENTS = ["README.md", "docs/**/*.md", "recipes/**/*", "examples/**/*", "scripts/*.sh"]
COMMANDS = ["pretrain", "finetune", "prove", "bench", "evaluate", "serve"]  # that run on several ranks

MODEL = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32", "--micro-batch-size", "1",
         "--global-batch-size", "4", "--lr", "1e-3", "--tokenizer-type", "ByteLevelTokenizer", "--train-iters", "2"]
TINY = MODEL + ["--mock-data", "--eval-iters", "0", "--log-interval", "1", "--device", "cpu", "--num-threads", "1", "--num-workers", "0",
                "--distributed-timeout-minutes", "2"]


def torchrun():
    return shlex.split(os.environ.get("MEGATRON_TORCHRUN", os.path.join(ROOT, ".venv", "bin", "torchrun")))


def documented_lines():
    """(document, words) of each command that starts torchrun, without comments and with lines that go on joined."""
    found = []
    for pattern in DOCUMENTS:
        for path in sorted(glob.glob(os.path.join(ROOT, pattern), recursive=True)):
            if not os.path.isfile(path):
                continue
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
            name = os.path.relpath(path, ROOT)
            joined = re.sub(r"\\\n\s*", " ", text)
            for line in joined.splitlines():
                spans = [line] if re.match(r"\s*(exec |srun .*)?torchrun -", line) else re.findall(r"`(torchrun -[^`]*)`", line)
                for span in spans:
                    span = span[span.index("torchrun -"):]
                    found.append((name, shlex.split(span.replace("<the flags of your run>", "..."), comments=True)))
    return found


def torchrun_options():
    """All spellings of torchrun's own options, from the text of its program."""
    (path,) = glob.glob(os.path.join(ROOT, ".venv", "lib", "python3*", "site-packages", "torch", "distributed", "run.py"))
    with open(path) as file:
        text = file.read()
    body = text[text.index("def get_args_parser"):]
    body = body[:body.index("\ndef ")]
    options = set()
    for call in re.findall(r"add_argument\(\s*((?:\"-[^\"]*\",?\s*)+)", body):
        options.update(re.findall(r"\"(--[^\"]*)\"", call))
    return options


def our_flags():
    with open(os.path.join(ROOT, "docs", "flags.md")) as file:
        flags = set(re.findall(r"`(--[a-z0-9][a-z0-9_-]*)", file.read()))
    for command in COMMANDS:
        text = subprocess.run([BINARY, command, "--help"], capture_output=True, text=True, check=True).stdout
        flags.update(re.findall(r"(?<![\w-])(--[a-z0-9][a-z0-9-]*)", text))
    return flags


class CollisionTest(unittest.TestCase):
    def test_no_flag_is_taken_for_one_of_torchruns(self):
        # argparse refuses what is the beginning of several options, behind the program's name as well. (What could be one of them
        # only, it leaves to the program there: test_all_our_flags_pass_through_torchrun.)
        options = torchrun_options()
        self.assertIn("--start-method", options)
        self.assertGreater(len(options), 30)
        flags = our_flags()
        self.assertGreater(len(flags), 800)
        collisions = {flag: sorted(o for o in options if o != flag and o.startswith(flag)) for flag in flags}
        collisions = {flag: found for flag, found in collisions.items() if len(found) > 1}
        # The older spelling of --start-mode stays for other launchers and for scripts.
        self.assertEqual(collisions, {"--start": ["--start-method", "--start_method"]})
        self.assertIn("--start-mode", flags)

    def test_no_document_uses_the_spelling_that_torchrun_takes(self):
        for pattern in DOCUMENTS:
            for path in glob.glob(os.path.join(ROOT, pattern), recursive=True):
                if os.path.isfile(path) and not path.endswith("flags.md"):
                    with open(path, encoding="utf-8", errors="replace") as file:
                        found = re.search(r".*--start(?![`\w-]).*", file.read())
                    self.assertIsNone(found, (path, found and found.group()))


class LaunchLinesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        result = subprocess.run([*torchrun(), "--help"], capture_output=True, text=True)
        if result.returncode != 0:
            raise unittest.SkipTest("no torchrun that works: make setup installs one")
        cls.lines = documented_lines()

    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def path(self, name):
        return os.path.join(self.folder, name)

    def run_together(self, commands, timeout=240):
        """Runs these at the same time and returns (outputs, what happened)."""
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        processes = [subprocess.Popen(command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                     for command in commands]
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
        self.assertEqual([process.returncode for process in processes], [0] * len(processes), "\n".join(outputs))
        return "".join(outputs)

    def test_all_lines_pass_through_torchrun_as_they_are(self):
        # A program in place of ours shows which words arrive; one rank, no store.
        self.assertGreaterEqual(len(self.lines), 8, self.lines)
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            running = [(line, pool.submit(self.pass_through, i, line[1])) for i, line in enumerate(self.lines)]
        for (document, words), case in running:
            with self.subTest(document=document, line=" ".join(words)):
                case.result()

    def pass_through(self, number, words):
        echo, arrived = self.path("echo-%d" % number), self.path("words-%d" % number)
        with open(echo, "w") as file:
            file.write("#!/bin/sh\nprintf '%s\\n' \"$@\" > '" + arrived + "'\n")
        os.chmod(echo, 0o755)
        at = next(i for i, word in enumerate(words) if word.endswith(("megatron", "gpu_tests", ".py")) or word in ("$MEGATRON", "$BINARY"))
        own = words[1:at]
        given = [word for word in words[at + 1:] if word != "..."]
        self.assertTrue("--no-python" in own or words[at].endswith(".py"), "torchrun would start the program by Python")
        own = [re.sub(r"^--nproc[-_]per[-_]node=.*", "--nproc-per-node=1", word) for word in own if word != "--no-python"]
        for option, value in (("--nproc-per-node", "1"), ("--nnodes", "1"), ("--node-rank", "0"), ("--master-addr", "127.0.0.1"),
                              ("--master-port", str(free_port())), ("--rdzv-endpoint", "127.0.0.1:%d" % free_port())):
            if option in own:
                own[own.index(option) + 1] = value
        if "--standalone" not in own and "--master-port" not in own and "--rdzv-endpoint" not in own:
            own += ["--master-port", str(free_port())]
        self.run_together([[*torchrun(), "--no-python", *own, echo, *given]])
        with open(arrived) as file:
            self.assertEqual(file.read().splitlines(), given)

    def test_all_our_flags_pass_through_torchrun(self):
        result = self.run_together([[*torchrun(), "--no-python", "--standalone", "--nproc-per-node", "1", "echo",
                                     *sorted(our_flags() - {"--start"})]])
        self.assertIn("--start-mode --start", result)

    def line(self, document, *needed, without=()):
        """The words behind `torchrun` and the flags of the program, of the one line that holds these words."""
        (words,) = [words for name, words in self.lines
                    if name == document and all(word in words for word in needed) and not any(word in words for word in without)]
        at = next(i for i, word in enumerate(words) if word.endswith("megatron"))
        return words[1:at], [word for word in words[at + 1:] if word != "..."]

    def replaced(self, words, **values):
        words = list(words)
        for option, value in values.items():
            words[words.index("--" + option.replace("_", "-")) + 1] = str(value)
        return words

    # The lines of the documents on CPUs: fewer ranks, a tiny model, machines that are all this one.

    def test_one_machine(self):
        own, given = self.line("docs/parallelism/launching.md", "--standalone")
        out = self.run_together([[*torchrun(), *self.replaced(own, nproc_per_node=2), BINARY, *given, *TINY]])
        self.assertEqual(out.count("iteration        2/"), 1, out)

    def test_two_machines(self):
        own, given = self.line("docs/parallelism/launching.md", "--node-rank")
        port = free_port()
        out = self.run_together([[*torchrun(), *self.replaced(own, nproc_per_node=1, node_rank=node, master_addr="127.0.0.1", master_port=port),
                                  BINARY, *given, *TINY] for node in range(2)])
        self.assertEqual(out.count("iteration        2/"), 1, out)

    def test_two_machines_with_restarts(self):
        own, given = self.line("docs/parallelism/launching.md", "--max-restarts")
        own = self.replaced(own, nproc_per_node=1, rdzv_endpoint="127.0.0.1:%d" % free_port())
        given = [self.path("run") if word == "DIR" else word for word in given]
        for _ in range(2):  # the second time it resumes: there is nothing left to do
            self.run_together([[*torchrun(), *own, BINARY, *given, *TINY] for _ in range(2)])
        self.assertTrue(os.path.isdir(self.path("run/iter_0000002")))

    def test_prove(self):
        own, given = self.line("docs/parallelism/proving.md", "prove")
        out = self.run_together([[*torchrun(), *self.replaced(own, nproc_per_node=2), "--master-port", str(free_port()), BINARY, *given, *TINY,
                                  "--tensor-model-parallel-size", "2"]])
        self.assertIn("changes nothing but rounding", out)

    def test_readme_and_evaluation(self):
        own, given = self.line("README.md", "pretrain")
        self.run_together([[*torchrun(), *self.replaced(own, nproc_per_node=2), "--master-port", str(free_port()), BINARY, *given, *TINY, "--save",
                            self.path("run")]])
        with open(self.path("piqa.jsonl"), "w") as file:
            file.writelines('{"goal": "g%d", "sol1": "a", "sol2": "b", "label": %d}\n' % (i, i % 2) for i in range(4))
        own, given = self.line("docs/evaluating.md", "evaluate")
        out = self.run_together([[*torchrun(), *self.replaced(own, nproc_per_node=2), "--master-port", str(free_port()), BINARY, *given]])
        self.assertIn("piqa", out)

    def test_serve(self):
        own, given = self.line("docs/serving.md", "serve", without=["bench"])
        model = os.path.join(ROOT, "tests", "golden", "evaluate", "model")
        given = [model if word == "$model" else word for word in given]
        process = subprocess.Popen([*torchrun(), *own, "--master-port", str(free_port()), BINARY, *given, "--port", "0", "--device", "cpu"],
                                   env=dict(os.environ, OMP_NUM_THREADS="1"), stdout=subprocess.PIPE, text=True)
        try:
            told = re.search(r"is served at (http\S+)", process.stdout.readline())
            self.assertIsNotNone(told)
            answer = self.post(told[1] + "/v1/completions", {"prompt": "The cat", "max_tokens": 4, "temperature": 0})
            self.assertEqual(answer["usage"]["completion_tokens"], 4)
            self.assertEqual(self.post(told[1] + "/admin/drain", {})["state"], "stopped")
            self.assertEqual(process.wait(60), 0)
        finally:
            process.kill()
            process.communicate()

    def test_bench_serve(self):
        own, given = self.line("docs/serving.md", "bench", "serve")
        given = [os.path.join(ROOT, "tests", "golden", "evaluate", "model") if word == "DIR" else word for word in given]
        out = self.run_together([[*torchrun(), *own, "--master-port", str(free_port()), BINARY, *given, "--device", "cpu", "--num-requests", "3",
                                  "--prompt-tokens", "8", "--output-tokens", "4"]])
        self.assertIn("3 completed, 0 failed", out)

    def post(self, url, body):
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), method="POST"), timeout=60) as response:
            return json.load(response)


if __name__ == "__main__":
    BINARY = os.path.abspath(sys.argv.pop(1))
    unittest.main()
