"""Run a training script unmodified under a memory budget, and name what its memory goes to.

    python -m labsupport doctor train.py --budget "2 GiB" -- --epochs 3

The exit status is 0 if the script finished without a suspect, 1 otherwise.
"""

from argparse import RawDescriptionHelpFormatter
from pathlib import Path

_USAGE = "python -m labsupport doctor SCRIPT [--budget SIZE] [--outside SIZE] [--devices N] [--lines] [-- ARGUMENTS OF THE SCRIPT]"


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
    add("script", help="the script, which runs unmodified; its working folder is the current one")
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
    parser.set_defaults(command=examine_and_report)


def examine_and_report(options):
    """`python -m labsupport doctor`; gives the exit status."""
    from rich.console import Console

    from labsupport.doctor.examining import examine_script
    from labsupport.doctor.rules import diagnose
    from labsupport.doctor.terminal import DoctorDisplay, report
    from labsupport.ground.folders import ArmSetupError

    if not Path(options.script).is_file():
        raise ArmSetupError(f"there is no script {options.script} here, in {Path.cwd()}")
    budget = options.budget or "half of the free memory"
    make_watcher = lambda: DoctorDisplay(options.script, budget)
    result = examine_script(
        options.script,
        options.arguments,
        make_watcher,
        options.budget,
        options.outside,
        options.devices,
        options.lines,
    )
    diagnosis = diagnose(result)
    report(diagnosis, Console())
    return 1 if diagnosis.suspects or not result.ok else 0
