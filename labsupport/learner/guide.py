"""Which lab for which trouble: a search over what the labs and data/map.toml say, as a table and behind a box to type into."""

import difflib
import html
import math
import re
from functools import cache

from labsupport.lesson.catalogue import labs
from labsupport.showing.cards import show_widget, template

# A still table, which stays in the saved notebook. JupyterLab sets tables to the right, as for numbers.
_TABLE = template(
    "<p>{{ count }}</p><table><thead><tr><th>lab</th>"
    "{% for head in ('what you would search for', 'builds on', 'minutes') %}"
    '<th style="text-align:left">{{ head }}</th>{% endfor %}</tr></thead><tbody>'
    "{% for lab, phrases in found %}<tr><td>{{ lab.number }}</td>"
    '<td style="text-align:left"><b><a href="{{ lab.name }}.ipynb">{{ lab.title }}</a></b>'
    "{% for phrase in phrases %}<br>{{ phrase }}{% endfor %}</td>"
    '<td style="text-align:left">{% for needed in lab.needs %}{{ ", " if not loop.first }}'
    '<a href="{{ labs[needed].name }}.ipynb">{{ labs[needed].number }}</a>{% else %}–{% endfor %}</td>'
    '<td style="text-align:left">{{ lab.time.rpartition(", ")[2].removesuffix(" to work through") }}</td></tr>'
    "{% endfor %}</tbody></table>"
)

# Chosen so that the symptoms in tests/test_guide.py find their labs.
_ALIKE = 0.8  # difflib's likeness of a misspelt word: one wrong letter in five, "retrcing" for "retracing"
_WORTH_SHOWING = 0.5  # of the best score: a lab that shares less with the query is about another trouble


def _words(text):
    """Words without their commonest endings: "growing" and "grows" are the same as "grow"; numbers say nothing."""
    return [
        re.sub(r"(?:ing|es|ed|s)$", "", word) if len(word) > 4 else word
        for word in re.findall(r"[a-z][a-z0-9]*", text.lower())
    ]


@cache
def _phrases():
    """[(lab, phrase, its words)] of all that a lab can be found by."""
    return [
        (lab, phrase, frozenset(_words(phrase)))
        for lab in labs().values()
        for phrase in (lab.symptom, lab.title, *lab.symptoms)
    ]


def search(query):
    """[(lab, up to two of its phrases that fit best)], best first; all labs with their first symptom for a query without words.

    A phrase scores by the words it shares with the query, a rare one more than a common one. Typed halfway, a word
    counts for those that it begins; misspelt, for the one most like it.
    """
    vocabulary = set().union(*(words for _, _, words in _phrases()))
    fits = []
    for typed in dict.fromkeys(_words(query)):
        alike = {word for word in vocabulary if word.startswith(typed) or (len(word) > 3 and typed.startswith(word))}
        alike = alike or set(difflib.get_close_matches(typed, vocabulary, 1, _ALIKE))
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
    fitting = [lab for lab in best if best[lab][0][0] > _WORTH_SHOWING * top]
    fitting.sort(key=lambda lab: best[lab][0][:3], reverse=True)
    alike = {
        lab: [phrase for score, *_, phrase in best[lab] if score == best[lab][0][0] and phrase != lab.title]
        for lab in fitting
    }
    return [(lab, alike[lab][:2] or [lab.symptom]) for lab in fitting]


def link(lab, words):
    """A link to a lab as HTML, for a page in labs/."""
    return f'<a href="{lab.name}.ipynb">{html.escape(words)}</a>'


def table(query):
    """The labs that fit as HTML, with links for a page in labs/."""
    found = search(query)
    if not found:
        return "<p>No lab mentions any of these words. Try the first line of the error message, or one word of it.</p>"
    count = f"{len(found)} of {len(labs())} labs, the best fit first" if query.strip() else f"all {len(labs())} labs"
    return _TABLE.render(count=count, found=found, labs=labs())


def find_lab(query=""):
    """A box to type a symptom into, and the table of labs that it filters. query: what it starts with."""
    import ipywidgets
    from IPython.display import HTML, display

    box = ipywidgets.Text(
        value=query,
        description="My trouble:",
        placeholder="an error message, or what you would type into a search engine",
        style={"description_width": "initial"},
        layout={"width": "95%", "max_width": "44em"},
    )
    show_widget(box, "Run this cell to search the table below by symptom.")
    shown = display(HTML(table(query)), display_id=True)
    # The table is no widget: JupyterLab opens its links in a tab, and a saved notebook keeps it.
    box.observe(lambda change: shown.update(HTML(table(change["new"]))), "value")
