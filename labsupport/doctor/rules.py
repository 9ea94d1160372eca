"""The doctor's rules: records of a run in, suspects out. Pure functions, which need no TensorFlow and no run.

Two ideas decide what is suspected, so that a healthy script gets no advice. What *grows* with steps is a suspect in
any run: the rules of growing.py. What is merely *large* is a suspect only in a run that died of memory: the rules of
dying.py, of which the largest suspect is told, and others nearly as large.

A new rule is a function that yields Suspects, its place in the list of one of the two, and a test in tests/test_rules.py.
Thresholds marked "by trial" part the troubled scripts of tests/cases and of the labs from the cured ones.
"""

import re
from dataclasses import dataclass, field, replace

from labsupport.doctor.dying import as_made, by_size
from labsupport.doctor.figures import Parts, growth, parts_of_peak
from labsupport.doctor.growing import GROWTH, grown_variables, outside, tensors_kept
from labsupport.doctor.suspects import Suspect, died_of_memory, place_of
from labsupport.ground.budget import MIB, mib
from labsupport.ground.record import Cause

# Of what a script may add outside: children that hold so much are told also where it was enough. Workers with nothing of
# their own but what a fork costs stay under half of it, by trial.
_MOST_OF_IT = 0.7
# Bytes that several children have made, and the share that they made in the last third of their lives: a third where each
# keeps what comes, next to nothing where each needs room for its work; by trial.
_CHILDREN_MADE, _STILL_LATE = 32 * MIB, 0.2
# Keras takes its own frames out of a traceback: the script's line is left.
_SAVING = re.compile(r"\.save\w*\(|\bsave_model\(")


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found in an ArmResult. growth: sentences."""

    result: object
    suspects: list = field(default_factory=list)
    parts: Parts = Parts()
    growth: list = field(default_factory=list)


def diagnose(result):
    """The Diagnosis of an arm that ran with probes. No suspects for a run that neither grew nor died of memory."""
    facts = result.facts
    beside = [*in_children(result), *while_saving(result)]
    if facts is None or not facts.censuses:
        return Diagnosis(result, beside)
    finished = not died_of_memory(result)  # with an error of its own, too: it has let go of much by then
    suspects = [suspect for rule in GROWTH for suspect in rule(facts, finished)]
    suspects = suspects or list(outside(facts))
    parts = parts_of_peak(result, grown_variables(facts, finished), tensors_kept(facts, finished))
    suspects += beside
    if died_of_memory(result):
        parts = as_made(result, parts)
        suspects = suspects if beside else by_size(result, parts, suspects)
    suspects = [replace(suspect, place=suspect.place or _made_at(suspect, facts)) for suspect in suspects]
    return Diagnosis(result, suspects, parts, growth(facts))


_MAKES = {  # kind: what a script makes there, of Facts.made
    "models kept alive": "model",
    "weights": "model",
    "replicas": "model",
    "optimizer state": "optimizer",
    "old optimizers": "optimizer",
    "copies in child processes": "process",
}


def _made_at(suspect, facts):
    """The line that makes what a suspect is; "" where none is known."""
    return facts.made.get(_MAKES.get(suspect.kind), "")


def in_children(result):
    """Pages that processes have for themselves which the script started, where they grow or are most of what it may add."""
    made, family = result.offspring, result.family
    if made is not None and made.number > 1 and made.size > _CHILDREN_MADE and made.late > _STILL_LATE:
        sentence = (
            f"{made.number} child processes made {mib(made.size)} for themselves, up to {mib(made.largest)} each, and went on "
            "making more: what a worker keeps (a cache, say) each keeps for itself; threads share one copy"
        )
        yield Suspect("copies in child processes", None, [sentence])
        return
    if family is None or not result.outside or family.size < _MOST_OF_IT * result.outside:
        return
    sentence = (
        f"{family.number} child processes held {mib(family.size)} that they share with nobody, up to {mib(family.largest)} "
        "each: what a process keeps, each worker keeps; threads share one copy"
    )
    yield Suspect("copies in child processes", None, [sentence])


def while_saving(result):
    """Memory outside of TensorFlow that ran out while Keras wrote a model."""
    if (
        result.error is not None
        and result.error.cause is Cause.MEMORY
        and result.error.frames
        and _SAVING.search(result.error.frames[-1].source)
    ):
        sentence = (
            "memory ran out while a model was saved: its configuration is written as text, with each number of an array in it "
            "(an initializer's constant, say) as a Python object; set such arrays as weights instead"
        )
        yield Suspect("copy on the host while saving", None, [sentence, str(result.error)], place_of(result))
