"""Graders of the lab on what a process keeps."""

import contextlib
import gc
import io

import numpy as np

from labsupport.ground.meter import phase, reading
from labsupport.lesson.exercises import exercise, try_out, try_out_once

_STEPS = 3  # before the loss changes: enough that Adam's slots matter


def _step(change, build, samples):
    """In the arm: (what a step changes in the weights after change(model, another loss), that loss, the optimizer's steps so far).

    Or a complaint, where change() itself has changed them.
    """
    import keras

    (x, y), model = samples(), build()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    for _ in range(_STEPS):
        model.train_on_batch(x, y)
    gc.collect()
    start = model.get_weights()
    with phase("changed"):
        change(model, "mape")
        if any((a != b).any() for a, b in zip(start, model.get_weights())):
            return "the weights have changed before the next step: change nothing but the loss."
        model.reset_metrics()
        loss = float(model.train_on_batch(x, y))  # of the weights before this step
        gc.collect()
    return [b - a for a, b in zip(start, model.get_weights())], loss, int(model.optimizer.iterations)


def _compiled(model, loss):
    """What the exercise asks for."""
    model.compile(model.optimizer, loss)


@exercise(
    1,
    "What stays behind is what a new optimizer made. Does another loss need another optimizer?",
    "compile() takes an optimizer, and the model has one: model.optimizer.",
)
def another_loss(answer, build, samples, slots):
    """answer(model, loss) lets the model train on with another loss; of its optimizer's slots, slots MiB, there is one set."""
    done = try_out(_step, answer, build, samples, label="your answer to 1")
    wanted, right, _ = try_out_once(_step, _compiled, build, samples, label="a step with another loss").value
    given, loss, steps = done.value
    off = sum(float(np.abs(a - b).sum()) for a, b in zip(given, wanted))
    off /= sum(float(np.abs(part).sum()) for part in wanted)
    other = abs(loss / right - 1)
    assert other < 0.01, "the loss of the next step is another one: it has to be the new one."
    assert steps == _STEPS + 1, (
        f"the optimizer has taken {steps} steps and not {_STEPS + 1}: it does not go on, it begins anew."
    )
    assert off < 0.01, f"the next step is {off:.0%} off: has the optimizer its own rate and slots?"
    left = done.phase("changed").added_mib
    assert left < 0.5 * slots, (
        f"{left:.1f} MiB are left behind, and one optimizer's slots have {slots:.1f}: there are two sets."
    )


_CELLS = (
    "import tensorflow as tf\ndef fail(x):\n    raise ValueError",
    "mine, shown, failed = (tf.ones((1024, 1024)) for _ in range(3))",
    "shown",
    "fail(failed)",
    "del shown, failed\nimport gc\ngc.collect();",
)


def _emptied(answer):
    """In the arm: (MiB that the cells left behind, MiB that stay after the answer, whether the names are as they were)."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    shell = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    with contextlib.redirect_stdout(io.StringIO()):
        before = reading().tensors_mib
        for cell in _CELLS:
            shell.run_cell(cell, store_history=True)
        held = reading().tensors_mib - before
        names = {name: shell.user_ns[name] for name in ("mine", "fail", "tf")}
        answer(shell)
        gc.collect()
        left = reading().tensors_mib - before
    return held, left, all(shell.user_ns.get(name) is value for name, value in names.items())


@exercise(
    2,
    "Two tensors are held by no name: one by the shell's outputs, one by its last error. What replaces an error?",
    "shell.run_line_magic('reset', '-f out') is %reset -f out, shell.run_cell('raise ValueError') a cell that fails. Until "
    "three more outputs, as of shell.run_cell('0', store_history=True), _, __ and ___ hold the last ones.",
)
def emptied(answer, one):
    """answer(shell) lets go of the output and of the traceback, a tensor of `one` MiB each, and keeps the names."""
    held, left, names = try_out(_emptied, answer, label="your answer to 2").value
    assert names, "names of the person's own are gone: only what the shell itself holds should be."
    assert left < 1.5 * one, f"{left:.0f} MiB stay of {held:.0f}, and what has a name needs {one:.0f}."
