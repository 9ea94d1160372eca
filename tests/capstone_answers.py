"""What learners, and cheats, make of the capstone's script, and what the checker has to say of each.

Each answer defines some functions again, over the capstone's solution or over the script as it was. TRIED is judged by its
functions alone, MAINS by running main.
"""

from typing import NamedTuple


class Answer(NamedTuple):
    """looks: names of rules.LOOKS. says: the fault that is left, or what the sentence must match; "" for a right answer."""

    looks: tuple
    says: str
    code: str
    over: str = "solved"


IMAGES, TRAINING = ("new data set", "labels", "batches", "buffers"), ("evaluation", "epochs", "trials")
TRIED = {
    # --- images, right
    "py_function without a static shape": Answer(
        IMAGES,
        "",
        """
def image_dataset(files, labels):
    names = tf.data.Dataset.from_tensor_slices((files, labels)).shuffle(len(files))
    return names.map(lambda file, label: (tf.py_function(decode, [file], tf.float32), label))
""",
    ),
    "a cache in a file": Answer(
        IMAGES,
        "",
        """
def make_pipeline(images):
    return images.cache("decoded").map(augment).shuffle(64).batch(BATCH)
""",
    ),
    "bytes of the files kept, decoded when wanted": Answer(
        ("buffers",),
        "",
        """
def image_dataset(files, labels):
    read = tf.data.Dataset.from_tensor_slices((files, labels)).shuffle(len(files))
    read = read.map(lambda file, label: (tf.io.read_file(file), label)).cache()
    def decoded(contents, label):
        image = tf.image.resize(tf.io.decode_jpeg(contents, channels=3), [SIZE, SIZE])
        return (image / 255 - MEAN.astype("float32")) / STD.astype("float32"), label
    return read.map(decoded)
""",
    ),
    "uint8 until the batch": Answer(
        ("batches", "evaluation"),
        "",
        """
def normalised(images):
    return (tf.cast(images, tf.float32) / 255 - MEAN.astype("float32")) / STD.astype("float32")

def decode(file):
    pixels = tf.io.decode_jpeg(tf.io.read_file(file), channels=3)
    return tf.cast(tf.image.resize(pixels, [SIZE, SIZE]), tf.uint8)

def make_pipeline(images):
    whole = images.batch(BATCH).map(lambda pictures, labels: (normalised(pictures), labels))
    return whole.map(lambda pictures, labels: (tf.image.random_brightness(pictures, 0.2), labels)).prefetch(1)

def evaluate(model, images):
    right = [np.argmax(model(normalised(p)), 1) == l for p, l in images.batch(BATCH)]
    return np.concatenate(right).mean()
""",
    ),
    "float64 decoded, cast image by image": Answer(
        ("batches",),
        "",
        """
def decode(file):
    image = tf.image.resize(tf.io.decode_jpeg(tf.io.read_file(file), channels=3), [SIZE, SIZE])
    return tf.cast((tf.cast(image, tf.float64) / 255 - MEAN) / STD, tf.float32)
""",
    ),
    "an endless pipeline": Answer(
        ("batches", "buffers"),
        "",
        """
def make_pipeline(images):
    return images.repeat().map(augment).batch(BATCH, drop_remainder=True)
""",
    ),
    # --- images, wrong
    "decoded into arrays in a generator's list": Answer(
        ("new data set", "buffers"),
        "decoded buffer",
        """
def image_dataset(files, labels):
    def one_by_one():
        images = [decode(file).numpy() for file in files]
        yield from sorted(zip(images, labels), key=lambda pair: np.random.rand())
    kinds = tf.TensorSpec((SIZE, SIZE, 3), tf.float32), tf.TensorSpec((), tf.int64)
    return tf.data.Dataset.from_generator(one_by_one, output_signature=kinds)
""",
    ),
    "decoded images remembered by a function": Answer(
        ("buffers",),
        "decoded buffer",
        """
def image_dataset(files, labels):
    seen = {}
    def remembered(file):
        name = file.numpy()
        if name not in seen:
            seen[name] = decode(file).numpy().tobytes()
        return np.frombuffer(seen[name], "float32").reshape(SIZE, SIZE, 3)
    names = tf.data.Dataset.from_tensor_slices((files, labels)).shuffle(len(files))
    def load(file, label):
        return tf.ensure_shape(tf.py_function(remembered, [file], tf.float32), (SIZE, SIZE, 3)), label
    return names.map(load)
""",
    ),
    "a cache of uint8": Answer(
        ("buffers",),
        "decoded buffer",
        """
def make_pipeline(images):
    small = images.map(lambda image, label: (tf.cast(image, tf.uint8), label)).cache()
    return small.map(lambda image, label: augment(tf.cast(image, tf.float32), label)).batch(BATCH)
""",
    ),
    "arrays stacked": Answer(
        ("new data set",),
        "eager stack",
        """
def image_dataset(files, labels):
    images = np.stack([decode(file) for file in files])
    return tf.data.Dataset.from_tensor_slices((np.arange(len(files)), labels)).map(
        lambda i, label: (tf.numpy_function(lambda i: images[i], [i], tf.float32), label))
""",
    ),
    "float64 cast in the step": Answer(
        ("batches",),
        "float64",
        """
def image_dataset(files, labels):
    names = tf.data.Dataset.from_tensor_slices((files, labels)).shuffle(len(files))
    return names.map(lambda file, label: (tf.cast(decode(file), tf.float64), label))
""",
    ),
    "no shuffling": Answer(
        ("batches",),
        "make_pipeline gives the images in the order of the files",
        """
def image_dataset(files, labels):
    return tf.data.Dataset.from_tensor_slices((files, labels)).map(lambda file, label: (decode(file), label))
""",
    ),
    "augmented once for all": Answer(
        ("batches",),
        "make_pipeline gives the same images in each epoch",
        """
def make_pipeline(images):
    return images.map(augment).cache("augmented").batch(BATCH)
""",
    ),
    "labels of others": Answer(
        ("labels",),
        "image_dataset gives images with the labels of others",
        """
def image_dataset(files, labels):
    images = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files)).map(decode)
    return tf.data.Dataset.zip(images, tf.data.Dataset.from_tensor_slices(labels))
""",
    ),
    "half of the images": Answer(
        ("batches",),
        "make_pipeline gives 64 of 128 images",
        """
def make_pipeline(images):
    return images.take(len(images) // 2).map(augment).batch(BATCH)
""",
    ),
    "image_dataset is no data set": Answer(
        ("new data set",),
        r"image_dataset gives list\. .*tf.data.Dataset of single",
        """
def image_dataset(files, labels):
    return [(decode(file), label) for file, label in zip(files, labels)]
""",
    ),
    "make_pipeline without batches": Answer(
        ("batches",),
        "make_pipeline gives something else than batches",
        """
def make_pipeline(images):
    return images.map(augment)
""",
    ),
    "an error while a batch is made": Answer(
        ("batches",),
        r'make_pipeline raises ValueError in the line "return images.map\(flat\).batch.*batches \(images, labels\)',
        """
def flat(image, label):
    return tf.reshape(image, [7]), label

def make_pipeline(images):
    return images.map(flat).batch(BATCH)
""",
    ),
    # --- training, right
    "evaluation in batches of 96": Answer(
        ("evaluation",),
        "",
        """
def evaluate(model, images):
    right = [tf.argmax(model(pictures), 1) == tf.cast(labels, tf.int64) for pictures, labels in images.batch(96)]
    return tf.reduce_mean(tf.cast(tf.concat(right, 0), tf.float32))
""",
    ),
    "evaluation by predict": Answer(
        ("evaluation",),
        "",
        """
def evaluate(model, images):
    answers = model.predict(images.map(lambda image, label: image).batch(BATCH), verbose=0)
    return float(np.mean(answers.argmax(1) == [label for _, label in images.as_numpy_iterator()]))
""",
    ),
    "an input signature": Answer(
        ("epochs", "trials"),
        "",
        """
def learning_rate(start, epoch):
    return start * 0.9**epoch

def make_step(model, optimizer):
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    kinds = [tf.TensorSpec((None, SIZE, SIZE, 3)), tf.TensorSpec((None,), tf.int64), tf.TensorSpec(())]
    @tf.function(input_signature=kinds)
    def step(images, labels, rate):
        with tf.GradientTape() as tape:
            loss = loss_function(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.learning_rate.assign(rate)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss, gradients
    return step
""",
    ),
    "a rate of NumPy's": Answer(
        ("epochs",),
        "",
        """
def learning_rate(start, epoch):
    return np.float32(start * 0.9**epoch)
""",
    ),
    "the whole epoch in a graph": Answer(
        ("trials",),
        "",
        """
def make_step(model, optimizer):
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    @tf.function
    def epoch(batches, rate):
        optimizer.learning_rate.assign(rate)
        total, norm = 0.0, 0.0
        for images, labels in batches:
            with tf.GradientTape() as tape:
                loss = loss_function(labels, model(images, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            total += loss
            norm = tf.linalg.global_norm(gradients)
        return total, norm
    return epoch

def train_epoch(step, batches, rate, history):
    history.append([float(number) for number in step(batches, rate)])
""",
    ),
    "steps without a graph, a model per trial": Answer(
        ("trials",),
        "",
        """
def make_step(model, optimizer):
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    def step(images, labels, rate):
        with tf.GradientTape() as tape:
            loss = loss_function(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.learning_rate.assign(rate)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss, gradients
    return step

def search(rates, train, validation, epochs):
    import gc
    results = {}
    for rate in rates:
        model = step = None
        gc.collect()
        model, history = build_model(), []
        step = make_step(model, keras.optimizers.Adam())
        for epoch in range(epochs):
            train_epoch(step, make_pipeline(train), learning_rate(rate, epoch), history)
        results[rate] = evaluate(model, validation), history
    return results
""",
    ),
    "Keras' own loop": Answer(
        ("trials",),
        "",
        """
def search(rates, train, validation, epochs):
    model = build_model()
    model.compile(keras.optimizers.Adam(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)
    start, results = model.get_weights(), {}
    for rate in rates:
        model.set_weights(start)
        for variable in model.optimizer.variables:
            variable.assign(tf.zeros_like(variable))
        follow = keras.callbacks.LearningRateScheduler(lambda epoch, _: rate * 0.9**epoch)
        fitted = model.fit(make_pipeline(train), epochs=epochs, callbacks=[follow], verbose=0)
        results[rate] = evaluate(model, validation), fitted.history["loss"]
    return results
""",
    ),
    "only the last gradients are kept": Answer(
        ("epochs",),
        "",
        """
def train_epoch(step, batches, rate, history):
    for images, labels in batches:
        loss, gradients = step(images, labels, rate)
        history[:] = [*(entry[:1] for entry in history), (float(loss), gradients)]
""",
    ),
    # --- training, wrong
    "retracing in a plain function": Answer(
        ("epochs",),
        "retracing",
        """
given_step = make_step

def make_step(model, optimizer):
    traced = given_step(model, optimizer)
    def step(images, labels, rate):
        return traced(images, labels, float(rate))
    return step
""",
    ),
    "retracing in evaluate": Answer(
        ("epochs",),
        "retracing",
        """
kept = []

def evaluate(model, images):
    kept.append(tf.function(lambda pictures: tf.argmax(model(pictures), 1)))
    right = [kept[-1](pictures) == labels for pictures, labels in images.batch(BATCH)]
    return np.concatenate(right).mean()
""",
    ),
    "gradients as bytes": Answer(
        ("epochs",),
        "history",
        """
def train_epoch(step, batches, rate, history):
    for images, labels in batches:
        loss, gradients = step(images, labels, rate)
        history.append([gradient.numpy().tobytes() for gradient in gradients])
""",
    ),
    "gradients as text tensors": Answer(
        ("epochs",),
        "history",
        """
def train_epoch(step, batches, rate, history):
    for images, labels in batches:
        loss, gradients = step(images, labels, rate)
        history.append([tf.io.serialize_tensor(gradient) for gradient in gradients])
""",
    ),
    "gradients squeezed, in a list elsewhere": Answer(
        ("epochs",),
        "history",
        """
elsewhere = []

def train_epoch(step, batches, rate, history):
    import zlib
    for images, labels in batches:
        loss, gradients = step(images, labels, rate)
        history.append(float(loss))
        elsewhere.append([zlib.compress(gradient.numpy().astype("float16").tobytes()) for gradient in gradients])
""",
    ),
    "gradients of the last step of each epoch": Answer(
        ("epochs",),
        "history",
        """
def train_epoch(step, batches, rate, history):
    for images, labels in batches:
        loss, gradients = step(images, labels, rate)
    history.append((float(loss), gradients))
""",
    ),
    "batches in the history": Answer(
        ("epochs",),
        "history",
        """
def train_epoch(step, batches, rate, history):
    for images, labels in batches:
        history.append((float(step(images, labels, rate)[0]), images))
""",
    ),
    "no history": Answer(
        ("epochs",),
        "train_epoch leaves nothing in the history",
        """
def train_epoch(step, batches, rate, history):
    for images, labels in batches:
        step(images, labels, rate)
""",
    ),
    "losses alone": Answer(
        ("epochs",),
        "train_epoch notes a single number at a time",
        """
def train_epoch(step, batches, rate, history):
    for images, labels in batches:
        history.append(float(step(images, labels, rate)[0]))
""",
    ),
    "models in the results": Answer(
        ("trials",),
        "model per trial",
        """
def search(rates, train, validation, epochs):
    results = {}
    for rate in rates:
        model, history = build_model(), []
        step = make_step(model, keras.optimizers.Adam())
        for epoch in range(epochs):
            train_epoch(step, make_pipeline(train), learning_rate(rate, epoch), history)
        results[rate] = evaluate(model, validation), history, model, step
    return results
""",
    ),
    "one model, an optimizer and a step for each rate": Answer(
        ("trials",),
        "model per trial",
        """
def search(rates, train, validation, epochs):
    model, results = build_model(), {}
    start = model.get_weights()
    for rate in rates:
        model.set_weights(start)
        step, history = make_step(model, keras.optimizers.Adam()), []
        for epoch in range(epochs):
            train_epoch(step, make_pipeline(train), learning_rate(rate, epoch), history)
        results[rate] = evaluate(model, validation), history
    return results
""",
    ),
    "weights handed on": Answer(
        ("trials",),
        "weights that another rate left",
        """
def search(rates, train, validation, epochs):
    model = build_model()
    step, results = make_step(model, keras.optimizers.Adam()), {}
    for rate in rates:
        history = []
        for epoch in range(epochs):
            train_epoch(step, make_pipeline(train), learning_rate(rate, epoch), history)
        results[rate] = evaluate(model, validation), history
    return results
""",
    ),
    "the optimizer's state handed on": Answer(
        ("trials",),
        "state that another rate left",
        """
def search(rates, train, validation, epochs):
    model = build_model()
    step, results, start = make_step(model, keras.optimizers.Adam()), {}, model.get_weights()
    for rate in rates:
        history = []
        model.set_weights(start)
        for epoch in range(epochs):
            train_epoch(step, make_pipeline(train), learning_rate(rate, epoch), history)
        results[rate] = evaluate(model, validation), history
    return results
""",
    ),
    "one rate trained, copied to all": Answer(
        ("trials",),
        "search takes no step at a rate of 0.00[12345]",
        """
one_search = search

def search(rates, train, validation, epochs):
    result = one_search(rates[:1], train, validation, epochs)[rates[0]]
    return {rate: result for rate in rates}
""",
    ),
    "search gives a list": Answer(
        ("trials",),
        r"search gives list for the rates .* gives \{rate",
        """
def search(rates, train, validation, epochs):
    return [0.5 for rate in rates]
""",
    ),
    "evaluate says 0.7": Answer(
        ("evaluation",), "evaluate says 0.70, 0.70, 0.70 where half", "evaluate = lambda model, images: 0.7"
    ),
    "evaluate looks at one batch": Answer(
        ("evaluation",),
        "evaluate says 1.00",
        """
def evaluate(model, images):
    pictures, labels = next(iter(images.batch(BATCH)))
    return float(np.mean(np.argmax(model(pictures), 1) == labels))
""",
    ),
    "evaluate averages batches of unlike size": Answer(
        ("evaluation",),
        "evaluate says 0.35, 0.44, 0.48 where half of the answers are right",
        """
def evaluate(model, images):
    shares = [np.mean(np.argmax(model(pictures), 1) == labels) for pictures, labels in images.batch(96)]
    return np.mean(shares)
""",
    ),
    "evaluate has a phase of its own": Answer(
        ("evaluation",),
        "giant batch",
        """
def evaluate(model, images):
    with lab.phase("all at once"):
        pictures, labels = next(iter(images.batch(len(images))))
        answers = model(pictures, training=False)
    return float(np.mean(np.argmax(answers, 1) == labels))
""",
    ),
    "evaluate gathers arrays": Answer(
        ("evaluation",),
        "giant batch",
        """
def evaluate(model, images):
    pairs = list(images.as_numpy_iterator())
    answers = model.predict(np.stack([image for image, _ in pairs]), batch_size=BATCH, verbose=0)
    return np.mean(answers.argmax(1) == [label for _, label in pairs])
""",
    ),
    "evaluate gives nothing": Answer(
        ("evaluation",),
        "evaluate gives NoneType and no number. .*share of right answers",
        """
def evaluate(model, images):
    print(model)
""",
    ),
    "evaluate is still to be written": Answer(
        ("evaluation",), "evaluate is no function but Ellipsis", "evaluate = ..."
    ),
    "evaluate is gone": Answer(("evaluation",), "evaluate is missing", "evaluate = None"),
    "an error in train_epoch": Answer(
        ("epochs",),
        r'train_epoch raises TypeError in the line "loss = step\(images\)".*train_epoch\(step, batches',
        """
def train_epoch(step, batches, rate, history):
    for images, labels in batches:
        loss = step(images)
""",
    ),
    "search leaves Python": Answer(
        ("trials",),
        "search raises SystemExit",
        """
def search(rates, train, validation, epochs):
    raise SystemExit("done")
""",
    ),
    "a smaller model": Answer(
        ("evaluation",),
        "build_model gives a model of 448 parameters, and it had 77,776",
        """
def build_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((SIZE, SIZE, 3)), keras.layers.MaxPooling2D(16), keras.layers.Flatten(),
                             keras.layers.Dense(16)])
""",
    ),
    # --- the whole, by a class that only validation images have
    "main says 0.99 and does nothing": Answer(
        ("canary",), "main says 0.99 for images of a class", "main = lambda files, labels: 0.99", over="as it was"
    ),
    "evaluate says 0.7, in main": Answer(
        ("canary",), "main says 0.70 for images", "evaluate = lambda model, images: 0.7"
    ),
    "validation images trained on": Answer(
        ("canary",),
        "main trains on the validation images: its model expects",
        """
def main(files, labels, validation=VALIDATION):
    train = image_dataset(files, labels)
    held_back = image_dataset(files[-validation:], labels[-validation:])
    return max(accuracy for accuracy, _ in search(RATES, train, held_back, EPOCHS).values())
""",
    ),
    "accuracy on the training images": Answer(
        ("canary",),
        "main says (1.00|0.[4-9].) for images of a class",
        """
fair_search = search

def search(rates, train, validation, epochs):
    return fair_search(rates, train, train, epochs)
""",
    ),
    "the solution's main": Answer(("canary",), "", ""),
}


# What main must be told after it has run, by the models that it trained; "" for a right answer.
MAINS = {
    "the solution": ("", ""),
    "Keras' own loop": ("", TRIED["Keras' own loop"].code),
    "a batch of 16": ("", "BATCH = 16"),
    "normalised in the pipeline": ("", TRIED["uint8 until the batch"].code),
    "the best of all epochs": (
        "",
        """
def main(files, labels, validation=VALIDATION):
    train = image_dataset(files[:-validation], labels[:-validation])
    held_back = image_dataset(files[-validation:], labels[-validation:])
    return np.array([[max(accuracy for accuracy, _ in search(RATES, train, held_back, EPOCHS).values())]])
""",
    ),
    "nothing, and 0.99": ("^main takes no training step in its own process", "main = lambda files, labels: 0.99"),
    "one rate, copied": ("^main takes 0 steps at a rate of 0.00", TRIED["one rate trained, copied to all"].code),
    "one epoch": ("^main takes 0 steps at a rate of 0.00", "EPOCHS = 1"),
    "a constant rate": (
        "^main takes 0 steps at a rate of 0.00",
        "def learning_rate(start, epoch): return tf.constant(start)",
    ),
    "a smaller model": ("^build_model gives a model of 1,744", TRIED["a smaller model"].code),
    "a smaller model in search": (
        "^main trains 1,744 parameters, and build_model\\(\\) has 298,960",
        TRIED["a smaller model"].code.replace("build_model", "small_model")
        + """
def search(rates, train, validation, epochs):
    results = {}
    for rate in rates:
        model, history = small_model(), []
        step = make_step(model, keras.optimizers.Adam())
        for epoch in range(epochs):
            train_epoch(step, make_pipeline(train), learning_rate(rate, epoch), history)
        results[rate] = evaluate(model, validation), history
    return results
""",
    ),
    "steps on nothing": (
        "^the model that main trained scores 0.[01]. on .* held back",
        """
full_step = make_step

def make_step(model, optimizer):
    step = full_step(model, optimizer)
    return lambda images, labels, rate: step(images[:1] * 0, labels[:1], rate)
""",
    ),
    "steps on nothing but for the first rate": (
        "^the model that main trained from a rate of 0.00[0-9]+ scores 0.[01]. on .*: is it trained",
        """
def train_epoch(step, batches, rate, history):
    for images, labels in batches:
        good = float(rate) >= 0.99 * RATES[-1] * 0.9 ** (EPOCHS - 1)
        loss, gradients = step(images if good else images[:1] * 0, labels if good else labels[:1], rate)
        history.append((float(loss), float(tf.linalg.global_norm(gradients))))
""",
    ),
    "no accuracy": (
        "^main returns no number",
        """
honest_main = main

def main(files, labels):
    print("the best accuracy is", honest_main(files, labels))
""",
    ),
}
