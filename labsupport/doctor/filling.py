"""Where a script puts things into what a name holds: the lines with `name.append(…)`, `name[key] = …`, `name += …` and the like; else the line that names it."""

import ast
import linecache
import os
import sys
import types
from functools import cache

from labsupport.doctor.alive import MEMORY, ask
from labsupport.doctor.names import CACHED, by_name, is_callback
from labsupport.ground.record import sendable
from labsupport.ground.result import CELLS, is_own, line_of, short

_DEEPEST = 5  # a callback's attribute, a function in it, a list that this took from around it; the rest is reserve
_PUT = frozenset(("append", "appendleft", "extend", "add", "update", "insert", "setdefault", "put"))


def filled_at(name, value):
    """The line in short, such as "train.py:41", for a name and what it holds; "" where no line or more than one does it.

    Where nothing is put into it, it is the one line that gives the name its value.
    """
    if isinstance(value, CACHED):  # by its own calls
        return sendable(_told(value.__wrapped__.__code__.co_filename, value.__wrapped__.__code__.co_firstlineno))
    root, attribute = _innermost(name.split(" in ")[0].split(".")[-1], value)
    for target in (_put_into, _given_to):
        put = [one for file in _own_files() for one in _lines(target, file, _size(file))]
        if attribute:  # whatever the object is called there: `self`, for one
            found = {(file, line) for file, _, last, line in put if last == root}
        else:
            named = [one for one in put if one[1] == root and (target is _put_into or not one[2])]
            found = {(file, line) for file, _, _, line in named}
        if found:
            return sendable(_told(*found.pop())) if len(found) == 1 else ""
    return ""


def _innermost(name, value):
    """(the name nearest to what is held, whether it is an attribute): of an object its heaviest attribute, of a function what it took from around it."""
    attribute = False
    for _ in range(_DEEPEST):
        inner = ask(_parts, value, {})
        held = by_name(dict(inner))
        heaviest = max(
            held, key=lambda name: sum(held[name][kind] for kind in MEMORY) + held[name]["items"], default=""
        )
        if not heaviest:
            break
        attribute, name, value = not isinstance(value, types.FunctionType), heaviest, inner[heaviest]
    return name, attribute


def _parts(value):
    """{name: object} of what a function of the script's took from around it, or of attributes; containers have none."""
    if isinstance(value, types.MethodType):
        value = value.__self__
    if isinstance(value, types.FunctionType):
        return {name: cell.cell_contents for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ())}
    own = is_own(_file_of(sys.modules[type(value).__module__])) or is_callback(value)
    return dict(vars(value)) if own else {}


def _told(file, line):
    found = line_of(file, line)
    return short(os.path.basename(found.place), found.number)


def _own_files():
    return [*CELLS, *_files_of_modules(len(sys.modules))]


@cache
def _files_of_modules(number):
    """Files of the script's own modules; number: of the modules that are loaded. A module may be a lazy one: it is not asked."""
    files = {_file_of(module) for module in list(sys.modules.values())}
    return [file for file in files if file.endswith(".py") and is_own(file)]


def _file_of(module):
    file = ask(vars, module, {}).get("__file__")
    return os.path.abspath(file) if isinstance(file, str) else ""


def _size(file):
    """Of a file's text: a cell can get another one."""
    return sum(map(len, linecache.getlines(file)))


@cache
def _lines(target, file, size):
    """((file, first name, last attribute or "", line), …) of what has a target: ("t.py", "self", "kept", 4)."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    found = [(*_names(named), node.lineno) for node in ast.walk(tree) if (named := target(node)) is not None]
    return tuple((file, *one) for one in found if one[0])


def _put_into(node):
    """What a statement or call puts something into, or None."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _PUT:
        return node.func.value
    if isinstance(node, ast.AugAssign):
        return node.target
    given = _given_to(node)
    if isinstance(given, ast.Subscript):
        return given.value
    if isinstance(given, ast.Name) and any(
        isinstance(one, ast.Name) and one.id == given.id for one in ast.walk(node.value)
    ):
        return given  # kept = kept + [x]
    return None


def _given_to(node):
    """What an assignment gives a value to, or None."""
    if isinstance(node, ast.Assign):
        return node.targets[0]
    return node.target if isinstance(node, ast.AnnAssign) and node.value is not None else None


def _names(node):
    """(the first name of an expression, its last attribute or ""): `kept` of kept["a"], `self` and `outputs` of self.outputs."""
    last = ""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        last = last or getattr(node, "attr", "")
        node = node.value
    return (node.id if isinstance(node, ast.Name) else ""), last
