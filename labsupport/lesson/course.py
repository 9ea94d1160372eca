"""The small things that make a notebook a course: a quiet start, the scale of a run, graded exercises."""

import html
import inspect
import io
import os
from contextlib import contextmanager, redirect_stdout

import matplotlib.pyplot as plt

from labsupport.ground.budget import machine_memory, mib
from labsupport.lesson.ledger import record
from labsupport.showing.cards import show_card, show_widget
from labsupport.showing.palette import GOOD, HALF
from labsupport.showing.words import describe_plots

EXERCISE_MIME = "application/vnd.labsupport.exercise+json"


def load_tensorflow():
    """`import tensorflow as tf` with a sign of progress, and without the log that it writes while it starts.

    The notebook itself only defines functions and computes shapes; it leaves any GPU to the arms.
    """
    print("Loading TensorFlow, a few seconds …", flush=True)
    plt.style.use("labsupport.showing.lab")
    describe_plots()
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    # Compiled code writes to file descriptor 2 directly, before its log level can be set from Python.
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        tf.config.set_visible_devices([], "GPU")
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
    devices = f"{len(gpus)} GPU" if gpus else "no GPU"
    print(f"TensorFlow {tf.__version__}, {os.cpu_count()} cores, {mib(machine_memory())} of memory, {devices}")
    return tf


def explore(function, **controls):
    """Call function again whenever a control moves, and show what it prints.

    controls: name=(least, most[, step]) makes a number box and a slider, name=[choices] a menu; each starts at the function's default.
    This is not ipywidgets.interact: its Output widget answers over the channel on which nbclient waits for the cell's
    own reply, which can then be missed until the cell's time-out.
    """
    import ipywidgets

    parts, rows = {}, []
    for name, allowed in controls.items():
        start = inspect.signature(function).parameters[name].default
        named = {"description": name.replace("_", " "), "style": {"description_width": "initial"}}
        if isinstance(allowed, list):
            parts[name] = ipywidgets.Dropdown(options=allowed, value=start, **named)
            rows.append(parts[name])
            continue
        whole = all(isinstance(number, int) for number in (start, *allowed))
        step = allowed[2] if len(allowed) > 2 else 1 if whole else (allowed[1] - allowed[0]) / 100
        slider, box = (ipywidgets.IntSlider, ipywidgets.BoundedIntText) if whole else (ipywidgets.FloatSlider, ipywidgets.BoundedFloatText)
        shared = {"min": allowed[0], "max": allowed[1], "step": step, "value": start}
        parts[name] = slider(readout=False, layout={"width": "20em"}, **shared)
        # A box of the same value: ipywidgets gives sliders no name that a screen reader could say, and it takes exact numbers.
        typed = box(layout={"width": "18em"}, **shared, **named)
        ipywidgets.jslink((parts[name], "value"), (typed, "value"))
        rows.append(ipywidgets.HBox([typed, parts[name]]))
    answer = ipywidgets.HTML()

    def show(_=None):
        printed = io.StringIO()
        with redirect_stdout(printed):
            function(**{name: part.value for name, part in parts.items()})
        answer.value = f"<pre>{html.escape(printed.getvalue())}</pre>"
        return printed.getvalue()

    for part in parts.values():
        part.observe(show, "value")
    show_widget(ipywidgets.VBox([*rows, answer]), show() + "(run this cell to move the sliders)")


def choose(scale, quick, full):
    """The value for this scale: quick=... or full=.... Raises ValueError for another word."""
    if scale not in ("quick", "full"):
        raise ValueError(f"SCALE is {scale!r}: write SCALE = \"quick\" (under 90 s) or SCALE = \"full\"")
    return quick if scale == "quick" else full


@contextmanager
def exercise(number, hint):
    """Grade an exercise by the asserts in the block; shows "passed", or what is missing and the hint.

    A failing assert does not stop the notebook, so that "run all cells" reaches the end of an unsolved lab.
    """
    try:
        yield
        passed, reason = True, ""
    except Exception as error:
        passed, reason = False, str(error) or f"{type(error).__name__}: the code does not do it yet"
    record("exercise", number=number, passed=passed)
    title, lines = (f"✔ Exercise {number}: passed", []) if passed else (f"✎ Exercise {number}: not yet. {reason}", [f"Hint: {hint}"])
    facts = {"number": number, "passed": passed, "reason": reason, "hint": hint}
    show_card(title, lines, GOOD if passed else HALF, {EXERCISE_MIME: facts})
