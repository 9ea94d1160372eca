"""Verdicts on popular advice. A verdict is worked out from figures; one that they contradict is refused."""

import html
import tomllib
from functools import cache
from pathlib import Path

from labsupport.learner.ledger import record

VERDICT_MIME = "application/vnd.labsupport.verdict+json"
VERDICTS = ("holds", "partly", "fails", "not testable here")
_LOOK = {"holds": ("✔", "#009E73"), "partly": ("◐", "#E69F00"), "fails": ("✘", "#D55E00"), "not testable here": ("?", "#777777")}


class VerdictError(AssertionError):
    """The verdict given does not follow from the figures given with it."""


@cache
def claims():
    """The claims by id: {"C01": {"claim": …, "articles": […]}} from data/claims.toml."""
    with open(Path(__file__).parents[1] / "data" / "claims.toml", "rb") as file:
        return tomllib.load(file)


def judge(figures, tests):
    """The verdict that figures give: every test true "holds", none "fails", otherwise "partly".

    Returns (verdict, {statement: truth}). A figure that is None (unavailable) makes it "not testable here".
    """
    outcomes = {}
    for statement, expression in tests.items():
        used = compile(expression, "<test of a claim>", "eval").co_names
        unknown = set(used) - figures.keys()
        if unknown:
            raise VerdictError(f"the test {expression!r} uses {', '.join(sorted(unknown))}, which is no figure; there are {', '.join(figures)}")
        if any(figures[name] is None for name in used):
            return "not testable here", {}
        outcomes[statement] = bool(eval(expression, {"__builtins__": {}}, dict(figures)))
    if not outcomes:
        raise VerdictError("a verdict needs at least one test over its figures")
    return ("holds" if all(outcomes.values()) else "partly" if any(outcomes.values()) else "fails"), outcomes


def verdict(claim_id, expected, *, tests, figures, because, flips, unit="MiB"):
    """Judge a claim by this run's figures, show the verdict and leave it in the notebook for the report.

    expected: the verdict that the text around it argues for. Raises VerdictError if the figures say otherwise.
    tests: {what the claim says, in words: expression over the figures' names that is true if it is so}.
    figures: {name: number, yes or no (bool), text, or None}, all from this run. because, flips: one sentence each; why, and when it changes.
    """
    if claim_id not in claims():
        raise VerdictError(f"there is no claim {claim_id!r}; data/claims.toml has {', '.join(claims())}")
    figures = {name: value if value is None or isinstance(value, (bool, str)) else round(float(value), 4) for name, value in figures.items()}
    found, outcomes = judge(figures, tests)
    record("verdict", id=claim_id, verdict=found, figures=figures, unit=unit)  # also one that contradicts the text: machines differ
    if found not in (expected, "not testable here"):
        raise VerdictError(f"{claim_id}: the text says \"{expected}\", but the figures say \"{found}\": {outcomes} with {figures}")
    if found == "not testable here":
        because = "a figure it needs is unavailable on this machine"
    _show(claim_id, found, because, flips, figures, tests, outcomes, unit)


def untestable(claim_id, *, reason, command):
    """Record that a claim cannot be tested on this machine: why not, and the command that would test it."""
    if claim_id not in claims():
        raise VerdictError(f"there is no claim {claim_id!r}; data/claims.toml has {', '.join(claims())}")
    record("verdict", id=claim_id, verdict="not testable here", figures={}, unit="")
    _show(claim_id, "not testable here", reason, f"run {command}", {}, {}, {}, "")


def figures_text(figures, unit):
    """The figures of a verdict in one line; truth as yes or no, what could not be measured as "unavailable"."""
    words = {None: "unavailable", True: "yes", False: "no"}
    shown = [f"{name} = {value:,.4g}" if isinstance(value, float) else f"{name} = {words.get(value, value)}" for name, value in figures.items()]
    return ", ".join(shown) + (f" ({unit})" if shown and unit else "")


def _show(claim_id, found, because, flips, figures, tests, outcomes, unit):
    from IPython.display import display

    claim = claims()[claim_id]["claim"]
    sign, colour = _LOOK[found]
    numbers = f"Measured: {figures_text(figures, unit) or 'nothing'}"
    lines = [f"{'yes' if outcomes[words] else 'no'}: {words} ({tests[words]})" for words in outcomes]
    text = "\n".join([f"{claim_id} {sign} {found}: \"{claim}\"", because, *lines, numbers, f"When it changes: {flips}"])
    body = "<br>".join(html.escape(part) for part in [because, *lines, numbers, f"When it changes: {flips}"])
    markup = (
        f'<div style="border-left:6px solid {colour};padding:4px 10px"><b>{claim_id} {sign} {found}</b>: '
        f"<i>{html.escape(claim)}</i><br>{body}</div>"
    )
    facts = {
        "id": claim_id, "verdict": found, "because": because, "flips": flips, "figures": figures,
        "tests": tests, "outcomes": outcomes, "unit": unit,
    }  # fmt: skip
    display({"text/plain": text, "text/html": markup, VERDICT_MIME: facts}, raw=True)
