"""From TensorFlow's graph of a step to a Graph to walk: calls put in place, loops unrolled, lists of tensors resolved.

What the loops' lengths and the data's shapes depend on is worked out where it is a few whole numbers (figuring.py). A list of
tensors (TensorList: the sequences and the stacks of a loop) holds its items without copying them, so it vanishes here: who
takes an item out of a list reads it from its maker.
"""

from dataclasses import dataclass

import numpy as np

from labsupport.fits import figuring, kernels
from labsupport.fits.graph import ITEM, Graph, Tensor

_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_LOOPS = {"While", "StatelessWhile"}
_BRANCHES = {"If": ("then_branch", "else_branch"), "StatelessIf": ("then_branch", "else_branch")}
_CASES = {"Case", "StatelessCase"}
LONGEST = 5_000  # iterations of a loop that are unrolled; beyond it a walk takes minutes


class CannotPredict(Exception):
    """A step that no figure can be given for; its text says why, and what to do."""


@dataclass
class _Plan:
    """A function's graph, read once. steps: (name, op, inputs, after, outputs, attributes, constant) with local numbers."""

    steps: list
    arguments: list
    returned: list


class _Lists(list):
    """The items of a list of tensors: numbers of values, None for a place without one."""


def lowered(source, library, held, variables, returned):
    """The Graph of a tf.Graph. library: the FunctionDefs that it calls; held: {name of a placeholder: name of an input}; variables: {name of a placeholder: Variable};
    returned: names of tensors. Raises CannotPredict.
    """
    return _Lowering(source, library, held, variables).run(returned)


class _Lowering:
    def __init__(self, source, library, held, variables):
        self._source, self._held, self._variables = source, held, variables
        self._library = {function.signature.name: function for function in library}
        self._plans, self._pools, self._constants, self._gate, self._in_xla = {}, {}, {}, [], 0
        self.graph = Graph()

    def run(self, returned):
        plan, values = _plan(self._source), {}
        self._emit(plan, values, {})
        for name in returned:
            value = values.get(plan.arguments.get(name))
            if isinstance(value, int):
                self.graph.returned.append(value)
        return self.graph

    def _emit(self, plan, values, numbers):
        """Put a plan's steps into the graph. values: {local number: value, or _Lists}, numbers: {step: node}."""
        for number, (name, op, inputs, after, outputs, attributes, constant, first) in enumerate(plan.steps):
            if first in values:  # an argument that the caller gave
                continue
            if (id(plan), first) in self._constants:  # there once, however often its function is called
                values[first] = self._constants[id(plan), first]
                continue
            given = [values.get(place) for place in inputs]
            waits = [numbers[step] for step in after if step in numbers]
            made = self._one(name, op, given, outputs, waits, attributes, constant)
            if op == "Const":
                self._constants[id(plan), first] = made[0]
            for place, value in enumerate(made):
                values[first + place] = value
            numbers[number] = len(self.graph.nodes) - 1 if self.graph.nodes else 0

    def _one(self, name, op, given, outputs, after, attributes, constant):
        """The values that an operation puts out."""
        if op in _CALLS:
            return self._call(attributes["f"], given, name)
        if op in _LOOPS:
            return self._loop(name, given, attributes)
        if op in _BRANCHES:
            return self._branch(name, given, [attributes[key] for key in _BRANCHES[op]][::-1])
        if op in _CASES:
            return self._branch(name, given, attributes["branches"])
        if op.startswith(("TensorList", "EmptyTensorList")) or any(isinstance(value, _Lists) for value in given):
            return self._of_lists(name, op, given, outputs, after)
        return self._plain(name, op, given, outputs, after, attributes, constant)

    def _plain(self, name, op, given, outputs, after, attributes, constant):
        graph = self.graph
        if op in ("Exit", "Enter", "Switch", "Merge", "NextIteration", "LoopCond"):
            raise CannotPredict(
                f"{name}: loops of TensorFlow 1 are not followed; write them with tf.while_loop in a tf.function"
            )
        given = [value for value in given if isinstance(value, int)]
        if op == "VariableShape" and given[0] in graph.variables:
            constant = np.asarray(graph.variables[given[0]].shape)
            outputs = [Tensor(constant.shape, outputs[0].dtype)]
        known = [graph.known.get(value) for value in given]
        tensors = [graph.tensor(value) for value in given]
        outputs = figuring.shapes(op, tensors, known, outputs, attributes)
        if op == "MaxPool" and outputs[0].dtype == "float32":
            self._pools[len(graph.values)] = len(graph.nodes)
        elif op == "MaxPoolGrad" and given[1] in self._pools:
            given.append(self._places(self._pools[given[1]]))
        scratch = kernels.dense_filters(op, tensors, outputs, attributes) if self._in_xla else []
        made = graph.add(name, op, given, [*outputs, *scratch], after, **attributes)[: len(outputs)]
        if name in self._held:
            graph.held[made[0]] = self._held[name]
        elif name in self._variables:
            graph.variables[made[0]] = self._variables[name]
        if constant is not None:
            graph.known[made[0]] = constant
        elif len(outputs) and all(tensor.shape is not None and tensor.elements <= figuring.FEW for tensor in outputs):
            for value, number in zip(made, figuring.numbers(op, tensors, known, outputs, attributes)):
                if number is not None:
                    graph.known[value] = number
        if any(tensor.shape is None and tensor.dtype not in ("variant", "resource") for tensor in outputs):
            graph.unsure.append(name)
        return made

    def _call(self, function, given, name):
        plan = self._function(function, given)
        graph, begin = self.graph, len(self.graph.nodes)
        values, numbers = dict(zip(plan.arguments, given)), {}
        compiled = self._library[function].attr["_XlaMustCompile"].b
        graph.compiled += [name] * compiled
        self._in_xla += compiled
        self._emit(plan, values, numbers)
        self._in_xla -= compiled
        made = [values.get(place) for place in plan.returned]
        if not compiled:
            return made
        of_call = range(begin, len(graph.nodes))  # one operation of the executor's: all it puts out is there at its end
        return [
            graph.add(name, "Identity", [value], [graph.tensor(value)], of_call)[0] if isinstance(value, int) else value
            for value in made
        ]

    def _branch(self, name, given, functions):
        """The branch that is known to be taken; of branches that only the data choose between, the one with most to do."""
        chosen = self.graph.known.get(given[0]) if isinstance(given[0], int) else None
        if chosen is None:
            taken = max(functions, key=lambda function: len(self._function(function, given[1:]).steps))
        else:
            taken = functions[int(chosen) if 0 <= int(chosen) < len(functions) else -1]
        return self._call(taken, given[1:], name)

    def _loop(self, name, given, attributes):
        condition, body = attributes["cond"], attributes["body"]
        state, ends, around = list(given), [], self._gate
        for turn in range(LONGEST + 1):
            goes_on = self._goes_on(condition, state)
            if goes_on is None:
                raise CannotPredict(
                    f"{name}: how often this loop runs depends on the data. Give its length as a number "
                    "(maximum_iterations, a fixed sequence length), or measure the step with labsupport.run()"
                )
            if not goes_on:
                self._gate = around
                return state
            # No turn begins before the one that is so many behind it has ended, with all those before that.
            behind = turn - attributes.get("parallel_iterations", 10)
            self._gate = [ends[behind]] if behind >= 0 else []
            begin = len(self.graph.nodes)
            state = self._call(body, state, name)
            self.graph.add(f"{name}/end", "NoOp", after=[*ends[-1:], *range(begin, len(self.graph.nodes))])
            ends.append(len(self.graph.nodes) - 1)
        raise CannotPredict(
            f"{name}: a loop of more than {LONGEST:,} turns; predict a shorter one, or measure with run()"
        )

    def _goes_on(self, condition, state):
        """Whether a loop runs once more; None if that is not known."""
        graph = self.graph
        nodes, values, unsure = len(graph.nodes), len(graph.values), len(graph.unsure)
        (answer,) = self._call(condition, state, "")
        known = graph.known.get(answer)
        for value in range(values, len(graph.values)):  # what decides is no part of what is walked: a few numbers
            graph.known.pop(value, None)
        del graph.nodes[nodes:], graph.values[values:], graph.unsure[unsure:]
        self._constants = {key: value for key, value in self._constants.items() if value < values}
        return None if known is None else bool(known)

    def _function(self, name, given):
        """The _Plan of a function of the graph's library, for arguments of these shapes."""
        graph = self.graph
        tensor = lambda value: graph.variables[value].tensor if value in graph.variables else graph.tensor(value)
        arguments = [tensor(value) if isinstance(value, int) else None for value in given]
        key = (name, *arguments)
        if key not in self._plans:
            self._plans[key] = _plan(*_imported(self._library, name, arguments))
        return self._plans[key]

    def _places(self, pool):
        """oneDNN keeps the place of each maximum, a byte each, for the way back (measured in the trace of an arm)."""
        graph = self.graph
        node = graph.nodes[pool]
        (value,) = graph.add(f"{node.name}/places", "Places", node.inputs, [Tensor(node.outputs[0].shape, "uint8")])
        return value

    # --- lists of tensors

    def _of_lists(self, name, op, given, outputs, after):
        graph = self.graph
        number = lambda place: graph.known.get(given[place]) if isinstance(given[place], int) else None
        items = given[0] if given and isinstance(given[0], _Lists) else _Lists()
        if op in ("EmptyTensorList", "TensorListReserve"):
            length = number(1) if op == "TensorListReserve" else 0
            return [_Lists([None] * int(length if length is not None else 0))]
        if op == "TensorListFromTensor":
            return [self._rows(name, given[0], after)]
        if op == "TensorListSetItem":
            place, changed = number(1), _Lists(items)
            if place is None or int(place) >= len(changed):
                changed.append(given[2])
            else:
                changed[int(place)] = given[2]
            return [changed]
        if op == "TensorListPushBack":
            return [_Lists([*items, given[1]])]
        if op == "TensorListPopBack":
            left, item = _Lists(items[:-1]), items[-1] if items else None
            return [left, self._item(name, item, outputs[1], after)]
        if op == "TensorListGetItem":
            place = number(1)
            item = items[int(place)] if place is not None and int(place) < len(items) else next(iter(items), None)
            return [self._item(name, item, outputs[0], after)]
        if op == "TensorListLength":
            made = graph.add(name, op, (), outputs, after)
            graph.known[made[0]] = np.int64(len(items))
            return made
        if op in ("TensorListStack", "TensorListConcatV2", "TensorListConcat", "TensorListGather"):
            there = [item for item in items if isinstance(item, int)]
            shape = (
                (len(items), *graph.tensor(there[0]).shape)
                if there and graph.tensor(there[0]).shape is not None
                else None
            )
            outputs = [
                outputs[0] if outputs[0].shape is not None or shape is None else Tensor(shape, outputs[0].dtype),
                *outputs[1:],
            ]
            return graph.add(name, op, there, outputs, after)
        if op in ("AddN", "AddV2", "Add"):
            return [self._sum(name, [one for one in given if isinstance(one, _Lists)], after)]
        if op in ("Identity", "ZerosLike", "TensorListResize", "StopGradient"):
            return [_Lists(items) if op != "ZerosLike" else _Lists([None] * len(items))]
        return [self._item(name, None, tensor, after) if tensor.dtype != "variant" else _Lists() for tensor in outputs]

    def _rows(self, name, value, after):
        tensor = self.graph.tensor(value)
        if not tensor.shape:
            return _Lists()
        row = Tensor(tensor.shape[1:], tensor.dtype)
        made = self.graph.add(name, "Unpack", [value], [row] * tensor.shape[0], after, axis=0)
        return _Lists(made)

    def _item(self, name, item, tensor, after):
        if isinstance(item, int):
            return self.graph.add(name, "Identity", [item], [self.graph.tensor(item)], [*after, *self._gate])[0]
        return self.graph.add(name, "Zeros", (), [tensor], after)[0]

    def _sum(self, name, lists, after):
        summed = _Lists()
        for items in zip(*lists):
            there = [item for item in items if isinstance(item, int)]
            if len(there) > 1:
                there = self.graph.add(name, "AddN", there, [self.graph.tensor(there[0])], after)
            summed.append(there[0] if there else None)
        return summed


def _imported(library, name, arguments):
    """(tf.Graph, its inputs, its outputs) of a function; arguments: Tensors, None where a list is given."""
    import tensorflow as tf
    from tensorflow.python.framework import function_def_to_graph

    definition = library[name]
    nodes, names = function_def_to_graph.function_def_to_graph_def(definition)
    places = {node.name: node for node in nodes.node}
    for argument, tensor in zip(definition.signature.input_arg, arguments):
        node = places[names[argument.name].partition(":")[0]]
        if tensor is None or tensor.shape is None or tensor.dtype not in ITEM:
            continue
        shape = tf.TensorShape(tensor.shape).as_proto()
        if argument.type == tf.resource.as_datatype_enum:
            as_variable(node, tensor)
        else:
            node.attr["shape"].shape.CopyFrom(shape)
    graph = tf.Graph()
    with graph.as_default():
        nodes.library.function.extend(library.values())
        tf.import_graph_def(nodes, name="")
    of = lambda name: graph.get_tensor_by_name(names[name])
    inputs = [of(argument.name) for argument in definition.signature.input_arg]
    return graph, inputs, [of(definition.ret[made.name]) for made in definition.signature.output_arg]


def as_variable(node, tensor):
    """Make a NodeDef that takes a variable's handle one that tells the variable's shape to what reads it."""
    import tensorflow as tf

    node.op = "VarHandleOp"
    node.attr.clear()
    node.attr["dtype"].type = tf.dtypes.as_dtype(tensor.dtype).as_datatype_enum
    node.attr["shape"].shape.CopyFrom(tf.TensorShape(tensor.shape).as_proto())
    node.attr["shared_name"].s = node.name.encode()


def _plan(source, inputs=(), returned=()):
    """The _Plan of a tf.Graph; inputs, returned: tensors, for that of a function. Else arguments are all tensors by name."""
    operations = source.get_operations()
    place = {operation.name: number for number, operation in enumerate(operations)}
    firsts, count = {}, 0
    for operation in operations:
        firsts[operation.name] = count
        count += max(1, len(operation.outputs))
    of = lambda tensor: firsts[tensor.op.name] + tensor.value_index
    steps = []
    for operation in operations:
        outputs = [Tensor(_shape(tensor), tensor.dtype.base_dtype.name) for tensor in operation.outputs]
        after = [place[before.name] for before in operation.control_inputs]
        reads = [of(tensor) for tensor in operation.inputs]
        constant = _constant(operation)
        steps.append(
            (
                operation.name,
                operation.type,
                reads,
                after,
                outputs,
                _attributes(operation),
                constant,
                firsts[operation.name],
            )
        )
    names = {
        f"{operation.name}:{n}": firsts[operation.name] + n
        for operation in operations
        for n in range(len(operation.outputs))
    }
    return _Plan(steps, [of(tensor) for tensor in inputs] or names, [of(tensor) for tensor in returned])


def _shape(tensor):
    shape = tensor.shape
    return tuple(shape.as_list()) if shape.is_fully_defined() else None


def _attributes(operation):
    """Those that rules ask for."""
    found = {}
    for key in (
        "axis",
        "transpose_a",
        "transpose_b",
        "adj_x",
        "adj_y",
        "begin_mask",
        "end_mask",
        "shrink_axis_mask",
        "new_axis_mask",
        "ellipsis_mask",
        "keep_dims",
        "padding",
        "data_format",
        "strides",
        "parallel_iterations",
    ):
        try:
            found[key] = operation.get_attr(key)
        except ValueError:
            pass
    for key in ("f", "cond", "body", "then_branch", "else_branch"):
        try:
            found[key] = operation.get_attr(key).name
        except (ValueError, AttributeError):
            pass
    if operation.type in _CASES:
        found["branches"] = [branch.name for branch in operation.get_attr("branches")]
    return found


def _constant(operation):
    """A constant of a few numbers as an array, else None."""
    if operation.type != "Const" or not operation.outputs[0].shape.is_fully_defined():
        return None
    if operation.outputs[0].shape.num_elements() > figuring.FEW or operation.outputs[0].dtype.name == "string":
        return None
    from tensorflow.python.framework import tensor_util

    return np.asarray(tensor_util.MakeNdarray(operation.get_attr("value")))
