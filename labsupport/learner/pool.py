"""The exported ledgers of a class in one page: one HTML file that asks nothing of the network.

It compares predictions and machines, never people. All text in it comes from strangers until it is escaped.
"""

import base64
import html
import io
from collections import Counter

from matplotlib.figure import Figure
from matplotlib.style import context

from labsupport.lesson.claims import SIGNS, claims
from labsupport.learner.exchange import gather
from labsupport.learner.guide import labs
from labsupport.lesson.ledger import LedgerError
from labsupport.learner.standing import factors_figure, first_guesses, off_by, standing

STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{padding:.2rem .7rem;text-align:left;vertical-align:top;border-bottom:1px solid #8886}"
    "div{overflow-x:auto}img{max-width:100%}.differ{font-weight:bold}"
)
_esc = html.escape


def _picture(draw, size, alt):
    """A drawing for a light and a dark page. draw gets empty axes."""
    sources = []
    for style in ("default", "dark_background"):
        with context(style):
            figure, buffer = Figure(figsize=size, layout="constrained"), io.BytesIO()
            draw(figure.subplots())
            figure.savefig(buffer, format="png", dpi=110, transparent=True)
        sources.append("data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode())
    return f'<picture><source media="(prefers-color-scheme: dark)" srcset="{sources[1]}"><img src="{sources[0]}" alt="{_esc(alt)}"></picture>'


def _table(head, rows):
    """Cells are HTML already."""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div><table><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>{body}</table></div>"


def _guesses(people):
    """Predictions against measurements, a column of points a lab. Nobody's name stands at a point."""
    by_lab = {}
    for guess in (guess for person in people for guess in first_guesses(person.entries)):
        by_lab.setdefault(guess.lab, []).append(guess)
    if not by_lab:
        return "<p>Nobody has made a guess yet.</p>"
    by_lab = dict(sorted(by_lab.items()))
    counted = {number: [guess.factor for guess in found if not guess.late] for number, found in by_lab.items()}

    def draw(axes):
        points = [(x + (i - (len(found) - 1) / 2) * min(0.06, 0.7 / len(found)), g.factor, g.late) for x, found in enumerate(by_lab.values()) for i, g in enumerate(found)]
        factors_figure(axes, points)
        axes.set_xticks(range(len(by_lab)), by_lab)
        axes.set_xlabel("lab; a point is a guess, hollow if it was made after the answer was shown")

    words = [f"lab {n}: {len(found)} guesses, {min(g.factor for g in found):.2g} to {max(g.factor for g in found):.2g} times the measurement" for n, found in by_lab.items()]
    rows = [
        [n, _esc(labs()[n].title), len(found), f"{off_by(counted[n]):.1f}" if counted[n] else "–", sum(f < 1 for f in counted[n]), sum(f > 1 for f in counted[n])]
        for n, found in by_lab.items()
    ]  # fmt: skip
    head = ["lab", "title", "guesses", "typically off by a factor of", "too low", "too high"]
    return _picture(draw, (10, 4), "Guesses over measurements by lab. " + "; ".join(words)) + _table(head, rows)


def _machines(people):
    """The machines, then each claim's last verdict on each of them."""
    by_machine, verdicts = {}, {}
    for person in people:
        for entry in person.entries:
            facts = tuple(str(entry["machine"].get(name, "unavailable"))[:60] for name in ("cores", "memory_mib", "tensorflow", "python", "platform"))
            by_machine.setdefault(facts, {}).setdefault(person.name, None)
            if entry["kind"] == "verdict" and entry["id"] in claims() and entry["verdict"] in SIGNS:
                verdicts.setdefault(entry["id"], {}).setdefault(facts, {})[person.name] = entry["verdict"]  # the last one stands
    letters = {facts: f"M{number}" for number, facts in enumerate(by_machine, 1)}
    rows = [[letters[facts], *map(_esc, facts), _esc(", ".join(names))] for facts, names in by_machine.items()]
    page = _table(["machine", "cores", "memory (MiB)", "TensorFlow", "Python", "platform", "participants"], rows)
    table = []
    for claim, on in sorted(verdicts.items()):
        judged = {verdict for found in on.values() for verdict in found.values()} - {"not testable here"}
        cells = [", ".join(f"{v} ({n})" if len(on[m]) > 1 else v for v, n in Counter(on[m].values()).items()) if m in on else "–" for m in letters]
        mark = '<span class="differ" role="img" aria-label="differ">≠</span>' if len(judged) > 1 else ""
        table.append([claim, _esc(claims()[claim]["claim"]), mark, *cells])
    if not table:
        return page, "<p>Nobody has seen a verdict yet.</p>"
    differ = sum(bool(row[2]) for row in table)
    words = f"<p>{differ} of {len(table)} claims came out differently, marked ≠: look for what these machines do not share. In brackets: on how many participants' runs.</p>"
    return page, words + _table(["", "claim", "", *letters.values()], table)


def _exercises(people):
    """How many of the class passed each exercise."""
    stands = [standing(person.entries) for person in people]
    rows = []
    for number, lab in labs().items():
        here = [stand[number] for stand in stands if number in stand]
        if here:
            rows.append([number, _esc(lab.title), len(here), *(f"{sum(exercise in passed for passed, _ in here)}" for exercise in lab.exercises)])
    most = max((len(row) for row in rows), default=3)
    rows = [row + ["–"] * (most - len(row)) for row in rows]
    return _table(["lab", "title", "visited by", *(f"exercise {n} passed by" for n in range(1, most - 2))], rows)


def pool(paths):
    """(the page as HTML, what was left out and why). Raises LedgerError if no file can be used."""
    people, problems = gather(paths)
    if not people:
        raise LedgerError("\n".join([*problems, "nothing to pool: no file could be used"]))
    left_out = "".join(f"<li>{_esc(problem)}</li>" for problem in problems)
    machines, verdicts = _machines(people)
    title = "What this class guessed and measured"
    page = (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width'><title>{title}</title>"
        f"<style>{STYLE}</style></head><body><h1>{title}</h1><p>{len(people)} participant{'s' * (len(people) > 1)}.</p>"
        + (f"<h2>Left out</h2><ul>{left_out}</ul>" if problems else "")
        + f"<h2>Predictions against measurements</h2>{_guesses(people)}<h2>Verdicts on each machine</h2>{verdicts}"
        f"<h2>Machines</h2>{machines}<h2>Exercises</h2>{_exercises(people)}</body></html>"
    )
    return page, problems
