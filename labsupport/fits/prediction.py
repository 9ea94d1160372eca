"""A step's memory, predicted: the parts of its peak, its line over the batch, and what the figure does not know."""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from types import SimpleNamespace

from labsupport.fits.chunks import Chunks, Full
from labsupport.fits.graph import Graph, Node, Tensor
from labsupport.fits.lowered import CannotPredict
from labsupport.fits.step import Wanted, made
from labsupport.fits.traced import traced
from labsupport.fits.walk import EagerWalk, Walk, Wiring
from labsupport.ground.budget import MIB, mib, parse_size
from labsupport.peak import kinds
from labsupport.peak.parts import LEAST, Parts, Row
from labsupport.peak.recording import Seen
from labsupport.peak.trace import Block

# Two steps, since the second finds the memory as the first left it; the highest of several walks, since a run's order varies
# (data/recorded/zoo_runs.csv). Fewer walks of a large graph, so that it takes seconds: one of 10,000 operations takes about half a second.
MOST_WALKS, LEAST_WALKS, OPERATIONS, STEPS = 12, 4, 60_000, 2
# Where the budget ends, free memory is in pieces, and each step leaves others: MobileNetV2 at batch 51 took 616 MiB of 700 in its
# first step and 688 in its fifth. Walks so long tell what ends out of memory only then.
LONG = 6
# Times the batch that a straight line says, so that it is beyond what fits: the search for the largest goes on below it.
_A_LITTLE_MORE = 1.03
UNKNOWN = (
    "scratch memory of a GPU's kernels (cuDNN, cuBLAS) and of other processors' convolutions; rules are measured on a CPU with oneDNN",
    "XLA (jit_compile=True, which Keras turns on by itself on a GPU), which fuses and orders anew",
    "input pipelines (tf.data's buffers), NumPy, Python and the graphs themselves",
    "distribution strategies",
    "the few MiB that a model's making leaves behind",
)
UNKNOWN_EAGER = "what else Python names until the step ends, beside the gradients"
UNKNOWN_GRAPH = "steps run eagerly, which keep intermediates longer: predict those as eager (eager=True, --eager)"


@dataclass(repr=False)  # as the last value of a cell it is read by people
class Prediction:
    """wanted: what was predicted; rows: labsupport.peak.parts.Row of the worst moment, largest first.

    level: bytes at the worst moment, in the order of operations that takes most of those walked; lowest: in the one that takes
    least. line: {batch: bytes}; unknown: sentences, what the figure does not know.
    """

    wanted: Wanted
    rows: list
    level: int
    lowest: int
    line: dict
    unknown: list = field(default_factory=list)
    source: object = None

    @property
    def total_mib(self):
        return self.level / MIB

    @property
    def lowest_mib(self):
        return self.lowest / MIB

    @property
    def spread(self):
        """Words on what the order of operations decides."""
        if self.wanted.eager:
            return "run eagerly, in the order of its code"
        return f"{mib(self.lowest)} to {mib(self.level)}, as the order of operations falls out"

    @cached_property
    def parts(self):
        """The same as the measured side's Parts, for what draws or sums those."""
        return Parts(f"{self.wanted.name}, predicted", self.rows, None, self.level, None, [], None, "", 0, [])

    def by(self, what):
        """{value: MiB} of the rows by "kind", "layer" or "operation", largest first."""
        return self.parts.by(what)

    def at(self, batch):
        """Bytes predicted for another batch."""
        return self.source.level(batch)

    def largest(self, budget):
        """The largest batch that runs in a budget, such as "8 GiB" or bytes, by prediction; 0 if not even one example does."""
        room = parse_size(budget) if isinstance(budget, str) else budget
        return self.source.largest(room)

    def __str__(self):
        lines = [
            f"{self.wanted.name}, batch {self.wanted.batch}: {mib(self.level)} predicted at the worst moment ({self.spread})"
        ]
        lines += [f"  {kind}: {size:,.1f} MiB" for kind, size in self.by("kind").items() if size * MIB >= LEAST]
        lines += ["  by batch: " + ", ".join(f"{batch}: {mib(level)}" for batch, level in self.line.items())]
        lines += ["  not in the figure: " + "; ".join(self.unknown)]
        return "\n".join(lines)

    __repr__ = __str__


class Source:
    """The graphs of a step at two batches, from which those of any other batch follow: each dimension is a line over it."""

    def __init__(self, wanted, progress=None):
        self._wanted, self._progress = wanted, progress or (lambda text: None)
        self._traces, self._levels, self._lowest, self._within = {}, {}, {}, {}

    def walk(self, batch):
        """(the highest Walk of a batch, its Traced)."""
        graph, trace = self._graph(batch)
        self._progress(f"walking a batch of {batch}")
        best, self._lowest[batch] = walked(graph, self._wanted.eager)
        self._levels[batch] = best.peak
        return best, trace

    def level(self, batch):
        if batch not in self._levels:
            self.walk(batch)
        return self._levels[batch]

    def lowest(self, batch):
        self.level(batch)
        return self._lowest[batch]

    def within(self, batch, room, number=None):
        """Bytes of the lowest walk of a batch in a budget of `room` bytes, or of so many walks; None where one finds no memory any more."""
        if (batch, room, number) not in self._within:
            graph, _ = self._graph(batch)
            self._progress(f"walking a batch of {batch} in {mib(room)}")
            try:
                found = min(walk.peak for walk in islice(walks(graph, self._wanted.eager, LONG, room), number))
            except Full:
                found = None
            self._within[batch, room, number] = found
        return self._within[batch, room, number]

    def largest(self, room):
        """The largest batch that runs in `room` bytes in each walk, 0 if none does; sought by one of them."""
        low, high = 0, 1
        while self.within(high, room, 1):
            low, high = high, self._beyond(high, room)
        while high - low > max(1, low // 200):  # half a per cent of a batch
            middle = (low + high) // 2
            low, high = (middle, high) if self.within(middle, room, 1) else (low, middle)
        while low and not self.within(low, room):
            low -= max(1, low // 100)
        return low

    def _beyond(self, batch, room):
        """A batch that is likely just too large, from the slope so far."""
        slope = (self.level(batch) - self.level(1)) / (batch - 1) if batch > 1 else 0
        wanted = int((room - self.level(1)) / slope * _A_LITTLE_MORE) + 2 if slope > 0 else batch * 8
        return max(batch + max(1, batch // 50), min(wanted, batch * 8))

    def _trace(self, batch):
        if batch not in self._traces:
            self._progress(f"building and tracing a batch of {batch}, without memory for it")
            self._traces[batch] = traced(partial(made, self._wanted.with_batch(batch)), self._wanted.eager)
        return self._traces[batch]

    def _graph(self, batch):
        """(the Graph of a batch, a Traced that it comes from)."""
        if batch in self._traces or not self._traces:
            return self._trace(batch).graph, self._trace(batch)
        first = max(self._wanted.batch, 2)  # a dimension of 1 is broadcast, which makes another graph
        one, two = self._trace(first), self._trace(2 * first)
        between = interpolated(one.graph, two.graph, first, 2 * first, batch)
        if between is None:  # the two do not have the same operations
            return self._trace(batch).graph, self._trace(batch)
        return between, one


def walks(graph, eager, steps, *room):
    """The Walks of a Graph, in a budget of `room` bytes if that is given. eager: there is one order, that of its nodes."""
    if eager:
        yield EagerWalk(graph, Chunks(*room), steps=steps)
        return
    wiring = Wiring(graph)
    for seed in range(max(LEAST_WALKS, min(MOST_WALKS, OPERATIONS * STEPS // steps // len(graph.nodes)))):
        yield Walk(graph, Chunks(*room), seed, steps=steps, wiring=wiring)


def walked(graph, eager=False):
    """(the highest Walk of a Graph, bytes of the lowest)."""
    best, lowest = None, float("inf")
    for walk in walks(graph, eager, STEPS):
        lowest = min(lowest, walk.peak)
        best = walk if best is None or walk.peak > best.peak else best
    return best, lowest


def interpolated(one, two, first, second, batch):
    """The Graph of a batch from those of two others; None where they differ in more than sizes."""
    if [node.op for node in one.nodes] != [node.op for node in two.nodes]:
        return None
    part = (batch - first) / (second - first)
    between, bare = Graph(), {}
    for node, other in zip(one.nodes, two.nodes):
        if node.inputs != other.inputs:
            return None
        outputs = []
        for a, b in zip(node.outputs, other.outputs):
            key = (a, b)
            if key not in bare:
                bare[key] = _between(a, b, part)
            outputs.append(bare[key])
        between.values += [(len(between.nodes), tensor) for tensor in outputs]
        between.nodes.append(
            Node(node.name, node.op, node.inputs, node.after, tuple(outputs), node.first, node.attributes)
        )
    between.held, between.variables = one.held, one.variables
    between.known = one.known  # a walk asks it for orders of dimensions alone, which no batch changes
    between.returned, between.unsure, between.compiled = one.returned, one.unsure, one.compiled
    return between


def _between(one, two, part):
    if one.shape is None or two.shape is None or one.shape == two.shape or len(one.shape) != len(two.shape):
        return one
    return Tensor(tuple(max(0, round(a + (b - a) * part)) for a, b in zip(one.shape, two.shape)), one.dtype)


def predict(
    what,
    batch=32,
    *,
    input=None,
    target=None,
    optimizer=None,
    loss=None,
    training=True,
    precision=None,
    eager=False,
    progress=None,
):
    """Predict the memory of one step of a batch without allocating it; returns a Prediction.

    what: a function that builds a Keras model (compiled or not) or returns a function step(x, y); a step(x, y); a name of
    keras.applications; a .keras file. batch: a number, or several: the first is taken apart, all are in the line.
    input, target: shape of one example, or [(shape, dtype), …] for several tensors. optimizer, loss: as for compile(); the
    model's own if None. training: False for model(x) alone. precision: such as "mixed_bfloat16". eager: the step runs
    outside of any tf.function, one operation after the other.
    Raises CannotPredict, which says what to do instead.
    """
    batches = [batch] if isinstance(batch, int) else list(batch)
    shapes, targets = _shapes(input), _shapes(target)
    wanted = Wanted(what, batches[0], shapes, targets, optimizer, loss, training, precision, eager=eager)
    return predicted(wanted, batches, progress)


def predicted(wanted, batches=(), progress=None):
    """The Prediction of a Wanted. Raises CannotPredict."""
    import keras

    if keras.__version__.startswith("2."):
        raise CannotPredict(
            f"steps of Keras 3 are predicted, of TensorFlow 2.16 and later; this is Keras {keras.__version__}"
        )
    source = Source(wanted, progress)
    walk, trace = source.walk(wanted.batch)
    line = {batch: source.level(batch) for batch in batches or [wanted.batch]}
    unknown = [*UNKNOWN, UNKNOWN_EAGER if wanted.eager else UNKNOWN_GRAPH]
    if unsure := trace.graph.unsure:
        unknown.insert(0, f"{len(unsure)} operations whose shape the data decide count as nothing, {unsure[0]} first")
    if compiled := trace.graph.compiled:
        unknown.insert(
            0,
            f"{len(compiled)} calls that XLA compiles, {compiled[0]} first: walked as if it did not, but for the filters of grouped convolutions",
        )
    return Prediction(wanted, rows(walk, trace), walk.peak, source.lowest(wanted.batch), line, unknown, source)


def _shapes(given):
    """((shape, dtype), …) from a shape, or from several."""
    if given is None:
        return None
    if all(isinstance(one, int) for one in given):
        return ((tuple(given), "float32"),)
    if len(given) == 2 and isinstance(given[1], str):
        given = [given]
    return tuple((tuple(shape), dtype) for shape, dtype in given)


def rows(walk, trace):
    """[Row] of a walk's worst moment, by the rules that the measured side has for its own."""
    graph = walk.graph
    variables = list(graph.variables.values())
    seen = {id(one): Seen(one.name, one.maker, one.trainable, one.shape, None) for one in variables}
    blocks = [_block(block, graph, seen) for block in walk.blocks]
    noted = SimpleNamespace(
        optimizers=trace.optimizers,
        learnt=set(),
        polls=[dict(enumerate(seen.values()))],
        cut=set(),
        failed=False,
        graph={},
    )
    tell = kinds.Kinds([], blocks, noted)
    sums = defaultdict(lambda: [0, 0])
    held = {graph.maker(value) for value in graph.held}
    for block, made_by in zip(blocks, walk.blocks):
        if not walk.at_peak(made_by):
            continue
        kind = (
            "input"
            if made_by.node in held and made_by.variable is None
            else _kind(tell, block, graph.nodes[made_by.node])
        )
        name = kinds.operation(block) if made_by.variable is None else made_by.variable.name
        if graph.nodes[made_by.node].op == "Const":
            name = f"a constant of the graph, {name}"
        layer = name.rpartition("/")[0] if made_by.variable is not None else layer_of(name, trace.layers)
        entry = sums[kind, None, layer, name, block.shape, block.dtype]
        entry[0] += made_by.chunk
        entry[1] += 1
    return sorted((Row(*key, *entry) for key, entry in sums.items()), key=lambda row: -row.size)


def _kind(tell, block, node):
    return "held by the script" if node.op == "Const" else tell.of(block)


def _block(block, graph, seen):
    tensor = block.tensor
    shape = "" if tensor is None or tensor.shape is None else str(list(tensor.shape)).replace(" ", "")
    variable = None if block.variable is None else seen[id(block.variable)]
    name, dtype = graph.nodes[block.node].name, "" if tensor is None else tensor.dtype
    end = block.end if block.end != float("inf") else 2**63
    return Block(block.begin, block.chunk, 0, name, shape, dtype, "", False, None, None, 0, end, variable)


def layer_of(name, layers):
    """The path of a model's layers in an operation's name; graphs number a layer's later calls ("dense_1" for "dense")."""
    found = []
    for part in kinds.forward_name(name).split("/"):
        plain = part if part in layers else part.rpartition("_")[0]
        if plain in layers:
            found.append(plain)
    return "/".join(found)
