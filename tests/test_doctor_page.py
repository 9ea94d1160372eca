"""The doctor's report as a page: what it says, tried in a real browser, light and dark, wide and narrow, by axe-core."""

import pytest
from browser import chromium, launched, shut_out

from labsupport.doctor.page import page
from labsupport.doctor.rules import diagnose
from labsupport.ground.budget import MIB
from labsupport.ground.record import Census, Facts, Holder, Kind, Step
from labsupport.ground.result import ArmResult

EVIL = "kept</script><img src=x onerror=alert(1)>"


def diagnosis(grown=10):
    """Of a run whose list of tensors grew by so many MiB a look."""
    held = [
        Census(2**n, n * grown * MIB, tensors=n * grown * MIB, tensor_holders=[Holder(EVIL, n, n * grown * MIB)])
        for n in range(7)
    ]
    facts = Facts(
        steps=[Step("train (t.py:9)", Kind.FUNCTION, "t.py:9", count=64)],
        censuses=held,
        holders=["9.0 MiB held (t.py, line 3: x)"],
    )
    result = ArmResult("t.py", 256 * MIB, True, facts=facts, seconds=3.0)
    result.figures |= {"peak": 6 * grown * MIB, "end": 0}
    result.tensors = [(n / 10, n * grown * MIB) for n in range(7)]
    return diagnose(result)


def test_it_tells_what_the_terminal_tells_and_escapes_it():
    text = page(diagnosis(), ["tensors, peak: 2.0 MiB, now 1.0 MiB: 50% less"])
    for words in (
        "1. retained tensors",
        "09_leaks_over_epochs.ipynb",
        "9.0 MiB held (t.py, line 3: x)",
        "50% less",
        "unavailable",
    ):
        assert words in text
    assert "<img" not in text and "highest sample 60.0 MiB at 0.6 s" in text
    assert "No suspect" in page(diagnosis(grown=0)) and "Findings" in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible_and_fits(tmp_path, scheme):
    file = tmp_path / "doctor.html"
    file.write_text(page(diagnosis()), encoding="utf-8")
    with launched(chromium()) as browser:
        shown = browser.new_page(viewport={"width": 400, "height": 900}, color_scheme=scheme)
        asked = []
        shown.on("request", lambda request: asked.append(request.url))
        shown.goto(file.as_uri())
        assert not shut_out(shown)
        assert shown.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        # 60 MiB of an axis that ends 5 % above the budget of 256 MiB, in a picture of 192 pixels.
        drawn = shown.evaluate("document.querySelector('polyline').getBoundingClientRect().height")
        assert drawn == pytest.approx(192 * 60 / (1.05 * 256), abs=1)
        shown.keyboard.press("Tab")
        assert "labs/" in shown.evaluate("document.activeElement.href")
        assert asked == [file.as_uri()]
