"""Run a training script unmodified under a memory budget, and name what its memory goes to.

    python -m labsupport doctor train.py --budget "2 GiB" -- --epochs 3
    python -m labsupport doctor -m package.train --report doctor.txt
    python -m labsupport doctor train.ipynb --html doctor.html

The script runs as `python train.py` would run it, from the current folder: it gets the same input, writes the same to
standard output and standard error, and its exit status is the doctor's. The doctor's own words go to standard error when
the script has ended, or into a file with --report. With --exit-code the status is the doctor's verdict instead: 0 if the
script finished without a suspect, otherwise 1.

The cells of a notebook run as Jupyter runs them, from the notebook's folder, in a kernel of their own; what they print and
show goes to the terminal, and the notebook stays as it is. Its status is 1 where a cell failed, else 0.
"""

import contextlib
import os
import resource
import signal
import sys
from argparse import RawDescriptionHelpFormatter
from pathlib import Path

_USAGE = "python -m labsupport doctor (SCRIPT | -m MODULE) [OPTIONS] [-- ARGUMENTS OF THE SCRIPT]"
_WIDTH = 120  # columns of a report that goes to no terminal


def add_command(commands):
    """Describe the sub-command to argparse. Nothing heavy is imported before it runs."""
    parser = commands.add_parser(
        "doctor",
        help="run a training script under a memory budget and name what its memory goes to",
        description=__doc__,
        usage=_USAGE,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("script", nargs="?", help="the script or notebook, which runs unmodified; a script's folder is the current one")
    add("-m", dest="module", metavar="MODULE", help="in place of a script: a module, as in `python -m package.train`")
    add(
        "--budget",
        metavar="SIZE",
        help='what TensorFlow may use for tensors, such as "2 GiB"; half of the free memory if not given',
    )
    add(
        "--outside",
        metavar="SIZE",
        default="4 GiB",
        help='what the process may add beside its tensors (default "4 GiB")',
    )
    add(
        "--devices",
        metavar="N",
        type=int,
        default=1,
        help="into how many logical devices the CPU or GPU is split, for scripts with a tf.distribute strategy",
    )
    add(
        "--lines",
        action="store_true",
        help="name the lines that held most at the peak, too: every allocation is recorded meanwhile, which takes time "
        "and memory outside the tensors",
    )
    _add_outputs(add)
    parser.set_defaults(command=examine_and_report)


def _add_outputs(add):
    """What is told, where, and what of it is the exit status."""
    add("--report", metavar="FILE", type=Path, help="write the report into this file in place of standard error")
    add(
        "--json",
        action="store_true",
        help="the report as JSON: suspects with kind, evidence, place and labs; figures; cause",
    )
    add("--html", metavar="FILE", type=Path, help="write the report as one HTML page, too, which needs no network")
    add(
        "--against",
        metavar="FILE",
        type=Path,
        help="the --json report of an earlier run: tell what has changed since, and by how much",
    )
    add(
        "--try",
        dest="attempt",
        action="store_true",
        help="where there is a suspect with a mechanical remedy (a smaller batch, prefetch(1), no cache, a lighter optimizer, "
        "mixed precision): run the script again with each, with nothing on its standard input, and tell what it saves. "
        "Files that the script writes are written again each time",
    )
    add(
        "--annotate",
        action="store_true",
        help="print a line for each suspect to standard error that GitHub's CI shows beside the code (::warning file=…)",
    )
    add("--exit-code", action="store_true", help="exit with the doctor's verdict in place of the script's own status")


def examine_and_report(options):
    """`python -m labsupport doctor`; gives the exit status."""
    from rich.console import Console
    from rich.text import Text

    from labsupport.doctor.against import changes, earlier
    from labsupport.doctor.page import page
    from labsupport.doctor.process import examine_script
    from labsupport.doctor.rules import diagnose
    from labsupport.doctor.terminal import DoctorDisplay, annotations
    from labsupport.doctor.trying import tried
    from labsupport.showing.plain import say

    before = earlier(options.against) if options.against else None
    budget = options.budget or "half of the free memory"
    shown = None if options.report else Console(stderr=True)
    make_watcher = lambda: DoctorDisplay(options.module or options.script, budget, shown)
    command, start = _command(options), _start(options)

    def run(remedy=""):
        limits = options.budget, options.outside, options.devices
        return examine_script(command, make_watcher, *limits, options.lines and not remedy, start, remedy)

    result = run()
    diagnosis = diagnose(result)
    told = [changes(before, diagnosis) if before else [], []]
    if options.attempt:
        told[1] = tried(diagnosis, run, lambda line: Console(stderr=True).print(Text(line), soft_wrap=True))
    _write(diagnosis, options, told)
    for line in annotations(diagnosis, options.module or options.script) if options.annotate else ():
        say(line, file=sys.stderr)
    if options.html:
        options.html.write_text(page(diagnosis, *told), encoding="utf-8", errors="replace")
    if options.exit_code:
        return 1 if diagnosis.suspects or not result.ok else 0
    if result.status < 0:
        _end_by(-result.status)
    return result.status


def _command(options):
    """What stands behind `python`. Raises ArmSetupError."""
    from labsupport.ground.folders import ArmSetupError

    if (options.script is None) == (options.module is None):
        raise ArmSetupError("give a script, or -m and a module; what is meant for the script goes after --")
    if options.module is not None:
        return ["-m", options.module, *options.arguments]
    if not Path(options.script).is_file():
        raise ArmSetupError(f"there is no script {options.script} here, in {Path.cwd()}")
    return [options.script, *options.arguments]


def _start(options):
    """What makes the process: the kernel of a notebook, or None for a script. Raises ArmSetupError."""
    if options.module is not None or not options.script.endswith(".ipynb"):
        return None
    from labsupport.doctor.notebook import Notebook
    from labsupport.ground.folders import ArmSetupError

    if options.arguments:
        raise ArmSetupError("a notebook takes no arguments: set them in a cell")
    return Notebook


def _write(diagnosis, options, told):
    """The report, as text or as JSON, into a file or to standard error."""
    from rich.console import Console

    from labsupport.doctor.terminal import as_json, report

    with contextlib.ExitStack() as stack:
        stream = None
        if options.report:
            stream = stack.enter_context(options.report.open("w", encoding="utf-8", errors="replace"))
        console = Console(file=stream, stderr=stream is None, color_system="auto" if stream is None else None)
        if not console.is_terminal:
            console.width = _WIDTH
        if options.json:
            console.out(as_json(diagnosis, *told), highlight=False)
        else:
            report(diagnosis, console, *told)


def _end_by(number):
    """End this process by the signal that ended the script, so that who started it is told the same."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
