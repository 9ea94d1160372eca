"""A step built and traced inside a graph of its own, where variables have shapes and no memory, and simplified by Grappler.

Grappler is TensorFlow's own: a tf.function runs the graph that it leaves. What it would fuse depends on the device.
"""

import contextlib
import copy
import re
from dataclasses import dataclass

from labsupport.fits.graph import ITEM, Tensor, Variable
from labsupport.fits.kernels import VIEWS
from labsupport.fits.lowered import CannotPredict, as_variable, lowered
from labsupport.peak.kinds import forward_name

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # Keras' errors have some, and list what a layer was called with
_HANDLE = Tensor((), "resource")
_CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


@dataclass
class Traced:
    """graph: what is walked; variables: all that the step's maker made, also those that the step does not touch.

    optimizers: names of those that update something; layers: names of the model's layers; notes: what is to be told.
    """

    graph: object
    variables: list
    optimizers: set
    layers: set


def traced(make, eager=False):
    """The Traced step of make(), which builds model and optimizer and returns (step, arguments as TensorSpecs, layers' names).

    eager: it runs outside of any tf.function: as it was written, and with its gradients in a list until it ends. Raises CannotPredict with what to do.
    """
    import tensorflow as tf

    outer = tf.Graph()
    with outer.as_default(), _noting_optimizers() as noted:
        step = None
        try:
            step, specs, layers = make()
            with _comparing_numbers():
                concrete = tf.function(step).get_concrete_function(*specs)
        except CannotPredict:
            raise
        except Exception as error:
            raise CannotPredict(_untraceable(error, step is not None)) from error
    made = [*outer.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES), *concrete.graph.variables]
    slots = {id(one.value) for optimizer in noted for one in optimizer.variables}
    variables = {id(variable.handle): _variable(variable, noted, slots) for variable in made}
    held = {}
    captured = {}
    for inner, given in zip(concrete.graph.inputs[-len(concrete.captured_inputs) or None :], concrete.captured_inputs):
        if inner.dtype == tf.resource:
            captured[inner.op.name] = variables.get(id(given)) or _stranger(inner, given)
        elif inner.dtype != tf.variant:
            held[inner.op.name] = inner.op.name
    for inner in concrete.graph.inputs[: len(concrete.graph.inputs) - len(concrete.captured_inputs)]:
        held[inner.op.name] = inner.op.name
    names = [tensor.name for tensor in concrete.graph.outputs]
    if eager:
        names += _gradients(concrete.graph)
    graph = lowered(*_simplified(concrete.graph, captured, eager), held, captured, names)
    _keep_unread(graph, concrete.graph, held)
    handles = {id(variable): handle for handle, variable in graph.variables.items()}
    graph.variables = {}  # in the order in which they are made, which is that of their memory
    for variable in variables.values():
        if id(variable) not in handles:
            (handles[id(variable)],) = graph.add(variable.name, "Placeholder", outputs=[_HANDLE])
        graph.variables[handles[id(variable)]] = variable
    return Traced(graph, list(variables.values()), {optimizer.name for optimizer in noted}, layers)


def _keep_unread(graph, source, held):
    """Inputs that nothing reads are held by the caller all the same."""
    there = set(graph.held.values())
    for name in held:
        tensor = source.get_operation_by_name(name).outputs[0]
        if name not in there and tensor.shape.is_fully_defined():
            (value,) = graph.add(
                name, "Placeholder", outputs=[Tensor(tuple(tensor.shape.as_list()), tensor.dtype.name)]
            )
            graph.held[value] = name


@contextlib.contextmanager
def _comparing_numbers():
    """`==` and `!=` of tensors in a tf.function compare their numbers; inside a graph such as ours they would ask whether both are one object.

    Masks depend on it, and tf.recompute_grad, which waits for the way back by it.
    """
    import tensorflow as tf

    before = {"__eq__": tf.Tensor.__eq__, "__ne__": tf.Tensor.__ne__}

    def comparing(name, compare):
        def compared(one, other):
            if other is None or not getattr(one.graph, "building_function", False):
                return before[name](one, other)
            return compare(one, other)

        return compared

    tf.Tensor.__eq__, tf.Tensor.__ne__ = comparing("__eq__", tf.equal), comparing("__ne__", tf.not_equal)
    try:
        yield
    finally:
        tf.Tensor.__eq__, tf.Tensor.__ne__ = before.values()


@contextlib.contextmanager
def _noting_optimizers():
    """Keras optimizers that are built meanwhile."""
    import keras

    kind, noted = keras.optimizers.Optimizer, []
    original = kind.build

    def build(optimizer, variables):
        if all(optimizer is not other for other in noted):
            noted.append(optimizer)
        return original(optimizer, variables)

    kind.build = build
    try:
        yield noted
    finally:
        kind.build = original


def _variable(variable, optimizers, slots):
    """slots: ids of the optimizers' variables."""
    name = variable.name.removesuffix(":0")
    maker = (
        "optimizer" if id(variable) in slots or name.startswith(tuple(f"{o.name}/" for o in optimizers)) else "Keras"
    )
    shape = variable.shape
    if shape.rank is None or not shape.is_fully_defined():
        raise CannotPredict(
            f"the variable {name} has no fixed shape ({shape}): give it one, or measure with labsupport.run()"
        )
    made = _makings(variable)
    return Variable(name, tuple(shape.as_list()), variable.dtype.base_dtype.name, maker, bool(variable.trainable), made)


def _makings(variable):
    """Bytes of each tensor that the first value of a variable is worked out from; the last is the value itself."""
    try:
        first = variable.initializer.inputs[1].op
    except (AttributeError, RuntimeError):  # made before, eagerly: it is there already
        return ()
    found = {}

    def visit(operation):
        if operation.name not in found:
            for tensor in operation.inputs:
                visit(tensor.op)
            found[operation.name] = operation

    visit(first)
    tensors = [tensor for operation in found.values() for tensor in operation.outputs if operation.type not in VIEWS]
    shapes = [(tensor.shape, tensor.dtype.base_dtype.name) for tensor in tensors]
    return tuple(Tensor(tuple(s.as_list()), d).size for s, d in shapes if s.is_fully_defined())


def _stranger(inner, given):
    """A resource that is no variable that was found, such as a table; of unknown size."""
    return Variable(inner.op.name, (), "resource", "script", False)


def _gradients(graph):
    """Names of what the way back of a graph gives to the rest of the step."""
    backward = lambda operation: forward_name(operation.name) != operation.name
    made = [tensor for operation in graph.get_operations() if backward(operation) for tensor in operation.outputs]
    return [tensor.name for tensor in made if not all(map(backward, tensor.consumers()))]


def _simplified(graph, captured, eager):
    """(tf.Graph that Grappler leaves of a function's graph, if it does not run eagerly, the FunctionDefs that it calls).

    captured: {name of a placeholder: Variable}.
    """
    from tensorflow.core.protobuf import meta_graph_pb2

    item = meta_graph_pb2.MetaGraphDef(graph_def=graph.as_graph_def())
    keep = item.collection_def["train_op"].node_list.value
    keep.extend([tensor.name for tensor in graph.outputs] + [operation.name for operation in graph.control_outputs])
    for node in item.graph_def.node:
        node.device = node.device or _CPU
        node.attr.pop("_lower_using_switch_merge", None)  # a loop shall stay one operation: lowered.py unrolls it
        variable = captured.get(node.name)
        if variable is not None and variable.dtype in ITEM:  # so that what reads it has a shape
            as_variable(node, variable)
    for function in item.graph_def.library.function:
        for node in function.node_def:
            node.attr.pop("_lower_using_switch_merge", None)
    if eager:
        return _imported(item.graph_def)
    placeholders = _as_arguments(item.graph_def)
    try:
        return _imported(_by_grappler(item, placeholders, remapping=True))
    except ValueError:  # it fuses convolutions of a type that only oneDNN's own have, which a graph may not name
        return _imported(_by_grappler(item, placeholders, remapping=False))


def _by_grappler(item, placeholders, remapping):
    from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
    from tensorflow.python.grappler import tf_optimizer

    config = config_pb2.ConfigProto()
    options = config.graph_options.rewrite_options
    options.min_graph_nodes = -1
    if not remapping:
        options.remapping = rewriter_config_pb2.RewriterConfig.OFF
    simple = tf_optimizer.OptimizeGraph(config, item)
    for node in simple.node:
        if node.op == "_Arg":
            node.CopyFrom(placeholders[node.name])
    return simple


def _as_arguments(definition):
    """Make placeholders of a GraphDef, for which Grappler would make tensors of their size, arguments of a function, which have none.

    Returns {name: NodeDef as it was}.
    """
    before = {node.name: copy.deepcopy(node) for node in definition.node if node.op == "Placeholder"}
    for index, node in enumerate(node for node in definition.node if node.name in before):
        dtype, shape = node.attr.pop("dtype").type, node.attr.pop("shape").shape
        node.op = "_Arg"
        node.attr["T"].type, node.attr["index"].i = dtype, index
        node.attr["_output_shapes"].list.shape.add().CopyFrom(shape)
    return before


def _imported(definition):
    import tensorflow as tf

    simple = tf.Graph()
    with simple.as_default():
        tf.import_graph_def(definition, name="")
    return simple, definition.library.function


def _untraceable(error, made):
    """One sentence on why a step cannot be made, or traced once it is made, and what to do."""
    text = str(error).partition("Arguments received by")[0]
    if "custom_gradient decorator" in text:
        advice = "fit() ends in the same way: in a tf.function, what is recomputed takes no keyword arguments such as training=True"
    elif any(word in text for word in ("numpy()", "'numpy'", "NumPy", "__array__", "EagerTensor", "eager execution")):
        advice = "it asks a tensor for its numbers while it is traced: use TensorFlow's operations, or measure it with labsupport.run()"
    elif made and "Could not interpret" not in text:  # as of the name of a loss
        advice = "make it run inside a tf.function, or measure it with labsupport.run()"
    else:
        return f"the step cannot be made ({_told(error)})"
    return f"the step cannot be traced ({_told(error)}); {advice}"


def _told(error):
    """An error's kind and what it says in the end, without what a layer was called with."""
    text = _COLOUR.sub("", str(error)).partition("Arguments received by")[0].strip()
    return f"{type(error).__name__}: {text.splitlines()[-1].strip()[:300] if text else ''}"
