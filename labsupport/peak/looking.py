"""In an arm: run a function while its allocations are recorded, and tell who held memory: at its worst moment, over time, at its end."""

import contextlib
import gc
import signal
import threading
from collections import defaultdict

from labsupport.peak.kinds import VARIABLES, Kinds, forward_name, in_graph, operation, written
from labsupport.peak.over_time import TURNS, curve, growth, moments
from labsupport.peak.recording import Recording
from labsupport.peak.trace import blocks, threads

_LOOK_SECONDS = 0.002  # between two looks at whether the limit was passed


class _Enough(BaseException):
    """The moment that is looked for has passed."""


def looked(function, args, limit, enough):
    """What function(*args) held, as plain data: see Parts.

    limit: bytes in use; the worst moment is then the first at which there were more. None: the highest moment of all.
    enough: bytes in use at which the worst moment has come: soon after it the function is ended. None: it runs to its end.
    """
    import keras  # noqa: F401  a Recording marks the calls of what is loaded
    import tensorflow as tf

    from labsupport.ground import meter

    recording, ended = Recording(tf, _end_soon), False
    with recording:
        try:
            with _ending_at(enough, meter.active):
                function(*args)
            ended = True
        except _Enough:
            pass
        except Exception:
            recording.failed = True
    gc.disable()  # what waits for the collector still counts as left at the end, as it does in an arm that is not looked at
    return taken_apart(recording, limit, ended)


def _end_soon():
    """Let the main thread raise _Enough, where it is within _ending_at()."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)


@contextlib.contextmanager
def _ending_at(level, gauge):
    """Within this _end_soon() ends what runs; it is called when `level` bytes were in use, unless that is None."""
    over = threading.Event()

    def enough(*_):
        if not over.is_set():
            over.set()
            raise _Enough

    def watch():
        while not over.wait(_LOOK_SECONDS):
            if (gauge.tensors_peak() or 0) >= level:
                _end_soon()
                return

    signal.signal(signal.SIGUSR1, enough)
    if level is not None:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def taken_apart(recording, limit, ended):
    """Plain data on what a Recording saw. ended: whether the function came to its own end, so that something is left of it."""
    found, ended = threads(recording.space), ended and not recording.window
    made = blocks(found, recording.polls, ended)
    if not made:
        nothing = {"peak": [], "asked": None, "level": 0, "curve": [], "end": [] if ended else None}
        return nothing | {"growth": ["", 0, []], "before": 0, "window": recording.window}
    kinds = Kinds(found, made, recording)
    beyond = next((place for place, block in enumerate(made) if limit is not None and block.level > limit), None)
    worst = made[beyond] if beyond is not None else max(made, key=lambda block: block.level)
    told = [pair for block in made[:beyond] for pair in kinds.over_time(block)]  # what was asked for is not held
    end = max((time for thread in found for time, kind, _ in thread.lines if kind == "end"), default=made[-1].start)
    until = end if ended else worst.start
    name, times = moments(found, recording.phases, made[0].start, until, recording.lines)
    # A loop that makes variables builds a model: only a training that comes back leaves some behind.
    built = VARIABLES if name.startswith(TURNS) else ()
    grows = [pair for pair in told if pair[1] not in built]
    grown = growth(grows, times, lambda block, kind: (kind, *_place(block, recording)))
    return {
        "peak": _rows(told, worst.start, recording),
        "asked": [kinds.of(worst), *_who(worst, recording), worst.size, 1] if beyond is not None else None,
        "level": worst.level - (worst.size if beyond is not None else 0),
        "curve": curve(told, made[0].start, until),
        "end": _rows(told, end, recording) if ended else None,
        "growth": [name, len(times), [[*key, size] for key, size in grown.items()]],
        "before": made[0].level - made[0].size,
        "window": recording.window,
    }


def _rows(told, time, recording):
    """[kind, file, line, layer, operation, shape, dtype, bytes, number] of what was alive at a time."""
    rows = defaultdict(lambda: [0, 0])
    for block, kind in told:
        if block.start <= time < block.end:
            entry = rows[kind, *_who(block, recording)]
            entry[0] += block.size
            entry[1] += 1
    return [[*key, *entry] for key, entry in rows.items()]


def _place(block, recording):
    """(file, line) of a block."""
    return _who(block, recording)[:2]


def _who(block, recording):
    """(file, line, layer, operation, shape, dtype) of a block; line 0 and "" for what is not known."""
    name, line, layer, shape = operation(block), block.line, "", block.shape
    if block.variable is not None:
        name, line = block.variable.name, block.variable.line
        shape = shape or written(block.variable.shape)
        layer = name.rpartition("/")[0]
    elif in_graph(block):
        noted = recording.graph.get(name) or (None, "")
        line = line if noted[0] is None else noted[0]
        layer = noted[1] or recording.graph.get(forward_name(name), (None, ""))[1]
    elif block.span is not None and (span := block.span.within("layer ")):
        layer = span.name.removeprefix("layer ")
    file, number = recording.lines[line] if line is not None else ("", 0)
    return file, number, layer, name, shape, block.dtype
