"""Whole numbers and shapes that a graph works out for itself, such as the length of a loop or the size of a slice.

Only what follows from constants and shapes; what the data decide stays unknown.
"""

import numpy as np

from labsupport.fits.graph import Tensor
from labsupport.fits.kernels import ELEMENTWISE

FEW = 64  # elements of a constant that is kept as numbers
_BINARY = {
    "Add": np.add,
    "AddV2": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "Less": np.less,
    "LessEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterEqual": np.greater_equal,
    "Equal": np.equal,
    "NotEqual": np.not_equal,
    "LogicalAnd": np.logical_and,
    "LogicalOr": np.logical_or,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "RealDiv": np.true_divide,
}
_UNARY = {"Identity": np.asarray, "LogicalNot": np.logical_not, "Neg": np.negative, "StopGradient": np.asarray}
_ALIKE = {"ZerosLike": np.zeros_like, "OnesLike": np.ones_like}
_PRODUCTS = {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"}
# The data decide how many rows of them there are: at most as many as they are given.
_AT_MOST = {"Unique": 0, "UniqueV2": 0, "Where": 0}


def shapes(op, given, known, outputs, attributes):
    """The outputs with shapes that follow from what an operation is given; given: Tensors, known: arrays or None."""
    if all(tensor.shape is not None for tensor in outputs):
        return outputs
    found = [
        _shape(op, place, given, known, attributes) if tensor.shape is None else tensor.shape
        for place, tensor in enumerate(outputs)
    ]
    return [Tensor(shape, tensor.dtype) for shape, tensor in zip(found, outputs)]


def _shape(op, place, given, known, attributes):
    shapes_in = [tensor.shape for tensor in given]
    if op == "AddN":  # all alike, so one that is known is enough
        return next((shape for shape in shapes_in if shape is not None), None)
    if op in _AT_MOST:
        if shapes_in[0] is None:
            return None
        return (given[0].elements, len(shapes_in[0])) if op == "Where" else (given[0].elements,)
    if not shapes_in or any(shape is None for shape in shapes_in):
        return None
    if op == "UnsortedSegmentSum" and known[2] is not None:
        return (int(known[2]), *shapes_in[0][len(shapes_in[1]) :])
    if op == "GatherV2" and len(shapes_in) > 1:
        axis = int(known[2]) if len(known) > 2 and known[2] is not None else 0
        return (*shapes_in[0][:axis], *shapes_in[1], *shapes_in[0][axis + 1 :])
    if op in ("Fill", "Zeros", "Empty", "BroadcastTo", "Reshape"):
        wanted = known[1 if op in ("BroadcastTo", "Reshape") else 0]
        if wanted is None:
            return None
        wanted = [int(n) for n in np.ravel(wanted)]
        if -1 in wanted:
            rest = int(np.prod([n for n in wanted if n != -1])) or 1
            wanted[wanted.index(-1)] = given[0].elements // rest
        return tuple(wanted)
    if op in _PRODUCTS and min(map(len, shapes_in)) > 1:
        return _product(*shapes_in, attributes)
    if op == "BiasAddGrad":
        return shapes_in[0][-1:]
    if op == "ConcatV2" and known[-1] is not None:
        axis, parts = int(known[-1]), shapes_in[:-1]
        whole = list(parts[0])
        whole[axis] = sum(part[axis] for part in parts)
        return tuple(whole)
    if op in _BINARY or op in ELEMENTWISE or op == "SelectV2" or len(shapes_in) == 1 and _keeps(op):
        try:
            return tuple(np.broadcast_shapes(*shapes_in))
        except ValueError:
            return None
    return None


def _product(one, two, attributes):
    """The shape of a product of matrices, or of stacks of them."""
    turned = lambda shape, *keys: shape[::-1] if any(attributes.get(key) for key in keys) else shape
    rows, _ = turned(one[-2:], "transpose_a", "adj_x")
    _, columns = turned(two[-2:], "transpose_b", "adj_y")
    return (*np.broadcast_shapes(one[:-2], two[:-2]), rows, columns)


def _keeps(op):
    """Whether an operation on one tensor keeps its shape."""
    return (
        op in _UNARY
        or op in _ALIKE
        or op in ("Cast", "Relu", "Sigmoid", "Tanh", "Square", "Sqrt", "Rsqrt", "Exp", "Log")
    )


def numbers(op, given, known, outputs, attributes):
    """[array or None] of what an operation puts out."""
    nothing = [None] * len(outputs)
    if op == "Shape" and given[0].shape is not None:
        return [np.asarray(given[0].shape, outputs[0].dtype)]
    if op == "ShapeN":
        return [None if t.shape is None else np.asarray(t.shape, out.dtype) for t, out in zip(given, outputs)]
    if op == "Size" and given[0].shape is not None:
        return [np.asarray(given[0].elements)]
    if not known or any(one is None for one in known):
        return nothing
    try:
        return [_number(op, known, outputs[0], attributes)]
    except (ValueError, TypeError, IndexError, ZeroDivisionError):
        return nothing


def _number(op, known, made, attributes):
    if op in _BINARY:
        return _BINARY[op](*known)
    if op in _UNARY:
        return _UNARY[op](known[0])
    if op in _ALIKE:
        return _ALIKE[op](known[0])
    if op == "Cast":
        return known[0].astype(made.dtype)
    if op in ("Reshape", "Squeeze", "ExpandDims"):
        return np.reshape(known[0], made.shape)
    if op == "Pack":
        return np.stack(known, attributes.get("axis", 0))
    if op == "ConcatV2":
        return np.concatenate(known[:-1], int(known[-1]))
    if op == "Range":
        return np.arange(*known)
    if op in ("Prod", "Sum", "Max", "Min") and made.shape == ():
        return getattr(np, op.lower())(known[0])
    if (
        op == "StridedSlice"
        and len(known[1]) == 1
        and not attributes.get("begin_mask")
        and attributes.get("shrink_axis_mask")
    ):
        return known[0][int(known[1][0])]
    if op == "GatherV2":
        return np.take(known[0], known[1], int(known[2]))
    return None
