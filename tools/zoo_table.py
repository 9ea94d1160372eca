"""The zoo's table of predicted and measured peaks, in figures, words and a picture; made by zoo.py, told in the README."""

import csv
import statistics
from pathlib import Path

from table import write_rows

from labsupport.showing.palette import OUTLINE

RECORDED = Path(__file__).parents[1] / "data/recorded"
TABLE, RUNS, PICTURE = RECORDED / "zoo.csv", RECORDED / "zoo_runs.csv", RECORDED / "zoo.svg"
LARGEST = RECORDED / "largest.csv"  # of largest.py
# measured_mib: the highest of the runs, which zoo_runs.csv has one by one, since "it fits" has to hold in each of them
COLUMNS = (
    "model half batch optimizer predicted_lowest_mib predicted_mib measured_lowest_mib measured_mib runs error_percent "
    "tensorflow keras note"
).split()
HALVES = ("rules", "kept out")
NEAR, LOW = 5, -2  # per cent: what counts as near, and as too low


def read():
    """{(model, batch, optimizer): row}"""
    if not TABLE.exists():
        return {}
    with TABLE.open(newline="") as file:
        return {(row["model"], int(row["batch"]), row["optimizer"]): row for row in csv.DictReader(file)}


def write(rows):
    write_rows(TABLE, COLUMNS, [rows[key] for key in sorted(rows)])


def read_runs():
    """{(model, batch, optimizer): [MiB of each run]}"""
    found = {}
    if RUNS.exists():
        with RUNS.open(newline="") as file:
            for row in csv.DictReader(file):
                key = row["model"], int(row["batch"]), row["optimizer"]
                found.setdefault(key, []).append(float(row["measured_mib"]))
    return found


def write_runs(runs):
    columns = "model batch optimizer measured_mib".split()
    write_rows(RUNS, columns, [dict(zip(columns, (*key, peak))) for key in sorted(runs) for peak in runs[key]])


def points(rows, half):
    """Rows of a half that have an error."""
    return [row for row in rows.values() if row["half"] == half and row.get("error_percent") not in ("", None)]


def _meets(row):
    """Whether the ranges of a row, predicted and measured, meet, give or take what counts as near."""
    predicted, measured = (
        [float(row[f"{kind}_{end}mib"]) for end in ("lowest_", "")] for kind in ("predicted", "measured")
    )
    return predicted[0] * (1 - NEAR / 100) <= measured[1] and measured[0] <= predicted[1] * (1 + NEAR / 100)


def _share(answers):
    answers = list(answers)
    return f"{100 * sum(answers) / len(answers):.0f} %"


def summary(rows):
    """Both halves in Markdown: a row of figures each, and the aim."""
    lines = [
        "| models | points | median error, either way | within 5 % | within 10 % | worst | too low by more than 2 % | ranges meet |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for half, words in zip(HALVES, ("that rules were made on", "kept out meanwhile")):
        found = points(rows, half)
        if not found:
            continue
        errors = [float(row["error_percent"]) for row in found]
        models, worst = len({row["model"] for row in found}), max(errors, key=abs)
        lines.append(
            f"| {models} {words} | {len(errors)} | {statistics.median(map(abs, errors)):.1f} % "
            f"| {_share(abs(error) <= NEAR for error in errors)} | {_share(abs(error) <= 10 for error in errors)} "
            f"| {worst:+.1f} % | {_share(error < LOW for error in errors)} | {_share(map(_meets, found))} |"
        )
    return "\n".join([*lines, "| *the aim* | | *3 %* | *95 %* | *100 %* | *10 %* | *hardly any* | |"])


def page(rows):
    """All points in Markdown, a row a model: the error of each batch and optimizer, in per cent of what was measured."""
    lines = [
        "# Predicted and measured",
        "",
        "The error of each prediction in per cent of the measured peak of a step, by batch and optimizer (none: inference), with",
        "the measured MiB. Made from [zoo.csv](recorded/zoo.csv) by `tools/report.py --readme`, never by hand.",
        "",
        "What runs side by side decides a part of the peak, so that runs of one step differ, in [zoo_runs.csv](recorded/zoo_runs.csv)",
        "by up to half. Where a step was run several times, two figures are the lowest and the highest. The error is that of the highest",
        'order that was walked against the highest run: "it fits" has to hold in each. *Ranges meet*: the lowest to the highest predicted',
        f"and the lowest to the highest measured have a value in common, give or take {NEAR} %.",
        "",
        "![Errors over the size of the step](recorded/zoo.svg)",
    ]
    for half in HALVES:
        lines += ["", f"## {half.capitalize()}", "", "| model | error (measured) |", "|---|---|"]
        found = points(rows, half)
        for model in sorted({row["model"] for row in found}, key=str.lower):
            told = [
                f"{row['batch']} {row['optimizer']}: {float(row['error_percent']):+.1f} % ({_measured(row)})"
                for row in found
                if row["model"] == model
            ]
            lines.append(f"| {model} | {'; '.join(told)} |")
    return "\n".join(lines) + "\n"


def _measured(row):
    low, high = (f"{float(row[key]):,.0f}" for key in ("measured_lowest_mib", "measured_mib"))
    return high if low == high else f"{low} to {high}"


def draw(rows):
    """Errors over measured sizes, a sign for each half."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "zoo"
    figure = Figure(figsize=(7, 5))
    axes = figure.subplots()
    for half, sign in zip(HALVES, "o^"):
        found = points(rows, half)
        sizes, errors = ([float(row[key]) for row in found] for key in ("measured_mib", "error_percent"))
        axes.scatter(sizes, errors, marker=sign, alpha=0.6, label=f"{half} ({len(found)})")
    axes.axhspan(-NEAR, NEAR, color=OUTLINE, alpha=0.3, label=f"within {NEAR} %")
    axes.set(xscale="log", xlabel="measured peak of a step, MiB", ylabel="error of the prediction, %")
    axes.legend()
    figure.savefig(PICTURE, metadata={"Date": None})


def largest():
    """The table of largest batches as Markdown: for each model and way the batch found, runs and OOMs, and whether it always ends."""
    with LARGEST.open(newline="") as file:
        rows = list(csv.DictReader(file))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    lines = [
        "| model, budget | the largest that always runs | " + " | ".join(ways) + " |",
        "|---|---|" + "---|" * len(ways),
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        cells = [f"{row['batch']} ({row['ended']} of 3); runs {row['runs']}, OOM {row['ooms']}" for row in of_model]
        lines.append(f"| {model}, {of_model[0]['budget']} | {of_model[0]['true']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
