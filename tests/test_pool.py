"""A class's exports in one page: what is unusable is named, and no name can do anything in it."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from labsupport.__main__ import main
from labsupport.learner.exchange import EXPORT, VERSION, gather
from labsupport.learner.pool import pool
from labsupport.lesson import ledger
from labsupport.lesson.catalogue import labs
from labsupport.showing.plain import plain

NASTY = "<script>alert(1)</script>\"'&$x^{\ud800\u202e{{ 7*7 }}"


def participant(name, guess=50.0, verdict="holds", cores=4, minute=0):
    common = {
        "lab": "01_image_stacking",
        "machine": {
            "cores": cores,
            "memory_mib": 8000,
            "tensorflow": "2.21.0",
            "python": "3.12",
            "platform": f"Linux {NASTY}",
        },
    }
    stamp = iter(f"2025-01-01T00:{minute:02}:{second:02}+00:00" for second in range(9))
    return {
        EXPORT: VERSION,
        "participant": name,
        "entries": [
            {
                "time": next(stamp),
                "kind": "guess",
                "question": NASTY,
                "guess_mib": guess,
                "measured_mib": 100.0,
                **common,
            },
            {"time": next(stamp), "kind": "exercise", "number": 1, "passed": True, **common},
            {"time": next(stamp), "kind": "exercise", "number": 2, "passed": False, **common},
            {
                "time": next(stamp),
                "kind": "verdict",
                "id": "C01",
                "verdict": verdict,
                "figures": {NASTY: 1.0},
                "unit": NASTY,
                **common,
            },
            {
                "time": next(stamp),
                "kind": "verdict",
                "id": NASTY,
                "verdict": NASTY,
                "figures": {},
                "unit": "",
                **{**common, "lab": NASTY},
            },
        ],
    }


@pytest.fixture
def write(tmp_path):
    """write(name of a file, document or text) → its path."""

    def to(name, content):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return to


class Tags(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, page):
        super().__init__()
        self.found, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def test_a_class_in_one_page_that_asks_nothing_of_the_network(write):
    people = [
        participant(NASTY, 50.0, "holds", 4, 0),
        participant("blue", 400.0, "fails", 8, 1),
        participant("red", 100.0, "holds", 8, 2),
    ]
    page, problems = pool([write(f"{i}.json", person) for i, person in enumerate(people)])
    assert problems == []
    pool(
        [
            write(
                "far.json",
                {
                    **people[0],
                    "entries": [
                        {**people[0]["entries"][0], "guess_mib": guess} for guess in (10**400, float("nan"), 1e8)
                    ],
                },
            )
        ]
    )
    tags = Tags(page)
    assert "script" not in [tag for tag, _ in tags.found] and plain(NASTY) in tags.text
    page.encode()  # no surrogate is left
    assert all(
        value.startswith("data:")
        for _, given in tags.found
        for name, value in given.items()
        if name in ("src", "srcset", "href")
    )
    assert all("lab 01: 3 guesses, 0.5 to 4 times" in given["alt"] for tag, given in tags.found if tag == "img")
    row = next(row for row in re.findall(r"<tr>.*?</tr>", page) if "<td>C01<" in row)
    assert (
        "≠" in row and ">holds<" in row and "fails (1), holds (1)" in row
    )  # the first machine; the second, with two people
    assert "<td>3</td><td>3</td><td>0</td>" in page, "visited by three, exercise 1 passed by three, exercise 2 by none"
    assert "prefers-color-scheme: dark" in page


def test_bad_files_are_named_with_a_cure_and_the_others_pool(write, tmp_path):
    good = participant("blue")
    more = {
        **participant("green", minute=1),
        "entries": participant("green", minute=1)["entries"] + participant("", minute=2)["entries"],
    }
    bad = {
        "cut short": write("cut.json", json.dumps(good)[:300]),
        "is no export": write("other.json", {"cells": []}),
        "version '99'": write("version.json", {**good, EXPORT: 99}),
        "changed by hand": write("hand.json", {**good, "entries": [{"kind": "guess"}]}),
        "cannot be read": tmp_path / "missing.json",
        "deep": write("deep.json", "[" * 100_000),
        "name an ordinary file": Path("/dev/zero"),
        "by the same participant": write("again.json", {**good, "participant": "participant-123456"}),
        "two people": write("namesake.json", participant("green", minute=3)),
    }
    people, problems = gather([write("good.json", good), *bad.values(), write("green.json", more)])
    assert [person.name for person in people] == ["blue", "green"] and len(people[1].entries) == 10, (
        "of two the one with more entries"
    )
    assert len(problems) == len(bad)
    (one,), _ = gather([bad["by the same participant"], tmp_path / "good.json"])
    assert one.name == "blue", "of two equal ones the one that somebody named"
    for words, path in bad.items():
        assert any(path.name in problem and (words in problem or words == "deep") for problem in problems), (
            words,
            problems,
        )


def test_export_and_pool_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LABSUPPORT_LEDGER", "ledger.jsonl")
    with pytest.raises(SystemExit, match="nothing to export: ledger.jsonl has no entries"):
        main(["export", "mine.json"])
    monkeypatch.setenv("JPY_SESSION_NAME", "labs/01_image_stacking.ipynb")
    ledger.record("exercise", number=1, passed=True)
    main(["export", "mine.json"])
    main(["export", "named.json", "--name", "blue team"])
    assert re.fullmatch(r"participant-\w{6}", json.loads((tmp_path / "mine.json").read_text())["participant"])
    with pytest.raises(SystemExit, match="mine.json exists already"):
        main(["export", "mine.json"])
    main(["pool", "mine.json", "-o", "class.html"])
    assert "1 participants" not in (page := (tmp_path / "class.html").read_text()) and "1 participant." in page
    with pytest.raises(SystemExit, match="mine.json is one of the files to pool"):
        main(["pool", "mine.json", "-o", "mine.json"])
    with pytest.raises(SystemExit, match="ledger.jsonl is .*no export(.|\n)*nothing to pool"):
        main(["pool", "ledger.jsonl", "-o", "other.html"])
    capsys.readouterr()
    main(["progress"])
    assert f"1 of {len(labs())} labs visited, 1 of" in capsys.readouterr().out
