"""What the person's own names hold: modules, running functions, and what is reached from them through containers."""

import gc
import os
import re
import sys
import types
from collections import Counter, deque
from functools import cache, lru_cache, partial

import numpy as np

from labsupport.doctor.alive import MEMORY, Kinds, array_bytes, ask, base_of, tensor_bytes, variable_bytes
from labsupport.ground.result import is_own

# Steps from a name to what it holds. A weight of a Keras model that an object keeps in a list of trials lies seven away:
# trial, its dict, model, its layers, layer, its variables, variable. The rest is reserve; cycles are followed once anyway.
_DEPTH = 12
# Objects that are looked at in one walk: 0.9 s of one core, measured with plain objects in lists.
_MOST_ITEMS = 200_000
_JUPYTERS = re.compile(r"get_ipython|exit|quit|open|In|Out|_[iod]h|_+|_\d+|_i+|_i\d+")
_PLAIN = (int, float, complex, str, bytes, type(None), np.generic)
_belongs = lru_cache(4096)(is_own)  # a loop asks for the frames of one line at each step
_FEW = 30  # things in a container: more are data, and not what a function was given
CACHED = type(lru_cache(len))
_NOTHING_IN_IT = (*_PLAIN, types.ModuleType)


def own(code):
    """Whether code is the person's rather than a library's."""
    return _belongs(code.co_filename)


def own_frames(frame):
    """The person's frames, innermost first, without those of libraries."""
    while frame is not None:
        if own(frame.f_code):
            yield frame
        frame = frame.f_back


def own_names(frames):
    """{name: object} for everything that the person's own modules and these running functions hold by name."""
    names = {}
    for name in _own_modules(len(sys.modules)):
        names.update(ask(_names_of, sys.modules.get(name), {}))
    for frame in frames:
        # The namespace of a function that came from elsewhere is no module here.
        names = {**frame.f_globals, **names}
        if frame.f_code.co_name != "<module>":
            names.update({f"{name} in {frame.f_code.co_name}()": value for name, value in frame.f_locals.items()})
    names.update(_handed_over(sys._getframe()))  # last: what they share with a name is told by the name
    names = {name: value for name, value in names.items() if not str(name).split(".")[-1].startswith("__")}
    return _without_jupyters(names) if "get_ipython" in names else names


def _handed_over(frame):
    """{"an object of Keep": object}: objects of the person's classes that a running function of a library was given, as fit() is its callbacks.

    Only in the function that the person's code called: a frame that was asked for its locals holds them (Python 3.11), and
    those of functions further in are batches.
    """
    found = {}
    while frame.f_back is not None:
        if own(frame.f_back.f_code) and not own(frame.f_code):
            for one in _flat(list(frame.f_locals.values())):
                if ask(of_own_class, one, False):
                    found[f"an object of {type(one).__name__}"] = one
        frame = frame.f_back
    return found


def of_own_class(thing):
    """Also a callback of Keras' own: a LambdaCallback runs functions of the person's, with what they took from around them."""
    callback = "Callback" in (base.__name__ for base in type(thing).__mro__)
    return callback or _own_class(type(thing))


def _own_class(cls):
    """Python takes the file's name from __main__ as soon as a script has run, and what it left is looked at after that."""
    return cls.__module__ == "__main__" or _own_module(sys.modules.get(cls.__module__))


def _flat(value, depth=3):
    """What a list, tuple or dict holds, such as a function's keyword arguments; else the value itself."""
    if not depth or type(value) not in (list, tuple, dict) or len(value) > _FEW:
        return [value]
    return [one for held in _items(value) for one in _flat(held, depth - 1)]


@lru_cache(1)  # TensorFlow brings thousands of modules, and each census asks for all of them
def _own_modules(number):
    """Names of the person's own modules; number: of the modules that are loaded."""
    return [name for name, module in list(sys.modules.items()) if name == "__main__" or ask(_own_module, module)]


def _names_of(module):
    prefix = "" if module.__name__ == "__main__" else f"{module.__name__}."
    return {f"{prefix}{name}": value for name, value in list(vars(module).items())}


def _without_jupyters(names):
    """Names of a notebook without those that Jupyter puts there; "Out", which keeps what cells have shown, comes last."""
    return {name: names[name] for name in names if not _JUPYTERS.fullmatch(name)} | {"Out": names.get("Out")}


def _own_module(module):
    file = getattr(module, "__file__", None)
    return file is not None and _own_file(file)


@cache
def _own_file(file):
    return is_own(os.path.abspath(file))


def by_name(names):
    """{name: Counter} for {name: object}: what each reaches through containers and attributes.

    A Counter has bytes by the kinds of MEMORY, "number of tensors", "number of arrays", "number of models", without
    those inside of others, and "items": how many things other than numbers and text its containers hold; "bounded
    tensors" and "bounded arrays" are bytes of those that lie in a deque with a maxlen, "data sets' tensors" of those that
    data sets were made of. What two names hold counts for the first.
    """
    walk = _Walk()
    return {name: walk.weigh(value) for name, value in names.items()}


def more(before, after):
    """[(bytes, items, name)] by which each name holds more in `after` than in `before`, both of by_name(). Most first."""
    rows = []
    for name in {**before, **after}:
        now, then = after.get(name, Counter()), before.get(name, Counter())
        grown = sum(now[kind] - then[kind] for kind in MEMORY)
        rows.append((grown, now["items"] - then["items"], name))
    return sorted(rows, reverse=True)


class _Walk:
    """One walk from names to what they hold, which looks at each object once, the nearest first."""

    def __init__(self):
        self._seen, self._kinds = set(), Kinds()

    def weigh(self, value):
        """A Counter of what a value weighs, with what it holds down to a depth."""
        count, waiting = Counter(), deque([(value, 0, ())])
        while waiting and len(self._seen) <= _MOST_ITEMS:
            value, depth, inside = waiting.popleft()
            if id(value) in self._seen:
                continue
            items = ask(partial(self._add, count, inside), value, ())
            if depth < _DEPTH and items:
                inside = self._inside(value, count, inside)
                waiting.extend((item, depth + 1, inside) for item in items)
        return count

    def _inside(self, value, count, inside):
        """What those things lie in that a value holds: its own part of `inside` added."""
        kind = self._kinds[type(value)]
        if kind == "models" and "models'" not in inside:
            count["number of models"] += 1
            return (*inside, "models'")
        if kind == "datasets" and "data sets'" not in inside:
            return (*inside, "data sets'")
        if isinstance(value, deque) and value.maxlen is not None and "bounded" not in inside:
            return (*inside, "bounded")
        return inside

    def _add(self, count, inside, value):
        """Add one object's own bytes to count, also by what it lies in; gives what it holds."""
        if isinstance(value, _NOTHING_IN_IT):
            return ()
        self._seen.add(id(value))
        kind = "" if isinstance(value, (list, dict, tuple)) else self._kinds[type(value)]
        if kind == "tensors":
            _put(tensor_bytes(value), kind, count, inside)
        elif kind == "variables":
            count[kind] += variable_bytes(value)
        elif kind == "datasets":
            return [*getattr(value, "_tensors", ()), *value._inputs()]
        elif kind == "iterators":
            return [value._dataset]
        elif isinstance(value, np.ndarray):
            base = base_of(value)
            if base is value or id(base) not in self._seen:
                self._seen.add(id(base))
                _put(array_bytes(base), "arrays", count, inside)
        else:
            items = _items(value)
            if isinstance(value, (list, dict, set)) or type(value).__name__ == "deque":
                count["items"] += sum(not isinstance(item, _PLAIN) for item in items)
            return items
        return ()


def _put(size, kind, count, inside):
    count[kind] += size
    count[f"number of {kind}"] += 1
    for way in inside:
        count[f"{way} {kind}"] += size


def _items(value):
    """What an object holds, as far as it belongs to the person who wrote it, or to Keras."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "deque":
        return list(value)
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        return _closure(value) + list(value.__defaults__ or ()) if own(value.__code__) else []
    if isinstance(value, CACHED):
        return gc.get_referents(value) if own(value.__wrapped__.__code__) else []
    if type(value).__name__ == "_lru_list_element":  # what a cache with a maxsize has for each call
        return gc.get_referents(value)
    if isinstance(value, type):
        return list(vars(value).values()) if _own_class(value) else []
    if str(type(value).__module__).split(".")[0] == "tensorflow":
        return []
    return list(getattr(value, "__dict__", {}).values())


def _closure(function):
    """What a function took from the scopes around it."""
    held = []
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not filled yet
            pass
    return held
