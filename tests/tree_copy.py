"""Copies of the repository that are built in its place, for tests that change sources: planted_bugs/ and extension/.

What is built in a copy uses the build folder and the compiler cache of the repository, because the copy is mounted where the repository
is, for one process and its children alone.
"""
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GENERATED = {".git", ".venv", "build", "dist", "runs", "corpus", "__pycache__"}


def list_files(root):
    """Paths of the sources in `root`, relative to it: what git does not ignore, or everything that is not generated."""
    if (root / ".git").exists():
        words = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
        names = subprocess.run(words, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
        return sorted({Path(name) for name in names if name and (root / name).is_file()})
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in GENERATED]
        found += [(Path(folder) / name).relative_to(root) for name in names if not name.endswith(".pyc")]
    return sorted(found)


def copy_sources(source, target):
    """Makes the sources of `target` those of `source`. Files with equal contents keep their times, so that what is built stays good."""
    wanted = list_files(source)
    for name in wanted:
        old, new = target / name, source / name
        if not old.exists():
            old.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(new, old)
        elif old.read_bytes() != new.read_bytes():
            shutil.copyfile(new, old)
    for name in set(list_files(target)) - set(wanted):
        (target / name).unlink()


def copy_build(preset, target):
    """A new copy starts from what the repository has built."""
    built = ROOT / "build" / preset
    if built.exists() and not (target / "build" / preset).exists():
        (target / "build").mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", "--reflink=auto", built, target / "build"], check=True)


def enter(copy, arguments):
    """Starts Python again with `arguments`, where `copy` is mounted in the place of the repository. Does not return."""
    (copy / ".venv").mkdir(exist_ok=True)
    mounts = 'mount --bind "$1/.venv" "$2/.venv" && mount --rbind "$2" "$1" && cd "$1" && shift 2 && exec "$@"'
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    sys.stdout.flush()
    os.execvp("unshare", ["unshare", "--mount", *user, "bash", "-c", mounts, "bash", str(ROOT), str(copy), sys.executable, *arguments])
