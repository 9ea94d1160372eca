"""The peak taken apart as one HTML page to explore: it needs no network, and says the same in tables as in pictures."""

from pathlib import Path

from markupsafe import Markup

from labsupport.ground.budget import MIB
from labsupport.peak.kinds import KINDS
from labsupport.showing.cards import template
from labsupport.showing.curve import COLOUR_OF
from labsupport.showing.plain import plain

_PAGE = Path(__file__).with_name("peak_page.html")
# What a reader can cut by: (name, words); and what lies below what: each level is a field of a row.
_ORDERS = [("kind", "kind, line"), ("line", "line"), ("layer", "layer"), ("operation", "operation")]
_PATHS = {
    "kind": ["kind", "line"],
    "line": ["line", "kind"],
    "layer": ["layer", "kind", "operation"],
    "operation": ["operation", "kind", "line"],
}


def page(arms, budgets, sentences):
    """The page as text. arms: [Parts]; budgets: bytes; sentences: for each arm what there is to say, the first on top.

    Raises RuntimeError without plotly, the library that draws it.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise RuntimeError("a page needs the library that draws it: pip install plotly") from None
    told = [_arm(arm) for arm in arms]
    seen = {row.kind for arm in arms for row in arm.rows} | {kind for arm in arms for kind in arm.over_time}
    described = [{"summary": first, "after": after} for first, *after in sentences]
    return template(_PAGE.read_text(encoding="utf-8")).render(
        arms=[{**one, **words, "over_time": _in_words(arm)} for arm, one, words in zip(arms, told, described)],
        orders=_ORDERS,
        kinds=[(kind, COLOUR_OF[kind]) for kind in KINDS if kind in seen],
        data={"arms": told, "colours": COLOUR_OF, "paths": _PATHS, "budgets": sorted({size / MIB for size in budgets})},
        plotly=Markup(get_plotlyjs()),
    )


def _arm(arm):
    """What the page's script knows of an arm: sizes in MiB, all text plain."""
    over_time = arm.over_time.round(3)
    return {
        "label": plain(arm.label),
        "seconds": [round(second, 4) for second in over_time.index],
        "kinds": [[kind, [*over_time[kind]]] for kind in KINDS if kind in over_time],
        "rows": [_row(row, arm.level) for row in arm.rows],
    }


def _row(row, level):
    told = {"kind": row.kind, "line": row.code, "layer": row.layer, "operation": row.operation}
    told |= {"tensor": row.tensor, "dtype": row.dtype}
    return {name: plain(text) for name, text in told.items()} | {"size": row.size / MIB, "share": row.size / level}


def _in_words(arm):
    """The curve for a screen reader."""
    sums = arm.over_time.sum(axis=1)
    if sums.empty:
        return "Memory over time: nothing was recorded"
    return f"Memory over {sums.index[-1]:.1f} seconds: highest {sums.max():,.1f} MiB at {sums.idxmax():.2f} s, last {sums.iloc[-1]:,.1f} MiB"
