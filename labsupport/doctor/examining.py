"""Run a function in an arm with the doctor's probes, as the labs' own arms are examined. For scripts see process.py."""

from labsupport.doctor.probes import Probe
from labsupport.ground import meter


def examine(target, args):
    """In the arm: run target(*args) with the probes installed. Its exception goes on; the facts are sent either way."""
    import keras
    import tensorflow as tf

    probe = Probe(meter.active, tf)
    probe.install()
    probe.see_keras(keras)
    probe.forgive_late_settings()
    probe.send()  # so that it is known that it ran, whatever becomes of it
    failed = None
    try:
        return target(*args)
    except BaseException as error:
        failed = error
        raise
    finally:
        probe.script_ends(failed)
        probe.last_census(failed)
