"""Equal arms run once in a test run, and equal steps are traced once for predictions: a lab and its solution share most of theirs.

tests/conftest.py gives each kernel a start-up file that calls install(). An arm is equal to an earlier one if its code,
with all that it refers to, its arguments, budgets and environment variables are; what cannot be compared runs again.
Only for tests: what a learner or `make labs` runs is always measured.
"""

import contextlib
import dis
import functools
import hashlib
import os
import pickle
import sys
import tempfile
import types
from collections import deque
from pathlib import Path, PurePath
from unittest import mock

import numpy as np

FOLDER = "LABSUPPORT_TESTS_REUSE"  # environment variable: where results are kept while the tests run
NO_PICTURES = "LABSUPPORT_TESTS_NO_PICTURES"  # environment variable, "1" for kernels whose pictures nobody looks at
STARTUP = f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\nimport reuse, roots\nsys.path.pop()\nreuse.install()\nroots.share_nurseries()\ndel reuse, roots, sys\n"
_PLAIN = (int, float, complex, str, bytes, bool, type(None), PurePath, range, slice, type(Ellipsis))
_OF_NUMPY = (np.ufunc, type(np.concatenate))  # kinds of its functions


class Unlike(Exception):
    """Something that cannot be compared."""


def install():
    """From now on run() in this process takes the result of an equal arm, if there is one."""
    if not os.environ.get(FOLDER):  # a kernel that a test in the browser started
        return
    if os.environ.get(NO_PICTURES):
        from matplotlib.figure import Figure

        Figure.savefig = lambda *_, **__: None
    equal_once()


def equal_once():
    """Until the context that this gives is left, run() takes the result of an equal arm, and lab.predict() the trace of an equal step."""
    from labsupport.fits import prediction
    from labsupport.showing import running

    stack = contextlib.ExitStack()
    for module, name, around in ((running, "watched", _watched), (prediction, "traced", _traced)):
        stack.enter_context(mock.patch.object(module, name, functools.partial(around, getattr(module, name))))
    return stack


def _watched(original, job, make_watcher):
    from labsupport.ground.budget import Budget
    from labsupport.ground.record import Cause
    from labsupport.showing.live import plot_for

    job.check()
    Budget.of(job.budget, job.outside)
    try:
        name = fingerprint([job.function, job.args, job.budget, job.outside, job.env, job.logical_devices])
    except Unlike:
        return original(job, make_watcher)
    kept = Path(os.environ[FOLDER]) / name
    if kept.exists():
        result = pickle.loads(kept.read_bytes())
        result.label = job.name
        plot_for(quiet=True).finish(result)  # its picture was drawn when it ran
        (kept.parent / f"{name}-again-{os.getpid()}-{id(job)}").touch()
        return result
    result = original(job, make_watcher)
    if not result.ok and result.error.cause not in (Cause.OOM, Cause.MEMORY, Cause.ERROR, Cause.CRASH_OUT):
        return result  # a time-out or another crash need not come again
    _keep(result, kept)
    return result


def _traced(original, make, eager):
    """traced(), in fits/traced.py; make is a partial of a Wanted."""
    (wanted,) = make.args
    try:
        name = fingerprint([*vars(wanted).values(), eager])
    except Unlike:
        return original(make, eager)
    kept = Path(os.environ[FOLDER]).with_name("traces") / name
    if kept.exists():
        return pickle.loads(kept.read_bytes())
    traced = original(make, eager)
    _keep(traced, kept)
    return traced


def _keep(result, kept):
    new = kept.with_name(f"{kept.name}-{os.getpid()}")
    new.write_bytes(pickle.dumps(result))
    new.rename(kept)  # at once: another kernel may be reading


def count():
    """(arms that ran and were kept, arms that took a kept result)."""
    names = os.listdir(os.environ[FOLDER])
    again = sum("-again-" in name for name in names)
    return len(names) - again, again


def fingerprint(value):
    """Text that is equal for equal things. Raises Unlike."""
    digest = hashlib.sha256()
    _feed(digest, value, {})
    return digest.hexdigest()


def _feed(digest, value, seen):
    def note(*words):
        digest.update(repr(words).encode("utf-8", "surrogatepass"))

    kind = type(value)
    if _in_a_temporary_file(value):
        with open(value, "rb") as file:
            note("file", os.path.basename(value), hashlib.file_digest(file, "sha256").hexdigest())
        return
    if kind in _PLAIN or isinstance(value, PurePath):
        note(kind.__name__, value)
        return
    if id(value) in seen:
        note("again", seen[id(value)])
        return
    seen[id(value)] = len(seen)
    seen.setdefault("alive", []).append(value)  # so that no id is given twice
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufcSUM":
        note("array", value.dtype.str, value.shape)
        digest.update(np.ascontiguousarray(value).tobytes())
    elif _tells_all(value):
        note(kind.__name__, repr(value))
    elif isinstance(value, (types.ModuleType, types.BuiltinFunctionType, *_OF_NUMPY)) or _of_library(value):
        note(getattr(value, "__module__", ""), getattr(value, "__qualname__", getattr(value, "__name__", "")))
    else:
        parts = _parts(value, kind)
        note(kind.__name__, len(parts))
        for part in parts:
            _feed(digest, part, seen)


def _parts(value, kind):
    """What tells a value from others of its kind. Raises Unlike."""
    if kind in (list, tuple):
        return value
    if kind is dict:
        return [part for item in value.items() for part in item]
    if kind in (set, frozenset):
        return sorted(value, key=repr)
    if kind is deque:
        return [value.maxlen, *value]
    if kind is np.random.Generator:
        return [value.bit_generator.state]
    if kind.__name__ == "EagerTensor":
        return [value.numpy()]
    if kind is types.CodeType:
        names = value.co_names, value.co_varnames, value.co_freevars
        return [value.co_code, *names, value.co_flags, list(value.co_consts)]
    if kind is types.MethodType:
        return [value.__func__, value.__self__]
    if kind in (staticmethod, classmethod):
        return [value.__func__]
    if kind is property:
        return [value.fget, value.fset, value.fdel]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if kind is types.FunctionType:
        return _parts_of_function(value)
    if isinstance(value, type):
        body = {name: part for name, part in vars(value).items() if not name.startswith("__") or callable(part)}
        return [value.__qualname__, list(value.__bases__), body]
    if _plainly_made(kind):
        return [kind, vars(value)]
    raise Unlike(kind.__name__)


def _in_a_temporary_file(value):
    """Whether this names a file that a lab has written into a folder of its own, whose name is another one in each kernel."""
    inside = isinstance(value, (str, PurePath)) and str(value).startswith(os.path.join(tempfile.gettempdir(), ""))
    return inside and os.path.isfile(value)


def _tells_all(value):
    """Whether its text is all that there is to it: a dtype, or what a tensor will be like. Their module is loaded where one is."""
    tf = sys.modules.get("tensorflow")
    return isinstance(value, np.dtype) or (tf is not None and isinstance(value, (tf.DType, tf.TensorSpec)))


def _plainly_made(kind):
    """Whether this is a notebook's own class of plain instances, which hold nothing but their attributes."""
    bases = [base for base in kind.__mro__ if base is not object]
    return bases != [] and all(base.__module__ == "__main__" and "__slots__" not in vars(base) for base in bases)


def _of_library(value):
    """Whether a function or class can be found under its name in a module that is no notebook."""
    return (
        isinstance(value, (types.FunctionType, type))
        and value.__module__ not in ("__main__", None)
        and "<locals>" not in value.__qualname__
    )


def _parts_of_function(function):
    names, codes = set(), [function.__code__]
    for code in codes:
        # Not all of co_names: an attribute may have the name of something else in the notebook.
        names |= {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    held = {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}
    try:
        closed = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        raise Unlike("a closure that is not filled yet") from None
    return [function.__code__, held, closed, function.__defaults__, function.__kwdefaults__]
