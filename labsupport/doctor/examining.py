"""Run a script, or any function, in an arm with the doctor's probes, and bring back what they saw."""

import contextlib
import runpy
import sys
import tempfile
from pathlib import Path

from labsupport.doctor.names import own
from labsupport.doctor.probes import Probe
from labsupport.ground import meter
from labsupport.ground.arm import Job, watched
from labsupport.peak.here import recorded


def examine_script(path, arguments, make_watcher, budget=None, outside="4 GiB", logical_devices=1, lines=False):
    """The ArmResult of a script, with facts for diagnose(). What the script writes to the temporary folder stays.

    lines: every allocation is recorded while it runs, so that the lines that held most at the peak are known.
    """
    job = Job(
        examine,
        (run_script, (path, arguments), lines),
        budget=budget,
        outside=outside,
        label=Path(path).name,
        timeout=float("inf"),
        env={"TMPDIR": tempfile.gettempdir()},
        logical_devices=logical_devices,
    )
    return watched(job, make_watcher)


def examine(target, args, lines=False):
    """In the arm: run target(*args) with the probes installed. Its exception goes on; the facts are sent either way."""
    import tensorflow as tf

    probe = Probe(meter.active, tf)
    probe.install()
    probe.send()  # so that it is known that it ran, whatever becomes of it
    frames, seen = [], None
    if lines:
        import keras  # noqa: F401  a recording marks the layers and optimizers of what is loaded when it begins
    try:
        with recorded() if lines else contextlib.nullcontext() as seen:
            return target(*args)
    except BaseException as error:
        probe.note_failure()
        trace = error.__traceback__
        while trace is not None:
            frames.append(trace.tb_frame)
            trace = trace.tb_next
        raise
    finally:
        probe.end()
        if seen is not None:
            probe.name_holders(seen)
        probe.take_census([frame for frame in frames if own(frame.f_code)])


def run_script(path, arguments):
    """In the arm: the script as `python path arguments` would run it."""
    sys.argv = [path, *arguments]
    sys.path[0:0] = [str(Path(path).resolve().parent)]
    try:
        names = runpy.run_path(path, run_name="__main__")
        # Under bare Python they live until the process has ended, too.
        sys.modules["__main__"].__dict__.update(names)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
