# %% [markdown]
# # 19 · Capstone: bring a training script under its budget
#
# **Symptom:** *"It worked on a small sample. With the real images it dies, and I don't know which part it is."*
#
# **Afterwards you can** take an ordinary training script, measure its parts one by one, name what holds memory that
# nobody needs, and show that the cured script learns as well as before.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, an hour to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | none: here you are judged |
#
# Every run below happens in a process of its own under a memory budget. When it runs out of memory, nothing else does.

# %% tags=["parameters"]
SCALE = "quick"  # "full" trains twice as many epochs for twice as many rates
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import csv
from pathlib import Path

import numpy as np

import labsupport as lab

tf = lab.load_tensorflow()  # import tensorflow as tf, without its start-up log
import keras

# %% [markdown]
# ## Predict
#
# The task: tell 16 classes of photographs apart. The script loads and normalises the images, augments and shuffles
# them, trains a small convolutional network, validates after each epoch, keeps a history, and tries several learning
# rates. Read it. Nothing in it is exotic; every line has been in somebody's tutorial.

# %% tags=["script"]
SIZE, BATCH, CLASSES = 96, 32, 16
EPOCHS = lab.choose(SCALE, quick=6, full=12)
RATES = lab.choose(
    SCALE, quick=(0.001, 0.002, 0.003), full=(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004)
)
MEAN, STD = (
    np.array([0.485, 0.456, 0.406]),
    np.array([0.229, 0.224, 0.225]),
)  # of the red, green and blue channel


def decode(file):
    image = tf.image.resize(tf.io.decode_jpeg(tf.io.read_file(file), channels=3), [SIZE, SIZE])
    return (tf.cast(image, MEAN.dtype) / 255 - MEAN) / STD


def image_dataset(files, labels):
    """A data set of single (image, label) pairs."""
    images = [decode(file) for file in files]
    return tf.data.Dataset.from_tensor_slices((tf.stack(images), labels))


def augment(image, label):
    image = tf.image.random_flip_left_right(image)
    return tf.image.random_brightness(image, 0.2), label


def make_pipeline(images):
    """Shuffled, augmented batches for training."""
    images = images.cache().shuffle(1000)
    return images.map(augment, num_parallel_calls=4).batch(BATCH).prefetch(2)


def build_model():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 3)),
            layers.Conv2D(8, 5, strides=2, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(CLASSES),
        ]
    )


def make_step(model, optimizer):
    """A function (images, labels, rate) → (loss, gradients) that takes one training step."""
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(images, labels, rate):
        with tf.GradientTape() as tape:
            loss = loss_function(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.learning_rate.assign(rate)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss, gradients

    return step


def learning_rate(start, epoch):
    return start * 0.9**epoch


def train_epoch(step, batches, rate, history):
    """One epoch. The history is for plots after training: loss and size of the gradients."""
    for images, labels in batches:
        loss, gradients = step(images, labels, rate)
        history.append({"loss": loss, "gradients": gradients})


def evaluate(model, images):
    """Accuracy on a data set of single images."""
    pictures, labels = next(iter(images.batch(len(images))))
    right = tf.argmax(model(pictures, training=False), axis=1) == tf.cast(labels, tf.int64)
    return float(tf.reduce_mean(tf.cast(right, tf.float32)))


def search(rates, train, validation, epochs):
    """{rate: (last accuracy, history)}, from the same start for each rate."""
    results = {}
    for rate in rates:
        model, history = build_model(), []
        step = make_step(model, keras.optimizers.Adam())
        batches = make_pipeline(train)
        for epoch in range(epochs):
            train_epoch(step, batches, learning_rate(rate, epoch), history)
            accuracy = evaluate(model, validation)
        results[rate] = accuracy, history
    return results


def main(files, labels, validation=160):
    with lab.phase("load"):
        train = image_dataset(files[:-validation], labels[:-validation])
        held_back = image_dataset(files[-validation:], labels[-validation:])
    with lab.phase("search"):
        results = search(RATES, train, held_back, EPOCHS)
    return max(accuracy for accuracy, history in results.values())


# %%
with open("../data/photos.csv", newline="") as table:
    rows = list(csv.DictReader(table))
files = [str(Path("../data/photos", row["file"]).resolve()) for row in rows]
labels = np.array([int(row["class"]) for row in rows])
TRAIN = len(files) - 160

my_guess = lab.guess(
    f"Peak memory of this script: {len(files)} photographs, "
    f"{len(RATES)} trials of {EPOCHS} epochs?",
    GUESS_MIB,
)

# %% [markdown]
# Now the arithmetic, for what the script keeps until its end. Convince yourself of each line: which name, list or data
# set keeps it?

# %%
weights = sum(
    lab.tensor_mib(shape)
    for shape in [
        (5, 5, 3, 8),
        (8,),
        (3, 3, 8, 32),
        (32,),
        (SIZE * SIZE // 64 * 32, 64),
        (64,),
        (64, CLASSES),
        (CLASSES,),
    ]
)
one_image = lab.tensor_mib((SIZE, SIZE, 3), "float64")  # is it? look at the dtype of MEAN
steps = -(-TRAIN // BATCH)
kept = {
    "all images, decoded": len(files) * one_image,
    "the training images once more, in the cache": TRAIN * one_image,
    "gradients in the history": len(RATES) * EPOCHS * steps * weights,
    "models with Adam's state": len(RATES) * 3 * weights,
}
for name, size in kept.items():
    print(f"{size:7.1f} MiB  {name}")
predicted_load, predicted_peak = 2 * TRAIN * one_image, sum(kept.values())
print(
    f"{predicted_peak:7.1f} MiB  in all; while it loads, "
    f"list + stack of the training images: {predicted_load:.1f} MiB"
)

# %% [markdown]
# ## Failure
#
# There are three budgets. The last one is the goal, and the script runs under it as it is.

# %%
BUDGETS = {"generous": "256 MiB", "fair": "128 MiB", "tight": "56 MiB"}

failure = lab.run(
    main, files, labels, budget=BUDGETS["tight"], label=f"as it was, {BUDGETS['tight']}"
)
lab.expect_oom(failure)

# %% [markdown]
# It dies before its first step. A traceback shows one fault, the first that does not fit. Cure it, and the script
# dies elsewhere, perhaps in a line that is innocent: where the last straw falls (lab 16). With room enough, the script
# as it is finishes:

# %%
before = lab.run(main, files, labels, label="as it was, no tight budget")
lab.expect_finished(before)

# %% [markdown]
# ## Fix
#
# Your turn. In the next cell, define again each function that you want to change; copy it from above. What you do not
# define again stays as it was. Keep the names, the arguments and what they mean; `build_model`, `RATES` and `EPOCHS`
# stay too, since the cured script must do the same work. (To see the failure again later, restart the kernel.)
#
# Then run the checker below it. It does not read your code. It calls your functions on small inputs, watches exact
# counters, and names what is left. Cure one fault, run both cells, and look again.


# %% tags=["fix"]
# BEGIN SOLUTION
def decode(file):
    image = tf.image.resize(tf.io.decode_jpeg(tf.io.read_file(file), channels=3), [SIZE, SIZE])
    return (image / 255 - MEAN.astype(np.float32)) / STD.astype(np.float32)


def image_dataset(files, labels):
    """Shuffles the names, which are small, and decodes an image when it is wanted."""
    names = tf.data.Dataset.from_tensor_slices((files, labels)).shuffle(len(files))
    return names.map(lambda file, label: (decode(file), label), num_parallel_calls=4)


def make_pipeline(images):
    return images.map(augment, num_parallel_calls=4).batch(BATCH).prefetch(2)


def learning_rate(start, epoch):
    return tf.constant(start * 0.9**epoch)


def train_epoch(step, batches, rate, history):
    for images, labels in batches:
        loss, gradients = step(images, labels, rate)
        history.append({"loss": float(loss), "gradients": float(tf.linalg.global_norm(gradients))})


def evaluate(model, images):
    right = 0
    for pictures, labels in images.batch(BATCH):
        right += int(
            tf.reduce_sum(
                tf.cast(
                    tf.argmax(model(pictures, training=False), axis=1) == tf.cast(labels, tf.int64),
                    tf.int32,
                )
            )
        )
    return right / len(images)


def search(rates, train, validation, epochs):
    model, optimizer = build_model(), keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    step, batches, start = make_step(model, optimizer), make_pipeline(train), model.get_weights()
    results = {}
    for rate in rates:
        model.set_weights(start)
        for variable in optimizer.variables:
            variable.assign(tf.zeros_like(variable))
        history = []
        for epoch in range(epochs):
            train_epoch(step, batches, learning_rate(rate, epoch), history)
            accuracy = evaluate(model, validation)
        results[rate] = accuracy, history
    return results


# END SOLUTION


my_script = lab.script_functions(globals())

# %%
report = lab.check_script(my_script, files, labels, BUDGETS, accuracy=before.value)
report.frame

# %% [markdown]
# ## Side by side
#
# Before against after. If your script still dies, its bar says how far it came.

# %%
side_by_side = lab.compare(before, failure, report.best)
side_by_side

# %%
lab.predicted_vs_measured(
    loading_before=(predicted_load, before.phase("load").peak_mib),
    peak_before=(predicted_peak, before.peak_mib),
)

# %%
print(my_guess.against(before.peak_mib))
after = f"{report.best.value:.2f}" if report.best.ok else "none, it ran out of memory"
print(
    f"accuracy on photographs that it was not trained on: before {before.value:.2f}, "
    f"after {after}; pure chance is {1 / CLASSES:.2f}"
)

# %% [markdown]
# The prediction counts what stays. The rest is the step's own work: activations, gradients, a few batches on their way.
#
# ## Explain
#
# Each fault has a signature: a quantity that grows with something that it should not grow with.
#
# | fault | grows with | signature | lab |
# |---|---|---|---|
# | eager stack | images | a new data set holds every image | 01 |
# | float64 | nothing | every number of the pipeline has 8 bytes; NumPy's constants are float64 | 02 |
# | decoded buffer | images | `cache` and a large `shuffle` behind the decoding hold them all | 03 |
# | giant batch | validation images | four times the images, four times the peak of `evaluate` | 04 |
# | history | steps | each step leaves a tensor of every weight's size | 07 |
# | retracing | epochs | each new Python number is a new graph, which TensorFlow's allocator does not see | 08 |
# | model per trial | trials | a model that was traced stays, with its optimizer's state | 09 |
#
# Two faults can hide each other. Here a cache behind an eager stack holds the images a second time, and while the
# history grows nobody notices the models. So measure the parts, not only the whole.
#
# Out of memory can look like something else, too. On a CPU, a convolution that gets no room for its output may crash
# the process in place of raising an error. The log of the process still tells what happened just before.
#
# **When it flips.** A small run forgives everything. Move the sliders to find where the script as it was dies.


# %%
def as_it_was(images=416, epochs=6, trials=3, budget_mib=256):
    data = (2 * images - 160) * one_image
    history = trials * epochs * -(-(images - 160) // BATCH) * weights
    total = data + history + trials * 3 * weights
    print(
        f"images {data:.0f} + history {history:.0f} + models {trials * 3 * weights:.0f} = "
        f"{total:.0f} MiB: {'fits' if total < budget_mib else 'dies'} (predicted)"
    )


lab.explore(
    as_it_was,
    images=(192, 10000, 32),
    epochs=(1, 100, 1),
    trials=(1, 50, 1),
    budget_mib=(64, 8192, 64),
)

# %% [markdown]
# ## Verdict
#
# Which budgets does your script pass? Under the first two it must finish and learn as well as before. Under the tight
# one no fault may be left, not even one whose damage this small run survives.

# %%
for level, size in BUDGETS.items():
    missing = report.missing(level, forgive_faults=level != "tight")
    print(f"{level:9s} {size:>8s}: {missing or 'passed'}")
print("faults left:", ", ".join(report.faults) or ("none" if report.measured else report.problem))

# %% [markdown]
# ## Exercises
#
# All three are solved in the cell under "Fix".
#
# **1.** Generous: make the script finish under the first budget, and learn as well as before.

# %%
with lab.exercise(
    1, "Which line of the prediction is the largest? The history needs a number a step (lab 07)."
):
    missing = report.missing("generous", forgive_faults=True)
    assert not missing, missing

# %% [markdown]
# **2.** Fair: half of that.

# %%
with lab.exercise(
    2, "Images: decode them when they are wanted, and shuffle the file names (labs 01 and 03)."
):
    missing = report.missing("fair", forgive_faults=True)
    assert not missing, missing

# %% [markdown]
# **3.** Tight: less than half of that, and no fault left.

# %%
with lab.exercise(
    3, "Go through the checker's table row by row; the lab of each row has the cure."
):
    missing = report.missing("tight")
    assert not missing, missing

# %% [markdown]
# ### Your guesses over the whole course
#
# Each lab asked you for a number before it measured. How far off were you at first, and how far lately? (The
# [start page](start_here.ipynb) shows this too.)

# %%
lab.guesses()
