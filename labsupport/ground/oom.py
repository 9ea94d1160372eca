"""What is said when memory runs out: the texts of TensorFlow's, NumPy's and Keras' errors, and the allocator's dump in the log."""

import math
import re

from labsupport.ground.budget import mib, parse_size

_DTYPE_BYTES = {
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
    **dict.fromkeys(("half", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float", "int32", "uint32"), 4),
    **dict.fromkeys(("double", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
_WANTED = re.compile(r"OOM when allocating tensor with shape\s?\[([\d,]*)\] and type (\w+)")
# NumPy's own words (numpy/_core/_exceptions.py): three digits and a unit.
_NO_ARRAY = re.compile(
    r"Unable to allocate ([\d.]+?)\.? ([KMG]iB) for an array(?: with shape (\([\d, ]*\)) and data type (\w+))?"
)
# Files in which Keras makes a variable's first value; its tracebacks leave out the layer that asked for it.
_INITIALIZERS = re.compile(r"keras/src/(initializers/|backend/(common/variables|tensorflow/random)\.py)")
_LAYERS = re.compile(r"keras/src/(layers|models|ops)/|encountered when calling")
_EXTENDED = re.compile(r"Extending allocation by ([\d.]+[KMG]?i?B) bytes for ")
_DUMPED = re.compile(r"Sum Total of in-use chunks: ([\d.]+[KMG]?i?B)")


def wanted_shape(message):
    """The shape of the tensor that TensorFlow's message says had no room, as a list; None if it does not tell."""
    found = _WANTED.search(message)
    return found and [int(n) for n in found[1].split(",") if n]


def wanted_bytes(message):
    """Bytes of the allocation that TensorFlow's message says had no room; None if it does not tell."""
    if found := _WANTED.search(message):
        one = _DTYPE_BYTES.get(found[2])
        return one and one * math.prod(int(n) for n in found[1].split(",") if n)
    by_xla = re.findall(r"while trying to allocate ([\d.]+\s?[KMG]?i?B)", message)
    return parse_size(by_xla[-1]) if by_xla else None


def failed_operation(message):
    """The operation that TensorFlow's message says found no room, with the scopes of a graph: "net/dense/MatMul", "ConcatV2"; "" if it does not tell."""
    found = re.search(r"\{\{node ([^}]+)\}\}", message) or re.search(r"\[Op:(\w+)\]", message)
    return found[1] if found else ""


def wanted_array(message):
    """(bytes, shape, dtype) of the array that NumPy's message says had no room, the last two as it has them or None; None if it does not tell."""
    found = _NO_ARRAY.search(message)
    return found and (parse_size(f"{found[1]} {found[2]}"), found[3], found[4])


def in_an_initializer(traceback):
    """Whether Keras was making a variable's first value."""
    return bool(_INITIALIZERS.search(traceback))


def in_a_layer(words):
    """Whether one of Keras' layers was computing, by a traceback or what Keras adds to a message."""
    return bool(_LAYERS.search(words))


def in_python_code(message):
    """Whether it was Python code that a pipeline or a graph calls (tf.numpy_function, from_generator)."""
    return "PyFunc" in message


def wanted_in_log(log):
    """The same from the allocator's last complaint in a log, which is all that is left of a process that crashed."""
    found = re.findall(r"ran out of memory trying to allocate ([\d.]+[KMG]?i?B)", log)
    return parse_size(found[-1]) if found else None


def dumped_in_use(log):
    """Bytes in use by each of the allocator's dumps in a log, in their order.

    Only a dump tells what was in use: a graph has let go of its tensors when its error arrives in Python.
    """
    return [parse_size(size) for size in _DUMPED.findall(log)]


def regions(log):
    """Bytes of each region that the allocator took, where the log tells (TF_CPP_VMODULE=bfc_allocator=1)."""
    return [parse_size(size) for size in _EXTENDED.findall(log)]


def explain_oom(message, log, budget):
    """One readable sentence from TensorFlow's message and the allocator's dump: which tensor, its bytes, what was in use."""
    found = _WANTED.search(message)
    operation = failed_operation(message)
    where = f" in {operation}" if operation else ""
    if "Cannot parse tensor from proto" in message:  # tensorflow/core/kernels/constant_op.cc
        return f"Out of memory{where}: no room for a constant of the graph, of a budget of {mib(budget)}"
    if not found:  # XLA and pipelines word it differently
        lines = message.strip().splitlines() or ["no message"]
        told = (line.strip() for line in lines if "ut of memory" in line or "Failed to allocate memory" in line)
        return f"Out of memory{where}: {next(told, lines[0])}"
    in_use = dumped_in_use(log)[-1:]
    shape = f"shape [{found[1].replace(',', ', ')}], {found[2]} = {mib(wanted_bytes(message))}"
    held = mib(in_use[0] if in_use else None)
    return f"Out of memory{where}: no room for a tensor of {shape}, with {held} in use of a budget of {mib(budget)}"
