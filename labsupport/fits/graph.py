"""A step's graph as plain data: operations in their order, what they read, and the sizes of what they put out.

Nothing here knows TensorFlow; traced.py makes Graphs from a trace, the tests make them by hand.
"""

import math
from dataclasses import dataclass, field

# Bytes of one element (framework/types.proto). A resource or a variant is a handle: what it stands for is counted itself.
ITEM = {"float32": 4, "float64": 8, "int32": 4, "uint8": 1, "int16": 2, "int8": 1, "int64": 8, "bool": 1}
ITEM |= {"bfloat16": 2, "float16": 2, "uint16": 2, "uint32": 4, "uint64": 8, "complex64": 8, "complex128": 16}
ITEM |= {"string": 24, "resource": 0, "variant": 0, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True, slots=True)
class Tensor:
    """What an operation puts out. shape: a tuple, None where the data decide it."""

    shape: tuple | None
    dtype: str

    @property
    def size(self):
        """Bytes; 0 where the shape is not known."""
        return 0 if self.shape is None else math.prod(self.shape) * ITEM.get(self.dtype, 0)

    @property
    def elements(self):
        return 0 if self.shape is None else math.prod(self.shape)


@dataclass(slots=True)
class Node:
    """An operation. inputs: numbers of values that it reads; after: numbers of nodes that it waits for besides.

    outputs: a Tensor each; first: the number of its first output among all values. attributes: the few that rules ask for.
    """

    name: str
    op: str
    inputs: tuple = ()
    after: tuple = ()
    outputs: tuple = ()
    first: int = 0
    attributes: dict = field(default_factory=dict)


@dataclass
class Variable:
    """A variable that the step reads or writes. maker: "Keras", "optimizer" or "script".

    makings: bytes of each tensor that its first value is worked out from; all but the last are gone when it is there.
    """

    name: str
    shape: tuple
    dtype: str
    maker: str = "script"
    trainable: bool = True
    makings: tuple = ()

    @property
    def tensor(self):
        return Tensor(self.shape, self.dtype)


class Graph:
    """nodes: in an order in which each comes behind what it reads. held: {value: name} that the caller keeps alive for the
    whole step (its inputs). returned: values that are handed back. variables: {value of a handle: Variable}.
    known: {value: its numbers}, of constants and what follows from them. unsure: names of operations whose shape the data decide; compiled: names of calls that XLA compiles.
    """

    def __init__(self):
        self.nodes, self.values, self.known = [], [], {}
        self.held, self.returned, self.variables = {}, [], {}
        self.unsure, self.compiled = [], []

    def add(self, name, op, inputs=(), outputs=(), after=(), **attributes):
        """Add a Node and return the numbers of its outputs. outputs: Tensors; inputs: numbers of values."""
        node = Node(name, op, tuple(inputs), tuple(after), tuple(outputs), len(self.values), attributes)
        self.values += [(len(self.nodes), tensor) for tensor in outputs]
        self.nodes.append(node)
        return list(range(node.first, node.first + len(outputs)))

    def tensor(self, value):
        return self.values[value][1]

    def maker(self, value):
        """The number of the node that puts out a value."""
        return self.values[value][0]
