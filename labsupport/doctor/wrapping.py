"""An entry point of a library, wrapped: what the probes note and what a remedy changes are done around it."""

import functools
import os

# What stands between a script and a library that it calls: no traceback shows it.
OURS = os.path.join(os.path.dirname(__file__), "")


def quietly(method):
    """A method that never raises into the script: where it goes wrong, what it would have noted is missing."""

    @functools.wraps(method)
    def safe(*args, **kwargs):
        try:
            return method(*args, **kwargs)
        except Exception:  # an odd object of the script, or no memory left to look at it
            return None

    return safe


def wrap(owner, name, replacement):
    """From now on owner.name(…) is replacement(original, …)."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return replacement(original, *args, **kwargs)

    setattr(owner, name, wrapped)
