"""What a block of memory was for, from what the run itself says; what it does not say is "unknown".

Pure functions over Blocks and Spans (trace.py).
"""

import re
from bisect import bisect
from dataclasses import replace

from labsupport.peak.trace import Block

# Activations are kept for the way back; working memory is gone when its operation or the way back is done; what the
# script holds outlives the line that made it; input comes from arrays or pipelines.
KINDS = (
    "weights",
    "optimizer slots",
    "other variables",
    "gradients",
    "activations",
    "working memory",
    "held by the script",
    "input",
    "unknown",
)
WEIGHTS, SLOTS, OTHER, GRADIENTS, ACTIVATIONS, WORKING, HELD, INPUT, UNKNOWN = KINDS
VARIABLES = WEIGHTS, SLOTS, OTHER
_PIPELINE = ("Iterator", "MakeIterator", "tf_data", "PrefetchProduce", "MapAndBatch", "InstantiatedCapturedFunction")
_FROM_ARRAYS = ("tf.constant", "_EagerConst", "IteratorGetNext")  # what takes numbers in from outside
_CALLED = re.compile(
    r"^(?:(?:Stateful)?PartitionedCall(?:_\d+)?/)+"
)  # in front of a name, where one graph calls another
_LOWERED = re.compile(
    r"^.*?/(?:body|cond|then|else|branch\d+)/_\d+/"
)  # of a loop or a branch, in front of its own names
_BACKWARD = re.compile(r"(^|/)(gradient_tape|gradients)(_\d+)?/")
_FOLDED = re.compile(r"(/_\d+__cf__\d+|-\d+-\w+Optimizer(-\w+)*)$")  # what Grappler puts behind a name
_KERNEL = re.compile(r"([^:]+):\w+$")


def operation(block):
    """The name of the operation: of a graph's node with its path, of an eager one its type; "" if nothing tells."""
    if block.operation:
        name = _FOLDED.sub("", _CALLED.sub("", block.operation))
        while inner := _LOWERED.match(name):
            name = name[inner.end() :]
        return name
    span = block.span
    while span is not None:
        if found := _KERNEL.match(span.name):
            return _CALLED.sub("", found[1])
        if span.name.startswith(("MakeIterator", "Iterator::", "tf.constant")):
            return span.name
        span = span.outer
    return "tf.data" if block.thread.startswith("tf_data") else ""


def written(shape):
    """A shape as a trace writes it; "" for one that is not known."""
    return "" if shape is None else str(list(shape)).replace(" ", "")


def in_graph(block):
    """Whether an operation of a graph asked for this block."""
    if "/" in block.operation or not block.python:
        return True
    return block.span is not None and block.span.within("ExecutorState", "FunctionRun") is not None


def forward_name(name):
    """Of an operation of the way back, the name of the operation whose gradient it computes; any other name as it is."""
    return _BACKWARD.sub(r"\1", name).rpartition("/")[0] if _BACKWARD.search(name) else name


def _moves(made):
    """{id of a Block: (from when, until when) a variable lay in it}, for variables that have moved while the old block lived."""
    places, moved = {}, {}
    for block in made:
        if block.variable is not None:
            places.setdefault((block.variable.key, block.variable.name), []).append(block)
    for blocks in places.values():
        for old, new in zip(blocks, blocks[1:]):
            if old.end > new.start:
                # It is seen there some time later; with the line that made its new value it has been given that.
                since = max(min(old.end, new.seen, new.line_end), new.start)
                moved[id(old)] = moved.get(id(old), (old.start, 0))[0], since
                moved[id(new)] = since, new.end
    return moved


def _tapes(span):
    """The tapes around a span, the nearest first."""
    while span is not None and (span := span.within("tape")) is not None:
        yield span
        span = span.outer


def _tape(span):
    """What is common to the spans of a tape and of its ways back."""
    return span.name.split()[-1] if span.name.count(" ") == (2 if span.name.startswith("backward ") else 1) else ""


class Kinds:
    """Tells the kind of each Block. found: the Threads; made: all Blocks; recording: the Recording that they come from."""

    def __init__(self, found, made, recording):
        self._updates = tuple(f"{name}/" for name in recording.optimizers) or ("\0",)
        self._learnt = recording.learnt
        seen = [variable for poll in recording.polls for variable in poll.values()]
        self._shapes = {written(one.shape) for one in seen if one.shape and one.trainable}
        spans = [span for thread in found for span in thread.spans]
        self._ways_back = {}  # of each tape the spans of its ways back; names are "tape 7", "backward 4 7"
        for span in sorted(spans, key=lambda span: span.start):
            if span.name.startswith("backward "):
                self._ways_back.setdefault(_tape(span), []).append(span)
        self._cut = recording.cut
        python = [span for thread in found if thread.lines for span in thread.spans if span.is_call]
        self._calls = sorted(python, key=lambda span: span.start)
        self._background = len(python) < sum(
            span.is_call for span in spans
        )  # DTensor calls its graphs in other threads
        self._begins = [span.start for span in self._calls]
        self._moved = _moves(made)
        graph = [block for block in made if in_graph(block) and _BACKWARD.search(operation(block))]
        self._graph_back = sorted(block.start for block in graph)
        # A graph that learns, and died before its way back: what it held then, it had kept for that.
        died = recording.failed and any(map(_BACKWARD.search, recording.graph))
        self._died_at = max(made, key=lambda block: block.level).start if died and made else None

    def of(self, block: Block):
        if block.variable is not None:
            return self._of_variable(block.variable)
        span = block.span
        if block.thread.startswith("tf_data") or operation(block).startswith(_PIPELINE):
            return INPUT
        if span is not None and span.within(*_PIPELINE):
            return INPUT
        if in_graph(block):
            return self._in_graph(block)
        if span is None:
            return UNKNOWN
        if back := span.within("backward "):
            # Where an error ended it, what was on its way is alive, too.
            passing = back.name in self._cut and block.shape not in self._shapes
            if block.end <= back.end or passing:
                return WORKING
            # Within another tape it is recorded, for a way back through this one.
            around = [tape for tape in _tapes(back) if _tape(tape) != _tape(back)]
            return ACTIVATIONS if around and block.shape not in self._shapes else GRADIENTS
        if span.within("update") or block.end <= block.line_end:
            return WORKING
        if operation(block) in _FROM_ARRAYS:
            return INPUT
        return ACTIVATIONS if self._for_a_way_back(block, span) else HELD

    def over_time(self, block: Block):
        """[(Block, kind)]: one pair for most, more for a block whose kind changes with time.

        An activation that outlives the ways back of its tapes is held by the script from then on. What a variable is given
        as its new value was working memory before; what still holds its old value then is the script.
        """
        kind = self.of(block)
        if block.variable is not None:
            begin, end = self._moved.get(id(block), (block.start, block.end))
            times = [(block.start, begin, WORKING), (begin, end, kind), (end, block.end, HELD)]
            return [(replace(block, start=since, end=until), one) for since, until, one in times if since < until]
        if kind != ACTIVATIONS:
            return [(block, kind)]
        span = block.span if not in_graph(block) else self._call(block)
        after = max((back.end for tape in _tapes(span) for back in self._ways_back.get(_tape(tape), ())), default=None)
        if after is None or not block.start < after < block.end:
            return [(block, kind)]
        return [(replace(block, end=after), kind), (replace(block, start=after), HELD)]

    def _of_variable(self, seen):
        if seen.maker == "optimizer":
            return SLOTS
        # Of a script's own variables those count that a gradient is asked for, and before any is, those that can be learnt.
        learnt = seen.maker == "Keras" or seen.name in self._learnt or not self._learnt
        return WEIGHTS if seen.trainable and learnt else OTHER

    def _for_a_way_back(self, block, span):
        """Whether a tape around `span` has, while the block is alive, begun its way back, or had not by the end of the recording."""
        for tape in _tapes(span):
            later = [back.start for back in self._ways_back.get(_tape(tape), ()) if back.end > block.start]
            if not later or block.end > later[0]:
                return True
        return False

    def _in_graph(self, block):
        name = operation(block)
        if not name:
            return UNKNOWN
        if name.startswith(self._updates):
            return WORKING
        if _BACKWARD.search(name):
            return GRADIENTS if block.shape in self._shapes else WORKING
        if (call := self._call(block)) is None and self._background:
            return UNKNOWN  # where a call ends, and so what it leaves, cannot be seen
        if call is not None and block.end > call.end:  # returned, or assigned
            return ACTIVATIONS if self._for_a_way_back(block, call) else HELD
        later = bisect(self._graph_back, block.start)
        if later < len(self._graph_back):
            return ACTIVATIONS if block.end > self._graph_back[later] else WORKING
        at_death = self._died_at is not None and block.start <= self._died_at < block.end
        return ACTIVATIONS if at_death else WORKING

    def _call(self, block):
        """Python's call of the graph that asked for a block, or None."""
        place = bisect(self._begins, block.start) - 1
        return self._calls[place] if place >= 0 and block.start <= self._calls[place].end else None
