"""What each operation does with memory: which put out their input itself, which may write into it, what they need besides.

From the source of TensorFlow's kernels (core/kernels); what was measured instead says so.
"""

import math

from labsupport.fits.graph import Tensor

# They put out the buffer that they were given (kernels: set_output(0, input(0)) or a view of it).
VIEWS = set(
    "Identity Reshape Squeeze ExpandDims StopGradient PreventGradient CheckNumerics EnsureShape Bitcast IdentityN "
    "ReadVariableOp PlaceholderWithDefault _FusedIdentity "
    # what Grappler makes of an addition of many: one sum that all are added to
    "Assign AssignAdd AssignSub DestroyTemporaryVariable".split()
)
# Elementwise: they write into an input of the same type and shape that nobody else will read
# (forward_input_or_allocate_output in cwise_ops_common.h, relu_op.cc, bias_op.cc, aggregate_ops.cc, softmax_op.cc).
ELEMENTWISE = set(
    "Abs Acos Acosh Add AddV2 AddN Asin Asinh Atan Atan2 Atanh BiasAdd Ceil ClipByValue Conj Cos Cosh Digamma Div DivNoNan "
    "Elu EluGrad Erf Erfc Erfinv Exp Expm1 Floor FloorDiv FloorMod Inv InvGrad LeakyRelu LeakyReluGrad Lgamma Log Log1p "
    "LogSoftmax LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan Ndtri Neg Pow RealDiv Reciprocal "
    "ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Rint Round Rsqrt RsqrtGrad Selu SeluGrad Sigmoid SigmoidGrad Sign Sin "
    "Sinh Softmax Softplus SoftplusGrad Softsign SoftsignGrad Sqrt SqrtGrad Square SquaredDifference Sub Tan Tanh TanhGrad "
    "Xdivy Xlog1py Xlogy _UnaryOpsComposition _FusedMulAdd ZerosLike OnesLike Snapshot".split()
)
# They put out the data of an input where nothing has to move.
_UNMOVED = set(
    "Cast Tile BroadcastTo Transpose ConjugateTranspose Pad PadV2 ConcatV2 Concat Pack Slice StridedSlice".split()
)
# They put the gradient of the logits where those were (forward_input_or_allocate_output in xent_op.cc, sparse_xent_op.cc).
_CROSS_ENTROPY = {"SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"}
_REDUCTIONS = set("Sum Mean Max Min Prod All Any EuclideanNorm".split())
# Views of rows of their input, where those lie on 64-byte borders (split_op.cc, unpack_op.cc, strided_slice_op.cc).
ROWS = {"Slice", "StridedSlice", "Split", "SplitV", "Unpack"}
_ALIGNED = 64  # bytes, EIGEN_MAX_ALIGN_BYTES with AVX-512
# They run at once in the thread that made them ready (IsExpensive() is false).
LIGHT = VIEWS | set(
    "Const Placeholder _Arg _Retval NoOp VarHandleOp Shape ShapeN Size Rank Assert ControlTrigger Switch Merge Enter Exit "
    "NextIteration LoopCond BroadcastGradientArgs Range InvertPermutation ConcatOffset VariableShape TensorListLength".split()
)


def view_of(node, graph):
    """The place among a node's inputs whose buffer its first output is, or None."""
    if node.op in VIEWS:
        return 0
    if not node.inputs or not node.outputs:
        return None
    made = node.outputs[0]
    given = graph.tensor(node.inputs[-1 if node.op == "Concat" else 0])
    if made.shape is None or given.shape is None:
        return None
    if node.op in _REDUCTIONS or node.op in _UNMOVED:
        alike = made.elements == given.elements and made.dtype == given.dtype
        if node.op == "Transpose" and alike:
            return 0 if _unmoved(given.shape, made.shape, graph.known.get(node.inputs[1])) else None
        return 0 if alike else None
    return None


def _unmoved(before, after, order):
    """Whether a transpose only moves dimensions of 1. order: its permutation, where that is known; shapes do not tell a square's."""
    if order is not None:
        moved = [place for place in order if before[place] != 1]
        return moved == sorted(moved)
    return [n for n in before if n != 1] == [n for n in after if n != 1] and len({n for n in before if n != 1}) > 1


def rows_of(node, graph):
    """Whether a node's outputs are views of rows of what it is given."""
    if node.op not in ROWS:
        return False
    given = graph.tensor(node.inputs[1 if node.op == "Split" else 0])
    made = node.outputs[0]
    if not given.shape or made.shape is None or not given.elements:
        return False
    if node.op in ("Split", "Unpack", "SplitV"):
        if node.attributes.get("axis", 0) != 0:
            return False
        return made.size % _ALIGNED == 0
    return made.shape[1:] == given.shape[1:] and (given.size // given.shape[0]) % _ALIGNED == 0


def dense_filters(op, given, made, attributes):
    """Scratch of XLA's gradient of a grouped convolution's filter: twice the filter in which each group has all channels.

    The second has the channels of other groups set to zero (measured on a CPU, TensorFlow 2.21: 1.9 to 2.0 times its bytes,
    nothing on the way forward). Nothing for other operations.
    """
    if op not in _FILTER_GRADIENTS or given[0].shape is None or made[0].shape is None:
        return []
    channels = given[0].shape[1 if attributes.get("data_format", b"").startswith(b"NC") else -1]
    window, (inner, outer) = made[0].shape[:-2], made[0].shape[-2:]
    return [Tensor((*window, channels, outer), made[0].dtype)] * 2 if inner < channels else []


_FILTER_GRADIENTS = {"Conv2DBackpropFilter", "Conv3DBackpropFilterV2"}


def may_write_into(node, graph, output=0):
    """Places of the inputs that an output of a node can be written into, if nobody else will read them."""
    if node.op in _CROSS_ENTROPY and output == 1:
        return [0]
    if node.op not in ELEMENTWISE or output != 0 or not node.outputs:
        return []
    made = node.outputs[0]
    return [
        place
        for place, value in enumerate(node.inputs)
        if graph.tensor(value).dtype == made.dtype and graph.tensor(value).elements == made.elements
    ]


def work(node, graph):
    """Roughly the microseconds that a node takes on two cores. Only ratios matter: they decide what runs beside what.

    Measured in traces of arms (two cores with AVX-512): 4 bytes a nanosecond read, 0.5 written, where most memory is touched
    for the first time, 65 multiplications and additions a nanosecond, 5 microseconds to start.
    """
    read = sum(graph.tensor(value).size for value in node.inputs)
    written = sum(made.size for made in node.outputs)
    if node.op in UPDATES:
        written = graph.tensor(node.inputs[1]).size
    return START + read / READ + written / WRITTEN + _operations(node, graph) / DONE


START, READ, WRITTEN, DONE = 5, 4e3, 0.5e3, 6.5e4
UPDATES = {"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"}
# They change rows of a variable, from then on whoever reads it whole gets a copy (EnsureSparseVariableAccess in
# core/kernels/training_op_helpers.h).
SCATTER = {"ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate", "ResourceScatterNdUpdate"}


def _operations(node, graph):
    tensors = [graph.tensor(value) for value in node.inputs] + list(node.outputs)
    if any(tensor.shape is None for tensor in tensors):
        return 0
    if "Conv" in node.op and len(node.inputs) > 1:
        if "BackpropInput" in node.op:
            kernel, outside = tensors[1].shape, tensors[2].elements
        elif "BackpropFilter" in node.op:
            kernel, outside = node.outputs[0].shape, tensors[2].elements
        else:
            kernel, outside = tensors[1].shape, node.outputs[0].elements
        inner = kernel[:-2] if "Depthwise" in node.op else kernel[:-1]
        return 2 * outside * math.prod(inner)
    if "MatMul" in node.op and len(tensors[0].shape) > 1 < len(tensors[1].shape) and node.outputs[0].elements:
        rows = math.prod(node.outputs[0].shape[-2:])
        inner = math.sqrt(math.prod(tensors[0].shape[-2:]) * math.prod(tensors[1].shape[-2:]) / rows)
        return 2 * node.outputs[0].elements * inner
    return 0
