"""The doctor on every lab's failing arm, where it must name the kind of trouble first, and on the fixed arm, where it must be silent."""

import pytest
from lab_arms import LABS, arms
from test_capstone import script

from labsupport.doctor.examining import examine
from labsupport.doctor.rules import diagnose
from labsupport.ground.arm import Job, watched
from labsupport.showing.live import TerminalPlot

# lab: (kind, the failing arm's name in the notebook, the fixed arm's, names of runs that these two need)
TABLE = {
    "00": ("batch-bound activations", "failure", "fix", ()),  # summary() does not count them
    "01": ("input copy", "failure", "fix", ()),
    "02": ("input copy", "failure", "fix", ()),
    "03": ("buffer", "failure", "fix", ()),
    "04": ("batch-bound activations", "failure", "fix", ()),
    "05": ("batch-bound activations", "failure", "right", ()),
    "06": ("batch-bound activations", "failure", "works", ()),  # the products that the tape keeps
    "07": ("retained tensors", "failure", "fix", ()),
    "08": ("retracing", "numbers", "tensors", ()),
    "09": ("models kept alive", "failure", "fix", ()),
    "10": ("batch-bound activations", "failure", "fix", ()),
    "11": ("optimizer state", "failure", "fix", ()),  # weights and slots stay float32
    "12": ("batch-bound activations", "failure", "fix", ()),
    "32": ("batch-bound activations", "failure", "fix", ()),
    # Weights of a model that only answers are none of the kinds, so the doctor names another one: a known fault of it.
    "13": ("weights", "failure", "fix", ("dense",)),
    "14": ("batch-bound activations", "failure", "fix", ("teacher",)),  # the teacher answers for all images at once
    "15": ("batch-bound activations", "failure", "plain", ("plain",)),  # XLA's one block for all of them
    "16": ("fragmentation", "failure", "fix", ()),
    "17": ("replicas", "failure", "fix", ("single",)),
    "18": ("batch-bound activations", "failure", "fix", ()),
    "19": ("input copy", "failure", None, ()),  # the first of its seven faults; its fixed script is below
}


class NoPlot(TerminalPlot):
    def finish(self, result):
        pass


def examined(function, args, keywords):
    """The diagnosis of an arm, run as its lab runs it, with the probes in its process."""
    given = {name: keywords[name] for name in ("budget", "outside", "env", "logical_devices") if name in keywords}
    return diagnose(watched(Job(examine, (function, args), label="arm", timeout=120, **given), NoPlot))


known_fault = pytest.mark.xfail(reason="names activations where only weights are held", strict=True)


@pytest.mark.parametrize("lab", [pytest.param(lab, marks=known_fault if lab == "13" else ()) for lab in TABLE])
def test_right_on_the_failing_arm_and_silent_on_the_fixed_one(lab, record_property, monkeypatch):
    kind, failing, fixed, needed = TABLE[lab]
    monkeypatch.syspath_prepend(LABS)
    monkeypatch.chdir(LABS)
    found = arms(lab, [name for name in (failing, fixed) if name], needed)
    diagnosis = examined(*found[failing])
    named = [suspect.kind for suspect in diagnosis.suspects]
    record_property("doctor", (kind, named[0] if named else "silent"))
    assert named[:1] == [kind], f"{named}: {diagnosis.result}\n{diagnosis.parts}"
    assert all(suspect.evidence for suspect in diagnosis.suspects)
    if lab == "19":
        found[fixed] = (script()["main"], found[failing][1], {})
    healthy = examined(*found[fixed])
    assert healthy.result.ok, healthy.result
    record_property("doctor", ("silent", healthy.suspects[0].kind if healthy.suspects else "silent"))
    assert not healthy.suspects
