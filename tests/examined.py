"""Functions and scripts run in an arm with the doctor's probes: TensorFlow is loaded there once for all of them."""

import gc
import runpy
import sys
from pathlib import Path

from labsupport.doctor.examining import examine
from labsupport.doctor.rules import diagnose
from labsupport.ground.arm import Job, watched
from labsupport.ground.record import Watcher


class Silent(Watcher):
    """Shows nothing."""


def examined(function, args, keywords):
    """The diagnosis of an arm, run as its lab runs it, with the probes in its process."""
    given = {name: keywords[name] for name in ("budget", "outside", "env", "logical_devices") if name in keywords}
    return diagnose(watched(Job(_examined, (function, args), label="arm", timeout=120, **given), Silent))


def _examined(function, args):
    """In the arm. Each census would look through all that the libraries hold, which took more than a third of such a test."""
    gc.freeze()
    return examine(function, args)


def run_as_main(path, arguments):
    """In the arm: a script, much as Python would run it."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    try:
        names = runpy.run_path(path, run_name="__main__")
        sys.modules["__main__"].__dict__.update(names)  # under bare Python they live until the process ends, too
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
