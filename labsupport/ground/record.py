"""One record of a run: everything that an arm's process tells its watcher, and what draws it meanwhile.

Both sides import this file. A record crosses the pipe as msgpack, which holds data and no code; what does not have
these shapes is refused there (msgspec). Sizes are bytes over the level at the arm's start, unless a name ends in _mib;
None is "unavailable". Seconds count from the arm's start.
"""

from enum import StrEnum
from typing import Any, Protocol

from msgspec import Struct, field

from labsupport.ground.budget import in_mib


class Cause(StrEnum):
    """Why an arm did not return a value."""

    OOM = "oom"  # TensorFlow's allocator had no room: a ResourceExhaustedError
    MEMORY = "memory"  # Python, NumPy or compiled code had none outside of it
    CRASH_OUT = "crash after running out"  # compiled code crashed when TensorFlow's allocator had just run out
    CRASH = "crash"  # compiled code crashed
    SYSTEM = "ended for memory"  # the system's out-of-memory killer, by its own count
    WATCH = "grew too large"  # labsupport's own watch on the process and its children
    KILLED = "killed"  # a signal from outside, by somebody
    EXIT = "exit"  # the process ended itself before it could report
    ERROR = "error"  # any other exception
    SETUP = "not started"  # the function or its arguments could not be read in the arm's process
    NO_VALUE = "no value"  # what it returned cannot come back
    GARBLED = "garbled"  # somebody else wrote into the pipe of the records
    TIMEOUT = "timeout"
    STOPPED = "stopped"

    @property
    def of_memory(self):
        """Whether memory ran out."""
        return self in (Cause.OOM, Cause.MEMORY, Cause.CRASH_OUT, Cause.SYSTEM, Cause.WATCH)


_MOST_TEXT = 100_000  # characters; TensorFlow's longest errors, with the nodes of a graph, have some thousands


def sendable(text):
    """Text as a record can hold it: surrogates, which UTF-8 has no bytes for, as \\ud800, and not endless."""
    return str(text)[:_MOST_TEXT].encode("utf-8", "backslashreplace").decode()


# --- from every arm, in this order


class Start(Struct, tag=True, frozen=True):
    """The function begins. zero: time.monotonic() then; pid: its process; process_zero: its resident set."""

    zero: float
    process_zero: int
    device: str
    pid: int


class Sample(Struct, tag=True, frozen=True):
    """Bytes handed out by TensorFlow's allocator at one moment."""

    seconds: float
    tensors: int


class PhaseBegun(Struct, tag=True, frozen=True):
    name: str
    seconds: float


class Phase(Struct, tag=True, frozen=True):
    """A finished `with phase(name):` block. level, peak, held: in use when it began, at most within it, and when it ended."""

    name: str
    start: float
    end: float
    level: int | None = None
    peak: int | None = None
    held: int | None = None

    @property
    def level_mib(self):
        """Tensor memory in use when the block began, MiB."""
        return in_mib(self.level)

    @property
    def peak_mib(self):
        """Most tensor memory in use within the block, MiB."""
        return in_mib(self.peak)

    @property
    def held_mib(self):
        """Tensor memory in use when the block ended, MiB."""
        return in_mib(self.held)

    @property
    def rise_mib(self):
        """What the block added at its worst moment: its peak over the level at which it began, MiB."""
        return None if self.peak is None else in_mib(self.peak - self.level)

    @property
    def added_mib(self):
        """What the block left behind: in use at its end over the level at which it began, MiB."""
        return None if self.held is None else in_mib(self.held - self.level)


class Frame(Struct, frozen=True):
    """A place in a traceback."""

    file: str
    line: int
    scope: str


class Raised(Struct, frozen=True):
    """An exception: cause is ERROR, OOM, MEMORY, SETUP or NO_VALUE; frames outermost first."""

    cause: Cause
    type: str
    message: str
    frames: list[Frame] = []


class End(Struct, tag=True, frozen=True):
    """The function has returned or raised. value: see values.py; buffers: bytes of each array, which follow in this order."""

    seconds: float | None
    figures: dict[str, int | None]
    raised: Raised | None = None
    value: Any = None
    buffers: list[int] = []


# --- from the doctor's probes


def in_words(place, called=False):
    """A line of the script as a text tells it, or one that `called` what is meant; "a library" in place of "", where none is known."""
    return "called at " * called + (place or "a library")


class Kind(StrEnum):
    """What a step is, or an interval between steps."""

    FUNCTION = "tf.function"
    EVALUATION = "evaluate(), tf.function"  # fit()'s validation included
    TAPE = "GradientTape"
    SESSION = "Session.run"
    ANSWER = "call of a model or layer"  # without a graph or a tape: counts as a step, and is no interval
    LOOP = "loop over batches"  # in which nothing else is a step
    BATCH = "a batch"
    ITERATOR = "an iterator"  # while tf.data makes one: it copies the tensors of its data set

    @property
    def of_input(self):
        """Whether it only prepares, or asks: what it holds is no training step's."""
        return self in (Kind.ANSWER, Kind.LOOP, Kind.BATCH, Kind.ITERATOR)


class Step(Struct):
    """Calls of one kind at one place. place: the line, or "" where it is a library's; levels: [(number, bytes in use before it)], thinned to every `every`-th; rise: the most that one added for its duration."""

    name: str
    kind: Kind
    place: str = ""
    count: int = 0
    levels: list[tuple[int, int]] = field(default_factory=list)
    rise: int = 0
    every: int = 1


class Function(Struct):
    """A tf.function. place: of its definition, or where it was `called` first, if that is a library's. instances: how often tf.function was applied to it; compiled: whether by XLA; tapes: how many were opened
    while it was traced. traced_at: numbers of the calls that traced; changing: the argument that made it trace. shapes: how
    many different shapes its arguments had where it traced, and in any call where XLA compiles it, 0 where they are not
    known; shaped_at: numbers of the calls that brought a new one.
    """

    name: str
    place: str
    own: bool
    called: bool = False
    calls: int = 0
    traces: int = 0
    traced_at: list[int] = field(default_factory=list)
    changing: str = ""
    instances: int = 0
    compiled: bool = False
    shapes: int = 0
    shaped_at: list[int] = field(default_factory=list)
    tapes: int = 0

    @property
    def at(self):
        """Its place as a text tells it."""
        return in_words(self.place, self.called)


class Converted(Struct):
    """Arrays copied into tensors, or into constants of graphs: all their bytes, the largest and where; now: bytes of one whose copy has begun and not ended."""

    bytes: int = 0
    largest: int = 0
    place: str = ""
    now: int = 0


class Holder(Struct, frozen=True):
    """A name of the script, how many tensors or arrays it holds, and their bytes; place: the one line that puts things into it; bounded: bytes in a deque with a maxlen; of_data_sets: bytes that data sets were made of."""

    name: str
    number: int
    size: int
    place: str = ""
    bounded: int = 0
    of_data_sets: int = 0


class Model(Struct, frozen=True):
    """A Keras model that is alive, and the bytes of its variables."""

    name: str
    size: int


class Buffer(Struct, frozen=True):
    """A stage of a pipeline, and the most bytes and elements that it was seen to buffer. cache: whether it is one in memory; endless: such a one behind repeat(), which never ends its first pass; place: its line."""

    size: int
    name: str
    elements: int
    cache: bool = False
    endless: bool = False
    place: str = ""


class Census(Struct, frozen=True):
    """What was alive after a number of steps, in bytes by kind; level: the allocator's own figure then, peak: its highest so far.

    containers: names with most objects in lists, dicts and sets, of which only the number is known; process: its resident set;
    largest: of its variables; float64: of those that have eight bytes a number; extra: whether it was taken because tensors had grown, and not in its turn; held: memory behind all handles of variables, also of those that Python has let go of; replicas: copies of variables
    on other devices; operations: of all graphs together; garbage: of tensors that only waited for the collector, where it
    was asked; models_met: how many models were seen alive so far; model_holders: names that lead to models, with the bytes of all
    variables behind them.
    """

    step: int
    level: int | None
    weights: int = 0
    slots: int = 0
    other_variables: int = 0
    held: int = 0
    replicas: int = 0
    tensors: int = 0
    arrays: int = 0
    buffers: int = 0
    iterators: int = 0
    operations: int = 0
    garbage: int = 0
    models_met: int = 0
    models: list[Model] = []
    tensor_holders: list[Holder] = []
    array_holders: list[Holder] = []
    model_holders: list[Holder] = []
    largest: int = 0
    float64: int = 0
    extra: bool = False
    peak: int | None = None
    containers: list[Holder] = []
    process: int | None = None


class Interval(Struct, frozen=True):
    """What ran. name, kind, place: as of a Step; level: in use at its begin; peak: at most within it, where it ended by an exception."""

    name: str
    kind: Kind
    level: int | None
    peak: int | None = None
    place: str = ""


class Failing(Struct, frozen=True):
    """What was looked up when a step had failed. uses: about how often each weight was used under its tape; loop: the line of the loop that ran under it; given: shapes of what the step was given; weights: shapes of variables; wanted: the shape that found no room; made_at: the line where its graph first makes a tensor of that shape."""

    uses: int = 0
    loop: str = ""
    given: list[list[int]] = []
    weights: list[list[int]] = []
    made_at: str = ""
    wanted: list[int] = []


class Facts(Struct, tag=True):
    """All that the probes have seen so far; each replaces the one before.

    passes: bytes in use at the begin of the second and of the last pass over a data set; passed_at: the line that began the
    last one; open: what runs now; failed: what
    ran when an exception began; made: lines by what they make ("model", "optimizer", "process") or ask for ("recomputation", "clear_session"), and as "not layers" names in a RematScope that no layer called in it has;
    recomputed: calls of functions that recompute on the way back; in_tape: the most batches that were drawn while one tape was open; baked: of arrays that became constants of graphs; ignored: settings that came too late; holders: texts on the lines that held most at the peak,
    or on why none are known, where they were asked for; uncollected: whether Python's collector was off at a census; cycles: the
    class or function of the script's that most of the garbage at the end was of, where that was asked; segments: the most functions that recompute in one graph or one step; unseen: what ran here and holds memory that no probe sees.
    """

    steps: list[Step] = []
    passes: list[int | None] = []
    number_of_passes: int = 0
    passed_at: str = ""
    functions: list[Function] = []
    converted: Converted = field(default_factory=Converted)
    baked: Converted = field(default_factory=Converted)
    buffers: list[Buffer] = []
    censuses: list[Census] = []
    open: Interval | None = None
    failed: Interval | None = None
    failing: Failing = Failing()
    made: dict[str, str] = {}
    recomputed: int = 0
    segments: int = 0
    uncollected: bool = False
    cycles: Holder | None = None
    in_tape: int = 0
    ignored: list[str] = []
    holders: list[str] = []
    unseen: list[str] = []


Record = Start | Sample | PhaseBegun | Phase | Facts | End


class Watcher(Protocol):
    """What draws while an arm runs, or only waits."""

    stopped: bool = False  # True when somebody asked to end the run; looked at every few hundredths of a second

    def hear(self, stream: str, text: str) -> None:
        """What the arm writes, as it comes; stream is "stdout" or "stderr"."""

    def wait(self, label: str, place: int) -> None:
        """The arm stands in the machine's line (line.py), first where place is 1; several times a second, before any update."""

    def update(self, result, elapsed: float, started: bool) -> None:
        """The unfinished ArmResult, many times a second; before `started` only Python and TensorFlow load."""

    def waits(self) -> None:
        """A script that the doctor examines has loaded TensorFlow and computes nothing; often while that lasts."""

    def finish(self, result) -> None:
        """The finished ArmResult, once. Nothing is called after it."""

    def abandon(self) -> None:
        """The run was interrupted; there is no result. Nothing is called after it."""
