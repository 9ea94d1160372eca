"""In an arm: run a function while its allocations are recorded, and tell who held memory at its worst moment."""

import contextlib
import signal
import threading
from collections import defaultdict

from labsupport.peak.kinds import Kinds, forward_name, in_graph, operation
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
    import tensorflow as tf

    from labsupport.ground import meter

    recording = Recording(tf)
    with recording, contextlib.suppress(_Enough, Exception), _ending_at(enough, meter.active):
        function(*args)
    return taken_apart(recording, limit)


@contextlib.contextmanager
def _ending_at(level, gauge):
    """Let the main thread raise _Enough soon after `level` bytes were in use."""
    over = threading.Event()

    def enough(*_):
        if not over.is_set():
            over.set()
            raise _Enough

    def watch():
        while not over.wait(_LOOK_SECONDS):
            if (gauge.tensors_peak() or 0) >= level:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
                return

    if level is not None:
        signal.signal(signal.SIGUSR1, enough)
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def taken_apart(recording, limit):
    """Plain data on what a Recording saw at the worst moment."""
    found = threads(recording.space)
    made = blocks(found, recording.polls)
    if not made:
        return {"peak": [], "asked": None, "level": 0}
    beyond = next((block for block in made if limit is not None and block.level > limit), None)
    worst = beyond or max(made, key=lambda block: block.level)
    kinds = Kinds(found, made, recording)
    rows = defaultdict(lambda: [0, 0])
    for block in made:
        if block.start <= worst.start < block.end and block is not beyond:
            entry = rows[kinds.of(block), *_who(block, recording)]
            entry[0] += block.size
            entry[1] += 1
    return {
        "peak": [[*key, *entry] for key, entry in rows.items()],
        "asked": [kinds.of(beyond), *_who(beyond, recording), beyond.size, 1] if beyond else None,
        "level": worst.level - (beyond.size if beyond else 0),
    }


def _who(block, recording):
    """(file, line, layer, operation, shape, dtype) of a block; line 0 and "" for what is not known."""
    name, line, layer = operation(block), block.line, ""
    if block.variable is not None:
        name, line = block.variable.name, block.variable.line
        layer = name.rpartition("/")[0]
    elif in_graph(block):
        noted = recording.graph.get(name) or (None, "")
        line = line if noted[0] is None else noted[0]
        layer = noted[1] or recording.graph.get(forward_name(name), (None, ""))[1]
    elif block.span is not None and (span := block.span.within("layer ")):
        layer = span.name.removeprefix("layer ")
    file, number = recording.lines[line] if line is not None else ("", 0)
    return file, number, layer, name, block.shape, block.dtype
