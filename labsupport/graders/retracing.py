"""Graders of the lab on retracing."""

from labsupport.lesson.exercises import exercise, try_out, untouched

CALLS, LENGTHS = 10, (5, 31, 33, 40, 64, 65, 100, 130, 200, 255, 300, 257, 400, 500)


def _losses_and_traces(loops, calls):
    """In the arm: of each loop, what it returns, and how often its step was traced."""
    found = []
    for loop in loops:
        counter = []
        losses = loop(counter, calls)
        if untouched(losses):
            return "the function returns nothing yet: return the list of losses, as faulty() does."
        try:
            found.append(([float(loss) for loss in losses], len(counter)))
        except (TypeError, ValueError):
            return f"return a list of {calls} numbers, and no {type(losses).__name__}."
    return found


@exercise(
    1,
    "pretty_printed_concrete_signatures() shows what tells one kind of call from the next: which two things change?",
    "One of them must stop counting by its value, the other needs a size that a signature leaves open.",
)
def repaired(answer, faulty):
    """answer(counter, calls) gives the losses of faulty(counter, calls) and traces once or twice."""
    done = try_out(_losses_and_traces, (answer, faulty), CALLS, label="your answer to 1")
    (losses, traces), (wanted, before) = done.value
    assert len(losses) == len(wanted), f"{len(losses)} losses for {CALLS} calls."
    off = max(abs(loss - right) / abs(right) for loss, right in zip(losses, wanted))
    assert off < 1e-3, f"the losses differ from the faulty loop's by up to {off:.1%}: same rates, same batches?"
    assert traces > 0, (
        "make_step(counter) counts the traces, and it counted none: give it the counter, and trace the step."
    )
    assert traces <= 2, f"the step was traced {traces} times (the faulty loop: {before})."


def _padded(answer, make_step, width):
    """In the arm: (rows of each padded batch, traces of one step over them, largest error of a loss), or a complaint."""
    import numpy as np
    import tensorflow as tf

    counter, sizes, worst = [], [], 0.0
    step, plain = tf.function(make_step(counter), jit_compile=False), make_step()
    for length in LENGTHS:
        batch = tf.random.stateless_normal((length, width), seed=(length, 1))
        given = answer(batch)
        if untouched(given):
            return "padded() returns nothing yet: return the batch with rows of zeros behind it."
        if (
            not (tf.is_tensor(given) or isinstance(given, np.ndarray))
            or len(given.shape) != 2
            or given.shape[1] != width
        ):
            return f"return a batch of shape (rows, {width}), and not {getattr(given, 'shape', type(given).__name__)}."
        sizes.append(int(given.shape[0]))
        if sizes[-1] < length:
            return f"a batch of {length} rows comes back with {sizes[-1]}: rows are lost."
        given = tf.cast(given, tf.float32)
        if not np.array_equal(given[:length], batch):
            return f"the first {length} rows are not those of the batch: the zeros go behind them."
        right = float(plain(batch, tf.constant(0.0)))
        worst = max(worst, abs(float(step(given, tf.constant(0.0))) - right) / right)
    return sizes, len(counter), worst


@exercise(
    2,
    "Which sizes may a batch have after padding, if each may be at most twice as large as the one before?",
    "Double a size for as long as the batch does not fit; tf.pad takes how many rows come before and behind.",
)
def padded(answer, make_step, width):
    """answer(batch) adds rows of zeros up to one of a few sizes, and at most doubles a batch of 32 rows or more."""
    done = try_out(_padded, answer, make_step, width, label="your answer to 2")
    sizes, traces, worst = done.value
    assert worst < 1e-3, (
        f"a loss is off by {worst:.1%}: are the added rows zeros, and all the batch's rows still there?"
    )
    wide = [(length, size) for length, size in zip(LENGTHS, sizes) if size > max(32, 2 * length - 1)]
    assert not wide, f"{wide[0][0]} rows became {wide[0][1]}: take the smallest size that fits."
    # Powers of two make five sizes of the lengths tried here, other steps of nearly two a few more.
    assert traces <= 7, (
        f"the step was traced {traces} times for {len(LENGTHS)} lengths up to {max(LENGTHS)}; 5 sizes can hold them all."
    )
