"""Colours as eyes see them that tell some of them apart badly, or not at all."""

import itertools

import numpy as np
from colorspacious import cspace_convert, deltaE

BLINDNESS = ["deuteranomaly", "protanomaly", "tritanomaly"]


def rgb(colours):
    """An array of (r, g, b) from 0 to 1, of colours such as "#0072B2"."""
    return np.array([[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in colours])


def alike(colours, least, blindness=None):
    """Pairs of colours that differ by less; in CAM02-UCS a difference of 1 is just seen. Blindness: Machado et al. 2009, at full severity."""
    seen = rgb(colours)
    if blindness:
        space = {"name": "sRGB1+CVD", "cvd_type": blindness, "severity": 100}
        seen = np.clip(cspace_convert(seen, space, "sRGB1"), 0, 1)
    pairs = itertools.combinations(range(len(colours)), 2)
    return [(colours[i], colours[j]) for i, j in pairs if deltaE(seen[i], seen[j], input_space="sRGB1") < least]
