"""The process an arm runs in. It forks once at its start: the first half supervises, the second is the arm.

On standard input come two blocks, each with its length: a header of plain data (msgpack), and the function with its
arguments (cloudpickle). After that, standard input is the lifeline: it closes when the parent dies, however it dies.
"""

import contextlib
import ctypes
import faulthandler
import gc
import linecache
import os
import re
import select
import signal
import struct
import sys
import time
import traceback
import types

STATUS = struct.Struct("<i")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_MOST_FRAMES = 40  # of a traceback, from either end; a reader wants fewer
_FROM_PYTHON = re.compile(r"(\w+Error): .*?\nTraceback \(most recent call last\):", re.DOTALL)
# What TensorFlow says of a graph's constant that the allocator has no room for (core/kernels/constant_op.cc).
NO_ROOM_FOR_CONSTANT = "Cannot parse tensor from proto"
# A TypeError: Keras makes an error of a layer within a layer anew, with its text alone (keras/src/utils/traceback_utils.py).
_MADE_ANEW = "ResourceExhaustedError.__init__() missing"
_ENDLESS = 2_000  # nested calls: twice Python's own limit, which the function must have raised


def named_code(arguments, filename):
    """A code object that remembers its file: cloudpickle drops the name, and with it the learner's lines."""
    return types.CodeType(*arguments).replace(co_filename=filename)


def _prctl(option, value):
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def supervise(arm, status):
    """Wait for the arm, or for the parent's end; end everything that the arm started; tell how the arm ended.

    status: the descriptor to tell it by: first this process's number, then the exit code as Popen gives it.

    A process of its own can do so while the arm holds the GIL. Orphans of the arm come to it (prctl: subreaper),
    daemons and sessions of their own included, so it finds them all.
    """
    os.write(status, STATUS.pack(os.getpid()))
    poll = select.poll()
    poll.register(0, 0)  # only the hang-up is reported; what is to be read is for the arm
    if hasattr(os, "pidfd_open"):
        poll.register(os.pidfd_open(arm), select.POLLIN)
    ended = None
    while ended is None:
        gone = any(
            descriptor == 0 and event & (select.POLLHUP | select.POLLERR) for descriptor, event in poll.poll(500)
        )
        if gone:
            os.kill(arm, signal.SIGKILL)
        pid, code = os.waitpid(arm, 0 if gone else os.WNOHANG)
        ended = code if pid else None
    end_children()
    with contextlib.suppress(OSError):  # nobody may be there any more to hear it
        os.write(status, STATUS.pack(os.waitstatus_to_exitcode(ended)))
    os._exit(0)


def end_children(of=None):
    """Kill all processes below this one (or below the process `of`), until none is left, for two seconds at most.

    They are gone within hundredths; what forks faster than it is killed would hold us for ever.
    """
    import psutil

    until = time.monotonic() + 2
    while time.monotonic() < until:
        try:
            family = psutil.Process(of).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        family = [process for process in family if _alive(process)]
        if not family:
            return
        for process in family:
            with contextlib.suppress(psutil.Error):  # gone already, or one that may not be killed (a setuid program)
                process.kill()
        time.sleep(0.01)


def _alive(process):
    import psutil

    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _read_block(stream):
    (size,) = struct.unpack("<Q", stream.read(8))
    return stream.read(size)


def _frames(trace):
    """(frames of a traceback, its number of calls): those at either end, without those of this file."""
    from labsupport.ground.record import Frame, sendable

    calls = []
    while trace is not None:
        calls.append((trace.tb_frame.f_code, trace.tb_lineno))
        trace = trace.tb_next
    calls = [call for call in calls if not call[0].co_filename.startswith(_PACKAGE)]
    shown = calls if len(calls) <= 2 * _MOST_FRAMES else [*calls[:_MOST_FRAMES], *calls[-_MOST_FRAMES:]]
    return [Frame(sendable(code.co_filename), line, sendable(code.co_name)) for code, line in shown], len(calls)


def _kinds(error, message):
    """The names of an exception's classes.

    What Python raised inside tf.data or py_function comes in an error of TensorFlow's own, which has the name and the
    traceback of the other one as text, and a class that misleads: that of the allocator for NumPy's MemoryError, and
    UnknownError for the allocator's (tensorflow/python/lib/core/py_func.cc).
    """
    names = {base.__name__ for base in type(error).__mro__}
    inside = "OpError" in names and _FROM_PYTHON.search(message)
    return {inside[1]} if inside else names


def _text(error):
    from labsupport.ground.record import sendable

    try:
        return sendable(error)
    except Exception:  # an exception whose text cannot be made
        return "its text cannot be shown"


def record_of(error, setup=False):
    """The record of an exception."""
    from labsupport.ground.record import Cause, Raised, sendable

    frames, calls = _frames(error.__traceback__)
    while _MADE_ANEW in (message := _text(error)) and error.__context__ is not None:
        error = error.__context__
    kind = type(error)
    kinds = _kinds(error, message)
    if "ResourceExhaustedError" in kinds or NO_ROOM_FOR_CONSTANT in message:
        cause = Cause.OOM
    elif any(name.endswith("MemoryError") for name in kinds):  # NumPy has one of its own
        cause = Cause.MEMORY
        if setup:
            message = "its arguments, when they were unpacked, need more than outside=… allows" + (
                message and f"; {message}"
            )
    else:
        cause = Cause.SETUP if setup else Cause.ERROR
    if calls > _ENDLESS:
        message += f" (within {calls:,} nested calls: endless recursion?)"
    return Raised(cause, sendable(kind.__name__), message, frames)


def _prepare(header, tf):
    """Before the job: the notebook's import path and cells, the limits. Returns the meter."""
    from labsupport.ground import meter
    from labsupport.ground.budget import Budget
    from labsupport.ground.values import as_text

    sys.path[:] = map(os.fsdecode, header["path"])
    # A notebook cell has no file. AutoGraph and tracebacks find its source here.
    for name, lines in ((as_text(name), list(map(as_text, lines))) for name, lines in header["cells"].items()):
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    device = Budget(*header["budget"]).apply(tf, header["logical_devices"])
    return meter.Meter(meter.AllocatorCounter(tf, device))


def _run(job, gauge, sender):
    """(what the function returned, the record of what it raised or None, its seconds, its figures).

    The figures are read here, while the arguments are alive: they were there at the start, and are no part of what is
    counted. What the arm forked and what comes back here ends by itself, as it would anywhere else: it does not speak
    for the arm.
    """
    import cloudpickle

    from labsupport.ground import meter
    from labsupport.ground.budget import lift_process_limit
    from labsupport.ground.record import Start

    me, loaded, value, raised = os.getpid(), False, None, None
    try:
        function, args = cloudpickle.loads(job)
        del job
        loaded = True
        gc.collect()
        gc.unfreeze()  # from here on Python collects as in a process of its own (nursery.py froze what loading left)
        gauge.start()
        meter.active = gauge
        sender.send(Start(gauge.zero, gauge.process_zero, gauge.counter.device, os.getpid()))
        gauge.sample()
        value = function(*args)
        if os.getpid() != me:
            _leave(None)
    except BaseException as caught:  # SystemExit and MemoryError too: the parent must hear of them
        if os.getpid() != me:
            _leave(caught)
        lift_process_limit()
        raised = record_of(caught, setup=not loaded)
    return value, raised, time.monotonic() - gauge.zero if gauge.zero else None, gauge.figures()


def _end(value, raised, seconds, figures):
    """(the End of an arm, its arrays)."""
    from labsupport.ground.record import Cause, End, Raised, sendable
    from labsupport.ground.values import NoValue, pack

    tree, buffers = None, []
    if raised is None:
        try:
            tree, buffers = pack(value)
        except (NoValue, MemoryError) as error:
            advice = f"{error}; return numbers, text, NumPy arrays, or lists and dictionaries of them"
            raised = Raised(Cause.NO_VALUE, type(value).__name__, sendable(f"the arm finished, but {advice}"))
    return End(seconds, figures, raised, tree, [len(buffer) for buffer in buffers]), buffers


def _flush():
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # replaced, closed or None
            stream.flush()


def _leave(error):
    """End this process as Python would after `error`, or without one."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    _flush()
    os._exit(code & 0xFF)


def arm(descriptor):
    """The second half: run the job, report, then wait to be ended."""
    import msgspec

    from labsupport.ground import meter
    from labsupport.ground.budget import lift_process_limit
    from labsupport.ground.pipe import Sender

    with contextlib.suppress(OSError):  # when the system itself runs out, it shall end the arm, never the notebook
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    stdin = os.fdopen(os.dup(0), "rb")
    header, blocks = msgspec.msgpack.decode(_read_block(stdin)), [_read_block(stdin)]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # an arm that reads input gets end-of-file, not a hang
    stdin.close()

    import tensorflow as tf

    gauge = _prepare(header, tf)
    faulthandler.enable()  # into its log, from where the line that crashed is read (arm.py)
    sender = Sender(descriptor)
    meter.connect(sender.send)
    value, raised, seconds, figures = _run(
        blocks.pop(), gauge, sender
    )  # popped, so that no second copy of the arguments stays
    lift_process_limit()
    end, buffers = _end(value, raised, seconds, figures)
    _flush()
    with contextlib.suppress(OSError):
        sender.send(end, buffers)
    # The parent now ends this process, and what the arm started, which it could not find after an exit. That also
    # skips TensorFlow's slow shutdown; the temporary folder is the parent's to remove.
    while True:
        signal.pause()


def main(records, status, prepare):
    """Called in a process that has only loaded TensorFlow; records, status: descriptors; prepare(): called in the arm."""
    os.setsid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    pid = os.fork()
    if pid:
        os.close(records)
        for stream in (1, 2):  # a reader of the arm's output shall see its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        supervise(pid, status)
    os.close(status)
    os.setsid()  # a signal to the arm's group, which a script may send, does not reach the supervisor
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        prepare()
        arm(records)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
