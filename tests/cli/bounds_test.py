"""Hostile inputs: each either works or is refused by name, within seconds and bounded memory, and nothing crashes.

Chat templates (28), tokenizers (18 made by hand, 60 by chance), YAML (22), Parquet (7 and 40), and FIFOs and devices in place of files.
"""
import json
import os
import pathlib
import random
import resource
import subprocess
import sys
import tempfile
import unittest

import support

ROOT = pathlib.Path(__file__).resolve().parents[2]
KINDS = ROOT / "tests/golden/tokenizers/kinds"
MIB = 1 << 20
ADDRESS_SPACE = 2048 * MIB  # what the program may map; more ends in an error of the allocator
RESIDENT = 768 * MIB
CPU_SECONDS = 20


def attempt(arguments, stdin=None):
    """Runs the binary within limits: exit code, standard error, resident bytes, processor seconds."""

    def limit():
        if not os.environ.get("MEGATRON_SANITIZE"):  # AddressSanitizer reserves terabytes
            resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen([support.BINARY, *map(str, arguments)], stdin=stdin or subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                   stderr=errors, preexec_fn=limit, env=dict(os.environ, OMP_NUM_THREADS="1"))
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        text = errors.read().decode("utf-8", "replace")
    return process.returncode, text, usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime


class BoundsTest(support.FolderTest):
    def hold(self, what, arguments, named, stdin=None):
        """One trial. `named`: what the error must mention. Whether it was refused."""
        code, text, resident, seconds = attempt(arguments, stdin)
        with self.subTest(what):
            self.assertIn(code, (0, 1, 2), f"{what}: {text[-500:]}")
            self.assertLess(resident, RESIDENT, what)
            self.assertLess(seconds, CPU_SECONDS - 5, what)
            self.assertLess(len(text), 100_000, what)
            if code != 0:
                self.assertIn("error: ", text, what)
                self.assertIn(str(named), text, what)
                self.assertNotIn("out of host memory", text, what)
        return code != 0

    def write(self, name, content):
        path = self.path(name)
        with open(path, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
        return path

    def fifo(self, name):
        path = self.path(name)
        os.mkfifo(path)
        return path

    def sparse(self, name):
        path = self.write(name, b"")
        os.truncate(path, 1 << 40)
        return path

    # -- chat templates

    def test_templates(self):
        grow = "{% set ns = namespace(s='0123456789abcdef') %}{% for i in range(60) %}{% set ns.s = STEP %}{% endfor %}{{ ns.s|length }}"
        megabyte = "{% set m = 'abcdefgh' * 131072 %}"
        lists = "{% set ns = namespace(l=['x']) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}"
        templates = [
            "{% for i in range(1000000000) %}x{% endfor %}",
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{{ " + "(" * 100000 + "1" + ")" * 100000 + " }}",
            "{% if true %}" * 50000,
            "{{ 'a' * 1000000000000 }}",
            "{{ '' * 1000000000000 }}",
            grow.replace("STEP", "ns.s + ns.s"),
            grow.replace("STEP", "ns.s ~ ns.s"),
            grow.replace("STEP", "[ns.s, ns.s]|join"),
            grow.replace("STEP", "ns.s.join([ns.s, ns.s])"),
            grow.replace("STEP", "'%s%s' % (ns.s, ns.s)"),
            grow.replace("STEP", "'%s%s'|format(ns.s, ns.s)"),
            grow.replace("STEP", "ns.s.replace('0', '00')"),
            grow.replace("STEP", "ns.s|escape|replace('a', '<<')"),
            megabyte + "{{ ('a' * 1048576) | replace('a', m) | length }}",
            megabyte + "{{ (range(99999) | join(m)) | length }}",
            megabyte + "{{ (m | replace('a', '\\n')) | indent(m) | length }}",
            "{% macro m(x) %}{{ m(x) }}{{ m(x) }}{% endmacro %}{{ m(1) }}",
            "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
            lists + "{{ ns.l | tojson | length }}",
            lists + "{{ ns.l | string | length }}",
            "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x == 1 }}",
            "{% set h = namespace(c=namespace()) %}{% for i in range(99999) %}{% set h.n = namespace(p=h.c) %}{% set h.c = h.n %}{% endfor %}",
            "{{ [1] | batch(1000000000000, 'x') | length }}",
            "{{ range(99999) | unique | length }}{% for i in range(99999) %}{{ i in range(99999) }}{% endfor %}",
            "{{ ('\u00df' * 1000000) | upper | length }}" + megabyte + "{{ (m | replace('d', ' ')).split() | length }}",
            megabyte + "{% for i in range(99999) %}{{ m[i] }}{{ m[i:i + 9] }}{{ m.find('zz') }}{% endfor %}",
            "{% for x in messages %}{{ x.content }",
        ]
        self.assertEqual(len(templates), 28)
        row = self.write("row.jsonl", '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n')
        refused = 0
        for i, source in enumerate(templates):
            name = self.write(f"template{i}.jinja", source)
            refused += self.hold(f"template {i}: {source[:80]}",
                                 ["inspect-chat", "--input", row, "--chat-template", name, "--tokenizer-type", "ByteLevelTokenizer"], name)
        self.assertGreater(refused, 20)

    # -- tokenizers

    def tokenize(self, what, path):
        return self.hold(what, ["tokenize", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", path, "--input", self.text], path)

    def test_tokenizers(self):
        self.text = self.write("text.txt", "a" * 5000 + " hello world " * 200)
        base = json.loads((KINDS / "llama2.json").read_text())

        def changed(**parts):
            value = json.loads(json.dumps(base))
            value.update(parts)
            return json.dumps(value)

        def model(**parts):
            return changed(model=dict(base["model"], **parts))

        replace = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}] * 12
        added = [{"id": 300000 + i, "content": "a" * 40 + str(i), "single_word": False, "lstrip": False, "rstrip": False, "normalized": True,
                  "special": False} for i in range(3000)]
        by_hand = {
            "empty": "",
            "no members": "{}",
            "list": "[]",
            "page": "<html><body>404</body></html>",
            "bytes": random.Random(1).randbytes(4096),
            "deep": "[" * 200000,
            "cut": json.dumps(base)[:2000],
            "growing replace": changed(normalizer={"type": "Sequence", "normalizers": replace}),
            "growing prepend": changed(normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "b" * MIB}] * 40}),
            "growing expression": changed(normalizer={"type": "Sequence", "normalizers": [
                {"type": "Replace", "pattern": {"Regex": "a"}, "content": "a" * 10}] * 12}),
            "growing bytes": changed(normalizer={"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 60}),
            "growing added tokens": changed(normalizer={"type": "Sequence", "normalizers": replace[:3]}, added_tokens=added),
            "growing decoder": changed(decoder={"type": "Sequence", "decoders": replace}),
            "slow expression": changed(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+$|(a|aa)+b"}, "behavior": "Isolated",
                                                      "invert": False}),
            "large expression": changed(pre_tokenizer={"type": "Split", "pattern": {"Regex": "((a{1000}){1000}){1000}"}, "behavior": "Isolated",
                                                       "invert": False}),
            "far id": model(vocab=dict(base["model"]["vocab"], far=2147483647)),
        }
        count = 0
        for what, content in by_hand.items():
            folder = self.path(what.replace(" ", "_"))
            os.mkdir(folder)
            self.tokenize(what, self.write(f"{os.path.basename(folder)}/tokenizer.json", content))
            count += 1
        for what in ("growing_replace", "growing_prepend", "growing_expression"):
            self.assertTrue(self.tokenize(what, self.path(f"{what}/tokenizer.json")), what)
        self.tokenize("fifo", self.fifo("fifo.json"))
        self.tokenize("sparse", self.sparse("sparse.json"))
        self.assertEqual(count + 2, 18)
        chance = random.Random(2)
        sources = [(KINDS / name).read_bytes() for name in ("llama2.json", "bert.json", "t5.json")]
        for i in range(60):
            data = bytearray(chance.choice(sources))
            for _ in range(chance.choice((1, 3, 30))):
                at = chance.randrange(len(data))
                length = chance.randrange(1, 200)
                action = chance.randrange(4)
                if action == 0:
                    data[at] = chance.randrange(256)
                elif action == 1:
                    del data[at:at + length]
                elif action == 2:
                    data[at:at] = data[at:at + length]
                else:
                    data[at:at + 1] = chance.choice((b"9999999999", b"-1", b"null", b"1e999", b"\"\"", b"[", b"}"))
            self.tokenize(f"mutant {i}", self.write(f"mutant{i}.json", bytes(data)))

    # -- YAML

    def test_yaml(self):
        laughs = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
            f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9))
        files = {
            "empty": "",
            "unknown": "".join(f"unknown_{i}: {i}\n" for i in range(50000)),
            "300,000 unknown": "".join(f"num_layer_{i}: {i}\n" for i in range(300000)),
            "unreadable keys": "".join(f"[a, {i}]: 1\n" for i in range(50000)),
            "long key": "k" * 900000 + ": 1\n",
            "long value": "data_path: " + "v" * 20000 + "\n",
            "laughs": laughs,
            "cycle": "data_path: &a [*a]\n",
            "tags": "data_path: !!python/object/apply:os.system [ls]\n",
            "deep list": "data_path: " + "[" * 100000,
            "deep map": "data_path: " + "{a: " * 100000,
            "deep lines": "".join(" " * i + "a:\n" for i in range(1300)),
            "tabs": "a:\n\t- b\n",
            "bytes": random.Random(3).randbytes(50000),
            "wide text": "data_path: x\n".encode("utf-16"),
            "zeros": b"\0" * 100000,
            "twice": "data_path: a\n" * 30000,
            "no anchor": "data_path: *nowhere\n",
            "documents": "---\ndata_path: a\n" * 30000,
        }
        # What these say is wrong in another way, or not at all.
        means_something = ("empty", "cycle", "long value", "tags", "wide text", "documents")
        for what, content in files.items():
            path = self.write(what.replace(" ", "_") + ".yaml", content)
            self.hold(what, ["inspect-dataset", "--config", path], "" if what in means_something else path)
        special = {"fifo": self.fifo("fifo.yaml"), "zero device": "/dev/zero", "sparse": self.sparse("sparse.yaml")}
        for what, path in special.items():
            self.assertTrue(self.hold(what, ["inspect-dataset", "--config", path], path), what)
        self.assertEqual(len(files) + len(special), 22)

    # -- Parquet

    def test_parquet(self):
        samples = sorted((ROOT / "tests/golden/datasets").glob("*.parquet"))
        if not samples or not any(pathlib.Path(support.BINARY).parents[1].glob("lib/libmegatron_parquet*")):
            self.skipTest("built without Parquet")
        good = samples[0].read_bytes()
        by_hand = {
            "empty": b"",
            "mark": b"PAR1",
            "marks": b"PAR1PAR1",
            "long footer": b"PAR1" + b"\xff\xff\xff\x7fPAR1",
            "cut": good[:len(good) // 2],
            "no footer": good[:-8] + b"\0" * 8,
            "noise": b"PAR1" + random.Random(4).randbytes(5000) + (4000).to_bytes(4, "little") + b"PAR1",
        }
        chance = random.Random(5)
        for i in range(40):
            data = bytearray(good)
            for _ in range(chance.choice((1, 4, 40))):
                data[chance.randrange(len(data))] = chance.randrange(256)
            by_hand[f"mutant {i}"] = bytes(data)
        self.assertEqual(len(by_hand), 47)
        for what, content in by_hand.items():
            path = self.write(what.replace(" ", "_") + ".parquet", content)
            self.hold(what, ["preprocess-data", "--input", path, "--output-prefix", self.path("out"), "--overwrite", "--json-keys", "text",
                             "--tokenizer-type", "ByteLevelTokenizer", "--workers", "1"], path)

    # -- what is no file

    def test_fifos_and_devices(self):
        bytes_only = ["--tokenizer-type", "ByteLevelTokenizer"]
        prefix = self.path("data")
        source = self.write("text.txt", "some text\n")
        self.run_ok("preprocess-data", "--input", source, "--output-prefix", prefix, *bytes_only)
        data = prefix + "_text_document"
        fifo = self.fifo("fifo")
        preprocess = ["preprocess-data", "--output-prefix", self.path("out"), *bytes_only, "--input"]
        trials = [preprocess + [fifo], preprocess + ["/dev/zero"], preprocess + [self.fifo("a.jsonl")], preprocess + [self.fifo("a.parquet")],
                  ["train-tokenizer", "--vocab-size", "300", "--output", self.path("t.json"), "--input", fifo],
                  ["train-tokenizer", "--vocab-size", "300", "--output", self.path("t.json"), "--input", "/dev/zero"],
                  ["inspect-chat", *bytes_only, "--chat-template", "{{ 1 }}", "--input", fifo],
                  ["inspect-chat", *bytes_only, "--input", source, "--chat-template", fifo],
                  ["tokenize", "--tokenizer-type", "GPT2BPETokenizer", "--merge-file", fifo, "--vocab-file", fifo, "x"],
                  ["tokenize", "--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", fifo, "x"],
                  ["tokenize", "--tokenizer-type", "BertWordPieceCase", "--vocab-file", fifo, "x"],
                  ["inspect-dataset", "--data-args-path", fifo]]
        for arguments in trials:
            path = next(a for a in arguments if a in ("/dev/zero", fifo) or a.startswith(self.path("a.")))
            self.assertTrue(self.hold(" ".join(arguments), arguments, path), arguments)
        for extension in (".bin", ".idx", ".json"):
            os.rename(data + extension, data + ".kept")
            os.mkfifo(data + extension)
            self.assertTrue(self.hold(extension, ["inspect-dataset", data], data + extension))
            self.assertTrue(self.hold(extension, ["inspect-dataset", data, "--no-mmap-bin-files"], data + extension))
            os.rename(data + ".kept", data + extension)

    def test_pipes_of_the_shell_are_read(self):
        config = self.write("c.yaml", "verify: true\n")
        source = self.write("text.txt", "some text\n")
        self.run_ok("preprocess-data", "--input", source, "--output-prefix", self.path("d"), "--tokenizer-type", "ByteLevelTokenizer")
        line = f'"{support.BINARY}" inspect-dataset "{self.path("d_text_document")}" --config <(cat "{config}")'
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("every token read", done.stdout)
        # What the shell opened as standard input may be a FIFO.
        line = f'cat "{source}" > "{self.fifo("fifo")}" & "{support.BINARY}" tokenize --tokenizer-type ByteLevelTokenizer --input - < "{self.path("fifo")}"'
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("the same text", done.stdout)


if __name__ == "__main__":
    sys.setrecursionlimit(10000)
    support.main()
