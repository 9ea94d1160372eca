"""The labs by name: what each says about itself (data/labs.json, made by tools/build.py) and data/map.toml adds."""

import json
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from labsupport.ground.files import data_file, notebook_file


@dataclass(frozen=True)
class Lab:
    """What a lab says about itself, and what data/map.toml adds (symptoms, needs).

    names: TensorFlow's own that hardly another lab uses. slug: its name in code, such as "leaks_over_epochs"; numbers are for readers. needs: slugs of labs.
    """

    slug: str
    number: str
    title: str
    symptom: str
    time: str
    claims: tuple
    exercises: tuple
    names: tuple
    symptoms: tuple
    needs: tuple

    @property
    def name(self):
        """Its notebook's, without the suffix."""
        return f"{self.number}_{self.slug}"

    @property
    def minutes(self):
        """To work through it, as text: "30", or "an hour"."""
        return self.time.rpartition(", ")[2].removesuffix(" to work through")


@cache
def _map():
    return tomllib.loads(data_file("map.toml").read_text())


def synonyms():
    """[["OOM", "out of memory", …], …]: what means the same in a symptom, from data/map.toml."""
    return _map()["synonyms"]


def paths():
    """{"On a GPU": [Lab, …]}: ways through the series, each in its reading order, from data/map.toml."""
    return {words: [labs()[slug] for slug in slugs] for words, slugs in _map()["paths"].items()}


@cache
def labs():
    """{"image_stacking": Lab} in the order of their numbers."""
    more = _map()
    facts = json.loads(data_file("labs.json").read_text())
    as_tuples = lambda table: {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    return {slug: Lab(slug, **as_tuples(facts[slug] | more[slug])) for slug in facts}


def see_lab(first, *others):
    """Where to read on, for the end of a sentence: `see lab 09, "What leaks over epochs" (labs/09_leaks_over_epochs.ipynb)`.

    first, others: slugs of labs, such as "leaks_over_epochs". The first one's file is told where there is one, from the
    current folder if it lies in it. Raises KeyError for a slug that no lab has.
    """
    lab = labs()[first]
    path = notebook_file(lab.name)
    if path is not None and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    also = ", ".join(f'{labs()[slug].number} "{labs()[slug].title}"' for slug in others)
    return f'see lab {lab.number}, "{lab.title}"' + f" ({path})" * bool(path) + f"; also {also}" * bool(also)
