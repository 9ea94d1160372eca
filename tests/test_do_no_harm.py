"""Scripts run by bare Python and by the doctor, side by side: what they print, write and end with is the same.

The scripts are in harmless.py. Each pair runs in two folders at once; what differs from run to run of bare Python (times,
process numbers) is taken out first.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harmless import SCRIPTS, TENSORFLOW

_ROOT = str(Path(__file__).parents[1])
_LONGEST = 120  # seconds; none takes ten on an idle machine
_TIMES = (
    (re.compile(r"(?m)^([IWEF])\d{4} \d\d:\d\d:[\d.]+ +\d+ "), r"\1 "),  # TensorFlow's log
    (re.compile(r"\b\d+m?s(/(step|epoch))?\b"), "TIME"),
    (re.compile(r"\bdecode-\d+\b|\bpid[= ]\d+"), "PID"),
    (re.compile(r"0x[0-9a-f]+|Thread-\d+|thread \d+|MainThread, started \d+"), "NUMBER"),
)
_OF_THEIR_OWN = (".keras", ".h5", ".pkl", "tfevents")  # files with a time or a number of the process in them


def laid_out(name, folder):
    """The words behind `python`, and what is piped in; the files of a script are written into the folder."""
    text = SCRIPTS[name].lstrip("\n") if "\0" not in SCRIPTS[name] else SCRIPTS[name]
    first, *others = re.split(r"(?m)^#: (.+)\n", text)
    folder.mkdir()
    (folder / "train.py").write_text(first)
    for path, content in zip(others[::2], others[1::2]):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(content)
    site = folder.parent / "site"  # a sitecustomize of the person's own, on a PYTHONPATH that is one already
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(
        "import sys, types\nsys.modules['settings_of_site'] = types.SimpleNamespace(loaded=__file__)\n"
    )
    run = re.search(r"(?m)^# run: (.+)$", first)
    given = re.search(r"(?m)^# stdin: (.+)$", first)
    return shlex.split(run[1]) if run else ["train.py"], given[1].replace("\\n", "\n") if given else ""


def started(folder, command):
    """A process in a folder; the temporary folder stands beside it."""
    (folder.parent / "tmp").mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(folder.parent / "tmp"), "PYTHONPATH": str(folder.parent / "site")}
    environment.pop("LABSUPPORT_LEDGER", None)
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def told(text, folder):
    """Text of a run without what differs from run to run."""
    text = text.decode(errors="backslashreplace").replace(str(folder), "FOLDER")
    for pattern, instead in _TIMES:
        text = pattern.sub(instead, text)
    return text


def written(folder):
    """{file: its text, or its size where it holds times} of all that a script left."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            own = any(mark in path.name for mark in _OF_THEIR_OWN)
            name = re.sub(r"\d{3,}.*", "N", str(path.relative_to(folder)))
            found[name] = (path.stat().st_mode, None if own else path.read_bytes().replace(bytes(folder), b"FOLDER"))
    return found


def differences(name, folder):
    """{what: (bare, by the doctor)} of what is not the same."""
    words, given = laid_out(name, folder / "bare")
    laid_out(name, folder / "seen")
    split = 2 if words[0] == "-m" else 1
    doctor = f"import sys; sys.path.insert(0, {_ROOT!r}); from labsupport.__main__ import main; sys.exit(main())"
    options = ["--budget", "64 MiB", "--report", str(folder / "report.txt"), "--", *words[split:]]
    bare = started(folder / "bare", [sys.executable, *words])
    seen = started(folder / "seen", [sys.executable, "-c", doctor, "doctor", *words[:split], *options])
    found = {}
    for process in (bare, seen):
        place = folder / ("bare" if process is bare else "seen")
        out, err = process.communicate(given.encode(), timeout=_LONGEST)
        found[place.name] = {
            "exit status": process.returncode,
            "stdout": told(out, place),
            "stderr": sorted(told(err, place).splitlines()),  # TensorFlow's threads log side by side
            "files": written(place),
        }
    assert (folder / "report.txt").read_text().strip(), "the doctor wrote no report"
    return {
        what: (found["bare"][what], found["seen"][what])
        for what in found["bare"]
        if found["bare"][what] != found["seen"][what]
    }


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_what_it_is_without_the_doctor(name, tmp_path, record_property):
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored, as a shell leaves it in the background, it is inherited
    found = differences(name, tmp_path)
    record_property("harm", (name, ", ".join(found) or "none"))
    assert not found, "\n".join(f"{what}\n  bare: {bare}\n  seen: {seen}" for what, (bare, seen) in found.items())


def test_there_are_forty():
    assert len(SCRIPTS) >= 40 and len(TENSORFLOW) <= 3
