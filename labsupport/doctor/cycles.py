"""Garbage in reference cycles, told by the classes and functions of the script that are in it. Runs in the arm's process."""

import gc
import os
import types
from collections import Counter

from labsupport.doctor.alive import ask
from labsupport.doctor.names import own
from labsupport.ground.record import Holder, sendable
from labsupport.ground.result import line_of, short


def most_common():
    """The Holder for the class or function of the script's that most of the garbage that waits now is of; None where none is its own.

    For the end of a script: the collector runs, which calls finalizers. What it finds stays garbage until it runs again.
    """
    debug, before = gc.get_debug(), len(gc.garbage)
    gc.set_debug(debug | gc.DEBUG_SAVEALL)
    try:
        gc.collect()
    finally:
        gc.set_debug(debug)
    found = Counter(filter(None, (ask(_code_of, thing) for thing in gc.garbage[before:])))
    del gc.garbage[before:]
    if not found:
        return None
    (name, code), number = found.most_common(1)[0]
    at = line_of(code.co_filename, code.co_firstlineno)
    return Holder(sendable(name), number, 0, sendable(short(os.path.basename(at.place), at.number)))


def _code_of(thing):
    """(name, code) of a function of the script's, or of what its class begins with; None for a library's objects."""
    kind = type(thing)
    functions = [thing] if kind is types.FunctionType else vars(kind).values()
    codes = [one.__code__ for one in functions if isinstance(one, types.FunctionType) and own(one.__code__)]
    if not codes:
        return None
    first = min(codes, key=lambda code: code.co_firstlineno)
    return (first.co_name if kind is types.FunctionType else kind.__name__), first
