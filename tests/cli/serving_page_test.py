#!/usr/bin/env python3
"""The commands of docs/serving.md as written, at another port. Those of several ranks are shown by serve_ranks_test.py, those of routers
by tests/clients.

Usage: serving_page_test.py BINARY [unittest arguments]. Needs bash and curl.
"""
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import unittest

import support
from ports import free_port
from serving import Server

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
MODEL = "tests/golden/evaluate/model"


@unittest.skipUnless(shutil.which("curl"), "there is no curl")
class ServingPageTest(support.FolderTest):
    def setUp(self):
        super().setUp()
        os.makedirs(self.path("build/bin"))
        os.symlink(os.path.abspath(support.BINARY), self.path("build/bin/megatron"))
        os.symlink(ROOT / "tests", self.path("tests"))
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.folder)
        self.blocks = re.findall(r"^```\n(.*?)^```", PAGE, re.S | re.M)

    def shell(self, text):
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", text], capture_output=True, text=True, timeout=300, check=False)
        self.assertEqual(done.returncode, 0, text + done.stdout + done.stderr)
        return done.stdout

    def test_first_steps(self):
        out = self.shell(self.blocks[0].replace("8000", str(free_port())))
        self.assertEqual(out.count('"object": "text_completion"'), 10)  # one reply, eight tokens and their sum
        self.assertIn("data: [DONE]", out)
        self.assertIn('{"text": ["The cat', out)
        self.assertIn("20 completed, 0 failed", out)

    def test_plans_and_servers_with_other_flags(self):
        served = 0
        for line in "".join(self.blocks[1:]).split("\n"):
            line = line.split("  #")[0].strip()
            if line.startswith("$m check"):
                self.assertIn("H100", self.shell(f"m=build/bin/megatron model={MODEL}\n" + line))
            if not line.startswith("$m serve"):
                continue
            words = shlex.split(line.replace("$model", MODEL).replace("$small", MODEL))
            server = Server(*words[2:], exact=[])
            self.addCleanup(server.close)
            server.ok("/v1/completions", {"prompt": "The cat", "max_tokens": 2})
            self.assertEqual(server.stop(), 0, line)
            served += 1
        self.assertEqual(served, 5)


if __name__ == "__main__":
    support.main()
