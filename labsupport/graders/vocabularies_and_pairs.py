"""Graders of the lab on vocabularies, pairs, large tables and ragged batches."""

import numpy as np

from labsupport.ground.budget import MIB
from labsupport.ground.meter import phase
from labsupport.lesson.exercises import exercise, try_out, untouched

_ROWS, _WIDTH, _WORDS, _EACH = 512, 16, 4096, 8  # one row in eight has a label
_LOGITS = _ROWS * _WORDS * 4 / MIB


def _right_loss(rows, labels, kernel):
    """[the mean loss over the rows that have a label, its gradients by rows, kernel and bias], with a bias of zero."""
    some = np.flatnonzero(labels >= 0)
    shares = np.exp(rows[some].astype("float64") @ kernel)
    shares /= shares.sum(1, keepdims=True)
    at = np.arange(len(some)), labels[some]
    loss = -np.log(shares[at]).mean()
    shares[at] -= 1
    shares /= len(some)
    of_rows = np.zeros(rows.shape)
    of_rows[some] = shares @ kernel.T
    return [loss, of_rows, rows[some].T @ shares, shares.sum(0)]


def _given_loss(answer, rows, labels, kernel):
    """[the loss, its gradients by rows, kernel and bias] of the answer, or a word why there are none."""
    import tensorflow as tf

    sources = [tf.Variable(part) for part in (rows, kernel, np.zeros(_WORDS, "float32"))]
    with phase("step"), tf.GradientTape() as tape:
        loss = answer(sources[0].read_value(), tf.constant(labels), *sources[1:])
        if untouched(loss):
            return "the function returns nothing yet: return the mean loss."
        if not tf.is_tensor(loss) or loss.shape != ():
            return "the mean loss must be one number, as a tensor."
        gradients = tape.gradient(loss, sources)
    if (labels >= 0).any() and None in gradients:
        return "the loss has no gradient: use TensorFlow's operations from the rows to the mean."
    zeros = [np.zeros(source.shape) for source in sources]
    return [loss.numpy(), *(z if g is None else tf.convert_to_tensor(g).numpy() for z, g in zip(zeros, gradients))]


def _masked(answer):
    """In the arm: the right parts, those given, and what of the three other cases is wrong; or a word."""
    random = np.random.default_rng(0)
    rows, kernel = (random.normal(size=size).astype("float32") for size in ((_ROWS, _WIDTH), (_WIDTH, _WORDS)))
    labels = np.full(_ROWS, -1, "int32")
    labels[3::_EACH] = random.integers(0, _WORDS, _ROWS // _EACH)
    labels[[3, 11]] = 0  # a word like any other
    anything = np.where(labels[:, None] < 0, np.float32(np.nan), rows)
    given = []
    for case in ((rows, labels), (anything, labels), (rows, np.full_like(labels, -1))):
        given.append(_given_loss(answer, *case, kernel))
        if isinstance(given[-1], str):
            return given[-1]
    return _right_loss(rows, labels, kernel), *given


def _apart(given, right):
    return max(float(abs(g - r).max() / (abs(r).max() or 1)) for g, r in zip(given, right))


@exercise(
    1,
    "The logits of a row depend on no other row. Which rows are wanted?",
    "tf.boolean_mask(rows, labels >= 0) takes them out; word 0 is a word. The mean of no numbers is no number.",
)
def masked_loss(answer):
    """answer(rows, labels, kernel, bias) is the mean loss over rows with a label, without logits for the others."""
    done = try_out(_masked, answer, label="your answer to 1")
    right, given, anything, none = done.value
    peak = done.phases[0].rise_mib
    assert abs(given[0] * _EACH / right[0] - 1) > 0.01, (
        "the sum is divided by the number of all rows: the mean is asked for over the rows that have a label."
    )
    assert _apart(given, right) < 0.01, (
        f"loss or gradients are off by {_apart(given, right):.0%}: is every label from 0 on in, and no other?"
    )
    assert peak < _LOGITS, (
        f"the peak is {peak:.1f} MiB, and the logits of all rows have {_LOGITS:.0f}: they are made for all rows."
    )
    assert _apart(anything, right) < 0.01, "what stands in a row without a label changes the result: it took part."
    assert _apart(none, [np.zeros(1)] * 4) == 0, (
        f"where no row has a label the loss is {none[0]}, and 0 is asked for, with gradients of zero."
    )


_TABLE, _LONGEST, _SENTENCES = (131072, 16), 3000, 64
_TABLE_MIB, _PADDED_MIB = (rows * _TABLE[1] * 4 / MIB for rows in (_TABLE[0], _SENTENCES * _LONGEST))


def _means(answer):
    """In the arm: (means, gradient of the table) as they should be and as given, which sentences are empty, whether the gradient is sparse; or a word."""
    import tensorflow as tf

    random = np.random.default_rng(0)
    lengths = random.integers(1, 20, _SENTENCES)
    lengths[[5, 20, -1]] = _LONGEST, 0, 0
    ids = random.integers(0, _TABLE[0], lengths.sum()).astype("int32")
    ids[::7] = 0
    values, upstream = random.normal(size=_TABLE).astype("float32"), random.normal(size=(_SENTENCES, _TABLE[1]))
    sentences, table = tf.RaggedTensor.from_row_lengths(ids, lengths), tf.Variable(values)
    tf.gather(table, [0])  # as in training: from now on the variable is copied whenever it is read as a whole
    with phase("step"), tf.GradientTape() as tape:
        given = answer(table, sentences)
        if untouched(given):
            return "the function returns nothing yet: return a row for each sentence."
        if not tf.is_tensor(given) or given.shape != upstream.shape:
            shape = getattr(given, "shape", type(given).__name__)
            return f"for {_SENTENCES} sentences it gives {shape}, and a tensor of {upstream.shape} is asked for."
        gradient = tape.gradient(given, table, tf.constant(upstream, tf.float32))
    if gradient is None:
        return "the means have no gradient by the table: use TensorFlow's operations all the way."
    shares = np.repeat(np.eye(_SENTENCES), lengths, axis=1) / np.maximum(lengths, 1)[:, None]
    right = np.zeros(_TABLE)
    np.add.at(right, ids, shares.T @ upstream)
    sparse = isinstance(gradient, tf.IndexedSlices)
    given = given.numpy(), tf.convert_to_tensor(gradient).numpy()
    return (shares @ values[ids], right), given, lengths == 0, sparse


@exercise(
    2,
    "sentences.values are all words in a row, and sentences.value_rowids() says whose they are.",
    "Look up the values, add up by tf.math.unsorted_segment_sum(rows, whose, how many), and divide by the lengths.",
    "A variable that was looked up by rows is copied when it is read as a whole, and tf.gather does that for a ragged tensor.",
)
def sentence_means(answer):
    """answer(table, sentences) gives the mean row of each sentence; nothing is padded or as large as the table."""
    done = try_out(_means, answer, label="your answer to 2")
    right, given, empty, sparse = done.value
    assert np.allclose(given[0][empty], 0), "a sentence without words gets zeros."
    for name, there, wanted in zip(("means", "gradient"), given, right):
        apart = float(abs(there - wanted).max())
        assert apart < 1e-3, f"the {name} are off by up to {apart:.2g}: a mean is over the words that are there."
    assert sparse, "the gradient is as large as the table: look the rows up in the variable itself."
    peak = done.phase("step").rise_mib
    assert peak < 0.5 * _TABLE_MIB, (
        f"the peak is {peak:.0f} MiB. The padded rows have {_PADDED_MIB:.0f}, the table has {_TABLE_MIB:.0f}: is something "
        "padded, or made for every row of the table?"
    )
