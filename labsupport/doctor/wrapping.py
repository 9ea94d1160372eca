"""An entry point of a library, wrapped: what the probes note and what a remedy changes are done around it."""

import functools
import os

OURS = os.path.join(
    os.path.dirname(__file__), ""
)  # what stands between a script and a library that it calls: no traceback shows it


def wrap(owner, name, replacement):
    """From now on owner.name(…) is replacement(original, …)."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return replacement(original, *args, **kwargs)

    setattr(owner, name, wrapped)
