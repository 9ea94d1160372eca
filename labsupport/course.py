"""The small things that make a notebook a course: a quiet start, the scale of a run, graded exercises."""

import html
import io
import os
from contextlib import contextmanager, redirect_stdout

from labsupport.budget import machine_memory, mib

EXERCISE_MIME = "application/vnd.labsupport.exercise+json"


def load_tensorflow():
    """`import tensorflow as tf` with a sign of progress, and without the log that it writes while it starts.

    The notebook itself only defines functions and computes shapes; it leaves any GPU to the arms.
    """
    print("Loading TensorFlow, a few seconds …", flush=True)
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


def show_widget(widget, text):
    """Display a widget; a saved notebook that has not been run yet shows the text in its place."""
    from IPython.display import display

    display({**widget._repr_mimebundle_(), "text/plain": text}, raw=True)


def explore(function, **sliders):
    """Call function again whenever a slider moves: ipywidgets.interactive, with its first printout kept as text.

    sliders: name=(least, most, step), as for ipywidgets.interact. The first values are the function's defaults.
    """
    import ipywidgets

    first = io.StringIO()
    with redirect_stdout(first):
        function()
    widget = ipywidgets.interactive(function, **sliders)
    widget.update()
    show_widget(widget, first.getvalue() + "(run this cell to move the sliders)")


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
    from IPython.display import display

    text = f"Exercise {number}: passed" if passed else f"Exercise {number}: not yet. {reason}\nHint: {hint}"
    sign = "✔" if passed else "✎"
    colour = "#009E73" if passed else "#E69F00"
    markup = f'<div style="border-left:6px solid {colour};padding:4px 10px">{sign} {html.escape(text).replace(chr(10), "<br>")}</div>'
    facts = {"number": number, "passed": passed, "reason": reason, "hint": hint}
    display({"text/plain": text, "text/html": markup, EXERCISE_MIME: facts}, raw=True)
