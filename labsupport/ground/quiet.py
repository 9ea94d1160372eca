"""What comes by itself and shall not meanwhile: what compiled code writes past Python and its log levels, and collections."""

import contextlib
import gc
import os


@contextlib.contextmanager
def without_stderr():
    """Drop what is written to standard error meanwhile, by compiled code too; where it is closed there is nothing to drop."""
    try:
        kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    except OSError:
        yield
        return
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@contextlib.contextmanager
def without_collections():
    """Python's collector does not run by itself in here. Without it TensorFlow, of which all stays, loads in a fifth less time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
