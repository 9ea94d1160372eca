"""What TensorFlow says when memory runs out: its error's text, and the allocator's dump in the log."""

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
