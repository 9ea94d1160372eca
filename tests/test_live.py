"""The live plot moves, and says in its text what it shows."""

import html
import re
from xml.etree import ElementTree

from labsupport.ground.budget import MIB
from labsupport.showing.live import _thin, svg
from labsupport.ground.meter import Phase
from labsupport.ground.result import ArmResult


def running(seconds, budget_given=True):
    """An arm after some seconds, which has taken 10 MiB a second."""
    result = ArmResult("a < b", 100 * MIB, budget_given)
    result.tensors = [(t / 10, t * MIB) for t in range(seconds * 10)]
    result.process = [(t / 10, 2 * t * MIB) for t in range(seconds * 10)]
    return result


def curves(picture):
    return [p.get("points") for p in ElementTree.fromstring(picture).iter("polyline")]


def test_it_is_well_formed_and_describes_itself():
    label = html.unescape(re.search('aria-label="([^"]*)"', svg(running(3), 3.0))[1])
    assert label == "Live memory plot of a < b: 3.0 seconds, tensors 29.0 MiB, budget 100.0 MiB"
    assert len(curves(svg(running(3), 3.0))) == 2


def test_it_moves():
    early, late = curves(svg(running(3), 3.0)), curves(svg(running(6), 6.0))
    assert all(len(b) > len(a) and not b.startswith(a) for a, b in zip(early, late))  # longer, and the axis has grown


def test_the_budget_line_is_drawn_only_for_a_budget_that_was_given():
    assert ">budget 100.0 MiB<" in svg(running(3), 3.0)
    assert ">budget " not in svg(running(3, budget_given=False), 3.0)


def test_finished_and_running_phases_are_named():
    result = running(3)
    result.phases = [Phase("load & decode", 0.0, 1.0, None, None)]
    result.open_phases = [("stack", 1.0)]
    titles = [title.text for title in ElementTree.fromstring(svg(result, 3.0)).iter("title")]
    assert titles == ["load & decode", "stack"]


def test_without_readings_tensors_are_unavailable_not_zero():
    result = running(3)
    result.tensors = []
    assert "tensors unavailable" in svg(result, 3.0)


def test_thinning_never_hides_a_peak():
    points = [(t, 1) for t in range(10_000)]
    points[4321] = (4321, 99)
    thin = _thin(points)
    assert len(thin) < 500 and (4321, 99) in thin
