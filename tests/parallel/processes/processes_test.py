"""Ranks as processes: every verb, every way to fail, every launcher. Arguments: the program `ranks`.

Each case starts 4 processes and looks at their exit codes, at how soon they are gone and at what they print. The launchers are
played by this script, which sets their variables and, as torchrun does, ends the other ranks when one has ended; where
torchrun itself is installed (scripts/setup.sh), some cases run under it too.
MEGATRON_TORCHRUN names another command than .venv/bin/torchrun.
"""
import concurrent.futures
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "cli"))
from ports import free_port  # noqa: E402

PROGRAM = sys.argv[1]
ROOT = pathlib.Path(__file__).resolve().parents[3]
RANKS = 4
TIMEOUT = 3      # seconds that a rank waits in a collective
MARGIN = 5       # seconds after that in which all ranks must be gone
START = 60       # seconds for starting and for what works
WORKS = {"control", "peers", "verbs"}


def timeout_of(case):
    """Nothing that works fails because the machine is busy."""
    return str(START if case in WORKS else TIMEOUT)


def torchrun_env(rank, port):
    return {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS, "GROUP_RANK": 0,
            "MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "False"}


def two_nodes_env(rank, port):
    # Two machines, as far as the ranks can tell; they are found through the interface that is named.
    return dict(torchrun_env(rank, port), LOCAL_RANK=rank % 2, LOCAL_WORLD_SIZE=2, GROUP_RANK=rank // 2, MASTER_ADDR="127.0.0.1")


def slurm_env(rank, port):
    return {"SLURM_PROCID": rank, "SLURM_NTASKS": RANKS, "SLURM_LOCALID": rank, "SLURM_NODEID": 0,
            "SLURM_STEP_TASKS_PER_NODE": RANKS, "SLURM_STEP_NODELIST": "node[01]", "MASTER_PORT": port}


def open_mpi_env(rank, port):
    return {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": RANKS, "OMPI_COMM_WORLD_LOCAL_RANK": rank,
            "OMPI_COMM_WORLD_LOCAL_SIZE": RANKS, "MASTER_PORT": port}


def mpich_env(rank, port):
    return {"PMI_RANK": rank, "PMI_SIZE": RANKS, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": RANKS, "MASTER_PORT": port}


LAUNCHERS = {"torchrun's variables": torchrun_env, "torchrun's variables on two machines": two_nodes_env,
             "srun's variables": slurm_env, "mpirun's variables": open_mpi_env,
             "MPICH's variables": mpich_env}
VARIABLES = ("RANK", "WORLD", "MASTER_", "SLURM_", "OMPI_", "PMI", "MPI_", "TORCHELASTIC_", "GROUP_", "LOCAL_")


def clean_environment():
    return {k: v for k, v in os.environ.items() if not k.startswith(VARIABLES)}


class Outcome:
    def __init__(self, codes, out, err, seconds_after_failure):
        self.codes, self.out, self.err, self.seconds_after_failure = codes, out, err, seconds_after_failure

    def __str__(self):
        return f"exit codes {self.codes}\nstandard output:\n{self.out}\nstandard error:\n{self.err}"


def start(make_env, case, follow_torchrun):
    """Plays a launcher. follow_torchrun: SIGTERM to the others 0.1 s after one has ended, as torchrun does."""
    port = free_port()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        ranks = []
        for rank in range(RANKS):
            env = dict(clean_environment(), OMP_NUM_THREADS="1", **{k: str(v) for k, v in make_env(rank, port).items()})
            ranks.append(subprocess.Popen([PROGRAM, case, timeout_of(case)], env=env, stdout=out, stderr=err))
        failed_at, terminated = None, False
        deadline = time.time() + START
        while any(r.poll() is None for r in ranks):
            if failed_at is None and "failing" in os.pread(out.fileno(), 1 << 16, 0).decode():
                failed_at = time.time()
                deadline = failed_at + TIMEOUT + MARGIN
            if follow_torchrun and not terminated and any(r.poll() not in (None, 0) for r in ranks):
                time.sleep(0.1)
                terminated = True
                for r in ranks:
                    if r.poll() is None:
                        r.send_signal(signal.SIGTERM)
            if time.time() > deadline:
                for r in ranks:
                    r.kill()
                break
            time.sleep(0.02)
        codes = [r.wait() for r in ranks]
        ended = time.time()
        out.seek(0)
        err.seek(0)
        return Outcome(codes, out.read(), err.read(), None if failed_at is None else ended - failed_at)


def torchrun_command():
    command = shlex.split(os.environ.get("MEGATRON_TORCHRUN", str(ROOT / ".venv/bin/torchrun")))
    try:
        works = subprocess.run(command + ["--help"], capture_output=True, timeout=120).returncode == 0
    except OSError:
        works = False
    return command if works else None


def processes_with(token):
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if token.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                pass
    return found


def start_under_torchrun(command, case, arguments=()):
    token = f"token-{os.getpid()}-{case}-{time.time_ns()}"
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        agent = subprocess.Popen(command + ["--no-python", "--standalone", "--nproc-per-node", str(RANKS), *arguments, PROGRAM, case,
                                            timeout_of(case), token], env=clean_environment(), stdout=out, stderr=err)
        failed_at, gone_at = None, None
        deadline = time.time() + 2 * START
        while agent.poll() is None and time.time() < deadline:
            if failed_at is None and "failing" in os.pread(out.fileno(), 1 << 16, 0).decode():
                failed_at = time.time()
            # The agent itself has the token in its arguments; it takes some seconds to end after its ranks.
            if failed_at is not None and gone_at is None and len(processes_with(token)) <= 1:
                gone_at = time.time()
            time.sleep(0.05)
        agent.kill()
        code = agent.wait()
        left = processes_with(token)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        out.seek(0)
        err.seek(0)
        text = err.read()
        if left:
            text += f"\nprocesses left behind: {left}"
        took = None if failed_at is None else (gone_at or time.time()) - failed_at
        return Outcome([code] + [-1] * len(left), out.read(), text, took)


# For each case: what the report says first, and what else it must say.
WORLD = "world {0, 1, 2, 3}"
CALL = f"all_reduce of 1000 x F32 (4.0 kB) over {WORLD}, number 5"
WAITED = f"detail: ranks 0, 1, 3 waited in {CALL}, for "
FAILURES = {
    "throw": ["error: [rank 2, tp 0 dp 2] the disk is full\n", WAITED, "hint: delete something\n"],
    "throw-with-work-under-way": ["error: [rank 2, tp 0 dp 2] the disk is full\n", WAITED],
    "thread": ["error: [rank 2, tp 0 dp 2] the loader found no data\n"],
    "kill": ["error: [rank 2, tp 0 dp 2] is gone: process ", "hint: it was killed"],
    "exit": ["error: [rank 2, tp 0 dp 2] is gone: process "],
    "stop": ["error: [rank 2, tp 0 dp 2] sent no heartbeat for ", " is stopped\n", WAITED],
    "loop": [f"error: [rank 2, tp 0 dp 2] did not call {CALL}, in which rank ", "detail: rank 2 last finished all_reduce",
             ", number 4, ", WAITED, "hint: rank 2 is busy or stuck outside of any collective\n"],
    "return": [f"error: [rank 2, tp 0 dp 2] has finished without all_reduce of 1000 x F32 (4.0 kB) over {WORLD}, number 5"],
    "op": [f"error: [rank 2, tp 0 dp 2] ranks of {WORLD} made different calls as number 5: ranks {{0, 1, 3}} all_reduce of 1000 x F32 "
           "(4.0 kB), rank {2} all_gather of 1000 x F32 (4.0 kB)\n"],
    "size": [f"error: [rank 2, tp 0 dp 2] ranks of {WORLD} made different calls as number 5: ranks {{0, 1, 3}} all_reduce of 1000 x F32 "
             "(4.0 kB), rank {2} all_reduce of 999 x F32"],
    "chain": ["error: [rank 3, tp 0 dp 3] did not call recv from rank 3 to rank 2 of 16 x F32",
              "detail: rank 0 waited in all_reduce of 16 x F32 (64 B) over tp {0, 1}, number 1"],
    # Rank 0 holds the store through which the ranks speak; what is left to say is that it is gone.
    "kill0": ["error: [rank 0] is gone: its process "],
    "stop0": ["error: [rank 0] is stopped: its process ", "waited in all_reduce"],
}


# What comes again when the job is started again; everything else may be tried again.
DO_NOT_RETRY, RETRY = 1, 75
DETERMINISTIC = {"throw", "throw-with-work-under-way", "thread", "op", "size"}


# torchrun's agent holds the store, so that rank 0 is a rank like any other.
UNDER_TORCHRUN = dict(FAILURES, kill0=["error: [rank 0, tp 0 dp 0] is gone: process ", "hint: it was killed"])


def check_works(name, outcome):
    assert outcome.codes == [0] * len(outcome.codes), f"{name}: {outcome}"
    assert outcome.out.count("done ") == RANKS, f"{name}: {outcome}"
    assert "error" not in outcome.err, f"{name}: {outcome}"


def check_fails(name, expected, outcome, own_exit=()):
    assert all(code != 0 for rank, code in enumerate(outcome.codes) if rank not in own_exit), f"{name}: {outcome}"
    assert outcome.seconds_after_failure is not None, f"{name}: {outcome}"
    assert outcome.seconds_after_failure < TIMEOUT + MARGIN, f"{name} took {outcome.seconds_after_failure} s: {outcome}"
    assert outcome.err.count("error: ") == 1, f"{name}: not exactly one report: {outcome}"
    for text in expected:
        assert text in outcome.err, f"{name}: no \"{text}\": {outcome}"


def run_case(launcher, case, follow_torchrun=True):
    name = f"{case} under {launcher}"
    outcome = start(LAUNCHERS[launcher], case, follow_torchrun)
    if case in FAILURES:
        # What exits with 0 by itself cannot be blamed for its code.
        check_fails(name, FAILURES[case], outcome, own_exit=(2,) if case in ("exit", "return") else ())
        # All ranks leave with the code of the failure, but for those that a signal ended and those that left before.
        code = DO_NOT_RETRY if case in DETERMINISTIC else RETRY
        assert {c for c in outcome.codes if c > 0} == {code}, f"{name}: expected code {code}: {outcome}"
    else:
        check_works(name, outcome)
    return name


def run_torchrun(command, case):
    name = f"{case} under torchrun"
    outcome = start_under_torchrun(command, case)
    if case in FAILURES:
        outcome.err = "".join(line for line in outcome.err.splitlines(True)
                              if line.startswith(("error: ", "detail: ", "hint: ", "processes left")))
        check_fails(name, UNDER_TORCHRUN[case], outcome)
    else:
        check_works(name, outcome)
    return name


def run_restart(command):
    outcome = start_under_torchrun(command, "throw-once", ("--max-restarts", "1"))
    assert outcome.codes == [0] and outcome.out.count("done ") == RANKS, str(outcome)
    assert "error: [rank 2, tp 0 dp 2] not yet\n" in outcome.err, str(outcome)
    return "throw-once and a restart under torchrun"


def main():
    chosen = set(sys.argv[2:])
    jobs = [("torchrun's variables", "verbs"), ("torchrun's variables", "peers"), ("srun's variables", "control"), ("mpirun's variables", "control"),
            ("MPICH's variables", "control")]
    jobs += [("torchrun's variables", case) for case in FAILURES]
    jobs += [("torchrun's variables on two machines", case) for case in ("verbs", "kill")]
    jobs += [("srun's variables", case, False) for case in ("kill", "throw")]  # a launcher that ends nobody
    jobs = [job for job in jobs if not chosen or job[1] in chosen]
    failures = []
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        running = [pool.submit(run_case, *job) for job in jobs]
        command = torchrun_command()
        if command:
            cases = [c for c in ("verbs", "peers", "throw", "kill", "kill0", "stop", "loop", "op") if not chosen or c in chosen]
            running += [pool.submit(run_torchrun, command, case) for case in cases]
            if not chosen or "restart" in chosen:
                running.append(pool.submit(run_restart, command))
        else:
            print("torchrun does not work here (see docs/parallelism.md); its variables are tested without it")
        for job in running:
            try:
                print("ok:", job.result())
            except AssertionError as error:
                failures.append(str(error))
    for failure in failures:
        print("FAILED:", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
