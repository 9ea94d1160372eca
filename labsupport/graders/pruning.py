"""Graders of the lab on magnitude pruning."""

import numpy as np

from labsupport.lesson.exercises import exercise, try_out, untouched


def _pruned(schedules, data):
    """In the arm, with Keras 2: for each schedule, the share of zeros in its kernel after each step of a training.

    A schedule does not know how long a training is: the first steps of a long one are a short one.
    """
    import tensorflow as tf
    import tensorflow_model_optimization as tfmot

    sparsity, layers = tfmot.sparsity.keras, tf.keras.layers
    pruned = [
        sparsity.prune_low_magnitude(layers.Dense(10), pruning_schedule=sparsity.PolynomialDecay(**options))
        for options in schedules.values()
    ]
    inputs = layers.Input((64,))
    model = tf.keras.Model(inputs, layers.add([layer(inputs) for layer in pruned]))
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    shares = []

    class Counts(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            masks = [next(v for v in layer.variables if "mask" in v.name) for layer in pruned]
            shares.append([float(np.mean(mask.numpy() == 0)) for mask in masks])

    x, y = (part[: 4 * max(schedules)] for part in data[:2])
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[sparsity.UpdatePruningStep(), Counts()])
    return [[of_all[place] for of_all in shares[:steps]] for place, steps in enumerate(schedules)]


@exercise(
    1,
    "The last renewal decides: it is at the last step that is a multiple of frequency behind begin_step, and at end_step "
    "only if that is one.",
    "Let frequency follow from steps first, and end_step from frequency.",
)
def schedule(answer, data, env):
    """answer(steps) gives a schedule that leaves 80 % zeros; a real training shows it for three lengths."""
    schedules = {steps: answer(steps) for steps in (20, 57, 110)}
    for steps, options in schedules.items():
        assert not untouched(options), "schedule() returns nothing yet: return a dict."
        assert isinstance(options, dict), f"schedule() returns a {type(options).__name__}, not a dict."
        for name in ("begin_step", "end_step", "frequency"):
            number = options.get(name, 0)
            assert number == int(number), f"for {steps} steps {name} is {number}: a number of steps is whole."
    done = try_out(_pruned, schedules, data, env=env, label="your schedules")
    for steps, shares in zip(schedules, done.value):
        shares = np.array(shares)
        end = f"after {steps} steps {shares[-1]:.1%} are zeros"
        assert abs(shares[-1] - 0.8) < 0.005, f"{end} and not 80 %: at which step is the last renewal?"
        renewals = np.flatnonzero(np.diff(shares, prepend=0) > 1e-9)
        assert len(renewals) >= 5, f"{end}, but they came in {len(renewals)} renewals, not five or more."
        left = steps - 1 - renewals[-1]
        assert left >= steps / 4 - 1, f"{end}, but only {left} steps are left to recover: end it earlier."


@exercise(
    2,
    "np.nonzero gives rows and columns, row by row; how many values has each row?",
    "A row starts where the values of all rows before it end. A row without values starts there, too.",
)
def to_csr(answer, kernel):
    """answer(kernel) gives values, columns and starts, from which the kernel can be built again."""
    hollow = np.array(kernel)
    hollow[[0, 7, -1]] = 0
    for given, name in ((kernel[:100], "a kernel"), (hollow, "a kernel with a row without values")):
        parts = answer(given.copy())
        assert not untouched(parts), "to_csr() returns nothing yet."
        assert isinstance(parts, (tuple, list)) and len(parts) == 3, "return three arrays: values, columns, starts."
        assert not any(isinstance(part, (tuple, list)) and np.ndim(part[0]) for part in parts), (
            "each of the three is one array, in which the rows follow one another."
        )
        values, columns, starts = map(np.asarray, parts)
        for part, kind, what in (
            (values, "float32", "values"),
            (columns, "uint16", "columns"),
            (starts, "int32", "starts"),
        ):
            assert part.dtype == kind, f"{what} are {part.dtype}, not {kind}."
        assert len(starts) == len(given) + 1, f"{name} of {len(given)} rows got {len(starts)} starts, not rows + 1."
        assert len(values) == np.count_nonzero(given), f"{len(values)} values: only what is not zero is to be stored."
        assert starts[0] == 0 and starts[-1] == len(values) == len(columns), (
            "starts begin with 0, and the last of them is the number of values."
        )
        assert (np.diff(starts) >= 0).all(), "starts go down somewhere: a row starts where the one before it ends."
        back = np.zeros_like(given)
        rows = np.repeat(np.arange(len(given)), np.diff(starts))
        back[rows, columns] = values
        assert np.array_equal(back, given), (
            f"{name} cannot be built again from these parts: values and columns go row by row, starts say where each begins."
        )


def _operations(kernel):
    """In the arm: the operations of the packed file of one dense layer with this kernel."""
    import tensorflow as tf

    class Layer(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec((1, len(kernel)))])
        def __call__(self, x):
            return tf.matmul(x, tf.constant(kernel))

    layer = Layer()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([layer.__call__.get_concrete_function()], layer)
    converter.optimizations = [tf.lite.Optimize.EXPERIMENTAL_SPARSITY]
    content = converter.convert()
    interpreter = tf.lite.Interpreter(model_content=content)
    return [operation["op_name"] for operation in interpreter._get_ops_details()]


@exercise(
    3,
    "kernel.reshape(rows // 4, 4, units) has the blocks along its second axis.",
    "Rank the sums over that axis, and let each decision count for four rows: np.repeat(…, 4, axis=0).",
)
def prune_blocks(answer, kernel):
    """answer(kernel, share) has that share of blocks of four inputs at zero, the weakest, and the others untouched."""
    for share in (0.8, 0.5):
        given = np.array(kernel)
        made = answer(given, share)
        assert not untouched(made), "prune_blocks() returns nothing yet: return a kernel."
        made = np.asarray(made)
        assert made.shape == kernel.shape, f"a kernel of {kernel.shape} became one of {made.shape}."
        assert np.array_equal(given, kernel), "the kernel that was handed in is changed: work on a copy."
        changed = made != kernel
        assert not made[changed].any(), "some weights are neither kept nor zero."
        found = float(np.mean(made == 0))
        assert abs(found - share) < 0.01, f"{found:.0%} are zeros where the share is {share:.0%}."
        blocks = (made == 0).reshape(-1, 4, made.shape[1]).mean(axis=1)
        assert np.isin(blocks, (0, 1)).all(), "the zeros do not come in blocks of four inputs of one unit."
        strength = np.abs(kernel).reshape(-1, 4, made.shape[1]).sum(axis=1)
        kept, gone = strength[blocks == 0], strength[blocks == 1]
        assert kept.min() >= gone.max() * (1 - 1e-5), (
            "a block was removed that is stronger than one that stayed: rank the sums of absolute values in the whole kernel."
        )
        if share == 0.8:
            done = try_out(_operations, made.astype("float32"), label="your kernel, packed")
            assert "DENSIFY" not in done.value, f"the file runs {done.value}: the kernel is unpacked first."
