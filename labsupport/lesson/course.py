"""The small things that make a notebook a course: a quiet start, the scale of a run, sentences with figures."""

import inspect
import io
import os
from contextlib import redirect_stdout

import matplotlib.pyplot as plt

from labsupport.ground.arm import get_ready
from labsupport.ground.budget import machine_memory, mib
from labsupport.ground.quiet import without_collections, without_stderr
from labsupport.lesson.formula import FORMULA_MIME, NoFormula, formula
from labsupport.showing.cards import as_html, show_widget
from labsupport.showing.palette import FIGURES
from labsupport.showing.plain import plain
from labsupport.showing.words import describe_plots


def load_tensorflow():
    """`import tensorflow as tf` with a sign of progress, and without the log that it writes while it starts.

    The notebook itself only defines functions and computes shapes; it leaves any GPU to the arms.
    """
    print("Loading TensorFlow, a few seconds …", flush=True)
    plt.rcParams.update(FIGURES)
    describe_plots()
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    get_ready()
    with without_collections(), without_stderr():  # it writes there before its log level can be set from Python
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        tf.config.set_visible_devices([], "GPU")
    devices = f"{len(gpus)} GPU" if gpus else "no GPU"
    print(f"TensorFlow {tf.__version__}, {os.cpu_count()} cores, {mib(machine_memory())} of memory, {devices}")
    return tf


def _control(name, start, allowed):
    """(the widget whose value counts, what is shown) for one argument of explore()."""
    import ipywidgets

    named = {"description": name.replace("_", " "), "style": {"description_width": "initial"}}
    if isinstance(allowed, list):
        menu = ipywidgets.Dropdown(options=allowed, value=start, **named)
        return menu, menu
    whole = all(isinstance(number, int) for number in (start, *allowed))
    step = allowed[2] if len(allowed) > 2 else 1 if whole else (allowed[1] - allowed[0]) / 100
    slider, box = (
        (ipywidgets.IntSlider, ipywidgets.BoundedIntText)
        if whole
        else (ipywidgets.FloatSlider, ipywidgets.BoundedFloatText)
    )
    shared = {"min": allowed[0], "max": allowed[1], "step": step, "value": start}
    moved = slider(readout=False, layout={"width": "20em"}, **shared)
    # A box of the same value: ipywidgets gives sliders no name that a screen reader could say, and it takes exact numbers.
    typed = box(layout={"width": "18em"}, **shared, **named)
    ipywidgets.jslink((moved, "value"), (typed, "value"))
    return typed, ipywidgets.HBox([typed, moved])


def explore(function, **controls):
    """Call function again whenever a control moves, and show what it prints.

    controls: name=(least, most[, step]) makes a number box and a slider, name=[choices] a menu; each starts at the function's default.
    This is not ipywidgets.interact: its Output widget answers over the channel on which nbclient waits for the cell's
    own reply, which can then be missed until the cell's time-out.
    """
    import ipywidgets

    starts = inspect.signature(function).parameters
    made = {name: _control(name, starts[name].default, allowed) for name, allowed in controls.items()}
    answer = ipywidgets.HTML()

    def show(_=None):
        printed = io.StringIO()
        with redirect_stdout(printed):
            function(**{name: part.value for name, (part, _) in made.items()})
        answer.value = f"<pre>{as_html(printed.getvalue())}</pre>"
        return printed.getvalue()

    for part, _ in made.values():
        part.observe(show, "value")
    rows = [row for _, row in made.values()]
    text = show() + "(run this cell to move the sliders)"
    show_widget(ipywidgets.VBox([*rows, answer]), text, _for_pages(function, starts, controls))


def _for_pages(function, starts, controls):
    """Data of a display from which a page without a kernel makes the same controls; none where it could not answer."""
    try:
        source, values = formula(function)
    except NoFormula:
        return {}
    ranges = [[name, starts[name].default, allowed] for name, allowed in controls.items()]
    return {FORMULA_MIME: {"source": source, "values": values, "function": function.__name__, "controls": ranges}}


def choose(scale, quick, full):
    """The value for this scale: quick=... or full=.... Raises ValueError for another word."""
    if scale not in ("quick", "full"):
        raise ValueError(f'SCALE is {scale!r}: write SCALE = "quick" (under 90 s) or SCALE = "full"')
    return quick if scale == "quick" else full


def note(text):
    """Display a sentence or two (Markdown) that read what a run gave. Every figure in it is a variable of that run."""
    from IPython.display import display

    display({"text/plain": plain(text), "text/markdown": plain(text)}, raw=True)
