"""What the end-to-end tests share: the binary, and a folder for each test."""
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

BINARY = ""


def call(*arguments):
    """Runs the binary; its output as text."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    return subprocess.run([BINARY, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120, env=environment)


class FolderTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def path(self, name):
        return os.path.join(self.folder, name)

    def run_ok(self, *arguments):
        result = call(*arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result

    def output(self, *arguments):
        return self.run_ok(*arguments).stdout


def main():
    """Usage of a test: test.py BINARY [unittest arguments]."""
    global BINARY
    BINARY = os.path.abspath(sys.argv.pop(1))
    unittest.main()
