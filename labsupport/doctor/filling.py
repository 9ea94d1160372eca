"""Where a script puts things into what a name holds: the lines with `name.append(…)`, `name[key] = …`, `name += …` and the like; else the line that names it."""

import ast
import linecache
import os
import sys
import types
from functools import cache
from itertools import zip_longest

from labsupport.doctor.alive import MEMORY, ask
from labsupport.doctor.names import CACHED, by_name, of_own_class
from labsupport.ground.record import sendable
from labsupport.ground.result import CELLS, is_own, line_of, short

_DEEPEST = 5  # a callback's attribute, a function in it, a list that this took from around it; the rest is reserve
_FEW_KEYS = 30  # more are data, such as names of files
_NAME, _ATTRIBUTE, _KEY = "name", "attribute", "key"
_PUT = frozenset(("append", "appendleft", "extend", "add", "update", "insert", "setdefault", "put"))


def filled_at(name, value, kinds=(*MEMORY, "items")):
    """The line in short, such as "train.py:41", for a name and what it holds; "" where no line or more than one does it.

    kinds: of by_name(), what is looked for in it. Where nothing is put into it, it is the one line that gives the name its value.
    """
    path, inmost = _inwards(name.split(" in ")[0].split(".")[-1], value, kinds)
    if isinstance(inmost, CACHED):  # by its own calls
        return sendable(_told(inmost.__wrapped__.__code__.co_filename, inmost.__wrapped__.__code__.co_firstlineno))
    for target in (_put_into, _given_to):
        put = [one for file in _own_files() for one in _lines(target, file, _size(file))]
        for (root, kind), (_, outer) in zip_longest(path[::-1], path[-2::-1], fillvalue=("", _NAME)):
            if kind == _NAME:
                named = [one for one in put if one[1] == root and (target is _put_into or not one[2])]
            else:  # whatever the object is called there: `self`, for one
                named = [one for one in put if one[2] == root]
            found = {(file, line) for file, _, _, line in named}
            if found:
                return sendable(_told(*found.pop())) if len(found) == 1 else ""
            if _KEY not in (kind, outer):  # neither a key that is worked out stands in a line nor what lies behind one
                break
    return ""


def _inwards(name, value, kinds):
    """([(name, kind)], the last object) from a name to what is nearest to what is held: of an object its heaviest attribute, of a dict its heaviest key, of a function what it took from around it."""
    path = [(name, _NAME)]
    for _ in range(_DEEPEST):
        inner = ask(_parts, value, {})
        held = by_name(dict(inner))
        heaviest = max(held, key=lambda name: sum(held[name][kind] for kind in kinds), default="")
        if not heaviest:
            break
        kind = _KEY if isinstance(value, dict) else _NAME if isinstance(value, types.FunctionType) else _ATTRIBUTE
        path.append((heaviest, kind))
        value = inner[heaviest]
    return path, value


def _parts(value):
    """{name: object} of what a function of the script's took from around it, of attributes, or of a dict's few keys that are text; lists have none."""
    if isinstance(value, dict):
        return {key: value[key] for key in value if isinstance(key, str)} if len(value) <= _FEW_KEYS else {}
    if isinstance(value, types.MethodType):
        value = value.__self__
    if isinstance(value, types.FunctionType):
        return {name: cell.cell_contents for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ())}
    return dict(vars(value)) if isinstance(value, type) or of_own_class(value) else {}


def _told(file, line):
    found = line_of(file, line)
    return short(os.path.basename(found.place), found.number)


def _own_files():
    return [*CELLS, *_files_of_modules(len(sys.modules))]


@cache
def _files_of_modules(number):
    """Files of the script's own modules; number: of the modules that are loaded. A module may be a lazy one: it is not asked."""
    files = {_SCRIPT, *map(_file_of, list(sys.modules.values()))}
    return [file for file in files if file.endswith(".py") and is_own(file)]


def _file_of(module):
    file = ask(vars, module, {}).get("__file__")
    return os.path.abspath(file) if isinstance(file, str) else ""


_SCRIPT = _file_of(sys.modules["__main__"])  # which is no longer told there when the script has run


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
    if isinstance(given, (ast.Name, ast.Attribute)) and ast.unparse(given) in map(ast.unparse, _read(node.value)):
        return given  # kept = kept + [x]
    return None


def _read(expression):
    return [one for one in ast.walk(expression) if isinstance(one, (ast.Name, ast.Attribute))]


def _given_to(node):
    """What an assignment gives a value to, or None."""
    if isinstance(node, ast.Assign):
        return node.targets[0]
    return node.target if isinstance(node, ast.AnnAssign) and node.value is not None else None


def _names(node):
    """(the first name of an expression, its last attribute or key): `kept` and `a` of kept["a"], `self` and `outputs` of self.outputs."""
    last = ""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        key = getattr(getattr(node, "slice", None), "value", "")
        last = last or getattr(node, "attr", "") or (key if isinstance(key, str) else "")
        node = node.value
    return (node.id if isinstance(node, ast.Name) else ""), last
