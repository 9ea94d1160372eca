"""Graders of the lab on recomputation."""

import numpy as np

from labsupport.lesson.exercises import exercise, try_out, untouched


@exercise(
    1,
    "The peak is predicted for any number of segments by a function that you have seen above.",
    "Which of COUNTS makes predicted_segments(k, depth, kept_per_layer) smallest? min() takes a key.",
)
def best_segments(answer, counts, predicted, depth, kept, peak_of):
    """answer(depth, kept_per_layer) is the count with the smallest predicted(k, depth, kept_per_layer).

    peak_of(k): the measured peak of k segments in MiB, with layers that keep `kept` activations.
    """
    for activations in (kept, 1.0, 16.0):
        mine = answer(depth, activations)
        assert not untouched(mine), "best_segments() returns nothing yet: return a number out of COUNTS."
        assert mine in counts, f"{mine} is none of {counts}, the numbers that divide {depth}."
        best = min(predicted(k, depth, activations) for k in counts)
        found = predicted(mine, depth, activations)
        assert found < 1.001 * best, (
            f"where a layer keeps {activations:.1f} activations, {mine} segments are predicted to need {found:.0f} MiB, "
            f"and another number needs {best:.0f}: does your answer use what it is given?"
        )
    mine = int(answer(depth, kept))
    print(f"{mine} segments: predicted {predicted(mine, depth, kept):.0f} MiB, measured {peak_of(mine):.0f} MiB")


def _masks(answer, width):
    """In the arm: what answer() makes of x for some seeds, the shares of elements on which its gradient agrees, and x."""
    import tensorflow as tf

    x = tf.reshape(tf.range(1.0, 64 * width + 1), (64, width))
    if answer(x, tf.constant([1, 2])) is None:
        return None
    segment, found, agree = tf.recompute_grad(answer), [], []

    def once(x, seed):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = segment(x, seed)
        return y, tape.gradient(y, x)

    in_graph = tf.function(once)
    try:
        in_graph(x, tf.constant([1, 2]))
    except Exception as error:
        return f"in a graph, where the seed is a tensor without a value yet, it fails: {type(error).__name__}."
    for run, seed in ((once, [1, 2]), (once, [1, 2]), (once, [3, 4]), (once, [5, 2]), (in_graph, [1, 2])):
        y, gradient = run(x, tf.constant(seed))
        if gradient is None:
            return "no gradient reaches x: drop by operations of TensorFlow."
        found.append(y.numpy())
        agree.append(float(tf.reduce_mean(tf.cast((y != 0) == (gradient != 0), tf.float32))))
    return {"results": found[:4], "agree": agree, "x": x.numpy()}


@exercise(
    2,
    "An operation that takes its seed with every call draws the same numbers for the same seed.",
    "TensorFlow calls such operations stateless: look for one with dropout, or with uniform, in its name.",
)
def seeded_dropout(answer, width):
    """answer(x, seed) drops half of x, the same half for the same seed, also where it is recomputed."""
    done = try_out(_masks, answer, width, label="your answer to 2")
    assert not untouched(done.value), (
        "seeded_dropout() returns nothing yet: return x with half of its elements dropped."
    )
    first, again, other, another = done.value["results"]
    agree, x = min(done.value["agree"]), done.value["x"]
    dropped = float(np.mean(first == 0))
    assert 0.4 < dropped < 0.6, f"{dropped:.0%} of the elements are dropped, not half."
    ratio = first[first != 0] / x[first != 0]
    assert np.allclose(ratio, ratio[0]), "what is not dropped must stay in its place, as it was or all scaled alike."
    assert agree == 1, f"output and gradient agree on {agree:.0%} of the elements: the mask is drawn anew."
    assert (first == again).all(), "the same seed gives two masks."
    assert ((first == 0) != (other == 0)).any(), "two seeds give the same mask: use the seed that is given."
    assert ((first == 0) != (another == 0)).any(), "the mask depends on one of the seed's two numbers only."
