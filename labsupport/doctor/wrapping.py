"""An entry point of a library, wrapped: what the probes note and what a remedy changes are done around it."""

import functools


def wrap(owner, name, replacement):
    """From now on owner.name(…) is replacement(original, …)."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return replacement(original, *args, **kwargs)

    setattr(owner, name, wrapped)
