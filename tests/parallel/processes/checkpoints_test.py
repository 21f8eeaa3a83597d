"""Checkpoints by several processes: a start that takes longer than any timeout, one that hangs in it, damage in any rank's share,
and ranks that are killed while they save. Arguments: the program `checkpoint_ranks`.

MEGATRON_KILLS=200 kills so often (default 8). MEGATRON_START_FULL=1 makes the slow start of 16 ranks at 20 MB/s each.
"""
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "cli"))
from ports import free_port  # noqa: E402

PROGRAM = sys.argv.pop(1)
FULL = bool(os.environ.get("MEGATRON_START_FULL"))
KILLS = int(os.environ.get("MEGATRON_KILLS", "8"))
BLOCK = 1 << 20


def clean_environment():
    names = ("RANK", "WORLD", "MASTER_", "SLURM_", "OMPI_", "PMI", "MPI_", "TORCHELASTIC_", "GROUP_", "LOCAL_")
    return {k: v for k, v in os.environ.items() if not k.startswith(names)}


class Job:
    """Ranks as processes, as torchrun would start them."""

    def __init__(self, case, root, ranks, timeout, **variables):
        self.out, self.err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        port = free_port()
        self.ranks = []
        for rank in range(ranks):
            env = dict(clean_environment(), OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank),
                       LOCAL_WORLD_SIZE=str(ranks), GROUP_RANK="0", MASTER_ADDR="localhost", MASTER_PORT=str(port),
                       TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_RUN_ID="none", TORCHELASTIC_USE_AGENT_STORE="False",
                       **{k: str(v) for k, v in variables.items()})
            self.ranks.append(subprocess.Popen([PROGRAM, case, str(root), str(timeout)], env=env, stdout=self.out, stderr=self.err))

    def text(self, stream):
        return os.pread(stream.fileno(), 1 << 22, 0).decode()

    def wait_for(self, what, seconds=120):
        deadline = time.time() + seconds
        while what not in self.text(self.out):
            assert time.time() < deadline and any(r.poll() is None for r in self.ranks), self.text(self.out) + self.text(self.err)
            time.sleep(0.005)

    def pause(self, seconds):
        """Stops all ranks for a while, as a virtual machine is stopped that moves to another host."""
        for number, then in ((signal.SIGSTOP, seconds), (signal.SIGCONT, 0)):
            for rank in self.ranks:
                rank.send_signal(number)
            time.sleep(then)

    def wait(self, seconds):
        deadline = time.time() + seconds
        while any(r.poll() is None for r in self.ranks) and time.time() < deadline:
            time.sleep(0.02)
        late = [i for i, r in enumerate(self.ranks) if r.poll() is None]
        for r in self.ranks:
            if r.poll() is None:
                r.kill()
        codes = [r.wait() for r in self.ranks]
        assert not late, f"ranks {late} did not end\n{self.text(self.out)}{self.text(self.err)}"
        return codes


def write(root, mib):
    subprocess.run([PROGRAM, "write", str(root), "60"], check=True, env=dict(os.environ, MEGATRON_TEST_MIB=str(mib)))


class FolderTest(unittest.TestCase):
    def setUp(self):
        base = "/dev/shm" if not FULL and os.access("/dev/shm", os.W_OK) else None
        self.folder = pathlib.Path(tempfile.mkdtemp(dir=base))
        self.addCleanup(shutil.rmtree, self.folder)
        self.root = self.folder / "run"


class SlowStart(FolderTest):
    """16 ranks that read slowly: the start takes three times the timeout; each rank reads its share and what it loads."""
    ranks, rate, timeout = (16, 20, 4) if FULL else (16, 2, 3)
    mib = 16 * (128 if FULL else 10)  # what a rank verifies and loads together takes more than three timeouts

    def test_takes_three_timeouts_and_succeeds(self):
        write(self.root, self.mib)
        job = Job("start", self.root, self.ranks, self.timeout, MEGATRON_TEST_READ_MB_S=self.rate, MEGATRON_TEST_MIB=self.mib)
        codes = job.wait(600)
        self.assertEqual(codes, [0] * self.ranks, job.text(job.err))
        lines = re.findall(r"rank (\d+) started from (\d+): read (\d+) blocks in ([\d.]+) s", job.text(job.out))
        self.assertEqual(sorted(int(line[0]) for line in lines), list(range(self.ranks)))
        share = loaded = self.mib / self.ranks
        for _, step, blocks, seconds in lines:
            self.assertEqual(step, "2")
            # A call that opens the file counts as one, too: two, and one of another rank's block at each end.
            self.assertLessEqual(int(blocks) - 2, 1.2 * (share + loaded) + 2)
            self.assertGreater(float(seconds), 3 * self.timeout)

    def test_a_pause_of_the_machine_ends_nobody(self):
        write(self.root, self.mib // 4)
        job = Job("start", self.root, 4, 2, MEGATRON_TEST_READ_MB_S=self.rate, MEGATRON_TEST_MIB=self.mib // 4)
        time.sleep(3)
        job.pause(5)
        self.assertEqual(job.wait(120), [0] * 4, job.text(job.err))

    def test_one_that_hangs_in_it_is_named(self):
        write(self.root, self.mib)
        job = Job("start", self.root, self.ranks, self.timeout, MEGATRON_TEST_READ_MB_S=self.rate, MEGATRON_TEST_MIB=self.mib,
                  MEGATRON_TEST_HANG_RANK=11)
        codes = job.wait(300)
        self.assertTrue(all(code != 0 for code in codes), codes)
        self.assertIn("error: [rank 11, dp 11] ", job.text(job.err))
        self.assertIn("rank 11 did not arrive and made no progress", job.text(job.err))
        self.assertEqual(job.text(job.err).count("error: "), 1)

    def test_one_that_is_stopped_in_it_is_named(self):
        write(self.root, self.mib)
        job = Job("start", self.root, 4, self.timeout, MEGATRON_TEST_READ_MB_S=self.rate, MEGATRON_TEST_MIB=self.mib,
                  MEGATRON_TEST_HANG_RANK=2)
        job.wait_for("hanging")
        job.ranks[2].send_signal(signal.SIGSTOP)
        codes = job.wait(120)
        self.assertTrue(all(code != 0 for code in codes), codes)
        self.assertRegex(job.text(job.err), r"error: \[rank 2, dp 2\] sent no heartbeat for .* is stopped|"
                                            r"error: \[rank 2, dp 2\] gather")


class Busy(unittest.TestCase):
    """The others wait in a collective for a rank that writes, as long as it makes progress."""

    def test_is_waited_for(self):
        begin = time.time()
        job = Job("busy", "/", 3, 3)
        self.assertEqual(job.wait(120), [0] * 3, job.text(job.err))
        self.assertGreater(time.time() - begin, 9)

    def test_a_pause_of_the_machine_ends_nobody(self):
        job = Job("busy", "/", 3, 3)
        job.wait_for("busy")
        job.pause(6)
        self.assertEqual(job.wait(120), [0] * 3, job.text(job.err))

    def test_is_named_when_it_stops(self):
        job = Job("busy", "/", 3, 2, MEGATRON_TEST_HANG_RANK=1)
        codes = job.wait(120)
        self.assertTrue(all(code != 0 for code in codes), codes)
        self.assertRegex(job.text(job.err), r"error: \[rank 1, dp 1\] did not call barrier over world")


class Damage(FolderTest):
    def test_in_any_share_sends_all_ranks_to_the_same_checkpoint(self):
        write(self.root, 8)
        file = self.root / "iter_0000002" / "rank_00000.safetensors"
        size = file.stat().st_size
        for share in range(4):
            at = size * (2 * share + 1) // 8
            content = bytearray(file.read_bytes())
            content[at] ^= 16
            file.write_bytes(content)
            job = Job("start", self.root, 4, 30, MEGATRON_TEST_MIB=8)
            self.assertEqual(job.wait(60), [0] * 4, job.text(job.err))
            self.assertEqual(re.findall(r"started from (\d+)", job.text(job.out)), ["1"] * 4)
            self.assertIn(f"passed over {file}: the checksum of bytes", job.text(job.out))
            content[at] ^= 16
            file.write_bytes(content)


class Kills(FolderTest):
    """A rank is killed at a random instant while four save; the others leave, and the next job goes on from what was published."""

    def test_nothing_is_lost_and_nothing_is_loaded_wrongly(self):
        chance = random.Random(int(os.environ.get("MEGATRON_KILLS_SEED", "1")))
        self.root.mkdir()
        published = saves = 0
        for round in range(KILLS):
            job = Job("save", self.root, 4, 10)
            if round % 4 == 0:
                job.wait_for("started from")  # at any instant, the first save included
            else:
                job.wait_for("published")
            time.sleep(chance.random() * 0.1)
            victim = chance.randrange(4)
            job.ranks[victim].kill()
            codes = job.wait(60)
            self.assertTrue(all(code != 0 for code in codes), codes)
            out = job.text(job.out)
            started = {int(step) for step in re.findall(r"started from (\d+)", out)}
            self.assertEqual(len(started), 1, out)  # contents are compared by the ranks
            self.assertGreaterEqual(started.pop(), published, out)
            self.assertNotIn("passed over", out)
            steps = [int(step) for step in re.findall(r"published (\d+)", out)]
            saves += len(steps)
            published = max([published, *steps])
            whole = [p for p in self.root.iterdir() if re.fullmatch(r"iter_\d{7}", p.name)]
            self.assertTrue(all((p / "manifest.json").exists() for p in whole))
            self.assertGreaterEqual(max((int(p.name[5:]) for p in whole), default=0), published)
        print(f"{KILLS} kills, {saves} saves reported, last {published}")
        self.assertGreater(saves, KILLS // 2)


if __name__ == "__main__":
    unittest.main(warnings="ignore")
