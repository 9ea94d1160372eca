"""The capstone's checker: what is left in a script is found by its name and no other, however the script is written."""

import linecache
import re
import threading
from functools import cache
from pathlib import Path

import build
import pytest
from capstone_answers import IMAGES, MAINS, TRAINING, TRIED

import labsupport
from labsupport import ArmResult, measure
from labsupport.ground.record import Cause
from labsupport.ground.result import ArmError
from labsupport.lesson import capstone, capstone_rules

ROOT = Path(__file__).parents[1]
# The function of the solution that is put back to its faulty form, the fault that this leaves, and who looks at it.
HALVES = {
    "image_dataset": ("eager stack", IMAGES),
    "decode": ("float64", IMAGES),
    "make_pipeline": ("decoded buffer", IMAGES),
    "evaluate": ("giant batch", ("evaluation", "epochs")),
    "train_epoch": ("history", ("epochs", "trials")),
    "learning_rate": ("retracing", ("epochs", "trials")),
    "search": ("model per trial", ("epochs", "trials")),
}
BUDGETS = {"generous": "256 MiB", "tight": "56 MiB"}
SIZE = 48  # of the images, half of the notebook's: what is held is told in images, whatever their size is
GIVEN = {"parameters": 77776, "image": (SIZE, SIZE, 3), "last": [0.001 * 0.9, 0.003 * 0.9], "validation": 64}


@cache
def cells(*tags):
    """The code of the solved notebook's cells with these tags."""
    book = build.notebook(ROOT / "tools" / "source" / "22_capstone.py", solved=True)
    return [cell.source for cell in book.cells if set(tags) & set(cell.metadata.get("tags", []))]


def script(put_back=None, code="", over="solved", first=None, **names):
    """The names of the solved notebook's script; put_back: the function that stays as it was before the fix.

    code: what a learner's cell defines on top, over the script "solved" or "as it was"; names: further ones, such as
    RATES; first: those that code may change.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    space = {"__name__": "capstone", "SCALE": "quick", "lab": labsupport, "keras": keras, "np": np, "tf": tf}
    was = None
    sources = cells("script", "fix") if over == "solved" else cells("script")
    for number, source in enumerate([*sources, code]):
        # A file name of its own for each variant: AutoGraph reads the source, as in a notebook.
        file = f"<capstone {hash((put_back, code, over))} {number}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        if put_back and number == 1:
            was = space[put_back]
        exec(compile(source, file, "exec"), space)
        space.update({**(first or {} if number < len(sources) else {}), **names})
    if put_back:
        space[put_back] = was
    return space


def measure_all(scripts):
    """In one arm: {name: what measure() gives}; exact counters tell differences, whatever ran before."""
    import time

    import tensorflow as tf

    found = {}
    for name, (pieces, looks) in scripts.items():
        start = time.process_time()
        found[name] = *capstone_rules.measure(pieces, GIVEN, looks), time.process_time() - start
        tf.config.run_functions_eagerly(False)
    return found


@pytest.fixture(scope="module")
def measured():
    """{answer: (figures, troubles, seconds of the processor)}, and the same of None, the solution, and of each half of it."""
    few = {"RATES": (0.001, 0.003), "EPOCHS": 2, "SIZE": SIZE}
    scripts = {name: (script(None, a.code, a.over, **few), a.looks) for name, a in TRIED.items()}
    scripts |= {name: (script(name, SIZE=SIZE), looks) for name, (_, looks) in HALVES.items()}
    scripts[None] = script(SIZE=SIZE), IMAGES + TRAINING
    scripts = {name: (capstone.script_functions(pieces), looks) for name, (pieces, looks) in scripts.items()}
    return measure(measure_all, scripts, timeout=900).value


def test_the_solution_has_no_fault_left(measured):
    figures, troubles, _ = measured[None]
    assert list(figures) == list(capstone_rules.FAULTS) and not troubles
    assert capstone.faults_of(figures) == [], figures


@pytest.mark.parametrize("put_back", HALVES)
def test_a_half_solution_fails_with_the_fault_left_named(put_back, measured):
    figures, troubles, _ = measured[put_back]
    assert capstone.faults_of(figures) == [HALVES[put_back][0]], figures
    # The solution shuffles the names, where the script as it was shuffled the images.
    assert all("in the order of the files" in trouble for trouble in troubles) and len(troubles) <= 1, troubles


@pytest.mark.parametrize("name", TRIED)
def test_an_answer_is_judged_by_what_it_does(name, measured):
    figures, troubles, _ = measured[name]
    found, says = [*capstone.faults_of(figures), *troubles], TRIED[name].says
    if says in capstone_rules.FAULTS or not says:
        assert found == [says] * bool(says), (figures, troubles)
    else:
        assert len(found) == 1 and re.search(says, found[0]), (figures, troubles)


def test_every_fault_that_the_checker_knows_is_planted():
    assert {fault for fault, _ in HALVES.values()} == set(capstone_rules.FAULTS)


# --- what main trains, on pictures that are learnt at once

RATES, EPOCHS, HIDDEN = (0.002, 0.003), 3, 32


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """Knows the script as it was, with two rates and four epochs, and 224 small pictures of 16 coarse patterns."""
    import numpy as np
    import tensorflow as tf

    folder, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    patterns = random.integers(0, 200, (16, 4, 4, 3)).repeat(4, 1).repeat(4, 2)
    files, labels = [str(folder / f"{number}.jpg") for number in range(224)], np.arange(224) % 16
    for file, label in zip(files, labels):
        noisy = patterns[label] + random.integers(0, 56, (16, 16, 3))
        tf.io.write_file(file, tf.io.encode_jpeg(noisy.astype("uint8")))
    given = script(over="as it was", RATES=RATES, EPOCHS=EPOCHS)
    return capstone.Judge(capstone.script_functions(given), files, labels, RATES, EPOCHS, 64, HIDDEN)


def run_all(scripts, judge):
    """In one arm: {name: what main trained and what its models answer}."""
    found = {}
    for name, pieces in scripts.items():
        says, updates, weights = capstone_rules.work(pieces, judge["files"], judge["labels"], judge["last"])
        asked = judge["facts"], judge["hidden"], judge["images"], weights
        found[name] = says, updates, *capstone_rules.answers(pieces, *asked)
    return found


@pytest.fixture(scope="module")
def trained(judge):
    same = {"RATES": RATES, "EPOCHS": EPOCHS}
    # Over the solution with these two, so that an answer may change them.
    scripts = {name: script(None, code, first=same) for name, (_, code) in MAINS.items()}
    known = {
        "files": judge.files,
        "labels": judge.labels,
        "last": judge.facts["last"],
        "facts": judge.facts,
        "hidden": judge.hidden,
        "images": judge.images,
    }
    scripts = {name: capstone.script_functions(pieces) for name, pieces in scripts.items()}
    return measure(run_all, scripts, known, timeout=600).value


@pytest.mark.parametrize("name", MAINS)
def test_a_main_is_judged_by_what_it_trained(name, trained, judge):
    says, updates, answers, left = trained[name]
    if not left:
        mine = capstone.scored(says, updates, answers, judge.truth)
        left = capstone.undone(mine, judge.trained, judge.rates, HIDDEN)
    if expected := MAINS[name][0]:
        assert left and re.search(expected, left[0]), left
    else:
        assert left == []


def test_a_main_that_says_more_than_its_model_can_is_told_both(judge):
    says_more = capstone.Trained(0.99, judge.trained.updates, dict.fromkeys(judge.trained.scores, 0.65))
    assert "main says 0.99, and the best model that it trained scores 0.65 on 32 photographs held back" in (
        capstone.undone(says_more, judge.trained, judge.rates, HIDDEN)
    )


# --- the report


def report(figures, left=(), peak=50 * 2**20):
    """A report on a script with these figures that finished within the tight budget."""
    result = ArmResult("script", 56 * 2**20, True, value=0.7, figures={"peak": peak})
    return capstone.Report(BUDGETS, {"56 MiB": result}, list(left), figures)


def test_a_level_is_passed_with_nothing_left(measured):
    found = report(measured[None][0])
    assert found.missing("tight") == found.missing("generous", forgive_faults=True) == ""
    half = report(measured["search"][0])
    assert half.missing("tight") == "left: model per trial (lab 11)"
    assert half.missing("generous", forgive_faults=True) == ""
    assert set(half.frame[""]) == {"", "LEFT", "not measured"}


def test_a_script_that_does_less_or_needs_more_passes_no_budget(measured):
    less = report(measured[None][0], ["the model that main trained scores 0.12 on 96 photographs held back"])
    assert "scores 0.12" in less.missing("generous", forgive_faults=True)
    large = report(measured[None][0])
    large.runs = {"256 MiB": ArmResult("script", 256 * 2**20, True, value=0.7, figures={"peak": 100 * 2**20})}
    assert large.missing("generous") == ""
    assert "not tried under 56 MiB: under 256 MiB main had a peak of 100 MiB" in large.missing("tight")
    dead = ArmError(Cause.CRASH, "the process of the arm died of SIGSEGV: compiled code crashed")
    large.budgets = {**BUDGETS, "fair": "128 MiB"}
    large.runs["128 MiB"] = ArmResult("script", 128 * 2**20, True, error=dead, figures={"peak": 90 * 2**20})
    assert "SIGSEGV" in large.missing("fair") and "SIGSEGV" not in large.missing("tight") + large.missing("generous")


@pytest.mark.parametrize(
    "cause, says",
    [
        (Cause.TIMEOUT, "evaluate does not come to an end. evaluate(model, images) gives"),
        (Cause.OOM, "evaluate runs out of memory: what it said"),
        (Cause.CRASH, "evaluate takes its process with it (what it said). evaluate(model"),
        (Cause.ERROR, "evaluate raises what it said. evaluate(model"),
    ],
)
def test_a_script_that_dies_is_told_where(cause, says):
    dead = ArmResult("script", 256 * 2**20, True, error=ArmError(cause, "what it said"))
    dead.open_phases = [("search", 1.0), ("evaluate", 1.0), ("a phase of its own", 2.0)]
    found = capstone.Report(BUDGETS, {"256 MiB": dead}, measured={"history": 1.0})
    assert says in found.missing("generous")
    assert found.missing("generous").endswith("left: history (lab 09)")


def test_whatever_a_script_does_a_check_gives_sentences(judge):
    """A function that ends its process, one that cannot be sent, a main that raises, names that are no functions."""
    pieces = capstone.script_functions(script(code="def image_dataset(files, labels): import os; os._exit(3)"))
    assert "image_dataset takes its process with it (" in judge.look(pieces, "images")[1][0]
    lock = threading.Lock()
    unsendable = judge.check({**pieces, "evaluate": lambda model, images: lock}, BUDGETS)
    assert "evaluate cannot be sent to a process of its own" in unsendable.missing("generous")
    assert "main is no function but Ellipsis" in judge.check({**pieces, "main": ...}, BUDGETS).missing("generous")
    raising = dict.fromkeys(pieces, 3) | {"main": lambda files, labels: [][0]}
    found = judge.check(raising, BUDGETS)
    assert found.missing("generous").startswith("main raises IndexError")
    assert "image_dataset is no function but 3. " in found.missing("tight")
    assert not found.best.ok and found.trained is None and len(found.frame) == len(capstone_rules.FAULTS)


@pytest.fixture
def asked(judge, monkeypatch):
    """What the judge runs: here nothing but the labels of its arms, and each look's figures are those in figures."""
    labels, figures = [], {}

    def ran(function, *given, label, **options):
        labels.append(label)
        return ArmResult(label, 2**30, True, value=(dict(figures), []), figures={"peak": 2**20})

    monkeypatch.setattr(capstone, "run", ran)
    monkeypatch.setattr(judge, "looked", {})
    monkeypatch.setattr(judge, "run", lambda script, size, label: (ran(None, label=label), []))
    return labels, figures


def test_a_check_measures_what_was_not_looked_at_before(judge, asked):
    labels, _ = asked
    pieces = capstone.script_functions(script())
    judge.look(pieces, "images")
    judge.check(pieces, BUDGETS)
    of = "your functions, measured: "
    assert labels == [of + "images", of + "training", "your script, 56 MiB", of + "main"]
    judge.check({**pieces, "make_pipeline": lambda images: images.batch(2)}, BUDGETS)
    assert labels[4:] == [of + "images", of + "training", "your script, 56 MiB", of + "main"]


def test_a_script_with_a_fault_runs_under_the_largest_budget_first(judge, asked):
    labels, figures = asked
    figures["history"] = 1.0
    judge.check(capstone.script_functions(script()), BUDGETS)
    assert [label for label in labels if "script" in label] == ["your script, 256 MiB", "your script, 56 MiB"]
