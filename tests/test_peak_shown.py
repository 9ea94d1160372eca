"""The peak taken apart, as it is shown: colours that stay apart, a curve, tables, sentences. No arm runs here."""

import numpy as np
import pytest
from eyes import BLINDNESS, alike, rgb

from labsupport.ground.budget import MIB
from labsupport.ground.result import Line
from labsupport.peak.kinds import KINDS
from labsupport.peak.parts import Grown, Parts, Row
from labsupport.showing.apart import Apart, figure
from labsupport.showing.palette import PARTS

LINE = Line("Cell In[4]", 11, 'kept.append("<b>" + str(gradients))')


def row(kind, size, name="MatMul", line=LINE):
    return Row(kind, line, "net/dense", name, "[8,4]", "float32", size, 1)


def parts(label="kept", asked=None, end=None, growth=()):
    rows = [row("gradients", 60 * MIB), row("weights", 20 * MIB, "kernel", None)]
    curve = [[0.0, {}], [0.5, {"weights": 20 * MIB}], [1.0, {"weights": 20 * MIB, "gradients": 60 * MIB}], [2.0, {}]]
    return Parts(label, rows, asked, 80 * MIB, 80 * MIB, curve, end, "epoch", 5, list(growth))


@pytest.mark.parametrize("blindness", [None, *BLINDNESS])
def test_kinds_of_memory_stay_apart_side_by_side_for_all_eyes(blindness):
    assert len(PARTS) == len(KINDS)
    assert not alike(PARTS, 15, blindness), "fills that touch each other need more than lines"


def test_black_words_are_legible_on_every_kind():
    """WCAG 2.2, 1.4.3: a contrast of 4.5 : 1."""
    linear = np.where(rgb(PARTS) <= 0.04045, rgb(PARTS) / 12.92, ((rgb(PARTS) + 0.055) / 1.055) ** 2.4)
    contrast = (linear @ [0.2126, 0.7152, 0.0722] + 0.05) / 0.05
    assert contrast.min() >= 4.5


def test_a_curve_stands_over_the_bars_and_marks_the_worst_moment():
    drawn = figure(Apart([parts(), parts("fix", asked=row("working memory", 30 * MIB))], [96 * MIB]))
    over_time, bars, dying, _ = drawn.axes
    assert "second run" in over_time.get_xlabel() and "80.0 MiB in use" in over_time.get_title(loc="left")
    assert [text.get_text() for text in over_time.texts] == ["worst moment, below"]
    assert over_time.lines[1].get_xdata()[0] == 1.0 and dying.lines[1].get_xdata()[0] == 2.0
    assert "had no room" in dying.texts[0].get_text() and "budget" in bars.get_xlabel()
    drawn.canvas.draw()
    sizes = [text.get_fontsize() for axes in drawn.axes for text in axes.texts]
    assert min(sizes) >= 9, "ten inches are shown on nine: 8.5 points are left"


def test_what_grows_and_what_is_left_is_said_and_what_is_not_seen_too():
    growth = [Grown("gradients", LINE, 9.9 * MIB), Grown("working memory", LINE, 0.001 * MIB)]
    text = Apart([parts(growth=growth, end=[row("weights", 20 * MIB)]), parts("cut")], []).text
    assert text.count("Grows by") == 1
    assert "Grows by 9.9 MiB with every epoch (gradients) at line 11: kept.append" in text
    assert "At its end 20.0 MiB were left: weights 20.0." in text
    assert "not to its end" in text


def test_the_tables_escape_code_and_break_long_words(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda *data, **_: shown.extend(data))
    Apart([parts()], [])._ipython_display_()
    html = shown[-1].data
    assert "&lt;b&gt;" in html and "<b>&#34;" not in html
    assert "kept.\u200bappend" in html and "second run" in html and 'scope="col"' in html


def test_over_time_is_a_table_of_mib_by_kind():
    table = parts().over_time
    assert table.index.name == "seconds" and table["weights"].tolist() == [0, 20, 20, 0]
    assert table.sum(axis=1).max() == 80
