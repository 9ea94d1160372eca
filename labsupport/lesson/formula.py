"""The arithmetic behind a lab's sliders as text with its values in it, so that a page without a kernel can work it out."""

import ast
import inspect
import textwrap
import types

FORMULA_MIME = "application/vnd.labsupport.formula+json"  # beside the sliders in a saved notebook; tools/book reads it
# What a formula uses of labsupport, in Python that needs no module.
OF_LABSUPPORT = """\
class lab:
    @staticmethod
    def tensor_mib(shape, dtype="float32"):
        size = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}[dtype] / 2**20
        for length in shape:
            size *= length
        return size
"""


class NoFormula(ValueError):
    """The function uses more than plain values and functions of them, such as a model."""


def formula(function):
    """(source, {name: value}) of a function written in a notebook: all that it uses, as Python without imports, and its values.

    Raises NoFormula.
    """
    told, values = {}, {}
    _tell(function, told, values)
    lines = [f"{name} = {value!r}" for name, value in values.items()]
    return "\n".join([*lines, *told.values()]), values


def _tell(function, told, values):
    """Add the source of a function to told and what it uses to both."""
    source = textwrap.dedent(inspect.getsource(function))
    tree = ast.parse(source)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    own = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    told[function.__name__] = ""  # one that calls itself is told once
    for name in sorted({node.id for node in names} - own):
        used = function.__globals__.get(name)
        if isinstance(used, types.ModuleType):
            wanted = {
                n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == name
            }
            if (name, wanted) != ("lab", {"tensor_mib"}):
                raise NoFormula(f"{function.__name__}() uses {name}.{', '.join(sorted(wanted))}")
            told.setdefault(name, OF_LABSUPPORT)
        elif isinstance(used, types.FunctionType):
            if name not in told:
                _tell(used, told, values)
        elif used is not None:
            values[name] = _plain(name, used)
    told[function.__name__] = source


def _plain(name, value):
    """A value as numbers, text, lists and dicts. Raises NoFormula."""
    if isinstance(value, dict):
        return {key: _plain(name, part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(name, part) for part in value]
    for way in ("to_dict", "tolist"):  # of pandas; of NumPy
        if hasattr(value, way):
            return _plain(name, getattr(value, way)())
    if not isinstance(value, (bool, int, float, str)):
        raise NoFormula(f"{name} is a {type(value).__name__}, no plain value")
    return value
