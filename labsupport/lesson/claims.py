"""Verdicts on popular advice. A verdict is worked out from figures; one that they contradict is refused.

What a claim says, its tests, and why and when its verdict changes stand in data/claims.toml; a lab gives the figures.
"""

import ast
import math
import tomllib
from functools import cache

from labsupport.ground.files import data_file
from labsupport.lesson.ledger import record
from labsupport.showing.cards import show_card
from labsupport.showing.palette import BAD, GOOD, HALF, UNKNOWN
from labsupport.showing.plain import plain

VERDICT_MIME = "application/vnd.labsupport.verdict+json"
UNTESTABLE = "not testable here"
_LOOKS = {"holds": GOOD, "partly": HALF, "fails": BAD, UNTESTABLE: UNKNOWN}
SIGNS = {verdict: look.sign for verdict, look in _LOOKS.items()}
# What a test may be made of: names, numbers, text, comparisons, and/or/not, arithmetic of numbers. Anything else, such as
# an attribute or a call, could reach beyond the figures; the report judges text that it reads from notebooks. No powers
# and no arithmetic of text, with which a short test could fill the memory.
_ALLOWED = (
    ast.Expression,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.Compare,
    ast.cmpop,
    ast.BoolOp,
    ast.boolop,
    ast.UnaryOp,
    ast.unaryop,
)
_ALLOWED += (ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div)


class VerdictError(AssertionError):
    """The verdict given does not follow from the figures given with it."""


@cache
def claims():
    """The claims by id from data/claims.toml, which explains their fields: {"C01": {"claim": …, "because": …, …}}."""
    return {
        claim_id: {"unit": "MiB", "tests": {}, "flips": "", **claim}
        for claim_id, claim in tomllib.loads(data_file("claims.toml").read_text()).items()
    }


def _is_text(node, figures):
    value = (
        node.value if isinstance(node, ast.Constant) else figures.get(node.id) if isinstance(node, ast.Name) else None
    )
    return isinstance(value, (str, bytes))


def _parsed(test, figures):
    """The syntax tree of a test. Raises VerdictError for what it must not be made of."""
    try:
        tree = ast.parse(test, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise VerdictError(f"the test {test!r} is no expression") from None
    for node in ast.walk(tree):
        if (
            not isinstance(node, _ALLOWED)
            or isinstance(node, ast.BinOp)
            and any(_is_text(part, figures) for part in ast.walk(node))
        ):
            raise VerdictError(f"the test {test!r} is more than comparisons and arithmetic of figures")
    return tree


def _evaluate(test, figures):
    """The truth of one test; None where a figure that it uses is unavailable."""
    tree = _parsed(test, figures)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if unknown := used - figures.keys():
        raise VerdictError(
            f"the test {test!r} uses {', '.join(sorted(unknown))}, which is no figure; there are {', '.join(figures)}"
        )
    if any(figures[name] is None for name in used):
        return None
    try:
        return bool(eval(compile(tree, "<test of a claim>", "eval"), {"__builtins__": {}}, dict(figures)))
    except (ArithmeticError, TypeError, RecursionError) as error:
        raise VerdictError(f"the test {test!r} cannot be worked out from {figures}: {error}") from None


def judge(figures, tests):
    """The verdict that figures give: every test true "holds", none "fails", otherwise "partly".

    Returns (verdict, {statement: truth}). A figure that is unavailable (None, NaN) makes it "not testable here".
    """
    figures = {name: _figure(value) for name, value in figures.items()}
    outcomes = {statement: _evaluate(test, figures) for statement, test in tests.items()}
    if not outcomes:
        raise VerdictError("a verdict needs at least one test over its figures")
    if None in outcomes.values():
        return UNTESTABLE, {}
    return ("holds" if all(outcomes.values()) else "partly" if any(outcomes.values()) else "fails"), outcomes


def _figure(value):
    """A figure as it is judged, shown and kept: text and truth as they are, numbers rounded; None for what is no finite number."""
    if isinstance(value, str):
        return plain(value)
    if value is None or isinstance(value, bool):
        return value
    return round(float(value), 4) if math.isfinite(value) else None


def verdict(claim_id, expected, **figures):
    """Judge a claim by this run's figures, show the verdict and leave it in the notebook for the report.

    expected: the verdict that the text around it argues for. Raises VerdictError if the figures say otherwise.
    figures: name=number, yes or no (bool), text, or None for unavailable; all from this run. The claim's tests use them.
    """
    if claim_id not in claims():
        raise VerdictError(f"there is no claim {claim_id!r}; data/claims.toml has {', '.join(claims())}")
    claim = claims()[claim_id]
    figures = {name: _figure(value) for name, value in figures.items()}
    found, outcomes = (UNTESTABLE, {}) if "command" in claim else judge(figures, claim["tests"])
    record(
        "verdict", id=claim_id, verdict=found, figures=figures, unit=claim["unit"]
    )  # also one that contradicts the text: machines differ
    if found not in (expected, UNTESTABLE):
        raise VerdictError(
            f'{claim_id}: the text says "{expected}", but the figures say "{found}": {outcomes} with {figures}'
        )
    because = (
        "a figure it needs is unavailable on this machine"
        if found == UNTESTABLE and "command" not in claim
        else claim["because"]
    )
    _show(claim_id, claim, found, because, figures, outcomes)


def figures_text(figures, unit):
    """The figures of a verdict in one line; truth as yes or no, what could not be measured as "unavailable"."""
    words = {None: "unavailable", True: "yes", False: "no"}
    shown = [
        f"{name} = {value:,.4g}" if isinstance(value, float) else f"{name} = {words.get(value, value)}"
        for name, value in figures.items()
    ]
    measured = any(isinstance(value, int | float) and not isinstance(value, bool) for value in figures.values())
    return ", ".join(shown) + (f" ({unit})" if measured and unit else "")


def otherwise(claim):
    return f"What would test it: {claim['command']}" if "command" in claim else f"When it changes: {claim['flips']}"


def _show(claim_id, claim, found, because, figures, outcomes):
    """The card, and for the report all that it needs to judge again."""
    facts = {"id": claim_id, "verdict": found, "because": because, "figures": figures, "outcomes": outcomes}
    facts |= {name: claim[name] for name in ("flips", "tests", "unit")}
    lines = [f"{'yes' if outcomes[words] else 'no'}: {words} ({claim['tests'][words]})" for words in outcomes]
    measured = f"Measured: {figures_text(figures, claim['unit']) or 'nothing'}"
    show_card(
        f"{claim_id} {SIGNS[found]} {found}",
        [f'"{claim["claim"]}"', because, *lines, measured, otherwise(claim)],
        _LOOKS[found].colour,
        {VERDICT_MIME: facts},
    )
