"""From a recorded trace to blocks: what was allocated when, for how long, by which operation, line, layer and pass.

Pure functions over what a Recording saw; times are picoseconds, sizes bytes.
"""

import re
from dataclasses import dataclass, field

_LIVE_FOREVER = 2**63
# Of a trace's events those that say something of an allocation: our marks, what runs an operation ("dense/Relu:Relu" is one
# of a graph), and pipelines.
_TELLS = re.compile(
    r"Memory(Allocation|Deallocation)$|(line|back|poll|layer|tape|backward|phase|end) |(update|FunctionRun|tf\.constant)$"
    r"|EagerLocalExecute|ExecutorState|Iterator|MakeIterator|PrefetchProduce|MapAndBatch|InstantiatedCaptured|[^:]+:\w+$"
)
_TYPES = {
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    5: "int16",
    6: "int8",
    7: "string",
    9: "int64",
    10: "bool",
}
_TYPES |= {14: "bfloat16", 17: "uint16", 19: "float16", 20: "resource", 21: "variant"}  # framework/types.proto


@dataclass(slots=True, eq=False)
class Span:
    """A stretch of one thread's time with a name; outer: the one around it."""

    name: str
    start: int
    end: int
    outer: "Span | None" = None

    @property
    def is_call(self):
        """Whether this is Python's call of a graph."""
        return self.name.startswith("EagerLocalExecute: __")

    def within(self, *beginnings):
        """The nearest span, this one or one around it, whose name begins so; None if there is none."""
        span = self
        while span is not None and not span.name.startswith(beginnings):
            span = span.outer
        return span


@dataclass(slots=True, eq=False)
class Block:
    """A piece of memory from its allocation to its release. span: the nearest around its allocation; line: number or None;
    line_end: when that line was left; level: in use by the allocator's own count, with this block. variable: the Seen of a
    Recording that lies in it, noticed first at the time `seen`.
    """

    start: int
    size: int
    level: int
    operation: str
    shape: str
    dtype: str
    thread: str
    python: bool
    span: Span | None
    line: int | None
    line_end: int
    end: int = _LIVE_FOREVER
    variable: object | None = None
    seen: int = 0


@dataclass
class Thread:
    name: str
    spans: list = field(default_factory=list)
    memory: list = field(default_factory=list)  # (time, whether it begins, its stats, nearest span)
    # (time, kind, number): "line" where one begins, "back" where a function returns to it, "poll", "phase", "end".
    lines: list = field(default_factory=list)


def threads(space):
    """The Threads of a serialized XSpace."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    found, planes = [], xplane_pb2.XSpace.FromString(space).planes
    for plane in planes:
        names = {number: entry.name for number, entry in plane.event_metadata.items() if _TELLS.match(entry.name)}
        words = {number: entry.name for number, entry in plane.stat_metadata.items()}
        for line in plane.lines:
            thread = Thread(line.name)
            base, outer = line.timestamp_ns * 1000, None
            telling = [event for event in line.events if event.metadata_id in names]
            for event in sorted(telling, key=lambda event: (event.offset_ps, -event.duration_ps)):
                name, start = names[event.metadata_id], base + event.offset_ps
                while outer is not None and outer.end < start:
                    outer = outer.outer
                if name in ("MemoryAllocation", "MemoryDeallocation"):
                    thread.memory.append((start, name == "MemoryAllocation", _stats(event, words), outer))
                elif name.startswith(("line ", "back ", "poll ", "phase ", "end ")):
                    kind, number = name.split()
                    thread.lines.append((start, kind, int(number)))
                elif event.duration_ps:
                    outer = Span(name, start, start + event.duration_ps, outer)
                    thread.spans.append(outer)
            found.append(thread)
    return found


def _stats(event, words):
    """{name: value} of what an event says of itself; words: the texts of its plane by their numbers."""
    found = {}
    for stat in event.stats:
        kind = stat.WhichOneof("value")
        value = getattr(stat, kind)
        found[words[stat.metadata_id]] = words.get(value, "") if kind == "ref_value" else value
    return found


def blocks(found, polls=(), ended=True):
    """[Block] of the allocator that handed out most, in the order of their begin. polls: those of a Recording.

    ended: whether the script came to its end; where it was cut short, what was alive at the last allocation has outlived
    the line that made it as far as anybody can tell.
    """
    lines = [_lines(thread) for thread in found]
    first = min(filter(None, lines), default=[])  # of the main thread, for threads that run nothing of the script
    events = []
    for thread, own in zip(found, lines):
        events += [(time, begins, stats, span, thread, own or first) for time, begins, stats, span in thread.memory]
    events.sort(key=lambda event: event[0])
    main = _busiest(events)
    last = _LIVE_FOREVER if ended else max((time for time, begins, *_ in events if begins), default=0)
    alive, made, cursors = {}, [], {}
    marks = sorted((time, number) for t in found for time, kind, number in t.lines if kind == "poll")
    for time, begins, stats, span, thread, own in events:
        if stats["allocator_name"] != main:
            continue
        while marks and marks[0][0] <= time:
            _see(alive, polls, *marks.pop(0))
        address = stats["addr"]
        if not begins:
            block = alive.get(address)
            if block is not None and block.size == stats["allocation_bytes"]:
                alive.pop(address).end = time
            continue
        if address in alive:
            alive.pop(address).end = time
        cursor = cursors.get(id(own), 0)
        while cursor < len(own) and own[cursor][0] <= time:
            cursor += 1
        cursors[id(own)] = cursor
        # A thread is named after its program, which may be called python3.11; what marks lines runs Python.
        python = bool(thread.lines) or thread.name.startswith("python")
        block = alive[address] = Block(
            time,
            stats["allocation_bytes"],
            stats["bytes_allocated"],
            stats.get("tf_op", ""),
            stats.get("shape", ""),
            _TYPES.get(stats.get("data_type"), ""),
            thread.name,
            python,
            span,
            own[cursor - 1][1] if cursor else None,
            own[cursor][0] if cursor < len(own) else last,
        )
        made.append(block)
    for mark in marks:
        _see(alive, polls, *mark)
    return made


def _lines(thread):
    """[(time, number)] of marks of lines."""
    return sorted((time, number) for time, kind, number in thread.lines if kind in ("line", "back"))


def _busiest(events):
    sizes = {}
    for _, begins, stats, *_ in events:
        if begins:
            sizes[stats["allocator_name"]] = sizes.get(stats["allocator_name"], 0) + stats["allocation_bytes"]
    return max(sizes, key=sizes.get, default=None)


def _see(alive, polls, time, number):
    """Variables were seen at these addresses."""
    if number < len(polls):
        for address, variable in polls[number].items():
            if address in alive:
                block = alive[address]
                block.seen = block.seen if block.variable is not None else time
                block.variable = variable
