"""Graders of the capstone: the images, the training, and the whole script under its budgets."""

from labsupport.lesson.capstone import faults_of
from labsupport.lesson.capstone_rules import FAULTS
from labsupport.lesson.exercises import exercise

_CURED_IN = {
    "evaluate": "giant batch",
    "train_epoch": "history",
    "learning_rate": "retracing",
    "search": "model per trial",
}


def _nothing_left(figures, troubles):
    left = [
        f"Left is: {name} (lab {FAULTS[name].number}); {FAULTS[name].what}: {figures[name]:.2f}, "
        f"where at most {FAULTS[name].most} is allowed."
        for name in faults_of(figures)
    ]
    assert not left + troubles, " ".join(left + troubles)


@exercise(
    1,
    "What must be there before the first batch is asked for? The names of the files are small.",
    "Shuffle the names, and decode in a map behind them; then look at what the constants MEAN and STD are made of.",
)
def images(script, judge):
    """The functions for the images hold no more than a few batches, of 4 bytes a number, and do what they did."""
    _nothing_left(*judge.look(script, "images"))


@exercise(
    2,
    f"Four functions, four labs: {', '.join(f'{name} ({FAULTS[fault].number})' for name, fault in _CURED_IN.items())}.",
    "What is kept after a step must be numbers, and what goes into a step must be a tensor. One model can start anew.",
)
def training(script, judge):
    """The functions for the training leave nothing behind, from image to image, step to step, epoch to epoch, trial to trial."""
    _nothing_left(*judge.look(script, "training"))


@exercise(
    3,
    "Read what each budget still asks for, above. Where main dies, the table tells what it carries.",
    "A row of the table that is not LEFT is cured; the lab of a row that is has the cure.",
)
def whole(report):
    """Every level is passed."""
    for level in report.budgets:
        missing = report.missing(level, forgive_faults=level != list(report.budgets)[-1])
        assert not missing, f"{level}: {missing}"
