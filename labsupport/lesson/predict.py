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
_PLAIN = {"Dense", "Conv2D", "Conv1D", "ReLU", "Activation"}
_PLAIN |= {"MaxPooling2D", "AveragePooling2D", "GlobalAveragePooling2D"}
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

    def _rows(self):
        return {**self.parts, "peak of the step": self.total_mib}

    def _repr_html_(self):
        return pd.DataFrame({"MiB": self._rows()}).round(2).to_html(border=0) + self.layers.round(2).to_html(border=0)

    def __str__(self):
        return "\n".join(f"{name}: {size:.1f} MiB" for name, size in self._rows().items())


def predict_step(model, batch, optimizer="adam", training=True, graph=True):
    """Predict the peak of one step of a built, sequential Keras model in float32 from its shapes alone.

    Weights and slots are exact multiples of the parameter count. A training step peaks on its way back or in the
    update, whichever is larger; inference where a layer's input, its output and one intermediate are largest together.

    graph: the step runs inside a tf.function. Raises ValueError for layers whose rule is not known here.
    """
    if optimizer not in SLOTS:
        raise ValueError(f"no rule for the optimizer {optimizer!r}; known are {', '.join(SLOTS)}")
    layers = _layers(model, batch)
    weights = float(layers["weights MiB"].sum())
    inputs = tensor_mib((batch, *model.input_shape[1:]))
    if not training:
        outputs = layers["output MiB"].to_numpy()
        before = np.concatenate([[0.0], outputs[:-1]])
        largest = float(max(before + 2 * outputs))
        return StepPrediction({"weights": weights, "input": inputs, "largest pair of layers": largest}, layers)
    state = {"weights": weights, "optimizer slots": weights * SLOTS[optimizer], "input": inputs}
    largest = max(tensor_mib(weight.shape) for weight in model.trainable_variables)
    update = {"gradients": weights, "intermediates of the update": largest * (1 if graph else _UPDATE[optimizer])}
    worst = max(_backward(layers, graph), update, key=lambda parts: sum(parts.values()))
    return StepPrediction({**state, **worst}, layers)


def _layers(model, batch):
    """A row a layer: its kind, and the MiB of its output and of its weights. Raises ValueError for one without a rule."""
    rows = []
    for layer in model.layers:
        kind, activation = type(layer).__name__, getattr(getattr(layer, "activation", None), "__name__", "linear")
        if kind not in _PLAIN | _VIEWS or activation not in _OUTPUT_ONLY:
            raise ValueError(f"no rule for layer {layer.name} ({kind}, {activation}): measure it with run() instead")
        output = 0.0 if kind in _VIEWS else tensor_mib((batch, *layer.output.shape[1:]))
        weights = sum(tensor_mib(weight.shape) for weight in layer.weights)
        rows.append({"layer": layer.name, "kind": kind, "output MiB": output, "weights MiB": weights})
    return pd.DataFrame(rows).set_index("layer")


def _backward(layers, graph):
    """MiB by part at the worst layer of the way back, beside weights, slots and input.

    Every layer's output is kept for it. At a layer there are the outputs still kept, the weight gradients of the layers
    behind it, the gradient of its output and the one behind its activation; a graph computes a dense layer's second
    gradient in the first one's place.
    """
    outputs, sizes = layers["output MiB"].to_numpy(), layers["weights MiB"].to_numpy()
    kept = outputs.cumsum()
    behind = sizes[::-1].cumsum()[::-1] - sizes
    passing = np.where((layers["kind"] == "Dense").to_numpy() & graph, 1, 2) * outputs
    at = int(np.argmax(kept + passing + behind))
    parts = {"gradients": behind[at], "activations kept": kept[at], "gradients of activations": passing[at]}
    return {name: float(size) for name, size in parts.items()}


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
