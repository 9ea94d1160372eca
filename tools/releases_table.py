"""Verdicts through the releases as a page and a picture, from data/recorded/releases.json, which releases.py writes."""

import json
import re
from pathlib import Path

from labsupport.lesson.claims import SIGNS, claims, figures_text
from labsupport.showing.palette import BAD, GOOD, HALF, UNKNOWN

RECORDED = Path(__file__).parents[1] / "data" / "recorded"
TABLE, PICTURE = RECORDED / "releases.json", RECORDED / "releases.svg"
NONE = "does not run there"
_SIGNS = {**SIGNS, NONE: "–"}
_COLOURS = {"holds": GOOD.colour, "partly": HALF.colour, "fails": BAD.colour}


def read():
    """{release: {"versions": {package: version}, "claims": {claim: {"verdict": …, "figures" or "why": …}}}} as committed."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def with_committed(ledger):
    """The recorded rows and that of the committed notebooks, which ran with the pinned versions. ledger: what report.verdicts() gives."""
    pinned = dict(
        re.findall(r"^(tensorflow|keras)==([\d.]+)", (RECORDED.parents[1] / "requirements.txt").read_text(), re.M)
    )
    row = {entry["id"]: {"verdict": entry["verdict"], "figures": entry["figures"]} for entry in ledger}
    others = {name: other for name, other in read().items() if other["versions"]["tensorflow"] != pinned["tensorflow"]}
    return {**others, "committed": {"versions": pinned, "claims": row}}


def write(table):
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def changes(before, now):
    """What two rows of claims say otherwise, a line each."""
    return [
        f"{claim}: {before[claim]['verdict']} → {now[claim]['verdict']}  {claims()[claim]['claim']}"
        for claim in sorted(before.keys() & now.keys())
        if before[claim]["verdict"] != now[claim]["verdict"]
    ]


def _in_order(table):
    return sorted(table, key=lambda name: [int(part) for part in table[name]["versions"]["tensorflow"].split(".")[:3]])


def _named(table):
    """{release: what it is called in a head: a number, with that of Keras}"""
    short = lambda version: ".".join(version.split(".")[:2])
    return {
        name: f"{short(table[name]['versions']['tensorflow'])} (Keras {short(table[name]['versions']['keras'])})"
        for name in _in_order(table)
    }


def _told(claim, facts):
    if "why" in facts:
        return facts["why"].replace("|", "\\|").replace("`", "'")
    return figures_text(facts["figures"], claims()[claim]["unit"])


def page(table):
    """All releases in Markdown: the grid of verdicts, then each claim that came out in more than one way, with figures."""
    named = _named(table)
    judged = sorted({claim for row in table.values() for claim in row["claims"]} & claims().keys())
    lines = [
        "# Verdicts through the releases",
        "",
        "Advice was often true once. Each column is a release of TensorFlow in which the labs of this course ran as they",
        "are; the figures are of one run each, on a CPU. Made from the committed notebooks, and for other releases from",
        "[releases.json](recorded/releases.json), which `make releases` records, by `tools/report.py --readme`, never by hand.",
        "",
        "![Verdicts by claim and release](recorded/releases.svg)",
        "",
        "| | claim | " + " | ".join(named.values()) + " |",
        "|---|---|" + "---|" * len(named),
    ]
    for claim in judged:
        verdicts = [table[name]["claims"].get(claim, {}).get("verdict") for name in named]
        cells = [f"{_SIGNS[verdict]} {verdict}" if verdict else "not tried" for verdict in verdicts]
        lines.append(f"| {claim} | {claims()[claim]['claim']} | " + " | ".join(cells) + " |")
    several = []
    for claim in judged:
        found = {name: table[name]["claims"][claim] for name in named if claim in table[name]["claims"]}
        if len({facts["verdict"] for facts in found.values()}) > 1:
            several += ["", f"**{claim}** {claims()[claim]['claim']}", ""]
            several += [f"* {named[name]}: {facts['verdict']}; {_told(claim, facts)}" for name, facts in found.items()]
    lines += ["", "## What came out in more than one way", *(several or ["", "Nothing yet."])]
    return "\n".join(lines).rstrip() + "\n"


def draw(table):
    """The grid of verdicts: a sign and a colour for each claim and release."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "releases"
    named = _named(table)
    judged = sorted({claim for row in table.values() for claim in row["claims"]}, reverse=True)
    figure = Figure(figsize=(1.6 + 1.1 * len(named), 0.9 + 0.24 * len(judged)), layout="constrained")
    axes = figure.subplots()
    for across, name in enumerate(named):
        for up, claim in enumerate(judged):
            if verdict := table[name]["claims"].get(claim, {}).get("verdict"):
                axes.barh(
                    up, 0.94, left=across - 0.47, height=0.9, color=_COLOURS.get(verdict, UNKNOWN.colour), alpha=0.5
                )
                axes.text(across, up, _SIGNS[verdict], ha="center", va="center", family="DejaVu Sans", fontsize=9)
    axes.set_xticks(range(len(named)), [text.replace(" (", "\n(") for text in named.values()], fontsize=8)
    axes.set_yticks(range(len(judged)), judged, fontsize=8)
    axes.set(xlim=(-0.5, len(named) - 0.5), ylim=(-0.5, len(judged) - 0.5), frame_on=False)
    axes.tick_params(length=0, labeltop=True)
    axes.set_title("   ".join(f"{sign} {words}" for words, sign in _SIGNS.items()), fontsize=9, family="DejaVu Sans")
    figure.savefig(PICTURE, metadata={"Date": None})
