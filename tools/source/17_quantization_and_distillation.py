# %% [markdown]
# # 17 · Quantization and distillation: small at rest, or small while it runs
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
import contextlib
import gc
import io
import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import labsupport as lab
from labsupport.graders import quantization_and_distillation as check

tf = lab.load_tensorflow()
import keras

TEACHER = lab.choose(SCALE, quick=(4096, 512), full=(8192, 512))  # hidden units of the teacher
STUDENT = (32,)
DEEP = (512,) * 8  # for quantization: many layers, of which none is most of the model
BUDGET = lab.choose(SCALE, quick="24 MiB", full="46 MiB")
STEPS, FEW, SEEDS = 100, 100, 5  # training steps of a student; labels where they are few; students

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
# The student has one small hidden layer and trains on all images as one batch; that is nothing. The teacher stands
# beside it and answers for the same batch.

# %%
print(f"hidden units of the teacher: {TEACHER}, of the student: {STUDENT}; images in a batch: {N}")

# %%
my_guess = lab.guess(
    "Peak tensor memory of training the student with the teacher beside it?", GUESS_MIB
)

# %% [markdown]
# Now the arithmetic, from the shapes of the two networks.


# %%
def weights_mib(units):
    sizes = [64, *units, 10]
    return sum(lab.tensor_mib((n, m)) + lab.tensor_mib((m,)) for n, m in zip(sizes, sizes[1:]))


teacher_weights, student_weights = weights_mib(TEACHER), weights_mib(STUDENT)
print(f"teacher: {teacher_weights:.2f} MiB of float32 weights, {teacher_weights / 4:.2f} in int8")
print(f"student: {student_weights:.3f} MiB, {teacher_weights / student_weights:.0f} times smaller")

# The teacher only answers; nothing is kept for gradients. At its worst moment it holds two
# tensors of the size of its widest layer's output: before and after the bias is added.
widest = lab.tensor_mib((N, max(TEACHER)))
predicted_beside = teacher_weights + 2 * widest
print(f"teacher's weights + 2 × {N} × {max(TEACHER)} × 4 B = {predicted_beside:.1f} MiB")

# %% [markdown]
# ## Failure
#
# First the teacher is trained, with memory to spare. Its outputs for the training images come back with it; they are
# used further down.


# %%
def network(units, start="glorot_uniform"):
    hidden = [keras.layers.Dense(n, activation="relu", kernel_initializer=start) for n in units]
    last = keras.layers.Dense(10, kernel_initializer=start)
    return keras.Sequential([keras.layers.Input((64,)), *hidden, last])


def loaded(units, weights):
    model = network(units, "zeros")  # a random start that is thrown away would need memory, too
    for variable, value in zip(model.weights, weights):
        # Decoded by TensorFlow, so that its allocator counts them: set_weights() may borrow the
        # memory of a NumPy array, which nobody counts.
        variable.assign(tf.reshape(tf.io.decode_raw(value.tobytes(), "float32"), value.shape))
    return model


def train(data, units):
    keras.utils.set_random_seed(1)
    x, y, x_test, y_test = data
    model = network(units)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
    model.fit(x, y, batch_size=64, epochs=3, verbose=0)
    return {
        "accuracy": model.evaluate(x_test, y_test, verbose=0)[1],
        "weights": model.get_weights(),
        "outputs": model.predict(x, verbose=0),
    }


teacher = lab.measure(train, data, TEACHER, label="training the teacher")
print(f"accuracy of the teacher: {teacher.value['accuracy']:.1%}")

# %% [markdown]
# **Distillation.** The student's loss is mostly the distance to the teacher's softened outputs, and for a tenth the
# ordinary loss on the labels.


# %%
def train_student(data, labelled, answers=None, steps=STEPS, seeds=SEEDS):
    """Train students on the first `labelled` labels and, if given, a teacher's answers(images)."""
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
                entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
                loss = tf.reduce_mean(entropy(y[:labelled], outputs[:labelled]))
                if soft is not None:
                    distance = tf.nn.softmax_cross_entropy_with_logits(soft, outputs / 4.0)
                    loss = 0.1 * loss + 0.9 * 4.0**2 * tf.reduce_mean(distance)
            gradients = tape.gradient(loss, student.trainable_variables)
            optimizer.apply_gradients(zip(gradients, student.trainable_variables))
            return loss

        soft = (lambda: ()) if answers is None else (lambda: (tf.nn.softmax(answers(x) / 4.0),))
        trajectory = [float(step(*soft())) for _ in range(steps)]
        losses = losses or trajectory  # of the first seed
        accuracies.append(float(np.mean(np.argmax(student(x_test), axis=1) == y_test)))
    return {"accuracies": accuracies, "losses": losses}


def at_once(teacher, images):
    return teacher(images)


def beside(data, weights, ask=at_once):
    with lab.phase("load the teacher"):
        large = loaded(TEACHER, weights)
    with lab.phase("distil"):
        return train_student(data, N, lambda images: ask(large, images), steps=5, seeds=1)


kept = teacher.value["weights"]
# Without oneDNN (Intel's kernels for CPUs), running out of memory is an error every time, and not
# now and then a crash.
PLAIN = {"env": lab.NO_ONEDNN}
failure = lab.run(beside, data, kept, budget=BUDGET, label="teacher beside, in the budget", **PLAIN)
lab.expect_oom(failure)

# %% [markdown]
# The tensor that did not fit belongs to the teacher. What it would have needed, in five steps without the budget:

# %%
unbounded = lab.measure(beside, data, kept, label="teacher beside", **PLAIN)

# %% [markdown]
# ## Fix
#
# **Ask the teacher once.** Its outputs for all images are one small tensor. Compute them where the teacher fits, keep
# them, and train the student without it.


# %%
def cached(data, outputs):
    outputs = tf.constant(outputs)
    return {
        "all labels": train_student(data, N, lambda images: outputs),
        f"{FEW} labels": train_student(data, FEW, lambda images: outputs),
    }


outputs = teacher.value["outputs"]
fix = lab.run(cached, data, outputs, budget=BUDGET, label="teacher's outputs cached", **PLAIN)
lab.expect_finished(fix)

# %% [markdown]
# Does the teacher help? For a fair judgement the same students also train alone, as many steps: with all labels, and
# with labels for the first images only.


# %%
def alone(data):
    return {"all labels": train_student(data, N), f"{FEW} labels": train_student(data, FEW)}


control = lab.measure(alone, data, budget=BUDGET, label="student alone", **PLAIN)

# %% [markdown]
# ## Side by side

# %%
lab.compare(unbounded, failure, fix, control)

# %% [markdown]
# Who held it? The arm that died runs once more while TensorFlow records every allocation. The teacher's weights are
# there, and the product of its first hidden layer for the batch has no room beside them.

# %%
lab.take_apart(failure)

# %%
print(my_guess.against(unbounded.peak_mib))
losses = unbounded.value["losses"]
same = max(abs(a - b) for a, b in zip(losses, fix.value["all labels"]["losses"])) / losses[0]
print(f"Losses of the same steps, teacher beside and outputs cached: apart by {same:.1%} at most.")
assert same < 0.05
lab.predicted_vs_measured(teacher_beside=(predicted_beside, unbounded.peak_mib))

# %% [markdown]
# What distillation gave, as accuracy on the test images; a mark is one student.

# %%
students = {"alone": control.value, "distilled": fix.value}
teacher_accuracy = teacher.value["accuracy"]
accuracy = pd.DataFrame(
    {
        f"{setting}, {name}": found[setting]["accuracies"]
        for setting in fix.value
        for name, found in students.items()
    }
)
_, axes = plt.subplots()
for place, (name, found) in enumerate(accuracy.items()):
    axes.plot([place] * SEEDS, 100 * found, "o", color=lab.COLOURS[0], ms=9, alpha=0.6, label=name)
axes.axhline(100 * teacher_accuracy, color=lab.COLOURS[2], ls="--", label="teacher")
axes.text(-0.45, 100 * teacher_accuracy, "teacher", va="bottom")
axes.set(ylabel="accuracy (%)", xlim=(-0.5, 3.5), xticks=range(4), xticklabels=list(accuracy))
plt.show()
median = accuracy.median()
lab.note(
    f"The teacher is right for {teacher_accuracy:.1%} of the images. "
    + " ".join(
        f"With {setting}, the median of {SEEDS} students alone is "
        f"{median[f'{setting}, alone']:.1%}, "
        f"distilled {median[f'{setting}, distilled']:.1%}."
        for setting in fix.value
    )
    + " (The teacher had seen all labels: they are gone from the student's loss, "
    "not from the teacher.)"
)

# %% [markdown]
# ### Quantization: at rest, and while it runs
#
# Two networks are quantized: the teacher, of which one layer is most, and a deep one of many layers alike. First in
# Keras, by `model.quantize("int8")`: its weights at rest, and one call on 32 images, before and after.


# %%
def quantized_in_keras(data, units, weights):
    batch, at_rest = data[2][:32], {}
    model = loaded(units, weights)
    at_rest["float32"] = lab.reading().tensors_mib
    with lab.phase("float32"):
        model(batch)
    model.quantize("int8")
    for variable in model.variables:
        # Computed once more: quantize() leaves NumPy's memory in some of them, which nobody counts.
        variable.assign(variable.value + tf.zeros((), variable.dtype))
    gc.collect()
    at_rest["int8"] = lab.reading().tensors_mib
    with lab.phase("int8"):
        model(batch)
    return at_rest


deep = lab.measure(train, data, DEEP, label="training the deep one")
NETWORKS = {
    "one wide layer": (TEACHER, kept),
    "many layers": (DEEP, deep.value["weights"]),
}
in_keras = {}
for name, (units, trained) in NETWORKS.items():
    result = lab.measure(quantized_in_keras, data, units, trained, label=f"Keras, {name}")
    for kind, at_rest in result.value.items():
        in_keras[name, kind] = {"at rest": at_rest, "peak of a call": result.phase(kind).peak_mib}
in_keras = pd.DataFrame(in_keras).T
in_keras.rename_axis(["MiB", ""]).round(1)


# %%
def share(frame, column, kind, name):
    """What a kind takes of what float32 takes, for one of the networks."""
    return frame.loc[(name, kind), column] / frame.loc[(name, "float32"), column]


wide_call, deep_call = (share(in_keras, "peak of a call", "int8", name) for name in NETWORKS)
in_keras_rest = max(share(in_keras, "at rest", "int8", name) for name in NETWORKS)
lab.note(
    f"At rest int8 takes at most {in_keras_rest:.0%} of float32. But on a CPU a call brings a "
    "layer's "
    f"kernel back to 32 bits before it multiplies: the peak of a call is {wide_call:.0%} of the "
    f"float32 one where one layer is most of the model, and {deep_call:.0%} where there are "
    f"{len(DEEP)} alike. (At rest the allocator's pieces of memory count, which can be larger than "
    "the weights in them.)"
)

# %% [markdown]
# Then by the converter of TensorFlow Lite. Full int8 needs some typical inputs to choose the scales of the activations
# (post-training quantization). The interpreter's figures are those of its process; its own code is in there, too, a few
# MiB that are the same for each.


# %%
KINDS = ["float32", "float16", "int8 weights", "int8"]


def convert(data, networks):
    def typical_inputs():
        for image in data[0][:100]:
            yield [image[None]]

    files = {}
    for name, (units, weights) in networks.items():
        model = loaded(units, weights)
        for kind in KINDS:
            converter = tf.lite.TFLiteConverter.from_keras_model(model)
            if kind != "float32":
                # Alone, this gives int8 weights ("dynamic range").
                converter.optimizations = [tf.lite.Optimize.DEFAULT]
            if kind == "float16":
                converter.target_spec.supported_types = [tf.float16]
            if kind == "int8":
                converter.representative_dataset = typical_inputs
                converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
            with contextlib.redirect_stdout(io.StringIO()):
                files[name, kind] = converter.convert()
    return files


files = lab.measure(convert, data, NETWORKS, label="converter").value


def serve(content, images, labels):
    path = Path(os.environ["TMPDIR"], "model.tflite")
    path.write_bytes(content)
    interpreter = tf.lite.Interpreter(model_path=str(path), num_threads=1)
    interpreter.allocate_tensors()
    (entry,), (answer,) = interpreter.get_input_details(), interpreter.get_output_details()
    classes = []
    for image in images:
        interpreter.set_tensor(entry["index"], image[None])
        interpreter.invoke()
        classes.append(int(interpreter.get_tensor(answer["index"]).argmax()))
    tf.running_interpreter = interpreter  # alive, so that the end of the run is measured with it
    return float(np.mean(np.array(classes) == labels))


serving = {
    key: lab.measure(serve, content, data[2], data[3], label=", ".join(key))
    for key, content in files.items()
}

# %%
sizes = pd.DataFrame(
    {
        key: {
            "file": len(files[key]) / 2**20,
            "interpreter, running": result.process_end_mib,
            "interpreter, peak": result.process_peak_mib,
        }
        for key, result in serving.items()
    }
).T.astype(float)
_, panels = plt.subplots(1, 2, sharey=True)
for axes, name in zip(panels, NETWORKS):
    sizes.loc[name].plot.bar(ax=axes, rot=0, width=0.8, ylabel="MiB", title=name, legend=False)
lab.legend_below(panels[0])
plt.show()
graded = [f"{result.value:.1%}" for result in serving.values()]
print(sizes.round(1).assign(accuracy=graded).to_string(na_rep="–"))
at_peak = {name: share(sizes, "interpreter, peak", "float16", name) for name in NETWORKS}
lab.note(
    "At its peak the interpreter of the float16 file took "
    + " and ".join(f"{took:.0%} ({name})" for name, took in at_peak.items())
    + " of what that of the float32 file took."
)

# %% [markdown]
# ## Explain
#
# * **Teacher beside the student**: the student's size does not matter. The step needs the teacher's weights and its
#   widest outputs for the whole batch. Asked once, the teacher leaves behind images × classes × 4 bytes.
# * **Does the teacher help?** The control decides: the same students, the same steps, no teacher. Where most labels are
#   missing, the teacher's answers replace them. The small model itself comes from choosing a small one.
# * **float32 in the interpreter**: the file is mapped into memory, and the kernels are packed a second time in the order
#   that this CPU multiplies fastest.
# * **float16**: half the file. But this CPU path multiplies in float32, so the interpreter first expands a weight and then
#   packs it.
# * **int8**: expanded nowhere. Packed int8 beside mapped int8; the rest of its bar is the interpreter's own code.
# * **int8 in Keras**: stored in int8, multiplied in 32 bits, one layer at a time.
# * **For training**, weights in int8 take no gradient; what is trained then are thin matrices beside them (LoRA,
#   `layer.enable_lora(rank)`). That is not judged here.

# %% [markdown]
# **When it flips.** Cached outputs grow with images and with classes; the teacher does not, and asked for a small batch
# it needs little beside its weights (exercise 2). Move the sliders: when is it cheaper to keep the teacher?


# %%
def cache_or_teacher(images=N, classes=10, batch=64):
    keep = lab.tensor_mib((images, classes))
    ask = teacher_weights + 2 * lab.tensor_mib((batch, max(TEACHER)))
    print(
        f"cached outputs {keep:10.2f} MiB, teacher beside, batch {batch}: {ask:6.1f} MiB "
        "(predicted)"
    )
    print("cache" if keep < ask else "keep the teacher")


ranges = {"images": (1000, 100_000, 1000), "classes": (10, 50_000, 10), "batch": (16, 2048, 16)}
lab.explore(cache_or_teacher, **ranges)

# %% [markdown]
# ## Verdict
#
# The first claim leaves open how a model is quantized, and whether its size counts at rest or while it runs: all of that
# was tried, and where the two networks differ, the larger share of what float32 takes is judged.

# %%
lab.verdict(
    "C18",
    "partly",
    file=max(share(sizes, "file", "int8", name) for name in NETWORKS),
    in_keras=in_keras_rest,
    interpreter=max(share(sizes, "interpreter, running", "int8", name) for name in NETWORKS),
    interpreter_float16=max(at_peak.values()),
    keras_call_many_layers=deep_call,
    keras_call_one_wide_layer=wide_call,
)

# %% [markdown]
# The second claim leaves open how many labels there are: all, and few.

# %%
lab.verdict(
    "C19",
    "partly",
    student=student_weights,
    teacher=teacher_weights,
    accuracy_teacher=teacher_accuracy,
    accuracy_distilled_all_labels=median["all labels, distilled"],
    accuracy_distilled_few_labels=median[f"{FEW} labels, distilled"],
    best_alone_all_labels=accuracy["all labels, alone"].max(),
    best_alone_few_labels=accuracy[f"{FEW} labels, alone"].max(),
)

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


# %%
check.to_int8(to_int8, kept[2])


# %% tags=["right"]
def to_int8(kernel):
    numbers, scale = keras.quantizers.abs_max_quantize(kernel, axis=0, to_numpy=True)
    return numbers, 1 / scale  # Keras' scale is what a weight is multiplied by


# %% tags=["wrong"]
# says: multiplied
def to_int8(kernel):
    scales = 127 / np.abs(kernel).max(axis=0)
    return np.round(kernel * scales).astype(np.int8), scales


# %% tags=["right"]
def to_int8(kernel):
    scales = tf.reduce_max(tf.abs(kernel), axis=0) / 127.0
    return tf.cast(tf.round(kernel / scales), "int8"), scales


# %% tags=["wrong"]
# says: column
def to_int8(kernel):
    scale = np.abs(kernel).max() / 127
    return np.round(kernel / scale).astype(np.int8), np.full(kernel.shape[1], scale, np.float32)


# %% tags=["wrong"]
# says: half a step
def to_int8(kernel):
    scales = np.abs(kernel).max(axis=0) / 127
    return (kernel / scales).astype(np.int8), scales.astype(np.float32)


# %% tags=["wrong"]
# says: sign
def to_int8(kernel):
    scales = np.abs(kernel).max(axis=0) / 128
    return np.round(kernel / scales).astype(int).astype(np.int8), scales.astype(np.float32)


# %% [markdown]
# **2.** Sometimes outputs cannot be cached, because the images are augmented anew in each epoch. Let the teacher answer
# in pieces, so that it fits beside the student under the budget of the failure.


# %%
def in_pieces(teacher, images):
    # BEGIN SOLUTION
    return tf.concat([teacher(images[i : i + 128]) for i in range(0, len(images), 128)], axis=0)
    # END SOLUTION


# %%
check.in_pieces(in_pieces, beside, data, kept, BUDGET, losses)


# %% tags=["right"]
def in_pieces(teacher, images):
    pieces = tf.data.Dataset.from_tensor_slices(images).batch(64).map(teacher)
    return tf.concat(list(pieces), axis=0)


# %% tags=["wrong"]
# says: for its image
def in_pieces(teacher, images):
    return outputs


# %% tags=["right"]
def in_pieces(teacher, images):
    return teacher.predict(images, batch_size=128, verbose=0)


# %% tags=["right"]
def in_pieces(teacher, images):
    pieces = tf.data.Dataset.from_tensor_slices(images).batch(100)
    return np.concatenate([teacher(piece).numpy() for piece in pieces])


# %% tags=["wrong"]
# says: of a budget
def in_pieces(teacher, images):
    return tf.concat(
        [teacher(half) for half in tf.split(images[:-1], 2)] + [teacher(images[-1:])], 0
    )


# %% tags=["wrong"]
# says: 1297 images gave
def in_pieces(teacher, images):
    count = len(images) // 128
    return tf.concat([teacher(piece) for piece in tf.split(images[: 128 * count], count)], axis=0)


# %% tags=["wrong"]
# says: for its image
def in_pieces(teacher, images):
    shuffled = tf.data.Dataset.from_tensor_slices(images).shuffle(len(images)).batch(128)
    return tf.concat([teacher(piece) for piece in shuffled], axis=0)


# %% [markdown]
# **3.** With many classes the cache grows, and nearly all of a softmax is in its largest outputs. Keep of each image only
# the `k` largest outputs, as float16, and which classes they belong to, in the smallest unsigned type that holds any of
# up to 65,536 classes. Return the two arrays, each with a row for each image and `k` columns.


# %%
def largest(outputs, k):
    # BEGIN SOLUTION
    classes = np.argsort(outputs, axis=1)[:, -k:]
    values = np.take_along_axis(outputs, classes, axis=1)
    return values.astype(np.float16), classes.astype(np.uint16)
    # END SOLUTION


# %%
check.largest(largest)


# %% tags=["right"]
def largest(outputs, k):
    classes = np.argpartition(outputs, -k)[:, -k:].astype("uint16")
    values = [row[kept] for row, kept in zip(outputs, classes)]
    return np.array(values, "float16"), classes


# %% tags=["wrong"]
# says: not the largest
def largest(outputs, k):
    classes = np.argsort(np.abs(outputs), axis=1)[:, -k:]
    values = np.take_along_axis(outputs, classes, axis=1)
    return values.astype(np.float16), classes.astype(np.uint16)


# %% tags=["right"]
def largest(outputs, k):
    values, classes = tf.math.top_k(outputs, k)
    return tf.cast(values, tf.float16), tf.cast(classes, tf.uint16)


# %% tags=["wrong"]
# says: classes are int64
def largest(outputs, k):
    classes = np.argsort(outputs, axis=1)[:, -k:]
    return np.take_along_axis(outputs, classes, axis=1).astype(np.float16), classes


# %% tags=["wrong"]
# says: not that of its class
def largest(outputs, k):
    classes = np.argsort(-outputs, axis=1)[:, :k]
    return np.sort(outputs, axis=1)[:, -k:].astype(np.float16), classes.astype(np.uint16)


# %% tags=["wrong"]
# says: not the largest
def largest(outputs, k):
    classes = np.argsort(outputs, axis=1)[:, :k]
    values = np.take_along_axis(outputs, classes, axis=1)
    return values.astype(np.float16), classes.astype(np.uint16)
