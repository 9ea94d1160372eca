"""A table of recorded figures as a CSV file, written the same way by every tool."""

import csv


def write_rows(path, columns, rows):
    """Write rows, dicts by column; a row that lacks a column leaves it empty, one with another column is an error."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
