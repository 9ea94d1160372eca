"""Where a script puts things into what a name holds: the lines with `name.append(…)`, `name[key] = …`, `name += …` and the like."""

import ast
import linecache
import os
import sys
from functools import cache

from labsupport.doctor.alive import MEMORY, ask
from labsupport.doctor.names import by_name
from labsupport.ground.record import sendable
from labsupport.ground.result import CELLS, is_own, line_of, short

_PUT = frozenset(("append", "appendleft", "extend", "add", "update", "insert", "setdefault", "put"))


def filled_at(name, value):
    """The line in short, such as "train.py:41", for a name and what it holds; "" where no line or more than one does it."""
    root, attribute = name.split(" in ")[0].split(".")[-1], _heaviest(value)
    put = [one for file in _own_files() for one in _filled(file, _size(file))]
    if attribute:  # whatever the object is called there: `self`, for one
        found = {(file, line) for file, _, last, line in put if last == attribute}
    else:
        found = {(file, line) for file, first, _, line in put if first == root}
    return sendable(_told(*found.pop())) if len(found) == 1 else ""


def _heaviest(value):
    """The attribute that holds most, of an object of a class of the script's own; "" for any other."""
    if not ask(
        lambda value: "__dict__" in dir(value) and is_own(_file_of(sys.modules[type(value).__module__])), value, False
    ):
        return ""
    held = by_name(dict(vars(value)))
    return max(held, key=lambda name: sum(held[name][kind] for kind in MEMORY), default="")


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
def _filled(file, size):
    """((file, first name, last attribute or "", line), …) of what puts something into a name: ("t.py", "self", "kept", 4)."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    found = [(*_names(target), node.lineno) for node in ast.walk(tree) if (target := _target(node)) is not None]
    return tuple((file, *one) for one in found if one[0])


def _target(node):
    """What a statement or call puts something into, or None."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _PUT:
        return node.func.value
    if isinstance(node, ast.AugAssign):
        return node.target
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        return node.targets[0].value
    return None


def _names(node):
    """(the first name of an expression, its last attribute or ""): `kept` of kept["a"], `self` and `outputs` of self.outputs."""
    last = ""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        last = last or getattr(node, "attr", "")
        node = node.value
    return (node.id if isinstance(node, ast.Name) else ""), last
