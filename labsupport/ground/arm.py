"""Run one plain function in a fresh process under a budget, watch it from outside, and bring back what happened."""

import contextlib
import inspect
import io
import linecache
import os
import re
import select
import selectors
import signal
import struct
import sys
import time
import types
from collections import deque
from dataclasses import astuple, dataclass
from pathlib import Path

import cloudpickle
import msgspec
import psutil

from labsupport.ground import line, nursery
from labsupport.ground.budget import MIB, Budget, child_environment, mib
from labsupport.ground.child import STATUS, end_children, named_code
from labsupport.ground.folders import ArmSetupError, remove_folder, temporary_folder
from labsupport.ground.meter import SAMPLE_SECONDS
from labsupport.ground.oom import dumped_in_use, explain_oom, failed_operation, regions, wanted_bytes, wanted_in_log
from labsupport.ground.pipe import Garbled, Receiver
from labsupport.ground.record import Cause, End, Facts, Phase, PhaseBegun, Sample, Start
from labsupport.ground.result import ArmError, ArmResult, Family, is_own, line_of, place
from labsupport.ground.values import NoValue, as_bytes, unpack

_LOG_BYTES = 2 * MIB  # kept of each stream, the newest; an allocator's dump has some tens of KiB
# Between two looks of the outside watch a process can grow a little past its limit; RLIMIT_DATA is exact. Writing fresh
# pages goes at about 1 GiB a second on the machines that this was tried on, so this is half a second of it.
_WATCH_SLACK = 512 * MIB
_WATCH_SECONDS = 0.5
# Of what a family may hold, by its resident sets, which count shared pages again in each: from here on it is read what is each one's own.
_LOOK_CLOSER = 0.3
# Times smaller than the largest child: such a one is not counted among them, as Python's resource tracker (6 MiB).
_NONE_OF_THEM = 8
_SPARING = 20  # times as long as it takes to read them they are not read again: that keeps it under 5 % of one core
_LINE = 1_000  # characters kept of a line that has not ended; those of the allocator that are read are shorter
_LAST_WORDS = 10_000  # characters of the log: terminate() writes one line, and faulthandler the stacks behind it
_MESSAGE = 5_000  # characters of an error's text in its sentence; the traceback has more
_REST_SECONDS = (
    1  # for output that waits in the pipes at the end, 64 KiB each; a thread of the arm may write without end
)
_LINE_SECONDS = 0.2  # between two looks at the line, which take less than a millisecond
_END_SECONDS = 5  # for a process that was killed to be gone; none was seen to take a tenth of one
# What faulthandler writes of a crash, in order (Python/traceback.c).
_CRASHED = "Fatal Python error: "
_THREAD = re.compile(r"(?m)^((?:Current t|T)hread 0x\w+.*|Stack .*)$")
_CALL = re.compile(r'(?m)^  File "(.+)", line (\d+) in (.+)$')
# A crash belongs to the allocator's dump before it if it comes this soon after it; both come from one failed operation.
_CRASH_SECONDS = 2


@dataclass(frozen=True)
class Job:
    """What watched() runs: the parameters of labsupport.run(), which explains them."""

    function: object
    args: tuple = ()
    budget: str | None = None
    outside: str = "2 GiB"
    label: str | None = None
    timeout: float = 300
    env: dict | None = None
    logical_devices: int = 1

    @property
    def name(self):
        return str(self.label or getattr(self.function, "__name__", self.function))

    def check(self):
        """Raises ArmSetupError with what to write instead."""
        if not callable(self.function):
            kind = type(self.function).__name__
            raise ArmSetupError(f"run() needs a function and its arguments, not {kind}: write run(f, x), not run(f(x))")
        number = isinstance(self.timeout, (int, float)) and not isinstance(self.timeout, bool)
        if not number or not self.timeout > 0:
            raise ArmSetupError(f"timeout is {self.timeout!r}: give a number of seconds, such as timeout=300")
        if not isinstance(self.logical_devices, int) or self.logical_devices < 1:
            raise ArmSetupError(f"logical_devices is {self.logical_devices!r}: give 1 or more")
        odd = {name: value for name, value in (self.env or {}).items() if not _of_an_environment(name, value)}
        if odd:
            raise ArmSetupError(
                f"env has {odd}: names and values are text without null characters, and names have no =, such as {{'A': '1'}}"
            )
        try:
            inspect.signature(self.function).bind(*self.args)
        except TypeError as error:
            raise ArmSetupError(f"{self.name} does not take these arguments: {error}") from None
        except ValueError:  # a built-in without a signature
            pass


def _of_an_environment(name, value):
    text = isinstance(name, str) and isinstance(value, str)
    return text and name != "" and "=" not in name and "\0" not in name + value


def watched(job, make_watcher):
    """Run a Job while a record.Watcher, which make_watcher() makes, draws it; returns an ArmResult.

    Raises BudgetError, ArmSetupError; KeyboardInterrupt when interrupted, with the process ended.
    """
    job.check()
    allowed, packed = Budget.of(job.budget, job.outside), _packed(job)
    result = ArmResult(job.name, allowed.tensors, job.budget is not None)
    folder = temporary_folder()
    watcher = None
    try:
        watcher = make_watcher()
        with line.standing(allowed.tensors if result.budget_given else 0) as place:
            if place is None or _its_turn(place, result, watcher):
                if place is not None:  # what was free when it came may be taken now
                    allowed = Budget.of(job.budget, job.outside)
                    result.budget = allowed.tensors
                environment = child_environment(allowed, {"TMPDIR": str(folder / "tmp"), **(job.env or {})})
                child = _Child([_header(job, allowed), packed], environment)
                try:
                    Watch(child, result, watcher, allowed, job.timeout).follow()
                finally:
                    child.end()
    except BaseException:
        if watcher is not None:
            watcher.abandon()
        raise
    finally:
        remove_folder(folder)
    watcher.finish(result)
    return result


def _its_turn(place, result, watcher):
    """Wait until the arm may begin; False when it was stopped before."""
    while number := place.turn():
        watcher.wait(result.label, number)
        if watcher.stopped:
            result.error = ArmError(Cause.STOPPED, "you stopped this run while it waited in line; run the cell again")
            return False
        time.sleep(_LINE_SECONDS)
    return True


def _header(job, allowed):
    """What an arm's process reads before its function."""
    header = {
        "path": [os.fsencode(place) for place in sys.path if isinstance(place, (str, os.PathLike))],
        "cells": _cells(),
        "budget": astuple(allowed),
        "logical_devices": job.logical_devices,
    }
    return msgspec.msgpack.encode(header)


def get_ready():
    """Let TensorFlow be loaded for the arms to come, while this process does something else."""
    nursery.warm(child_environment(Budget.of(None, "2 GiB"), {}))


def _cells():
    """Source of the notebook cells run so far: {file name: lines}. They exist only in this process's line cache."""
    cells = ((name, entry[2]) for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None)
    return {as_bytes(name): list(map(as_bytes, lines)) for name, lines in cells}


class _Pickler(cloudpickle.Pickler):
    """Keeps the file names of code objects, so that tracebacks and AutoGraph find the learner's cells."""

    def reducer_override(self, obj):
        if isinstance(obj, types.CodeType):
            _, arguments = self.dispatch_table[types.CodeType](obj)
            return named_code, (arguments, obj.co_filename)
        return super().reducer_override(obj)


def _packed(job):
    try:
        packed = io.BytesIO()
        _Pickler(packed).dump((job.function, job.args))
        return packed.getbuffer()
    except Exception as error:
        raise ArmSetupError(
            f"{job.name} cannot be sent to its own process ({error}). It uses something that lives only here, such as an "
            f"open file, a lock, a widget or an iterator: create that inside the function, or pass a path or an array"
        ) from error


class _Child:
    """The processes of one arm, supervisor and arm, with the pipes to and from them. Nothing here waits for them."""

    def __init__(self, blocks, environment):
        try:
            self._ends = nursery.start(environment)
        except OSError as error:
            raise ArmSetupError(
                f"no process could be started for the arm ({error.strerror}): close other programs"
            ) from error
        self.records = Receiver(self._ends.records)
        self._supervisor, self._code = None, None
        self._log, self._log_bytes = deque(), 0
        self._to_send = [memoryview(part) for block in blocks for part in (struct.pack("<Q", len(block)), block)]
        self._selector = selectors.DefaultSelector()
        os.set_blocking(self._ends.stdin, False)
        self._selector.register(self._ends.stdin, selectors.EVENT_WRITE)
        for stream in self._ends[1:]:
            self._selector.register(stream, selectors.EVENT_READ)

    def read(self, seconds):
        """What comes within `seconds`: yields ("record", record, arrays), ("stdout", text), ("stderr", text). Raises Garbled."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj == self._ends.stdin:
                self._send()
            elif key.fileobj == self._ends.status:
                self._hear_supervisor()
            elif key.fileobj == self.records.descriptor:
                for record, arrays in self.records.read():
                    yield "record", record, arrays
                if not self.records.open:
                    self._selector.unregister(self.records.descriptor)
            else:
                yield from self._text(key.fileobj)

    def _hear_supervisor(self):
        block = os.read(self._ends.status, STATUS.size)
        if not block:
            self._selector.unregister(self._ends.status)
            self._code = -signal.SIGKILL if self._code is None else self._code  # ended before it could tell
        elif self._supervisor is None:
            self._supervisor = psutil.Process(*STATUS.unpack(block))
        else:
            (self._code,) = STATUS.unpack(block)

    def _text(self, stream):
        block = os.read(stream, 1 << 16)
        if not block:
            self._selector.unregister(stream)
        elif stream == self._ends.stdout:
            yield "stdout", block.decode(errors="replace")
        else:
            self._log.append(block)
            self._log_bytes += len(block)
            while self._log_bytes > _LOG_BYTES:
                self._log_bytes -= len(self._log.popleft())
            yield "stderr", block.decode(errors="replace")

    def _send(self):
        try:
            while self._to_send:
                self._to_send[0] = self._to_send[0][os.write(self._ends.stdin, self._to_send[0][: 2**20]) :]
                if not self._to_send[0]:
                    self._to_send.pop(0)
        except BlockingIOError:
            return
        except BrokenPipeError:  # it died; its log says why
            self._to_send.clear()
        self._selector.unregister(self._ends.stdin)  # and stays open: it is the child's lifeline

    def rest(self):
        """What was written before the last record is in the pipes already: yields as read() does, without waiting."""
        streams, until = (self._ends.stdout, self._ends.stderr), time.monotonic() + _REST_SECONDS
        while time.monotonic() < until and any(key.fileobj in streams for key, _ in self._selector.select(0)):
            for kind, *what in self.read(0):
                if kind != "record":
                    yield kind, *what

    def gone(self):
        """The exit code, as Popen gives it, once the arm has ended and nothing is left to read; None before."""
        return None if self._selector.select(0) else self._code

    def log(self):
        """What it wrote to standard error, with files named as in a traceback."""
        return _placed(b"".join(self._log).decode(errors="replace"))

    def last_words(self):
        """What Python wrote when compiled code crashed (faulthandler)."""
        return b"".join(self._log).decode(errors="replace").rpartition(_CRASHED)[2]

    def end(self):
        """End the arm and all it started, then its supervisor, and close the pipes."""
        with contextlib.suppress(psutil.Error):
            if self._supervisor is None and self._code is None and select.select([self._ends.status], [], [], 0)[0]:
                self._hear_supervisor()
            if self._supervisor is not None and self._supervisor.is_running():
                end_children(self._supervisor.pid)
                self._supervisor.kill()
                self._supervisor.wait(_END_SECONDS)
        self._selector.close()
        for descriptor in self._ends:  # an arm that is only about to start sees from this that nobody waits for it
            os.close(descriptor)


class Watch:
    """Follows a child until it reports, dies, runs too long, grows too large or is stopped; fills in an ArmResult."""

    def __init__(self, child, result, watcher, allowed, timeout):
        self.child, self.result, self.watcher = child, result, watcher
        self.most = allowed.tensors + allowed.outside + _WATCH_SLACK
        self._timeout = timeout
        self._born = time.monotonic()
        self.start = self.process = None  # the Start record, the arm's process
        self._looked = self._pause = 0.0  # at the family: when last, and how long not to look again
        self._ran_out_at = None  # when the newest dump of the allocator came
        self._tail = ""  # the end of the log, where a line may still be incomplete
        self._system_kills = _system_kills()

    def follow(self):
        result = self.result
        while result.error is None:
            try:
                for kind, *what in self.child.read(SAMPLE_SECONDS):
                    if kind == "record" and isinstance(what[0], End):
                        self._finish(*what)
                        return
                    self.take(kind, *what)
            except Garbled as error:
                result.error = ArmError(
                    Cause.GARBLED, f"{error}; a function must not write to file descriptors that it did not open"
                )
                break
            now = time.monotonic()
            elapsed = now - (self.start.zero if self.start else self._born)
            result.error = self._trouble(now, elapsed)
            if result.error is None:
                self.watcher.update(result, elapsed, self.start is not None)
        result.seconds = None if self.start is None else time.monotonic() - self.start.zero
        result.error.log = self.child.log()

    def take(self, kind, what, _=None):
        """Note one thing that came."""
        result = self.result
        if kind == "record":
            self.note(what)
        else:
            if kind == "stdout":
                result.output += what
                if len(result.output) > _LOG_BYTES:
                    result.output = "… (the beginning was cut)\n" + result.output[-_LOG_BYTES // 2 :]
            else:
                self.listen(what)
            self.watcher.hear(kind, what)

    def note(self, record):
        result = self.result
        if isinstance(record, Start):
            self.start, result.device = record, record.device
            with contextlib.suppress(psutil.Error):
                self.process = psutil.Process(record.pid)
        elif isinstance(record, Sample):
            result.tensors.append((record.seconds, record.tensors))
        elif isinstance(record, PhaseBegun):
            result.open_phases.append((record.name, record.seconds))
        elif isinstance(record, Phase):
            if result.open_phases:
                result.open_phases.pop()
            result.phases.append(record)
            if record.held is not None:  # an exact point of the curve
                result.tensors.append((record.end, record.held))
        elif isinstance(record, Facts):
            result.facts = record

    def listen(self, text):
        """Note each region and each dump of the allocator in the log."""
        *lines, self._tail = (self._tail + text).rsplit("\n", 1) if "\n" in text else (self._tail + text,)
        if lines:
            self.result.regions += regions(lines[0])
        if lines and (found := dumped_in_use(lines[0])):
            self.result.dumps += found
            self._ran_out_at = time.monotonic()
        self._tail = self._tail[-_LINE:]

    def _trouble(self, now, elapsed):
        """Why the arm is to be ended or has died: an ArmError; None while all is well."""
        grown = self.grown(now, elapsed)
        if grown > self.most:
            return ArmError(
                Cause.WATCH,
                f"the arm was ended: with its children it grew by {mib(grown)}, more than its budgets allow",
            )
        if now - self._born > self._timeout:
            return ArmError(
                Cause.TIMEOUT, f"the arm was ended after {self._timeout} s; give run() a longer timeout if it needs one"
            )
        if self.watcher.stopped:
            return ArmError(Cause.STOPPED, "you stopped this run; run the cell again to measure it")
        code = self.child.gone()
        return None if code is None else self.death(code)

    def grown(self, now, elapsed):
        """Bytes that the arm and its children have added; also takes the samples of the resident set."""
        if self.process is None:
            return 0
        try:
            if not self.result.process or elapsed - self.result.process[-1][0] >= SAMPLE_SECONDS:
                self.result.process.append((elapsed, self.process.memory_info().rss - self.start.process_zero))
            if now - self._looked < max(_WATCH_SECONDS, self._pause):
                return 0
            self._looked = now
            own, children = self.process.memory_info().rss, self.process.children(recursive=True)
            grown = own + _sum(children, lambda child: child.memory_info().rss) - self.start.process_zero
            # Pages that a fork shares count once in each resident set. What is a child's alone takes longer to read.
            if children and grown > _LOOK_CLOSER * self.most:
                alone = _own_pages(children)
                self._pause = _SPARING * (time.monotonic() - now)
                self.note_family(elapsed, alone)
                grown = own + sum(alone) - self.start.process_zero
            return grown
        except psutil.Error:
            return 0

    def note_family(self, elapsed, alone):
        """Remember what children hold, where it is the most so far; alone: bytes of each."""
        largest = max(alone, default=0)
        number = sum(size > largest / _NONE_OF_THEM for size in alone)
        found = Family(elapsed, number, sum(alone), largest)
        if self.result.family is None or found.size > self.result.family.size:
            self.result.family = found

    def death(self, code):
        """An ArmError for a process that died before it could report. The cause comes from figures and from TensorFlow's own log."""
        if code >= 0:
            return ArmError(Cause.EXIT, f"its process ended by itself with exit code {code} before it could report")
        name, log = signal.Signals(-code).name, self.child.log()
        ran_out = self._ran_out_at is not None and time.monotonic() - self._ran_out_at < _CRASH_SECONDS
        if name == "SIGKILL":
            system = self._system_kills is not None and (_system_kills() or 0) > self._system_kills
            cause = Cause.SYSTEM if system else Cause.KILLED
            why = "the system ran out of memory and ended it" if system else "somebody ended it from outside"
        elif name not in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP"):
            cause, why = Cause.KILLED, "it was ended from outside"
        elif ran_out:
            self.result.wanted = wanted_in_log(log)
            cause, why = (
                Cause.CRASH_OUT,
                "compiled code crashed when TensorFlow's allocator had just run out of memory",
            )
        elif name == "SIGABRT" and "std::bad_alloc" in log[-_LAST_WORDS:]:
            cause, why = Cause.MEMORY, "compiled code could get no memory outside the tensor budget"
        else:
            cause, why = Cause.CRASH, "compiled code crashed"
        words = self.child.last_words()
        return ArmError(cause, f"its process died of {name}: {why}", crashed_at(words), _placed(words))

    def _finish(self, end, arrays):
        """The arm has reported."""
        result = self.result
        for kind, *what in self.child.rest():
            self.take(kind, *what)
        self.listen("\n")
        result.seconds = end.seconds
        result.figures.update({name: size for name, size in end.figures.items() if name in result.figures})
        if end.raised is not None:
            result.error = told(end.raised, self.child.log(), result)
            return
        try:
            result.value = unpack(end.value, arrays)
        except NoValue as error:
            result.error = ArmError(Cause.NO_VALUE, f"the arm finished, but {error}")


def crashed_at(text):
    """The learner's Lines, outermost first, in what faulthandler wrote of a crash: of the thread that crashed, else of another.

    TensorFlow's own threads, where most crashes are, run no Python: then the main thread, told last, waits for them.
    """
    _, *parts = _THREAD.split(text)
    heads, threads = parts[::2], map(_CALL.findall, parts[1::2])
    own = [
        [line_of(file, int(number), function) for file, number, function in calls if is_own(file)] for calls in threads
    ]
    current = [lines for lines, head in zip(own, heads) if head.startswith("Current")]
    return next((lines[::-1] for lines in [*current, *own[::-1]] if lines), [])


def _own_pages(processes):
    """Bytes of each process that it shares with no other (USS)."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found.append(process.memory_full_info().uss)
    return found


def _sum(processes, size):
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += size(process)
    return total


def _system_kills():
    """How often this system's out-of-memory killer has ended a process; None where it does not tell.

    A container's own count tells of any killer and of its processes alone (memory.events, kernel.org, "Control Group v2").
    """
    for file in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        with contextlib.suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)$", Path(file).read_text(), re.MULTILINE):
                return int(found[1])
    return None


def told(raised, log, result):
    """The ArmError of what a function raised; what had no room is noted in the result."""
    result.wanted = wanted_bytes(raised.message)
    message = f"{raised.type}: {raised.message[:_MESSAGE]}" + (" …" if len(raised.message) > _MESSAGE else "")
    if raised.cause is Cause.OOM:
        result.operation = failed_operation(raised.message)
        message = explain_oom(raised.message, log, result.budget)
    elif raised.cause is Cause.MEMORY:
        why = (
            raised.message.partition("\nTraceback ")[0] or "MemoryError"
        )  # of Python inside tf.data comes with its own
        message = f"Out of memory outside TensorFlow's allocator ({why}): the process may add no more"
    elif raised.cause is Cause.NO_VALUE:
        message = raised.message
    elif raised.cause is Cause.SETUP:
        message = (
            f"the function could not be read in its own process ({message}): what it uses must be importable there"
        )
    calls = [(frame.file, frame.line, frame.scope) for frame in raised.frames]
    # An error inside a graph arrives where the graph was called; its text tells where the operation was written.
    inner = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', raised.message)
    calls += [(name, int(line), function) for name, line, function in inner]
    calls = reversed(
        dict.fromkeys(reversed(calls))
    )  # both may name the same line; once is enough, the innermost stays last
    frames = [line_of(*call) for call in calls if is_own(call[0])]
    text = _placed(raised.message)
    shown = [line_of(frame.file, frame.line, frame.scope) for frame in raised.frames]
    stack = "".join(f"  {place}, line {line}, in {scope}\n    {source}\n" for place, line, source, scope in shown)
    return ArmError(raised.cause, message, frames, f"{stack}{raised.type}: {text}", log)


def _placed(text):
    """A text with tracebacks and warnings in it, their files named as a learner knows them."""
    text = re.sub(r'File "([^"]+)"', lambda match: f'File "{place(match[1])}"', text)
    return re.sub(r"^(/.+\.py)(?=:\d+: \w*Warning: )", lambda match: place(match[1]), text, flags=re.MULTILINE)
