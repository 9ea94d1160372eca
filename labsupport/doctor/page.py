"""The doctor's report as one HTML page: it needs no network and no script, and follows the reader's light or dark setting."""

from pathlib import Path

from labsupport.doctor.figures import wanted
from labsupport.doctor.terminal import LEAST_PART, figures, no_suspect
from labsupport.ground.budget import MIB, mib
from labsupport.lesson.catalogue import labs, notebook_file
from labsupport.showing.cards import template
from labsupport.showing.palette import BAD

_PAGE = Path(__file__).with_name("page.html")
_WIDTH, _HEIGHT = 1000, 100  # of the picture's own coordinates
_ROOM = 1.05  # above the highest level
_MOST_POINTS = 2000  # of the curve, the highest of each column of the picture: a page stays small


def page(diagnosis, changed=(), tried=()):
    """The page of a Diagnosis as text; changed, tried: sentences of against.py and trying.py."""
    result = diagnosis.result
    look, sentence = (None, "") if diagnosis.suspects else no_suspect(result)
    asked = wanted(result)
    parts = [(words, mib(size)) for words, size in diagnosis.parts.rows() if size >= LEAST_PART]
    return template(_PAGE.read_text(encoding="utf-8")).render(
        result=result,
        suspects=[_suspect(suspect) for suspect in diagnosis.suspects],
        sign=(look or BAD).sign,
        sentence=sentence,
        curve=_curve(result),
        figures=figures(result) + [("asked for when memory ran out", mib(asked))] * bool(asked),
        parts=parts,
        lines=result.facts.holders if result.facts else [],
        alive=_alive(result.facts),
        growth=diagnosis.growth,
        changed=changed,
        tried=tried,
    )


def _suspect(suspect):
    size = "outside TensorFlow's allocator" if suspect.size is None else mib(suspect.size)
    return {"kind": suspect.kind, "size": size, "evidence": suspect.evidence, "place": suspect.place} | {
        "change": suspect.change,
        "labs": [_lab(labs()[slug]) for slug in suspect.labs],
    }


def _lab(lab):
    file = notebook_file(lab.name)
    return {"words": f"lab {lab.number}, {lab.title}", "link": file.as_uri() if file else ""}


def _curve(result):
    """The curve of tensor memory as SVG's points, with what stands beside it in words; None where there are no samples."""
    if len(result.tensors) < 2:
        return None
    end = result.tensors[-1][0] or 1.0
    top = _ROOM * max([result.budget * result.budget_given, MIB, *(size for _, size in result.tensors)])
    highest = {}
    for seconds, size in result.tensors:
        column = int(seconds / end * _MOST_POINTS)
        highest[column] = max(highest.get(column, 0), size)
    points, before = [], 0.0
    for column, size in sorted(highest.items()):  # between two samples the level stays
        x, y = column / _MOST_POINTS * _WIDTH, _HEIGHT * (1 - size / top)
        points += [f"{x:.1f},{before or y:.2f}", f"{x:.1f},{y:.2f}"]
        before = y
    at, most = max(result.tensors, key=lambda sample: sample[1])
    budget = _HEIGHT * (1 - result.budget / top) if result.budget_given else None
    words = f"Tensor memory over {end:.0f} seconds: highest sample {mib(most)} at {at:.1f} s, last {mib(result.tensors[-1][1])}"
    return {"points": " ".join(points), "budget": budget, "top": mib(top), "end": f"{end:.0f} s", "words": words}


def _alive(facts):
    """[(name, what, number, size)] of the names of the script that held most when it was looked at last."""
    if facts is None or not facts.censuses:
        return []
    last = facts.censuses[-1]
    kinds = (("tensors", last.tensor_holders), ("NumPy arrays", last.array_holders))
    rows = [(holder.size, holder.name, words, holder.number) for words, holders in kinds for holder in holders]
    return [(name, words, number, mib(size)) for size, name, words, number in sorted(rows, reverse=True)]
