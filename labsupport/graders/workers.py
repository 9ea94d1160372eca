"""Graders of the lab on workers and their queues."""

import hashlib
import multiprocessing
import sys
import time
import tracemalloc
import weakref

from labsupport.ground.budget import MIB
from labsupport.lesson.exercises import exercise, try_out, untouched

_STEPS, _WORKERS, _SHAPE = 24, 3, (64, 512)  # of a mask, too: a batch is two arrays of this shape
_BATCH = 2 * 64 * 512 * 4 / MIB
_MOST = (3, 8)  # batches


def _counted(answer, most):
    """In the arm: (most batches alive at once in fit(), workers, length of the queue, batches in the order in which they came)."""
    import keras
    import numpy as np

    alive, highest, came = 0, 0, []

    def gone():
        nonlocal alive
        alive -= 1

    class Masks(keras.utils.PyDataset):
        def __len__(self):
            return _STEPS

        def __getitem__(self, index):
            nonlocal alive
            x = np.full(_SHAPE, index, np.float32)
            alive += 1
            weakref.finalize(x, gone)
            return x, np.zeros(_SHAPE, np.float32)

    class Noting(keras.Model):
        def train_step(self, data):
            return {"loss": keras.ops.sum(data[0]) / (_SHAPE[0] * _SHAPE[1])}

    def after(batch, logs):
        nonlocal highest
        time.sleep(0.2 if batch == 0 else 0.01)
        highest = max(highest, alive)
        came.append(round(float(logs["loss"]), 3))

    data = Masks(workers=_WORKERS)
    answer(data, (most + 0.4) * _BATCH)
    model = Noting()
    model.compile()
    look = keras.callbacks.LambdaCallback(on_train_batch_end=after)
    model.fit(data, shuffle=False, verbose=0, callbacks=[look])
    return highest, data.workers, data.max_queue_size, came


def _bounded(answer):
    """In the arm: what is counted for each bound."""
    return [_counted(answer, most) for most in _MOST]


@exercise(
    1,
    "Both arrays of a batch count. Which batches are there beside those in the queue?",
    "A batch is asked for before there is a place in the queue, and one is in the step: data.max_queue_size is two less "
    "than the batches that may be there.",
)
def bounded(answer):
    """answer(data, most_mib) sets the queue of a PyDataset, so that at most most_mib of batches are there, and no fewer than may."""
    done = try_out(_bounded, answer, label="your answer to 1")
    for most, (highest, workers, queue, came) in zip(_MOST, done.value):
        assert workers == _WORKERS, f"the data set has {workers} workers in place of {_WORKERS}: they are not to blame."
        assert queue is not None and queue > 0, f"max_queue_size={queue} means a queue without bound."
        assert highest <= most, f"{highest} batches were in memory, more than the {most} that may."
        assert highest == most, f"{highest} batches were in memory, and {most} may: more could wait."
        assert came == list(range(_STEPS)), "the batches that come are not those of the data set, in their order."


_TEXTS, _LONGEST = 40_000, 1_500


def _texts():
    """Texts of many lengths, not all of plain letters; one of them is long."""
    texts = [f"{number} naïve café " + "abcdefgh" * (number % 17) for number in range(_TEXTS)]
    texts[_TEXTS // 2] = "z" * _LONGEST
    return texts


def _digest(texts):
    """A digest of all texts, or the name of another type that one has."""
    found = hashlib.sha256()
    for index in range(_TEXTS):
        text = texts[index]
        if type(text) is not str:
            return type(text).__name__
        found.update(text.encode() + b"\0")
    return found.hexdigest()


def _written():
    """Bytes of pages that this process has written to and shares with no other; those of a mapped file, written or not, are none."""
    written = dirty = 0
    with open("/proc/self/smaps") as maps:  # a line at a time: to read it shall not write much itself
        for line in maps:
            if line.startswith("Private_Dirty:"):
                dirty = int(line.split()[1])
            elif line.startswith("Anonymous:"):
                written += min(dirty, int(line.split()[1]))
    return 1024 * written


def _in_workers(given):
    """[(digest, bytes that became its own)] of two forked processes that read all texts at the same time."""

    def worker(send):
        before = _written()
        digest = _digest(given)
        send.send((digest, _written() - before))

    fork, ends = multiprocessing.get_context("fork"), []
    for _ in range(2):
        receive, send = fork.Pipe(duplex=False)
        ends.append((fork.Process(target=worker, args=(send,), daemon=True), receive))
        ends[-1][0].start()
        send.close()
    return [receive.recv() for _, receive in ends]


def _packed(answer):
    """In the arm: (digest as it should be, MiB of the texts and of what the answer made of them, what the workers found)."""
    texts = _texts()
    right, size = _digest(texts), sum(len(text.encode()) for text in texts)
    tracemalloc.start()
    given = answer(texts)
    made = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    if untouched(given):
        return "the function returns nothing yet: return what p[i] can be asked of."
    return right, size / MIB, made / MIB, [(digest, own / MIB) for digest, own in _in_workers(given)]


@exercise(
    2,
    "Each Python object has a count of references, which reading changes. How few objects can hold all texts?",
    "One bytes object holds all texts, b''.join(…), and one array where each of them ends. Count bytes, not letters.",
)
def packed(answer):
    """answer(texts) gives an object whose texts forked workers read without copying it."""
    assert sys.platform == "linux", "what a worker shares is told on Linux alone: there is no figure here."
    right, size, made, found = try_out(_packed, answer, label="your answer to 2", timeout=60).value
    assert made < 2 * size, (
        f"it takes {made:.0f} MiB where the texts have {size:.1f}: does each take the longest's room?"
    )
    for digest, own in found:
        assert len(digest) == len(right), f"p[i] is {digest}, and a text, str, is asked for."
        assert digest == right, "p[i] is another text than texts[i], for some i."
        assert own < 0.3 * size, f"reading them, a worker made {own:.1f} MiB of its own, of {size:.1f} MiB of texts."
