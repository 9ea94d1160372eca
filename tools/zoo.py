"""How good are predictions? Each model of the zoo measured in an arm, and predicted: data/recorded/zoo.csv, zoo_runs.csv and zoo.svg.

python tools/zoo.py                   measure what has no row yet, predict all, tell both halves
python tools/zoo.py --only VGG16 lstm those models alone
python tools/zoo.py --runs 6          measure until each has six runs, since those of one step differ
python tools/zoo.py --no-measuring    predict what has been measured
python tools/zoo.py --tell            the figures of the table as it is
"""

import argparse
from importlib.metadata import version

from zoo_models import zoo
from zoo_table import draw, read, read_runs, summary, write, write_runs

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


def filled(row, runs, prediction):
    """A row with its runs, MiB each, its Prediction, and the error."""
    level, highest = prediction.total_mib, max(runs)
    return {
        **row,
        "predicted_lowest_mib": round(prediction.lowest_mib, 2),
        "predicted_mib": round(level, 2),
        "measured_lowest_mib": min(runs),
        "measured_mib": highest,
        "runs": len(runs),
        "error_percent": round(100 * (level / highest - 1), 2),
        "note": "",
    }


def measure(entry, batch, optimizer, runs, wanted_runs):
    """Run a step until it has been run so often, or does not run; returns a note on why not."""
    while len(runs) < wanted_runs:
        peak, note = measured(entry, batch, optimizer)
        if not peak:
            return note
        runs.append(peak)
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="MODEL")
    parser.add_argument("--runs", type=int, default=1, metavar="N")
    parser.add_argument("--no-measuring", action="store_true")
    parser.add_argument("--tell", action="store_true")
    options = parser.parse_args()
    rows, runs = read(), read_runs()
    versions = {"tensorflow": version("tensorflow"), "keras": version("keras")}
    for entry in [] if options.tell else zoo().values():
        if options.only and entry.name not in options.only:
            continue
        for batch, optimizer in configurations(entry):
            key = entry.name, batch, optimizer
            found = runs.get(key, [])
            row = dict(zip(("model", "batch", "optimizer"), key)) | {"half": entry.half, **versions, "note": ""}
            if not options.no_measuring:
                row["note"] = measure(entry, batch, optimizer, found, options.runs)
            if found:
                runs[key] = found
                try:
                    row = filled(row, found, predicted(wanted(entry, batch, optimizer)))
                except CannotPredict as error:
                    row["note"] = str(error)
            if found or row["note"]:
                rows[key] = row
                print(*row.values(), flush=True)
            write(rows)
            write_runs(runs)
    print(summary(rows))
    draw(rows)


if __name__ == "__main__":
    main()
