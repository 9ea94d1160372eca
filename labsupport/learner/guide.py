"""Which lab for which trouble: the labs' own first cells, data/map.toml, and a search over what both say."""

import difflib
import html
import math
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Lab:
    """What a lab says about itself, and what data/map.toml adds (symptoms, needs). needs: numbers of labs."""

    number: str
    name: str
    title: str
    symptom: str
    time: str
    claims: tuple
    exercises: tuple
    symptoms: tuple
    needs: tuple


@cache
def labs():
    """{"01": Lab} in order. From labs/source, which a learner does not change by working."""
    with open(ROOT / "data" / "map.toml", "rb") as file:
        more = tomllib.load(file)
    found = {}
    for source in sorted((ROOT / "tools" / "source").glob("[0-9]*.py")):
        text = source.read_text()
        first = re.sub(r"^# ?", "", text.split("# %%")[1], flags=re.MULTILINE)
        part = lambda pattern: re.sub(r"[*`]", "", " ".join(re.search(pattern, first, re.DOTALL)[1].split()))  # noqa: E731
        number = source.stem[:2]
        found[number] = Lab(
            number, source.stem, part(r"# \d\d · (.+?)\n"), part(r"\*\*Symptom:\*\*(.+?)\n\n"), part(r"\| Time \|(.+?)\|"),
            tuple(re.findall(r"C\d\d", part(r"\| Claims judged \|(.+?)\|"))),
            tuple(int(n) for n in re.findall(r"^with lab\.exercise\((\d)", text, re.MULTILINE)),
            tuple(more[number]["symptoms"]), tuple(more[number]["needs"]),
        )  # fmt: skip
    return found


def _words(text):
    """Words without their commonest endings: "growing" and "grows" are the same as "grow"; numbers say nothing."""
    return [re.sub(r"(?:ing|es|ed|s)$", "", word) if len(word) > 4 else word for word in re.findall(r"[a-z][a-z0-9]*", text.lower())]


@cache
def _phrases():
    """[(lab, phrase, its words)] of all that a lab can be found by."""
    return [(lab, phrase, frozenset(_words(phrase))) for lab in labs().values() for phrase in (lab.symptom, lab.title, *lab.symptoms)]


def search(query):
    """[(lab, up to two of its phrases that fit best)], best first; all labs with their first symptom for a query without words.

    A phrase scores by the words it shares with the query, a rare one more than a common one. Typed halfway, a word
    counts for those that it begins; misspelt, for the one most like it.
    """
    vocabulary = set().union(*(words for _, _, words in _phrases()))
    fits = []
    for typed in dict.fromkeys(_words(query)):
        alike = {word for word in vocabulary if word.startswith(typed) or (len(word) > 3 and typed.startswith(word))}
        alike = alike or set(difflib.get_close_matches(typed, vocabulary, 1, 0.8))
        count = sum(bool(alike & words) for _, _, words in _phrases())
        if count:
            fits.append((alike, math.log(1 + len(_phrases()) / count)))
    if not _words(query):
        return [(lab, [lab.symptom]) for lab in labs().values()]
    scored = {}
    for lab, phrase, words in _phrases():
        score = round(sum(weight for alike, weight in fits if alike & words), 6)
        # Of two that have the same words, the one that has them in the same order; else the shorter one.
        scored.setdefault(lab, []).append((score, query.strip().lower() in phrase.lower(), -len(words), phrase))
    best = {lab: sorted(found, reverse=True) for lab, found in scored.items()}
    top = max(found[0][0] for found in best.values())
    fitting = sorted((lab for lab in best if best[lab][0][0] > 0.5 * top), key=lambda lab: best[lab][0][:3], reverse=True)
    alike = {lab: [phrase for score, *_, phrase in best[lab] if score == best[lab][0][0] and phrase != lab.title] for lab in fitting}
    return [(lab, alike[lab][:2] or [lab.symptom]) for lab in fitting]


def link(lab, words):
    """A link to a lab as HTML, for a page in labs/."""
    return f'<a href="{lab.name}.ipynb">{html.escape(words)}</a>'


def table(query):
    """The labs that fit as HTML: a still table, which stays in the saved notebook."""
    found = search(query)
    if not found:
        return "<p>No lab mentions any of these words. Try the first line of the error message, or one word of it.</p>"
    left = '<{0} style="text-align:left">'.format  # JupyterLab sets tables to the right, as for numbers
    rows = [
        f"<tr><td>{lab.number}</td>{left('td')}<b>{link(lab, lab.title)}</b><br>{'<br>'.join(map(html.escape, phrases))}</td>"
        f"{left('td')}{', '.join(link(labs()[needed], needed) for needed in lab.needs) or '–'}</td>"
        f"{left('td')}{html.escape(lab.time.rpartition(', ')[2].removesuffix(' to work through'))}</td></tr>"
        for lab, phrases in found
    ]
    count = f"{len(found)} of {len(labs())} labs, the best fit first" if query.strip() else f"all {len(labs())} labs"
    head = f"<tr><th>lab</th>{left('th')}what you would search for</th>{left('th')}builds on</th>{left('th')}minutes</th></tr>"
    return f"<p>{count}</p><table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def find_lab(query=""):
    """A box to type a symptom into, and the table of labs that it filters. query: what it starts with."""
    import ipywidgets
    from IPython.display import HTML, display

    from labsupport.showing.cards import show_widget

    box = ipywidgets.Text(
        value=query, description="My trouble:", placeholder="an error message, or what you would type into a search engine",
        style={"description_width": "initial"}, layout={"width": "95%", "max_width": "44em"},
    )  # fmt: skip
    show_widget(box, "Run this cell to search the table below by symptom.")
    shown = display(HTML(table(query)), display_id=True)
    # The table is no widget: JupyterLab opens its links in a tab, and a saved notebook keeps it.
    box.observe(lambda change: shown.update(HTML(table(change["new"]))), "value")
