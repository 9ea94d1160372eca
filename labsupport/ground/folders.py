"""The temporary folder of an arm. Only what carries this program's own mark is ever removed."""

import atexit
import contextlib
import json
import os
import shutil
import stat
import tempfile
from pathlib import Path

import psutil

_PREFIX = "labsupport-"
_MARK = ".labsupport-arm.json"  # in the folder: who made it


class ArmSetupError(ValueError):
    """The arm could not even start; the message says what to change."""


def temporary_folder():
    """A new folder with a folder "tmp" in it for whatever the arm writes; also sweeps those whose kernel was killed before it could."""
    try:
        os.getcwd()
    except OSError:
        raise ArmSetupError(
            "the current folder was deleted: change to another one, such as os.chdir(os.path.expanduser('~'))"
        ) from None
    folder = None
    try:
        base = Path(tempfile.gettempdir())
        _sweep(base)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        me = psutil.Process()
        (folder / _MARK).write_text(json.dumps({"pid": me.pid, "started": me.create_time()}))
        (folder / "tmp").mkdir()
    except OSError as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise ArmSetupError(
            f"no temporary folder can be made ({error}): free some disk space or set TMPDIR to another disk"
        ) from error
    return folder


def working_folder():
    """A new folder for files that several arms read: removed when this process ends, or swept later if it was killed."""
    folder = temporary_folder()
    atexit.register(remove_folder, folder)
    return folder / "tmp"


def remove_folder(folder):
    shutil.rmtree(folder, ignore_errors=True)


def _sweep(base):
    for folder in base.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = folder.lstat()
            if (
                stat.S_ISDIR(found.st_mode)
                and found.st_uid == os.geteuid()
                and _left_behind(json.loads((folder / _MARK).read_text()))
            ):
                shutil.rmtree(folder, ignore_errors=True)


def _left_behind(mark):
    """Whether the process that made a folder has gone; another one may have its number by now."""
    try:
        return psutil.Process(mark["pid"]).create_time() != mark["started"]
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
