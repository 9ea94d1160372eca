"""The exported ledgers of a class in one page: one HTML file that asks nothing of the network.

It compares predictions and machines, never people. All text in it comes from strangers; the template escapes it.
"""

import base64
import io
from collections import Counter

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.style import context

from labsupport.learner.exchange import gather
from labsupport.learner.standing import draw_factors
from labsupport.learner.tally import first_guesses, off_by, standing
from labsupport.lesson.catalogue import labs
from labsupport.lesson.claims import SIGNS, UNTESTABLE, claims
from labsupport.lesson.ledger import LedgerError
from labsupport.showing.cards import template
from labsupport.showing.palette import DIFFERENT, FIGURES

_FACTS = ("cores", "memory_mib", "tensorflow", "python", "platform")  # what machines are told apart by
_LONGEST = 60  # characters of one of these facts
_DIFFER = Markup(f'<span class="differ" role="img" aria-label="differ">{DIFFERENT}</span>')
_PAGE = template(
    """\
{% macro table(head, rows) %}
<div class="scroll"><table><tr>{% for cell in head %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% endmacro %}
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>What this class guessed and measured</title>
<style>
{{ page_style }}
.differ{font-weight:bold}
</style></head><body>
<h1>What this class guessed and measured</h1>
<p>{{ people | length }} participant{{ "s" if people | length > 1 }}.</p>
{% if problems %}<h2>Left out</h2><ul>{% for problem in problems %}<li>{{ problem }}</li>{% endfor %}</ul>{% endif %}
<h2>Predictions against measurements</h2>
{% if guesses %}
<picture><source media="(prefers-color-scheme: dark)" srcset="{{ dark }}"><img src="{{ light }}" alt="{{ alt }}"></picture>
{{ table(["lab", "title", "guesses", "typically off by a factor of", "too low", "too high"], guesses) }}
{% else %}<p>Nobody has made a guess yet.</p>
{% endif %}
<h2>Verdicts on each machine</h2>
{% if verdicts %}
<p>{{ differ }} of {{ verdicts | length }} claims came out differently, marked {{ different }}: look for what these machines do not share.
In brackets: on how many participants' runs.</p>
{{ table(["", "claim", ""] + letters, verdicts) }}
{% else %}<p>Nobody has seen a verdict yet.</p>
{% endif %}
<h2>Machines</h2>
{{ table(["machine", "cores", "memory (MiB)", "TensorFlow", "Python", "platform", "participants"], machines) }}
<h2>Exercises</h2>
{{ table(["lab", "title", "visited by"] + passed_by, exercises) }}
</body></html>"""
)


def _pictures(draw):
    """A drawing as data: addresses, for a light and a dark page. draw gets empty axes."""
    for style in ("default", "dark_background"):
        with context([style, FIGURES]):
            figure, buffer = Figure(figsize=(10, 4)), io.BytesIO()
            draw(figure.subplots())
            figure.savefig(buffer, format="png", dpi=110, transparent=True)
        yield "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _guesses(people):
    """Predictions against measurements, a column of points a lab. Nobody's name stands at a point."""
    by_lab = {}
    for guess in (guess for person in people for guess in first_guesses(person.entries)):
        by_lab.setdefault(guess.lab, []).append(guess)
    if not by_lab:
        return {"guesses": []}
    by_lab = {lab: by_lab[lab] for lab in labs().values() if lab in by_lab}

    def draw(axes):
        points = []
        for place, found in enumerate(by_lab.values()):
            apart = min(0.06, 0.7 / len(found))  # so that the points of a lab stay in its column
            points += [
                (place + (i - (len(found) - 1) / 2) * apart, guess.factor, guess.late) for i, guess in enumerate(found)
            ]
        draw_factors(axes, points)
        axes.set_xticks(range(len(by_lab)), [lab.number for lab in by_lab])
        axes.set_xlabel("lab; a point is a guess, hollow if it was made after the answer was shown")

    rows, words = [], ["Guesses over measurements by lab. "]
    for lab, found in by_lab.items():
        every, counted = [guess.factor for guess in found], [guess.factor for guess in found if not guess.late]
        words.append(
            f"lab {lab.number}: {len(found)} guesses, {min(every):.2g} to {max(every):.2g} times the measurement; "
        )
        typical = f"{off_by(counted):.1f}" if counted else "–"
        rows.append(
            [
                lab.number,
                lab.title,
                len(found),
                typical,
                sum(factor < 1 for factor in counted),
                sum(factor > 1 for factor in counted),
            ]
        )
    light, dark = _pictures(draw)
    return {"guesses": rows, "light": light, "dark": dark, "alt": "".join(words).rstrip("; ")}


def _machines(people):
    """The machines by letter, and each claim's last verdict on each of them."""
    by_machine, verdicts = {}, {}
    for person in people:
        for entry in person.entries:
            facts = tuple(str(entry["machine"].get(name, "unavailable"))[:_LONGEST] for name in _FACTS)
            by_machine.setdefault(facts, {})[person.name] = True
            if entry["kind"] == "verdict" and entry["id"] in claims() and entry["verdict"] in SIGNS:
                verdicts.setdefault(entry["id"], {}).setdefault(facts, {})[person.name] = entry[
                    "verdict"
                ]  # the last one stands
    letters = {facts: f"M{number}" for number, facts in enumerate(by_machine, 1)}
    rows = []
    for claim, on in sorted(verdicts.items()):
        judged = {verdict for found in on.values() for verdict in found.values()} - {UNTESTABLE}
        cells = [_counted(on[facts].values()) if facts in on else "–" for facts in letters]
        rows.append([claim, claims()[claim]["claim"], _DIFFER if len(judged) > 1 else "", *cells])
    return {
        "letters": list(letters.values()),
        "machines": [[letters[facts], *facts, ", ".join(names)] for facts, names in by_machine.items()],
        "verdicts": rows,
        "differ": sum(bool(row[2]) for row in rows),
        "different": DIFFERENT,
    }


def _counted(verdicts):
    """The verdicts on one machine: "fails (1), holds (2)", or "holds" of a single run."""
    return ", ".join(
        f"{verdict} ({number})" if len(verdicts) > 1 else verdict for verdict, number in Counter(verdicts).items()
    )


def _exercises(people):
    """How many of the class passed each exercise."""
    stands = [standing(person.entries) for person in people]
    rows = []
    for lab in labs().values():
        here = [stand[lab] for stand in stands if lab in stand]
        if here:
            rows.append(
                [
                    lab.number,
                    lab.title,
                    len(here),
                    *(sum(exercise in passed for passed, _ in here) for exercise in lab.exercises),
                ]
            )
    most = max((len(row) for row in rows), default=3)
    return {
        "exercises": [row + ["–"] * (most - len(row)) for row in rows],
        "passed_by": [f"exercise {number} passed by" for number in range(1, most - 2)],
    }


def pool(paths):
    """(the page as HTML, what was left out and why). Raises LedgerError if no file can be used."""
    people, problems = gather(paths)
    if not people:
        raise LedgerError("\n".join([*problems, "nothing to pool: no file could be used"]))
    return _PAGE.render(
        people=people, problems=problems, **_guesses(people), **_machines(people), **_exercises(people)
    ), problems
