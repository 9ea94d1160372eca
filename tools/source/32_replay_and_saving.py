# %% [markdown]
# # 32 · Replay buffers and checkpoints
#
# **Symptom:** *my DQN is killed after some hours, its memory grows with every step it plays*; *"MemoryError: Unable to
# allocate 220. KiB"* at `memory.append(…)`; or the training fits, and *the process dies when it saves*.
#
# **Afterwards you can** count how often a replay buffer holds each frame, keep it once and give the network the same
# batches, and say which way of saving a model or a buffer holds a second one in memory.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 30 to work through |
# | Memory | below 2 GiB, and 500 MiB of disk for some seconds |
# | Claims judged | C54, C55 |
#
# Every run below happens in a process of its own under a memory budget. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes a buffer four times as large
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import contextlib
import ctypes
import functools
import gc
import pickle
import sys
import tempfile
import threading
import tracemalloc
import zlib
from collections import deque

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import labsupport as lab
from labsupport.graders import replay_and_saving as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

TRANSITIONS = lab.choose(SCALE, quick=1000, full=4000)
OUTSIDE = lab.choose(SCALE, quick="160 MiB", full="480 MiB")
PLAYED = TRANSITIONS * 5 // 4  # so that old transitions make room for new ones
SIDE, STACK, EPISODE = 84, 4, 19  # pixels, frames, steps
BATCH, EVERY = 32, 16

# %% [markdown]
# A game that draws its own frames: a ball falls, a paddle moves at random. One byte a pixel, as emulators give them.


# %%
def game(steps):
    """(frame, (action, reward, done)) of each step; of an episode's first frame (frame, None)."""
    random, height = np.random.default_rng(0), 0
    for _ in range(steps):
        if height == 0:
            ball, paddle = random.integers(SIDE - 12, size=2)
            yield drawn(ball, height, paddle), None
        action, height = int(random.integers(3)), height + 4
        paddle = min(max(paddle + 4 * (action - 1), 0), SIDE - 12)
        done = height == 4 * EPISODE
        reward = float(done and 0 <= ball - paddle < 12)
        yield drawn(ball, height, paddle), (action, reward, done)
        height = 0 if done else height


def drawn(ball, height, paddle):
    frame = np.zeros((SIDE, SIDE), np.uint8)
    frame[height : height + 4, ball : ball + 4] = 255
    frame[-4:, paddle : paddle + 12] = 128
    return frame


# %% [markdown]
# ## Predict
#
# One frame shows where the ball is, not where it goes, so the *state* is a stack of the last four. A *transition* is a
# state, an action, its reward, and the next state. The buffer keeps the newest transitions, from which batches are drawn.

# %%
question = (
    f"Peak memory of the process that fills a buffer of {TRANSITIONS} transitions and trains?"
)
my_guess = lab.guess(question, GUESS_MIB)

# %% [markdown]
# By hand. In the usual loop the next state of one step *is* the state of the step after it, the same array. So a buffer holds
# one stack a transition, of float64 once it was divided by 255.

# %%
frames = lab.tensor_mib((TRANSITIONS, SIDE, SIDE), "uint8")
stacks = lab.tensor_mib((TRANSITIONS, STACK, SIDE, SIDE), "float64")
print(f"one frame a transition, in bytes: {frames:.2f} MiB")
print(
    f"one stack of {STACK} float64 frames each: {stacks:.0f} MiB, {stacks / frames:.0f} times that"
)


# %% [markdown]
# The network is small. One of its steps is predicted from its graph:


# %%
def q_network():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Flatten(), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((STACK, SIDE, SIDE)), *layers])
    model.compile("adam", "mse")
    return model


one_step = lab.predict(q_network, BATCH)
one_step

# %% [markdown]
# ## Failure
#
# The buffer as it is published: a `deque` of transitions.


# %%
def as_input(states):
    """What the network sees: float32, between 0 and 1."""
    states = np.array(states)
    return (states / 255.0 if states.dtype == np.uint8 else states).astype("float32")


class Stacks:
    """The newest transitions, each with its states."""

    def __init__(self, transitions):
        self.kept = deque(maxlen=transitions)

    def add(self, frame, step):
        if step is None:
            self.last = deque([frame] * (STACK - 1), maxlen=STACK)
        self.last.append(frame)
        following = self.stacked()
        if step:
            self.kept.append((self.state, following, *step))
        self.state = following

    def stacked(self):
        return np.stack(self.last) / 255.0

    def sample(self, numbers):
        states, following, *rest = zip(*(self.kept[number] for number in numbers))
        return as_input(states), as_input(following), *map(np.array, rest)


def learned(model, states, following, actions, rewards, done):
    """The loss of one step of deep Q-learning."""
    targets = model(states).numpy()
    best = model(following).numpy().max(axis=1)
    targets[np.arange(len(actions)), actions] = rewards + 0.9 * best * ~done
    return float(model.train_on_batch(states, targets))


def played(memory, transitions):
    """(losses, a checksum of all batches) of a step of learning after every EVERY of the game."""
    model, random, losses, checksum = q_network(), np.random.default_rng(1), [], 0
    for number, frame_and_step in enumerate(game(transitions), 1):
        memory.add(*frame_and_step)
        if number % EVERY == 0:
            batch = memory.sample(random.integers(len(memory.kept), size=BATCH))
            losses.append(learned(model, *batch))
            for part in batch:
                checksum = zlib.crc32(np.ascontiguousarray(part), checksum)
    return losses, checksum


label = f"float64 stacks, {OUTSIDE} outside"
failure = lab.run(played, Stacks(TRANSITIONS), PLAYED, outside=OUTSIDE, label=label)
if sys.platform == "linux":  # elsewhere a process cannot be limited that sharply
    lab.expect_oom(failure)

# %% [markdown]
# It trained for a while, and looked like a leak. It is none: the buffer was not yet full. The line that is named asked for
# the memory that was no longer there; it need not be the line that holds it. What it would have needed:

# %%
unbounded = lab.run(played, Stacks(TRANSITIONS), PLAYED, label="float64 stacks, no tight limit")
lab.expect_finished(unbounded)

# %% [markdown]
# ## Fix
#
# Keep each frame once, as the byte it was, in an array that is made at the beginning and written in circles. A transition is
# the place of its frame. The stack is cut when it is sampled, and ends where its episode begins: `reset()` has no frames
# before it.


# %%
class Ring:
    """Each frame once; a transition is the places of its frame and of its episode's first."""

    def __init__(self, transitions, dtype=np.uint8):
        self.kept, self.place = deque(maxlen=transitions), -1
        ends = -(-transitions // EPISODE)  # an episode has one more frame than transitions
        self.frames = np.zeros((transitions + ends + STACK, SIDE, SIDE), dtype)

    def add(self, frame, step):
        if step:
            self.kept.append((self.place, self.first, *step))
        self.place += 1
        if step is None:
            self.first = self.place
        self.frames[self.place % len(self.frames)] = frame

    def cut(self, places, firsts):
        """The stacks that end at these places, as the network sees them."""
        stack = np.array(places)[:, np.newaxis] + np.arange(1 - STACK, 1)
        stack = np.maximum(stack, np.array(firsts)[:, np.newaxis])
        return as_input(self.frames[stack % len(self.frames)])

    def sample(self, numbers):
        places, firsts, *rest = map(np.array, zip(*(self.kept[number] for number in numbers)))
        return self.cut(places, firsts), self.cut(places + 1, firsts), *rest


fix = lab.run(played, Ring(TRANSITIONS), PLAYED, outside=OUTSIDE, label="a ring of bytes")
lab.expect_finished(fix)

# %% [markdown]
# ## Side by side
#
# Process memory, since the buffer is NumPy's.

# %%
lab.compare(unbounded, failure, fix, story="process")

# %%
print(my_guess.against(unbounded.process_peak_mib))
(losses, batches), (losses_of_ring, batches_of_ring) = unbounded.value, fix.value
saved_mib = unbounded.process_peak_mib - fix.process_peak_mib
assert batches == batches_of_ring, "the same seed draws the same batches, to the last bit"
assert np.allclose(losses, losses_of_ring, rtol=1e-4)
lab.note(
    f"All {len(losses)} batches were the same to the last bit, and the last loss is "
    f"{losses[-1]:.5f} and {losses_of_ring[-1]:.5f}. The process takes more than its arrays, so "
    "that the ring saves another amount than predicted."
)
lab.predicted_vs_measured(
    one_step=(one_step.total_mib, fix.peak_mib), ring_saves=(stacks - frames, saved_mib)
)

# %% [markdown]
# ## Explain
#
# The fix changed two things, bytes in place of float64 and frames in place of stacks. What does each do alone? And two
# arrays, one for the states and one for the next states, as many buffers have them? `tracemalloc` counts what Python and
# NumPy ask for, to the byte; beside it the *pages* that the process has got for itself, before the first frame.


# %%
class Bytes(Stacks):
    def stacked(self):
        return np.stack(self.last)


class TwoArrays(Stacks):
    def __init__(self, transitions):
        super().__init__(transitions)
        # float64, if nothing else is said
        self.both = np.zeros((2, transitions, STACK, SIDE, SIDE))

    def add(self, frame, step):
        super().add(frame, step)
        if step:
            state, following, *step = self.kept.pop()
            self.both[:, len(self.kept)] = state, following
            self.kept.append(step)


def private():
    """MiB of pages that the process has for itself; NaN where the system does not tell."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # of glibc: give back what was freed
        ctypes.CDLL(None).malloc_trim(0)
    pages = lab.reading().private_mib
    return np.nan if pages is None else pages


asked = lambda: np.array(tracemalloc.get_traced_memory()) / 2**20  # (now, at most)


def ways_to_keep(episodes):
    tracemalloc.start()
    rows = {}
    for name, kind in WAYS.items():
        with lab.phase(name):
            level, pages = asked()[0], private()
            memory = kind(episodes * EPISODE)
            row = {"asked for at first": asked()[0] - level, "pages at first": private() - pages}
            for frame_and_step in game(episodes * (EPISODE + 1)):
                memory.add(*frame_and_step)
            row["full"] = full = asked()[0] - level
            tracemalloc.reset_peak()
            with tempfile.TemporaryFile() as file:
                pickle.dump(vars(memory), file, protocol=4)
            row["more while pickled"] = asked()[1] - full - level
            rows[name] = row
            del memory
    return rows


FEW = 16
WAYS = {
    "two arrays, float64": TwoArrays,
    "stacks, float64": Stacks,
    "ring, float64": functools.partial(Ring, dtype=np.float64),
    "stacks, bytes": Bytes,
    "ring, bytes": Ring,
}
ways = pd.DataFrame(lab.measure(ways_to_keep, FEW, label="ways to keep").value).T
few_frames = lab.tensor_mib((FEW * EPISODE, SIDE, SIDE), "uint8")
axes = (ways["full"] / few_frames).plot.barh(xlabel="times the frames' bytes")
axes.invert_yaxis()
plt.show()
ways.assign(times=ways["full"] / few_frames).round(1) + 0.0  # no "-0.0"

# %%
times, two = ways["full"] / few_frames, ways.loc["two arrays, float64"]
lab.note(
    f"Bytes alone leave {times['stacks, bytes']:.1f} times the frames, each in {STACK} "
    f"stacks. A ring alone leaves {times['ring, float64']:.1f}, a float64 for each byte. "
    f"Both together: {times['ring, bytes']:.2f}. Two arrays have "
    f"{times['two arrays, float64']:.0f}, since they copy what the deque only refers to."
    "\n\n**np.zeros promises, it does not take**, where an array is large: two arrays asked for "
    f"{two['asked for at first']:.0f} MiB at first, and had {two['pages at first']:.1f} MiB of "
    f"pages. (The ring of bytes, the smallest, asked for "
    f"{ways.loc['ring, bytes', 'asked for at first']:.1f} and had "
    f"{ways.loc['ring, bytes', 'pages at first']:.1f}.) The system finds a page when it is first "
    "written. So where nothing limits what may be promised, a buffer that does not fit starts "
    "without a word, and dies when it is filled that far."
)

# %% [markdown]
# ### A checkpoint
#
# The column "more while pickled" is a checkpoint of the buffer. `pickle` with protocol 4, the default up to Python
# 3.13, makes bytes of each array and remembers all of them until it is done. With `protocol=5` (not in the table)
# arrays are not copied.
#
# And the model? It is said that saving one needs no memory worth speaking of. Here is one of equal layers, which has
# trained a step, so that Adam has two slots for each weight. `zipped=False` writes the same files as `.keras`, into a folder.
# The second model is small but for a table of word vectors, which it gets as its initializer's constant, or set as a weight.


# %%
UNITS, LAYERS = 1024, lab.choose(SCALE, quick=12, full=24)
TABLE = (10_000, 100)
weights, table = LAYERS * lab.tensor_mib((UNITS, UNITS)), lab.tensor_mib(TABLE)


def trained():
    dense = [keras.layers.Dense(UNITS, use_bias=False) for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((UNITS,)), *dense])
    model.compile("adam", "mse")
    model.train_on_batch(np.ones((1, UNITS)), np.ones((1, UNITS)))
    return model


def with_vectors(vectors, initializer):
    layers = keras.layers
    embedding = layers.Embedding(*TABLE, embeddings_initializer=initializer)
    mean = layers.GlobalAveragePooling1D()
    model = keras.Sequential([keras.Input((16,), dtype="int32"), embedding, mean])
    embedding.set_weights([vectors])
    return model


def most_while(save):
    """MiB of pages that save(folder) adds at its worst moment: a thread looks on."""
    before, seen, done = private(), [0.0], threading.Event()

    def look():
        while not done.wait(0.001):
            seen.append(lab.reading().private_mib or np.nan)

    watcher = threading.Thread(target=look)
    with tempfile.TemporaryDirectory() as folder:
        watcher.start()
        try:
            save(folder)
        finally:
            done.set()
            watcher.join()
    return max(seen) - before


def ways_to_save():
    vectors, model = np.random.default_rng(0).random(TABLE, np.float32), trained()
    constant = with_vectors(vectors, keras.initializers.Constant(vectors))
    set_later = with_vectors(vectors, "zeros")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    ways = {
        ".weights.h5": lambda to: model.save_weights(f"{to}/model.weights.h5"),
        ".keras": lambda to: model.save(f"{to}/model.keras"),
        "zipped=False": lambda to: model.save(f"{to}/model", zipped=False),
        ".h5, legacy": lambda to: model.save(f"{to}/model.h5"),
        "SavedModel": lambda to: model.export(to, verbose=False),
        "tf.train.Checkpoint": lambda to: checkpoint.write(f"{to}/model"),
        "np.savez(get_weights())": lambda to: np.savez(f"{to}/model", *model.get_weights()),
        "vectors as a constant": lambda to: constant.save(f"{to}/model.keras"),
        "vectors set as a weight": lambda to: set_later.save(f"{to}/model.keras"),
    }
    rows = {}
    for name, way in ways.items():
        with lab.phase(name):
            rows[name] = most_while(way)
    return rows


saving = pd.Series(lab.measure(ways_to_save, label="ways to save").value)
own = pd.Series([table if "vectors" in name else weights for name in saving.index], saving.index)
axes = (saving / own).plot.barh(xlabel="times the weights, at most while saving")
axes.invert_yaxis()
plt.show()
pd.DataFrame({"weights": own, "most": saving, "times": saving / own}).round(2)

# %%
by_file = saving / own
largest = lab.tensor_mib((UNITS, UNITS))
lab.note(
    "`.weights.h5` is written layer by layer, and holds "
    f"{saving['.weights.h5'] / largest:.1f} times one of them. The older `.h5` does so with "
    "the weights, and collects all slots before it writes the first: "
    f"{by_file['.h5, legacy']:.1f} times the weights. A SavedModel and a checkpoint have "
    "buffers of TensorFlow's own, and a SavedModel has no slots to save. `.keras` is a zip "
    "file. Where it finds memory free, Keras "
    "writes the whole HDF5 file into memory first, weights and slots, and zips that: "
    f"{by_file['.keras']:.1f} times the weights, where the same into a folder took "
    f"{by_file['zipped=False']:.1f}. An initializer's constant becomes part of the model's "
    "configuration, a Python object and some twenty characters of JSON for each number: "
    f"{by_file['vectors as a constant']:.0f} times its bytes, where set as a weight it took "
    f"{by_file['vectors set as a weight']:.1f}: the file once, and its only layer about twice "
    "more while that is written."
)

# %% [markdown]
# What Keras calls free memory is the machine's (`psutil`): it knows nothing of a container's limit, so a `.keras` file may
# end a process in there that would have fitted by another way. `ModelCheckpoint` with a path that ends in `.keras` saves in
# this way, after each epoch unless told otherwise. [Lab 27](27_what_a_process_keeps.ipynb) loads what was saved.
#
# **On a GPU** it has not been measured here. Buffers and files are in the host's memory there, too; a step gets the frames
# of its batch alone.
#
# **When it flips:** the buffer of the Atari papers, predicted. With no stack to cut, or bytes from the start, how much is
# left to save?


# %%
def buffers(thousand_transitions=1000, side=84, stack=4):
    ring = lab.tensor_mib((1000 * thousand_transitions, side, side), "uint8") / 1024
    print(
        f"stacks of float64 {8 * stack * ring:,.1f} GiB, in two arrays {16 * stack * ring:,.1f} GiB"
    )
    print(f"stacks of bytes {stack * ring:,.1f} GiB, a ring of bytes {ring:,.1f} GiB (predicted)")


lab.explore(buffers, thousand_transitions=(1, 2000), side=(32, 256, 4), stack=(1, 8))

# %% [markdown]
# ## Verdict

# %%
lab.verdict(
    "C55",
    "partly",
    frames=few_frames,
    float_stacks=ways["full"]["stacks, float64"],
    byte_stacks=ways["full"]["stacks, bytes"],
    float_ring=ways["full"]["ring, float64"],
    ring=ways["full"]["ring, bytes"],
)

# %%
lab.verdict(
    "C54",
    "partly",
    weights=weights,
    weights_h5=saving[".weights.h5"],
    keras_zip=saving[".keras"],
    legacy_h5=saving[".h5, legacy"],
    saved_model=saving["SavedModel"],
    checkpoint=saving["tf.train.Checkpoint"],
    table=table,
    constant=saving["vectors as a constant"],
)

# %% [markdown]
# ## Exercises
#
# **1.** An agent's deque shall stay as it is. Write `stored(last)`, which gets the deque of the last four frames and returns
# what is kept as a state, and `seen(state)`, which gives of that what the network sees. A frame shall be in memory once, in
# bytes, and gone when the last transition with it is.


# %%
def stored(last):
    # BEGIN SOLUTION
    return tuple(last)  # four references
    # END SOLUTION
    return np.stack(last) / 255.0


def seen(state):
    # BEGIN SOLUTION
    return (np.stack(state) / 255.0).astype("float32")
    # END SOLUTION
    return state.astype("float32")


# %%
check.remembered(stored, seen)


# %% tags=["right"]
class LazyFrames:
    def __init__(self, frames):
        self.frames = list(frames)

    def __array__(self, dtype=None, copy=None):
        return np.array(self.frames, dtype)


stored = LazyFrames


def seen(state):
    return np.asarray(state, "float32") / np.float32(255)


# %% tags=["wrong"]
# says: another stack
def stored(last):
    return last


def seen(state):
    return (np.stack(state) / 255.0).astype("float32")


# %% tags=["wrong"]
# says: times the bytes of the frames
def stored(last):
    return np.stack(last)


def seen(state):
    return (state / 255.0).astype("float32")


# %% tags=["wrong"]
# says: when its states have been seen
class Cached:
    def __init__(self, frames):
        self.frames, self.stack = tuple(frames), None


stored = Cached


def seen(state):
    if state.stack is None:
        state.stack = (np.stack(state.frames) / 255.0).astype("float32")
    return state.stack


# %% tags=["wrong"]
# says: another stack
def stored(last):
    return last[-1]


def seen(state):
    return np.stack([state] * STACK).astype("float32") / np.float32(255)


# %% [markdown]
# **2.** A training shall be able to go on tomorrow. `saved(model, memory, folder)` writes what is needed for that of a
# compiled model and a `Ring`. `restored(model, memory, folder)` gets both newly made, the optimizer built, and brings
# them to where the others were. Neither the frames nor the weights and slots may be in memory twice while they are saved.


# %%
def saved(model, memory, folder):
    # BEGIN SOLUTION
    rest = dict(vars(memory))
    np.save(f"{folder}/frames.npy", rest.pop("frames"))
    with open(f"{folder}/rest", "wb") as file:
        pickle.dump(rest, file)
    model.save_weights(f"{folder}/model.weights.h5")  # and the optimizer's slots
    # END SOLUTION


def restored(model, memory, folder):
    # BEGIN SOLUTION
    model.load_weights(f"{folder}/model.weights.h5")
    with open(f"{folder}/rest", "rb") as file:
        vars(memory).update(pickle.load(file), frames=np.load(f"{folder}/frames.npy"))
    # END SOLUTION


# %%
check.resumed(saved, restored, Ring)


# %% tags=["right"]
def saved(model, memory, folder):
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(f"{folder}/model")
    with open(f"{folder}/memory", "wb") as file:
        pickle.dump(vars(memory), file, protocol=5)


def restored(model, memory, folder):
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).read(f"{folder}/model")
    with open(f"{folder}/memory", "rb") as file:
        vars(memory).update(pickle.load(file))


# %% tags=["wrong"]
# says: held at once
def saved(model, memory, folder):
    model.save(f"{folder}/model.keras")
    np.save(f"{folder}/frames.npy", memory.frames)
    with open(f"{folder}/rest", "wb") as file:
        pickle.dump((memory.kept, memory.place, memory.first), file)


def restored(model, memory, folder):
    model.load_weights(f"{folder}/model.keras")
    memory.frames = np.load(f"{folder}/frames.npy")
    with open(f"{folder}/rest", "rb") as file:
        memory.kept, memory.place, memory.first = pickle.load(file)


# %% tags=["wrong"]
# says: held at once
def saved(model, memory, folder):
    model.save_weights(f"{folder}/model.weights.h5")
    with open(f"{folder}/memory", "wb") as file:
        pickle.dump(vars(memory), file, protocol=4)


def restored(model, memory, folder):
    model.load_weights(f"{folder}/model.weights.h5")
    with open(f"{folder}/memory", "rb") as file:
        vars(memory).update(pickle.load(file))


# %% tags=["wrong"]
# says: its slots
def saved(model, memory, folder):
    for number, weight in enumerate(model.weights):
        np.save(f"{folder}/{number}.npy", weight.numpy())
    with open(f"{folder}/memory", "wb") as file:
        pickle.dump(vars(memory), file, protocol=5)


def restored(model, memory, folder):
    for number, weight in enumerate(model.weights):
        weight.assign(np.load(f"{folder}/{number}.npy"))
    with open(f"{folder}/memory", "rb") as file:
        vars(memory).update(pickle.load(file))


# %% tags=["wrong"]
# says: other batches
def saved(model, memory, folder):
    model.save_weights(f"{folder}/model.weights.h5")
    np.save(f"{folder}/frames.npy", memory.frames)
    with open(f"{folder}/kept", "wb") as file:
        pickle.dump(memory.kept, file)


def restored(model, memory, folder):
    model.load_weights(f"{folder}/model.weights.h5")
    memory.frames = np.load(f"{folder}/frames.npy")
    with open(f"{folder}/kept", "rb") as file:
        memory.kept = pickle.load(file)
    memory.place = memory.first = -1
