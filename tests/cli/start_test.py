"""Which commands load libtorch, how long the others take to start, and what is said when the library that computes is missing."""
import os
import re
import shutil
import stat
import subprocess
import sys

import support

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LIBRARY = "libmegatron_compute.so"
BYTES = ["--tokenizer-type", "ByteLevelTokenizer"]


def cpu_seconds(*arguments):
    """User and system time of one call."""
    pid = os.posix_spawn(support.BINARY, [support.BINARY, *arguments], os.environ,
                         file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)])
    _, status, usage = os.wait4(pid, 0)
    assert status == 0, (arguments, status)
    return usage.ru_utime + usage.ru_stime


class StartTest(support.FolderTest):
    def loaded(self, *arguments):
        """Names of all shared libraries that a successful call loads, those loaded on demand included."""
        log = self.path("loaded")
        environment = dict(os.environ, LD_DEBUG="files", LD_DEBUG_OUTPUT=log)
        result = subprocess.run([support.BINARY, *arguments], capture_output=True, text=True, timeout=120, env=environment)
        self.assertEqual(result.returncode, 0, result.stderr)
        (file,) = [name for name in os.listdir(self.folder) if name.startswith("loaded.")]
        with open(self.path(file)) as text:
            names = set(re.findall(r"file=(\S+) \[\d+\];  (?:generating|dynamically)", text.read()))
        os.remove(self.path(file))
        return {os.path.basename(name) for name in names}

    def assert_light(self, *arguments):
        names = self.loaded(*arguments)
        self.assertTrue(any(name.startswith("libstdc++") for name in names), names)  # the log was read rightly
        heavy = [name for name in names if re.match("libtorch|libc10|libgomp|libcuda|" + LIBRARY, name)]
        self.assertEqual(heavy, [], arguments)

    def test_commands_that_compute_nothing_do_not_load_libtorch(self):
        with open(self.path("a.txt"), "w") as text:
            text.write("some text, and some more\n" * 40)
        with open(self.path("chat.jsonl"), "w") as text:
            text.write('{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n')
        template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        self.assert_light("--help")
        self.assert_light("version")
        self.assert_light("tokenize", *BYTES, "hello")
        self.assert_light("train-tokenizer", "--input", self.path("a.txt"), "--vocab-size", "270", "--output", self.path("t.json"))
        for name in "de":
            self.assert_light("preprocess-data", "--input", self.path("a.txt"), "--output-prefix", self.path(name), *BYTES)
        self.assert_light("merge-datasets", "--input", self.path("d_text_document"), self.path("e_text_document"),
                          "--output-prefix", self.path("m"))
        self.assert_light("inspect-dataset", self.path("m"), "--verify")
        self.assert_light("inspect-chat", *BYTES, "--chat-template", template, "--input", self.path("chat.jsonl"))
        self.assert_light("inspect-checkpoint", os.path.join(ROOT, "tests/golden/checkpoint/v1"), "--verify")
        self.assert_light("report", "--help")
        names = self.loaded("pretrain", "--help")
        self.assertTrue({LIBRARY, "libtorch_cpu.so"} <= names, names)

    def test_every_command_has_its_function(self):
        commands = re.findall(r"^  ([a-z-]+)  ", self.output("--help"), re.MULTILINE)
        self.assertTrue({"pretrain", "check", "tokenize", "version"} <= set(commands), commands)
        for command in commands:
            with self.subTest(command):
                self.assertIn("--", self.output("help", command))

    def test_start_takes_little_time(self):
        libraries = subprocess.run(["ldd", support.BINARY], capture_output=True, text=True).stdout
        limit = 0.05 if "san.so" not in libraries else 2.0
        for arguments in (["--help"], ["version"], ["tokenize", *BYTES, "hello"], ["inspect-chat", "--help"],
                          ["inspect-dataset", "--help"], ["inspect-checkpoint", "--help"]):
            # The smallest of several: other processes of the machine only add.
            self.assertLess(min(cpu_seconds(*arguments) for _ in range(5)), limit, arguments)

    def test_version_knows_libtorch_with_and_without_loading_it(self):
        built, loaded = (re.findall(r"libtorch +(\S+)", self.output("version", *flags)) for flags in ([], ["--all"]))
        self.assertEqual(len(built), 1)
        self.assertEqual(built, loaded)

    # -- how OpenMP's threads wait

    def spin_count(self, **variables):
        """What libgomp made of its environment when it was loaded."""
        names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
        environment = {name: value for name, value in os.environ.items() if name not in names}
        environment.update(variables, OMP_DISPLAY_ENV="VERBOSE")
        result = subprocess.run([support.BINARY, "version", "--all"], capture_output=True, text=True, timeout=120, env=environment)
        self.assertEqual(result.returncode, 0, result.stderr)
        return int(re.search(r"GOMP_SPINCOUNT = '(\d+)'", result.stderr).group(1))

    def test_threads_spin_little_and_not_at_all_beside_busy_neighbours(self):
        self.assertIn(self.spin_count(), (0, 10000))  # others may use this machine now
        self.assertEqual(self.spin_count(GOMP_SPINCOUNT="77"), 77)
        self.assertGreater(self.spin_count(OMP_WAIT_POLICY="active"), 300000)
        neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() + 1)]
        try:
            self.assertEqual(self.spin_count(), 0)
        finally:
            for neighbour in neighbours:
                neighbour.kill()
                neighbour.wait()

    # -- a library that is missing, damaged or another one

    def copy_of_program(self):
        """The program alone in bin/ of a new folder; gives its path and that of its library."""
        for name in ("bin", "lib"):
            os.mkdir(self.path(name))
        program = shutil.copy(support.BINARY, self.path("bin/megatron"))
        os.chmod(program, os.stat(program).st_mode | stat.S_IXUSR)
        # What the program itself needs is found through the system or, for an installed one, in its own lib/.
        own = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(support.BINARY))), "lib")
        environment = dict(os.environ, LD_LIBRARY_PATH=own + ":" + os.environ.get("LD_LIBRARY_PATH", ""))
        return program, self.path("lib/" + LIBRARY), environment

    def test_a_missing_library_is_named(self):
        program, library, environment = self.copy_of_program()

        def call(*arguments):
            return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, env=environment)

        self.assertEqual(call("tokenize", *BYTES, "hello").returncode, 0)
        self.assertEqual(call("version").returncode, 0)
        for arguments, user in ((["pretrain", "--help"], "pretrain"), (["version", "--all"], "version --all")):
            result = call(*arguments)
            self.assertEqual(result.returncode, 1)
            self.assertEqual(result.stderr.splitlines()[0], f"error: {user} needs {library}, which does not exist")
            self.assertIn("hint: bin/ and lib/ belong together", result.stderr)

        with open(library, "w") as text:
            text.write("this is no library")
        result = call("generate", "--help")
        self.assertEqual(result.returncode, 1)
        self.assertIn(f"error: generate needs {library}, which cannot be loaded: ", result.stderr)
        self.assertIn("hint: it is damaged or of another build", result.stderr)

        os.remove(library)
        system = subprocess.run(["ldd", program], capture_output=True, text=True, env=environment).stdout
        shutil.copy(re.search(r"libz\.so\S* => (\S+)", system).group(1), library)
        result = call("bench", "--help")
        self.assertEqual(result.returncode, 1)
        self.assertIn(f"error: bench needs the function megatron_bench, which {library} does not have", result.stderr)


if __name__ == "__main__":
    support.main()
