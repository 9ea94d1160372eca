"""What a learner did, kept on the learner's own machine: guesses, exercises and verdicts, a line of JSON each.

The file is ~/.labsupport/ledger.jsonl, or the one that LABSUPPORT_LEDGER names; the word "off" there keeps nothing.
Nothing is sent anywhere. A line tells when, which lab and on what kind of machine; no name of a person or a host.
"""

import json
import os
import platform
import re
import stat
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath

import psutil

from labsupport.ground.budget import MIB, machine_memory
from labsupport.showing.plain import plain, say

LARGEST = 20 * MIB  # of a ledger or an export; a ledger of the whole course has a hundredth of that
_NUMBER = (int, float)
_EVERY = {"time": str, "lab": str, "kind": str, "machine": dict}
_FIELDS = {
    "guess": {"question": str, "guess_mib": _NUMBER, "measured_mib": (*_NUMBER, type(None))},
    "exercise": {"number": int, "passed": bool},
    "verdict": {"id": str, "verdict": str, "figures": dict, "unit": str},
}


class LedgerError(ValueError):
    """A file that cannot be used, with what to do about it."""


def ledger_path():
    """Where the ledger is kept; None if it is turned off. Raises LedgerError if there is no home folder."""
    given = os.environ.get("LABSUPPORT_LEDGER", "").strip()
    if given.lower() == "off":
        return None
    try:
        return Path(given or "~/.labsupport/ledger.jsonl").expanduser()
    except RuntimeError as error:
        raise LedgerError(
            f'it is not known where to keep a ledger ({error}): set LABSUPPORT_LEDGER to a file, or to "off"'
        ) from None


def current_lab():
    """The name of the lab that a learner has open in this kernel, such as "01_image_stacking"; None in an automatic run.

    Jupyter Server gives each kernel the path of its notebook in JPY_SESSION_NAME. nbclient, papermill and nbval do not;
    started from a notebook they pass on its variable, which is then the parent's as well. Solutions are no learner's work.
    """
    session = os.environ.get("JPY_SESSION_NAME")
    if not session:
        return None
    try:
        if psutil.Process(os.getppid()).environ().get("JPY_SESSION_NAME") == session:
            return None
    except psutil.Error:  # the parent has gone or is somebody else's: then it is no tool that this notebook started
        pass
    path = PurePath(session)
    lab = re.match(r"\d\d_\w+", path.stem)  # "01_image_stacking-Copy1" is the learner's copy of lab 01
    return lab[0] if lab and path.parent.name != "solutions" else None


@cache
def machine():
    """What pooled results are compared by. Memory in MiB, as TensorFlow may use it; no name of the host."""
    try:
        tensorflow = version("tensorflow")
    except PackageNotFoundError:
        tensorflow = "unavailable"
    return {
        "cores": os.cpu_count(),
        "memory_mib": machine_memory() // MIB,
        "tensorflow": tensorflow,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def record(kind, **facts):
    """Append an entry if a learner is at work here. A failure costs the entry and one sentence, never the lab."""
    lab = current_lab()
    try:
        if lab is None or (path := ledger_path()) is None:
            return
        entry = {
            "time": datetime.now(UTC).isoformat(),
            "lab": lab,
            "kind": kind,
            **facts,
            "machine": machine(),
        }
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _append(path, json.dumps(entry, default=float).encode() + b"\n")
    except LedgerError as error:
        say_once(f"Your progress is not kept: {error}. The lab goes on.")
    except OSError as error:
        say_once(
            f"Your progress is not kept: {path} cannot be written ({error.strerror}). The lab goes on; "
            'set LABSUPPORT_LEDGER to a file that can be, or to "off".'
        )


@contextmanager
def _opened(path, flags):
    """The descriptor of a regular file, closed at the end; a LedgerError for a device, a pipe or a folder, without waiting for it."""
    file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise LedgerError(f"{path} is a device, a pipe or a folder: name an ordinary file")
        yield file
    finally:
        os.close(file)


def _append(path, line):
    """One write to a file opened for appending: lines of several kernels do not mix (POSIX)."""
    with _opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) as file:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":  # the last write was cut short: leave only that line damaged
            line = b"\n" + line
        if os.write(file, line) < len(line):
            raise OSError(0, "no room was left on the disk")


def content(path):
    """The bytes of a ledger or an export. Raises OSError, and LedgerError for what is no ordinary file or larger than LARGEST."""
    with _opened(path, os.O_RDONLY) as descriptor, open(descriptor, "rb", closefd=False) as file:
        found = file.read(LARGEST + 1)
    if len(found) > LARGEST:
        raise LedgerError(
            f"{path} is too large to be a ledger or an export ({LARGEST // MIB} MiB at most): look what it is, and name another file"
        )
    return found


@cache
def say_once(sentence):
    say(plain(sentence))


def is_entry(entry):
    """Whether this is an entry as record() writes it; files come from other people, too."""
    fields = _FIELDS.get(entry["kind"]) if isinstance(entry, dict) and isinstance(entry.get("kind"), str) else None
    return fields is not None and all(
        isinstance(entry.get(name, ...), kind) for name, kind in {**_EVERY, **fields}.items()
    )


def entries():
    """(entries in the order they were written, number of unreadable lines); ([], 0) without a ledger.

    Raises LedgerError if the file is there and cannot be read, or if there is no home folder for it.
    """
    path = ledger_path()
    try:
        lines = content(path).decode(errors="replace").split("\n") if path else []
    except FileNotFoundError:
        lines = []
    except OSError as error:
        raise LedgerError(
            f"{path} cannot be read ({error.strerror}): give yourself the right to, or set LABSUPPORT_LEDGER to another file"
        ) from None
    found = []
    for line in filter(str.strip, lines):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        found.append(entry if is_entry(entry) else None)
    return [entry for entry in found if entry], found.count(None)
