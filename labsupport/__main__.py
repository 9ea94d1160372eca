"""`python -m labsupport`: doctor, fits, progress, export, pool. A new command is a function here and a parser in main().

Each function imports what it needs, so that no command waits for the libraries of another.
"""

import argparse
import sys
from pathlib import Path

from labsupport.doctor.command import add_command
from labsupport.fits.command import add_command as add_fits
from labsupport.ground.budget import BudgetError
from labsupport.ground.folders import ArmSetupError
from labsupport.lesson.catalogue import see_lab
from labsupport.lesson.ledger import LedgerError, ledger_path
from labsupport.showing.plain import plain, say


def show_progress(options):
    from labsupport.learner.standing import guesses, progress

    say(str(progress()))
    say(str(guesses()))


def write_export(options):
    from labsupport.learner.exchange import export

    name, number = export(options.file, options.name)
    what = f"{number} entries of {ledger_path()}, named {name!r}"
    say(f"{options.file}: {what}. It is plain text: read it before you hand it in.")


def write_pool(options):
    from labsupport.learner.pool import pool

    if options.output.resolve() in {file.resolve() for file in options.files}:
        raise LedgerError(f"{options.output} is one of the files to pool: give the page another name")
    page, problems = pool(options.files)
    options.output.write_text(page, encoding="utf-8", errors="replace")  # names may hold anything
    for problem in problems:
        say(plain(f"left out: {problem}"), file=sys.stderr)
    say(f"{options.output}: {len(options.files) - len(problems)} of {len(options.files)} files")


def parsed(words):
    """(the parser, the options of a command line); what stands after -- is for the doctor's script, as options.arguments."""
    what = "Keep TensorFlow training inside its memory: beside the labs"
    parser = argparse.ArgumentParser(prog="python -m labsupport", description=what)
    commands = parser.add_subparsers(metavar="command", required=True)

    add_command(commands)
    add_fits(commands, see_lab)

    command = commands.add_parser("progress", help="your labs, exercises and guesses as text")
    command.set_defaults(command=show_progress)

    command = commands.add_parser("export", help="a copy of your ledger to hand in")
    command.add_argument("file", type=Path, help="a new file, such as mine.json")
    command.add_argument("--name", help="what you want to be called in the pooled page (default: a random name)")
    command.set_defaults(command=write_export)

    command = commands.add_parser("pool", help="the exports of a class in one HTML page")
    command.add_argument("files", type=Path, nargs="+", metavar="file", help="exported ledgers")
    command.add_argument("-o", "--output", type=Path, required=True, help="the page, such as class.html")
    command.set_defaults(command=write_pool)

    split = words.index("--") if "--" in words else len(words)
    options, unknown = parser.parse_known_args(words[:split], argparse.Namespace(arguments=words[split + 1 :]))
    if unknown:
        parser.error(f"not understood: {' '.join(unknown)}; what is meant for the doctor's script goes after --")
    return parser, options


def main(arguments=None):
    parser, options = parsed(sys.argv[1:] if arguments is None else arguments)
    try:
        return options.command(options)
    except KeyboardInterrupt:
        return 130
    except (LedgerError, OSError) as error:
        sys.exit(f"{error}")
    except (ArmSetupError, BudgetError) as error:
        parser.error(f"{error}")


if __name__ == "__main__":
    sys.exit(main())
