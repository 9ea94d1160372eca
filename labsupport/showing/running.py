"""Run a function in an arm and show it while it runs: what the notebooks call."""

from labsupport.ground.arm import Job, watched
from labsupport.ground.result import Stopped, expect_finished
from labsupport.showing import live
from labsupport.showing.plain import say


def run(
    function, *args, budget=None, outside="2 GiB", label=None, timeout=300, quiet=False, env=None, logical_devices=1
):
    """Run function(*args) in a fresh Python process under a budget and return an ArmResult.

    The function may come from a notebook cell. Whatever it does, this process survives: an out-of-memory
    error, a crash or a hang becomes `result.error`. Interrupting ends the child and raises Stopped, a
    KeyboardInterrupt.

    budget: what TensorFlow may hand out for tensors, such as "256 MiB"; None: half of the free memory.
    outside: what the process may add beside its tensors (NumPy, Python, graphs).
        Files in /dev/shm, which are memory too, are out of its sight.
    label: name in pictures and tables; the function's name if None.
    timeout: seconds after which the child is ended.
    quiet: leave one line in place of a picture (for sweeps).
    env: further environment variables, for what TensorFlow reads only at import.
    logical_devices: into how many logical devices the CPU or GPU is split.

    Raises BudgetError for a bad budget, ArmSetupError where the function cannot be sent or started.
    """
    job = Job(function, args, budget, outside, label, timeout, env, logical_devices)
    try:
        result = watched(job, lambda: live.plot_for(quiet))
    except KeyboardInterrupt:
        name = label or getattr(function, "__name__", "the run")
        raise Stopped(
            f'you interrupted "{name}", and its process has ended; run the cell again to measure it'
        ) from None
    if result.output:
        say(result.output, end="")
    result.job = job
    return result


def measure(function, *args, **options):
    """run() for a quiet arm that must finish: leaves one line in place of a picture and returns the ArmResult.

    options: those of run(). Raises RuntimeError with the arm's error if it did not finish.
    """
    result = run(function, *args, quiet=True, **options)
    expect_finished(result)
    return result
