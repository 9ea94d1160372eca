"""The small things that make a notebook a course: the scale of a run and graded exercises."""

import html
from contextlib import contextmanager

EXERCISE_MIME = "application/vnd.labsupport.exercise+json"


def choose(scale, quick, full):
    """The value for this scale: quick=... or full=.... Raises ValueError for another word."""
    if scale not in ("quick", "full"):
        raise ValueError(f"SCALE is {scale!r}: write SCALE = \"quick\" (under 90 s) or SCALE = \"full\"")
    return quick if scale == "quick" else full


@contextmanager
def exercise(number, hint):
    """Grade an exercise by the asserts in the block; shows "passed", or what is missing and the hint.

    A failing assert does not stop the notebook, so that "run all cells" reaches the end of an unsolved lab.
    """
    try:
        yield
        passed, reason = True, ""
    except Exception as error:
        passed, reason = False, str(error) or f"{type(error).__name__}: the code does not do it yet"
    from IPython.display import display

    text = f"Exercise {number}: passed" if passed else f"Exercise {number}: not yet. {reason}\nHint: {hint}"
    sign = "✔" if passed else "✎"
    colour = "#009E73" if passed else "#E69F00"
    markup = f'<div style="border-left:6px solid {colour};padding:4px 10px">{sign} {html.escape(text).replace(chr(10), "<br>")}</div>'
    facts = {"number": number, "passed": passed, "reason": reason, "hint": hint}
    display({"text/plain": text, "text/html": markup, EXERCISE_MIME: facts}, raw=True)
