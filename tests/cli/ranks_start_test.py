#!/usr/bin/env python3
"""How the ranks of a job start: all with the same settings, or none; and within one deadline, whatever is wrong.

Usage: ranks_start_test.py BINARY [unittest arguments]. Ranks are processes of this machine that get torchrun's variables.
"""
import concurrent.futures
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from ports import free_port

BINARY = ""
HERE = os.path.dirname(os.path.abspath(__file__))

FLAGS = {"--num-layers": "2", "--hidden-size": "32", "--num-attention-heads": "4", "--seq-length": "32", "--micro-batch-size": "1",
         "--global-batch-size": "12", "--train-iters": "2", "--lr": "3e-4", "--hidden-dropout": "0.1", "--attention-dropout": "0",
         "--weight-decay": "0.1", "--tokenizer-type": "ByteLevelTokenizer", "--log-interval": "1", "--eval-iters": "0", "--device": "cpu",
         "--num-threads": "1", "--num-workers": "0", "--distributed-timeout-minutes": "1"}
COLLECTIVES = ("all_reduce", "all_gather", "broadcast of", "wait timeout", "made different calls")
RAW = re.compile(r"^\[[EWIF]\d|^\[rank\d+\]:\[|TCPStore|c10d|Exception raised from|frame #", re.M)


def words(changes=()):
    flags = dict(FLAGS)
    flags.update(changes)
    return [word for flag, value in flags.items() for word in ([flag] if value is True else [flag, value])]


class Rank:
    """A process that is one rank; `variables` win over those of a launcher."""

    def __init__(self, rank, size, port, arguments, variables=None, binary=None, cwd=None):
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI"))}
        environment.update(OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
                           GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        environment.update(variables or {})
        self.process = subprocess.Popen([binary or BINARY, *arguments], env=environment, cwd=cwd, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(self, timeout=120):
        self.out, self.err = self.process.communicate(timeout=timeout)
        return self.process.returncode


def finish(ranks, timeout=120):
    """Exit codes; then .err of each rank is there."""
    outcome = {}
    threads = [threading.Thread(target=lambda r=r: outcome.__setitem__(r, r.finish(timeout))) for r in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcome[r] for r in ranks]


class StartTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def errors(self, ranks):
        return [line for r in ranks for line in r.err.splitlines() if line.startswith("error: ")]

    def two(self, changes, command="pretrain", common=("--mock-data",), binary=None, cwds=(None, None)):
        """Two ranks, of which rank 1 has these flags besides."""
        port = free_port()
        common = {flag: True for flag in common} if not isinstance(common, dict) else common
        return [Rank(0, 2, port, [command, *words(common)], cwd=cwds[0]),
                Rank(1, 2, port, [command, *words({**common, **changes})], binary=binary, cwd=cwds[1])]

    def assert_refused(self, ranks, *patterns):
        codes = finish(ranks)
        everything = "".join(r.out + r.err for r in ranks)
        self.assertEqual(codes, [2] * len(ranks), everything)
        self.assertEqual(len(self.errors(ranks)), 1, everything)
        for pattern in patterns:
            self.assertRegex(everything, pattern)
        for word in COLLECTIVES:
            self.assertNotIn(word, everything)
        self.assertNotRegex(everything, RAW)
        self.assertNotIn("iteration", everything)

    def test_ranks_that_agree_start(self):
        local = {"--data-cache-path": self.path("cache"), "--num-threads": "2", "--num-workers": "1"}  # may differ by machine
        ranks = self.two(local)
        self.assertEqual(finish(ranks), [0, 0], ranks[0].err + ranks[1].err)

    def test_ranks_with_other_flags_do_not_start(self):
        cases = [
            ({"--lr": "3e-5"}, r"error: \[rank 0\] the ranks do not agree: --lr is 3e-04 on rank 0 and 3e-05 on rank 1\n"),
            ({"--hidden-dropout": "0.5", "--weight-decay": "1"}, r"--hidden-dropout is 0.1 on rank 0 and 0.5 on rank 1",
             r"--weight-decay is 0.1 on rank 0 and 1 on rank 1"),
            ({"--seed": "99"}, r"--seed is 1234 on rank 0 and 99 on rank 1"),
            ({"--clip-grad": "0.01"}, r"--clip-grad is 1 on rank 0 and 0.01 on rank 1"),
            ({"--weight-decay": "0.01"}, r"--weight-decay is 0.1 on rank 0 and 0.01 on rank 1"),
            ({"--tensor-model-parallel-size": "2"}, r"--tensor-model-parallel-size is 1 on rank 0 and 2 on rank 1"),
            ({"--hidden-size": "128"}, r"error: \[rank 0\] the ranks do not agree: --hidden-size is 32 on rank 0 and 128 on rank 1"),
        ]
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            running = [(changes, pool.submit(lambda c, p: self.assert_refused(self.two(c), *p), changes, patterns)) for changes, *patterns in cases]
        for changes, case in running:
            with self.subTest(rank_1=changes):
                case.result()
        with self.subTest("under tensor parallelism"):
            self.assert_refused(self.two({"--weight-decay": "0.01"}, common={"--mock-data": True, "--tensor-model-parallel-size": "2"}),
                                r"--weight-decay is 0.1 on rank 0 and 0.01 on rank 1")

    def test_the_value_of_most_ranks_comes_first(self):
        port = free_port()
        ranks = [Rank(r, 4, port, ["pretrain", *words({"--mock-data": True, "--lr": "1e-5" if r == 0 else "3e-4"})]) for r in range(4)]
        self.assert_refused(ranks, r"--lr is 3e-04 on ranks 1-3 and 1e-05 on rank 0")

    def test_a_rank_whose_flags_are_refused_ends_the_others(self):
        ranks = self.two({"--num-attention-heads": "5"})
        self.assertEqual(finish(ranks), [2, 2], ranks[0].err + ranks[1].err)  # at the deadline rank 0 would leave with 1 and a message
        self.assertEqual(ranks[0].err, "")
        self.assertIn("[rank 1]", ranks[1].err)

    def data(self, folder, text):
        os.makedirs(folder)
        with open(os.path.join(folder, "text.jsonl"), "w") as file:
            file.writelines('{"text": "%s %d"}\n' % (text, i) for i in range(100))
        subprocess.run([BINARY, "preprocess-data", "--input", "text.jsonl", "--output-prefix", "data", "--tokenizer-type",
                        "ByteLevelTokenizer"], cwd=folder, check=True, capture_output=True)

    def test_ranks_with_other_files_do_not_start(self):
        folders = self.path("a"), self.path("b")
        self.data(folders[0], "one text")
        self.data(folders[1], "eno text")  # of the same length
        data = {"--data-path": "data_text_document", "--split": "100,0,0"}
        with self.subTest("data"):
            self.assert_refused(self.two({}, common=data, cwds=folders),
                                r"--data-path data_text_document is \d+ bytes, contents (\w+) on rank 0 and \d+ bytes, contents (?!\1)\w+ on rank 1")
        with self.subTest("data that one machine does not have"):
            os.rename(os.path.join(folders[1], "data_text_document.bin"), os.path.join(folders[1], "away.bin"))
            os.rename(os.path.join(folders[1], "data_text_document.idx"), os.path.join(folders[1], "away.idx"))
            self.assert_refused(self.two({}, common=data, cwds=folders), r"on rank 0 and no such file on rank 1")
        for folder, size in zip(folders, ("300", "310")):
            subprocess.run([BINARY, "train-tokenizer", "--input", "text.jsonl", "--vocab-size", size, "--output", "tokenizer"],
                           cwd=folder, check=True, capture_output=True)
        tokenizer = {"--mock-data": True, "--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": "tokenizer", "--vocab-size": "320"}
        with self.subTest("tokenizer"):
            self.assert_refused(self.two({}, common=tokenizer, cwds=folders), r"--tokenizer-model tokenizer is \d+ bytes.* on rank 0 and .* on rank 1")

    def test_ranks_of_another_build_do_not_start(self):
        # A copy whose build id differs in one byte, as after another compilation.
        build_id = None
        notes = subprocess.run(["readelf", "-n", BINARY], capture_output=True, text=True).stdout
        for line in notes.splitlines():
            if "Build ID:" in line:
                build_id = bytes.fromhex(line.split()[-1])
        self.assertTrue(build_id, notes)
        with open(BINARY, "rb") as file:
            program = file.read()
        self.assertEqual(program.count(build_id), 1)
        os.mkdir(self.path("bin"))
        os.symlink(os.path.join(os.path.dirname(os.path.dirname(BINARY)), "lib"), self.path("lib"))
        other = self.path("bin", "megatron")
        with open(other, "wb") as file:
            file.write(program.replace(build_id, bytes([build_id[0] ^ 1]) + build_id[1:]))
        os.chmod(other, 0o755)
        self.assert_refused(self.two({}, binary=other),
                            r"the ranks do not agree: the program's build is %s\S* on rank 0 and \S+ on rank 1" % build_id.hex())

    def test_other_commands_compare_as_well(self):
        self.assert_refused(self.two({"--steps": "5"}, command="prove"), r"--steps is \d on rank 0 and 5 on rank 1")


SECONDS = 8  # of the deadline in wrong starts; a machine that is busy may take some of them to start the program


class WrongStartTest(unittest.TestCase):
    """Every rank leaves by the deadline with one error of ours and no line of a library."""

    def start(self, rank, size, port, **variables):
        return Rank(rank, size, port, ["pretrain", *words({"--mock-data": True})], dict(MEGATRON_TEST_START_SECONDS=str(SECONDS), **variables))

    def assert_ends(self, ranks, *patterns, one_report=False):
        codes = finish(ranks, timeout=SECONDS + 100)  # what is more than the deadline is the time of a busy machine
        everything = "".join("--- %d\n" % r.process.returncode + r.err for r in ranks)
        self.assertNotIn(0, codes, everything)
        for r in ranks:
            self.assertLessEqual(len([line for line in r.err.splitlines() if line.startswith("error: ")]), 1, r.err)
            self.assertNotRegex(r.err, RAW)
        if one_report:
            self.assertEqual(everything.count("error: "), 1, everything)
        for pattern in patterns:
            self.assertRegex(everything, pattern)

    def foreign(self, answer):
        """A listener that is no store. `answer`: what it says to everyone who connects; None: nothing."""
        server = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(server.close)
        kept = []

        def serve():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                kept.append(connection)
                if answer is not None:
                    try:
                        connection.sendall(answer)
                    except OSError:
                        pass

        threading.Thread(target=serve, daemon=True).start()
        return server.getsockname()[1]

    def test_all_leave_in_time(self):
        # Together, since each waits for its deadline.
        cases = [name for name in dir(self) if name.startswith("case_")]
        self.assertGreaterEqual(len(cases), 8)
        with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
            running = {name: pool.submit(getattr(self, name)) for name in cases}
        for name, case in running.items():
            with self.subTest(name):
                case.result()

    def case_a_missing_rank(self):
        self.assert_ends([self.start(0, 3, port := free_port()), self.start(1, 3, port)],
                         r"error: \[rank [01]\] after \d s, rank 2 of 3 ranks has not started", one_report=True)

    def case_a_missing_rank_0(self):
        self.assert_ends([self.start(1, 3, port := free_port()), self.start(2, 3, port)],
                         r"error: \[rank 1\] the store's address 127.0.0.1:%d cannot be reached: Connection refused" % port)

    def case_a_wrong_rank(self):
        self.assert_ends([self.start(0, 3, port := free_port()), self.start(1, 3, port), self.start(1, 3, port)],
                         r"error: \[rank 1\] rank 1 was started twice: as process \d+ on \S+ and as process \d+ on", one_report=True)

    def case_two_ranks_0(self):
        port = free_port()
        self.assert_ends([self.start(0, 2, port), self.start(0, 2, port)], r"rank 0 cannot listen on 127.0.0.1:%d: Address already in use" % port,
                         r"after \d s, rank 1 of 2 ranks has not started")

    def case_another_number_of_ranks(self):
        self.assert_ends([self.start(0, 3, port := free_port()), self.start(1, 2, port)], r"was started as one of [23] ranks, but rank [01] as one of",
                         one_report=True)

    def case_a_wrong_port(self):
        port, other = free_port(), free_port()
        self.assert_ends([self.start(0, 2, port), self.start(1, 2, other)], r"after \d s, rank 1 of 2 ranks has not started",
                         r"the store's address 127.0.0.1:%d cannot be reached" % other)

    def case_a_wrong_address(self):
        port = free_port()
        machines = [dict(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(r)) for r in range(2)]
        machines[1]["MASTER_ADDR"] = "no-such-host.invalid"
        self.assert_ends([self.start(r, 2, port, **machines[r]) for r in range(2)], r"after \d s, rank 1 of 2 ranks has not started",
                         r"no-such-host.invalid:%d cannot be reached: the name is not known" % port)

    def case_a_foreign_listener_that_says_nothing(self):
        port = self.foreign(None)
        self.assert_ends([self.start(0, 2, port), self.start(1, 2, port)], r"rank 0 cannot listen on 127.0.0.1:%d" % port,
                         r"\[rank 1\] the store's address 127.0.0.1:%d is held by something that says nothing" % port)

    def case_a_foreign_listener_that_speaks(self):
        port = self.foreign(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        self.assert_ends([self.start(0, 2, port), self.start(1, 2, port)],
                         r"\[rank 1\] the store's address 127.0.0.1:%d is held by another program" % port)

    def case_a_holder_of_the_store_that_is_stopped(self):
        port = free_port()
        ranks = [self.start(0, 3, port), self.start(1, 3, port)]
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        ranks[0].process.send_signal(19)  # SIGSTOP
        try:
            self.assert_ends(ranks[1:], r"rank 1 has not started within \S+ s|\[rank 1\]")
        finally:
            ranks[0].process.kill()
            ranks[0].finish()


if __name__ == "__main__":
    BINARY = os.path.abspath(sys.argv.pop(1))
    unittest.main()
