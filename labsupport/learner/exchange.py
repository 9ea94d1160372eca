"""Exported ledgers: a participant writes one with export(), gather() reads those of a class and names the unusable ones."""

import json
import re
import secrets
from dataclasses import dataclass

from labsupport.lesson.ledger import LedgerError, content, entries, is_entry, ledger_path, machine

EXPORT, VERSION = "labsupport_export", 1
LONGEST = 60  # characters of a participant's name, so that a table of the pooled page stays one
AGAIN = "ask for a new one: python -m labsupport export FILE"


@dataclass
class Participant:
    """One exported ledger; file is where it came from."""

    name: str
    entries: list
    file: str

    @property
    def named(self):
        """Whether somebody chose the name."""
        return not re.fullmatch(r"participant-[0-9a-f]{6}", self.name)

    def shares(self, other):
        """Whether both have an entry of the same time, which only copies of one ledger do: it counts microseconds."""
        return not {entry["time"] for entry in self.entries}.isdisjoint(entry["time"] for entry in other.entries)


def export(target, name=None):
    """Write a copy of the ledger for pooling into a new file; returns (name, number of entries).

    name: what the participant wants to be called; a random one if None. Raises LedgerError.
    """
    name = f"participant-{secrets.token_hex(3)}" if name is None else " ".join(name.split())
    if not 0 < len(name) <= LONGEST:
        raise LedgerError(f'a name has 1 to {LONGEST} characters: --name "blue team"')
    kept, _ = entries()
    if not kept:
        why = "LABSUPPORT_LEDGER is set to off" if ledger_path() is None else f"{ledger_path()} has no entries yet"
        raise LedgerError(f"there is nothing to export: {why}")
    document = json.dumps({EXPORT: VERSION, "participant": name, "machine": machine(), "entries": kept}, indent=1)
    try:
        with open(target, "x", encoding="utf-8") as file:  # never over something that is there already
            file.write(document)
    except FileExistsError:
        raise LedgerError(f"{target} exists already: give another name, or delete it first") from None
    except OSError as error:
        raise LedgerError(f"{target} cannot be written ({error.strerror}): give another folder") from None
    return name, len(kept)


def read(path):
    """The participant of an exported file. Raises LedgerError with what is wrong and what to do."""
    try:
        found = content(path)
    except OSError as error:
        raise LedgerError(f"{path} cannot be read ({error.strerror}): check its name and the rights to it") from None
    try:
        document = json.loads(found)
    except (ValueError, RecursionError):
        raise LedgerError(f"{path} is damaged, cut short, or no export (a ledger itself is none): {AGAIN}") from None
    if not isinstance(document, dict) or EXPORT not in document:
        raise LedgerError(f"{path} is no export of a ledger: {AGAIN}")
    if document[EXPORT] != VERSION:
        theirs = str(document[EXPORT])[:20]
        raise LedgerError(
            f"{path} has version {theirs!r} of the format, this is version {VERSION}: use the same release of the labs for all, and {AGAIN}"
        )
    name, kept = document.get("participant"), document.get("entries")
    if not isinstance(name, str) or not name.strip() or not isinstance(kept, list) or not all(map(is_entry, kept)):
        raise LedgerError(f"{path} has been changed by hand or damaged: {AGAIN}")
    return Participant(name.strip()[:LONGEST], kept, str(path))


def gather(paths):
    """(participants, what was left out and why). Of two files of one participant the one with more entries is kept, of equal ones the named."""
    found, problems = [], []
    for path in paths:
        try:
            new = read(path)
        except LedgerError as error:
            problems.append(str(error))
            continue
        twin = next((old for old in found if old.name == new.name or old.shares(new)), None)
        if twin:
            less, more = sorted((new, twin), key=lambda one: (len(one.entries), one.named, one is twin))
            cure = "keep one" if twin.shares(new) else "if they are two people, one exports again with another --name"
            problems.append(
                f"{less.file} is by the same participant as {more.file} ({more.name!r}), which has as many entries or more: {cure}"
            )
            found.remove(twin)
            new = more
        found.append(new)
    return found, problems
