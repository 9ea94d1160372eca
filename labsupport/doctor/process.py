"""A script in a process of its own, run by Python itself as `python script.py` would, while the doctor looks on from outside.

Its standard streams are this process's own. Records come over one pipe, what compiled code prints to standard error over
another, from where it is passed on without the allocator's dumps (see inside.py).
"""

import contextlib
import ctypes
import json
import os
import re
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import astuple
from pathlib import Path

import psutil

from labsupport.doctor.children import Children
from labsupport.ground.arm import Watch, told
from labsupport.ground.budget import MIB, Budget, mib
from labsupport.ground.child import end_children
from labsupport.ground.folders import ArmSetupError
from labsupport.ground.meter import SAMPLE_SECONDS
from labsupport.ground.pipe import Garbled, Receiver
from labsupport.ground.record import Cause, End, Start
from labsupport.ground.result import ArmError, ArmResult

_ROOT = Path(__file__).parents[2]
_STARTUP = Path(__file__).parent / "startup"
_LOG_BYTES = 2 * MIB  # kept of what compiled code printed, the newest; an allocator's dump has some tens of KiB
_LONGEST_LINE = 2**16  # bytes; what is longer is passed on in pieces
# Seconds between two looks at the processor time, and its share that the doctor's own samples stay below (1 to 2 % measured).
_IDLE_LOOK, _IDLE_SHARE = 0.5, 0.05
_IDLE_SECONDS = 4  # without any computing before that is said; TensorFlow waits ten for memory
_PRIVATE = 64 * MIB  # of a Python that has run nothing yet: 13 MiB measured; threads' stacks are counted here, too
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LOGGED = re.compile(rb"^([IWEF])(?:\d{4} | ?\d\d:)|^\d{4}-\d\d-\d\d [\d:.]+: ([IWEF]) ")
_AT_ONCE = (b" port.cc:", b" cudart_stub.cc:")  # printed while TensorFlow loads, whatever TF_CPP_MIN_LOG_LEVEL says
_DUMP = (b" bfc_allocator.cc:", b"Current allocation summary follows", b"If the cause is memory fragmentation")
# What TensorFlow logs of the doctor's own questions: when a census asks what is buffered, and when --lines records.
_ASKED, _RECORDS = b"Cannot find this iterator's analytical model", b" profiler_session.cc:"
# What follows a line of TensorFlow's log without a head of its own; any other text is the script's.
_FOLLOWS = re.compile(
    rb"^(To enable the following instructions|Limit: |InUse: |MaxInUse: |NumAllocs: |MaxAllocSize: |Reserved: "
    rb"|PeakReserved: |LargestFreeBlock: |$"
    rb"|Traceback \(most recent call last\):|\s|[\w.]+(?:Error|Exception|Warning)\b)"  # of Python in a pipeline (op_kernel.cc)
)
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_BY_A_PERSON = (
    128  # si_code of a signal that the terminal sends, to the script itself as well (SI_KERNEL, asm-generic/siginfo.h)
)


def examine_script(
    command, make_watcher, budget=None, outside="4 GiB", logical_devices=1, lines=False, start=None, remedy=""
):
    """The ArmResult of `python command…`, with facts for diagnose().

    command: what stands behind `python`: [script, arguments …] or ["-m", module, arguments …]. lines: every allocation is
    recorded while it runs, so that the lines that held most at the peak are known. start: what makes the process, Script
    if None. remedy: a name in remedies.REMEDIES to apply; the script then reads and prints nothing. Raises ArmSetupError, BudgetError.
    """
    if logical_devices < 1:
        raise ArmSetupError(f"devices is {logical_devices}: give 1 or more")
    allowed = Budget.of(budget, outside)
    result = ArmResult(_label(command), allowed.tensors, budget is not None)
    result.outside = allowed.outside
    watcher = make_watcher()
    script = (start or Script)(command, allowed, {"devices": logical_devices, "lines": lines, "remedy": remedy})
    try:
        ScriptWatch(script, result, watcher, allowed).follow()
    except BaseException:
        watcher.abandon()
        raise
    finally:
        script.end()
    watcher.finish(result)
    return result


def _label(command):
    return " ".join(command[:2]) if command[0] == "-m" else Path(command[0]).name


class Script:
    """The process of a script and the two pipes from it. options: "devices", "lines", "remedy" of examine_script()."""

    def __init__(self, command, allowed, options, cwd=None, environment=None):
        records, theirs = os.pipe()
        self._log_end, log = os.pipe()
        self._crash = tempfile.TemporaryFile()  # noqa: SIM115  closed in end()
        settings = {
            "records": theirs,
            "log": log,
            "crash": self._crash.fileno(),
            "budget": astuple(allowed),
            "private": _PRIVATE,
            **options,
            "root": str(_ROOT),
            "pythonpath": os.environ.get("PYTHONPATH"),
        }
        path = [str(_STARTUP), *filter(None, [settings["pythonpath"]])]
        ours = {"LABSUPPORT_DOCTOR": json.dumps(settings), "PYTHONPATH": os.pathsep.join(path)}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        try:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=cwd,
                env={**os.environ, **(environment or {}), **ours},
                pass_fds=[theirs, log, self._crash.fileno()],
                **(dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL) if options["remedy"] else {}),
                preexec_fn=lambda: self._prepare(allowed.outside + _PRIVATE),
            )
        except BaseException:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            raise
        finally:
            os.close(theirs)
            os.close(log)
        with contextlib.suppress(OSError):  # when the system itself runs out, it shall end the script, not its doctor
            Path(f"/proc/{self.process.pid}/oom_score_adj").write_text("1000")
        self.records = Receiver(records)
        self._log = _Log(options["lines"], shown=not options["remedy"])
        os.set_blocking(self._log_end, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(records, selectors.EVENT_READ)
        self._selector.register(self._log_end, selectors.EVENT_READ)

    def _prepare(self, private):
        """In the new process, before Python begins there."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        with contextlib.suppress(OSError, AttributeError):  # Linux alone has it
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        with contextlib.suppress(OSError, ValueError):
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            limit = private if hard == resource.RLIM_INFINITY else min(private, hard)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

    def read(self, seconds):
        """What comes within `seconds`: yields ("record", record, arrays), ("log", bytes). Raises Garbled."""
        if not self._selector.get_map():
            time.sleep(seconds)
        for key, _ in self._selector.select(seconds) if self._selector.get_map() else ():
            if key.fileobj == self.records.descriptor:
                for record, arrays in self.records.read():
                    yield "record", record, arrays
                if not self.records.open:
                    self._selector.unregister(self.records.descriptor)
            elif block := os.read(self._log_end, 1 << 16):
                yield "log", self._log.take(block), None
            else:
                self._selector.unregister(self._log_end)

    def pass_on_signals(self):
        """Hand over what was sent to this process, as a script run by itself would have got it.

        A terminal sends its signals to the script and its children as well; what somebody sends to the doctor alone goes to
        all of them, as the terminal would do it.
        """
        while (got := signal.sigtimedwait(_PASSED_ON, 0)) is not None:
            if got.si_code == _BY_A_PERSON:
                continue
            family = [psutil.Process(self.process.pid)] if self.process.poll() is None else []
            with contextlib.suppress(psutil.Error):
                family += family[0].children(recursive=True) if got.si_signo == signal.SIGINT and family else []
            for process in family:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(got.si_signo)

    def gone(self):
        """The exit status, as Popen gives it, once the process has ended; None before."""
        return self.process.poll()

    def kill(self):
        """End the process and all that it started."""
        end_children(self.process.pid)
        self.process.kill()
        self.process.wait()

    def log(self):
        """What its compiled code printed."""
        return self._log.text()

    def last_words(self):
        """What Python wrote when compiled code crashed (faulthandler)."""
        self._crash.seek(0)
        return self._crash.read().decode(errors="replace")

    def end(self):
        """Close the pipes; a script that still runs is ended."""
        if self.process.poll() is None:
            self.kill()
        self._selector.close()
        os.close(self.records.descriptor)
        os.close(self._log_end)
        self._crash.close()
        self.pass_on_signals()  # an interrupt that came with the script's end is not for the report
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


class _Log:
    """What compiled code of a script prints to standard error: kept, and passed on but for the allocator's dumps."""

    def __init__(self, lines, shown=True):
        self._lines, self._passes_on = lines, shown  # whether lines are recorded; whether anything is passed on
        self._level, self._rest, self._passing = None, b"", True
        self._kept, self._size = deque(), 0

    def take(self, block):
        """Pass a block on; gives it as text."""
        *lines, self._rest = (self._rest + block).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:  # an error may have the text of an array in it
            lines, self._rest = [*lines, self._rest], b""
        if self._level is None and lines:
            level = lines.pop(0)
            self._level = int(level) if level.isdigit() else 0
        self._kept.append(block)
        self._size += len(block)
        while self._size > _LOG_BYTES:
            self._size -= len(self._kept.popleft())
        shown = b"".join(line + b"\n" for line in lines if self._shown(line) and self._passes_on)
        with contextlib.suppress(OSError):  # nobody may be there any more to read it
            os.write(2, shown)
        return block.decode(errors="replace")

    def _shown(self, line):
        """Whether a line would have been printed without the doctor."""
        if _ASKED in line or (self._lines and _RECORDS in line):
            return False
        if any(mark in line for mark in _DUMP):
            self._passing = False
        elif found := _LOGGED.match(line):
            level = b"IWEF".index(found[1] or found[2])
            self._passing = level >= self._level or any(file in line for file in _AT_ONCE)
        elif not _FOLLOWS.match(line):
            self._passing = True
        return self._passing

    def text(self):
        return b"".join(self._kept).decode(errors="replace")


class _Idleness:
    """Tells when a process has computed nothing for a while: it may wait for memory, of which nothing is logged before."""

    def __init__(self, process):
        self._process, self._looked = process, 0.0
        self._busy, self._used = time.monotonic(), 0.0  # when it last was, and its processor seconds then

    def seconds(self, now):
        """Seconds for which it has computed nothing, with no children either."""
        if now - self._looked > _IDLE_LOOK:
            self._looked = now
            with contextlib.suppress(psutil.Error):
                times = self._process.cpu_times()
                computed = times.user + times.system - self._used > _IDLE_SHARE * (now - self._busy)
                if computed or self._process.children():  # for which it may wait
                    self._busy, self._used = now, times.user + times.system
        return now - self._busy


class ScriptWatch(Watch):
    """Follows a script to its very end, whatever it does to itself meanwhile."""

    def __init__(self, script, result, watcher, allowed):
        super().__init__(script, result, watcher, allowed, float("inf"))
        self._ended = None  # the End record
        self._children = Children(script.process.pid)
        self.start = Start(time.monotonic(), 0, "", script.process.pid)
        self.process = psutil.Process(script.process.pid)
        self._idle = _Idleness(self.process)

    def note(self, record):
        if isinstance(record, Start):  # what TensorFlow took for itself is known only now
            self.result.process.clear()
        super().note(record)

    def follow(self):
        result, script = self.result, self.child
        while (code := script.gone()) is None:
            self._hear(SAMPLE_SECONDS)
            script.pass_on_signals()
            now = time.monotonic()
            grown = self.grown(now, now - self.start.zero)
            if result.facts is not None and result.facts.steps:  # what prepares data before is no worker of a training
                self._children.look()
            if grown > self.most:
                script.kill()
                why = f"it was ended: with its children it grew by {mib(grown)}, more than its budgets allow"
                result.error = ArmError(Cause.WATCH, why)
            self.watcher.update(result, now - self.start.zero, True)
            if result.facts is not None and self._idle.seconds(now) > _IDLE_SECONDS:
                self.watcher.waits()
        result.seconds = time.monotonic() - self.start.zero
        self._hear(0)
        self.listen("\n")
        result.status, result.offspring = code, self._children.seen
        if self._ended is not None:
            result.figures.update(self._ended.figures)
        if result.error is None and code != 0:
            result.error = self._why(code)
        if result.error is not None:
            result.error.log = script.log()

    def _hear(self, seconds):
        """Take what comes; in no time, all that is in the pipes."""
        try:
            while True:
                found = list(self.child.read(seconds))
                for kind, what, _ in found:
                    if kind == "log":
                        self.listen(what)
                    elif isinstance(what, End):
                        self._ended = what
                    else:
                        self.note(what)
                if seconds or not found:
                    return
        except Garbled:  # the script wrote into a descriptor that it did not open: what came before is known
            pass

    def _why(self, code):
        """The ArmError of a script that did not end with status 0."""
        raised = self._ended.raised if self._ended else None
        if raised is not None and raised.type == "KeyboardInterrupt":
            return ArmError(Cause.STOPPED, "it was interrupted; this is what was seen until then")
        if raised is not None and code == 1:
            return told(raised, self.child.log(), self.result)
        if code == -signal.SIGINT:
            return ArmError(Cause.STOPPED, "it was interrupted; this is what was seen until then")
        if code > 0:
            return ArmError(Cause.EXIT, f"it ended with exit status {code}")
        error = self.death(code)
        if error.cause is Cause.KILLED:
            error.message = f"its process was ended by {signal.Signals(-code).name}, by itself or by somebody else"
        return error
