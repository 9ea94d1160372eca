"""A run of the doctor's against an earlier one."""

import json

import pytest
from test_rules import died, finished

from labsupport.doctor.against import changes, earlier
from labsupport.doctor.rules import Diagnosis
from labsupport.doctor.suspects import Suspect
from labsupport.doctor.terminal import as_json
from labsupport.ground.budget import MIB
from labsupport.ground.folders import ArmSetupError


def reported(path, diagnosis):
    path.write_text(as_json(diagnosis))
    return earlier(path)


def test_what_a_change_brought_is_told_with_figures(tmp_path):
    before = reported(tmp_path / "before.json", Diagnosis(died(None, peak=250 * MIB), [Suspect("buffer", MIB, ["…"])]))
    assert changes(before, Diagnosis(finished(None, peak=100 * MIB))) == [
        "OOM; now finished",
        "tensors, peak: 250.0 MiB, now 100.0 MiB: 60% less",
        "process, peak: 250.0 MiB, now 100.0 MiB: 60% less",
        "no suspect any more: buffer",
    ]


def test_what_did_not_help_is_told_too(tmp_path):
    before = reported(tmp_path / "before.json", Diagnosis(finished(None, peak=100 * MIB)))
    told = changes(before, Diagnosis(finished(None, peak=101 * MIB), [Suspect("retracing", None, ["…"])]))
    assert told[0].endswith("the same within 2 %") and told[-1] == "new suspect: retracing"


@pytest.mark.parametrize("text", ["", "[]", json.dumps({"figures": {}})])
def test_another_file_is_no_report(tmp_path, text):
    (tmp_path / "before.json").write_text(text)
    with pytest.raises(ArmSetupError, match="no report of the doctor"):
        earlier(tmp_path / "before.json")
    with pytest.raises(ArmSetupError, match="cannot be read"):
        earlier(tmp_path / "absent.json")
