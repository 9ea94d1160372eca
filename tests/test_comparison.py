"""Side by side: the table, the picture, and what is refused."""

import pytest

from labsupport import compare
from labsupport.ground.budget import MIB
from labsupport.ground.record import Cause
from labsupport.ground.result import ArmError, ArmResult, Stopped
from labsupport.showing.picture import arm_figure


def arm(label, peak, error=None):
    result = ArmResult(label, 256 * MIB, True, value=1.23456, error=error, seconds=2.0, device="CPU:0")
    result.figures |= {"peak": peak and peak * MIB, "end": 0, "process_peak": 300 * MIB, "process_end": None}
    result.tensors = [(0.0, 0), (1.0, (peak or 0) * MIB)]
    return result


def test_the_table():
    died = arm("died", 200, ArmError(Cause.OOM, "no room"))
    both = compare(arm("list", 100), arm("stream", 25), died)
    assert list(both.frame["× smaller than the first"])[:2] == [1, 4]
    rows = both.text.splitlines()
    assert "200.0+" in next(row for row in rows if row.startswith("died")), "a peak cut short must not look like a need"
    by_process = compare(arm("list", 100), arm("stream", 25), story="process")
    assert list(by_process.frame["× smaller than the first"]) == [1, 1]


def test_an_arm_that_died_is_nothing_to_be_compared_with():
    died = arm("died", 200, ArmError(Cause.OOM, "no room"))
    both, other_way = compare(died, arm("stream", 25)), compare(arm("stream", 25), died)
    assert both.frame["× smaller than the first"].isna().all() and "smaller" not in both.text
    assert list(other_way.frame["× smaller than the first"].isna()) == [False, True] and "smaller" in other_way.text


def test_an_unavailable_figure_stays_so():
    assert "unavailable" in compare(arm("list", 100), arm("stream", None)).text


def test_the_picture_has_the_table_as_its_text_and_markup_does_nothing(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **more: shown.append((data, more)))
    both = compare(arm("<b>list \u202e", 100), arm("$\\bad$", 25))
    both._ipython_display_()
    (data, more), (table, _) = shown
    assert both.text in data["text/plain"] and both.text in more["metadata"]["image/png"]["alt"]
    assert r"<b>list \u202e" in both.text and r"&lt;b&gt;list \u202e" in table.data and "<b>" not in table.data


@pytest.mark.parametrize(("cause", "at_the_budget"), [(Cause.OOM, True), (Cause.MEMORY, False)])
def test_a_cross_stands_at_the_budget_only_where_tensors_had_no_room(cause, at_the_budget):
    died = arm("died", 20, ArmError(cause, "no room"))
    (axes,) = arm_figure(died).axes
    crosses = [line.get_ydata()[0] for line in axes.lines if line.get_marker() == "X"]
    assert [cross > 256 for cross in crosses] == [at_the_budget]


def test_refusals_say_what_to_write():
    with pytest.raises(ValueError, match=r"compare\(failure, fix\)"):
        compare(arm("list", 1))
    with pytest.raises(ValueError, match="give run\\(..., label=...\\)"):
        compare(arm("list", 1), arm("list", 2))
    with pytest.raises(ValueError, match='"tensors" or "process"'):
        compare(arm("list", 1), arm("stream", 2), story="time")
    with pytest.raises(Stopped, match="stream: stopped before the end; run that cell again"):
        compare(arm("list", 1), arm("stream", 2, ArmError(Cause.STOPPED, "you stopped it")))
