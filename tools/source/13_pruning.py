# %% [markdown]
# # 13 · Magnitude pruning: what zeros save, and what they do not
#
# **Symptom:** *"I pruned 80 % of my model and it still needs the same memory"*, *"pruned model has the same file
# size"*, or *"Prune() wrapper requires the UpdatePruningStep callback"*.
#
# **Afterwards you can** say what pruning saves (download, disk) and what it does not (memory), check that a pruned
# model is pruned at all, and remove whole units where memory is the problem.
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
SCALE = "quick"  # "full" makes the layers twice as wide, with four times the weights
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import gzip

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import labsupport as lab

tf = lab.load_tensorflow()

WIDTH = lab.choose(SCALE, quick=1024, full=2048)
# Below what pruning needs by less than a kernel: a large tensor fails, and small ones have room.
BUDGET = lab.choose(SCALE, quick="22 MiB", full="80 MiB")
# tf.keras is Keras 2 in a process that starts with this. Without oneDNN's kernels, running out of
# memory is an error every time, and not now and then a crash.
LEGACY = {"TF_USE_LEGACY_KERAS": "1", **lab.NO_ONEDNN}
BATCH, EPOCHS = 64, 5

digits = np.load("../data/digits.npz")
order = np.random.default_rng(0).permutation(len(digits["labels"]))
images = (digits["images"][order].reshape(-1, 64) / 16).astype("float32")
labels = digits["labels"][order].astype("int32")
data = images[:1400], labels[:1400], images[1400:], labels[1400:]
print(f"{len(data[0])} handwritten digits of 8 × 8 pixels to train on, {len(data[2])} to test with")

# %% [markdown]
# ## Predict
#
# The network has two hidden layers. After pruning, four of five weights are zero.

# %%
my_guess = lab.guess(
    "How much memory do the variables of model and optimizer take while it is being pruned?",
    GUESS_MIB,
)

# %% [markdown]
# Now the arithmetic. A tensor is one block of shape × 4 bytes, whatever the numbers in it are. A zero is four bytes.

# %%
layers = [(64, WIDTH), (WIDTH, WIDTH), (WIDTH, 10)]
kernels = sum(lab.tensor_mib(shape) for shape in layers)
weights = kernels + sum(lab.tensor_mib((units,)) for _, units in layers)
print(f"weights: {weights:.2f} MiB, of which kernels {kernels:.2f} MiB")

# %% [markdown]
# To remember which weights are pruned, tfmot adds a *mask* to every kernel: float32, of the kernel's shape. Adam adds
# two values a weight. During a step come the gradients, once more the weights.

# %%
predicted_pruning = weights + kernels + 2 * weights
print(f"dense:   weights + 2 Adam slots         = {3 * weights:5.1f} MiB")
print(f"pruning: weights + masks + 2 Adam slots = {predicted_pruning:5.1f} MiB")
print(f"in a step, for both: + gradients          {weights:5.1f} MiB")

# %% [markdown]
# ## Failure
#
# First the dense network, trained and measured. Its weights are what the article's example calls `model`.


# %%
def network(keras, units=(WIDTH, WIDTH)):
    hidden = [keras.layers.Dense(n, activation="relu") for n in units]
    return keras.Sequential([keras.layers.Input((64,)), *hidden, keras.layers.Dense(10)])


def ready(keras, model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    return model


def variables_mib(model):
    """Size of every variable of model and optimizer together, from shapes and types."""
    variables = model.variables + model.optimizer.variables
    return sum(v.shape.num_elements() * v.dtype.size for v in variables) / 2**20


def train(data, units, start=None):
    keras = tf.keras
    keras.utils.set_random_seed(1)
    x, y, x_test, y_test = data
    with lab.phase("build"):
        model = ready(keras, network(keras, units))
        if start is not None:
            model.set_weights(start)
    with lab.phase("train"):
        model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0)
    accuracy = model.evaluate(x_test, y_test, verbose=0)[1]
    return {"accuracy": accuracy, "weights": model.get_weights(), "variables": variables_mib(model)}


dense = lab.run(train, data, (WIDTH, WIDTH), label="dense", env=LEGACY)
lab.expect_finished(dense)

# %% [markdown]
# The published example wraps the model with a schedule from 20 % to 80 % zeros and calls `fit`. As printed, it does
# this:


# %%
def wrapped(keras, start, steps):
    import tensorflow_model_optimization as tfmot

    model = network(keras)
    model.set_weights(start)
    # The article ends at step 1000. This training is shorter: a mask is renewed every 10 steps,
    # not every 100.
    decay = tfmot.sparsity.keras.PolynomialDecay
    schedule = decay(0.20, 0.80, begin_step=0, end_step=steps, frequency=10)
    return ready(keras, tfmot.sparsity.keras.prune_low_magnitude(model, pruning_schedule=schedule))


def as_printed(data, start):
    x, y, _, _ = data
    try:
        wrapped(tf.keras, start, steps=50).fit(x, y, batch_size=BATCH, epochs=1, verbose=0)
    except tf.errors.InvalidArgumentError as error:
        return next(line for line in error.message.splitlines() if "assertion failed" in line)


printed = lab.measure(as_printed, data, dense.value["weights"], label="as printed", env=LEGACY)
assert printed.value, "the published example trains now; the text below is out of date"
print(printed.value.split("] [")[0] + "]")

# %% [markdown]
# A callback is missing that counts the steps and applies the masks. With it, training starts. It runs under a budget
# that the dense network would need more than: this is what pruning is recommended for.


# %%
def pruning(data, start):
    import tensorflow_model_optimization as tfmot

    keras = tf.keras
    keras.utils.set_random_seed(1)
    x, y, x_test, y_test = data
    with lab.phase("wrap"):
        model = wrapped(keras, start, steps=EPOCHS * len(x) // BATCH * 3 // 4)
    callbacks = [tfmot.sparsity.keras.UpdatePruningStep()]
    with lab.phase("train"):
        model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    variables = variables_mib(model)
    stripped = ready(keras, tfmot.sparsity.keras.strip_pruning(model))
    accuracy = stripped.evaluate(x_test, y_test, verbose=0)[1]
    return {"accuracy": accuracy, "weights": stripped.get_weights(), "variables": variables}


start = dense.value["weights"]
failure = lab.run(pruning, data, start, budget=BUDGET, label="pruning under the budget", env=LEGACY)
lab.expect_oom(failure)

# %% [markdown]
# ## Fix
#
# Without the budget, pruning finishes. `strip_pruning` takes the masks off again. Before anything about size is
# measured: **is the model pruned at all?** Without the callback, or with a schedule that ends after training does, the
# zeros are not there, and every size below would be that of a dense model.

# %%
pruned = lab.run(pruning, data, start, label="pruning", env=LEGACY)
lab.expect_finished(pruned)


def zeros(weights):
    """Share of zeros in the kernels; biases are not pruned."""
    kernels = [w for w in weights if w.ndim == 2]
    return sum(np.count_nonzero(k == 0) for k in kernels) / sum(k.size for k in kernels)


for result in (dense, pruned):
    share, accuracy = zeros(result.value["weights"]), result.value["accuracy"]
    print(f"{result.label:8} {share:6.1%} zeros, accuracy {accuracy:.1%}")
assert share > 0.75, "not pruned: is the callback there, does the schedule end before training?"
assert accuracy > dense.value["accuracy"] - 0.05, "pruning cost over five points of accuracy"

# %% [markdown]
# The zeros are real and accuracy is kept. Memory is not saved. **What works** is to remove whole units: their columns
# and rows leave the kernels, so that the tensors get smaller. Units are ranked by the size of what comes in times the
# size of what goes out. To keep as many weights as pruning leaves (one in five), keep √0.2 = 45 % of the units.


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


small = shrink(dense.value["weights"], keep=0.2**0.5)
small_units = tuple(w.shape[0] for w in small[1:-1:2])
print("hidden units:", (WIDTH, WIDTH), "→", small_units)
fix = lab.run(train, data, small_units, small, budget=BUDGET, label="units removed", env=LEGACY)
lab.expect_finished(fix)

# %% [markdown]
# ## Side by side

# %%
lab.compare(dense, pruned, failure, fix)

# %% [markdown]
# The peak has more in it than variables: gradients and the intermediates of the update. (It moves by a few MiB from
# run to run: the allocator hands out a free chunk whole unless it is twice as large as what was asked for.) The
# variables of model and optimizer alone, which stay from step to step:

# %%
trained = {result.label: result.value["variables"] for result in (dense, pruned, fix)}
few = sum(w.size * 4 for w in small) / 2**20
lab.predicted_vs_measured(
    dense=(3 * weights, trained["dense"]),
    pruning=(predicted_pruning, trained["pruning"]),
    units_removed=(3 * few, trained["units removed"]),
)

# %%
print(my_guess.against(trained["pruning"]))

# %% [markdown]
# And the finished models: the weights in TensorFlow's memory, files, and a TensorFlow Lite interpreter that runs them.
# `EXPERIMENTAL_SPARSITY` asks the converter to store zeros compactly.


# %%
def packaged(models):
    import os

    kept, keras_files, tflite_files = [], {}, {}
    for name, (_, weights) in models.items():
        # Computed by TensorFlow, so that its allocator counts them: where it can, it borrows the
        # memory of NumPy arrays.
        with lab.phase(name):
            kept.append([tf.cast(w.astype("float64"), tf.float32) for w in weights])
    for name, (units, weights) in models.items():
        model, path = network(tf.keras, units), f"{os.environ['TMPDIR']}/model.keras"
        model.set_weights(weights)
        model.save(path)
        keras_files[name] = os.path.getsize(path) / 2**20
        converter = tf.lite.TFLiteConverter.from_keras_model(model)
        tflite_files[name] = converter.convert()
        if name == "pruned":
            converter = tf.lite.TFLiteConverter.from_keras_model(model)
            converter.optimizations = [tf.lite.Optimize.EXPERIMENTAL_SPARSITY]
            tflite_files["pruned, sparse"] = converter.convert()
    sparse = [tf.sparse.from_dense(w) for w in models["pruned"][1] if w.ndim == 2]
    parts = [part for matrix in sparse for part in (matrix.indices, matrix.values)]
    sparse_mib = sum(part.shape.num_elements() * part.dtype.size for part in parts) / 2**20
    return keras_files, tflite_files, sparse_mib


models = {
    "dense": ((WIDTH, WIDTH), dense.value["weights"]),
    "pruned": ((WIDTH, WIDTH), pruned.value["weights"]),
    "units removed": (small_units, fix.value["weights"]),
}
packaging = lab.measure(packaged, models, label="saving and converting", env=LEGACY)
in_memory = {name: packaging.phase(name).added_mib for name in models}
keras_files, files, sparse_mib = packaging.value


def served(files, x):
    import os
    from pathlib import Path

    alive = []  # no interpreter reuses the memory of another

    def interpreter(name):
        path = Path(os.environ["TMPDIR"], "model.tflite")
        path.write_bytes(files[name])
        before = lab.reading().process_mib
        running = tf.lite.Interpreter(model_path=str(path), num_threads=1)
        alive.append(running)
        running.allocate_tensors()
        (entry,), (answer,) = running.get_input_details(), running.get_output_details()
        classes = []
        for row in x:
            running.set_tensor(entry["index"], row[None])
            running.invoke()
            classes.append(int(running.get_tensor(answer["index"]).argmax()))
        return lab.reading().process_mib - before, np.array(classes)

    interpreter("units removed")  # to warm up: the interpreter's own code is not the model's memory
    return {name: interpreter(name) for name in files}


serving = lab.measure(served, files, data[2], label="interpreters").value


# %%
def packed(content):
    return len(gzip.compress(content, compresslevel=6)) / 2**20


sizes = pd.DataFrame(
    {
        "in memory": in_memory,
        ".keras file": keras_files,
        ".tflite file": {name: len(content) / 2**20 for name, content in files.items()},
        ".tflite, gzip": {name: packed(content) for name, content in files.items()},
        "running interpreter": {name: process for name, (process, _) in serving.items()},
    },
    index=list(files),
)
axes = sizes.T.plot.bar(rot=0, width=0.8, ylabel="MiB")
axes.set_title("Zeros save where they are packed, removed units everywhere")
for bars, name in zip(axes.containers, sizes.index):
    bars.datavalues = sizes.loc[name].to_numpy()  # pandas draws what is missing as if it were 0
plt.show()
accuracy = {name: f"{np.mean(classes == data[3]):.1%}" for name, (_, classes) in serving.items()}
print(sizes.round(2).assign(accuracy=accuracy).to_string(na_rep="–"))

# %% [markdown]
# ## Explain
#
# * **In memory**: a pruned kernel is a dense tensor with zeros in it. The same shape, the same bytes. Its gradients and
#   Adam's slots do not get smaller either.
# * **While pruning**: the mask doubles what the kernels take. The model is at its largest when it is meant to shrink.
# * **On disk**: the saved file is as large as before. Zeros compress well, so gzip or the sparse format make it small.
#   A model that must travel gains from that.
# * **In the interpreter**: the sparse file is unpacked into dense memory before it runs, and the packed form stays
#   beside it. It needs no less than the dense file; here it needs more.
# * **Units removed**: smaller shapes. Everything that follows from a shape gets smaller: weights, gradients, slots,
#   activations, file, interpreter. What it cannot do: make the *first* training of the dense network fit.
#
# **When it flips.** A sparse format keeps an index beside every value that is left. `tf.sparse` keeps two int64
# numbers: 16 bytes for each 4 bytes of value. CSR keeps one int32. A bitmap keeps one bit for *every* weight.
# Where does each begin to save memory?

# %%
FORMATS = {
    "dense": lambda share: 4.0,
    "tf.sparse (two int64)": lambda share: share * (4 + 16),
    "CSR (one int32)": lambda share: share * (4 + 4),
    "bitmap": lambda share: share * 4 + 1 / 8,
}
share_zero = np.linspace(0, 1, 101)
lines = {name: kernels / 4 * size(1 - share_zero) for name, size in FORMATS.items()}
axes = pd.DataFrame(lines, index=share_zero).plot(style=lab.LINES[:4], ylim=(0, 2.5 * kernels))
at = zeros(pruned.value["weights"])
axes.plot(at, sparse_mib, "o", color=lab.COLOURS[1], ms=9, mec="black", label="tf.sparse, measured")
axes.set(xlabel="share of zeros", ylabel="kernels in memory (MiB, predicted)")
axes.legend(loc="upper right")
plt.show()
predicted_sparse = kernels / 4 * FORMATS["tf.sparse (two int64)"](1 - at)
lab.predicted_vs_measured(tf_sparse=(predicted_sparse, sparse_mib))

# %% [markdown]
# At the article's own target, 80 %, `tf.sparse` only just breaks even. Move the slider: which share of zeros does each
# format need before it saves half?


# %%
def formats(zero_share=0.8):
    for name, size in FORMATS.items():
        of_dense = size(1 - zero_share) / 4
        saves = "saves" if of_dense < 0.995 else "saves nothing"
        part = f"{kernels * of_dense:6.2f} MiB  {of_dense:5.0%} of dense"
        print(f"{name:22} {part}  {saves} (predicted)")


lab.explore(formats, zero_share=(0.0, 0.99, 0.01))

# %% [markdown]
# ## Verdict

# %%
lab.verdict(
    "C17",
    "fails",
    ram_dense=in_memory["dense"],
    ram_pruned=in_memory["pruned"],
    training_dense=trained["dense"],
    training_pruned=trained["pruning"],
    interpreter_dense=sizes["running interpreter"]["dense"],
    interpreter_sparse=sizes["running interpreter"]["pruned, sparse"],
    gzip_dense=sizes[".tflite, gzip"]["dense"],
    gzip_pruned=sizes[".tflite, gzip"]["pruned"],
    ram_units_removed=in_memory["units removed"],
)
assert sizes[".tflite, gzip"]["pruned"] < 0.5 * sizes[".tflite, gzip"]["dense"]
assert in_memory["units removed"] < 0.6 * in_memory["dense"]
assert fix.value["accuracy"] > dense.value["accuracy"] - 0.05

# %% [markdown]
# ## Exercises
#
# **1.** The article's schedule ends at step 1000 and renews the masks every 100 steps. How many zeros are there when
# training stops earlier? PolynomialDecay sets, at a step *t* that is a multiple of `frequency`, the share
# `final + (initial − final) · (1 − t / end)³`; between two such steps the last share stays.


# %%
def share_of_zeros(steps, initial=0.20, final=0.80, end=1000, frequency=100):
    """Share of zeros after `steps` training steps (counted from 0: the last is steps - 1)."""
    # BEGIN SOLUTION
    last = min(steps - 1, end) // frequency * frequency
    return final + (initial - final) * (1 - last / end) ** 3
    # END SOLUTION


with lab.exercise(
    1,
    "The last renewal is at (steps - 1) rounded down to a multiple of frequency, "
    "and no later than `end`.",
):
    assert share_of_zeros(110) is not None, (
        "share_of_zeros() returns nothing yet: return a share between 0 and 1."
    )
    assert abs(share_of_zeros(1) - 0.20) < 1e-9, "the first step prunes the initial share."
    assert abs(share_of_zeros(2000) - 0.80) < 1e-9, (
        "after the end of the schedule the share is the final one."
    )
    assert abs(share_of_zeros(110) - 0.3626) < 1e-3, (
        f"110 steps: the last renewal is at step 100, not {share_of_zeros(110):.3f}."
    )
    share = f"{share_of_zeros(110):.0%} zeros with the article's schedule, not 80 %"
    print(f"Five epochs here are 110 steps: {share}.")

# %% [markdown]
# **2.** Save memory with the zeros, at rest: store a kernel as CSR with the smallest index type that fits. Return the
# non-zero values row by row (float32), their columns (`uint16`) and where each row starts (`int32`, rows + 1 numbers).


# %%
def to_csr(kernel):
    # BEGIN SOLUTION
    rows, columns = np.nonzero(kernel)
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(kernel)))])
    return kernel[rows, columns], columns.astype(np.uint16), starts.astype(np.int32)
    # END SOLUTION


kernel = pruned.value["weights"][2]
with lab.exercise(
    2,
    "np.nonzero(kernel) gives rows and columns in order; "
    "np.bincount(rows, minlength=…) counts each row.",
):
    parts = to_csr(kernel)
    assert parts is not None, "to_csr() returns nothing yet: return values, columns, starts."
    values, columns_of, starts = parts
    assert len(starts) == len(kernel) + 1 and starts[-1] == len(values), (
        "starts needs rows + 1 numbers; the last is the number of values."
    )
    back = np.zeros_like(kernel)
    for row in range(len(kernel)):
        span = slice(starts[row], starts[row + 1])
        back[row, columns_of[span]] = values[span]
    assert np.array_equal(back, kernel), "the kernel cannot be rebuilt from these parts."
    size = sum(part.nbytes for part in parts)
    assert size < 0.35 * kernel.nbytes, (
        f"{size / kernel.nbytes:.0%} of the dense bytes: are columns uint16 and values float32?"
    )

# %% [markdown]
# **3.** How far can units be removed? Choose the share of units to keep so that training needs less than a tenth of
# the dense peak and accuracy stays within five points of the dense network.


# %%
def my_keep():
    # BEGIN SOLUTION
    return 0.2
    # END SOLUTION


smaller = None
if my_keep() is not None:
    fewer = shrink(dense.value["weights"], my_keep())
    units = tuple(w.shape[0] for w in fewer[1:-1:2])
    smaller = lab.run(train, data, units, fewer, label="fewer units", env=LEGACY, quiet=True)
with lab.exercise(
    3,
    "Memory goes with the square of the share where two hidden layers meet: "
    "0.45 leaves a fifth, 0.2 a twenty-fifth.",
):
    assert smaller is not None, (
        "my_keep() returns nothing yet: return a share between 0 and 1, such as 0.3."
    )
    assert smaller.ok, str(smaller.error)
    assert smaller.peak_mib < 0.1 * dense.peak_mib, (
        f"peak {smaller.peak_mib:.1f} MiB against {dense.peak_mib:.1f}: keep fewer units."
    )
    assert smaller.value["accuracy"] > dense.value["accuracy"] - 0.05, (
        f"accuracy {smaller.value['accuracy']:.1%}: keep more units."
    )
