"""Byte arithmetic that a learner can check by hand, and its error against what was measured."""

import math

import numpy as np
import pandas as pd

from labsupport.ground.budget import MIB


def tensor_mib(shape, dtype="float32"):
    """MiB of a dense tensor: the product of its shape times the bytes of one element (bfloat16 counts 2)."""
    size = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    return math.prod(shape) * size / MIB


def predicted_vs_measured(**pairs):
    """A table of name=(predicted MiB, measured MiB) with the error in %. Unmeasured (None) stays unavailable."""
    rows = {}
    for name, (predicted, measured) in pairs.items():
        error = None if not measured else 100 * (predicted - measured) / measured
        rows[name.replace("_", " ")] = {
            "predicted MiB": round(predicted, 1),
            "measured MiB": "unavailable" if measured is None else round(measured, 1),
            "error %": "unavailable" if error is None else f"{round(error, 1) + 0:+.1f}",
        }
    return pd.DataFrame(rows).T
