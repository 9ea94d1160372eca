"""The same step for real: built, given random tensors and run in an arm, so that a prediction can be held against it."""

from labsupport.fits.step import made
from labsupport.ground import meter

STEPS = 2  # the first traces, the second finds the memory as the first left it


def run_step(wanted, steps=STEPS):
    """In an arm: build what is Wanted and run its step; phases "build", "step 1", "step 2", … have the exact peaks."""
    import keras

    with meter.phase("build"):
        step, specs, _ = made(wanted)
    arguments = keras.tree.map_structure(_filled, specs)
    import tensorflow as tf

    function = step if wanted.eager else tf.function(step)
    for number in range(steps):
        with meter.phase(f"step {number + 1}"):
            function(*arguments)


def _filled(spec):
    import tensorflow as tf

    if spec.dtype.is_floating:
        return tf.cast(tf.random.stateless_uniform(spec.shape, [1, 2]), spec.dtype)
    return tf.zeros(spec.shape, spec.dtype)  # class 0, word 0: there is one in every model


def step_peak(result):
    """Bytes at the worst moment of the steps of an arm that run_step ran; None where no counter tells."""
    peaks = [phase.peak for phase in result.phases if phase.name.startswith("step ")]
    return max(peaks) if peaks and None not in peaks else None
