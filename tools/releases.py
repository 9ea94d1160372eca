"""Verdicts through the releases of TensorFlow: `make releases` runs every lab under each and keeps what its claims came to.

A release has an environment of its own in build/releases, in which the committed notebooks run as they are, cell after
cell up to the last verdict, also past one that fails. What a lab's claims came to there, with their figures, or why
there is no verdict, goes into data/recorded/releases.json after each lab; `tools/report.py --readme` makes page and picture of it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import releases_table
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from releases_table import NONE
from report import verdicts

from labsupport.lesson.catalogue import labs
from labsupport.lesson.ledger import is_entry

ROOT = Path(__file__).parents[1]
# Beside the pinned one, of which the committed notebooks tell.
RELEASES = ("2.12", "2.15", "2.16", "2.18", "2.19", "2.20", "newest")
_CELL_SECONDS = 300  # for what takes a tenth of it; a cell that hangs under an old release ends there
# Keras as it was in the month of a release (PyPI's dates); before 2.16 it has TensorFlow's own number.
_KERAS = {"2.16": "3.1", "2.18": "3.6", "2.19": "3.9", "2.20": "3.11"}
# No verdict waits for a prediction, and a name is missing after a cell that failed.
_FOLLOW = ("CannotPredict", "NameError")
_IN_USER_CODE = "in user code:"  # what AutoGraph begins an error with; the error itself ends it
_NO_TF_KERAS = "2.12"  # older than that package, and Keras 2 itself
_BESIDE = {"2.12": ["ipython<8.19"]}  # later ones need newer typing_extensions than it allows, and do not tell pip


def environment(release):
    """The Python of an environment with this release, made if need be."""
    folder = ROOT / "build" / "releases" / release
    if not (folder / "ready").exists():
        wanted = "" if release == "newest" else f"~={release}.0"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        packages = [f"tensorflow{wanted}", "tensorflow-model-optimization", "ipykernel", f"{ROOT}[notebook]"]
        packages += [f"keras~={_KERAS[release]}.0"] if release in _KERAS else []
        packages += _BESIDE.get(release, [])
        packages += [f"tf-keras{wanted}"] * (release != _NO_TF_KERAS)
        subprocess.run([folder / "bin" / "pip", "install", "-q", *packages], check=True)
        subprocess.run(
            [folder / "bin" / "pip", "uninstall", "-q", "-y", "labsupport"], check=True
        )  # it is PYTHONPATH's
        (folder / "ready").touch()
    return folder / "bin" / "python"


class _Kernel(AsyncKernelManager):
    """Kernels of another environment's Python."""

    python = ""

    @property
    def kernel_spec(self):
        return KernelSpec(argv=[self.python, "-m", "ipykernel_launcher", "-f", "{connection_file}"], language="python")


def versions(python):
    """What a release's environment has: {package: version}."""
    code = (
        "import json; from importlib.metadata import version as v; "
        "print(json.dumps({n: v(n) for n in ('tensorflow', 'keras', 'numpy')}))"
    )
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)


def run(path, python):
    """{claim: {"verdict", "figures"} or {"verdict": NONE, "why"}} of a lab that runs in another environment."""
    book = nbformat.read(path, as_version=4)
    judging = [number for number, cell in enumerate(book.cells) if "lab.verdict(" in cell.source]
    del book.cells[judging[-1] + 1 :]  # exercises judge a learner, and no claim
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger.jsonl"
        # What a lab tells the ledger is told before a verdict is held against the text, which belongs to one release.
        told = {"LABSUPPORT_LEDGER": str(ledger), "JPY_SESSION_NAME": path.name}
        told["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tools" / "keras2")))
        kernel = type("Kernel", (_Kernel,), {"python": str(python)})
        client = NotebookClient(
            book,
            timeout=_CELL_SECONDS,
            allow_errors=True,
            kernel_manager_class=kernel,
            resources={"metadata": {"path": str(path.parent)}},
        )
        try:
            client.execute(env={**os.environ, **told})
            gone = ""
        except Exception as error:  # a cell without end, a kernel that died: what was judged before it stands
            gone = f"{type(error).__name__}: {error}"
        entries = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
    found = {
        entry["id"]: {"verdict": entry["verdict"], "figures": entry["figures"]}
        for entry in entries
        if is_entry(entry) and entry["kind"] == "verdict"
    }
    why = _first_error(book) or gone
    return {claim: found.get(claim, {"verdict": NONE, "why": why}) for claim in labs()[path.stem[3:]].claims}


def _first_error(book):
    """The first error of a notebook that ran, in a line; "" if there was none. What follows from another comes last."""
    errors = [output for cell in book.cells for output in cell.get("outputs", []) if output.output_type == "error"]
    errors.sort(key=lambda error: error.ename in _FOLLOW)
    if not errors:
        return ""
    lines = [line.strip() for line in f"{errors[0].ename}: {errors[0].evalue}".splitlines() if line.strip()]
    return (lines[0] if not lines[0].endswith(_IN_USER_CODE) else f"{lines[0]} {lines[-1]}")[:300]


def record(release, notebooks):
    """Run labs under a release and keep what their claims came to, after each lab."""
    python = environment(release)
    row = releases_table.read().get(release, {})
    if row.get("versions") != (now := versions(python)):
        row = {"versions": now, "claims": {}}
    for path in notebooks:
        found = run(path, python)
        row["claims"] |= found
        releases_table.write({**releases_table.read(), release: row})
        print(release, path.stem, {claim: facts["verdict"] for claim, facts in found.items()}, flush=True)


def against_record(python, notebooks):
    """Run labs with another environment's Python and print which verdicts changed since the committed notebooks."""
    ledger = [entry for path in notebooks for entry in verdicts(path)]
    before = releases_table.with_committed(ledger)["committed"]["claims"]
    now = {}
    for path in notebooks:
        now |= run(path, python)
    print("\n".join(releases_table.changes(before, now)) or f"No verdict changed: {len(now)} claims.")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--releases", nargs="+", choices=RELEASES, default=RELEASES)
    parser.add_argument("--labs", nargs="+", help="such as 08_loop_accumulation; all if not given")
    parser.add_argument(
        "--against-record", metavar="PYTHON", help="print which verdicts changed with this Python's TensorFlow"
    )
    options = parser.parse_args()
    notebooks = sorted((ROOT / "labs").glob("[0-9]*.ipynb"))
    judging = [path for path in notebooks if labs()[path.stem[3:]].claims]
    notebooks = [path for path in judging if path.stem in (options.labs or [path.stem])]
    if options.against_record:
        return against_record(Path(options.against_record).absolute(), notebooks)
    for release in options.releases:
        record(release, notebooks)


if __name__ == "__main__":
    main()
