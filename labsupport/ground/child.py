"""The process an arm runs in: `python -m labsupport.ground.child EVENTS_FD`, the job on standard input.

The job is two length-prefixed pickles: a header of plain data, and the function with its arguments.
After that, standard input is the lifeline: it closes when the parent dies, however it dies.
"""

import fcntl
import gc
import linecache
import os
import pickle
import signal
import struct
import sys
import threading
import time
import traceback
import types
from multiprocessing.connection import Connection

import cloudpickle

from labsupport.ground import meter


def named_code(arguments, filename):
    """A code object that remembers its file: cloudpickle drops the name, and with it the learner's lines."""
    return types.CodeType(*arguments).replace(co_filename=filename)


def _read_block(stream):
    (size,) = struct.unpack("<Q", stream.read(8))
    return stream.read(size)


def _die_with_parent(lifeline):
    """End this process and all it forked when the parent's end of the lifeline closes."""
    try:
        # Linux: let the kernel kill the whole group. A thread could not act while an arm holds the GIL.
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    except (AttributeError, OSError):
        def watch():
            os.read(lifeline, 1)
            os.killpg(0, signal.SIGKILL)

        threading.Thread(target=watch, daemon=True).start()


def _describe(error):
    frames = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]
    own = [f for f in frames if not f[0].startswith(os.path.dirname(__file__))]
    return {"type": type(error).__name__, "message": str(error), "frames": own}


def main():
    events = Connection(int(sys.argv[1]), readable=False)
    lock = threading.Lock()

    def send(*event):
        with lock:
            events.send(event)

    stdin = os.fdopen(os.dup(0), "rb")
    header = pickle.loads(_read_block(stdin))
    job = _read_block(stdin)
    _die_with_parent(stdin.fileno())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # an arm that reads input gets end-of-file, not a hang

    sys.path[:] = header["path"]
    # A notebook cell has no file. AutoGraph and tracebacks find its source here.
    for name, lines in header["cells"].items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)

    import tensorflow as tf

    device = header["budget"].apply(tf, header["logical_devices"])
    gauge = meter.Meter(tf, device)
    meter.on_phase_begin = lambda name, seconds: send("phase begins", (name, seconds))
    meter.on_phase = lambda phase: send("phase", phase)
    meter.on_facts = lambda facts: send("facts", facts)

    error = value = None
    try:
        function, args = cloudpickle.loads(job)
        gc.collect()
        gauge.start()
        meter.active = gauge
        send("start", gauge.zero, gauge.process_zero, device)
        gauge.sample_into(lambda seconds, size: send("tensors", seconds, size))
        value = function(*args)
    except BaseException as caught:  # SystemExit and MemoryError too: the parent must hear of them
        error = _describe(caught)
    seconds = time.monotonic() - gauge.zero if gauge.zero else 0.0
    figures = {
        "peak": gauge.tensors_peak(),
        "end": gauge.tensors_now(),
        "process_peak": gauge.process_peak(),
        "process_end": gauge.process_now(),
    }
    try:
        packed = cloudpickle.dumps(value)
    except Exception as caught:
        packed = None
        error = {
            "type": "UnpicklableResult",
            "message": f"the arm finished, but its return value ({type(value).__name__}) cannot be sent back "
            f"({caught}); return numbers, strings or NumPy arrays",
            "frames": [],
        }
    sys.stdout.flush()
    send("done", seconds, figures, packed, error)
    # The parent now ends this process, and what the arm started, which it could not find after an exit. That also
    # skips TensorFlow's slow shutdown; the temporary folder is the parent's to remove.
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
