"""Which lab for which trouble: the labs' own first cells, data/map.toml, and a search over what both say."""

import difflib
import html
import math
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


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
    for source in sorted((ROOT / "labs" / "source").glob("[0-9]*.py")):
        text = source.read_text()
        first = re.sub(r"^# ?", "", text.split("# %%")[1], flags=re.MULTILINE)
        part = lambda pattern: re.sub(r"[*`]", "", " ".join(re.search(pattern, first, re.DOTALL)[1].split()))  # noqa: E731
        number = source.stem[:2]
        found[number] = Lab(
            number, source.stem, part(r"# \d\d · (.+?)\n"), part(r"\*\*Symptom:\*\*(.+?)\n\n"), part(r"\| Time \|(.+?)\|"),
            tuple(re.findall(r"C\d\d", part(r"\| Claims judged \|(.+?)\|"))),
            tuple(int(n) for n in re.findall(r"^with exercise\((\d)", text, re.MULTILINE)),
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
    """[(lab, the phrase that fits best)], best first; all labs with their first symptom for a query without words.

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
        return [(lab, lab.symptom) for lab in labs().values()]
    best = {}
    for lab, phrase, words in _phrases():
        hit = sum(weight for alike, weight in fits if alike & words)
        score = (round(hit, 6), -len(words))  # of two that say the same, the shorter one
        if hit and score > best.get(lab, ((0, 0), ""))[0]:
            best[lab] = score, phrase
    top = max((score[0] for score, _ in best.values()), default=0)
    found = sorted((item for item in best.items() if item[1][0][0] > 0.5 * top), key=lambda item: item[1][0], reverse=True)
    return [(lab, phrase) for lab, (_, phrase) in found]


def link(lab, words=None):
    """A link to a lab as HTML, for a page in labs/."""
    return f'<a href="{lab.name}.ipynb">{html.escape(words or lab.number)}</a>'


def _table(query):
    """The labs that fit as HTML: a still table, which stays in the saved notebook."""
    found = search(query)
    if not found:
        return "<p>No lab mentions any of these words. Try the first line of the error message, or one word of it.</p>"
    rows = [
        f"<tr><td>{link(lab)}</td><td><b>{link(lab, lab.title)}</b><br>{html.escape(phrase)}</td>"
        f"<td>{', '.join(link(labs()[needed]) for needed in lab.needs) or '–'}</td><td>{html.escape(lab.time)}</td></tr>"
        for lab, phrase in found
    ]
    count = f"{len(found)} of {len(labs())} labs, the best fit first" if query.strip() else f"all {len(labs())} labs"
    head = "<tr><th>lab</th><th>what you would search for</th><th>builds on</th><th>time</th></tr>"
    return f"<p>{count}</p><table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def find_lab(query=""):
    """A box to type a symptom into, and the table of labs that it filters. query: what it starts with."""
    import ipywidgets
    from IPython.display import HTML, display

    from labsupport.course import show_widget

    box = ipywidgets.Text(
        value=query, description="My trouble:", placeholder="an error message, or what you would type into a search engine",
        style={"description_width": "initial"}, layout={"width": "95%", "max_width": "44em"},
    )  # fmt: skip
    show_widget(box, "Run this cell to search the table below by symptom.")
    table = display(HTML(_table(query)), display_id=True)
    # The table is no widget: JupyterLab opens its links in a tab, and a saved notebook keeps it.
    box.observe(lambda change: table.update(HTML(_table(change["new"]))), "value")
