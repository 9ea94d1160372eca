"""Run one plain function in a fresh process under a budget, watch it from outside, and bring back what happened."""

import contextlib
import inspect
import io
import linecache
import os
import pickle
import re
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import types
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path

import cloudpickle
import psutil

from labsupport.ground.budget import MIB, Budget, child_environment, mib
from labsupport.ground.child import named_code
from labsupport.ground.meter import SAMPLE_SECONDS
from labsupport.ground.result import ArmError, ArmResult, explain_oom, is_own

_ROOT = Path(__file__).parents[1]
_TEMP_PREFIX = "labsupport-"
_LOG_BYTES = 2 * MIB
# Between two looks of the outside watch a process can grow a little past its limit; RLIMIT_DATA is exact.
_WATCH_SLACK = 512 * MIB
_WATCH_SECONDS = 0.5


class ArmSetupError(ValueError):
    """The arm could not even start; the message says what to change."""


def watched(function, args, budget, outside, label, timeout, make_plot, env, logical_devices):
    """run() with a plot of one's own: make_plot() has update(), finish(), abandon() and `stopped` like those in live.py."""
    if logical_devices < 1:
        raise ArmSetupError(f"logical_devices is {logical_devices}: give 1 or more")
    allowed = Budget.of(budget, outside)
    header = pickle.dumps({"path": sys.path, "cells": _cells(), "budget": allowed, "logical_devices": logical_devices})
    job = _packed(function, args, label)
    result = ArmResult(label, allowed.tensors, budget is not None)
    folder = _temporary_folder()
    plot = make_plot()
    try:
        child = _Child(header, job, child_environment(allowed, {"TMPDIR": folder, **(env or {})}))
        try:
            _watch(child, result, plot, allowed, timeout)
        finally:
            child.end()
    except BaseException:
        plot.abandon()
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    plot.finish(result)
    return result


def _cells():
    """Source of the notebook cells run so far: {file name: lines}. They exist only in this process's line cache."""
    return {name: entry[2] for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


class _Pickler(cloudpickle.Pickler):
    """Keeps the file names of code objects, so that tracebacks and AutoGraph find the learner's cells."""

    def reducer_override(self, obj):
        if isinstance(obj, types.CodeType):
            _, arguments = self.dispatch_table[types.CodeType](obj)
            return named_code, (arguments, obj.co_filename)
        return super().reducer_override(obj)


def _packed(function, args, label):
    if not callable(function):
        raise ArmSetupError(f"run() needs a function and its arguments, not {type(function).__name__}: write run(f, x), not run(f(x))")
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        raise ArmSetupError(f"{label} does not take these arguments: {error}") from None
    except ValueError:  # a built-in without a signature
        pass
    try:
        packed = io.BytesIO()
        _Pickler(packed).dump((function, args))
        return packed.getvalue()
    except Exception as error:
        raise ArmSetupError(
            f"{label} cannot be sent to its own process ({error}). It uses something that lives only here, such as an "
            f"open file, a lock, a widget or an iterator: create that inside the function, or pass a path or an array"
        ) from error


def _temporary_folder():
    """A folder for whatever the arm writes; also sweeps folders whose kernel was killed before it could."""
    base = Path(tempfile.gettempdir())
    for stale in base.glob(_TEMP_PREFIX + "*"):
        owner = stale.name.split("-")[1]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(stale, ignore_errors=True)
    try:
        return tempfile.mkdtemp(prefix=f"{_TEMP_PREFIX}{os.getpid()}-")
    except OSError as error:
        raise ArmSetupError(
            f"no temporary folder can be made in {base} ({error.strerror}): free some disk space or set TMPDIR to another disk"
        ) from error


class _Child:
    """The process of one arm and the three pipes that come from it."""

    def __init__(self, header, job, environment):
        receive, send = os.pipe()
        environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), environment.get("PYTHONPATH", "")])
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "labsupport.ground.child", str(send)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env=environment, pass_fds=[send], start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            os.close(receive)
            raise ArmSetupError(f"no process could be started for the arm ({error.strerror}): close other programs") from error
        finally:
            os.close(send)
        self.events = Connection(receive, writable=False)
        self.log = deque()
        self.selector = selectors.DefaultSelector()
        for stream in (self.events, self.process.stdout, self.process.stderr):
            self.selector.register(stream, selectors.EVENT_READ)
        try:
            for block in (header, job):
                self.process.stdin.write(struct.pack("<Q", len(block)) + block)
            self.process.stdin.flush()  # and stays open: it is the child's lifeline
        except BrokenPipeError:  # died at once; its log says why
            pass

    def read(self, seconds):
        """What arrives within `seconds`: yields ("event", tuple), ("text", str) from standard output, ("log", str) from standard error."""
        for key, _ in self.selector.select(seconds):
            stream = key.fileobj
            try:
                if stream is self.events:
                    while stream.poll():
                        yield "event", stream.recv()
                else:
                    block = os.read(stream.fileno(), 1 << 16)
                    if not block:
                        raise EOFError
                    if stream is self.process.stdout:
                        yield "text", block.decode(errors="replace")
                    else:
                        yield "log", block.decode(errors="replace")
                        self.log.append(block)
                        while sum(map(len, self.log)) > _LOG_BYTES:
                            self.log.popleft()
            except (EOFError, OSError):
                self.selector.unregister(stream)

    def silent(self):
        """Whether no event is left to read. The pipe need not be closed: what the arm forked may hold it open."""
        return self.events not in {key.fileobj for key in self.selector.get_map().values()} or not self.events.poll()

    def log_text(self):
        return b"".join(self.log).decode(errors="replace")

    def end(self):
        """End the process and all it started, sessions of their own included, and close the pipes."""
        try:
            started = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            started = []
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        self.selector.close()
        for stream in (self.events, self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _watch(child, result, plot, allowed, timeout):
    """Follow the child until it reports, dies, runs too long, grows too large or is stopped; fill in `result`."""
    born = time.monotonic()
    zero = process_zero = None
    looked = 0.0
    outside = psutil.Process(child.process.pid)
    while True:
        for kind, item in child.read(SAMPLE_SECONDS):
            if kind in ("text", "log"):
                _hear(result, plot, kind, item)
            elif item[0] == "start":
                _, zero, process_zero, result.device = item
            elif item[0] == "tensors":
                result.tensors.append(item[1:])
            elif item[0] == "phase begins":
                result.open_phases.append(item[1])
            elif item[0] == "phase":
                result.open_phases.pop()
                result.phases.append(item[1])
                if item[1].held is not None:  # an exact point of the curve
                    result.tensors.append((item[1].end, item[1].held))
            elif item[0] == "facts":
                result.facts = item[1]
            elif item[0] == "done":
                _finish(child, result, plot, *item[1:])
                return
        now = time.monotonic()
        elapsed = now - (zero or born)
        try:
            if zero is not None and (not result.process or elapsed - result.process[-1][0] >= SAMPLE_SECONDS):
                result.process.append((elapsed, outside.memory_info().rss - process_zero))
            grown = 0
            if zero is not None and now - looked > _WATCH_SECONDS:
                looked = now
                family = [outside, *outside.children(recursive=True)]
                grown = sum(p.memory_info().rss for p in family) - process_zero
        except psutil.NoSuchProcess:
            grown = 0
        if grown > allowed.tensors + allowed.outside + _WATCH_SLACK:
            result.error = ArmError("killed", f"the arm was ended: with its children it grew by {mib(grown)}, more than its budgets allow")
        elif now - born > timeout:
            result.error = ArmError("timeout", f"the arm was ended after {timeout} s; give run() a longer timeout if it needs one")
        elif plot.stopped:
            result.error = ArmError("stopped", "you stopped this run; run the cell again to measure it")
        elif child.process.poll() is not None and child.silent():
            result.error = ArmError("killed", _death(child.process.returncode, child.log_text()), log=child.log_text())
        if result.error is not None:
            result.seconds = None if zero is None else elapsed
            return
        plot.update(result, elapsed, zero is not None)


def _death(code, log):
    if code >= 0:
        return f"the process of the arm ended by itself with exit code {code} before it could report"
    name = signal.Signals(-code).name
    why = {
        "SIGKILL": "somebody, perhaps the system's out-of-memory killer, ended it",
        "SIGABRT": "compiled code gave up, which it does when it cannot get memory outside the tensor budget",
        "SIGSEGV": "compiled code crashed",
    }.get(name, "it was ended from outside")
    after = "; just before, TensorFlow's allocator had run out of memory (see the log)" if "ran out of memory" in log else ""
    return f"the process of the arm died of {name}: {why}{after}"


def _hear(result, plot, kind, text):
    if kind == "text":
        result.output = (result.output + text)[-_LOG_BYTES:]
    plot.hear(kind, text)


def _finish(child, result, plot, seconds, figures, packed, error):
    result.seconds, result.figures = seconds, figures
    while child.selector.select(0):  # what it wrote before it reported is in the pipes already
        for kind, item in child.read(0):
            if kind != "event":  # a last sample, from the thread that takes them
                _hear(result, plot, kind, item)
    if error is None:
        try:
            result.value = cloudpickle.loads(packed)
        except Exception as caught:
            result.error = ArmError("unpicklable", f"the arm finished, but its return value cannot be read back here ({caught}); return numbers, strings or NumPy arrays")
        return
    kinds = {"ResourceExhaustedError": "oom", "MemoryError": "memory", "_ArrayMemoryError": "memory", "UnpicklableResult": "unpicklable"}
    kind = kinds.get(error["type"], "exception")
    message = error["message"] if kind == "unpicklable" else f"{error['type']}: {error['message']}"
    if kind == "oom":
        message = explain_oom(error["message"], child.log_text(), result.budget)
    elif kind == "memory":
        message = f"Out of memory outside TensorFlow's allocator ({error['message'] or 'MemoryError'}): the process may add no more"
    calls = [(name, int(line)) for name, line, _ in error["frames"]]
    # An error inside a graph arrives where the graph was called; its text tells where the operation was written.
    calls += [(name, int(line)) for name, line in re.findall(r'File "([^"]+)", line (\d+)', error["message"])]
    calls = reversed(dict.fromkeys(reversed(calls)))  # both may name the same line; once is enough, the innermost stays last
    frames = [(_place(name), line, _source(name, line)) for name, line in calls if is_own(name)]
    text = re.sub(r'File "([^"]+)"', lambda match: f'File "{_place(match[1])}"', error["message"])
    stack = "".join(f"  {_place(name)}, line {line}, in {scope}\n    {_source(name, line)}\n" for name, line, scope in error["frames"])
    result.error = ArmError(kind, message, frames, f"{stack}{error['type']}: {text}", child.log_text())


def _source(name, line):
    return linecache.getline(name, line).strip()


def _place(name):
    """The file of a frame as a learner knows it: "Cell In[4]" for a notebook cell, a library's file from its package on."""
    try:
        from IPython import get_ipython

        known = get_ipython().compile.format_code_name(name)
    except (ImportError, AttributeError):
        known = None
    return " ".join(known) if known else name.split("-packages/")[-1].removeprefix(str(_ROOT) + os.sep)
