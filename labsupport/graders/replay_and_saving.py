"""Graders of the lab on replay buffers and checkpoints."""

import gc
import os
import tempfile
import tracemalloc
from collections import deque

import numpy as np

from labsupport.ground.budget import MIB
from labsupport.lesson.exercises import exercise, try_out, untouched

_SIDE, _STACK, _EPISODE = 84, 4, 30
_KEPT, _PLAYED = 200, 300  # transitions: a third has made room for others at the end
# Of the frames' bytes: the objects around them take a few per cent, a float32 or a second stack of each four times as much.
_ONCE = 1.3


def _held():
    """MiB of arrays and Python objects that are alive, since tracemalloc.start()."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0] / MIB


def _frame(number):
    """A frame that no compression makes smaller."""
    return np.random.default_rng(number).integers(256, size=(_SIDE, _SIDE), dtype=np.uint8)


def _numbers(step):
    """The numbers of the frames in the stack after so many steps of an episode's begin."""
    begin = step // _EPISODE * _EPISODE
    return [max(number, begin) for number in range(step - _STACK + 1, step + 1)]


def _wrong_state(given, step):
    """A word why this is not what the network should see, or None."""
    given = np.asarray(given)
    if given.shape != (_STACK, _SIDE, _SIDE) or given.dtype != np.float32:
        return f"the network gets {given.dtype} of the shape {given.shape}, not float32 of {(_STACK, _SIDE, _SIDE)}."
    wanted = np.stack([_frame(number) for number in _numbers(step)]) / 255.0
    if not np.allclose(given, wanted, rtol=0, atol=1e-6):
        return (
            "what is seen is another stack than the one that was stored: the frames of its own moment, divided by 255."
        )
    return None


def _remembered(stored, seen):
    """In the arm: MiB that a buffer holds when it was filled, and when all of it was seen twice; or a word."""
    tracemalloc.start()
    start, buffer, last = _held(), deque(maxlen=_KEPT), deque(maxlen=_STACK)
    for step in range(_PLAYED):
        if step % _EPISODE == 0:
            last = deque([_frame(step)] * _STACK, maxlen=_STACK)
            state = None
        else:
            last.append(_frame(step))
        following = stored(last)
        if untouched(following):
            return "stored() returns nothing yet."
        buffer.append((state, following))
        state = following
    filled = _held() - start
    for _ in range(2):
        for step, (_, following) in enumerate(buffer, _PLAYED - _KEPT):
            given = seen(following)
            if untouched(given):
                return "seen() returns nothing yet."
            if word := _wrong_state(given, step):
                return word
        del given
    return filled, _held() - start


@exercise(
    1,
    "What is in four stacks can be one array, if each of them only refers to it. Does np.stack copy?",
    "A tuple holds references: tuple(last). What the network sees of it is made when it is asked for. (Gym calls this LazyFrames.)",
)
def remembered(stored, seen):
    """stored(last) is what a deque keeps as a state, seen(state) the float32 stack; each frame is in memory once."""
    done = try_out(_remembered, stored, seen, label="your answer to 1")
    frames = _KEPT * _SIDE**2 / MIB
    for size, when in zip(done.value, ("when the buffer is full", "when its states have been seen")):
        assert size < _ONCE * frames, (
            f"{when}, {size:.1f} MiB are held, {size / frames:.1f} times the bytes of the frames in it."
        )


_UNITS, _LAYERS, _FRAMES = 512, 8, 5600
_WEIGHTS = _LAYERS * _UNITS**2 * 4 / MIB
# MiB: np.savez writes in pieces of 16 MiB; weights and slots are 24 MiB, all frames 38.
_MOST = 20


def _model(seed):
    import keras

    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(_UNITS, use_bias=False) for _ in range(_LAYERS)]
    model = keras.Sequential([keras.Input((_UNITS,)), *hidden])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def _goes_on(model, memory, x):
    """What a further step makes of the weights, and what the memory then gives."""
    model.train_on_batch(x, x)
    memory.add(_frame(1), (2, 0.5, False))
    return model.get_weights(), memory.sample(np.arange(0, len(memory.kept), 50))


def _files(folder):
    """MiB of all files in a folder."""
    return sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(folder) for name in names) / MIB


def _resumed(saved, restored, ring):
    """In the arm: (MiB of arrays and Python objects at most while saving, MiB of the files); or a word."""
    x = np.random.default_rng(0).random((4, _UNITS), np.float32)
    model, memory = _model(0), ring(_FRAMES)
    for _ in range(2):
        model.train_on_batch(x, x)
    memory.frames[:] = np.random.default_rng(0).integers(256, size=memory.frames.shape, dtype=np.uint8)
    for number in range(_FRAMES // 4):
        memory.add(memory.frames[number], (number % 3, 0.0, False) if number % _EPISODE else None)
    with tempfile.TemporaryDirectory() as folder:
        tracemalloc.start()
        tracemalloc.reset_peak = tracemalloc.stop = lambda: None  # an answer that measures itself does not end that
        start = _held()
        saved(model, memory, folder)
        most, size = tracemalloc.get_traced_memory()[1] / MIB - start, _files(folder)
        other, again = _model(1), ring(_FRAMES)
        restored(other, again, folder)
        (weights, batch), (given, sampled) = _goes_on(model, memory, x), _goes_on(other, again, x)
    if not all(map(np.array_equal, batch, sampled)):
        return "the restored memory gives other batches, or does not go on where the saved one was."
    if not all(np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(weights, given)):
        return (
            "a step of the restored model changes other things: has it its weights, its slots and its number of steps?"
        )
    return most, size


@exercise(
    2,
    "Which ways in the tables hold no second copy, and which of them keep the slots? A memory is one large array and little else.",
    "model.save_weights(….weights.h5) writes weights and slots layer by layer, np.save(file, frames) the frames as they lie; "
    "pickle takes what is left of vars(memory).",
)
def resumed(saved, restored, ring):
    """saved(model, memory, folder) writes all that restored(model, memory, folder) needs to go on, without a copy of it in memory."""
    most, size = try_out(_resumed, saved, restored, ring, label="your answer to 2").value
    assert size > 0.8 * _WEIGHTS, (
        f"the files in the folder have {size:.1f} MiB: another process could not go on from them."
    )
    assert most < _MOST, (
        f"{most:.0f} MiB were held at once while saving: a copy of the frames, or of all weights and slots."
    )
