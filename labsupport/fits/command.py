"""Predict the memory of a training step before anything is allocated: its parts, the largest batch, and what to change.

    python -m labsupport fits my_module:build_model --input 224,224,3 --batch 8,32,128 --budget "8 GiB" --optimizer adamw
    python -m labsupport fits ResNet50 --batch 32
    python -m labsupport fits model.keras --budget "4 GiB" --measure

The exit status is 0 if the first batch fits, 1 if it does not.
"""

import importlib
import os
import sys
from argparse import ArgumentTypeError, RawDescriptionHelpFormatter

_MOST_ROWS = 8  # of the table of parts
_LEAST_SAVING = 0.02  # of the step: predictions are no nearer than that to what is measured


def add_command(commands, see_lab):
    """Describe the sub-command to argparse. see_lab(slug) gives the words that lead to a lab. Nothing heavy is imported."""
    parser = commands.add_parser(
        "fits",
        help="predict the memory of a training step, the largest batch, and what to change",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", help="module:function that builds a Keras model, a name of keras.applications, or a .keras file")
    add(
        "--input",
        type=_shape,
        action="append",
        metavar="SHAPE",
        help="one example's shape without the batch, such as 224,224,3 or 128:int32; once for each input",
    )
    add("--batch", type=_numbers, default=[32], metavar="N,…", help="the first is taken apart (default 32)")
    add("--budget", metavar="SIZE", help='such as "8 GiB"; then the largest batch is told')
    add("--optimizer", metavar="NAME", help="a Keras optimizer (default: the model's own, else adam)")
    add("--loss", metavar="NAME", help="a Keras loss (default: the model's own, else mse)")
    add("--precision", metavar="POLICY", help="a dtype policy, such as mixed_bfloat16")
    add("--inference", action="store_true", help="model(x) alone, without training")
    add("--eager", action="store_true", help="the step runs outside of any tf.function")
    add("--no-plan", action="store_true", help="leave out what each change would save")
    add("--measure", action="store_true", help="run the step in a process of its own and tell the prediction's error")
    parser.set_defaults(command=lambda options: fits(options, see_lab))


def _numbers(text):
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ArgumentTypeError(f"{text!r} is no list of whole numbers, such as 8,32,128")
    return numbers


def _shape(text):
    sizes, _, dtype = text.partition(":")
    try:
        return tuple(int(part) for part in sizes.split(",") if part), dtype or "float32"
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no shape, such as 224,224,3 or 128:int32") from None


def fits(options, see_lab):
    """`python -m labsupport fits`; gives the exit status."""
    from rich.console import Console

    from labsupport.ground.budget import parse_size

    room = parse_size(options.budget) if options.budget else None
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    console, signs = Console(highlight=False, soft_wrap=True), Console(stderr=True, soft_wrap=True)
    with signs.status("loading TensorFlow") as status:
        from labsupport.fits.lowered import CannotPredict
        from labsupport.fits.plan import plan
        from labsupport.fits.prediction import predicted
        from labsupport.fits.step import Wanted

        try:
            wanted = Wanted(
                _model(options.model),
                options.batch[0],
                tuple(options.input) if options.input else None,
                None,
                options.optimizer,
                options.loss,
                not options.inference,
                options.precision,
                eager=options.eager,
            )
            prediction = predicted(wanted, options.batch, status.update)
            _tell(prediction, options.model, console)
            if room is not None:
                status.update("looking for the largest batch")
                console.print(f"\nLargest batch predicted to fit {options.budget}: {prediction.largest(room)}")
            if not options.no_plan:
                _tell_plan(prediction, plan(prediction, status.update), see_lab, console)
        except CannotPredict as error:
            signs.print(f"cannot be predicted: {error}", markup=False)
            return 1
        if options.measure:
            status.update("running the step in a process of its own")
            _measure(prediction, options.budget, console)
    return 1 if room is not None and prediction.level > room else 0


def _model(name):
    """What a command line names: the function of a module in the current folder, else the name itself."""
    if ":" not in name:
        return name
    from labsupport.fits.lowered import CannotPredict

    module, _, function = name.partition(":")
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)
    try:
        return getattr(importlib.import_module(module.removesuffix(".py")), function)
    except (ImportError, AttributeError) as error:
        raise CannotPredict(f"{name}: {error}; give module:function, with the module's file in this folder") from None


def _tell(prediction, name, console):
    from labsupport.ground.budget import MIB, mib

    step = "training step" if prediction.wanted.training else "inference"
    console.print(
        f"{name}, {step}, batch {prediction.wanted.batch}: {mib(prediction.level)} predicted at the worst moment"
    )
    console.print(f"({prediction.spread})")
    for kind, size in prediction.by("kind").items():
        console.print(f"  {size:>10,.1f} MiB  {kind}")
    console.print("Largest parts:")
    for row in prediction.rows[:_MOST_ROWS]:
        console.print(f"  {row.size / MIB:>10,.1f} MiB  {row.kind}: {row.tensor}", markup=False)
    if len(prediction.line) > 1:
        console.print("By batch: " + ", ".join(f"{batch}: {mib(level)}" for batch, level in prediction.line.items()))
    console.print("Not in these figures: " + "; ".join(prediction.unknown), markup=False)


def _tell_plan(prediction, changes, see_lab, console):
    from labsupport.ground.budget import mib

    console.print("\nWhat each change would save, by prediction:")
    least = prediction.level * _LEAST_SAVING
    for change in changes:
        if change.level is None:
            words = f"not predicted: {change.why}"
        else:
            saved = prediction.level - change.level
            less = (
                f"{mib(saved)} less" if saved > least else f"{mib(-saved)} more" if saved < -least else "much the same"
            )
            words = f"{less}, {mib(change.level)} in all"
        console.print(f"  {change.words}: {words}; {see_lab(change.lab)}", markup=False)


def _measure(prediction, budget, console):
    from labsupport.fits.measuring import run_step, step_peak
    from labsupport.ground.budget import mib
    from labsupport.showing.running import run

    result = run(run_step, prediction.wanted, budget=budget, outside="6 GiB", quiet=True)
    peak = step_peak(result) if result.ok else None
    if peak is None:
        console.print(f"Measured: {result.outcome}; {result.error or 'no counter tells its memory here'}", markup=False)
        return
    error = 100 * (prediction.level - peak) / peak
    console.print(f"Measured: {mib(peak)}; the prediction is {error:+.1f} % off")
