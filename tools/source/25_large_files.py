# %% [markdown]
# # 25 · Files larger than memory
#
# **Symptom:** *an HDF5 file of 40 GB fills the RAM as soon as `fit()` gets its dataset*; *"MemoryError: Unable to
# allocate"* in `model.fit(file["x"])`; *`np.load(mmap_mode="r")`, and `top` still shows the whole array*.
#
# **Afterwards you can** tell a file that is read whole from one that is read a batch at a time, and memory that a process
# has for itself from pages of a file, which it can lose without harm.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 30 to work through |
# | Memory | below 2 GiB, and 300 MiB of disk while the notebook is open |
# | Claims judged | C38, C39, C52 |
#
# Every run below happens in a process of its own under a memory budget. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes files four times as large
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import mmap
import sys
import time

import h5py
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import labsupport as lab
from labsupport.graders import large_files as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras
from keras import layers

ROWS = lab.choose(SCALE, quick=8192, full=32768)
PIXELS, BATCH, BLOCK, EPOCHS = 4096, 64, 512, 6
array = lab.tensor_mib((ROWS, PIXELS))
batch = lab.tensor_mib((BATCH, PIXELS))
OUTSIDE = f"{0.85 * array:.0f} MiB"

# %% [markdown]
# The same numbers in two files, written in blocks, so that they are never in memory together.

# %%
folder = lab.working_folder()  # removed when the notebook ends
H5, NPY = str(folder / "images.h5"), str(folder / "images.npy")
random = np.random.default_rng(0)
with h5py.File(H5, "w") as file:
    rows = file.create_dataset("x", (ROWS, PIXELS), "float32")
    file["y"] = random.random(ROWS, np.float32)
    mapped = np.lib.format.open_memmap(NPY, "w+", np.float32, (ROWS, PIXELS))
    for start in range(0, ROWS, BLOCK):
        block = random.random((BLOCK, PIXELS), np.float32)
        rows[start : start + BLOCK] = mapped[start : start + BLOCK] = block
    del mapped
print(f"{ROWS} rows of {PIXELS} numbers: {array:.0f} MiB in each file, {batch:.0f} MiB a batch")

# %% [markdown]
# ## Predict
#
# `h5py` opens a file without reading it: `file["x"]` is a name for numbers on disk, and `file["x"][0:64]` reads those
# rows. So what does the process hold at its worst moment when `fit()` is given `file["x"]`?

# %%
my_guess = lab.guess('Peak memory of the process in fit(file["x"], file["y"])?', GUESS_MIB)

# %% [markdown]
# `fit()` makes a NumPy array of what it gets, and a tensor of the array. A tensor must not change, so NumPy makes a copy
# of its own, and TensorFlow copies that. Three at the worst moment: array, copy, tensor.

# %%
predicted = 3 * array
print(f"3 × {array:.0f} MiB = {predicted:.0f} MiB")

# %% [markdown]
# ## Failure
#
# The published way. Beside its tensors the process may add less than one array: the file is larger than memory.


# %%
def one_layer():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([layers.Input((PIXELS,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-5), "mse")
    return model


def trained(*data):
    """Losses of the epochs, and the most of each kind of memory after any batch, in MiB."""
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(lab.reading())
    )
    history = one_layer().fit(
        *data, batch_size=BATCH, epochs=EPOCHS, shuffle=False, callbacks=[look], verbose=0
    )
    return {"losses": history.history["loss"], **pd.DataFrame(seen).astype(float).max()}


def handed_over(path):
    with h5py.File(path) as file:
        return trained(file["x"], file["y"])


failure = lab.run(handed_over, H5, outside=OUTSIDE, label='fit(file["x"])')
if sys.platform == "linux":  # elsewhere a process cannot be limited that sharply
    lab.expect_oom(failure)

# %% [markdown]
# It died in NumPy, in the line that begins to train. Without that limit:

# %%
whole = lab.run(handed_over, H5, label='fit(file["x"]), no limit')
lab.expect_finished(whole)

# %% [markdown]
# ## Advice, tested
#
# **Map the array**, it is said: `np.load(path, mmap_mode="r")` gives an array whose numbers stay on disk, and Keras takes
# it for an array like any other. Under the same budget:


# %%
def mapped_handed_over(path, labels):
    return trained(np.load(path, mmap_mode="r"), labels)


with h5py.File(H5) as file:
    labels = file["y"][:]
advice = lab.run(mapped_handed_over, NPY, labels, outside=OUTSIDE, label="fit(mapped array)")
print(advice.outcome)

# %% [markdown]
# ## Fix
#
# Give `fit()` something that it has to *ask* for each batch. A `PyDataset` reads one when its number is up.


# %%
class Batches(keras.utils.PyDataset):
    """Batches of rows of x and y, read when they are asked for."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y, self.order = x, y, None

    def __len__(self):
        return -(-len(self.y) // BATCH)

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        if self.order is not None:
            rows = self.order[rows]
        return self.x[rows], self.y[rows]


def read_by_batch(path):
    with h5py.File(path) as file:
        return trained(Batches(file["x"], file["y"]))


fix = lab.run(read_by_batch, H5, outside=OUTSIDE, label="a batch at a time")
lab.expect_finished(fix)

# %% [markdown]
# Does a mapped array cure, where it is read a batch at a time, too? Here even in shuffled order, by a list of rows in
# place of a slice. At the end the process tells the system that it does not need the pages of the file for now
# (`MADV_DONTNEED`), and reads some of them again.


# %%
def mapped_by_batch(path, labels):
    x = np.load(path, mmap_mode="r")
    batches = Batches(x, labels)
    batches.order = np.random.default_rng(0).permutation(len(labels))
    seen = trained(batches)
    before = x[::BLOCK].sum(dtype="float64")
    x._mmap.madvise(mmap.MADV_DONTNEED)
    seen["left_mib"] = lab.reading().mapped_mib or np.nan
    seen["same"] = bool(before == x[::BLOCK].sum(dtype="float64"))
    return seen


mapped = lab.run(mapped_by_batch, NPY, labels, outside=OUTSIDE, label="mapped, a batch at a time")
lab.expect_finished(mapped)

# %% [markdown]
# ## Side by side

# %%
lab.compare(whole, failure, advice, fix, mapped, story="process")

# %%
lab.predicted_vs_measured(handed_over=(predicted, whole.process_peak_mib))

# %%
print(my_guess.against(whole.process_peak_mib))
print(f"Losses agree: {whole.value['losses'][-1]:.6f} and {fix.value['losses'][-1]:.6f}")
assert np.allclose(whole.value["losses"], fix.value["losses"], rtol=1e-5)  # the same batches

# %% [markdown]
# The peak taken apart by *whose pages* they are, since most of it is no tensor: after any batch, the most that the
# process had for itself, and the most that it had of files. The code of TensorFlow is a file, too.

# %%
ways = {"handed over": whole, "a batch at a time": fix, "mapped, a batch at a time": mapped}
kinds = {"private": "private_mib", "of files": "mapped_mib"}
pages = pd.DataFrame(
    {kind: {way: arm.value[name] for way, arm in ways.items()} for kind, name in kinds.items()}
)
axes = pages.plot.barh(stacked=True, xlabel="most resident pages (MiB)")
for bars, hatch in zip(axes.containers, ("", "//")):
    plt.setp(bars, hatch=hatch)
axes.invert_yaxis()
plt.show()
pages.round(1)

# %%
by_batch, by_map = fix.value, mapped.value
lab.note(
    f"Mapped, the process held {by_map['mapped_mib']:.0f} MiB of files and "
    f"{by_map['private_mib']:.0f} MiB for itself, where `h5py`, which copies what it reads, had "
    f"{by_batch['mapped_mib']:.0f} and {by_batch['private_mib']:.0f}. The budget counts what the "
    f"process has for itself, and lets {array:.0f} MiB of a file pass. `top` adds the two up."
)

# %% [markdown]
# ## Explain
#
# * **Whole or by batch** is decided by who asks. `fit()`, `np.asarray`, `tf.constant` and `from_tensor_slices` turn
#   whatever they are given into a tensor *first*: a mapped array and a dataset of an HDF5 file are read whole, then
#   copied. A `PyDataset`, a generator or `tf.data` with a function that reads asks for one batch. It was once otherwise:
#   with Keras 2, under TensorFlow 2.12 and 2.15, `fit(file["x"])` finished in this budget, and what is published held; a
#   mapped array did so under 2.12 only (recorded in [data/releases.md](../data/releases.md)).
# * **Pages of a file** stay where they were read, in the *page cache*, as long as nobody needs the room. A mapped array
#   shows them in the process itself. They are *clean*: the file has the same bytes, so the system takes them back
#   whenever memory is short. Private pages have no such place; they can only go to swap.

# %%
dropped = by_map["mapped_mib"] - by_map["left_mib"]
lab.note(
    f"Told that the pages of the array were not needed, the process had "
    f"{dropped:.0f} MiB less at once. Read again, the numbers were "
    f"{'the same' if by_map['same'] else 'others'}."
)

# %% [markdown]
# A container's limit counts the page cache as well, and the system empties it before it ends a process: what ends a
# process is private memory.
#
# **A budget for the pipeline?** Reading takes time, so `tf.data` reads ahead, with as many reads at once as `AUTOTUNE`
# finds useful. `options.autotune.ram_budget` is said to cap what that takes. Here are pipelines over the mapped file with
# larger batches, and a step that takes a little while.

# %%
ELEMENT = 256  # rows
element = lab.tensor_mib((ELEMENT, PIXELS))
RAM_BUDGET = 8 * element


def read_block(index):
    def rows_at(index):
        time.sleep(0.01)  # a slow disk
        return np.load(NPY, mmap_mode="r")[index * ELEMENT : (index + 1) * ELEMENT]

    rows = tf.numpy_function(rows_at, [index], tf.float32)
    return tf.ensure_shape(rows, (ELEMENT, PIXELS)) - 0.5  # a tensor of its own


def pipelines(ways):
    for name, (ram_budget, parallelism, add) in ways.items():
        options = tf.data.Options()
        options.threading.private_threadpool_size = 16  # as on a machine with 16 cores
        if ram_budget:
            options.autotune.ram_budget = int(ram_budget * 2**20)
        if parallelism:
            options.autotune.initial_parallelism = parallelism
        blocks = tf.data.Dataset.range(ROWS // ELEMENT).repeat(2)
        blocks = blocks.map(read_block, num_parallel_calls=tf.data.AUTOTUNE)
        with lab.phase(name):
            for _ in add(blocks).with_options(options):
                time.sleep(0.02)  # the step


auto = lambda blocks: blocks.prefetch(tf.data.AUTOTUNE)
WAYS = {
    "no ram_budget": (None, None, auto),
    "ram_budget": (RAM_BUDGET, None, auto),
    "initial_parallelism=1": (None, 1, auto),
    "both": (RAM_BUDGET, 1, auto),
    "both, prefetch(16)": (RAM_BUDGET, 1, lambda blocks: blocks.prefetch(16)),
    "both, shuffle(16)": (RAM_BUDGET, 1, lambda blocks: blocks.shuffle(16)),
}

queues = lab.measure(pipelines, WAYS, label="pipelines")
ahead = pd.Series({name: queues.phase(name).rise_mib for name in WAYS})
axes = ahead.plot.barh(xlabel="most tensors (MiB); dashed: the ram_budget")
axes.axvline(RAM_BUDGET, color=lab.BUDGET_LINE, ls="--", lw=1)
axes.invert_yaxis()
plt.show()
ahead.to_frame("most tensors (MiB)").round(1)

# %%
held = {name: f"{peak / element:.0f}" for name, peak in ahead.items()}
lab.note(
    f"A block has {element:.0f} MiB, and the budget {RAM_BUDGET / element:.0f} blocks. Left to "
    f"AUTOTUNE, the pipeline held {held['no ram_budget']} at its worst moment, with the budget "
    f"{held['ram_budget']}, begun with one reader {held['initial_parallelism=1']}, with both "
    f"{held['both']}. With both and a prefetch of sixteen blocks it held "
    f"{held['both, prefetch(16)']}, with a shuffle buffer of sixteen {held['both, shuffle(16)']}: "
    "those sizes are yours, not AUTOTUNE's."
)

# %% [markdown]
# **When it flips.** How large may a file be to be handed over whole? Private memory, predicted:


# %%
def handing_over(file_mib=128, batch_mib=1, memory_mib=1024):
    whole_file, by_batch = 3 * file_mib, 12 * batch_mib
    fits = "fits" if whole_file < memory_mib else "does not fit"
    print(f"handed over {whole_file:,} MiB, {fits}; a batch at a time some {by_batch:,} MiB")


lab.explore(
    handing_over, file_mib=(16, 65536, 16), batch_mib=(1, 256), memory_mib=(256, 131072, 256)
)

# %% [markdown]
# ## Verdict

# %%
lab.verdict(
    "C38",
    "partly",
    array=array,
    handed_over_finished=failure.ok,
    by_batch_finished=fix.ok,
    by_batch_private=by_batch["private_mib"],
)

# %%
lab.verdict(
    "C39",
    "partly",
    array=array,
    handed_over_finished=advice.ok,
    by_batch_private=by_map["private_mib"],
    dropped=dropped,
    same=by_map["same"],
)

# %%
lab.verdict(
    "C52",
    "partly",
    ram_budget=RAM_BUDGET,
    batch=element,
    chosen=ahead["ram_budget"],
    begun_with_one=ahead["both"],
    prefetch=ahead["both, prefetch(16)"],
    shuffle=ahead["both, shuffle(16)"],
)

# %% [markdown]
# ## Exercises
#
# **1.** Shuffle an HDF5 file that does not fit. Write a generator of one epoch: pairs of `batch` rows of `file["x"]` and
# their labels from `file["y"]`, shuffled by `seed`, so that other rows meet in every epoch. (`h5py` reads a list of rows
# only if their numbers increase.)


# %%
def epoch(path, batch, seed):
    # BEGIN SOLUTION
    with h5py.File(path) as file:
        order = np.random.default_rng(seed).permutation(len(file["y"]))
        for start in range(0, len(order), batch):
            rows = np.sort(order[start : start + batch])
            yield file["x"][rows], file["y"][rows]
    # END SOLUTION


# %%
check.shuffled(epoch)


# %% tags=["right"]
def epoch(path, batch, seed):
    file, random = h5py.File(path), np.random.default_rng(seed)
    x, labels, piece = file["x"], file["y"][:], batch // 8
    for starts in random.permutation(np.arange(0, len(labels), piece)).reshape(-1, 8):
        yield (
            np.concatenate([x[start : start + piece] for start in starts]),
            np.concatenate([labels[start : start + piece] for start in starts]),
        )


# %% tags=["wrong"]
# says: ran out of memory
def epoch(path, batch, seed):
    with h5py.File(path) as file:
        x, y = file["x"][:], file["y"][:]
    order = np.random.default_rng(seed).permutation(len(y))
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        yield x[rows], y[rows]


# %% tags=["wrong"]
# says: only whole batches change places
def epoch(path, batch, seed):
    with h5py.File(path) as file:
        starts = np.arange(0, len(file["y"]), batch)
        for start in np.random.default_rng(seed).permutation(starts):
            yield file["x"][start : start + batch], file["y"][start : start + batch]


# %% tags=["wrong"]
# says: do not belong together
def epoch(path, batch, seed):
    with h5py.File(path) as file:
        order = np.random.default_rng(seed).permutation(len(file["y"]))
        labels = file["y"][:]
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            yield file["x"][np.sort(rows)], labels[rows]


# %% tags=["wrong"]
# says: each must come once
def epoch(path, batch, seed):
    random = np.random.default_rng(seed)
    with h5py.File(path) as file:
        for _ in range(len(file["y"]) // batch):
            rows = np.sort(random.choice(len(file["y"]), batch, replace=False))
            yield file["x"][rows], file["y"][rows]


# %% tags=["wrong"]
# says: same order
def epoch(path, batch, seed):
    with h5py.File(path) as file:
        order = np.random.default_rng(0).permutation(len(file["y"]))
        for start in range(0, len(order), batch):
            rows = np.sort(order[start : start + batch])
            yield file["x"][rows], file["y"][rows]


# %% [markdown]
# **2.** Mean and standard deviation of each column, to normalize by. `np.load(path, mmap_mode="r").std(axis=0)` is one line,
# and makes a private array of the size of the file on its way. Do without: return both, as arrays.


# %%
def statistics(path):
    # BEGIN SOLUTION
    x = np.load(path, mmap_mode="r")
    blocks = [slice(start, start + 128) for start in range(0, len(x), 128)]
    mean = sum(x[block].sum(axis=0, dtype="float64") for block in blocks) / len(x)
    variance = sum(((x[block] - mean) ** 2).sum(axis=0) for block in blocks) / len(x)
    return mean, np.sqrt(variance)
    # END SOLUTION


# %%
check.statistics(statistics)


# %% tags=["right"]
def statistics(path):
    x = np.load(path, mmap_mode="r")
    columns = [x[:, start : start + 512] for start in range(0, x.shape[1], 512)]
    return (
        np.concatenate([part.mean(axis=0, dtype="float64") for part in columns]),
        np.concatenate([part.std(axis=0, dtype="float64") for part in columns]),
    )


# %% tags=["right"]
def statistics(path):
    x = np.load(path, mmap_mode="r")
    count, mean, squares = 0, 0.0, 0.0
    for start in range(0, len(x), 100):
        block = x[start : start + 100].astype("float64")
        shift = block.mean(axis=0) - mean
        total = count + len(block)
        squares = squares + block.var(axis=0) * len(block) + shift**2 * count * len(block) / total
        mean, count = mean + shift * len(block) / total, total
    return [mean, (squares / count) ** 0.5]


# %% tags=["wrong"]
# says: ran out of memory
def statistics(path):
    x = np.load(path, mmap_mode="r")
    return x.mean(axis=0), x.std(axis=0)


# %% tags=["wrong"]
# says: ran out of memory
def statistics(path):
    x = np.load(path)
    blocks = [x[start : start + 128] for start in range(0, len(x), 128)]
    mean = sum(block.sum(axis=0, dtype="float64") for block in blocks) / len(x)
    return mean, np.sqrt(sum(((block - mean) ** 2).sum(axis=0) for block in blocks) / len(x))


# %% tags=["wrong"]
# says: every row counts
def statistics(path):
    x = np.load(path, mmap_mode="r")
    blocks = [x[start : start + 128] for start in range(0, len(x), 128)]
    stds = [block.std(axis=0) for block in blocks]
    return sum(block.mean(axis=0) for block in blocks) / len(blocks), sum(stds) / len(stds)


# %% tags=["wrong"]
# says: float64
def statistics(path):
    x = np.load(path, mmap_mode="r")
    sums, squares = np.zeros(x.shape[1], "float32"), np.zeros(x.shape[1], "float32")
    for start in range(0, len(x), 128):
        sums += x[start : start + 128].sum(axis=0)
        squares += (x[start : start + 128] ** 2).sum(axis=0)
    return sums / len(x), np.sqrt(np.maximum(squares / len(x) - (sums / len(x)) ** 2, 0))


# %% tags=["wrong"]
# says: every row
def statistics(path):
    some = np.load(path, mmap_mode="r")[::30].astype("float64")
    return some.mean(axis=0), some.std(axis=0)


# %% tags=["wrong"]
# says: columns
def statistics(path):
    x = np.load(path, mmap_mode="r")
    rows = [row.astype("float64") for row in x[::1024]]
    return float(np.mean(rows)), float(np.std(rows))
