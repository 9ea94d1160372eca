"""Where a script puts things into what a name holds: the lines with `name.append(…)`, `name[key] = …`, `name += …` and the like; else the line that names it."""

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
    """The line in short, such as "train.py:41", for a name and what it holds; "" where no line or more than one does it.

    Where nothing is put into it, it is the one line that gives the name its value.
    """
    root, attribute = name.split(" in ")[0].split(".")[-1], _heaviest(value)
    for target in (_put_into, _given_to):
        put = [one for file in _own_files() for one in _lines(target, file, _size(file))]
        if attribute:  # whatever the object is called there: `self`, for one
            found = {(file, line) for file, _, last, line in put if last == attribute}
        else:
            found = {
                (file, line) for file, first, last, line in put if first == root and (target is _put_into or not last)
            }
        if found:
            return sendable(_told(*found.pop())) if len(found) == 1 else ""
    return ""


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
