"""What is alive is counted without touching what it is not about, and what the collector freed is not forgotten."""

import copy
import functools
import gc
import re
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from labsupport.doctor.alive import KINDS, Finder, instances
from labsupport.doctor.census import Collections
from labsupport.doctor.cycles import most_common
from labsupport.doctor.filling import filled_at
from labsupport.doctor.names import by_name, own_names
from labsupport.ground.quiet import without_collections


class Model:
    pass


def test_a_tuple_that_is_just_being_made_is_left_alone():
    """gc.get_objects() would hold it, and Python then refuses to give it its length."""
    models, held = [Model() for _ in range(3)], []
    made = tuple((held.append(instances([Model])), n)[1] for n in range(50))
    assert len(made) == 50 and held[-1] == models


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_while_objects_are_walked_over(collects, monkeypatch):
    """What the walk meets may make objects, and a collection would move what is walked over under its feet."""
    was, on, walk = gc.isenabled(), [], gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *classes: on.append(gc.isenabled()) or walk(*classes))
    try:
        gc.enable() if collects else gc.disable()
        instances([Model])
        assert (on, gc.isenabled()) == ([False], collects)
    finally:
        gc.enable() if was else gc.disable()


def test_a_class_without_instances_is_not_searched_until_it_has_one(monkeypatch):
    """And one that is made for the first time, or anew, is found as soon as it is there."""

    class Large(Model):
        pass

    monkeypatch.setitem(KINDS, (__name__, "Model"), "models of this test")
    searched, walk, finder = [], gc.get_referrers, Finder()
    monkeypatch.setattr(
        gc, "get_referrers", lambda *classes: searched.append({cls.__name__ for cls in classes}) or walk(*classes)
    )
    count = lambda: len(finder.by_kind()["models of this test"])
    assert count() == 0 and searched[-1] >= {"Model", "Large"}
    assert count() == 0 and not searched[-1] & {"Model", "Large"}
    large = Large()
    assert count() == 1 and "Model" not in searched[-1]
    model = Model()
    assert count() == 2
    del large
    assert count() == 1
    large = Large()
    assert count() == 2
    del large, model
    assert (count(), count()) == (0, 0) and not searched[-1] & {"Model", "Large"}


@pytest.mark.parametrize(
    ("after", "freed"), [("nothing", 86), ("a higher peak", 0), ("a step", 0)], ids=lambda value: str(value)
)
def test_garbage_that_was_collected_after_the_peak_was_in_use_at_it(after, freed):
    """The collector may run while an error unwinds, before anything can be counted."""
    levels, peak = iter([95, 9]), [95]
    collections = Collections(SimpleNamespace(tensors_now=lambda: next(levels), tensors_peak=lambda: peak[0]))
    gc.disable()
    try:
        collections.watch()
        gc.collect()
    finally:
        gc.callbacks.pop()
        gc.enable()
    if after == "a step":
        collections.step_begins()
    elif after == "a higher peak":
        peak[0] = 96
    assert collections.freed() == freed


class Loop:
    def __init__(self):
        self.me = self


def test_garbage_is_told_by_the_class_that_most_of_it_is_of():
    with without_collections():
        gc.collect()
        for _ in range(200):
            Loop()
        most = most_common()
        assert (most.name, most.number) == ("Loop", 200) and re.fullmatch(r"test_alive\.py:\d+", most.place)
        assert not gc.garbage and not gc.get_debug()
        gc.collect()
        assert getattr(most_common(), "name", "") != "Loop"


class Kept:
    def __deepcopy__(self, memo):
        return set(own_names([]))


def test_what_a_library_was_given_is_found_by_its_class():
    assert "an object of Kept" in copy.deepcopy(Kept())
    assert "an object of Kept" not in own_names([])


@pytest.mark.parametrize("maxsize", [None, 8])
def test_what_a_function_caches_is_its(maxsize):
    load = functools.lru_cache(maxsize)(lambda number: np.ones(1000 + number))
    for number in range(4):
        load(number)
    held = by_name({"load": load})["load"]
    assert (held["arrays"], held["number of arrays"]) == (8 * 4006, 4)


class Store:
    @functools.lru_cache(None)  # noqa: B019  which keeps what it gives for as long as the class is there
    def load(self, number):
        return np.ones(1000 + number)


def test_the_line_of_a_cache_on_a_method_is_the_methods():
    Store().load(1)
    assert filled_at("Store", Store).endswith(f"test_alive.py:{Store.load.__wrapped__.__code__.co_firstlineno}")


class Outputs:
    def __init__(self):
        self.joined = np.zeros(0)


@dataclass
class Pair:
    key: np.ndarray


LOGS, OUTPUTS, CACHE = {"loss": [], "error": []}, Outputs(), {}


def test_the_line_is_that_of_the_key_or_attribute_which_holds_most():
    LOGS["loss"].append(0.5)
    LOGS["error"].append(np.ones(1000))
    of_the_key = sys._getframe().f_lineno - 1
    OUTPUTS.joined = np.concatenate([OUTPUTS.joined, np.ones(1000)])
    of_the_attribute = sys._getframe().f_lineno - 1
    CACHE[f"user {len(LOGS)}"] = Pair(np.ones(1000))
    of_the_cache = sys._getframe().f_lineno - 1
    assert filled_at("CACHE", CACHE).endswith(f"test_alive.py:{of_the_cache}")
    assert filled_at("LOGS", LOGS).endswith(f"test_alive.py:{of_the_key}")
    assert filled_at("OUTPUTS", OUTPUTS).endswith(f"test_alive.py:{of_the_attribute}")


def test_the_nearest_comes_first_when_things_are_weighed():
    far = near = [np.ones(1000)]
    for _ in range(11):
        far = [far]  # the array lies deeper than is looked, but for the shorter way
    assert by_name({"both": [far, near]})["both"]["arrays"] == 8000
