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
import pandas as pd

import labsupport as lab

tf = lab.load_tensorflow()
import keras

TEACHER = lab.choose(SCALE, quick=(4096, 512), full=(8192, 512))  # hidden units of the teacher
STUDENT = (32,)
BUDGET = lab.choose(SCALE, quick="24 MiB", full="46 MiB")
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
print(f"teacher: {teacher_weights:.2f} MiB of float32 weights")
print(f"         {teacher_weights / 2:.2f} in float16, {teacher_weights / 4:.2f} in int8")
print(f"student: {student_weights:.3f} MiB, {teacher_weights / student_weights:.0f} times smaller")

# %% [markdown]
# The teacher only answers; nothing is kept for gradients. At its worst moment it holds two tensors of the size of its
# widest layer's output: before and after the bias is added.

# %%
widest = lab.tensor_mib((N, max(TEACHER)))
predicted_beside = teacher_weights + 2 * widest
outputs = f"2 × {N} × {max(TEACHER)} × 4 B"
print(f"teacher's weights {teacher_weights:.1f} MiB + {outputs} = {predicted_beside:.1f} MiB")

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
    model.set_weights(weights)
    return model


def train_teacher(data):
    keras.utils.set_random_seed(1)
    x, y, x_test, y_test = data
    model = network(TEACHER)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    model.fit(x, y, batch_size=64, epochs=5, verbose=0)
    return {
        "accuracy": model.evaluate(x_test, y_test, verbose=0)[1],
        "weights": model.get_weights(),
        "outputs": model.predict(x, verbose=0),
    }


teacher = lab.run(train_teacher, data, label="teacher")
lab.expect_finished(teacher)
print(f"accuracy of the teacher: {teacher.value['accuracy']:.1%}")

# %% [markdown]
# **Distillation.** The student's loss is mostly the distance to the teacher's softened outputs, and for a tenth the
# ordinary loss on the labels.


# %%
def train_student(data, labelled, answers=None, steps=STEPS, seeds=3):
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

        # The teacher answers outside the tf.function: on a CPU, TensorFlow 2.21 crashes in place
        # of raising an error when a layer runs out of memory that the graph has fused with its
        # activation.
        soft = (lambda: ()) if answers is None else (lambda: (tf.nn.softmax(answers(x) / 4.0),))
        trajectory = [float(step(*soft())) for _ in range(steps)]
        losses = losses or trajectory  # of the first seed
        accuracies.append(float(np.mean(np.argmax(student(x_test), axis=1) == y_test)))
    return {"accuracy": float(np.mean(accuracies)), "losses": losses}


def beside(data, weights):
    with lab.phase("load the teacher"):
        large = loaded(TEACHER, weights)
    with lab.phase("distil"):
        return train_student(data, N, answers=large, steps=5, seeds=1)


kept = teacher.value["weights"]
failure = lab.run(beside, data, kept, budget=BUDGET, label="teacher beside, under the budget")
lab.expect_oom(failure)

# %% [markdown]
# The tensor that did not fit belongs to the teacher. What it would have needed, in five steps without the budget:

# %%
unbounded = lab.run(beside, data, kept, label="teacher beside")
lab.expect_finished(unbounded)

# %% [markdown]
# **Quantization.** Keras has a call for it: `model.quantize("int8")`. Weights at rest, and one call of the model on 32
# images, before and after:


# %%
def quantized_in_keras(data, weights):
    import gc

    batch = data[2][:32]
    with lab.phase("float32 loaded"):
        model = loaded(TEACHER, weights)
    with lab.phase("float32 call"):
        model(batch)
    with lab.phase("quantize"):
        model.quantize("int8")
        gc.collect()
    with lab.phase("int8 call"):
        model(batch)


in_keras = lab.run(quantized_in_keras, data, kept, label="model.quantize in Keras")
lab.expect_finished(in_keras)
rest = {"float32": "float32 loaded", "int8": "quantize"}
rest = {kind: in_keras.phase(name).held_mib for kind, name in rest.items()}
call = {kind: in_keras.phase(f"{kind} call").peak_mib for kind in rest}
pd.DataFrame({"at rest": rest, "peak of a call": call}).rename_axis("MiB").round(1)

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
    return {
        "all labels": train_student(data, N, lambda x: outputs),
        f"{FEW} labels": train_student(data, FEW, lambda x: outputs),
    }


def alone(data):
    return {"all labels": train_student(data, N), f"{FEW} labels": train_student(data, FEW)}


outputs = teacher.value["outputs"]
fix = lab.run(cached, data, outputs, budget=BUDGET, label="teacher's outputs cached")
lab.expect_finished(fix)
control = lab.measure(alone, data, budget=BUDGET, label="student alone")

# %% [markdown]
# **Quantization: a runtime that computes in int8.** The converter of TensorFlow Lite makes four files of the same
# teacher. Full int8 needs some typical inputs to choose the scales of the activations (post-training quantization).


# %%
def convert(data, weights):
    import contextlib
    import io

    model, files = loaded(TEACHER, weights), {}

    def typical_inputs():
        for image in data[0][:100]:
            yield [image[None]]

    for kind in ("float32", "float16", "int8 weights", "int8"):
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
            files[kind] = converter.convert()
    return files


files = lab.measure(convert, data, kept, label="converter").value


def serve(content, images, labels):
    import os
    from pathlib import Path

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
    kind: lab.measure(serve, content, data[2], data[3], label=kind)
    for kind, content in files.items()
}

# %% [markdown]
# ## Side by side

# %%
lab.compare(unbounded, failure, fix, control)

# %%
lab.predicted_vs_measured(teacher_beside=(predicted_beside, unbounded.peak_mib))

# %%
print(my_guess.against(unbounded.peak_mib))
losses = unbounded.value["losses"]
same = max(abs(a - b) for a, b in zip(losses, fix.value["all labels"]["losses"])) / losses[0]
print(
    f"Losses of the first steps, teacher beside and outputs cached, differ by {same:.1%} at most."
)
assert same < 0.05

# %% [markdown]
# What distillation gave, as accuracy on the test images (the mean of three students each):

# %%
students = {"student alone": control.value, "distilled student": fix.value}
accuracy = pd.DataFrame({name: pd.DataFrame(got).loc["accuracy"] for name, got in students.items()})
figure, axes = plt.subplots(figsize=(8, 2.2))
for name, marker in zip(accuracy, "os"):
    axes.plot(100 * accuracy[name], accuracy.index, marker, ms=11, label=name)
teacher_accuracy = teacher.value["accuracy"]
axes.axvline(100 * teacher_accuracy, color=lab.COLOURS[2], ls="--", label="teacher")
axes.set(xlabel="accuracy (%)", ylim=(1.5, -0.5))
axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()
print(f"teacher, {teacher_weights:.2f} MiB: {teacher_accuracy:.1%}")
for setting, (by_itself, distilled) in accuracy.iterrows():
    print(f"student, {student_weights:.3f} MiB, {setting}:", end=" ")
    print(f"alone {by_itself:.1%}, distilled {distilled:.1%}")

# %% [markdown]
# And the four files of the teacher: on disk, and what they add to the process that runs them. (The interpreter's own
# code is in there, too: a few MiB, the same for each.)

# %%
sizes = pd.DataFrame(
    {
        "file": {kind: len(content) / 2**20 for kind, content in files.items()},
        "running": {kind: result.process_end_mib for kind, result in serving.items()},
        "peak": {kind: result.process_peak_mib for kind, result in serving.items()},
    }
).astype(float)
axes = sizes.plot.bar(rot=0, width=0.8, ylabel="MiB")
axes.legend(["file", "interpreter, running", "interpreter, peak"])
plt.show()
graded = {kind: f"{result.value:.1%}" for kind, result in serving.items()}
print(sizes.round(1).assign(accuracy=graded).to_string(na_rep="–"))

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
    keep = lab.tensor_mib((images, classes))
    ask = teacher_weights + 2 * lab.tensor_mib((batch, max(TEACHER)))
    print(
        f"cached outputs {keep:10.2f} MiB   teacher beside, batch {batch}: {ask:6.1f} MiB",
        end="   ",
    )
    print(f"{'cache' if keep < ask else 'keep the teacher'} (predicted)")


ranges = {"images": (1000, 100_000, 1000), "classes": (10, 50_000, 10), "batch": (16, 2048, 16)}
lab.explore(cache_or_teacher, **ranges)

# %% [markdown]
# ## Verdict

# %%
lab.verdict(
    "C18",
    "holds",
    file_float32=sizes["file"]["float32"],
    file_float16=sizes["file"]["float16"],
    file_int8=sizes["file"]["int8"],
    running_float32=sizes["running"]["float32"],
    running_int8=sizes["running"]["int8"],
    peak_float32=sizes["peak"]["float32"],
    peak_float16=sizes["peak"]["float16"],
    accuracy_float32=serving["float32"].value,
    accuracy_int8=serving["int8"].value,
    keras_call_float32=call["float32"],
    keras_call_int8=call["int8"],
)
outdated = "needs clearly less now: the text above is out of date"
assert call["int8"] > 0.8 * call["float32"], f"a call of the int8 model in Keras {outdated}"
saves = sizes["peak"]["float16"] < 0.9 * sizes["peak"]["float32"]  # not if unavailable
assert not saves, f"float16 {outdated}"

# %%
by_itself, distilled = accuracy["student alone"], accuracy["distilled student"]
lab.verdict(
    "C19",
    "partly",
    teacher=teacher_weights,
    student=student_weights,
    training_beside=unbounded.peak_mib,
    training_cached=fix.peak_mib,
    training_alone=control.peak_mib,
    accuracy_teacher=teacher_accuracy,
    accuracy_distilled=distilled["all labels"],
    accuracy_alone=by_itself["all labels"],
    accuracy_distilled_few_labels=distilled[f"{FEW} labels"],
    accuracy_alone_few_labels=by_itself[f"{FEW} labels"],
)
assert distilled[f"{FEW} labels"] > by_itself[f"{FEW} labels"] + 0.02
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


kernel = kept[2]
with lab.exercise(
    1, "scales = np.abs(kernel).max(axis=0) / 127; divide, np.round, astype(np.int8)."
):
    assert to_int8(kernel) is not None, "to_int8() returns nothing yet: return numbers, scales."
    numbers, scales = to_int8(kernel)
    assert numbers.dtype == np.int8 and scales.shape == kernel.shape[1:], (
        "numbers must be int8, with one scale a column."
    )
    error = np.abs(numbers * scales - kernel)
    assert (error <= 0.51 * scales).all(), (
        "some weights are off by more than half a step: is the scale of each its own column's?"
    )
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
    label = "teacher in pieces"
    pieces = lab.run(beside_in_pieces, data, kept, budget=BUDGET, label=label, quiet=True)
with lab.exercise(
    2,
    "Call the teacher on images[i : i + 128] for every 128th i, "
    "and join the answers with tf.concat(…, axis=0).",
):
    assert tried is not None, (
        "in_pieces() returns nothing yet: return the teacher's outputs for all images."
    )
    assert pieces is not None, (
        f"300 images gave outputs of shape {tuple(tried.shape)}: every image needs one row."
    )
    assert pieces.ok, str(pieces.error)
    off = max(abs(a - b) for a, b in zip(pieces.value["losses"], losses))
    assert off < 0.05 * losses[0], (
        "the losses differ from those with the whole batch: are the pieces in order?"
    )
    assert pieces.peak_mib < 0.6 * unbounded.peak_mib, (
        f"peak {pieces.peak_mib:.1f} MiB against {unbounded.peak_mib:.1f}: too large pieces."
    )

# %% [markdown]
# **3.** From how many cached answers on does the cache (float32) weigh more than the teacher's weights? Work it out for
# a number of classes; then look at a language model with 50,000 tokens.


# %%
def answers_that_fit(teacher_mib, classes):
    """How many answers of `classes` float32 numbers fit in the teacher's MiB (a whole number)."""
    # BEGIN SOLUTION
    return int(teacher_mib * 2**20 // (classes * 4))
    # END SOLUTION


with lab.exercise(3, "One answer is classes × 4 bytes; a MiB is 2**20 bytes."):
    assert answers_that_fit(1, 1) is not None, (
        "answers_that_fit() returns nothing yet: return a whole number."
    )
    assert answers_that_fit(1, 1) == 2**18, "a MiB holds 2**18 float32 numbers."
    assert answers_that_fit(10, 1000) == 2621, "10 MiB and 1000 classes: 10 * 2**20 // 4000."
    few, many = (answers_that_fit(teacher_weights, classes) for classes in (10, 50_000))
    print(f"This teacher weighs as much as {few:,} answers of 10 classes, and as {many} of 50,000.")
