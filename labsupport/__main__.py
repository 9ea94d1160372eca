"""`python -m labsupport …`: what is used from a terminal."""

import argparse
import sys

from labsupport import doctor
from labsupport.arm import ArmSetupError
from labsupport.budget import BudgetError


def main():
    parser = argparse.ArgumentParser(prog="python -m labsupport")
    commands = parser.add_subparsers(required=True, metavar="command")
    doctor.add_command(commands)
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    options, unknown = parser.parse_known_args(words[:split], argparse.Namespace(arguments=words[split + 1 :]))
    if unknown:
        parser.error(f"not understood: {' '.join(unknown)}; what is meant for the script goes after --")
    try:
        return options.command(options)
    except (ArmSetupError, BudgetError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
