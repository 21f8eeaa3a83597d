"""What the end-to-end tests share: the binary, and a folder for each test."""
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

BINARY = ""


def call(*arguments):
    """Runs the binary; its output as text."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    return subprocess.run([BINARY, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120, env=environment)


def read_safetensors(path):
    """{name: (shape, bytes)}"""
    with open(path, "rb") as stream:
        data = stream.read()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    return {name: (e["shape"], data[8 + length + e["data_offsets"][0]:8 + length + e["data_offsets"][1]]) for name, e in header.items()}


def write_safetensors(path, parts):
    """{name: (dtype, shape, bytes)}"""
    header, data = {}, b""
    for name, (dtype, shape, contents) in parts.items():
        header[name] = dict(dtype=dtype, shape=shape, data_offsets=[len(data), len(data) + len(contents)])
        data += contents
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text + data)


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

    def assert_error(self, code, message, *arguments):
        result = call(*arguments)
        lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        self.assertEqual((result.returncode, lines), (code, ["error: " + message]))

    def output(self, *arguments):
        return self.run_ok(*arguments).stdout


def main():
    """Usage of a test: test.py BINARY [unittest arguments]."""
    global BINARY
    BINARY = os.path.abspath(sys.argv.pop(1))
    unittest.main()
