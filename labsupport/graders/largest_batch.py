"""Graders of the lab on the largest batch that fits."""

import weakref

import numpy as np

from labsupport.lesson.exercises import exercise, untouched


class _Held:
    """What a call that fails holds: a stand-in for the tensors of a step."""


def _step_up_to(largest, calls, left):
    """A stand-in for a step that has room for `largest` rows. left: notes whether the call that failed before is alive.

    It ends well after fifty calls, or for no rows at all: an error could be caught, and the answer go on for ever.
    """
    import tensorflow as tf

    failed = []

    def step(batch):
        calls.append(batch)
        left.extend(batch for held in failed if held() is not None)
        tensors = _Held()
        if batch > largest and batch >= 1 and len(calls) < 50:
            failed.append(weakref.ref(tensors))
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    return step


def _broken_step(calls):
    import tensorflow as tf

    def step(batch):
        calls.append(batch)
        if len(calls) < 50:
            raise tf.errors.InvalidArgumentError(None, None, "Matrix size-incompatible")

    return step


def _tried(answer, largest, batch):
    """What answer(step, batch) returns with room for `largest` rows, the sizes it tried, and what was left of a failed try."""
    import tensorflow as tf

    calls, left = [], []
    try:
        found = answer(_step_up_to(largest, calls, left), batch)
    except tf.errors.ResourceExhaustedError:
        raise AssertionError("step's ResourceExhaustedError got through: nothing caught it.") from None
    assert len(calls) < 50, "after fifty tries it still goes on: does the batch get smaller, and does it stop at 1?"
    return found, calls, left


@exercise(
    1,
    "Only the call of step belongs under try, and only TensorFlow's own error for exhausted memory under except.",
    "An error lives until its except block is left: go on with half the batch after the block, not in it.",
)
def halved(answer):
    """answer(step, batch) halves on ResourceExhaustedError alone, outside of its handler, down to 1."""
    import tensorflow as tf

    found, calls, left = _tried(answer, 700, 4096)
    assert not untouched(found), "it returns nothing yet: return the batch that fits."
    assert found == 512, f"from 4,096, with room for 700, it gives {found}, not 512."
    assert calls == [4096, 2048, 1024, 512], f"it tried {calls}: each size once, from the largest on."
    assert not left, (
        f"when {left[0]} rows are tried, the error of the try before is still alive, and what that call held."
    )
    for largest, start, fits in ((1, 5, 1), (4096, 4096, 4096), (0, 64, 0)):
        found, calls, _ = _tried(answer, largest, start)
        words = "where not even a batch of 1 fits" if not fits else f"from {start}, with room for {largest}"
        assert max(calls) <= start, f"{words} it tried {max(calls)}: begin with the batch that is given."
        assert min(calls) >= 1, f"{words} it tried a batch of {min(calls):g}: stop at 1."
        assert found == fits, f"{words} it gives {found}, not {fits}."
    try:
        answer(_broken_step([]), 64)
    except tf.errors.InvalidArgumentError:
        return
    raise AssertionError("it swallowed an InvalidArgumentError: catch ResourceExhaustedError alone.")


# (floor MiB, intercept MiB, MiB a row, budget MiB, first size, what this case is about)
_LINES = (
    (0.0, 12.0, 0.013, 200.0, 1024, "on a plain line"),
    (0.0, 60.0, 0.013, 400.0, 1024, "with a large intercept"),
    (19.0, 12.0, 0.013, 300.0, 64, "where first lies on the floor"),
    (90.0, 50.0, 0.02, 1000.0, 1500, "where the floor ends between two sizes"),
)


@exercise(
    2,
    "Two points on the floor have no slope, and a point on it with one above has the wrong one. How can a third tell?",
    "Go on with larger sizes until two slopes in a row agree; the line through the last two meets the budget.",
)
def from_a_line(answer):
    """answer(peak, budget, first) finds the batch by a line, measures within the budget, and knows the floor."""
    for floor, intercept, slope, budget, first, case in _LINES:
        measured = []

        def peak(batch, line=(floor, intercept, slope), measured=measured, case=case):
            assert len(measured) < 10, f"{case}: it measures more than ten times."
            measured.append(max(line[0], line[1] + line[2] * batch))
            return measured[-1]

        try:
            found, largest = answer(peak, budget, first), (budget - intercept) / slope
        except ArithmeticError:
            raise AssertionError(f"{case} it divides by zero: two sizes on the floor have the same peak.") from None
        assert not untouched(found), "it returns nothing yet: return a batch."
        assert isinstance(found, (int, float, np.number)), f"it returns {type(found).__name__}, not a batch."
        assert max(measured, default=0) <= budget, (
            f"{case}: it measured a step of {max(measured):.0f} MiB, beyond the budget of {budget:.0f}."
        )
        told = f"{case} (floor {floor:.0f} MiB, intercept {intercept:.0f}, {slope} a row, budget {budget:.0f}) it gives"
        assert found <= largest, f"{told} {found:,.0f}, and {largest:,.0f} is the largest that fits."
        assert found >= 0.8 * largest, f"{told} {found:,.0f}, where {largest:,.0f} fit."
    calls = []

    def too_much(batch):
        calls.append(batch)
        assert len(calls) < 10, "where the floor alone is beyond the budget it goes on and on."
        return 50.0 + 0.01 * batch

    assert answer(too_much, 40.0, 64) == 0, "where the floor alone is too much it must return 0."


def _trained(model, optimizer, times):
    """Some updates of a model, as a search makes them."""
    import tensorflow as tf

    x = tf.random.stateless_normal((16, 4), seed=(1, 2))
    for _ in range(times):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))


@exercise(
    3,
    "What an update changes: weights, the moving averages of normalization, the optimizer's slots and its counter.",
    "model.variables and optimizer.variables have all of it; what stands under finally runs in either case.",
)
def left_as_it_was(answer):
    """answer(model, optimizer, search) gives what search gives, and every variable has the value that it had."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.BatchNormalization()])
    optimizer = keras.optimizers.Adam(0.1)
    _trained(model, optimizer, 2)

    def values():
        return {variable.path: np.array(variable) for variable in [*model.variables, *optimizer.variables]}

    def search(error=None):
        _trained(model, optimizer, 3)
        if error:
            raise error
        return 96

    def assert_kept(before, when):
        changed = [path for path, value in values().items() if not np.array_equal(value, before[path])]
        if not changed:
            return
        of_model = [path for path in changed if path in {variable.path for variable in model.variables}]
        if not of_model:
            told = "the optimizer's"
        else:
            told = "the normalization's moving" if all("moving" in path for path in of_model) else "the model's"
        raise AssertionError(f"{when} {told} variables are not what they were: {', '.join(changed[:3])}.")

    before = values()
    found = answer(model, optimizer, search)
    if found is None and all(np.array_equal(value, before[path]) for path, value in values().items()):
        raise AssertionError("it returns nothing yet: run search() and return what it gives.")
    assert found == 96, f"search() gave 96, and it returns {found}."
    assert_kept(before, "after the search")
    for error in (tf.errors.ResourceExhaustedError(None, None, "OOM"), ValueError("another error")):
        kind = type(error)
        try:
            answer(model, optimizer, lambda error=error: search(error))
        except kind:
            assert_kept(before, f"where it raises a {kind.__name__}")
        else:
            raise AssertionError(
                f"search() raised a {kind.__name__}, and nothing came out: its error must get through."
            )
