"""The doctor's rules on records made by hand: each kind once found and once not. Milliseconds, without TensorFlow."""

import random
import subprocess
import sys
from dataclasses import astuple

import msgspec
import pytest

from labsupport.doctor.dying import Death
from labsupport.doctor.figures import Parts, growth, parts_of_peak
from labsupport.doctor.rules import diagnose
from labsupport.doctor.suspects import CHANGES, LABS
from labsupport.doctor.terminal import no_suspect
from labsupport.ground.budget import MIB
from labsupport.ground.record import (
    Buffer,
    Cause,
    Census,
    Converted,
    Facts,
    Failing,
    Function,
    Holder,
    Interval,
    Kind,
    Model,
    Step,
)
from labsupport.ground.result import SOURCES, ArmError, ArmResult, Family, Line, Offspring

BUDGET = 256 * MIB
TRAIN = Step("train (t.py:9)", Kind.FUNCTION, "t.py:9", count=64)
IN_STEP = Interval(TRAIN.name, TRAIN.kind, 10 * MIB, 250 * MIB, TRAIN.place)


def censuses(**series):
    """Censuses after 1, 2, 4, 8, … steps with these sizes in MiB, and one from the end."""
    (length,) = {len(values) for values in series.values()}
    plain = {"iterators", "operations", "containers"}
    rows = [{name: values[i] * (1 if name in plain else MIB) for name, values in series.items()} for i in range(length)]
    return [Census(step=2**i, level=0, **row) for i, row in enumerate(rows)] + [Census(step=2**length, level=0)]


def figures(peak):
    return dict.fromkeys(SOURCES, 0) | {"peak": peak, "process_peak": peak}


def finished(facts, peak=100 * MIB):
    return ArmResult("t.py", BUDGET, True, facts=facts, figures=figures(peak))


def died(facts, cause=Cause.OOM, peak=250 * MIB, wanted=20 * MIB, dumps=(), **more):
    error = ArmError(cause, "no room for a tensor")
    return ArmResult(
        "t.py", BUDGET, True, facts=facts, figures=figures(peak), error=error, wanted=wanted, dumps=list(dumps), **more
    )


def kinds(result):
    return [suspect.kind for suspect in diagnose(result).suspects]


def evidence(result):
    return " | ".join(sentence for suspect in diagnose(result).suspects for sentence in suspect.evidence)


def one(**sizes):
    """Facts of a training with one census before the first step and one at the end, sizes in MiB."""
    last = {name: size * MIB for name, size in sizes.items()}
    return Facts(steps=[TRAIN], censuses=[Census(1, 0), Census(2, 0, **last)], failed=IN_STEP)


# --- what grows


def retraced(calls, traced_at, own=True, **more):
    function = Function("step", "t.py:3", own, not own, calls=calls, traces=len(traced_at), traced_at=traced_at, **more)
    return Facts(functions=[function], censuses=[Census(1, 0)])


def test_traces_that_go_on_are_retracing():
    assert kinds(finished(retraced(20, list(range(1, 21)), changing="2 is a Python int"))) == ["retracing"]
    assert "argument 2 is a Python int" in evidence(
        finished(retraced(20, list(range(1, 21)), changing="2 is a Python int"))
    )
    assert "applied to it anew 20 times" in evidence(finished(retraced(20, list(range(1, 21)), instances=20)))
    assert kinds(finished(retraced(6060, list(range(1, 6061, 60))))) == ["retracing"]  # a new rate for each long epoch


@pytest.mark.parametrize(
    "facts",
    [
        retraced(1000, [1, 2, 3, 4, 5, 6]),  # all at the start: one for each shape
        retraced(20, [1, 10, 15, 20]),  # too few
        retraced(2000, [1, 2, 3, 4, 1500, 1600]),  # hardly ever
        retraced(8, list(range(1, 9)), own=False, instances=8),  # Keras makes one for each model
    ],
    ids=["at the start", "few", "seldom", "Keras"],
)
def test_traces_that_end_are_not(facts):
    assert kinds(finished(facts)) == []


def test_a_graph_that_grows_while_its_session_runs_is_retracing():
    step = Step("Session.run (t.py:7)", Kind.SESSION, "t.py:7", count=32)
    facts = Facts(steps=[step], censuses=censuses(operations=[5, 7, 11, 19, 35])[:-1])
    (suspect,) = diagnose(finished(facts)).suspects
    assert (suspect.kind, suspect.place) == ("retracing", "t.py:7")
    facts.censuses = censuses(operations=[5, 40, 40, 40, 40])[:-1]
    assert kinds(finished(facts)) == []
    facts = Facts(steps=[TRAIN], censuses=censuses(operations=[5, 7, 11, 19, 35])[:-1])  # tf.functions, not a session
    assert kinds(finished(facts)) == []


def models(held, alive=1, size=8):
    found = censuses(held=held)
    return [
        Census(c.step, 0, weights=size * MIB, held=c.held, models=[Model("Sequential", size * MIB)] * alive)
        for c in found
    ]


def test_a_model_per_fold_is_kept_alive():
    facts = Facts(steps=[TRAIN], censuses=models([8, 8, 16, 24, 32, 40], alive=4))
    assert kinds(finished(facts)) == ["models kept alive"]
    assert "belong to variables that Python has let go of" in evidence(finished(facts))
    assert "keeps them" not in evidence(
        finished(Facts(steps=[TRAIN], censuses=models([2, 2, 4, 6, 8, 9], alive=4, size=8)))
    )


@pytest.mark.parametrize(("number", "size", "named"), [(4, 36, True), (1, 36, False), (4, 8, False)])
def test_the_name_that_holds_models_is_told(number, size, named):
    """The last model has a name, too; and a name that holds little is not where they go."""
    rows = models([8, 8, 16, 24, 32, 40], alive=4)
    rows[-2] = msgspec.structs.replace(rows[-2], model_holders=[Holder("results", number, size * MIB, "t.py:12")])
    facts = Facts(steps=[TRAIN], censuses=rows, made={"model": "t.py:4"})
    (suspect,) = diagnose(finished(facts)).suspects
    assert suspect.place == ("t.py:12" if named else "t.py:4")
    assert (
        ("results holds 4 models, 36.0 MiB" in evidence(finished(facts))) == named == ("let results" in suspect.change)
    )


@pytest.mark.parametrize(("alive", "named"), [(3, False), (5, True)])
def test_a_few_models_at_a_time_may_grow(alive, named):
    """The best, the last and the next, each larger than those before."""
    rows = [
        Census(
            2**n, 0, weights=alive * n * MIB, held=alive * n * MIB, models=[Model("m", n * MIB)] * alive, models_met=9
        )
        for n in range(2, 8)
    ]
    assert kinds(finished(Facts(steps=[TRAIN], censuses=rows))) == ["models kept alive"] * named


@pytest.mark.parametrize(
    "held",
    [[8, 8, 8, 8, 8, 8], [8, 8, 16, 24, 8, 8], [8, 8, 9, 10, 11, 11], [8, 8, 8.1, 14, 14.1, 14.1]],
    ids=["one", "let go", "small", "once"],
)
def test_a_model_after_another_is_not(held):
    assert kinds(finished(Facts(steps=[TRAIN], censuses=models(held)))) == []


@pytest.mark.parametrize(("at_the_end", "named"), [(14, True), (3, False)])
def test_models_that_were_counted_out_of_turn_count_where_they_are_held_at_the_end(at_the_end, named):
    rows = [Census(step, 0, held=held * MIB, extra=step > 31) for step, held in ((2, 3), (31, 3), (41, 7), (82, 10))]
    rows += [Census(122, 0, held=14 * MIB, extra=True), Census(160, 0, held=at_the_end * MIB)]
    assert kinds(finished(Facts(steps=[TRAIN], censuses=rows))) == ["models kept alive"] * named


def test_tensors_and_arrays_that_stay_are_retained():
    facts = Facts(steps=[TRAIN], censuses=censuses(tensors=[1, 2, 4, 8, 16, 32]))
    facts.censuses[-2] = Census(32, 0, tensors=32 * MIB, tensor_holders=[Holder("losses", 31, 30 * MIB)])
    assert kinds(finished(facts)) == ["retained tensors"]
    facts.number_of_passes = 1
    assert "a pass" not in evidence(finished(facts))
    assert "losses holds 31 of them, 30.0 MiB" in evidence(finished(facts))
    assert kinds(finished(Facts(steps=[TRAIN], censuses=censuses(arrays=[1, 2, 4, 8, 16, 32])))) == ["retained tensors"]


def test_a_queue_with_a_largest_length_only_fills():
    def found(bounded, result):
        held = lambda n: [Holder("recent", n, n * MIB, "t.py:4", bounded * n * MIB)]
        rows = [Census(2**n, 0, tensors=2**n * MIB, tensor_holders=held(2**n)) for n in range(7)]
        return diagnose(result(Facts(steps=[TRAIN], censuses=rows, failed=IN_STEP))).suspects

    (suspect,) = found(False, finished)
    assert (suspect.kind, suspect.place) == ("retained tensors", "t.py:4")
    assert found(True, finished) == []
    assert "retained tensors" in [suspect.kind for suspect in found(True, died)]  # it was too long for this budget
    queue = Holder("recent", 50, 50 * MIB, "t.py:4", 50 * MIB)
    facts = Facts(steps=[many(60, 1)], censuses=[Census(1, 0, tensors=50 * MIB, tensor_holders=[queue])])
    assert "rose by" not in no_suspect(finished(facts))[1] and diagnose(finished(facts)).parts.kept == 50 * MIB


def many(count, a_step):
    """A step that ran so often, with levels that rose by so many MiB each time."""
    return Step(
        "f (t.py:9)",
        Kind.FUNCTION,
        "t.py:9",
        count=count,
        levels=[(n, int(n * a_step * MIB)) for n in range(1, count + 1)],
    )


def test_what_is_kept_after_the_last_census_is_reckoned_with():
    """Where tensors explain what the level rose by until then."""

    def found(tensors):
        held = lambda n: [Holder("a Keep", n, int(tensors * n * MIB), "t.py:6")]
        step = lambda n: Census(n, n * MIB, tensors=int(tensors * n * MIB), tensor_holders=held(n))
        rows = [step(2**n) for n in range(6)] + [Census(320, 0)]
        facts = Facts(steps=[many(320, 1)], censuses=rows, passes=[None, None], number_of_passes=40)
        (suspect,) = diagnose(finished(facts, peak=330 * MIB)).suspects
        return suspect

    assert found(1).size == 318 * MIB and found(0.5).size == 15 * MIB
    assert "318.0 MiB in 318 steps, 1.0 MiB a step" in found(1).evidence[0]
    assert found(1).place == "t.py:6" and "a Keep holds 32 of them, 32.0 MiB after 32 steps" in found(1).evidence


@pytest.mark.parametrize(("rate", "named"), [(1, True), (0, False)])
def test_what_names_hold_more_and_more_of_is_retained_also_where_few_censuses_were_taken(rate, named):
    held = lambda step: [Holder("kept", step, (5 + rate * step) * MIB, "t.py:6")]
    extra = [
        Census(n, 0, tensors=(5 + n) * MIB, extra=True, tensor_holders=held(n)) for n in (9, 13, 17, 21, 25, 29, 40)
    ]
    rows = [Census(1, 0), Census(2, 0, tensors=2 * MIB), *extra, Census(64, 0)]
    facts = Facts(steps=[many(64, 1)], censuses=rows)
    found = diagnose(finished(facts)).suspects
    assert [(suspect.kind, suspect.place) for suspect in found] == [("retained tensors", "t.py:6")] * named
    facts.steps[0].levels[25:] = [(n, 25 * MIB) for n in range(26, 65)]  # it was filled by then
    assert kinds(finished(facts)) == []


def test_what_comes_at_once_at_the_end_is_no_growth_by_step():
    rows = [Census(2**n, 0, tensors=2 * 2**n * MIB) for n in range(6)]
    for at_once, grown in ((64, 64), (0, 62)):
        rows[6:] = [Census(33, 0, tensors=(66 + at_once) * MIB)]
        (suspect,) = diagnose(finished(Facts(steps=[TRAIN], censuses=rows))).suspects
        assert suspect.size == min(66 + at_once - 4, grown) * MIB


def test_of_names_that_hold_tensors_those_that_grew_with_the_steps_count():
    held = lambda n: [Holder("outs", n, 2 * n * MIB, "t.py:8")]
    rows = [Census(2**n, 0, tensors=2 * 2**n * MIB, tensor_holders=held(2**n)) for n in range(5)]
    rows += [Census(32, 0, tensors=128 * MIB, tensor_holders=[*held(32), Holder("joined", 1, 64 * MIB, "t.py:9")])]
    (suspect,) = diagnose(finished(Facts(steps=[TRAIN], censuses=rows))).suspects
    assert (suspect.size, suspect.place) == (60 * MIB, "t.py:8") and "in 30 steps, 2.0 MiB a step" in evidence(
        finished(Facts(steps=[TRAIN], censuses=rows))
    )


def test_an_iterator_that_finds_no_room_was_to_copy_its_data():
    rows = [
        Census(0, 0, tensors=100 * MIB, models=[Model("m", MIB)], tensor_holders=[Holder("x", 1, 100 * MIB, "t.py:3")])
    ]
    facts = Facts(steps=[], censuses=rows, open=Interval("an iterator", Kind.ITERATOR, 100 * MIB))
    suspect = diagnose(died(facts, peak=110 * MIB, wanted=100 * MIB)).suspects[0]
    assert (suspect.kind, suspect.place, suspect.size) == ("input copy", "t.py:3", 200 * MIB)
    assert "of 200.0 MiB 100.0 MiB were in use, 100.0 MiB were asked for" in suspect.evidence


@pytest.mark.parametrize(("number", "outputs"), [(32, True), (32 * 2**18, False)])
def test_outputs_that_are_kept_are_no_losses(number, outputs):
    facts = Facts(steps=[TRAIN], censuses=censuses(tensors=[1, 2, 4, 8, 16, 32]))
    facts.censuses[-2] = Census(32, 0, tensors=32 * MIB, tensor_holders=[Holder("kept", number, 31 * MIB)])
    (suspect,) = diagnose(finished(facts)).suspects
    assert ("made beforehand" in suspect.change) == outputs and ("float(loss)" in suspect.change) != outputs


@pytest.mark.parametrize(
    ("of_data_sets", "change"), [(30 * MIB, "no data set or iterator whose"), (0, "made beforehand")]
)
def test_data_sets_that_are_kept_are_no_outputs(of_data_sets, change):
    facts = Facts(steps=[TRAIN], censuses=censuses(tensors=[1, 2, 4, 8, 16, 32]))
    held = Holder("loader", 12, 31 * MIB, "t.py:8", of_data_sets=of_data_sets)
    facts.censuses[-2] = Census(32, 0, tensors=32 * MIB, tensor_holders=[held])
    assert change in diagnose(finished(facts)).suspects[0].change


def test_objects_of_each_step_that_hold_tensors_unseen_are_told():
    rows = censuses(tensors=[1, 2, 4, 8, 16, 32])
    rows[-2] = Census(32, 0, tensors=32 * MIB, containers=[Holder("tapes", 33, 0, "t.py:6"), Holder("words", 12, 0)])
    (suspect,) = diagnose(finished(Facts(steps=[TRAIN], censuses=rows))).suspects
    assert suspect.place == "t.py:6" and "tapes holds 33 objects, more with each step" in suspect.evidence
    assert "words" not in str(suspect.evidence) and "let tapes keep no such objects" in suspect.change


def test_the_line_that_fills_is_that_of_an_earlier_name():
    rows = models([8, 8, 16, 24, 32, 40])
    rows[-3] = msgspec.structs.replace(rows[-3], model_holders=[Holder("kept in f()", 4, 32 * MIB, "t.py:29")])
    rows[-1] = msgspec.structs.replace(rows[-1], held=48 * MIB, model_holders=[Holder("histories", 6, 48 * MIB)])
    (suspect,) = diagnose(finished(Facts(steps=[TRAIN], censuses=rows, made={"model": "t.py:8"}))).suspects
    assert suspect.place == "t.py:29"


def test_a_tape_over_many_batches_is_told_where_there_was_room_for_them():
    tape = Step("GradientTape (t.py:7)", Kind.TAPE, "t.py:7", count=3, rise=60 * MIB)
    facts = Facts(steps=[tape], censuses=[Census(1, 0), Census(2, 0)], in_tape=30)
    (suspect,) = diagnose(finished(facts)).suspects
    assert (suspect.kind, suspect.place, suspect.size) == ("retained tensors", "t.py:7", 60 * MIB)
    facts.in_tape = 4  # parts of one batch
    assert kinds(finished(facts)) == []


@pytest.mark.parametrize(("number", "named"), [(5, ["constants in graphs", "retracing"]), (2, ["retracing"])])
def test_large_arrays_in_each_new_graph_are_constants(number, named):
    facts = retraced(40, [1, 9, 17, 25, 33])
    facts.baked = Converted(number * 60 * MIB, 60 * MIB, "t.py:4")
    assert kinds(finished(facts)) == named


@pytest.mark.parametrize(("operation", "instead"), [("OneHot", "labels as integers"), ("Mul", "work in pieces")])
def test_what_stands_in_place_of_one_large_output_is_told(operation, instead):
    result = died(Facts(censuses=[Census(0, 0)]), peak=MIB, wanted=300 * MIB, dumps=[MIB])
    result.operation = operation
    assert instead in diagnose(result).suspects[0].change


def test_slots_that_come_with_the_first_step_are_no_growth():
    steps = [Step("f", Kind.FUNCTION, count=9, levels=[(n, (60 if n > 1 else 20) * MIB) for n in range(1, 10)])]
    steps[0].levels[1:3] = [(2, 20 * MIB), (3, 20 * MIB)]
    held = [Census(n, 0, held=(60 if n > 1 else 20) * MIB) for n in (1, 2, 4, 8)]
    assert "No suspect: it finished" in no_suspect(finished(Facts(steps=steps, censuses=held)))[1]
    unheld = [Census(n, 0, held=20 * MIB) for n in (1, 2, 4, 8)]
    assert "nothing that was counted explains" in no_suspect(finished(Facts(steps=steps, censuses=unheld)))[1]


def test_variables_of_eight_bytes_a_number_are_told():
    facts = one(weights=60, slots=120, float64=180)
    (suspect,) = diagnose(died(facts, peak=190 * MIB, wanted=MIB)).suspects
    assert (
        "180.0 MiB of the variables are float64" in str(suspect.evidence)
        and "let the model be float32" in suspect.change
    )


@pytest.mark.parametrize(("number", "first"), [(8, "models kept alive"), (2, "optimizer state")])
def test_of_many_models_the_slots_are_their_fault(number, first):
    facts = one(weights=60, slots=120)
    facts.censuses[-1] = Census(
        2, 0, weights=60 * MIB, slots=120 * MIB, models=[Model("Sequential", 60 * MIB // number)] * number
    )
    assert kinds(died(facts, peak=190 * MIB, wanted=MIB))[0] == first


@pytest.mark.parametrize("end", [finished, died])
def test_garbage_that_nobody_collects_grows_in_any_run(end):
    rows = censuses(tensors=[1, 2, 4, 8, 16, 32])[:-1] + [Census(64, 0, garbage=60 * MIB)]
    facts = Facts(steps=[TRAIN], censuses=rows, uncollected=True, failed=IN_STEP)
    facts.cycles = Holder("Step", 60, 0, "t.py:4")
    suspect = diagnose(end(facts)).suspects[0 if end is finished else -1]
    assert (suspect.kind, suspect.place) == ("garbage that waits for the collector", "t.py:4")
    assert diagnose(end(facts)).parts.garbage == 60 * MIB and not diagnose(end(facts)).parts.kept
    assert "gc.disable()" in suspect.evidence[0] and "60 objects of Step" in suspect.evidence[0]
    facts.censuses[-1] = Census(64, 0, tensors=64 * MIB)  # what is held is not garbage
    assert kinds(finished(facts)) == ["retained tensors"]


def test_a_model_that_stays_in_spite_of_clear_session_is_told_what_helps():
    facts = Facts(steps=[TRAIN], censuses=models([8, 8, 16, 24, 32, 40]), made={"model": "t.py:8"})
    facts.made["clear_session"] = "t.py:7"
    (suspect,) = diagnose(finished(facts)).suspects
    assert "clear_session() was called (t.py:7)" in evidence(finished(facts))
    facts.censuses = models([2, 2, 4, 6, 8, 9], alive=4, size=8)  # as much as the variables that are alive have
    (alive,) = diagnose(finished(facts)).suspects
    assert "history.history" in alive.change and "set_weights()" not in alive.change
    facts.functions = [Function("multi_step_on_iterator", "t.py:9", False, True, instances=4, tapes=1)]
    assert "set_weights()" in diagnose(finished(facts)).suspects[0].change and "set_weights()" in suspect.change


@pytest.mark.parametrize(("step", "buffers", "told"), [(1, 0, True), (0.01, 0, False), (1, 60, False)])
def test_a_level_that_rises_is_not_called_good_news(step, buffers, told):
    facts = Facts(steps=[many(60, step)], censuses=[Census(1, 0, buffers=buffers * MIB)])
    assert ("rose by" in no_suspect(finished(facts))[1]) == told


@pytest.mark.parametrize(("held", "told"), [(40, True), (2, False)])
def test_variables_that_rose_are_told(held, told):
    rows = [Census(1, 0), Census(2, 0, held=MIB), Census(64, 0, held=held * MIB)]
    said = no_suspect(finished(Facts(steps=[many(60, 1)], censuses=rows)))[1]
    assert ("variables rose by 39.0 MiB" in said) == told and ("nothing that was counted" in said) != told


@pytest.mark.parametrize(
    "sizes",
    [
        [1, 2, 4, 8, 8, 8, 8, 8],  # a buffer that fills
        [1, 9, 3, 9, 2, 9, 3, 8],  # batches of many sizes
        [1, 1, 1.2, 1.4, 1.6, 1.8],  # a history of numbers
        [1, 2],  # too short to tell
    ],
    ids=["stops", "comes and goes", "small", "short"],
)
def test_what_stops_growing_is_not_retained(sizes):
    assert kinds(finished(Facts(steps=[TRAIN], censuses=censuses(tensors=sizes)))) == []


@pytest.mark.parametrize(("last", "named"), [(25, []), (30, ["retained tensors"])])
def test_two_early_rises_are_no_growth(last, named):
    """The arrays of fit(), behind a loop of the script's own, then those of its first evaluation."""
    sizes = {1: 0, 2: 0, 16: 0, 30: 0, 31: 20, 32: 20, 64: 20, 69: 25, 128: 25, 256: last, 300: 0}
    facts = Facts(steps=[TRAIN], censuses=[Census(step, 0, tensors=size * MIB) for step, size in sizes.items()])
    assert kinds(finished(facts)) == named


@pytest.mark.parametrize(
    ("stage", "cache", "change"), [("Shuffle", False, "give shuffle()"), ("MemoryCacheImpl", True, "cache() keeps")]
)
def test_what_to_change_is_said_of_the_stage_that_buffers_most(stage, cache, change):
    facts = Facts(steps=[TRAIN], censuses=[Census(1, 0)], buffers=[Buffer(180 * MIB, stage, 9, cache)], failed=IN_STEP)
    (suspect,) = diagnose(died(facts)).suspects
    assert suspect.change.startswith(change)


def test_iterators_that_are_kept_hold_buffers():
    more = {"buffers": [2, 2, 4, 8, 16, 32], "iterators": [1, 1, 2, 4, 8, 16]}
    facts = Facts(steps=[TRAIN], censuses=censuses(**more), buffers=[Buffer(2 * MIB, "Shuffle", 100)])
    assert kinds(finished(facts)) == ["buffer"]
    assert "16 iterators" in evidence(finished(facts)) and "Shuffle, 100 elements: 2.0 MiB" in evidence(finished(facts))
    facts.censuses = censuses(buffers=[2, 2, 4, 8, 16, 32], iterators=[1] * 6)  # one iterator, whose buffer fills
    assert kinds(finished(facts)) == []


def test_one_model_whose_variables_rise_has_old_optimizers():
    met = lambda number: [msgspec.structs.replace(c, models_met=number) for c in models([8, 8, 16, 24, 32, 40])]
    assert kinds(finished(Facts(steps=[TRAIN], censuses=met(1)))) == ["old optimizers"]
    assert kinds(finished(Facts(steps=[TRAIN], censuses=met(5)))) == ["models kept alive"]


def test_old_optimizers_that_a_name_holds_are_no_work_of_compile():
    rows = models([8, 8, 16, 24, 32, 40])
    held = [Holder("trainers", 0, census.held, "t.py:25") for census in rows]
    rows = [msgspec.structs.replace(c, models_met=1, model_holders=[one]) for c, one in zip(rows, held)]
    (suspect,) = diagnose(finished(Facts(steps=[TRAIN], censuses=rows))).suspects
    assert (suspect.kind, suspect.place) == ("old optimizers", "t.py:25")
    assert not any("compile()" in sentence for sentence in suspect.evidence)


@pytest.mark.parametrize(("kept", "first"), [(110, "retained tensors"), (60, "batch-bound activations")])
def test_what_grows_stands_before_what_it_makes_nearly_as_large(kept, first):
    taken = censuses(tensors=[2, 2, kept // 8, kept // 4, kept // 2, kept])
    facts = Facts(steps=[TRAIN], censuses=taken, failed=IN_STEP)
    assert kinds(died(facts, peak=240 * MIB))[0] == first


def test_a_cache_grows_without_end_only_behind_repeat():
    growing = censuses(buffers=[2, 2, 4, 8, 16, 32], iterators=[1] * 6)
    cache = lambda endless: [Buffer(32 * MIB, "Cache", 16, True, endless)]
    assert kinds(finished(Facts(steps=[TRAIN], censuses=growing, buffers=cache(True)))) == ["cache behind repeat()"]
    assert kinds(finished(Facts(steps=[TRAIN], censuses=growing, buffers=cache(False)))) == []


# --- what lies in no tensor


@pytest.mark.parametrize(
    ("process", "named"),
    [
        ([5, 10, 20, 40, 80, 160], True),
        ([5, 90, 170, 200, 210, 215], False),  # being set up
        ([5, 10, 15, 20, 25, 30], False),  # little
        ([5, 10, 20, 40, 140, 150], False),  # once
    ],
    ids=["with the steps", "set up", "little", "once"],
)
def test_growth_of_the_process_alone(process, named):
    facts = Facts(steps=[TRAIN], censuses=censuses(process=process, peak=[0] * 6, containers=[[]] * 6))
    pool = Facts(steps=[TRAIN], censuses=censuses(process=process, peak=process, containers=[[]] * 6))
    assert kinds(finished(pool)) == []
    expected = ["growth outside TensorFlow"] * named
    assert kinds(finished(facts)) == expected
    facts.functions = [Function("step", "t.py:3", True, compiled=True)]
    assert kinds(finished(facts)) == ["programs that XLA keeps"] * named
    facts.functions, filled = [], [Holder("log", 40, 0, "t.py:8")]
    facts.censuses = [
        msgspec.structs.replace(census, containers=filled * (census.step == 32)) for census in facts.censuses
    ]
    assert [suspect.place for suspect in diagnose(finished(facts)).suspects] == ["t.py:8"] * named


@pytest.mark.parametrize(
    ("shapes", "at", "named"), [(40, range(1, 41), True), (3, (1, 2, 39), False), (8, range(1, 9), False)]
)
def test_programs_are_told_by_their_number(shapes, at, named):
    """Few shapes, or all of them at the start, are no programs that go on coming."""
    facts = Facts(steps=[TRAIN], censuses=censuses(process=[5, 8, 12, 20, 36, 68], peak=[0] * 6))
    facts.functions = [Function("step", "t.py:3", True, calls=40, compiled=True, shapes=shapes, shaped_at=list(at))]
    facts.censuses = [msgspec.structs.replace(row, process=row.process and row.process // 2) for row in facts.censuses]
    assert kinds(finished(facts)) == ["programs that XLA keeps"] * named
    assert ("for 40 different shapes" in evidence(finished(facts))) == named


def test_traces_for_shapes_are_told_as_such():
    facts = retraced(20, list(range(1, 21)), shapes=20, shaped_at=list(range(1, 21)))
    (suspect,) = diagnose(finished(facts)).suspects
    assert "20 different shapes" in evidence(finished(facts)) and "reduce_retracing" in suspect.change


def test_what_is_made_is_told_by_its_line():
    facts = one(weights=20, slots=200)
    facts.made = {"optimizer": "t.py:5", "model": "t.py:4"}
    assert [suspect.place for suspect in diagnose(died(facts)).suspects] == ["t.py:5"]


def test_a_saving_is_told_where_the_figures_have_it():
    facts = Facts(steps=[TRAIN], censuses=censuses(tensors=[1, 2, 4, 8, 16, 32]))
    assert "about 30.0 MiB less" in diagnose(finished(facts)).suspects[0].change
    (suspect,) = diagnose(died(one(weights=20))).suspects  # of a step that died nobody knows what it needs
    assert "halve the batch until it fits" in suspect.change and "to expect" not in suspect.change


def test_children_are_told_by_what_is_theirs_alone():
    result = finished(None)
    result.outside, result.family = 400 * MIB, Family(2.0, 4, 380 * MIB, 96 * MIB)
    assert kinds(result) == ["copies in child processes"]
    assert "4 child processes held 380.0 MiB" in evidence(result) and "up to 96.0 MiB each" in evidence(result)
    result.family = Family(2.0, 4, 120 * MIB, 30 * MIB)  # the cost of a fork
    assert kinds(result) == []


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (Offspring(4, 92 * MIB, 24 * MIB, late=0.33), True),
        (Offspring(4, 92 * MIB, 24 * MIB, late=0.05), False),  # room for their work
        (Offspring(1, 92 * MIB, 92 * MIB, late=0.33), False),  # no copy of anything
        (Offspring(4, 8 * MIB, 2 * MIB, late=0.33), False),
    ],
)
def test_children_that_make_more_and_more_are_told(made, named):
    result = finished(None)
    result.offspring = made
    assert (kinds(result) == ["copies in child processes"]) == named


@pytest.mark.parametrize(("line", "named"), [("model.save(path)", True), ("x = np.ones(n)", False)])
def test_running_out_in_the_line_that_saves_is_told(line, named):
    result = died(Facts(steps=[TRAIN], censuses=[Census(1, 0)]), Cause.MEMORY, wanted=None, process=[(1.0, 9 * MIB)])
    result.error.frames = [Line("t.py", 26, line)]
    assert (kinds(result) == ["copy on the host while saving"]) == named


def test_a_budget_below_the_model_is_told_while_it_is_built():
    facts = Facts(censuses=[Census(0, 0, weights=200 * MIB)])
    assert kinds(died(facts, wanted=60 * MIB)) == ["weights"]
    assert "larger than the budget" in evidence(died(facts, wanted=60 * MIB))
    facts = Facts(censuses=[Census(0, 0, weights=8 * MIB, models=[Model("Sequential", 8 * MIB)])])
    answering = died(facts, peak=30 * MIB, wanted=26 * MIB)  # a finished model that is only asked
    answering.operation = "MatMul"
    assert kinds(answering) == ["batch-bound activations"]


def test_a_variable_that_would_fit_is_told_apart_from_a_model_that_does_not():
    def found(made, wanted):
        facts = Facts(censuses=[Census(0, 0, weights=made * MIB, tensors=140 * MIB)])
        result = died(facts, wanted=wanted * MIB)
        result.operation = "AddV2"
        result.error.frames, facts.made = [Line("t.py", 12, "Embedding(300000, 64)")], {"model": "t.py:12"}
        return diagnose(result)

    assert "exist at once" in found(0, 73).suspects[0].evidence[-1]
    assert "larger than the budget" in found(200, 73).suspects[0].evidence[-1]
    assert not found(0, 73).parts.data


@pytest.mark.parametrize(("arrays", "kind"), [(60, "batch-bound activations"), (0, "weights")])
def test_a_crash_beside_data_is_not_of_a_model_that_is_made(arrays, kind):
    census = Census(0, 0, weights=MIB, arrays=arrays * MIB, models=[Model("Sequential", MIB)])
    result = died(Facts(censuses=[census]), Cause.CRASH_OUT, peak=None, dumps=[250 * MIB])
    result.error.message = "its process died of SIGSEGV"
    assert kinds(result) == [kind]


@pytest.mark.parametrize(("asked", "kind"), [(MIB / 4, "buffer"), (20 * MIB, "batch-bound activations")])
def test_what_asks_for_part_of_an_element_still_fills_the_buffer(asked, kind):
    facts = Facts(steps=[Step("f", Kind.FUNCTION, count=1)], censuses=[Census(1, 0)], open=IN_STEP)
    facts.buffers = [Buffer(90 * MIB, "Shuffle", 180)]
    assert kinds(died(facts, Cause.CRASH_OUT, wanted=asked))[0] == kind


@pytest.mark.parametrize("in_use", [1, 150])
def test_the_first_value_of_a_variable_is_no_data(in_use):
    made = [Census(0, 0, tensors=in_use * MIB)]
    result = died(Facts(censuses=made), peak=in_use * MIB, wanted=300 * MIB, dumps=[in_use * MIB])
    assert kinds(result) != ["weights"]
    result.error.traceback = 'File "/env/keras/src/backend/tensorflow/random.py", line 34, in uniform'
    assert kinds(result) == ["weights"]
    result.error.traceback = ""  # as Keras' own filter leaves it: then the line that makes the model tells
    result.error.frames, result.facts.made = [Line("t.py", 12, "keras.Sequential(")], {"model": "t.py:12"}
    assert kinds(result) == ["weights"]


def test_what_a_model_of_the_scripts_own_computes_is_told_by_the_line_that_calls_it():
    facts = Facts(steps=[TRAIN], censuses=[Census(1, 0)], failed=IN_STEP)
    facts.failing = Failing(wanted=[64, 6000, 32], given=[[64, 6000], [64]])
    result = died(facts)
    result.error.frames = [
        Line("t.py", 29, "loss = loss_of(model(texts))", "train"),
        Line("t.py", 12, "return self.dense(x)", "call"),
    ]
    (suspect,) = diagnose(result).suspects
    assert suspect.place == "t.py:29"
    assert "t.py:12" in evidence(result) and "given [64, 6000], [64]" in evidence(result)


@pytest.mark.parametrize(("size", "named"), [(73, ["constants in graphs"]), (2, [])])
def test_a_table_in_a_graph_is_told_where_there_was_room_for_it(size, named):
    facts = Facts(steps=[TRAIN], censuses=[Census(1, 0), Census(64, 0)])
    facts.baked = Converted(2 * size * MIB, size * MIB, "t.py:15")
    assert kinds(finished(facts)) == named


@pytest.mark.parametrize(("steps", "kind"), [(1, "batch-bound activations"), (64, "fragmentation")])
def test_pieces_that_a_first_step_leaves_are_not_why_its_batch_found_no_room(steps, kind):
    facts = Facts(steps=[Step(TRAIN.name, TRAIN.kind, count=steps)], censuses=[Census(1, 0)], failed=IN_STEP)
    assert kinds(died(facts, peak=200 * MIB, wanted=40 * MIB, dumps=[180 * MIB])) == [kind]


def test_a_request_of_a_tables_size_is_not_the_batchs():
    table = Census(2, 0, weights=50 * MIB, largest=48 * MIB)
    facts = Facts(steps=[TRAIN], censuses=[Census(1, 0), table], failed=IN_STEP)
    assert kinds(died(facts, peak=150 * MIB, wanted=48 * MIB)) == ["work on a whole table"]
    assert kinds(died(facts, peak=150 * MIB, wanted=20 * MIB)) == ["batch-bound activations"]
    assert kinds(died(facts, peak=500 * MIB, wanted=48 * MIB)) == ["batch-bound activations"]  # by chance


def test_a_tape_that_stays_open_over_many_batches_retains():
    facts = one(weights=5)
    facts.failed, facts.in_tape = Interval("GradientTape (t.py:18)", Kind.TAPE, 10 * MIB, 250 * MIB, "t.py:18"), 30
    (suspect,) = diagnose(died(facts)).suspects
    assert (suspect.kind, suspect.place) == ("retained tensors", "t.py:18")


def test_one_operation_beside_a_step_that_asks_for_much_is_not_the_batch():
    evaluated = Facts(steps=[TRAIN], censuses=[Census(1, 0), Census(2, 0, weights=MIB)])
    assert kinds(died(evaluated, peak=2 * MIB, wanted=300 * MIB, dumps=[2 * MIB])) == ["one operation's large output"]
    in_a_layer = died(evaluated, peak=2 * MIB, wanted=300 * MIB, dumps=[2 * MIB])
    in_a_layer.error.traceback = 'File "/env/keras/src/layers/convolutional/base_conv.py", line 9, in call'
    assert kinds(in_a_layer) == ["batch-bound activations"]
    evaluated.failed = IN_STEP
    assert kinds(died(evaluated, peak=2 * MIB, wanted=300 * MIB, dumps=[2 * MIB])) == ["batch-bound activations"]


@pytest.mark.parametrize("pieces", [60, 0])
def test_pieces_that_are_joined_beside_any_step_are_told_with_what_keeps_them(pieces):
    rows = [1, 2, 8, 16, 32, pieces] if pieces else [0] * 6
    facts = Facts(steps=[TRAIN], censuses=[msgspec.structs.replace(c, weights=MIB) for c in censuses(tensors=rows)])
    result = died(facts, peak=70 * MIB, wanted=64 * MIB, dumps=[200 * MIB])
    result.operation = "ConcatV2"
    assert kinds(result) == ["retained tensors" if pieces else "one operation's large output"]
    assert "ConcatV2 joined pieces into one" in evidence(result)
    result.error.traceback = 'File "/env/keras/src/layers/merging/concatenate.py", line 9, in call'
    assert "batch-bound activations" in kinds(result)


# --- what is large

LARGE = {
    "input copy": one(tensors=150, tensor_holders=[], weights=5),
    "buffer": Facts(steps=[TRAIN], censuses=[Census(1, 0)], buffers=[Buffer(180 * MIB, "Shuffle", 9)], failed=IN_STEP),
    "batch-bound activations": one(weights=5, slots=10),
    "optimizer state": one(weights=60, slots=120),
    "models kept alive": one(models=[], weights=60),
    "replicas": one(weights=80, other_variables=80, replicas=80),
}
LARGE |= {
    "weights": one(weights=150, slots=40),
    "constants in graphs": one(weights=5),
    "garbage that waits for the collector": one(weights=5, garbage=180),
    "one operation's large output": Facts(censuses=[Census(0, 0)]),
}
LARGE["constants in graphs"].baked = Converted(300 * MIB, 12 * MIB, "t.py:7")
LARGE["input copy"].censuses[0] = Census(1, 0, tensors=200 * MIB, tensor_holders=[Holder("images", 1, 200 * MIB)])
LARGE["models kept alive"].censuses[1] = Census(2, 0, weights=180 * MIB, models=[Model("Sequential", 60 * MIB)] * 3)


@pytest.mark.parametrize("kind", LARGE)
def test_the_largest_part_is_named_in_a_death_and_in_no_other_run(kind):
    asked = {"wanted": 600 * MIB, "dumps": [3 * MIB]} if kind == "one operation's large output" else {}
    assert kinds(died(LARGE[kind], **asked))[:1] == [kind]
    assert evidence(died(LARGE[kind], **asked))
    assert kinds(finished(LARGE[kind])) == []


def test_others_nearly_as_large_are_told_and_smaller_ones_are_not():
    assert kinds(died(one(weights=20, slots=100))) == ["batch-bound activations", "optimizer state"]
    assert kinds(died(one(weights=20, slots=60))) == ["batch-bound activations"]


@pytest.mark.parametrize(("place", "told"), [("t.py:7", "in t.py:7"), ("", "in a library")])
def test_the_line_of_a_constant_is_told(place, told):
    facts = one(weights=5)
    facts.baked = Converted(300 * MIB, 60 * MIB, place)
    suspect = diagnose(died(facts)).suspects[0]
    assert suspect.place == place and told in evidence(died(facts))


def test_evaluation_that_ran_out_and_an_optimizer_that_is_light_are_told_what_helps_them():
    facts = one(weights=5)
    facts.failed = Interval("evaluate(), tf.function f (called at t.py:5)", Kind.EVALUATION, 10 * MIB, 250 * MIB)
    (suspect,) = diagnose(died(facts)).suspects
    assert suspect.kind == "batch-bound activations" and "validation_batch_size" in suspect.change
    for slots, lighter in ((0.1, False), (200, True)):
        result = died(one(weights=100, slots=slots))
        result.operation = "sgd/Sub"
        assert ("fewer slots" in diagnose(result).suspects[0].change) == lighter


@pytest.mark.parametrize(
    ("during", "line", "change"),
    [
        (None, "p = model.predict(x, batch_size=60000)", "halve the batch of predict()"),
        (None, "logits = model(x)", "halve the rows that are given at once"),
        (IN_STEP, "p = model.predict_on_batch(x)", "halve the batch of predict()"),
        (IN_STEP, "model.fit(x, y)", "let the recomputation run"),
    ],
)
def test_where_no_gradient_is_taken_nothing_is_said_of_gradients(during, line, change):
    facts = one(weights=5)
    facts.failed, facts.made = during, {"optimizer": "", "recomputation": "t.py:4"}
    result = died(facts)
    result.error.frames = [Line("t.py", 7, line)]
    (suspect,) = diagnose(result).suspects
    assert suspect.kind == "batch-bound activations" and change in suspect.change
    assert ("nothing recomputes" in evidence(result)) == ("fit" in line)


@pytest.mark.parametrize("times", [0, 3])
def test_recomputation_that_was_asked_for_and_never_ran_is_told(times):
    facts = one(weights=5)
    facts.made, facts.recomputed = {"recomputation": "t.py:4"}, times
    assert ("asked for at t.py:4, and nothing recomputes" in evidence(died(facts))) == (not times)


def test_names_of_layers_that_no_layer_has_are_told():
    facts = one(weights=5)
    facts.made, facts.recomputed = {"recomputation": "t.py:4", "not layers": "block_0, block_1"}, 0
    assert "no layer called in it has: block_0, block_1" in evidence(died(facts))
    assert "nothing recomputes" not in evidence(died(facts))
    facts.made["not layers"] = ""
    assert "no layer called in it has" not in evidence(died(facts))


@pytest.mark.parametrize(("segments", "told"), [(1, True), (6, False)])
def test_recomputation_in_one_piece_is_told(segments, told):
    facts = one(weights=5)
    facts.made, facts.recomputed, facts.segments = {"recomputation": "t.py:4"}, segments, segments
    assert ("one single piece" in evidence(died(facts))) == told
    change = diagnose(died(facts)).suspects[0].change
    assert ("in several pieces" in change) == told


@pytest.mark.parametrize(
    ("failing", "told"),
    [
        (Failing(uses=40, loop="t.py:9"), True),
        (Failing(uses=3, loop="t.py:9"), False),  # triplets
        (Failing(uses=40), False),  # layers that share weights
    ],
)
@pytest.mark.parametrize(
    ("kind", "place", "change"), [(Kind.TAPE, "t.py:8", "open a tape"), (Kind.FUNCTION, "t.py:6", "call")]
)
def test_passes_that_one_tape_keeps_are_told_by_its_line(failing, told, kind, place, change):
    facts = one(weights=5)
    facts.failing, facts.failed = failing, Interval("f", kind, 10 * MIB, 250 * MIB, place)
    (suspect,) = diagnose(died(facts)).suspects
    assert (suspect.kind == "retained tensors") == told == (f"some {failing.uses} times" in evidence(died(facts)))
    assert not told or (suspect.place == place and suspect.change.startswith(change))


@pytest.mark.parametrize(
    ("wanted", "given", "weights", "pairs"),
    [
        ([512, 512, 64], [[512, 64], [512]], [[64, 64]], "stand twice"),
        ([512, 512, 512], [[512, 64], [512]], [[64, 64]], "stand three times"),
        ([512, 512, 64], [[512, 64]], [[64, 512]], ""),  # units
        ([64, 64, 64, 3], [[64, 64, 64, 3]], [], ""),  # images as wide as there are of them
        ([16, 16, 900, 900], [[16, 900]], [], ""),  # heads
        ([512, 128, 64], [[512, 128]], [], ""),
        ([512, 512, 64], [], [], ""),  # nothing known
    ],
    ids=["pairs", "triplets", "units", "sides", "heads", "rows", "unknown"],
)
def test_rows_that_stand_twice_are_pairs(wanted, given, weights, pairs):
    facts = one(weights=5)
    facts.failing = Failing(wanted=wanted, given=given, weights=weights, made_at="t.py:6")
    result = died(facts, wanted=60 * MIB)
    (suspect,) = diagnose(result).suspects
    assert suspect.kind == ("one operation's large output" if pairs else "batch-bound activations")
    told = "the 512 rows of the batch stand" in evidence(result)
    assert (suspect.place == "t.py:6") == told == bool(pairs) and pairs in evidence(result)
    assert ("an eighth" in suspect.change) == (pairs == "stand three times")


@pytest.mark.parametrize(
    ("wanted", "given", "weights", "told"),
    [
        ([8, 4, 900, 900], [[8, 900, 12]], [[12, 32]], True),
        ([8, 900, 900], [[8, 900, 12]], [[900, 900]], False),  # units
        ([64, 128, 128, 32], [[64, 128, 128, 3]], [], False),  # sides of images
        ([64, 64, 64, 96], [[64, 128, 128, 3]], [], False),
        ([8, 4, 900, 900], [], [], False),  # nothing known
    ],
    ids=["scores", "units", "sides", "smaller sides", "unknown"],
)
def test_a_length_that_stands_twice_is_told(wanted, given, weights, told):
    facts = one(weights=5)
    facts.failing = Failing(wanted=wanted, given=given, weights=weights)
    result = died(facts, wanted=60 * MIB)
    (suspect,) = diagnose(result).suspects
    assert told == ("its 900 stands in it twice" in evidence(result)) == suspect.change.startswith("shorten")


@pytest.mark.parametrize(("tapes", "told"), [(0, True), (1, False)])
def test_a_function_without_a_tape_is_no_training(tapes, told):
    train, other = (
        Function("train", "t.py:9", True, traces=1, tapes=1),
        Function("f", "t.py:20", True, traces=1, tapes=tapes),
    )
    facts = one(weights=5)
    facts.functions, facts.failed = [train, other], Interval("f", Kind.FUNCTION, 10 * MIB, 250 * MIB, "t.py:20")
    (suspect,) = diagnose(died(facts)).suspects
    assert ("fewer rows at once" in suspect.change) == told != ("gradient_accumulation_steps" in suspect.change)
    facts.functions = [other]  # no tape anywhere: gradients may be taken in another way
    assert "fewer rows at once" not in diagnose(died(facts)).suspects[0].change


@pytest.mark.parametrize("line", ["", "t.py:5"])
def test_only_an_optimizer_of_keras_accumulates_gradients(line):
    facts = one(weights=5)
    facts.made = {"optimizer": line}
    assert ("gradient_accumulation_steps" in diagnose(died(facts)).suspects[0].change) == bool(line)


def test_what_is_in_use_in_an_update_is_the_optimizers():
    result = died(one(weights=30, slots=60))
    assert kinds(result) == ["batch-bound activations"]
    result.operation = "adam/AssignAddVariableOp_1"
    assert kinds(result) == ["optimizer state"]
    result.operation = "functional_1/adamson_1/Relu"
    assert kinds(result) == ["batch-bound activations"]


def test_what_grows_is_told_with_what_is_large():
    facts = Facts(steps=[TRAIN], censuses=censuses(tensors=[1, 10, 20, 40, 80, 170]), failed=IN_STEP)
    assert kinds(died(facts)) == ["retained tensors", "batch-bound activations"]


def test_every_kind_has_a_rule_and_a_test():
    assert CHANGES.keys() == LABS.keys()
    grown = {"retracing", "models kept alive", "old optimizers", "retained tensors", "buffer"}
    grown |= {"cache behind repeat()", "growth outside TensorFlow", "programs that XLA keeps"}
    beside = {"copies in child processes", "copy on the host while saving"}
    assert grown | beside | LARGE.keys() | {"fragmentation", "data converted whole", "work on a whole table"} == set(
        LABS
    )


def test_room_in_pieces_is_fragmentation_and_a_full_budget_is_not():
    facts = one(weights=20)
    assert kinds(died(facts, wanted=50 * MIB, dumps=[150 * MIB])) == ["fragmentation"]
    assert kinds(died(facts, wanted=50 * MIB, dumps=[220 * MIB])) == ["batch-bound activations"]  # no room
    assert kinds(died(facts, wanted=20 * MIB, dumps=[230 * MIB])) == [
        "batch-bound activations"
    ]  # the rest of any full budget
    assert kinds(died(facts, wanted=50 * MIB, dumps=[230 * MIB, 150 * MIB])) == [
        "batch-bound activations"
    ]  # two failed at once
    replicated = died(one(other_variables=140, replicas=70), peak=150 * MIB, wanted=30 * MIB, dumps=[150 * MIB])
    assert kinds(replicated) == ["replicas"]  # the room is that of two devices


def test_an_interval_tells_what_memory_ran_out_for():
    in_batch = Interval("a batch", Kind.BATCH, 10 * MIB, 250 * MIB)
    assert kinds(died(Facts(steps=[TRAIN], censuses=[Census(1, 0)], failed=in_batch))) == ["buffer"]
    for number, kind in ((1, "batch-bound activations"), (2, "buffer")):
        element = [Buffer(number * 30 * MIB, "ParallelMapV2", number)]
        facts = Facts(steps=[TRAIN], censuses=[Census(1, 0)], failed=in_batch, buffers=element)
        assert kinds(died(facts, wanted=30 * MIB)) == [kind]
    assert kinds(died(Facts(steps=[TRAIN], censuses=[Census(1, 0)], failed=IN_STEP))) == ["batch-bound activations"]
    assert kinds(died(Facts(censuses=[Census(0, 0)]))) == ["input copy"]  # before any step: pieces of a data set
    facts = Facts(steps=[TRAIN], censuses=[Census(1, 0, weights=MIB)], open=Interval(TRAIN.name, TRAIN.kind, 0))
    assert "which began with 0.0 MiB in use, the process died" in evidence(died(facts, Cause.CRASH_OUT, peak=None))
    assert "memory rose from 10.0 MiB to 250.0 MiB" in evidence(died(one()))


def test_outside_the_allocator_only_arrays_are_suspected():
    facts = Facts(steps=[TRAIN], censuses=[Census(1, 0, arrays=900 * MIB, array_holders=[Holder("x", 1, 900 * MIB)])])
    process = [(1.0, 2000 * MIB)]
    assert kinds(died(facts, Cause.MEMORY, wanted=None, process=process)) == ["input copy"]
    assert "x holds 1 tensor or array, 900.0 MiB" in evidence(died(facts, Cause.MEMORY, wanted=None, process=process))
    few = Facts(steps=[TRAIN], censuses=[Census(1, 0, arrays=90 * MIB)])
    assert kinds(died(few, Cause.MEMORY, wanted=None, process=process)) == []  # Python objects, perhaps


def test_an_array_that_numpy_found_no_room_for_before_the_first_step_is_a_copy_of_the_data():
    def out_of_room(facts):
        result = died(facts, Cause.MEMORY, peak=0, wanted=None, process=[(1.0, 2 * MIB)])
        result.error.message = "(Unable to allocate 128. MiB for an array with shape (8192, 4096)): the process may …"
        result.error.frames = [Line("t.py", 7, 'model.fit(file["x"])')]
        return result

    before = out_of_room(Facts(censuses=[Census(0, 0)]))
    assert kinds(before) == ["input copy"] and "one array of all data at t.py:7" in evidence(before)
    assert diagnose(before).suspects[0].size == 128 * MIB
    assert kinds(out_of_room(one())) == []  # results that were collected, perhaps


@pytest.mark.parametrize(("grown", "named"), [(130, ["buffer"]), (20, [])])
def test_batches_that_workers_read_ahead(grown, named):
    """One large array in a generator is no queue of batches."""
    result = died(one(), Cause.MEMORY, peak=0, wanted=None, process=[(1.0, grown * MIB)])
    result.error.message = (
        "node PyFunc: Unable to allocate 16.0 MiB for an array with shape (1024, 4096) and data type float32"
    )
    assert kinds(result) == named
    result.error.message = result.error.message.removeprefix("node PyFunc: ")
    assert "buffer" not in kinds(result)


@pytest.mark.parametrize(("held", "named"), [(2, ["data converted whole"]), (300, ["input copy"])])
def test_an_array_much_larger_than_all_data_is_a_conversion(held, named):
    """And one as large as they are is a copy."""
    facts = Facts(censuses=[Census(0, 0, arrays=held * MIB)])
    result = died(facts, Cause.MEMORY, peak=0, wanted=None, process=[(1.0, 9 * MIB)])
    shape = "an array with shape (23832, 168, 8) and data type float64"
    result.error.message = f"Out of memory outside TensorFlow's allocator (Unable to allocate 244. MiB for {shape})"
    assert kinds(result) == named
    if held == 2:
        assert "one array of 244.0 MiB, float64 of the shape (23832, 168, 8)" in evidence(result)


def test_a_crash_while_an_array_is_copied_is_a_copy():
    facts = Facts(censuses=[Census(0, 0)], converted=Converted(200 * MIB, 200 * MIB, "t.py:4", now=200 * MIB))
    assert kinds(died(facts, Cause.CRASH_OUT, peak=None, wanted=None, dumps=[120 * MIB])) == ["input copy"]
    assert "200.0 MiB was copied into a tensor at t.py:4" in evidence(
        died(facts, Cause.CRASH_OUT, peak=None, wanted=None)
    )


@pytest.mark.parametrize("cause", Cause)
def test_only_a_cause_of_memory_is_a_death_by_memory(cause):
    """A crash after running out is one; a signal from somebody, an exit or another crash is none."""
    of_memory = {Cause.OOM, Cause.MEMORY, Cause.CRASH_OUT, Cause.SYSTEM, Cause.WATCH}
    facts = Facts(steps=[TRAIN], censuses=[Census(1, 0, tensors=200 * MIB)], failed=IN_STEP)
    assert bool(kinds(died(facts, cause))) == (cause in of_memory)


def test_nothing_is_said_of_what_was_not_seen():
    for facts in (None, Facts()):
        diagnosis = diagnose(died(facts, Cause.KILLED, peak=None, wanted=None))
        assert (diagnosis.suspects, diagnosis.parts, diagnosis.growth) == ([], Parts(), [])


# --- figures


def test_parts_never_add_up_to_more_than_the_peak_and_what_was_wanted():
    chance = random.Random(0)
    some = lambda: chance.choice([0, 0, chance.randrange(300)]) * MIB
    for _ in range(300):
        names = ("weights", "slots", "other_variables", "held", "replicas", "tensors", "arrays", "buffers")
        taken = [Census(step, some(), **{name: some() for name in names}) for step in (0, 1, 2, 4)]
        facts = Facts(censuses=taken, buffers=[Buffer(some(), "Shuffle", 1)], converted=Converted(now=some()))
        peak, wanted = chance.choice([None, some()]), chance.choice([None, some()])
        result = died(facts, peak=peak, wanted=wanted, dumps=[some()])
        result.tensors = [(1.0, some())]
        parts = parts_of_peak(result, earlier_models=some(), kept=some())
        seen = [*result.dumps, *(census.level for census in taken), result.tensors[0][1]]
        highest = max(seen) if peak is None else peak
        assert min(astuple(parts)) >= 0
        assert sum(astuple(parts)) == highest + (wanted or facts.converted.now)
        assert sum(size for _, size in parts.rows()) == highest  # what found no room stands apart
        death = Death.of(result, parts)
        seen = parts.data + parts.buffers + parts.working + parts.wanted
        # What had been let go when memory ran out was not in use then.
        gone = 0 < result.dumps[0] < highest
        assert death.data + death.buffers + death.working <= seen
        assert gone or death.data + death.buffers + death.working == seen


def test_parts_are_told_largest_first_without_empty_ones():
    parts = parts_of_peak(died(one(weights=20, slots=40)), 0, 0)
    assert parts.rows() == [
        ("activations, gradients and intermediates", 190 * MIB),
        ("optimizer slots", 40 * MIB),
        ("weights", 20 * MIB),
    ]


def test_growth_is_told_by_step_and_by_pass():
    steady = Step("step", Kind.FUNCTION, count=300, levels=[(n, n * MIB) for n in range(1, 301)], rise=3 * MIB)
    facts = Facts(
        steps=[steady, Step("seldom", Kind.FUNCTION, count=2)], passes=[10 * MIB, 30 * MIB], number_of_passes=12
    )
    by_step, by_pass = growth(facts)
    assert "in use before a step 50.5 MiB in the first third, 250.5 MiB in the last, +1.000 MiB a step" in by_step
    assert "a step adds up to 3.0 MiB" in by_step
    assert "12; in use at the begin of the second 10.0 MiB, of the last 30.0 MiB, +2.000 MiB a pass" in by_pass
    assert growth(Facts(passes=[None, None], number_of_passes=5)) == []


def test_the_rules_need_no_tensorflow():
    code = "import sys, labsupport.doctor.rules; print(sorted({'tensorflow', 'numpy', 'matplotlib', 'rich'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
