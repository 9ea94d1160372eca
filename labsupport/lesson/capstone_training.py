"""What a script of the capstone trains, seen from Keras' optimizers: every update, at which rate, and the weights at the end.

Runs in the process of an arm. Nothing that the script says about itself is asked for.
"""

import functools
import weakref
from collections import Counter

import numpy as np

_MOST = 4096  # updates that one call of a tf.function may make
_SAME = 1e-4  # relative: a rate passes through float32


def near(rate, rates):
    """The one of `rates` that this rate is, or None."""
    return next((known for known in rates if abs(rate - known) <= _SAME * known), None)


class Training:
    """Notes the updates of all Keras optimizers of this process, in graphs too.

    updates: {rate: number of updates}, rates as they come. first: {rate: which update of its optimizer the first one was},
    1 for an optimizer that is new or set back. weights: {rate in `last`: arrays after its latest update}, last being the
    rates at which trainings end. note(rate) is called when updates were seen, with the rate of the newest.
    """

    def __init__(self, tf, last=(), note=lambda rate: None):
        self.updates, self.first, self.weights = Counter(), {}, {}
        self._tf, self._last, self._note = tf, last, note
        # Variables, since a graph can write into them, one that XLA has compiled as well.
        self._log, self._made = tf.Variable(tf.zeros([_MOST, 3])), tf.Variable(0)
        self._read = 0
        self._places = []  # of updates in the code of graphs: weak references to the variables that are updated there

    def __enter__(self):
        from keras.src.optimizers.base_optimizer import BaseOptimizer
        from tensorflow import autograph
        from tensorflow.python.eager.polymorphic_function import concrete_function, polymorphic_function

        calls = self._and_look
        self._undo = [
            _wrapped(BaseOptimizer, "apply", self._apply, autograph.experimental.do_not_convert),
            _wrapped(polymorphic_function.Function, "__call__", calls),
            _wrapped(concrete_function.ConcreteFunction, "__call__", calls),
        ]
        return self

    def __exit__(self, *exception):
        for undo in self._undo:
            undo()

    def _apply(self, original, optimizer, grads, trainable_variables=None):
        variables = None if trainable_variables is None else list(trainable_variables)
        original(optimizer, grads, variables)
        self._places.append([weakref.ref(v) for v in variables or optimizer._trainable_variables])
        cast = lambda value: self._tf.cast(value, self._tf.float32)
        row = [cast(optimizer.learning_rate), float(len(self._places) - 1), cast(optimizer.iterations)]
        self._log.scatter_nd_update([[self._made % _MOST]], [self._tf.stack(row)])
        self._made.assign_add(1)
        self._look()

    def _and_look(self, original, function, *args, **kwargs):
        result = original(function, *args, **kwargs)
        self._look()
        return result

    def _look(self):
        """Note the updates since the last look, and the weights after the newest of them."""
        if not self._tf.executing_eagerly() or int(self._made) == self._read:
            return
        made, rows = int(self._made), self._log.numpy()
        for number in range(self._read, made):
            rate, place, count = rows[number % _MOST].tolist()
            self.first.setdefault(rate, int(count))
            self.updates[rate] += 1
        self._read = made
        self._note(rate)
        if (ends := near(rate, self._last)) is not None:
            variables = [reference() for reference in self._places[int(place)]]
            if all(variable is not None for variable in variables):
                self.weights[ends] = [np.array(variable) for variable in variables]


def made_at(rate, updates):
    """How many updates were made at this rate."""
    return sum(number for seen, number in updates.items() if near(seen, [rate]))


def _wrapped(owner, name, instead, mark=lambda function: function):
    """Let instead(original, …) run in place of a method; returns what takes it back."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return instead(original, *args, **kwargs)

    setattr(owner, name, mark(wrapper))
    return lambda: setattr(owner, name, original)
