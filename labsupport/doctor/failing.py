"""What is looked up only when a step has failed: how often its tape went through the weights, and what it was given. Runs in the arm's process."""

import ast
import functools
import linecache
import sys
from collections import Counter

from labsupport.doctor.alive import ask
from labsupport.doctor.names import own
from labsupport.ground.result import is_own

_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_MOST_SHAPES = 20  # of what a step was given


def own_trace(error):
    """[(frame, line)] of an error's traceback that are the script's own, outermost first; none for None."""
    found, trace = [], getattr(error, "__traceback__", None)
    while trace is not None:
        if own(trace.tb_frame.f_code):
            found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found


@functools.cache
def _tree(file):
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _nodes(file, line, kinds):
    """Nodes of these kinds in a file that reach over a line, the outermost first."""
    found = (node for node in ast.walk(_tree(file)) if isinstance(node, kinds))
    return [node for node in found if _first(node) <= line <= node.end_lineno]


def _first(node):
    """The first line of a node, with its decorators."""
    return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])


def _functions(file):
    return [node for node in ast.walk(_tree(file)) if isinstance(node, ast.FunctionDef)]


def repeated_with(file, line):
    """(first, last) lines of what repeats with a line: the innermost loop or function around it, else the whole file."""
    around = [(node.lineno, node.end_lineno) for node in _nodes(file, line, (*_LOOPS, *_FUNCTIONS))]
    return max(around, default=(1, sys.maxsize))


def loop_under_tape(file, line):
    """(file, line) of the first loop in the block of a tape, or in a function that it calls; None without one.

    line: of the tape's `with`, or of a function in which it stands.
    """
    blocks = _nodes(file, line, ast.With) or [
        block
        for function in _nodes(file, line, _FUNCTIONS)[-1:]
        for block in ast.walk(function)
        if isinstance(block, ast.With) and "GradientTape" in ast.dump(block.items[0])
    ]
    waiting, seen = blocks[-1:], set()
    while waiting:
        block = waiting.pop(0)
        seen.add(block)
        if loops := [node.lineno for node in ast.walk(block) if isinstance(node, _LOOPS)]:
            return file, min(loops)
        called = {node.func for node in ast.walk(block) if isinstance(node, ast.Call)}
        names = {getattr(function, "id", getattr(function, "attr", "")) for function in called}
        waiting += [one for one in _functions(file) if one.name in names and one not in seen]
    return None


def _median(numbers):
    return sorted(numbers)[(len(numbers) - 1) // 2] if numbers else 0


def uses(tape, tensors):
    """How often the weights that a tape watched were used under it, about; 0 where that is not known.

    Without a graph each use reads a variable into a tensor of its own, and the tape keeps those that a gradient needs. Those
    of biases are not, nor that of a table; and a result may have a weight's shape, too. So it is the median over shapes.
    """
    watched = Counter(tuple(one.shape) for one in tape.watched_variables() if len(one.shape) > 1)
    alive = Counter(ask(lambda tensor: tuple(tensor.shape), tensor) for tensor in tensors)
    found = [alive[shape] // number for shape, number in watched.items() if alive[shape] >= number]
    return _median(found)


def uses_in(graph):
    """How often a graph reads its weights: the median."""
    reads = Counter(op.inputs[0].name for op in graph.get_operations() if op.type == "ReadVariableOp")
    inner = {id(outside): inside.name for outside, inside in graph.captures}
    found = [reads[inner.get(id(weight.handle))] for weight in graph.trainable_variables]
    return _median(found)


def shapes_given(arguments):
    """Shapes of the tensors in what a step was given, as lists."""
    tf = sys.modules["tensorflow"]
    found = []
    for one in tf.nest.flatten(arguments):
        found += _of_elements(one) if hasattr(one, "element_spec") else [ask(lambda one: one.shape.as_list(), one)]
    return [shape for shape in found if shape and None not in shape][:_MOST_SHAPES]


def _of_elements(iterator):
    """Shapes of what an iterator gives, with the size of the batch where only that is open."""
    tf = sys.modules["tensorflow"]
    rows = _rows(getattr(iterator, "_dataset", None))
    shapes = [ask(lambda spec: spec.shape.as_list(), spec) for spec in tf.nest.flatten(iterator.element_spec)]
    return [[rows, *shape[1:]] if shape[0] is None else shape for shape in shapes if shape]


def _rows(dataset):
    """Rows of a batch, from the last batch() of a pipeline, else from fit()'s own argument; None where neither tells."""
    while dataset is not None:
        if (size := getattr(dataset, "_batch_size", None)) is not None:
            return int(size)
        dataset = getattr(dataset, "_input_dataset", None)
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "fit" and not is_own(frame.f_code.co_filename):
            return frame.f_locals.get("batch_size") or 32  # what Keras takes where none is given
        frame = frame.f_back
    return None


def shapes_in(frames, tape_at):
    """Shapes of the tensors that functions of the script's have by name, down to the one in which the tape was opened at (file, line)."""
    tf = sys.modules["tensorflow"]
    opened = [n for n, frame in enumerate(frames) if frame.f_code.co_filename == tape_at[0] and _has(frame, tape_at[1])]
    above = frames[: opened[-1] + 1] if opened else []
    held = [value for frame in above for value in frame.f_locals.values() if tf.is_tensor(value)]
    return shapes_given([value for value in held if not isinstance(value, tf.Variable)])


def _has(frame, line):
    return line in (one for *_, one in frame.f_code.co_lines())


def made_in(graph, shape):
    """(file, line) of the first operation of a graph that makes a tensor of this shape from others; None if there is none."""
    for one in [graph, *(function.graph for function in graph._functions.values())]:
        for operation in one.get_operations():
            from_others = operation.inputs and not any(_fits(tensor, shape) for tensor in operation.inputs)
            if from_others and any(_fits(tensor, shape) for tensor in operation.outputs):
                frames = [frame for frame in operation.traceback if is_own(frame.filename)]
                return (frames[-1].filename, frames[-1].lineno) if frames else None
    return None


def _fits(tensor, shape):
    return tensor.shape.rank == len(shape) and tensor.shape.is_compatible_with(shape)
