"""The learner's ledger: what lands in it, what never does, and what no damage to it can do."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jupyter_client
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from labsupport import verdict
from labsupport.learner import standing
from labsupport.learner.tally import first_guesses, tendency
from labsupport.lesson import claims, ledger
from labsupport.lesson.catalogue import labs
from labsupport.lesson.claims import VerdictError
from labsupport.lesson.exercises import exercise
from labsupport.lesson.guessing import Guess
from labsupport.lesson.ledger import LedgerError, current_lab, entries, record

LAB = "labs/01_image_stacking.ipynb"
GUESS = "from labsupport import guess\nprint(guess('How much?', 50.0).against(100.0))"


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A ledger of its own, in a lab that a learner has open."""
    path = tmp_path / "folder" / "ledger.jsonl"
    monkeypatch.setenv("LABSUPPORT_LEDGER", str(path))
    monkeypatch.setenv("JPY_SESSION_NAME", f"/srv/learner/{LAB}")
    return path


def test_guess_exercise_and_verdict_land_in_the_ledger(file, monkeypatch):
    claim = {"claim": "It helps.", "because": "so", "flips": "never", "unit": "MiB", "tests": {"less": "fix < 2"}}
    monkeypatch.setattr(claims, "claims", lambda: {"C01": claim})
    Guess("How much?", 50.0).against(100.0)
    exercise(2, "a hint")(lambda: 1 / 0)()
    verdict("C01", "holds", fix=1, ok=True)
    with pytest.raises(VerdictError):  # on this machine the claim came out otherwise: that is worth comparing
        verdict("C01", "holds", fix=3)
    kept, damaged = entries()
    own = [{k: v for k, v in entry.items() if k not in ("time", "lab", "machine", "kind")} for entry in kept]
    assert own == [
        {"question": "How much?", "guess_mib": 50.0, "measured_mib": 100.0},
        {"number": 2, "passed": False},
        {"id": "C01", "verdict": "holds", "figures": {"fix": 1.0, "ok": True}, "unit": "MiB"},
        {"id": "C01", "verdict": "fails", "figures": {"fix": 3.0}, "unit": "MiB"},
    ]
    assert damaged == 0 and {entry["lab"] for entry in kept} == {"01_image_stacking"}
    assert set(kept[0]["machine"]) == {"cores", "memory_mib", "tensorflow", "python", "platform"}
    assert os.uname().nodename not in json.dumps(kept[0]["machine"])


@pytest.mark.parametrize(
    "session, lab",
    [
        (f"/srv/learner/{LAB}", "01_image_stacking"),
        ("labs/01_image_stacking-Copy1.ipynb", "01_image_stacking"),
        ("labs/solutions/01_image_stacking.ipynb", None),
        ("my own notes.ipynb", None),
        (None, None),
    ],
)
def test_only_a_lab_that_is_open_counts(session, lab, monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    if session:
        monkeypatch.setenv("JPY_SESSION_NAME", session)
    assert current_lab() == lab


def test_a_guess_in_a_real_kernel_is_kept_and_one_of_a_tool_started_there_is_not(file):
    """Jupyter Server sets JPY_SESSION_NAME for a kernel; what runs notebooks from within that kernel inherits it."""
    notebook = file.parent.parent / "inner.ipynb"
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(metadata=kernel, cells=[new_code_cell(GUESS.replace("50.0", "7.0"))]), notebook)
    inner = f"import papermill; book = papermill.execute_notebook({str(notebook)!r}, None, progress_bar=False); print(book.cells[0].outputs)"
    with jupyter_client.run_kernel(kernel_name="python3", env={**os.environ, "JPY_SESSION_NAME": LAB}) as client:
        said = []
        hook = lambda message: said.append(message["content"].get("text", ""))
        for code in (
            GUESS,
            f"import sys, subprocess\nprint(subprocess.run([sys.executable, '-c', {inner!r}], capture_output=True, text=True))",
        ):
            assert client.execute_interactive(code, output_hook=hook, timeout=60)["content"]["status"] == "ok"
    assert "You guessed 50 MiB" in "".join(said) and "You guessed 7 MiB" in "".join(said), said
    assert [(entry["lab"], entry["guess_mib"]) for entry in entries()[0]] == [("01_image_stacking", 50.0)]


def test_two_kernels_that_write_at_once_lose_nothing(file):
    def write(number):
        code = f"from labsupport.lesson.ledger import record\nfor i in range(300): record('exercise', number={number} * 1000 + i, passed=True)"
        return subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            env={**os.environ, "JPY_SESSION_NAME": f"labs/0{number}_lab.ipynb"},
        )

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, (1, 2)))
    kept, damaged = entries()
    assert damaged == 0
    assert sorted(entry["number"] for entry in kept) == [1000 + i for i in range(300)] + [2000 + i for i in range(300)]


def test_a_damaged_line_costs_no_other(file):
    record("exercise", number=1, passed=True)
    with file.open("ab") as stream:
        stream.write(
            b'not json\n\xff\xfe\n["no entry"]\n{"kind": "exercise", "number": 1}\n{"time": "2025-01-01T00:00:00+00:00", "la'
        )
    record("exercise", number=2, passed=True)  # the line before it has no end
    kept, damaged = entries()
    assert [entry["number"] for entry in kept] == [1, 2] and damaged == 5
    assert "5 damaged lines" in str(standing.progress())


def test_what_cannot_be_written_is_said_once_and_the_lab_goes_on(file, monkeypatch, capsys):
    ledger.say_once.cache_clear()
    file.parent.write_text("a file where the folder should be; root may write into a read-only folder")
    exercise(1, "a hint")(lambda: None)()
    assert "You guessed" in Guess("How much?", 50.0).against(100.0)
    said = capsys.readouterr().out
    assert said.count("Your progress is not kept") == 1 and str(file) in said and "LABSUPPORT_LEDGER" in said
    assert "Nothing can be shown" in str(standing.progress())

    file.parent.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data, write=os.write: write(descriptor, data[:20]))
        record("exercise", number=1, passed=True)
    assert "no room was left on the disk" in capsys.readouterr().out
    record("exercise", number=2, passed=True)
    kept, damaged = entries()
    assert [entry["number"] for entry in kept] == [2] and damaged == 1


@pytest.fixture
def special(tmp_path):
    """Files that are none: with no end, with no room, and one that waits for somebody to write."""
    os.mkfifo(tmp_path / "fifo")
    return ["/dev/zero", "/dev/full", str(tmp_path / "fifo"), str(tmp_path)]


def test_what_is_no_ordinary_file_is_refused_at_once(file, special, monkeypatch, capsys):
    for path in special:
        monkeypatch.setenv("LABSUPPORT_LEDGER", path)
        with pytest.raises(LedgerError, match="name an ordinary file"):
            entries()
        assert "Nothing can be shown" in str(standing.progress())
        ledger.say_once.cache_clear()
        record("exercise", number=1, passed=True)
        assert "Your progress is not kept" in capsys.readouterr().out


def test_a_ledger_is_read_with_a_bound(file, monkeypatch):
    record("exercise", number=1, passed=True)
    monkeypatch.setattr(ledger, "LARGEST", file.stat().st_size)
    assert len(entries()[0]) == 1
    record("exercise", number=2, passed=True)
    with pytest.raises(LedgerError, match="too large to be a ledger"):
        entries()


def test_without_a_home_folder_it_is_said_once(file, monkeypatch, capsys):
    ledger.say_once.cache_clear()
    monkeypatch.delenv("LABSUPPORT_LEDGER")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without HOME and without an account
    with pytest.raises(LedgerError, match="set LABSUPPORT_LEDGER to a file"):
        entries()
    for number in (1, 2):
        record("exercise", number=number, passed=True)
    assert capsys.readouterr().out.count("Your progress is not kept: it is not known where") == 1
    assert "Nothing can be shown: it is not known where" in str(standing.progress())


def test_a_read_only_folder(file, capsys):
    ledger.say_once.cache_clear()
    file.parent.mkdir(mode=0o500)
    if os.access(file.parent, os.W_OK):
        pytest.skip("this user may write into a read-only folder, as root does")
    record("exercise", number=1, passed=True)
    assert "Permission denied" in capsys.readouterr().out


def test_off_keeps_nothing(file, tmp_path, monkeypatch):
    monkeypatch.setenv("LABSUPPORT_LEDGER", "off")
    monkeypatch.setenv("HOME", str(tmp_path))
    record("exercise", number=1, passed=True)
    assert list(tmp_path.iterdir()) == [] and entries() == ([], 0)
    assert "LABSUPPORT_LEDGER is set to off" in str(standing.progress())


def guess_in(slug, guess, measured=100.0):
    return {"kind": "guess", "lab": labs()[slug].name, "guess_mib": guess, "measured_mib": measured}


def test_the_first_guess_counts_and_one_after_the_answer_is_marked():
    kept = [
        guess_in("image_stacking", 10.0),
        guess_in("image_stacking", 100.0),
        guess_in("arrays_into_datasets", 0.0),
        guess_in("arrays_into_datasets", 99.0),
        guess_in("pipeline_buffers", 5.0, None),
        guess_in("batch_size", -1.0),
        {**guess_in("gradient_accumulation", 9.0), "lab": "05_my_own"},
    ]
    assert [(g.lab.slug, g.factor, g.late) for g in first_guesses(kept)] == [
        ("image_stacking", 0.1, False),
        ("arrays_into_datasets", 0.99, True),
    ]


@pytest.mark.parametrize(
    "guesses, words",
    [
        ((1600, 25, 200, 50), "got closer: off by a factor of 8.0 at first, 2.0 lately"),
        ((200, 50, 1600, 25), "got farther off: off by a factor of 2.0 at first, 8.0 lately"),
        ((200, 50, 50, 200), "stayed about as close"),
        ((200, 50, 50), "Too few guesses yet"),
    ],
)
def test_the_tendency_is_told_as_it_is(guesses, words):
    assert words in tendency(first_guesses([guess_in(slug, float(guess)) for slug, guess in zip(labs(), guesses)]))


def test_the_tests_themselves_write_to_no_ledger():
    assert ledger.ledger_path() is None
