"""Byte arithmetic that a learner can check by hand, and its error against what was measured."""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from labsupport.ground.budget import MIB

# State a parameter, as a multiple of the weights (Keras optimizers of the same names, default arguments).
SLOTS = {"sgd": 0, "momentum": 1, "rmsprop": 1, "adagrad": 1, "adam": 2, "adamw": 2}
# Intermediates of one update, as a multiple of the largest weight: three in Adam's running average of squares
# (square, difference, product) where every operation runs by itself; a graph fuses or reuses them down to one.
_UPDATE = {"sgd": 1, "momentum": 1, "rmsprop": 3, "adagrad": 2, "adam": 3, "adamw": 3}
# Layers whose backward pass needs nothing but their input and output, and those that only view their input.
_PLAIN = {
    "Dense",
    "Conv2D",
    "Conv1D",
    "MaxPooling2D",
    "AveragePooling2D",
    "GlobalAveragePooling2D",
    "ReLU",
    "Activation",
}
_VIEWS = {"Flatten", "Reshape"}
_OUTPUT_ONLY = {"relu", "linear", "tanh", "sigmoid", "softmax"}


def tensor_mib(shape, dtype="float32"):
    """MiB of a dense tensor: the product of its shape times the bytes of one element (bfloat16 counts 2)."""
    size = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    return math.prod(shape) * size / MIB


@dataclass
class StepPrediction:
    """One step of a plain network: MiB by part, and a row a layer (outputs and weights, MiB)."""

    parts: dict
    layers: pd.DataFrame

    @property
    def total_mib(self):
        return sum(self.parts.values())

    def _repr_html_(self):
        parts = pd.DataFrame({"MiB": {**self.parts, "peak of the step": self.total_mib}}).round(2)
        return parts.to_html(border=0) + self.layers.round(2).to_html(border=0)

    def __str__(self):
        return "\n".join(
            f"{name}: {size:.1f} MiB" for name, size in {**self.parts, "peak of the step": self.total_mib}.items()
        )


def predict_step(model, batch, optimizer="adam", training=True, graph=True):
    """Predict the peak of one step of a built, sequential Keras model in float32 from its shapes alone.

    Weights and slots are exact multiples of the parameter count. For the backward pass every layer's
    output is kept. On its way back the peak is at the layer where the outputs still kept, the weight gradients
    computed so far, the gradient of that layer's output and the one behind its activation are largest together; a
    graph computes a dense layer's second gradient in the first one's place. Where weights outweigh activations the peak is in the update instead,
    with its intermediates of the largest weight's size. Inference holds a layer's input, its output and one intermediate.

    graph: the step runs inside a tf.function. Raises ValueError for layers whose rule is not known here.
    """
    if optimizer not in SLOTS:
        raise ValueError(f"no rule for the optimizer {optimizer!r}; known are {', '.join(SLOTS)}")
    rows = []
    for layer in model.layers:
        kind, activation = type(layer).__name__, getattr(getattr(layer, "activation", None), "__name__", "linear")
        if kind not in _PLAIN | _VIEWS or activation not in _OUTPUT_ONLY:
            raise ValueError(f"no rule for layer {layer.name} ({kind}, {activation}): measure it with run() instead")
        output = 0.0 if kind in _VIEWS else tensor_mib((batch, *layer.output.shape[1:]))
        weights = sum(tensor_mib(weight.shape) for weight in layer.weights)
        rows.append({"layer": layer.name, "kind": kind, "output MiB": output, "weights MiB": weights})
    layers = pd.DataFrame(rows).set_index("layer")
    outputs = layers["output MiB"].to_numpy()
    weights = float(layers["weights MiB"].sum())
    inputs = tensor_mib((batch, *model.input_shape[1:]))
    if not training:
        before = np.concatenate([[0.0], outputs[:-1]])
        return StepPrediction(
            {"weights": weights, "input": inputs, "largest pair of layers": float(max(before + 2 * outputs))}, layers
        )
    passing = np.where((layers["kind"] == "Dense").to_numpy() & graph, 1, 2) * outputs
    sizes = layers["weights MiB"].to_numpy()
    so_far = sizes[::-1].cumsum()[::-1] - sizes  # gradients of the layers behind each one are there already
    kept = outputs.cumsum()
    at = int(np.argmax(kept + passing + so_far))
    backward = {"gradients": so_far[at], "activations kept": kept[at], "gradients of activations": passing[at]}
    largest = max(tensor_mib(weight.shape) for weight in model.trainable_variables)
    update = {"gradients": weights, "intermediates of the update": largest * (1 if graph else _UPDATE[optimizer])}
    worst = max(backward, update, key=lambda parts: sum(parts.values()))
    state = {"weights": weights, "optimizer slots": weights * SLOTS[optimizer], "input": inputs}
    return StepPrediction({**state, **{name: float(size) for name, size in worst.items()}}, layers)


def predicted_vs_measured(**pairs):
    """A table of name=(predicted MiB, measured MiB) with the error in %. Unmeasured (None) stays unavailable."""
    rows = {}
    for name, (predicted, measured) in pairs.items():
        error = None if not measured else 100 * (predicted - measured) / measured
        rows[name.replace("_", " ")] = {
            "predicted MiB": round(predicted, 1),
            "measured MiB": "unavailable" if measured is None else round(measured, 1),
            "error %": "unavailable" if error is None else f"{round(error, 1) + 0:+.1f}",
        }
    return pd.DataFrame(rows).T
