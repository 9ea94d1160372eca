"""The doctor on every lab's failing arm, where it must name the kind of trouble first, and on the fixed arm, where it must be silent."""

import pytest
from examined import examined
from lab_arms import LABS, arms
from test_capstone import script

# lab: (kind, the failing arm's name in the notebook, the fixed arm's, names of runs that these two need)
TABLE = {
    "where_memory_goes": ("batch-bound activations", "failure", "fix", ()),  # summary() does not count them
    "image_stacking": ("input copy", "failure", "fix", ()),
    "arrays_into_datasets": ("input copy", "failure", "fix", ()),
    "generators": ("buffer", "failure", "fix", ()),
    "pipeline_buffers": ("buffer", "failure", "fix", ()),
    "batch_size": ("batch-bound activations", "failure", "fix", ()),
    "gradient_accumulation": ("batch-bound activations", "failure", "right", ()),
    "loop_accumulation": ("batch-bound activations", "failure", "works", ()),  # the products that the tape keeps
    "leaks_over_epochs": ("retained tensors", "failure", "fix", ()),
    "retracing": ("retracing", "numbers", "tensors", ()),
    "a_model_per_trial": ("models kept alive", "failure", "fix", ()),
    "recomputation": ("batch-bound activations", "failure", "fix", ()),
    "mixed_precision": ("optimizer state", "failure", "fix", ()),  # weights and slots stay float32
    "shapes_and_layers": ("batch-bound activations", "failure", "fix", ()),
    "long_sequences": ("batch-bound activations", "failure", "fix", ()),
    # Of a model that only answers the doctor names activations: a known fault of it.
    "pruning": ("weights", "failure", "fix", ("dense",)),
    "quantization_and_distillation": (
        "batch-bound activations",
        "failure",
        "fix",
        ("teacher",),
    ),  # the teacher answers for all images at once
    "xla": ("batch-bound activations", "failure", "plain", ("plain",)),  # XLA's one block for all of them
    "reading_an_oom": ("fragmentation", "failure", "fix", ()),
    "more_than_one_device": ("replicas", "failure", "fix", ("single",)),
    "the_gpu_is_full": ("weights", "failure", "fix", ("first", "grown")),  # larger than what others left of the device
    "the_profiler": ("batch-bound activations", "failure", "fix", ()),
    "large_files": ("input copy", "failure", "fix", ()),  # NumPy's array of a file that fit() was given
    "preparing_data": ("data converted whole", "failure", "fix", ()),
    "what_a_process_keeps": ("old optimizers", "failure", "fix", ()),
    "will_it_fit": ("batch-bound activations", "failure", "fix", ()),
    "vocabularies_and_pairs": ("batch-bound activations", "failure", "fix", ()),  # the logits
    "loops_that_stay_loops": ("batch-bound activations", "failure", "fix", ()),  # the state of every turn
    "workers": ("buffer", "failure", "fix", ()),  # batches that wait in the queue of workers
    "fine_tuning": ("weights", "failure", "fix", ()),  # it dies while variables are made: the slots of all weights
    # A deque that fills: its arrays are told as data held whole first, and as what grows second.
    "replay_and_saving": ("input copy", "failure", "fix", ()),
    "capstone": ("input copy", "failure", None, ()),  # the first of its seven faults; its fixed script is below
}


known_fault = pytest.mark.xfail(reason="names activations where only weights are held", strict=True)


@pytest.mark.parametrize("lab", [pytest.param(lab, marks=known_fault if lab == "pruning" else ()) for lab in TABLE])
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
    if lab == "capstone":
        found[fixed] = (script()["main"], found[failing][1], {})
    healthy = examined(*found[fixed])
    assert healthy.result.ok, healthy.result
    record_property("doctor", ("silent", healthy.suspects[0].kind if healthy.suspects else "silent"))
    assert not healthy.suspects
