"""Graders of the capstone: the images, the training, and the whole script under its budgets."""

from labsupport.lesson.capstone import faults_of
from labsupport.lesson.capstone_rules import FAULTS
from labsupport.lesson.exercises import NotYet, exercise

_HINTS = {
    "eager stack": (
        "What must be there before the first batch is asked for?",
        "The names of the files are small. What if a data set began with them?",
    ),
    "float64": (
        "Print the dtype of the images behind each line of decode.",
        "One of its operands is a NumPy array: what is the dtype of MEAN?",
    ),
    "decoded buffer": (
        "Of the stages of make_pipeline, which hold elements, how many, and what does one weigh at that place?",
        "A pipeline is shuffled as well by what is light, in front of the decoding. What then is left to keep?",
    ),
    "giant batch": (
        "How many images does evaluate have in its hands at once?",
        "Right answers can be counted batch by batch, and divided once.",
    ),
    "history": (
        "What is the size of one entry of the history?",
        "A plot needs the size of the gradients, and not the gradients.",
    ),
    "retracing": (
        "Print inside step(): how often does Python come by in an epoch?",
        "What is a new number for Python is a new graph. What comes into a graph without being part of it?",
    ),
    "model per trial": (
        "What of the first trial is alive in the second, and who knows it?",
        "Must each trial have a model of its own? What is to be the same at its start are the weights and the optimizer.",
    ),
}


def _nothing_left(figures, troubles):
    left = faults_of(figures)
    told = [
        f"Left is: {name} (lab {FAULTS[name].number}); {FAULTS[name].what}: {figures[name]:.2f}, "
        f"where at most {FAULTS[name].most} is allowed."
        for name in left
    ]
    if left:
        raise NotYet(" ".join(told + troubles), *_HINTS[left[0]])
    assert not troubles, " ".join(troubles)


@exercise(1, "Compare the function that is named with what it did before: the answer above says what is missing.")
def images(script, judge):
    """The functions for the images hold no more than a few batches, of 4 bytes a number, and do what they did."""
    _nothing_left(*judge.look(script, "images"))


@exercise(2, "Compare the function that is named with what it did before: the answer above says what is missing.")
def training(script, judge):
    """The functions for the training leave nothing behind, from image to image, step to step, epoch to epoch, trial to trial."""
    _nothing_left(*judge.look(script, "training"))


@exercise(3, "Read what each budget still asks for, above: it names the function.")
def whole(report):
    """Every level is passed."""
    for level in report.budgets:
        missing = report.missing(level, forgive_faults=level != list(report.budgets)[-1])
        if missing and report.faults:
            raise NotYet(f"{level}: {missing}", *_HINTS[report.faults[0]])
        assert not missing, f"{level}: {missing}"
