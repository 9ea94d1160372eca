# %% [markdown]
# # 29 · Workers: threads, processes and queues
#
# **Symptom:** *"RAM fills up as soon as I set workers=8"*, *"each worker process grows to the size of the data set"*,
# *"memory climbs from epoch to epoch with steps_per_epoch, use_multiprocessing=True"*.
#
# **Afterwards you can** say how many batches a queue of workers holds, and which pages a worker process shares with its
# parent, which it copies, and which it makes for itself.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 30 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C36, C37 |
#
# Every run below happens in a process of its own under a memory budget. When it runs out of memory, nothing else does.
# The worker processes of a run end with it.

# %% tags=["parameters"]
SCALE = "quick"  # "full" takes batches twice and data four times as large
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import gc
import multiprocessing
import sys
import time
import tracemalloc

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import psutil

import labsupport as lab
from labsupport.graders import workers as check

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

BATCH = lab.choose(SCALE, quick=1024, full=2048)
PIXELS, STEPS, WORKERS, QUEUE = 4096, 16, 2, 10  # a queue of ten is what Keras makes
batch = lab.tensor_mib((BATCH, PIXELS))
OUTSIDE = f"{14 * batch:.0f} MiB"
READ, STEP, PAUSE = 0.01, 0.02, 0.6  # seconds: of a read, of a step, and once of a longer one
FORKS = sys.platform == "linux"  # elsewhere TensorFlow's process is not to be forked

# %% [markdown]
# ## Predict
#
# A `PyDataset` reads a batch when it is asked for it. With `workers=2`, two threads ask while the model trains. Steps take
# longer than reading, and one much longer, as where a checkpoint is written: the workers run ahead.


# %%
class Images(keras.utils.PyDataset):
    """Batches that are decoded when they are asked for."""

    def __init__(self, steps=STEPS, read=READ, **options):
        super().__init__(**options)
        self.steps, self.read = steps, read

    def __len__(self):
        return self.steps

    def __getitem__(self, index):
        time.sleep(self.read)
        x = np.full((BATCH, PIXELS), (index + 1) / 1000, np.float32)  # "decoded"
        return x, np.ones((BATCH, 1), np.float32)


def one_layer():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((PIXELS,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    return model


my_guess = lab.guess(f"Peak memory of the process, {WORKERS} workers?", GUESS_MIB)

# %% [markdown]
# By hand, from Keras' source: the queue holds ten batches, or the promise of them; the next one is asked for *before*
# Keras waits for a free place in the queue; and the step has one. Besides, the step's tensors, predicted from its graph.

# %%
one_step = lab.predict(one_layer, BATCH)
on_host = (QUEUE + 2) * batch
print(f"a batch {batch:.0f} MiB; on the host {QUEUE} + 1 + 1 batches, {on_host:.0f} MiB")
print(f"with the tensors of a step: {on_host + one_step.total_mib:.0f} MiB")

# %% [markdown]
# ## Failure
#
# Beside its tensors the process may add what the queue would need, and two batches more. The system counts what was promised,
# used or not, and each new thread is promised some MiB for its stack: for batches there is less.


# %%
def trained(model, data, pause=PAUSE, look=lambda: None, **options):
    """The last loss; look() is called after each step."""

    def after(batch, logs):
        time.sleep(STEP if batch else pause)
        look()

    each = keras.callbacks.LambdaCallback(on_train_batch_end=after)
    history = model.fit(data, shuffle=False, callbacks=[each], verbose=0, **options)
    return history.history["loss"][-1]


def with_workers(options):
    model = one_layer()
    model.fit(Images(1), verbose=0)  # traced, before workers run ahead
    return trained(model, Images(**options))


failure = lab.run(with_workers, {"workers": WORKERS}, outside=OUTSIDE, label="2 workers")
if sys.platform == "linux":  # elsewhere a process cannot be limited that sharply
    lab.expect_oom(failure)

# %% [markdown]
# NumPy found no room for a batch that nobody needed yet. Without that limit:

# %%
unbounded = lab.run(with_workers, {"workers": WORKERS}, label="2 workers, no limit")
lab.expect_finished(unbounded)

# %% [markdown]
# ## Advice, tested
#
# *Use processes*, it is said, or fewer workers, or *leave it at one*; and `tf.data`, of course. Each way trains for one
# epoch. What Python holds is counted by `tracemalloc`, tensors by TensorFlow, and the workers' own pages by the system:
# pages that a process shares with no other (USS, from `/proc/PID/smaps_rollup`).


# %%
def own_mib(pid=None):
    """Pages that a process shares with no other."""
    return psutil.Process(pid).memory_full_info().uss / 2**20


def own_of_workers():
    """The same of all worker processes of this one, added up."""
    found = [0.0]
    for worker in multiprocessing.active_children():
        try:
            found.append(own_mib(worker.pid))
        except psutil.Error:  # it has just ended
            pass
    return sum(found)


def from_tf_data():
    """The same batches, read by two threads of tf.data, and one read ahead."""
    images = Images()
    shapes = [(BATCH, PIXELS), (BATCH, 1)]

    def read(index):
        batch = tf.numpy_function(images.__getitem__, [index], [tf.float32, tf.float32])
        return tuple(tf.ensure_shape(part, shape) for part, shape in zip(batch, shapes))

    return tf.data.Dataset.range(STEPS).map(read, num_parallel_calls=WORKERS).prefetch(1)


def ways_to_read(ways):
    """{way: figures} of an epoch each."""
    model, rows = one_layer(), {}
    model.fit(Images(1), verbose=0)  # traced
    tracemalloc.start()
    for name, (options, pause) in ways.items():
        workers, before = [], tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        with lab.phase(name):
            data = from_tf_data() if options is None else Images(**options)
            begin = time.monotonic()
            loss = trained(model, data, pause, lambda: workers.append(own_of_workers()))
            seconds = time.monotonic() - begin
        host = (tracemalloc.get_traced_memory()[1] - before) / 2**20
        rows[name] = {"Python": host, "own pages": max(workers), "s": seconds, "loss": loss}
    return rows


threads = {"workers": WORKERS}
WAYS = {
    "1 worker (the default: no queue)": ({}, PAUSE),
    "2 threads": (threads, PAUSE),
    "4 threads": ({"workers": 4}, PAUSE),
    "2 processes": (threads | {"use_multiprocessing": FORKS}, PAUSE),
    "2 threads, reading is slower": (threads | {"read": 0.1}, 0),
    "2 threads, max_queue_size=1": (threads | {"max_queue_size": 1}, PAUSE),
    "tf.data, 2 threads, prefetch(1)": (None, PAUSE),
}
if not FORKS:
    del WAYS["2 processes"]
read = lab.measure(ways_to_read, WAYS, label="ways to read", timeout=120)
rows = pd.DataFrame.from_dict(read.value, orient="index")
rows.insert(1, "tensors", [read.phase(name).rise_mib for name in WAYS])
in_batches = rows[["Python", "tensors", "own pages"]] / batch
in_batches.rename_axis(columns="batches in").assign(seconds=rows["s"]).round(1)

# %%
lab.note(
    f"Two threads hold {in_batches['Python']['2 threads']:.0f} batches, four "
    f"{in_batches['Python']['4 threads']:.0f}: it is the queue that counts, not the workers. Where "
    "reading is slower than the step, nothing waits: there are the batches that workers are "
    "making, and the one in the step."
)
if FORKS:
    lab.note(
        f"Processes hold {in_batches['own pages']['2 processes']:.1f} batches more among "
        "themselves (an array, and the bytes that it is sent as), and take longer, since each "
        "batch goes through a pipe."
    )

# %% [markdown]
# ## Fix
#
# The queue need not hold more than evens out the workers' pace. Its length is the third argument. (Not 0, which means
# *without bound*.)

# %%
short = {"workers": WORKERS, "max_queue_size": 1}
fix = lab.run(with_workers, short, outside=OUTSIDE, label="2 workers, max_queue_size=1")
lab.expect_finished(fix)

# %% [markdown]
# ## Side by side

# %%
lab.compare(unbounded, failure, fix, story="process")

# %%
lab.predicted_vs_measured(
    queue_of_ten=(on_host + one_step.total_mib, unbounded.process_peak_mib),
    queue_of_one=(3 * batch + one_step.total_mib, fix.process_peak_mib),
    one_step=(one_step.total_mib, fix.peak_mib),
)

# %% [markdown]
# The process takes more than batches and tensors: threads, and pages that were freed and are not given back yet. Where
# batches are few, that shows.

# %%
print(my_guess.against(unbounded.process_peak_mib))
print(f"Losses agree: {unbounded.value:.6f} and {fix.value:.6f}")
assert np.isclose(unbounded.value, fix.value, rtol=1e-5)  # the same batches in the same order

# %% [markdown]
# The ways again, taken apart by who holds the memory:

# %%
axes = in_batches.plot.barh(stacked=True, xlabel="most in memory (batches)")
for bars, hatch in zip(axes.containers, ("", "//", "..")):
    plt.setp(bars, hatch=hatch)
axes.invert_yaxis()
plt.show()

# %% [markdown]
# ## Explain
#
# * **Asked for ahead.** Keras asks its pool for one batch after the other, and puts the promise of each into a queue. It
#   stops when the queue is full, with one more promise in its hand. Workers keep every promise as soon as they can.
# * **Threads** make arrays where the model is. **Processes** make them elsewhere, and send them: for a while the batch is
#   there as array, as bytes to be sent, as bytes received and as array again.
#
# ### An epoch that ends early
#
# With `steps_per_epoch`, an epoch ends while batches wait. What becomes of them?


# %%
def epochs_that_end_early(ways, epochs):
    """{way: what Python holds after each epoch, in MiB}."""
    model, rows = one_layer(), {}
    model.fit(Images(1), verbose=0)
    tracemalloc.start()
    for name, (options, fitted) in ways.items():
        held, before = [], tracemalloc.get_traced_memory()[0]

        def after(epoch, logs):
            held.append((tracemalloc.get_traced_memory()[0] - before) / 2**20)

        note = keras.callbacks.LambdaCallback(on_epoch_end=after)
        images = Images(read=0, **options)
        model.fit(images, shuffle=False, epochs=epochs, callbacks=[note], verbose=0, **fitted)
        rows[name] = held
    return rows


EPOCHS, SOME = 4, {"steps_per_epoch": STEPS // 4}
EARLY = {
    "whole epochs": (threads | {"steps": STEPS // 4}, {}),
    "steps_per_epoch": (threads, SOME),
    "steps_per_epoch, max_queue_size=1": (short, SOME),
}
early = lab.measure(epochs_that_end_early, EARLY, EPOCHS, label="epochs that end early")
after_epoch = pd.DataFrame(early.value, index=range(1, EPOCHS + 1)).T / batch
after_epoch.rename_axis(columns="batches after epoch").round(1)

# %%
last = after_epoch[EPOCHS]
lab.note(
    f"Epochs of {STEPS // 4} steps from a data set of {STEPS}: after {EPOCHS} epochs, "
    f"{last['steps_per_epoch']:.0f} batches are in memory. At each epoch's end Keras moves what "
    "waits to a list of its own, serves the next epoch from that, and fills the queue anew. With "
    f"whole epochs it is {last['whole epochs']:.0f}, the last."
)

# %% [markdown]
# So give the data set the length that an epoch shall have, in place of `steps_per_epoch`, or a short queue. It was not always
# so: under TensorFlow 2.16 with Keras 3.1 one batch was left (recorded in [data/releases.md](../data/releases.md)).
#
# ### What worker processes share
#
# A forked process starts with its parent's pages, all shared. A page becomes its own when it *writes* to it, and what it
# makes is its own anyway. A spawned process starts empty, and gets what it is given as a pickled copy. Python writes more
# than one thinks: each object has a count of references, which reading changes. Two workers do the same each time; shown
# is what the larger one adds to its own pages.


# %%
def in_workers(work, number=2):
    """(own pages that work() adds, resident set) of the largest forked process, in MiB."""
    fork, ends = multiprocessing.get_context("fork"), []

    def worker(send):
        before = own_mib()
        made = work()  # kept until it is measured
        send.send((own_mib() - before, psutil.Process().memory_info().rss / 2**20))
        del made

    for _ in range(number):
        receive, send = fork.Pipe(duplex=False)
        ends.append((fork.Process(target=worker, args=(send,), daemon=True), receive))
        ends[-1][0].start()
        send.close()
    found = [receive.recv() for _, receive in ends]
    for process, _ in ends:
        process.join()
    return max(found)


def spawned(array):
    """The same of a spawned process with the array, over one with a small part of it."""
    found = []
    for data in (array[:1], array):
        with multiprocessing.get_context("spawn").Pool(1, len, [data]) as pool:
            pool.apply(len, [()])  # it runs by now
            (worker,) = multiprocessing.active_children()
            found.append(
                (own_mib(worker.pid), psutil.Process(worker.pid).memory_info().rss / 2**20)
            )
    return found[1][0] - found[0][0], found[1][1]


def what_workers_share(data_mib):
    array = np.ones((int(data_mib), 2**18), np.float32)
    number = int(data_mib * 2**20 / 150)  # a text of this length has 150 bytes with its object
    texts = [f"{row:0101d}" for row in range(number)]
    block = "".join(texts).encode()
    ends = np.cumsum([len(text) for text in texts])
    rows = {
        "reads an array": in_workers(array.sum),
        "reads a list of texts": in_workers(lambda: sum(map(len, texts))),
        "reads the texts from a block": in_workers(
            lambda: sum(len(block[end - 101 : end].decode()) for end in ends)
        ),
        "fills a cache": in_workers(lambda: [row.copy() for row in array]),
        "collects garbage": in_workers(gc.collect),
    }
    gc.freeze()
    rows["collects garbage, after gc.freeze()"] = in_workers(gc.collect)
    rows["spawned, is given the array"] = spawned(array)
    return rows


DATA = lab.choose(SCALE, quick=32, full=128)  # MiB, of each kind
share = None
if FORKS:
    share = lab.measure(what_workers_share, DATA, label="what workers share", timeout=120)
shared = pd.DataFrame.from_dict(
    share.value if share else {},
    orient="index",
    columns=["own pages, MiB", "resident set, MiB"],
    dtype=float,
)
shared.round(1)

# %%
own = shared["own pages, MiB"] if share else {}
if share:
    axes = own.plot.barh(xlabel="own pages of each worker (MiB); dashed: the data")
    axes.axvline(DATA, color=lab.BUDGET_LINE, ls="--", lw=1)
    axes.invert_yaxis()
    plt.show()
    resident = shared["resident set, MiB"]["reads an array"]
    lab.note(
        f"The array costs a worker {own['reads an array']:.1f} MiB, though its resident set shows "
        f"{resident:.0f} of its parent's and everybody's: never add resident sets up. The list "
        f"costs {own['reads a list of texts']:.0f}, its texts in one block of bytes "
        f"{own['reads the texts from a block']:.1f}. A garbage collection writes to the head of "
        f"each container that TensorFlow and Keras have made, {own['collects garbage']:.0f} MiB; "
        f"after `gc.freeze()` in the parent it leaves them alone."
    )

# %% [markdown]
# From Keras' source: it makes its worker processes anew for each epoch, and what they cache is lost at its end. Such a
# cache costs its size once a worker, and serves no second epoch. Threads share one, and it lasts.
#
# **On a GPU** it has not been measured here. Queue and workers live on the host, whatever the model trains on.
#
# **When it flips:** how much do workers need, by the length of the queue and what each worker holds? Predicted:


# %%
def workers_need(batch_mib=64, queue=10, workers=8, kind="processes", copied_mib=500):
    waiting = (queue + 2) * batch_mib
    each = (3 * batch_mib + copied_mib) if kind == "processes" else 0
    print(f"{waiting:,} MiB of batches, {workers * each:,} MiB of the workers' own (predicted)")


lab.explore(
    workers_need,
    batch_mib=(1, 1024),
    queue=(1, 64),
    workers=(1, 64),
    kind=["processes", "threads"],
    copied_mib=(0, 8192, 10),
)

# %% [markdown]
# ## Verdict

# %%
lab.verdict(
    "C36",
    "fails",
    batch=batch,
    threads=rows["Python"]["2 threads"],
    processes=rows["Python"].get("2 processes"),
    left=last["steps_per_epoch"] * batch,
)

# %%
lab.verdict(
    "C37",
    "partly",
    data=DATA,
    array=own.get("reads an array"),
    texts=own.get("reads a list of texts"),
    cache=own.get("fills a cache"),
    garbage=own.get("collects garbage"),
    spawned=own.get("spawned, is given the array"),
)

# %% [markdown]
# ## Exercises
#
# **1.** A `PyDataset` with three workers is given to `fit()`. Write `bounded(data, most_mib)`: it sets the data set's queue
# so that its batches, the one in the step included, take at most `most_mib` (three batches or more), and as many as may
# wait do. `data[0]` is a batch: a pair of arrays.


# %%
def bounded(data, most_mib):
    # BEGIN SOLUTION
    size = sum(part.nbytes for part in data[0]) / 2**20
    data.max_queue_size = int(most_mib / size) - 2
    # END SOLUTION


# %%
check.bounded(bounded)


# %% tags=["right"]
def bounded(data, most_mib):
    x, y = data[len(data) - 1]
    batches = 3
    while (batches + 1) * (x.nbytes + y.nbytes) <= most_mib * 2**20:
        batches += 1
    data.max_queue_size = batches - 2


# %% tags=["wrong"]
# says: more than
def bounded(data, most_mib):
    size = sum(part.nbytes for part in data[0]) / 2**20
    data.max_queue_size = int(most_mib / size)


# %% tags=["wrong"]
# says: more than
def bounded(data, most_mib):
    data.max_queue_size = int(most_mib * 2**20 / data[0][0].nbytes) - 2


# %% tags=["wrong"]
# says: without bound
def bounded(data, most_mib):
    data.max_queue_size = 0


# %% tags=["wrong"]
# says: workers
def bounded(data, most_mib):
    data.workers = 1


# %% tags=["wrong"]
# says: could wait
def bounded(data, most_mib):
    data.max_queue_size = 1


# %% [markdown]
# **2.** A list of texts is read by forked workers, and each ends up with a copy of all. Write `packed(texts)`: it returns
# an object `p`, with `p[i]` for the text `texts[i]`, that workers can read without copying it. It takes no more
# than twice the bytes of the texts (in UTF-8), however long the longest is.


# %%
def packed(texts):
    # BEGIN SOLUTION
    class Packed:
        def __init__(self, parts):
            self.block = b"".join(parts)
            self.ends = np.cumsum([0, *map(len, parts)])

        def __getitem__(self, index):
            return self.block[self.ends[index] : self.ends[index + 1]].decode()

    return Packed([text.encode() for text in texts])
    # END SOLUTION


# %%
check.packed(packed)


# %% tags=["right"]
def packed(texts):
    import tempfile

    lengths = np.array([len(text.encode()) for text in texts])
    starts = np.append(0, lengths.cumsum())
    with tempfile.NamedTemporaryFile() as file:
        file.writelines(text.encode() for text in texts)
        file.flush()
        mapped = np.memmap(file.name, np.uint8, "r")

    class OnDisk:
        def __getitem__(self, index):
            return mapped[starts[index] : starts[index + 1]].tobytes().decode()

    return OnDisk()


# %% tags=["wrong"]
# says: of its own
def packed(texts):
    return tuple(texts)


# %% tags=["wrong"]
# says: of its own
def packed(texts):
    gc.collect()
    gc.freeze()
    return np.array(texts, dtype=object)


# %% tags=["wrong"]
# says: longest
def packed(texts):
    return np.array([text.encode() for text in texts])


# %% tags=["wrong"]
# says: another text
def packed(texts):
    block, ends = "".join(texts).encode(), np.cumsum([0, *map(len, texts)])

    class Packed:
        def __getitem__(self, index):
            return block[ends[index] : ends[index + 1]].decode(errors="replace")

    return Packed()
