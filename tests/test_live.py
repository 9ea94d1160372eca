"""What draws while an arm runs: it moves, says in its text what it shows, and strangers' text does nothing in it."""

import html
import io
import re
import sys
from xml.etree import ElementTree

import pytest

from labsupport.ground.budget import MIB
from labsupport.ground.record import Cause, Phase
from labsupport.ground.result import ArmError, ArmResult, Line
from labsupport.showing import cards
from labsupport.showing.live import NotebookPlot, TerminalPlot, svg
from labsupport.showing.picture import arm_figure, compare_figure
from labsupport.showing.plain import plain, say
from labsupport.showing.words import bundle

HOSTILE = "<script>$\\bad$ & \"'{{x}}\u202e\ud800\x1b[31m"
SHOWN = "<script>$\\bad$ & \"'{{x}}\\u202e\\ud800\\x1b[31m"


def running(seconds, budget_given=True, label="a < b"):
    """An arm after some seconds, which has taken 10 MiB a second."""
    result = ArmResult(label, 100 * MIB, budget_given)
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
    result.phases = [Phase("load & decode", 0.0, 1.0, None, None, None)]
    result.open_phases = [("stack", 1.0)]
    titles = [title.text for title in ElementTree.fromstring(svg(result, 3.0)).iter("title")]
    assert titles == ["load & decode", "stack"]


def test_without_readings_tensors_are_unavailable_not_zero():
    result = running(3)
    result.tensors = []
    assert "tensors unavailable" in svg(result, 3.0)


@pytest.mark.parametrize("seconds, ticks", [(1.0, "01234"), (100.0, ["0", "20", "40", "60", "80", "100"])])
def test_ticks_are_few_and_round(seconds, ticks):
    texts = ElementTree.fromstring(svg(running(1), seconds)).iter("text")
    assert [text.text for text in texts if text.get("text-anchor") == "middle"][: len(ticks)] == list(ticks)


def test_thinning_never_hides_a_peak():
    result = ArmResult("spike", 100 * MIB, True)
    result.tensors = [(t / 1000, MIB) for t in range(10_000)]
    result.tensors[4321] = (4.321, 99 * MIB)
    points = [tuple(map(float, point.split(","))) for point in curves(svg(result, 10.0))[1].split()]
    assert len(points) < 500 and min(y for _, y in points) < 40 < 150 < points[0][1], (
        "of 240, with the floor at the foot"
    )


def died(label=HOSTILE):
    """An arm of which every text is a stranger's."""
    result = running(3, label=label)
    result.seconds, result.figures["peak"] = 3.0, 30 * MIB
    result.phases = [Phase(HOSTILE, 0.0, 2.0, None, None, None)]
    result.error = ArmError(Cause.OOM, HOSTILE, [Line(HOSTILE, 1, HOSTILE)], HOSTILE, HOSTILE)
    return result


def test_strangers_text_is_shown_and_does_nothing_in_the_live_plot():
    picture = svg(died(), 3.0)
    tags = {tag.tag for tag in ElementTree.fromstring(picture).iter()}
    assert tags == {"svg", "rect", "title", "text", "line", "polyline"}
    assert next(ElementTree.fromstring(picture).iter("title")).text == SHOWN


def test_strangers_text_is_shown_as_it_is_in_pictures():
    figures = arm_figure(died()), compare_figure([died(), running(3)], "tensors")
    axes = figures[0].axes[0]
    texts = [*axes.texts, *axes.get_legend().get_texts()]
    texts = [text.replace(r"\$", "$") for text in [axes.get_title(loc="left"), *(text.get_text() for text in texts)]]
    assert texts.count(SHOWN) == 2 and f"{SHOWN}: OOM" in texts, "at the phase and in the legend, in the title"
    for figure in figures:
        data, metadata = bundle(figure, HOSTILE)  # draws it: matplotlib would refuse "$\\bad$" and the surrogate
        assert data["text/plain"] == metadata["image/png"]["alt"] == SHOWN
        assert html.escape(SHOWN, quote=False) in data["text/html"].replace("&#34;", '"').replace("&#39;", "'")


def test_an_error_is_shown_with_its_lines_and_folded_log(shown):
    cards.show_error(died().error)
    ((markup, text),) = [(data["text/html"], data["text/plain"]) for data in shown]
    assert [summary in markup for summary in ("Whole traceback", "Log of the process")] == [True, True]
    assert "<script" not in markup and SHOWN in html.unescape(markup) and text.startswith(SHOWN)
    cards.show_error(ArmError(Cause.TIMEOUT, "too long"))
    assert "<details" not in shown[1]["text/html"]


def test_a_card_escapes_and_says_the_same_as_text(shown):
    cards.show_card(HOSTILE, [HOSTILE], "#000000")
    assert shown[0]["text/plain"] == f"{SHOWN}\n{SHOWN}"
    assert "<script" not in shown[0]["text/html"] and html.unescape(shown[0]["text/html"]).count(SHOWN) == 2


def test_a_notebook_plot_leaves_its_picture_and_the_error(monkeypatch):
    left = []

    class Handle:
        def update(self, data, **_):
            left.append(data)

    monkeypatch.setattr("IPython.display.display", lambda data, **_: left.append(data) or Handle())
    plot = NotebookPlot(quiet=False)
    plot.wait(HOSTILE, 3)
    assert "3rd in line" in plot.status.value and "<script>" not in plot.status.value
    plot.hear("stdout", HOSTILE)
    plot.update(died(), 3.0, True)
    plot.finish(died())
    _, picture, error = left  # first the widget itself
    assert {"image/png", "text/html", "text/plain"} <= picture.keys() and SHOWN in error["text/plain"]
    left.clear()
    quiet = NotebookPlot(quiet=True)
    quiet.finish(died())
    assert len(left) == 2 and set(left[1]) == {"text/plain"} and SHOWN in left[1]["text/plain"]
    left.clear()
    NotebookPlot(quiet=False).abandon()
    assert "interrupted" in left[1]["text/plain"]


def test_a_terminal_without_unicode_gets_readable_ascii(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    plot = TerminalPlot()
    plot.update(died("Größe × 2 …"), 3.0, True)
    plot.hear("stdout", "not yet")
    plot.finish(died("Größe × 2 …"))
    say("✔ \ud800")
    stream.seek(0)
    written = stream.read()
    assert r"Gr\xf6\xdfe x 2 ...: 3 s, tensors 29.0 MiB" in written and r"Gr\xf6\xdfe x 2 ...: OOM" in written
    assert written.endswith("[yes] \\ud800\n") and "not yet" not in written


def test_plain_text_keeps_lines_and_all_that_is_only_unusual():
    assert plain("a\tb\nÄ שלום 🙂 \\") == "a\tb\nÄ שלום 🙂 \\"
    assert plain("\x00\r\x9b\u2066") == r"\x00\r\x9b\u2066"
