"""Environments of their own for software that is not ours, made when a test first needs one.

Each is named `.venv-<name>` at the root of the repository, and holds exactly what its lock file names.
"""

import fcntl
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD_S = 600
_STAMP = ".built-from"


def python_of(name: str, lock: Path, *, pip_args: Sequence[str] = ()) -> Path:
    """Return the interpreter of environment `.venv-<name>`, building it first when it is missing or old.

    `lock` is a requirements file with hashes; `pip_args` are further arguments of `pip install`. A stamp in
    the environment says what it was built from, so it is built once for many runs, also when several ask at
    once.

    Raises:
        RuntimeError: pip could not install what the lock names; the text is pip's.
    """
    folder = ROOT / f".venv-{name}"
    folder.mkdir(exist_ok=True)
    python = folder / "bin" / "python"
    wanted = _fingerprint(lock, pip_args)
    stamp = folder / _STAMP
    with (folder / ".building").open("w") as door:
        fcntl.flock(door, fcntl.LOCK_EX)
        if python.exists() and stamp.exists() and stamp.read_text() == wanted:
            return python
        _run(sys.executable, "-m", "venv", str(folder))
        pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        _run(*pip, "--require-hashes", *pip_args, "-r", str(lock))
        stamp.write_text(wanted)
    return python


def _fingerprint(lock: Path, pip_args: Sequence[str]) -> str:
    parts = [sys.version, *pip_args, lock.read_text()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
