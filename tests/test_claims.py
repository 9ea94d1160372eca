"""A verdict is worked out from figures, and one that they contradict is refused; every test can come out either way."""

import math
import time

import pytest

from labsupport import verdict
from labsupport.lesson import claims as room
from labsupport.lesson.claims import VERDICT_MIME, VerdictError, claims, figures_text, judge

LESS = {"less than half": "fix < 0.5 * failure", "finishes": "ok"}


@pytest.fixture(autouse=True)
def one_claim(monkeypatch):
    """Only C01, with tests of our own."""
    claim = {"claim": "It <helps>.", "because": "The reason.", "flips": "Never.", "unit": "MiB", "tests": LESS}
    monkeypatch.setattr(room, "claims", lambda: {"C01": claim})


@pytest.mark.parametrize(
    "fix, ok, expected",
    [
        (10, True, "holds"),
        (10, False, "partly"),
        (90, False, "fails"),
        (None, True, "not testable here"),
        (math.nan, True, "not testable here"),
        (math.inf, True, "not testable here"),
    ],
)
def test_figures_give_the_verdict(fix, ok, expected):
    assert judge({"fix": fix, "failure": 100, "ok": ok}, LESS)[0] == expected


def test_a_verdict_leaves_its_figures_in_the_notebook(shown):
    verdict("C01", "holds", fix=10, failure=100, ok=True)
    facts = shown[0][VERDICT_MIME]
    assert (facts["id"], facts["verdict"], facts["because"]) == ("C01", "holds", "The reason.")
    assert facts["figures"]["fix"] == 10
    assert facts["outcomes"] == {"less than half": True, "finishes": True} and facts["tests"] == LESS
    assert "It <helps>." in shown[0]["text/plain"] and "It &lt;helps&gt;." in shown[0]["text/html"]


def test_a_verdict_against_its_figures_is_refused(shown):
    with pytest.raises(VerdictError, match='C01: the text says "holds", but the figures say "fails"'):
        verdict("C01", "holds", fix=90, failure=100, ok=False)
    assert shown == []


@pytest.mark.parametrize("missing", [None, math.nan])
def test_an_unavailable_figure_makes_it_untestable_here_never_zero(shown, missing):
    verdict("C01", "holds", fix=missing, failure=100, ok=True)
    facts = shown[0][VERDICT_MIME]
    assert (facts["verdict"], facts["figures"]["fix"]) == ("not testable here", None)
    assert "fix = unavailable" in shown[0]["text/plain"] and "unavailable on this machine" in facts["because"]


def test_text_as_a_figure_is_shown_and_does_nothing(shown):
    verdict("C01", "holds", fix=10, failure=100, ok=True, holder="<b>\u202e\ud800")
    assert r"holder = <b>\u202e\ud800" in shown[0]["text/plain"] and "<b>\\" not in shown[0]["text/html"]
    assert shown[0][VERDICT_MIME]["figures"]["holder"] == r"<b>\u202e\ud800"


def test_mistakes_in_a_verdict_are_named():
    with pytest.raises(VerdictError, match="there is no claim 'C99'"):
        verdict("C99", "holds", fix=10)
    with pytest.raises(VerdictError, match="uses failure, ok, which is no figure|uses failure, which is no figure"):
        verdict("C01", "holds", fix=10)
    with pytest.raises(VerdictError, match="at least one test"):
        judge({"fix": 10}, {})


@pytest.mark.parametrize(
    "test",
    [
        "fix.real > 1",
        "().__class__",
        "print(fix)",
        "fix ** 9 ** 9",
        "fix << 9999999999",
        "'x' * 9999999999 > ''",
        "text * 9999999999 > ''",
        "(text or 1) * 9999999999 > ''",
        "[fix] * 9 > []",
        "fix if ok else 1",
        "(lambda: 1)()",
        "f'{fix}'",
        "(fix := 3) > 2",
        "fix >",
        "fix > text",
        "fix / nothing > 1",
        "\0",
        "(" * 9999 + ")" * 9999,
    ],
)
def test_a_test_is_only_comparisons_and_arithmetic_of_figures(test):
    begun = time.monotonic()
    with pytest.raises(VerdictError):
        judge({"fix": 10, "ok": True, "text": "abc", "nothing": 0}, {"so": test})
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("claim_id", claims())
def test_each_test_of_a_claim_can_come_out_either_way(claim_id):
    """By figure sets that a run could give, each with the words how; a claim that no run here can decide says which would."""
    claim = claims()[claim_id]
    assert claim["claim"] and claim["because"]
    if "command" in claim:
        assert not claim.get("tests") and not claim.get("runs")
        return
    assert claim["flips"] and claim["tests"]
    seen = {statement: set() for statement in claim["tests"]}
    for run in claim["runs"]:
        figures = {name: value for name, value in run.items() if name != "run"}
        assert len(run["run"]) > 10, "how a run would give these figures"
        verdict, outcomes = judge(figures, claim["tests"])
        assert outcomes, f"a figure is missing in {run}"
        for statement, truth in outcomes.items():
            seen[statement].add(truth)
    stuck = {statement: truths for statement, truths in seen.items() if truths != {True, False}}
    assert not stuck, f"no figures here make these come out otherwise: {stuck}"


def test_figures_in_words():
    assert (
        figures_text({"a": 1234.5, "b": None, "c": True, "d": "gather"}, "MiB")
        == "a = 1,234, b = unavailable, c = yes, d = gather (MiB)"
    )
