# %% [markdown]
# # 14 · Quantization and distillation: small at rest, or small while it runs
#
# **Symptom:** *"I quantized my model to int8 and it needs as much memory as before"*, *"the float16 model needs more
# RAM than the float32 one"*, or *"OOM since I added the teacher to my training loop"*.
#
# **Afterwards you can** choose a quantized format by what it needs while it runs, not by the size of its file, train a
# small student without its large teacher in memory, and tell when distillation helps at all.
#
# | | |
# |---|---|
# | Time | about 2 minutes to run, 30 to work through |
# | Memory | below 2 GiB, Python and TensorFlow included |
# | Claims judged | C18, C19 |
#
# *Quantization* stores weights in fewer bits: float16 (2 bytes) or int8 (1 byte and a scale) in place of float32
# (4 bytes). *Distillation* trains a small network, the student, on the outputs of a large one, the teacher.

# %% tags=["parameters"]
SCALE = "quick"  # "full" makes the teacher twice as wide
GUESS_MIB = 0.0  # a starting value for the guess below

# %%
import matplotlib.pyplot as plt
import numpy as np

from labsupport import (
    choose, compare, exercise, expect_oom, explore, guess, load_tensorflow, phase, predicted_vs_measured, run, tensor_mib, verdict,
)  # fmt: skip
from labsupport.showing.palette import COLOURS

tf = load_tensorflow()
import keras

TEACHER = choose(SCALE, quick=(4096, 512), full=(8192, 512))  # hidden units of the teacher
STUDENT = (32,)
BUDGET = choose(SCALE, quick="24 MiB", full="46 MiB")
STEPS, FEW = 300, 100  # training steps of a student; labels in the setting with few of them

digits = np.load("../data/digits.npz")
order = np.random.default_rng(0).permutation(len(digits["labels"]))
images = (digits["images"][order].reshape(-1, 64) / 16).astype("float32")
labels = digits["labels"][order].astype("int32")
data = images[:1297], labels[:1297], images[1297:], labels[1297:]
N = len(data[0])
print(f"{N} handwritten digits of 8 × 8 pixels to train on, {len(data[2])} to test with")

# %% [markdown]
# ## Predict
#
# The student has 32 hidden units and trains on all images as one batch; that is nothing. The teacher stands beside it
# and answers for the same batch.

# %%
my_guess = guess("Peak tensor memory of training the student with the teacher beside it?", GUESS_MIB)

# %% [markdown]
# Now the arithmetic, from the shapes of the two networks.

# %%
def weights_mib(units):
    sizes = [64, *units, 10]
    return sum(tensor_mib((n, m)) + tensor_mib((m,)) for n, m in zip(sizes, sizes[1:]))


teacher_weights, student_weights = weights_mib(TEACHER), weights_mib(STUDENT)
print(f"teacher: {teacher_weights:.2f} MiB of float32 weights, {teacher_weights / 2:.2f} in float16, {teacher_weights / 4:.2f} in int8")
print(f"student: {student_weights:.3f} MiB, {teacher_weights / student_weights:.0f} times smaller")

# %% [markdown]
# The teacher only answers; nothing is kept for gradients. At its worst moment it holds two tensors of the size of its
# widest layer's output: before and after the bias is added.

# %%
widest = tensor_mib((N, max(TEACHER)))
predicted_beside = teacher_weights + 2 * widest
print(f"teacher's weights {teacher_weights:.1f} MiB + 2 × {N} × {max(TEACHER)} × 4 B = {predicted_beside:.1f} MiB")

# %% [markdown]
# ## Failure
#
# First the teacher is trained, with memory to spare. Its outputs for the training images come back with it; they are
# used further down.

# %%
def network(units, start="glorot_uniform"):
    hidden = [keras.layers.Dense(n, activation="relu", kernel_initializer=start) for n in units]
    return keras.Sequential([keras.layers.Input((64,)), *hidden, keras.layers.Dense(10, kernel_initializer=start)])


def loaded(units, weights):
    model = network(units, start="zeros")  # a random start that is thrown away would need memory, too
    model.set_weights(weights)
    return model


def train_teacher(data):
    keras.utils.set_random_seed(1)
    x, y, x_test, y_test = data
    model = network(TEACHER)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    model.fit(x, y, batch_size=64, epochs=5, verbose=0)
    return {"accuracy": model.evaluate(x_test, y_test, verbose=0)[1], "weights": model.get_weights(), "outputs": model.predict(x, verbose=0)}


teacher = run(train_teacher, data, label="teacher")
teacher.need()
print(f"accuracy of the teacher: {teacher.value['accuracy']:.1%}")

# %% [markdown]
# **Distillation.** The student's loss is mostly the distance to the teacher's softened outputs, and for a tenth the
# ordinary loss on the labels.

# %%
def train_student(data, labelled, answers=None, steps=STEPS, seeds=3):
    """Train students on the first `labelled` labels and, for all images, on answers(images) of a teacher if given."""
    x, y, x_test, y_test = map(tf.constant, data)
    accuracies, losses = [], []
    for seed in range(seeds):
        keras.utils.set_random_seed(seed)
        student, optimizer = network(STUDENT), keras.optimizers.Adam(0.01)
        optimizer.build(student.trainable_variables)

        @tf.function
        def step(soft=None):
            with tf.GradientTape() as tape:
                outputs = student(x)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y[:labelled], outputs[:labelled]))
                if soft is not None:
                    distance = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(soft, outputs / 4.0))
                    loss = 0.1 * loss + 0.9 * 4.0**2 * distance
            gradients = tape.gradient(loss, student.trainable_variables)
            optimizer.apply_gradients(zip(gradients, student.trainable_variables))
            return loss

        # The teacher answers outside the tf.function: on a CPU, TensorFlow 2.21 crashes in place of raising an error
        # when a layer runs out of memory that the graph has fused with its activation.
        trajectory = [float(step() if answers is None else step(tf.nn.softmax(answers(x) / 4.0))) for _ in range(steps)]
        losses = losses or trajectory  # of the first seed
        accuracies.append(float(np.mean(np.argmax(student(x_test), axis=1) == y_test)))
    return {"accuracy": float(np.mean(accuracies)), "losses": losses}


def beside(data, weights):
    with phase("load the teacher"):
        large = loaded(TEACHER, weights)
    with phase("distil"):
        return train_student(data, N, answers=large, steps=5, seeds=1)


failure = run(beside, data, teacher.value["weights"], budget=BUDGET, label="teacher beside, under the budget")
expect_oom(failure);

# %% [markdown]
# The tensor that did not fit belongs to the teacher. What it would have needed, in five steps without the budget:

# %%
unbounded = run(beside, data, teacher.value["weights"], label="teacher beside")
unbounded.need();

# %% [markdown]
# **Quantization.** Keras has a call for it: `model.quantize("int8")`. Weights at rest, and one call of the model on 32
# images, before and after:

# %%
def quantized_in_keras(data, weights):
    import gc

    _, _, x_test, y_test = data
    batch = x_test[:32]
    with phase("float32 loaded"):
        model = loaded(TEACHER, weights)
    with phase("float32 call"):
        model(batch)
    with phase("quantize"):
        model.quantize("int8")
        gc.collect()
    with phase("int8 call"):
        model(batch)
    return float(np.mean(np.argmax(model.predict(x_test, batch_size=32, verbose=0), axis=1) == y_test))


in_keras = run(quantized_in_keras, data, teacher.value["weights"], label="model.quantize in Keras")
in_keras.need()
rest_float, call_float, rest_int8, call_int8 = (
    (p.held if "call" not in p.name else p.peak) / 2**20 for p in in_keras.phases
)
print(f"{'MiB':10}{'at rest':>10}{'peak of a call':>16}")
print(f"{'float32':10}{rest_float:>10.1f}{call_float:>16.1f}")
print(f"{'int8':10}{rest_int8:>10.1f}{call_int8:>16.1f}")

# %% [markdown]
# At rest it is a quarter. But on a CPU each call brings the kernel back to 32 bits before it multiplies: at the peak of a
# call, the quantized model needs no less than before.
#
# ## Fix
#
# **Distillation: ask the teacher once.** Its outputs for all images are one small tensor. Compute them where the
# teacher fits, keep them, and train the student without it. For a fair judgement, the same student also trains alone;
# both with all labels and with labels for the first 100 images only.

# %%
def cached(data, outputs):
    outputs = tf.constant(outputs)
    return {"all labels": train_student(data, N, lambda x: outputs), f"{FEW} labels": train_student(data, FEW, lambda x: outputs)}


def alone(data):
    return {"all labels": train_student(data, N), f"{FEW} labels": train_student(data, FEW)}


fix = run(cached, data, teacher.value["outputs"], budget=BUDGET, label="teacher's outputs cached")
fix.need()
control = run(alone, data, budget=BUDGET, label="student alone", quiet=True)
control.need();

# %% [markdown]
# **Quantization: a runtime that computes in int8.** The converter of TensorFlow Lite makes four files of the same
# teacher. Full int8 needs some typical inputs to choose the scales of the activations (post-training quantization).

# %%
def convert(data, weights):
    import contextlib, io

    model, files = loaded(TEACHER, weights), {}

    def typical_inputs():
        for image in data[0][:100]:
            yield [image[None]]

    for kind in ("float32", "float16", "int8 weights", "int8"):
        converter = tf.lite.TFLiteConverter.from_keras_model(model)
        if kind != "float32":
            converter.optimizations = [tf.lite.Optimize.DEFAULT]  # alone: int8 weights, "dynamic range"
        if kind == "float16":
            converter.target_spec.supported_types = [tf.float16]
        if kind == "int8":
            converter.representative_dataset = typical_inputs
            converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
        with contextlib.redirect_stdout(io.StringIO()):
            files[kind] = converter.convert()
    return files


files = run(convert, data, teacher.value["weights"], label="converter", quiet=True).need().value


def serve(content, images, labels):
    import os

    path = f"{os.environ['TMPDIR']}/model.tflite"
    with open(path, "wb") as file:
        file.write(content)
    interpreter = tf.lite.Interpreter(model_path=path, num_threads=1)
    interpreter.allocate_tensors()
    entry, exit = interpreter.get_input_details()[0]["index"], interpreter.get_output_details()[0]["index"]
    classes = []
    for image in images:
        interpreter.set_tensor(entry, image[None])
        interpreter.invoke()
        classes.append(int(interpreter.get_tensor(exit).argmax()))
    tf.running_interpreter = interpreter  # kept alive, so that the end of the run is measured with it
    return float(np.mean(np.array(classes) == labels))


serving = {kind: run(serve, content, data[2], data[3], label=kind, quiet=True).need() for kind, content in files.items()}

# %% [markdown]
# ## Side by side

# %%
compare(unbounded, failure, fix, control)

# %%
predicted_vs_measured(teacher_beside=(predicted_beside, unbounded.peak_mib))

# %%
print(my_guess.against(unbounded.peak_mib))
same = max(abs(a - b) for a, b in zip(unbounded.value["losses"], fix.value["all labels"]["losses"]))
print(f"Losses of the first steps, teacher beside and outputs cached, differ by {same / unbounded.value['losses'][0]:.1%} at most.")
assert same < 0.05 * unbounded.value["losses"][0]

# %% [markdown]
# What distillation gave, as accuracy on the test images (the mean of three students each):

# %%
accuracy = {
    setting: (control.value[setting]["accuracy"], fix.value[setting]["accuracy"]) for setting in ("all labels", f"{FEW} labels")
}
figure, axes = plt.subplots(figsize=(8, 2.2), layout="constrained")
for index, name in enumerate(("student alone", "distilled student")):
    axes.plot([100 * pair[index] for pair in accuracy.values()], range(2), "os"[index], ms=11, color=COLOURS[1 + index], label=name)
axes.axvline(100 * teacher.value["accuracy"], color=COLOURS[0], lw=2, ls="--", label="teacher")
axes.set(xlabel="accuracy (%)", ylim=(1.5, -0.5))
axes.set_yticks(range(2), list(accuracy))
axes.grid(axis="y", alpha=0.4)
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()
print(f"teacher, {teacher_weights:.2f} MiB: {teacher.value['accuracy']:.1%}")
for setting, (by_itself, distilled) in accuracy.items():
    print(f"student, {student_weights:.3f} MiB, {setting}: alone {by_itself:.1%}, distilled {distilled:.1%}")

# %% [markdown]
# And the four files of the teacher: on disk, and what they add to the process that runs them. (The interpreter's own
# code is in there, too: a few MiB, the same for each.)

# %%
figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
rows = {kind: [len(files[kind]) / 2**20, result.process_end_mib, result.process_peak_mib] for kind, result in serving.items()}
for index, name in enumerate(("file", "interpreter, running", "interpreter, peak")):
    places = np.arange(len(rows)) + (index - 1) * 0.27
    axes.bar(places, [row[index] or 0 for row in rows.values()], 0.25, label=name, color=COLOURS[index], hatch=["", "//", ".."][index], edgecolor="white")
axes.set(ylabel="MiB")
axes.set_xticks(range(len(rows)), list(rows))
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
plt.show()
print(f"{'MiB':14}{'file':>8}{'running':>10}{'peak':>8}{'accuracy':>11}")
for kind, row in rows.items():
    print(f"{kind:14}" + "".join(f"{'–' if size is None else f'{size:.1f}':>{width}}" for size, width in zip(row, (8, 10, 8))) + f"{serving[kind].value:>11.1%}")

# %% [markdown]
# ## Explain
#
# * **Teacher beside the student**: the student's size does not matter. The step needs the teacher's weights and its
#   widest outputs for the whole batch. Asked once, the teacher leaves behind images × classes × 4 bytes.
# * **Does the teacher help?** The control decides: the same student, the same steps, no teacher. Where every image has
#   a label, the student learns as well from the labels. Where most labels are missing, the teacher's answers replace
#   them (here the teacher had seen them all: the labels are gone, the teacher is not).
# * **float32 in the interpreter**: the file is mapped into memory, and the kernels are packed a second time in the order
#   that the CPU multiplies fastest. Twice the file.
# * **float16**: half the file. But this CPU path multiplies in float32, so the interpreter first expands every weight
#   and then packs it. While it starts, it needs more than the float32 file does.
# * **int8**: expanded nowhere. Packed int8 beside mapped int8; the rest of its bar is the interpreter's own code.
# * **int8 in Keras**: stored in int8, multiplied in 32 bits. It saves in a model of many layers, since only one layer is
#   expanded at a time, and not where one kernel is most of the model, as here.
# * None of this helps *training*: the weights were trained in float32 first.
#
# **When it flips.** Cached outputs grow with images and with classes; the teacher does not. Move the sliders: when is
# it cheaper to keep the teacher?

# %%
def cache_or_teacher(images=N, classes=10, batch=64):
    keep = tensor_mib((images, classes))
    ask = teacher_weights + 2 * tensor_mib((batch, max(TEACHER)))
    print(f"cached outputs {keep:10.2f} MiB   teacher beside, batch {batch}: {ask:6.1f} MiB   {'cache' if keep < ask else 'keep the teacher'} (predicted)")


explore(cache_or_teacher, images=(1000, 100_000, 1000), classes=(10, 50_000, 10), batch=(16, 2048, 16))

# %% [markdown]
# ## Verdict

# %%
verdict(
    "C18",
    "holds",
    figures={
        "file_float32": rows["float32"][0],
        "file_float16": rows["float16"][0],
        "file_int8": rows["int8"][0],
        "running_float32": rows["float32"][1],
        "running_int8": rows["int8"][1],
        "peak_float32": rows["float32"][2],
        "peak_float16": rows["float16"][2],
        "accuracy_float32": serving["float32"].value,
        "accuracy_int8": serving["int8"].value,
        "keras_call_float32": call_float,
        "keras_call_int8": call_int8,
    },
    tests={
        "the int8 file is less than a third of the float32 file": "file_int8 < 0.33 * file_float32",
        "the interpreter that runs it needs less than half": "running_int8 < 0.5 * running_float32",
        "it loses less than two points of accuracy": "accuracy_int8 > accuracy_float32 - 0.02",
    },
    because="int8 weights are a quarter of float32, in the file and in an interpreter that computes in int8.",
    flips="float16 halves the file, not the memory; Keras' own int8 saves at rest, and a call expands the layer to 32 bits.",
    unit="MiB; accuracy as a share",
)
assert call_int8 > 0.8 * call_float, "a call of the int8 model in Keras needs clearly less now: the text above is out of date"
if rows["float16"][2] is not None:
    assert rows["float16"][2] > 0.9 * rows["float32"][2], "float16 needs clearly less than float32 now: the text above is out of date"

# %%
verdict(
    "C19",
    "partly",
    figures={
        "teacher": teacher_weights,
        "student": student_weights,
        "training_beside": unbounded.peak_mib,
        "training_cached": fix.peak_mib,
        "training_alone": control.peak_mib,
        "accuracy_teacher": teacher.value["accuracy"],
        "accuracy_distilled": accuracy["all labels"][1],
        "accuracy_alone": accuracy["all labels"][0],
        "accuracy_distilled_few_labels": accuracy[f"{FEW} labels"][1],
        "accuracy_alone_few_labels": accuracy[f"{FEW} labels"][0],
    },
    tests={
        "the student has less than a tenth of the weights and stays within three points of the teacher": "student < 0.1 * teacher and accuracy_distilled > accuracy_teacher - 0.03",
        "it owes that to the teacher: trained alone it is at least half a point worse": "accuracy_alone < accuracy_distilled - 0.005",
        "distilling with the teacher beside takes less than twice the memory of training alone": "training_beside < 2 * training_alone",
    },
    because="The small model comes from choosing a small one; with all labels it learns as well alone, and the teacher beside it costs the teacher's memory.",
    flips="With few labels the distilled student is clearly better; with cached outputs it trains in a student's memory.",
    unit="MiB; accuracy as a share",
)
assert accuracy[f"{FEW} labels"][1] > accuracy[f"{FEW} labels"][0] + 0.02
assert fix.peak_mib < 0.2 * unbounded.peak_mib

# %% [markdown]
# ## Exercises
#
# **1.** Quantize a kernel by hand: one scale for each column, so that the largest absolute value in the column becomes
# 127. Return the rounded int8 numbers and the float32 scales; numbers × scales must give the kernel back.

# %%
def to_int8(kernel):
    # BEGIN SOLUTION
    scales = np.abs(kernel).max(axis=0) / 127
    return np.round(kernel / scales).astype(np.int8), scales.astype(np.float32)
    # END SOLUTION


kernel = teacher.value["weights"][2]
with exercise(1, "scales = np.abs(kernel).max(axis=0) / 127; divide, np.round, astype(np.int8)."):
    assert to_int8(kernel) is not None, "to_int8() returns nothing yet: return numbers, scales."
    numbers, scales = to_int8(kernel)
    assert numbers.dtype == np.int8 and scales.shape == kernel.shape[1:], "numbers must be int8, with one scale a column."
    error = np.abs(numbers * scales - kernel)
    assert (error <= 0.51 * scales).all(), "some weights are off by more than half a step: is the scale of each its own column's?"
    assert numbers.nbytes + scales.nbytes < 0.26 * kernel.nbytes

# %% [markdown]
# **2.** Sometimes outputs cannot be cached, because the images are augmented anew in each epoch. Let the teacher answer
# in pieces of 128 images, so that it fits beside the student under the budget.

# %%
def in_pieces(teacher, images):
    # BEGIN SOLUTION
    return tf.concat([teacher(images[i : i + 128]) for i in range(0, len(images), 128)], axis=0)
    # END SOLUTION


def beside_in_pieces(data, weights):
    large = loaded(TEACHER, weights)
    return train_student(data, N, lambda images: in_pieces(large, images), steps=5, seeds=1)


pieces = None
tried = in_pieces(lambda images: 2 * images, np.arange(600, dtype=np.float32).reshape(300, 2))
if tried is not None and tried.shape == (300, 2):
    pieces = run(beside_in_pieces, data, teacher.value["weights"], budget=BUDGET, label="teacher in pieces", quiet=True)
with exercise(2, "Call the teacher on images[i : i + 128] for every 128th i, and join the answers with tf.concat(…, axis=0)."):
    assert tried is not None, "in_pieces() returns nothing yet: return the teacher's outputs for all images."
    assert pieces is not None, f"300 images gave outputs of shape {tuple(tried.shape)}: every image needs one row."
    assert pieces.ok, str(pieces.error)
    off = max(abs(a - b) for a, b in zip(pieces.value["losses"], unbounded.value["losses"]))
    assert off < 0.05 * unbounded.value["losses"][0], "the losses differ from those with the whole batch: are the pieces in order?"
    assert pieces.peak_mib < 0.6 * unbounded.peak_mib, f"peak {pieces.peak_mib:.1f} MiB against {unbounded.peak_mib:.1f}: the pieces are too large."

# %% [markdown]
# **3.** From how many cached answers on does the cache (float32) weigh more than the teacher's weights? Work it out for
# a number of classes; then look at a language model with 50,000 tokens.

# %%
def answers_that_fit(teacher_mib, classes):
    """How many answers with `classes` float32 numbers each fit in the teacher's MiB (a whole number)."""
    # BEGIN SOLUTION
    return int(teacher_mib * 2**20 // (classes * 4))
    # END SOLUTION


with exercise(3, "One answer is classes × 4 bytes; a MiB is 2**20 bytes."):
    assert answers_that_fit(1, 1) is not None, "answers_that_fit() returns nothing yet: return a whole number."
    assert answers_that_fit(1, 1) == 2**18, "a MiB holds 2**18 float32 numbers."
    assert answers_that_fit(10, 1000) == 2621, "10 MiB and 1000 classes: 10 * 2**20 // 4000."
    print(f"This teacher weighs as much as {answers_that_fit(teacher_weights, 10):,} answers of 10 classes, and as {answers_that_fit(teacher_weights, 50_000)} of 50,000.")
