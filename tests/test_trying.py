"""`doctor --try`: remedies that save what they promise, and the ones for which only the code can be changed."""

import json
import re

from test_doctor_cli import doctor

CACHE = """
import tensorflow as tf
data = tf.data.Dataset.range(8).map(lambda i: tf.zeros([256, 256]) + tf.cast(i, tf.float32)).repeat().cache()
step = tf.function(tf.reduce_sum)
for image, _ in zip(data, range(40)):
    step(image)
print("ran")
"""


def test_a_remedy_is_measured_and_prints_nothing_of_its_own(tmp_path):
    run = doctor(tmp_path, CACHE, "--try", "--json", "--report", "report.json")
    told = json.loads((tmp_path / "report.json").read_text())
    assert told["suspects"][0]["kind"] == "cache behind repeat()", told
    (without,) = told["tried"]
    assert re.match(r"no cache\(\) in memory: tensors, peak: [\d.]+ MiB, now [\d.]+ MiB: \d+% less", without), without
    assert "no suspect any more: cache behind repeat()" in without
    assert (run.out, run.returncode) == ("ran\n", 0) and run.err.count("doctor: trying") == 1


DEEP = """
import keras, numpy as np
x, y = np.ones((8192, 64), "float32"), np.ones((8192, 1), "float32")
layers = [keras.layers.Dense(192, "relu") for _ in range(12)]
model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, y, batch_size=8192, verbose=0)
"""


def test_a_step_that_does_not_fit_does_with_each_remedy(tmp_path):
    doctor(tmp_path, DEEP, "--budget", "72 MiB", "--try", "--json", "--report", "report.json")
    tried = json.loads((tmp_path / "report.json").read_text())["tried"]
    assert [sentence.partition(":")[0] for sentence in tried] == [
        "half the batch",
        "half the batch, two for an update",
        "keras.remat around segments of a Sequential",
        "mixed_bfloat16 as Keras' policy",
    ]
    assert all("now finished; " in sentence and "no suspect any more" in sentence for sentence in tried), tried


PIXELS = """
import keras, numpy as np, tensorflow as tf
x = np.random.default_rng(0).integers(0, 256, (3000, 32, 32, 3)).astype("float32") / np.float32(255)
y = np.zeros(3000, "int64")
data = tf.data.Dataset.from_tensor_slices({"x": x, "y": y}).batch(100)
for number, batch in enumerate(data):
    np.testing.assert_array_equal(batch["x"], x[100 * number : 100 * (number + 1)])
del data, batch
model = keras.Sequential([keras.Input((32, 32, 3)), keras.layers.Flatten(), keras.layers.Dense(10)])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True))
model.fit(x, y, verbose=0)
"""


def test_pixels_become_bytes_and_stay_the_same_numbers(tmp_path):
    doctor(tmp_path, PIXELS, "--budget", "33 MiB", "--try", "--json", "--report", "report.json")
    (tried,) = json.loads((tmp_path / "report.json").read_text())["tried"]
    assert re.match("data of whole numbers up to 255 as uint8.*now finished; no suspect any more: input copy", tried), (
        tried
    )


def test_what_only_the_code_can_change_is_said(tmp_path):
    script = "import tensorflow as tf\nkept = []\nf = tf.function(lambda x: x * 2)\nfor n in range(70):\n    kept.append(f(tf.ones([256, 256])))\n"
    doctor(tmp_path, script, "--try", "--json", "--report", "report.json")
    told = json.loads((tmp_path / "report.json").read_text())
    assert told["suspects"][0]["place"] == "train.py:5"
    assert told["tried"] == [
        "retained tensors: nothing to try from outside; in the code: " + told["suspects"][0]["change"]
    ]
