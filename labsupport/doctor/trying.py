"""`doctor --try`: the same script again under the same budget, once with each remedy that can be had from outside."""

from labsupport.doctor.against import as_earlier, changes
from labsupport.doctor.remedies import REMEDIES, remedies
from labsupport.doctor.rules import diagnose


def tried(diagnosis, again, say):
    """Sentences on what each remedy did. again(remedy): the ArmResult of another run; say(line): tells what is run."""
    kinds = [suspect.kind for suspect in diagnosis.suspects]
    before, told = as_earlier(diagnosis), []
    for name in dict.fromkeys(remedies(kinds)):
        words = REMEDIES[name].words
        say(f"doctor: trying {words}: the script runs again, and writes its files again …")
        result = again(name)
        error = f"; {result.error}" if result.error is not None else ""
        told.append(f"{words}: {'; '.join(changes(before, diagnose(result)))}{error}")
    for suspect in diagnosis.suspects:
        if not remedies([suspect.kind]):
            told.append(f"{suspect.kind}: nothing to try from outside; in the code: {suspect.change}")
    return told
