"""Kinds that are hard to tell: by traces made by hand, then by small programs that try to mislead."""

from types import SimpleNamespace

import pytest

from labsupport.peak.kinds import Kinds
from labsupport.peak.recording import Seen
from labsupport.peak.trace import Block, Span, Thread
from labsupport.showing.apart import take_apart
from labsupport.showing.running import run

FOREVER = 10**9


def made(start, end, span, **more):
    """An eager Block whose line ends at once."""
    block = Block(start, 1, 0, "Mul", more.pop("shape", "[8]"), "float32", "python", True, span, 1, start + 1, end)
    for name, value in more.items():
        setattr(block, name, value)
    return block


def told(*blocks, spans=()):
    """[(start, end, kind)] of all that the blocks come to."""
    seen = {"optimizers": set(), "learnt": set(), "polls": [], "cut": set(), "failed": False, "graph": {}, "window": ""}
    tell = Kinds([Thread("python", spans=list(spans))], list(blocks), SimpleNamespace(**seen))
    return [(one.start, one.end, kind) for block in blocks for one, kind in tell.over_time(block)]


def test_an_activation_that_outlives_its_way_back_is_held_by_the_script_then():
    tape, back, other = Span("tape 3", 0, 20), Span("backward 0 3", 30, 40), Span("backward 1 4", 60, 70)
    spans = [tape, back, other]
    assert told(made(5, 35, tape), spans=spans) == [(5, 35, "activations")]
    assert told(made(5, FOREVER, tape), spans=spans) == [(5, 40, "activations"), (40, FOREVER, "held by the script")]


def test_what_waits_for_the_way_back_of_another_tape_is_no_activation_of_this_one():
    tape, other = Span("tape 3", 0, 20), Span("backward 1 4", 60, 70)
    assert told(made(5, 80, Span("EagerLocalExecute: Mul", 5, 6)), spans=[tape, other]) == [
        (5, 80, "held by the script")
    ]
    assert told(made(5, 80, tape), spans=[tape, other]) == [(5, 80, "activations")], "its own may still come"


def test_a_way_back_within_another_tape_is_recorded_there():
    outer = Span("tape 0", 0, 50)
    inner_back = Span("backward 0 1", 20, 30, outer)
    spans = [outer, inner_back, Span("backward 1 0", 60, 70)]
    assert told(made(25, 65, inner_back), spans=spans) == [(25, 65, "activations")]
    assert told(made(25, 28, inner_back), spans=spans) == [(25, 28, "working memory")]
    within_its_own = Span("backward 0 0", 20, 30, outer)
    assert told(made(25, 65, within_its_own), spans=[outer, within_its_own]) == [(25, 65, "gradients")]


def test_a_new_value_is_working_memory_until_the_variable_has_it_and_the_old_one_is_held_then():
    variable = Seen("w", "Keras", True, (8,), 1, key=5)
    old, new = made(0, 50, None, variable=variable, seen=1), made(40, FOREVER, None, variable=variable, seen=90)
    old.line_end, new.line_end = 2, 60
    assert told(old, new) == [(0, 50, "weights"), (40, 50, "working memory"), (50, FOREVER, "weights")]
    kept = made(0, FOREVER, None, variable=variable, seen=1)  # somebody still holds the old value
    assert told(kept, new) == [
        (0, 60, "weights"),
        (60, FOREVER, "held by the script"),
        (40, 60, "working memory"),
        (60, FOREVER, "weights"),
    ]


# --- programs: a probe of 64 MiB makes the moment the worst that is asked about


def probe():
    import tensorflow as tf

    return tf.zeros((64, 512, 512))


KEPT = []


def outputs_kept_in_a_global_list():
    import tensorflow as tf

    w = tf.Variable(tf.random.normal((512, 1024)))
    x = tf.random.normal((1024, 512))
    for _ in range(4):
        with tf.GradientTape() as tape:
            out = tf.nn.relu(x @ w)
            loss = tf.reduce_sum(out)
        w.assign_sub(tape.gradient(loss, w))
        KEPT.append(out)
    del tape, loss, out
    probe()


def gradient_of_a_gradient():
    import tensorflow as tf

    w = tf.Variable(tf.random.normal((1024, 2048)))
    x = tf.random.normal((512, 1024))
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            inner.watch(x)
            h = tf.tanh(x @ w)
            total = tf.reduce_sum(h * h)
        gx = inner.gradient(total, x)
        penalty = tf.reduce_sum(gx**2)
        probe()
    outer.gradient(penalty, w)


def snapshots_of_weights():
    import tensorflow as tf

    w = tf.Variable(tf.random.normal((1024, 1024)))
    snapshots = []
    for _ in range(4):
        snapshots.append(w.read_value())
        w.assign_sub(tf.ones((1024, 1024)))
    probe()
    return len(snapshots)


def momentum_over_an_embedding():
    import keras
    import tensorflow as tf

    layer = keras.layers.Embedding(16384, 256)
    optimizer = keras.optimizers.SGD(momentum=0.9)
    ids = tf.zeros((64, 64), "int32")
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids) ** 2)
        optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)


# Program: {(kind, shape): how many tensors there are at its worst moment}; chunks can be larger than they.
NASTY = {
    outputs_kept_in_a_global_list: {("held by the script", "[1024,1024]"): 4, ("activations", "[1024,1024]"): 0},
    gradient_of_a_gradient: {("gradients", "[512,2048]"): 0, ("weights", "[1024,2048]"): 1},
    snapshots_of_weights: {("held by the script", "[1024,1024]"): 4, ("weights", "[1024,1024]"): 1},
    momentum_over_an_embedding: {("optimizer slots", "[16384,256]"): 1, ("weights", "[16384,256]"): 1},
}


@pytest.mark.parametrize("program", NASTY, ids=lambda program: program.__name__)
def test_programs_that_try_to_mislead(program):
    result = run(program, quiet=True)
    assert result.ok, result.error
    (found,) = take_apart(result).arms
    assert found.named >= 0.97
    for (kind, shape), number in NASTY[program].items():
        there = sum(row.number for row in found.rows if (row.kind, row.shape) == (kind, shape))
        assert there == number, (kind, shape, [(row.kind, row.shape, row.number) for row in found.rows])
