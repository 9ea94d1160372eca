"""A verdict is worked out from figures, and one that they contradict is refused."""

import pytest

from labsupport import untestable, verdict
from labsupport.lesson.claims import VERDICT_MIME, VerdictError, claims, judge

LESS = {"less than half": "fix < 0.5 * failure", "finishes": "ok"}
WORDS = {"because": "the reason", "flips": "never"}


@pytest.fixture
def shown(monkeypatch):
    """What was displayed, as a list of MIME bundles."""
    bundles = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: bundles.append(data))
    return bundles


@pytest.mark.parametrize(
    "fix, ok, expected", [(10, True, "holds"), (10, False, "partly"), (90, False, "fails"), (None, True, "not testable here")]
)
def test_figures_give_the_verdict(fix, ok, expected):
    assert judge({"fix": fix, "failure": 100, "ok": ok}, LESS)[0] == expected


def test_a_verdict_leaves_its_figures_in_the_notebook(shown):
    verdict("C01", "holds", figures={"fix": 10, "failure": 100, "ok": True}, tests=LESS, **WORDS)
    facts = shown[0][VERDICT_MIME]
    assert (facts["id"], facts["verdict"]) == ("C01", "holds")
    assert facts["figures"]["fix"] == 10
    assert facts["outcomes"] == {"less than half": True, "finishes": True}
    assert claims()["C01"]["claim"] in shown[0]["text/plain"]


def test_a_verdict_against_its_figures_is_refused(shown):
    with pytest.raises(VerdictError, match='C01: the text says "holds", but the figures say "fails"'):
        verdict("C01", "holds", figures={"fix": 90, "failure": 100, "ok": False}, tests=LESS, **WORDS)
    assert shown == []


def test_an_unavailable_figure_makes_it_untestable_here_never_zero(shown):
    verdict("C01", "holds", figures={"fix": None, "failure": 100, "ok": True}, tests=LESS, **WORDS)
    assert shown[0][VERDICT_MIME]["verdict"] == "not testable here"
    assert "fix = unavailable" in shown[0]["text/plain"]


def test_untestable_says_why_and_what_would_test_it(shown):
    untestable("C01", reason="there is no GPU", command="make test on a GPU machine")
    assert shown[0][VERDICT_MIME]["verdict"] == "not testable here"
    assert "there is no GPU" in shown[0]["text/plain"] and "make test on a GPU machine" in shown[0]["text/plain"]


@pytest.mark.parametrize(
    "claim, tests, message",
    [("C99", LESS, "there is no claim 'C99'"), ("C01", {"so": "speed > 1"}, "uses speed, which is no figure"), ("C01", {}, "at least one test")],
)
def test_mistakes_in_a_verdict_are_named(shown, claim, tests, message):
    with pytest.raises(VerdictError, match=message):
        verdict(claim, "holds", figures={"fix": 10, "failure": 100, "ok": True}, tests=tests, **WORDS)
