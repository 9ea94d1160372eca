"""How good are predictions? Each model of the zoo measured in an arm, and predicted: data/recorded/zoo.csv and zoo.svg.

python tools/zoo.py                   measure what has no row yet, predict all, tell both halves
python tools/zoo.py --only VGG16 lstm those models alone
python tools/zoo.py --no-measuring    predict what has been measured
python tools/zoo.py --tell            the figures of the table as it is
"""

import argparse
from importlib.metadata import version

from zoo_models import zoo
from zoo_table import draw, read, summary, write

from labsupport.fits.lowered import CannotPredict
from labsupport.fits.measuring import run_step, step_peak
from labsupport.fits.prediction import predicted
from labsupport.fits.step import Wanted
from labsupport.ground.budget import MIB
from labsupport.showing.running import run

BUDGET = "9 GiB"


def configurations(entry):
    """(batch, optimizer) of a model; "none" is inference."""
    small, large = entry.batches
    return [(small, "adam"), (large, "sgd"), (large, "adam"), (small, "sgd"), (large, "none")]


def wanted(entry, batch, optimizer):
    training = optimizer != "none"
    return Wanted(entry.build, batch, entry.input, None, optimizer if training else None, entry.loss, training)


def measured(entry, batch, optimizer):
    """(MiB or "", a note) of a step in an arm."""
    result = run(run_step, wanted(entry, batch, optimizer), budget=BUDGET, outside="6 GiB", quiet=True, timeout=900)
    peak = step_peak(result) if result.ok else None
    return ("", result.outcome) if peak is None else (round(peak / MIB, 2), "")


def filled(row, entry, batch, optimizer):
    """A row with its prediction and error."""
    try:
        level = predicted(wanted(entry, batch, optimizer)).total_mib
    except CannotPredict as error:
        return {**row, "predicted_mib": "", "error_percent": "", "note": str(error)}
    error = 100 * (level / float(row["measured_mib"]) - 1)
    return {**row, "predicted_mib": round(level, 2), "error_percent": round(error, 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="MODEL")
    parser.add_argument("--no-measuring", action="store_true")
    parser.add_argument("--tell", action="store_true")
    options = parser.parse_args()
    rows = read()
    versions = {"tensorflow": version("tensorflow"), "keras": version("keras")}
    for entry in [] if options.tell else zoo().values():
        if options.only and entry.name not in options.only:
            continue
        for batch, optimizer in configurations(entry):
            key = entry.name, batch, optimizer
            if key not in rows and not options.no_measuring:
                peak, note = measured(entry, batch, optimizer)
                rows[key] = {"model": entry.name, "half": entry.half, "batch": batch, "optimizer": optimizer}
                rows[key] |= {"measured_mib": peak, "note": note, **versions}
            if key in rows and rows[key]["measured_mib"]:
                rows[key] = filled(rows[key], entry, batch, optimizer)
                print(*rows[key].values(), flush=True)
            write(rows)
    print(summary(rows))
    draw(rows)


if __name__ == "__main__":
    main()
