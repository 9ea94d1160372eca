"""People's own memory troubles, as scripts: the doctor names each, and is silent once it is cured.

Each script in tests/cases tells in comments what is to be found in it, and takes --fixed; cases/README.md says which reports they stand for.
"""

import contextlib
import functools
import linecache
import re
from pathlib import Path

import pytest
from examined import examined, run_as_main

from labsupport.doctor.process import examine_script
from labsupport.doctor.rules import diagnose
from labsupport.doctor.suspects import LABS
from labsupport.doctor.terminal import DoctorDisplay

CASES = {path.stem: path for path in sorted((Path(__file__).parent / "cases").glob("*.py"))}
TABLE = Path(__file__).parent / "cases" / "README.md"


def settings(name):
    """{"kind", "budget", "line", "outside", "devices"} from a script's comments; kind is "none" where nothing is wrong, line how the line begins that is to be named."""
    return dict(re.findall(r"^# (kind|budget|line|outside|devices): (.+)$", CASES[name].read_text(), re.MULTILINE))


def diagnosed(name, *arguments):
    """What the doctor finds; a process of its own as in a terminal is for the scripts that say what may be outside of TensorFlow."""
    wanted = settings(name)
    path, budget, devices = str(CASES[name]), wanted["budget"], int(wanted.get("devices", 1))
    if "outside" not in wanted:
        return examined(run_as_main, (path, arguments), {"budget": budget, "logical_devices": devices})
    show = lambda: DoctorDisplay(path, budget)
    return diagnose(examine_script([path, *arguments], show, budget, wanted["outside"], devices))


def told(diagnosis):
    """What a failing test shows."""
    suspects = [
        f"{suspect.kind}, {suspect.size} bytes: {'; '.join(suspect.evidence)}" for suspect in diagnosis.suspects
    ]
    return "\n".join([str(diagnosis.result), *suspects, str(diagnosis.parts)])


TROUBLED = [name for name in CASES if settings(name)["kind"] in LABS]


@pytest.mark.parametrize("name", TROUBLED)
def test_the_doctor_names_what_people_reported(name, record_property):
    diagnosis = diagnosed(name)
    named = diagnosis.suspects[0].kind if diagnosis.suspects else "silent"
    record_property("doctor", (settings(name)["kind"], named))
    assert diagnosis.suspects and diagnosis.suspects[0].kind == settings(name)["kind"], told(diagnosis)
    if "line" in settings(name):
        file, number = diagnosis.suspects[0].place.rsplit(":", 1)
        assert file.endswith(CASES[name].name), told(diagnosis)
        assert linecache.getline(str(CASES[name]), int(number)).strip().startswith(settings(name)["line"]), (
            file + number
        )


def recomputing(scope, called):
    """Layers that do not fit 60 MiB under a tape, with recomputation that is asked for and, if so told, is called."""
    import keras
    import tensorflow as tf

    make = lambda: [keras.layers.Dense(256, activation="relu") for _ in range(30)]
    x, layers = tf.zeros([4096, 256]), make()
    chain = lambda x: functools.reduce(lambda x, layer: layer(x), layers, x)
    call = chain
    with keras.RematScope("full") if scope else contextlib.nullcontext():
        if scope and called:
            layers = make()
        elif not scope:
            light = keras.remat(chain)
            call = light if called else chain
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(call(x))
    tape.gradient(loss, [layer.kernel for layer in layers])


@pytest.mark.parametrize(("scope", "called"), [(True, True), (True, False), (False, False)])
def test_a_recomputation_that_is_not_active_is_told(scope, called):
    diagnosis = examined(recomputing, (scope, called), {"budget": "60 MiB"})
    assert not diagnosis.result.ok, told(diagnosis)
    assert ("nothing recomputes" in told(diagnosis)) == (not called), told(diagnosis)


def extracting(joined, alone):
    """Features of a model, or of its layers alone, neither trained nor in a graph; where joined is false, only their means are kept."""
    import keras
    import tensorflow as tf

    first, second, features = keras.layers.Dense(64), keras.layers.Dense(256), []
    model = keras.Sequential([keras.Input((32,)), first, second])
    for _ in range(64):
        if alone:
            wide = first(tf.zeros([256, 32]))
            found = second(wide)
        else:
            found = model(tf.zeros([256, 32]))
        features.append(found if joined else float(tf.reduce_mean(found)))


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_calls_of_a_model_or_layer_in_a_loop_are_looked_at_like_steps(kept, alone):
    diagnosis = examined(extracting, (kept, alone), {"budget": "64 MiB"})
    named = [(suspect.kind, suspect.place.split(":")[0]) for suspect in diagnosis.suspects]
    assert named == [("retained tensors", "test_cases.py")] * kept, told(diagnosis)


@pytest.mark.parametrize("name", CASES)
def test_the_doctor_is_silent_where_nothing_is_wrong(name):
    diagnosis = diagnosed(name, "--fixed")
    assert diagnosis.result.ok and not diagnosis.suspects, told(diagnosis)


def test_each_kind_has_a_case_and_each_case_its_report():
    kinds = {settings(name)["kind"] for name in CASES}
    assert set(LABS) <= kinds <= {*LABS, "none"}
    assert set(re.findall(r"\((\w+)\.py\)", TABLE.read_text())) == set(CASES)
