"""Which lab for which trouble: a search over what the labs and data/map.toml say, as a table and behind a box to type into."""

import html
import re
from functools import cache
from typing import NamedTuple

import bm25s
import snowballstemmer
from bm25s.stopwords import STOPWORDS_EN
from rapidfuzz import fuzz, process

from labsupport.lesson.catalogue import labs, paths, synonyms
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
    '<td style="text-align:left">{{ lab.minutes }}</td></tr>'
    "{% endfor %}</tbody></table>"
)

_PATHS = template(
    "<p>Each begins after "
    '<a href="{{ first.name }}.ipynb">{{ first.title }}</a>.</p><ul>'
    "{% for words, path in paths.items() %}<li><b>{{ words }}</b>: "
    '{% for lab in path %}{{ " → " if not loop.first }}<a href="{{ lab.name }}.ipynb">{{ lab.number }} {{ lab.title }}</a>'
    "{% endfor %}</li>{% endfor %}</ul>"
)

_NOTHING = template(
    '<p>Nothing fits well. Begin with <a href="{{ lab.name }}.ipynb">{{ lab.title }}</a>, or let the doctor look at your '
    "script, in a terminal: <code>python -m labsupport doctor your_script.py</code>{{ '. The nearest:' if nearest }}</p>"
)

# Chosen on one half of tests/symptoms.csv; the test reports the other half.
_ALIKE = 84  # rapidfuzz's ratio of a misspelt word, in per cent: one wrong letter in six, "retrcing" for "retracing"
_WORTH_SHOWING = 0.5  # of the best score: a lab that shares less with the query is about another trouble
_WHOLE = 0.5  # what a lab's score as a whole counts beside that of its best phrase
_FITS, _MANY = 0.75, 5  # score of the best phrase a word of the query, of at most five: below, nothing fits well
_LONGEST_NUMBER = 3  # digits that can mean something, as those of exit code 137; sizes and addresses do not
_NOT_TELLING = {
    *STOPWORDS_EN,
    *"i my me we you do does did am has have had how what when why which can could from".split(),
}
_stem = snowballstemmer.stemmer("english").stemWord


def _pieces(text):
    """Stems of all words; those of an identifier such as MultiHeadAttention or GPU_0_bfc, and the whole of it."""
    found = []
    for name in re.findall(r"\w+", text):
        parts = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_", " ", name).lower().split()
        found += [_stem(part) for part in parts] + [_stem("".join(parts))] * (len(parts) > 1)
    return found


@cache
def _synonyms():
    """(a pattern of everything that has a synonym, {what it finds: the first of its row}), as stems."""
    rows = [[" ".join(_pieces(phrase)) for phrase in row] for row in synonyms()]
    meaning = {phrase: row[0] for row in rows for phrase in row}
    longest_first = sorted(meaning, key=len, reverse=True)
    return re.compile(rf"\b(?:{'|'.join(map(re.escape, longest_first))})\b"), meaning


# What an error says of a place, not of a trouble: "shape[64,224,224,64]", "on /job:localhost/…/device:CPU:0 by allocator cpu".
_PLACES = re.compile(r"(?<=shape)\s?\[[\d, ]*\]|(\bon )?/job:\S+|\bby allocator \w+")


def _words(text):
    """What a text is looked up by: stems without stop words, sizes and places, of synonyms the first."""
    pattern, meaning = _synonyms()
    text = _PLACES.sub(" ", text)
    text = pattern.sub(lambda match: meaning[match[0]], " ".join(_pieces(text)))
    return [
        word
        for word in text.split()
        if word not in _NOT_TELLING and not (word.isdigit() and len(word) != _LONGEST_NUMBER)
    ]


@cache
def _index():
    """([(lab, phrase)] of all that a lab can be found by, a BM25 index of them, one of the labs as wholes, the vocabulary)."""
    phrases = [
        (lab, phrase) for lab in labs().values() for phrase in (lab.symptom, lab.title, *lab.symptoms, *lab.names)
    ]
    words = [_words(phrase) for _, phrase in phrases]
    whole = {}
    for (lab, _), found in zip(phrases, words):
        whole.setdefault(lab, []).extend(found)
    of_phrases, of_labs = bm25s.BM25(), bm25s.BM25()
    of_phrases.index(words, show_progress=False)
    of_labs.index(list(whole.values()), show_progress=False)
    return phrases, of_phrases, of_labs, set().union(*words)


def _known(word, vocabulary, typing):
    """The words of the vocabulary that a word stands for: itself, while it is typed those it begins, or one much alike."""
    if word in vocabulary or word.isdigit():
        return [word]
    if typing and (begun := [known for known in vocabulary if len(word) > 2 and known.startswith(word)]):
        return begun
    alike = process.extractOne(word, vocabulary, scorer=fuzz.ratio, score_cutoff=_ALIKE) if len(word) > 3 else None
    return [alike[0]] if alike else []


class Found(NamedTuple):
    """What a search found. rows: [(lab, up to two of its phrases that fit best)], best first. well: whether the best one does."""

    rows: list
    well: bool


def search(query):
    """The labs for a query, as Found; all labs with their first symptom for a query without words.

    A lab counts by its best phrase, and by half as much as a whole, each by BM25 (Robertson and Zaragoza, 2009).
    """
    words = list(dict.fromkeys(_words(query)))
    if not words:
        return Found([(lab, [lab.symptom]) for lab in labs().values()], True)
    phrases, of_phrases, of_labs, vocabulary = _index()
    known = list(dict.fromkeys(found for word in words for found in _known(word, vocabulary, word is words[-1])))
    if not known:
        return Found([], False)
    fits = {}
    for (lab, phrase), score in zip(phrases, of_phrases.get_scores(known).tolist()):
        fits.setdefault(lab, []).append((score, phrase))
    best = {lab: sorted(found, key=lambda fit: -fit[0]) for lab, found in fits.items()}
    score = {lab: best[lab][0][0] + _WHOLE * whole for lab, whole in zip(best, of_labs.get_scores(known).tolist())}
    ranked = sorted(score, key=lambda lab: -score[lab])
    least = _WORTH_SHOWING * score[ranked[0]]
    rows = []
    for lab in ranked:
        if score[lab] > least:
            alike = [phrase for fit, phrase in best[lab][:2] if fit > least and phrase != lab.title]
            rows.append((lab, alike or [lab.symptom]))
    return Found(rows, max(found[0][0] for found in best.values()) >= _FITS * min(len(words), _MANY))


def as_data():
    """What search() knows, as data for a page that searches without Python; sharing neither spelling nor rapidfuzz with it.

    labs: [{name, number, title}]; texts: [[place of the lab, phrase]]; phrases, wholes: {stem: [[place, score]]}; the rest as
    above.
    """
    phrases, of_phrases, of_labs, vocabulary = _index()
    places = {lab: place for place, lab in enumerate(labs().values())}

    def scores(index):
        told = {stem: index.get_scores([stem]).tolist() for stem in sorted(vocabulary)}
        return {
            stem: [[place, round(score, 4)] for place, score in enumerate(found) if score]
            for stem, found in told.items()
        }

    return {
        "labs": [{"name": lab.name, "number": lab.number, "title": lab.title} for lab in places],
        "texts": [[places[lab], phrase] for lab, phrase in phrases],
        "phrases": scores(of_phrases),
        "wholes": scores(of_labs),
        "synonyms": _synonyms()[1],
        "stopwords": sorted(_NOT_TELLING),
        "whole": _WHOLE,
        "worth": _WORTH_SHOWING,
        "fits": _FITS,
        "many": _MANY,
    }


def link(lab, words):
    """A link to a lab as HTML, for a page in labs/."""
    return f'<a href="{lab.name}.ipynb">{html.escape(words)}</a>'


def table(query):
    """The labs that fit as HTML, with links for a page in labs/."""
    found, well = search(query)
    text = "" if well else _NOTHING.render(lab=labs()["reading_an_oom"], nearest=bool(found))
    if found:
        count = (
            f"{len(found)} of {len(labs())} labs, the best fit first" if query.strip() else f"all {len(labs())} labs"
        )
        text += _TABLE.render(count=count, found=found, labs=labs())
    return text


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


def reading_paths():
    """Ways through the series, by what a reader is about, with links for a page in labs/."""
    from IPython.display import HTML, display

    display(HTML(_PATHS.render(first=labs()["where_memory_goes"], paths=paths())))
