"""A figure in the text of a lab comes from a variable of the run (lab.note), or from the lab's own code, or is not there."""

import re
from pathlib import Path

import jupytext
import pytest

SOURCES = sorted((Path(__file__).parents[1] / "tools" / "source").glob("[0-9]*.py"))
_NUMBER = r"(?<![\w.,#^−-])(\d[\d,]*(?:\.\d+)?)"
_UNIT = r"(?:[KMG]i?B|%|ms|s|seconds?|minutes?|times|fold|×|bytes|per cent)(?![\w])"
MEASURED = re.compile(rf"{_NUMBER}[\s-]?{_UNIT}|(?<=× )(\d[\d,]*(?:\.\d+)?)")
# A size in words is a figure, too, and nobody sees that it went out of date.
IN_WORDS = re.compile(r"\b(?:ten|dozens?|hundreds?|thousands?)(?:fold|\s+(?:of\s+)?times)\b|\b\w+fold\b", re.IGNORECASE)
SCALED = re.compile(r"quick=([\d_]+)\b")
LAB = r"\b[Ll]ab \d\d\b|\b\d\d_[a-z]\w+"  # its number says nothing of a size


def parts(source):
    """(the paragraphs of a lab's text but for its head, its code)."""
    cells = jupytext.read(source).cells
    text = [cell.source for cell in cells if cell.cell_type == "markdown"]
    # The head quotes an error, and tells minutes and memory that other tests hold against the runs.
    prose = [re.sub(LAB, "lab", paragraph) for part in text[1:] for paragraph in part.split("\n\n")]
    return prose, "\n".join(cell.source for cell in cells if cell.cell_type == "code")


def numbers(code):
    """The numbers that stand in the code, as text without separators."""
    return {re.sub("[,_]", "", found) for found in re.findall(r"\d[\d_,]*(?:\.\d+)?", code)}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_text_tells_no_figure_that_no_run_gave(source):
    prose, code = parts(source)
    own, found = numbers(code), []
    for paragraph in prose:
        if "](http" in paragraph:  # quoted, with its source
            continue
        for match in MEASURED.finditer(paragraph):
            if re.sub("[,_]", "", match[1] or match[2]) not in own:
                found.append(f"{match[0]!r} in: {' '.join(paragraph.split())}")
        found += [f"{match[0]!r} in: {' '.join(paragraph.split())}" for match in IN_WORDS.finditer(paragraph)]
    assert not found, "give it with lab.note(f'…'), or leave it out:\n" + "\n".join(found)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_text_tells_no_size_that_another_scale_changes(source):
    prose, code = parts(source)
    scaled = {value.replace("_", "") for value in SCALED.findall(code) if int(value) > 9}
    scaled |= set(re.findall(r'quick="(\d+) [KMG]iB"', code))
    found = [
        f"{number} in: {' '.join(paragraph.split())}"
        for paragraph in prose
        for number in re.findall(r"(?<![\w.])\d[\d,]*(?!\d)", paragraph)
        if number.replace(",", "") in scaled
    ]
    assert not found, 'false under SCALE="full": give it with lab.note(f"…"), or leave it out:\n' + "\n".join(found)
