# %% [markdown]
# # 16 · Magnitude pruning: what zeros save, and what they do not
#
# **Symptom:** *"I pruned 80 % of my model and it still needs the same memory"*, *"pruned model has the same file
# size"*, or *"Prune() wrapper requires the UpdatePruningStep callback"*.
#
# **Afterwards you can** say what pruning saves (download, disk) and what it does not (memory), check that a pruned
# model is pruned at all, prune so that an interpreter computes with the zeros left out, and remove whole units.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 30 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C17 |
#
# Magnitude pruning sets the weights with the smallest absolute values to zero, a growing share of them while training
# goes on. The tool for it, `tensorflow_model_optimization` (tfmot), works with Keras 2 only. Every run below that
# needs it happens in a process of its own with `TF_USE_LEGACY_KERAS=1`.

# %% tags=["parameters"]
SCALE = "quick"  # "full" makes the layers wider
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import gzip

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import labsupport as lab
from labsupport.graders import pruning as check

tf = lab.load_tensorflow()

WIDTH = lab.choose(SCALE, quick=2048, full=3072)
BUDGET = lab.choose(SCALE, quick="16 MiB", full="32 MiB")
# tf.keras is Keras 2 in a process that starts with this. Without oneDNN (Intel), running out of
# memory is an error every time, and not now and then a crash.
LEGACY = {"TF_USE_LEGACY_KERAS": "1", **lab.NO_ONEDNN}
BATCH, EPOCHS, ROUNDS = 64, 3, 140

digits = np.load("../data/digits.npz")
order = np.random.default_rng(0).permutation(len(digits["labels"]))
images = (digits["images"][order].reshape(-1, 64) / 16).astype("float32")
labels = digits["labels"][order].astype("int32")
data = images[:1400], labels[:1400], images[1400:], labels[1400:]
print(f"{len(data[0])} handwritten digits of 8 × 8 pixels to train on, {len(data[2])} to test with")

# %% [markdown]
# ## Predict
#
# The network has two hidden layers. Pruning from 20 % to 80 % leaves one of five weights; then the helpers of pruning
# are taken off again (*stripped*).

# %%
layers = [(64, WIDTH), (WIDTH, WIDTH), (WIDTH, 10)]
print("kernels:", ", ".join(f"{rows} × {columns}" for rows, columns in layers))

# %%
my_guess = lab.guess(
    "How much of TensorFlow's memory do the weights of the stripped, pruned model take?", GUESS_MIB
)

# %% [markdown]
# Now the arithmetic. A tensor is one block of shape × 4 bytes, whatever the numbers in it are: a zero is four bytes.
#
# While training goes on, Adam adds two values a weight. To remember which weights are pruned, tfmot adds a *mask* to
# every kernel: float32, of the kernel's shape.

# %%
kernels = sum(lab.tensor_mib(shape) for shape in layers)
weights = kernels + sum(lab.tensor_mib((units,)) for _, units in layers)
predicted = {"dense": 3 * weights, "pruning": 3 * weights + kernels}
print(f"at rest, dense or pruned: {weights:.1f} MiB")
print(f"between two steps, dense:   weights + 2 slots         = {predicted['dense']:.1f} MiB")
print(f"between two steps, pruning: weights + 2 slots + masks = {predicted['pruning']:.1f} MiB")

# %% [markdown]
# ## Failure
#
# The network is trained with memory to spare. What it learned has to answer in less, time and again.


# %%
def network(units, weights=()):
    keras, start = tf.keras, {"kernel_initializer": "zeros" if weights else "glorot_uniform"}
    hidden = [keras.layers.Dense(n, activation="relu", **start) for n in units]
    model = keras.Sequential([keras.layers.Input((64,)), *hidden, keras.layers.Dense(10, **start)])
    for variable, value in zip(model.weights, weights):
        # Decoded by TensorFlow, so that its allocator counts them: set_weights() may borrow the
        # memory of a NumPy array, which nobody counts.
        variable.assign(tf.reshape(tf.io.decode_raw(value.tobytes(), "float32"), value.shape))
    return model


def ready(model):
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss)
    model.optimizer.build(model.trainable_variables)
    return model


def train(data, units, start):
    tf.keras.utils.set_random_seed(1)
    model = ready(network(units, start))
    held = lab.reading().tensors_mib
    model.fit(*data[:2], batch_size=BATCH, epochs=EPOCHS, verbose=0)
    return {"held": held, "weights": model.get_weights()}


def answer(x, units, weights, rounds=1):
    """The digits that a trained network sees in x, and the memory that its weights take."""
    model = network(units, weights)
    at_rest = lab.reading().tensors_mib
    for _ in range(rounds):
        pieces = [model(x[i : i + BATCH]) for i in range(0, len(x), BATCH)]
    return {"at rest": at_rest, "digits": np.concatenate(pieces).argmax(1)}


WHOLE, TIGHT = (WIDTH, WIDTH), {"budget": BUDGET, "env": LEGACY}
tf.keras.utils.set_random_seed(1)
untrained = network(WHOLE).get_weights()
dense = lab.measure(train, data, WHOLE, untrained, label="training, dense", env=LEGACY)
start = dense.value["weights"]
failure = lab.run(answer, data[2], WHOLE, start, ROUNDS, label="dense answers", **TIGHT)
lab.expect_oom(failure)

# %% [markdown]
# ## Advice, tested
#
# The published example wraps the model with a schedule from 20 % to 80 % zeros and calls `fit`. As printed, it does
# this:


# %%
def wrapped(start, steps, **options):
    import tensorflow_model_optimization as tfmot

    # The published example ends at step 1000. This training is shorter: masks are renewed
    # every 22 steps.
    decay = tfmot.sparsity.keras.PolynomialDecay
    schedule = decay(0.20, 0.80, begin_step=0, end_step=steps, frequency=22)
    prune = tfmot.sparsity.keras.prune_low_magnitude
    return ready(prune(network(WHOLE, start), pruning_schedule=schedule, **options))


def as_printed(data, start):
    try:
        wrapped(start, steps=44).fit(*data[:2], batch_size=BATCH, epochs=1, verbose=0)
    except tf.errors.InvalidArgumentError as error:
        return next(line for line in error.message.splitlines() if "assertion failed" in line)


printed = lab.measure(as_printed, data, start, label="as printed", env=LEGACY)
assert printed.value, "the published example trains now; the text below is out of date"
print(printed.value.split("] [")[0] + "]")

# %% [markdown]
# A callback is missing that counts the steps and applies the masks. With it, training starts.


# %%
def pruning(data, start, options):
    import tensorflow_model_optimization as tfmot

    tf.keras.utils.set_random_seed(1)
    model = wrapped(start, 44, **options)
    held = lab.reading().tensors_mib
    callbacks = [tfmot.sparsity.keras.UpdatePruningStep()]
    model.fit(*data[:2], batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    return {"held": held, "weights": tfmot.sparsity.keras.strip_pruning(model).get_weights()}


pruned = lab.measure(pruning, data, start, {}, label="training, pruning", env=LEGACY)

# %% [markdown]
# Before anything about size is measured: **is the model pruned at all?** Without the callback, or with a schedule that
# ends after training does, the zeros are not there, and every size below would be that of a dense model.


# %%
def zeros(weights):
    """Share of zeros in the kernels; biases are not pruned."""
    kernels = [w for w in weights if w.ndim == 2]
    return sum(np.count_nonzero(k == 0) for k in kernels) / sum(k.size for k in kernels)


share = zeros(pruned.value["weights"])
print(f"zeros before {zeros(start):.1%}, after {share:.1%}")
assert share > 0.75, "not pruned: is the callback there, does the schedule end before training?"

# %%
# The zeros are real. The pruned and stripped model in the same budget:
zeroed = pruned.value["weights"]
under_advice = lab.run(answer, data[2], WHOLE, zeroed, ROUNDS, label="pruned answers", **TIGHT)
lab.expect_oom(under_advice)

# %% [markdown]
# ## Fix
#
# **Remove whole units**: their columns and rows leave the kernels, so that the tensors get smaller. Units are ranked by
# the size of what comes in times the size of what goes out. To keep as many weights as pruning leaves (one in five),
# keep the root of that share of the units, and train as many epochs as pruning did.


# %%
def shrink(weights, keep):
    """The weights without the weakest units of each hidden layer. keep: the share that stays."""
    weights = [w.copy() for w in weights]
    for layer in range(0, len(weights) - 2, 2):
        kernel, bias, following = weights[layer : layer + 3]
        strength = np.linalg.norm(kernel, axis=0) * np.linalg.norm(following, axis=1)
        best = np.sort(np.argsort(strength)[-int(keep * len(bias)) :])
        weights[layer : layer + 3] = kernel[:, best], bias[best], following[best]
    return weights


small = shrink(start, keep=0.2**0.5)
FEW = tuple(w.shape[0] for w in small[1:-1:2])
print("hidden units:", WHOLE, "→", FEW)
shrunk = lab.measure(train, data, FEW, small, label="training, units removed", env=LEGACY)
fewer = shrunk.value["weights"]
fix = lab.run(answer, data[2], FEW, fewer, ROUNDS, label="units removed, answers", **TIGHT)
lab.expect_finished(fix)

# %% [markdown]
# **Prune in blocks, and compute with the packed form.** TensorFlow Lite can pack zeros. Its interpreter multiplies with a
# packed kernel of a dense layer as it is, if zeros come in fours: four inputs of one unit. One argument of the published
# call changes.

# %%
FOURS = {"block_size": (4, 1)}
blocks = lab.measure(pruning, data, start, FOURS, label="training, pruning in blocks", env=LEGACY)
print(f"zeros {zeros(blocks.value['weights']):.1%}")

# %% [markdown]
# ## Side by side
#
# What the dense and the pruned model need for one round without a budget, and the one without its weak units. (What stays
# is hatched. While a model is loaded, a kernel stands there twice: as zeros, and as what replaces them.)

# %%
whole = {
    name: lab.measure(answer, data[2], WHOLE, trained, label=f"{name}, no tight budget", env=LEGACY)
    for name, trained in (("dense", start), ("pruned", zeroed))
}
lab.compare(*whole.values(), under_advice, fix)

# %% [markdown]
# Who held it? Two of them run once more while TensorFlow records every allocation. While a model is loaded, each
# kernel stands there twice, with zeros or without: as it was made, and as what replaces it. A smaller one is smaller
# both times.

# %%
lab.take_apart(whole["pruned"], fix)

# %%
in_memory = {name: result.value["at rest"] for name, result in whole.items()}
in_memory["units removed"] = fix.value["at rest"]
few = sum(w.size * 4 for w in small) / 2**20
lab.predicted_vs_measured(
    at_rest_dense=(weights, in_memory["dense"]),
    at_rest_pruned=(weights, in_memory["pruned"]),
    at_rest_units_removed=(few, in_memory["units removed"]),
    training_dense=(predicted["dense"], dense.value["held"]),
    training_pruning=(predicted["pruning"], pruned.value["held"]),
    training_units_removed=(3 * few, shrunk.value["held"]),
)

# %%
print(my_guess.against(in_memory["pruned"]))

# %% [markdown]
# Now the same models as files, and a TensorFlow Lite interpreter that runs them. `EXPERIMENTAL_SPARSITY` asks the
# converter to pack zeros.


# %%
def packaged(models):
    files = {}
    for name, (units, weights) in models.items():
        converter = tf.lite.TFLiteConverter.from_keras_model(network(units, weights))
        if "packed" in name:
            converter.optimizations = [tf.lite.Optimize.EXPERIMENTAL_SPARSITY]
        files[name] = converter.convert()
    return files


models = {
    "dense": (WHOLE, start),
    "pruned": (WHOLE, zeroed),
    "pruned, packed": (WHOLE, zeroed),
    "blocks, packed": (WHOLE, blocks.value["weights"]),
    "units removed": (FEW, fewer),
}
files = lab.measure(packaged, models, label="converting", env=LEGACY).value


def served(content, x):
    import os
    from pathlib import Path

    path = Path(os.environ["TMPDIR"], "model.tflite")
    path.write_bytes(content)
    before = lab.reading().process_mib
    interpreter = tf.lite.Interpreter(model_path=str(path), num_threads=1)
    interpreter.allocate_tensors()
    (entry,), (output,) = interpreter.get_input_details(), interpreter.get_output_details()
    digits = []
    for row in x:
        interpreter.set_tensor(entry["index"], row[None])
        interpreter.invoke()
        digits.append(int(interpreter.get_tensor(output["index"]).argmax()))
    return lab.reading().process_mib - before, np.array(digits)


serving = {
    name: lab.measure(served, content, data[2], label=f"interpreter: {name}", env=LEGACY).value
    for name, content in files.items()
}


# %%
sizes = pd.DataFrame(
    {
        "TensorFlow, weights at rest": in_memory,
        ".tflite file": {name: len(content) / 2**20 for name, content in files.items()},
        ".tflite file, gzip": {
            name: len(gzip.compress(content, 6)) / 2**20 for name, content in files.items()
        },
        "running interpreter": {name: process for name, (process, _) in serving.items()},
    },
    index=list(files),
)
axes = sizes.T.plot.bar(rot=0, width=0.8, ylabel="MiB")
axes.set_title("No bar: a model in TensorFlow has no packed form")
plt.show()
right = {name: np.mean(digits == data[3]) for name, (_, digits) in serving.items()}
shown = sizes.round(2).assign(accuracy=[f"{right[name]:.1%}" for name in sizes.index])
print(shown.to_string(na_rep="–"))
assert min(right.values()) > right["dense"] - 0.05, "one of them lost over five points of accuracy"

# %%
running, file = sizes["running interpreter"], sizes[".tflite file"]
assert not running["blocks, packed"] > lab.parse_size(BUDGET) / 2**20  # nor if unavailable
lab.note(
    f"The packed file of the model pruned weight by weight has {file['pruned, packed']:.1f} MiB in "
    f"place of {file['dense']:.1f}, and its interpreter takes {running['pruned, packed']:.1f} MiB "
    f"where the dense one takes {running['dense']:.1f}. Pruned in blocks, "
    f"{file['blocks, packed']:.1f} MiB of file run in "
    f"{running['blocks, packed']:.1f} MiB, within the budget of {BUDGET}. (All but the dense model "
    f"trained {EPOCHS} epochs longer: their accuracies are to be compared with one another.)"
)

# %% [markdown]
# ## Explain
#
# * **In TensorFlow**: a pruned kernel is a dense tensor with zeros in it. The same shape, the same bytes. Its gradients
#   and Adam's slots do not get smaller either.
# * **While pruning**: a mask for each kernel comes on top. The model is at its largest when it is meant to shrink.
# * **On disk**: the plain file is as large as before. Zeros compress well, so gzip or packing make it small.
# * **In the interpreter**: a kernel with single zeros is unpacked into dense memory before it runs (an operation
#   `DENSIFY`), and the packed form stays beside it. Packed blocks are computed with as they are. (On a CPU the interpreter
#   also packs *dense* kernels anew, in the order that it multiplies fastest: that is why it takes more than the file.)
# * **Units removed**: everything that follows from a shape gets smaller: weights, gradients, slots, activations, file,
#   interpreter. What it cannot do: make the *first* training of the dense network fit.
#
# **When it flips.** A sparse format keeps an index beside every value that is left: `tf.sparse` two int64, CSR one int32.
# A bitmap keeps one bit for *every* weight. Move the slider: which share of zeros does each need before it saves half?


# %%
FORMATS = {  # bytes for each weight that is left, and for every weight
    "dense": (0, 4),
    "tf.sparse (two int64)": (4 + 16, 0),
    "CSR (one int32)": (4 + 4, 0),
    "bitmap": (4, 1 / 8),
}


def formats(zero_share=0.8):
    for name, (each_left, every) in FORMATS.items():
        of_dense = ((1 - zero_share) * each_left + every) / 4
        saves = "saves" if of_dense < 0.995 else "saves nothing"
        part = f"{kernels * of_dense:6.2f} MiB  {of_dense:5.0%} of dense"
        print(f"{name:22} {part}  {saves} (predicted)")


lab.explore(formats, zero_share=(0.0, 0.99, 0.01))


# %%
def as_tf_sparse(weights):
    with lab.phase("sparse"):
        kept = [tf.sparse.from_dense(w) for w in weights if w.ndim == 2]
    return len(kept)


sparse = lab.measure(as_tf_sparse, zeroed, label="tf.sparse", env=LEGACY)
by_shape = kernels / 4 * FORMATS["tf.sparse (two int64)"][0] * (1 - share)
lab.note(
    f"The kernels in `tf.sparse` took {sparse.phase('sparse').held_mib:.1f} MiB, by their shapes "
    f"{by_shape:.1f}, and dense {kernels:.1f}. The allocator hands out a free piece of memory (a "
    "*chunk*) whole, unless it is at least twice as large as what was asked for."
)

# %% [markdown]
# ## Verdict
#
# The claim is about a model that is pruned as published, with no block size. Where that model is to run is left open:
# in TensorFlow, or in an interpreter.

# %%
lab.verdict(
    "C17",
    "fails",
    dense=in_memory["dense"],
    pruned=in_memory["pruned"],
    units_removed=in_memory["units removed"],
    interpreter_dense=running["dense"],
    interpreter_pruned=min(running["pruned"], running["pruned, packed"]),
    interpreter_blocks=running["blocks, packed"],
)

# %% [markdown]
# ## Exercises
#
# **1.** The published schedule ends at step 1000 and renews the masks every 100 steps. Write one for a training of any
# length of 20 steps or more: return the keyword arguments of `PolynomialDecay` (`initial_sparsity`, `final_sparsity`,
# `begin_step`, `end_step`, `frequency`), so that 80 % are zeros in the end, the zeros grow in at least five renewals,
# and a quarter of the steps is left to recover. The masks are renewed at step `begin_step`, at every `frequency`-th step
# behind it, and not behind `end_step`. The first step of a training is step 1.


# %%
def schedule(steps):
    # BEGIN SOLUTION
    frequency = steps // 10
    return {
        "initial_sparsity": 0.2,
        "final_sparsity": 0.8,
        "begin_step": 0,
        "end_step": 6 * frequency,
        "frequency": frequency,
    }
    # END SOLUTION


# %%
check.schedule(schedule, data, LEGACY)


# %% tags=["right"]
def schedule(steps):
    return {
        "initial_sparsity": 0.0,
        "final_sparsity": 0.8,
        "begin_step": 2,
        "end_step": steps // 2,
        "frequency": 1,
    }


# %% tags=["right"]
def schedule(steps):
    return {
        "initial_sparsity": 0.2,
        "final_sparsity": 0.8,
        "begin_step": np.int64(0),
        "end_step": np.int64(10),
        "frequency": np.int64(2),
    }


# %% tags=["wrong"]
# says: whole
def schedule(steps):
    return {
        "initial_sparsity": 0.2,
        "final_sparsity": 0.8,
        "begin_step": 0,
        "end_step": steps * 0.6,
        "frequency": steps * 0.1,
    }


# %% tags=["wrong"]
# says: not 80
def schedule(steps):
    return {
        "initial_sparsity": 0.2,
        "final_sparsity": 0.8,
        "begin_step": 0,
        "end_step": 1000,
        "frequency": 100,
    }


# %% tags=["wrong"]
# says: not 80
def schedule(steps):
    return {
        "initial_sparsity": 0.2,
        "final_sparsity": 0.8,
        "begin_step": 0,
        "end_step": steps // 2,
        "frequency": 7,
    }


# %% tags=["wrong"]
# says: recover
def schedule(steps):
    return {
        "initial_sparsity": 0.2,
        "final_sparsity": 0.8,
        "begin_step": 0,
        "end_step": steps - 1,
        "frequency": 1,
    }


# %% tags=["wrong"]
# says: renewals
def schedule(steps):
    return {
        "initial_sparsity": 0.8,
        "final_sparsity": 0.8,
        "begin_step": 0,
        "end_step": 10,
        "frequency": 10,
    }


# %% [markdown]
# **2.** Save memory with single zeros, at rest: store a kernel as CSR with the smallest index type that fits. Return the
# non-zero values row by row (float32), their columns (`uint16`) and where each row starts (`int32`, rows + 1 numbers).


# %%
def to_csr(kernel):
    # BEGIN SOLUTION
    rows, columns = np.nonzero(kernel)
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(kernel)))])
    return kernel[rows, columns], columns.astype(np.uint16), starts.astype(np.int32)
    # END SOLUTION


# %%
check.to_csr(to_csr, zeroed[2])


# %% tags=["right"]
def to_csr(kernel):
    made = tf.sparse.from_dense(kernel)
    rows, columns = tf.unstack(made.indices, axis=1)
    starts = tf.searchsorted(rows, tf.range(len(kernel) + 1, dtype=tf.int64))
    return made.values, tf.cast(columns, tf.uint16), starts


# %% tags=["wrong"]
# says: row by row
def to_csr(kernel):
    columns, rows = np.nonzero(kernel.T)
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(kernel)))])
    return kernel[rows, columns], columns.astype(np.uint16), starts.astype(np.int32)


# %% tags=["wrong"]
# says: one array
def to_csr(kernel):
    values = [row[row != 0] for row in kernel]
    columns = [np.flatnonzero(row).astype(np.uint16) for row in kernel]
    starts = np.cumsum([0] + [len(row) for row in values], dtype=np.int32)
    return values, columns, starts


# %% tags=["right"]
def to_csr(kernel):
    values, columns, starts = [], [], [0]
    for row in kernel:
        (there,) = row.nonzero()
        values.extend(row[there])
        columns.extend(there)
        starts.append(len(values))
    return np.array(values, "f4"), np.array(columns, "u2"), np.array(starts, "i4")


# %% tags=["wrong"]
# says: columns are int64
def to_csr(kernel):
    rows, columns = np.nonzero(kernel)
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(kernel)))])
    return kernel[rows, columns], columns, starts.astype(np.int32)


# %% tags=["wrong"]
# says: row without values
def to_csr(kernel):
    rows, columns = np.nonzero(kernel)
    starts = np.append(np.flatnonzero(np.diff(rows, prepend=-1)), len(rows))
    return kernel[rows, columns], columns.astype(np.uint16), starts.astype(np.int32)


# %% tags=["wrong"]
# says: columns are uint8
def to_csr(kernel):
    rows, columns = np.nonzero(kernel)
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(kernel)))])
    return kernel[rows, columns], columns.astype(np.uint8), starts.astype(np.int32)


# %% [markdown]
# **3.** Prune a trained kernel in blocks yourself, in NumPy. A kernel has a row for each input and a column for each unit;
# a block is four inputs that follow one another (rows 0–3, 4–7, …), of one unit. Return a kernel in which that share of
# the blocks is zero in which the sum of absolute values is smallest. The file made of it must run without `DENSIFY`.


# %%
def prune_blocks(kernel, share):
    # BEGIN SOLUTION
    strength = np.abs(kernel).reshape(len(kernel) // 4, 4, -1).sum(axis=1)
    weak = np.argsort(strength, axis=None)[: round(share * strength.size)]
    keep = np.ones(strength.size, bool)
    keep[weak] = False
    return kernel * np.repeat(keep.reshape(strength.shape), 4, axis=0)
    # END SOLUTION


# %%
check.prune_blocks(prune_blocks, start[2][:, :256])


# %% tags=["right"]
def prune_blocks(kernel, share):
    blocks = tf.reshape(kernel, (-1, 4, kernel.shape[1]))
    strength = tf.reduce_sum(tf.abs(blocks), axis=1, keepdims=True)
    order = tf.sort(tf.reshape(strength, -1))
    least = order[int(share * len(order))]
    return tf.reshape(tf.where(strength < least, 0.0, blocks), kernel.shape)


# %% tags=["wrong"]
# says: whole kernel
def prune_blocks(kernel, share):
    strength = np.abs(kernel).reshape(-1, 4, kernel.shape[1]).sum(axis=1)
    return kernel * np.repeat(strength >= np.quantile(strength, share, axis=0), 4, axis=0)


# %% tags=["right"]
def prune_blocks(kernel, share):
    result = np.array(kernel)
    blocks = result.reshape(-1, 4, kernel.shape[1])
    strength = abs(blocks).mean(axis=1)
    blocks[np.broadcast_to((strength < np.quantile(strength, share))[:, None], blocks.shape)] = 0
    return result


# %% tags=["wrong"]
# says: in blocks
def prune_blocks(kernel, share):
    return np.where(np.abs(kernel) < np.quantile(np.abs(kernel), share), 0, kernel)


# %% tags=["wrong"]
# says: four inputs of one unit
def prune_blocks(kernel, share):
    strength = np.abs(kernel).reshape(len(kernel), -1, 4).sum(axis=2)
    return kernel * np.repeat(strength >= np.quantile(strength, share), 4, axis=1)


# %% tags=["wrong"]
# says: share
def prune_blocks(kernel, share):
    strength = np.abs(kernel).reshape(-1, 4, kernel.shape[1]).sum(axis=1)
    return kernel * np.repeat(strength < np.quantile(strength, share), 4, axis=0)
