"""The doctor: runs a training script unmodified under a memory budget and names what its memory goes to.

    python -m labsupport doctor train.py --budget "2 GiB" -- --epochs 3

Two rules decide what is suspected, so that a healthy script gets no advice. What *grows* with steps is a suspect
in any run. What is merely *large* is a suspect only in a run that died of memory: the largest part, and others
nearly as large. Every size comes from a counter or from the objects that were alive (see probes.py).
"""

import runpy
import statistics
import sys
import tempfile
from argparse import RawDescriptionHelpFormatter
from dataclasses import dataclass, field
from pathlib import Path

from labsupport.ground.arm import ArmSetupError, watched
from labsupport.ground.budget import MIB, mib
from labsupport.doctor.probes import examine
from labsupport.ground.result import dumped_in_use, wanted_bytes

LABS = {  # kind: the lab that explains it first, then others that help
    "input copy": ("01", "02"),
    "buffer": ("03",),
    "batch-bound activations": ("04", "05", "06", "10", "12"),
    "retained tensors": ("07",),
    "retracing": ("08",),
    "models kept alive": ("09",),
    "optimizer state": ("00", "11", "13"),
    "replicas": ("17",),
    "fragmentation": ("16",),
}
_USAGE = "python -m labsupport doctor SCRIPT [--budget SIZE] [--outside SIZE] [--devices N] [-- ARGUMENTS OF THE SCRIPT]"
_NEARLY = 0.6  # of the largest part: others as large as this are named, too
_ROUNDING = 0.02  # the allocator rounds each size up to 256 bytes and leaves a rest that is too small to split
_SCATTERED = 0.2  # of the budget: a smaller rest lies in pieces in any run that is nearly full, and is not what filled it
_OUTSIDE_SHARE = 0.2  # of what the process grew by: arrays smaller than this do not explain that it ran out
_TRACES, _LATE_SHARE = 5, 0.02  # TensorFlow itself warns from five on; a trace in each epoch of fifty steps is the least
_GROWTH, _GROWTH_SHARE = MIB, 0.02  # smaller growth over a whole run is left to noise: Python objects, a history of numbers


@dataclass
class Suspect:
    """kind: a key of LABS. size: bytes it accounts for, None where it lies outside TensorFlow's allocator. evidence: sentences."""

    kind: str
    size: int | None
    evidence: list

    @property
    def labs(self):
        return LABS[self.kind]


@dataclass
class Diagnosis:
    """What the doctor found. parts: {what: bytes} of the tensor memory at its peak. growth: sentences."""

    result: object
    suspects: list
    parts: dict
    growth: list = field(default_factory=list)

    @property
    def died_of_memory(self):
        """A process that was killed counts where that is what happens without memory: arm.py's message says so."""
        error = self.result.error
        return error is not None and (error.kind in ("oom", "memory") or (error.kind == "killed" and ("memory" in error.message or "grew by" in error.message)))


def _oom_sizes(result):
    """(bytes that were wanted, bytes in use) where memory ran out; None for what is not told.

    Of a process that TensorFlow's allocator brought down the log tells, and what was copied just then.
    """
    error = result.error
    if error is None:
        return None, None
    wanted = wanted_bytes(error.traceback or error.log) or result.facts["converted"]["now"] or None
    # Where several operations fail side by side, the first lets go of its tensors before the last dump is written.
    return wanted, max(dumped_in_use(error.log), default=None)


def _increases(censuses, name):
    """By how much a size rose over the run, if it rose at least twice and in the last third was always higher than before.

    What only comes and goes with batches and evaluations is lower now and then. A third, since censuses come at steps 2, 4, 8, ….
    """
    values = [census[name] for census in censuses if census["step"] >= 2]
    late = max(2, len(values) // 3)
    rises = sum(later > earlier for earlier, later in zip(values, values[1:]))
    return max(values) - values[0] if rises >= 2 and min(values[-late:]) > max(values[:-late]) else 0


def _retracing(facts, suspects):
    for function in facts["functions"]:
        late = sum(call > function["calls"] / 2 for call in function["traced_at"])
        rebuilt = not function["own"] and function["traces"] <= 2 * function["instances"]  # Keras makes one for each model
        if function["traces"] >= _TRACES and late >= 2 and late >= _LATE_SHARE * function["calls"] / 2 and not rebuilt:
            evidence = [f"{function['name']} ({function['place']}) was traced {function['traces']} times in {function['calls']} calls, and still in the second half"]
            if function["instances"] > 2:
                evidence.append(f"tf.function was applied to it anew {function['instances']} times; make it once, outside the loop")
            elif function["changing"]:
                evidence.append(f"argument {function['changing']}: every new value is a new graph; pass a tensor, or the same object each time")
            suspects.append(Suspect("retracing", None, evidence))
    censuses = [census for census in facts["censuses"] if census["step"] >= 2]
    sessions = [step for step in facts["steps"] if step["name"] == "Session.run"]
    if sessions and len(censuses) > 1:
        steps = censuses[-1]["step"] - censuses[0]["step"]
        added = censuses[-1]["operations"] - censuses[0]["operations"]
        if steps >= _TRACES and added >= steps / 2:
            suspects.append(Suspect("retracing", None, [f"the graph grew by {added} operations in {steps} calls of Session.run: build operations once, before the loop"]))


def _models(facts, suspects, finished):
    """Variables of models that came before, whether the models are alive or only their memory is."""
    running = facts["censuses"][:-1] if finished else facts["censuses"]  # at its end a script has let go of its models
    last = max(facts["censuses"], key=lambda census: census["held"])
    grown = _increases(running, "held")
    largest = max((size for _, size in last["models"]), default=0)
    if grown <= (largest / 2 or _GROWTH):
        return 0
    evidence = [f"the memory of variables rose by {mib(grown)} while steps ran, to {mib(last['held'])}; the largest model alive has {mib(largest)} of weights"]
    seen = last["weights"] + last["slots"] + last["other variables"]
    if last["held"] > 1.2 * seen:
        evidence.append(f"{mib(last['held'] - seen)} belong to variables that Python has let go of; a graph (of a compiled train or predict function) keeps them")
    elif len(last["models"]) > 2:
        evidence.append(f"{len(last['models'])} models are alive")
    suspects.append(Suspect("models kept alive", grown, evidence))
    return grown


def _retained(facts, suspects):
    """Tensors and arrays whose number grows with the steps."""
    running = facts["censuses"][:-1]  # the last one is from the end, or from the middle of a step that failed
    total = 0
    for name, word in (("tensors", "tensors"), ("arrays", "NumPy arrays")):
        grown = _increases(running, name)
        if not running or grown < max(_GROWTH, _GROWTH_SHARE * (running[-1]["level"] or 0)):
            continue
        steps = running[-1]["step"] - next(census["step"] for census in running if census["step"] >= 2)
        evidence = [f"{word} that stay alive grew by {mib(grown)} in {steps} steps, {mib(grown / steps)} a step"]
        evidence += [f"{holder} holds {count} of them, {mib(size)}" for holder, count, size in running[-1]["holders"][name][:2] if size > grown / 4]
        if name == "tensors":
            total = grown
        suspects.append(Suspect("retained tensors", grown, evidence))
    return total


def _buffers(facts, suspects):
    """Iterators that stay alive, each with the buffers of its pipeline."""
    running = facts["censuses"][:-1]
    grown = _increases(running, "buffers")
    if _increases(running, "iterators") >= 2 and grown > _GROWTH:
        evidence = [f"{running[-1]['iterators']} iterators over data sets are alive, and what their pipelines buffer grew by {mib(grown)}; an iterator keeps its buffers until it is let go"]
        evidence += [f"{name}: {mib(held)}" for held, name in facts["buffers"][:2]]
        suspects.append(Suspect("buffer", grown, evidence))


def diagnose(result):
    """The Diagnosis of an arm that ran with probes. Silent (no suspects) for a run that neither grew nor died of memory."""
    facts = result.facts
    if not facts or not facts["censuses"]:
        return Diagnosis(result, [], {})
    suspects = []
    _retracing(facts, suspects)
    old_models = _models(facts, suspects, result.ok)
    retained = _retained(facts, suspects)
    _buffers(facts, suspects)
    diagnosis = Diagnosis(result, suspects, _parts(result, facts, old_models, retained), _growth(facts))
    if diagnosis.died_of_memory:
        suspects += _large(result, facts, diagnosis.parts, suspects)
        suspects.sort(key=lambda suspect: -(suspect.size or 0))
    return diagnosis


def _parts(result, facts, old_models, retained):
    """{what: bytes} of the peak. What no object accounts for was in use inside operations: activations and gradients."""
    censuses = facts["censuses"]
    live = max(censuses, key=lambda census: census["weights"] + census["slots"] + census["other variables"])
    first = next((census for census in censuses if census["step"]), None)
    if first is not None:
        data = first["tensors"]  # what is alive before the first step is data; what a step adds is not
    elif live["models"]:
        data = sum(size for _, _, size in live["holders"]["tensors"])
    else:
        data = live["tensors"]
    wanted, in_use = _oom_sizes(result)
    peak = result.figures["peak"]
    if peak is None:  # the process died before it could report
        peak = max([in_use or 0] + [census["level"] or 0 for census in censuses])
    if not peak and not wanted:
        return {}
    wanted = wanted or 0
    parts = {
        "weights": live["weights"],
        "optimizer slots": live["slots"],
        "other variables": live["other variables"] - live["replicas"],
        "copies on other devices": live["replicas"],
        "models that came before": old_models,
        "data held as tensors": data + facts["converted"]["now"],
        "buffers of pipelines": sum(size for size, _ in facts["buffers"]),
        "tensors kept by the script": retained,
    }
    parts["activations, gradients and intermediates"] = max(0, peak + wanted - sum(parts.values()))
    return {name: size for name, size in parts.items() if size}


def _large(result, facts, parts, known):
    """Suspects by size, in a run that died of memory."""
    error = result.error
    wanted, in_use = _oom_sizes(result)
    free = result.budget - (in_use or result.budget)
    if wanted and wanted < free - _ROUNDING * result.budget and free > _SCATTERED * result.budget:
        return [Suspect("fragmentation", free, [f"{mib(free)} of the budget were free, yet {mib(wanted)} found no place: the free pieces do not lie together"])]
    last = facts["censuses"][-1]
    size = lambda name: parts.get(name, 0)  # noqa: E731
    found = []
    failing = f"the allocation that failed was for {mib(wanted)}" if wanted else error.message
    outside = error.kind != "oom" and "ran out of memory" not in error.log
    data = size("data held as tensors") + (max(last["arrays"], facts["converted"]["bytes"]) if outside else 0)
    working, buffers = size("activations, gradients and intermediates"), size("buffers of pipelines")
    failed = facts["failed"] or facts["open"] or {}
    buffered = [f"{name}: {mib(held)}" for held, name in facts["buffers"][:2]]
    if failed.get("kind") == "input":  # no operation of a step ran, so what was in use beside the failed allocation is the pipeline's
        in_pipeline = max(0, working - (wanted or 0))
        working, buffers = working - in_pipeline, buffers + in_pipeline
        buffered.append(f"memory ran out while the pipeline prepared a batch, with {mib(buffers)} in it")
    no_training_yet = not any(step["kind"] == "step" for step in facts["steps"]) and not last["models"]
    if no_training_yet and not failed:
        data, working = data + working, 0  # joining the pieces of a data set, for instance
    if data:
        holder = (last["holders"]["tensors"] + last["holders"]["arrays"])[:2]
        evidence = [f"{name} holds {count} tensors or arrays, {mib(held)}" for name, count, held in sorted(holder, key=lambda row: -row[2])]
        if facts["converted"]["largest"]:
            evidence.append(f"an array of {mib(facts['converted']['largest'])} was copied into a tensor at {facts['converted']['place']}")
        found.append(Suspect("input copy", data, [*evidence, failing]))
    if buffers:
        found.append(Suspect("buffer", buffers, buffered))
    if working:
        rose = f" memory rose from {mib(failed['level'])} to {mib(failed['peak'])}" if "peak" in failed else " the process died"
        where = f"in {failed['name']}{rose}" if failed.get("kind") == "step" else "operations outside a training step took it"
        evidence = [where, failing, f"weights are {mib(size('weights'))}, optimizer slots {mib(size('optimizer slots'))}"]
        found.append(Suspect("batch-bound activations", working, evidence))
    state = size("optimizer slots") + size("other variables")
    if state:
        evidence = [f"weights {mib(size('weights'))}, optimizer slots {mib(size('optimizer slots'))}, other variables (masks, accumulators) {mib(size('other variables'))}", failing]
        found.append(Suspect("optimizer state", state, evidence))
    others = sorted((held for _, held in last["models"]), reverse=True)[1:]
    if others:
        found.append(Suspect("models kept alive", sum(others), [f"{len(others) + 1} models are alive; the others beside the largest have {mib(sum(others))} of weights"]))
    if size("copies on other devices"):
        found.append(Suspect("replicas", 2 * size("copies on other devices"), [f"variables are held once on each device: {mib(size('copies on other devices'))} more than on one"]))
    if outside:  # then what TensorFlow's allocator holds is not at fault, and Python objects that are no arrays may be
        grown = max([held for _, held in result.process], default=0)
        found = [suspect for suspect in found if suspect.kind == "input copy" and suspect.size > _OUTSIDE_SHARE * grown]
    found = [suspect for suspect in found if suspect.kind not in {one.kind for one in known}]
    most = max([suspect.size for suspect in found] + [suspect.size or 0 for suspect in known], default=0)
    return [suspect for suspect in found if suspect.size >= _NEARLY * most]


def _growth(facts):
    """Sentences on the level of tensor memory at the begin of each step."""
    told = []
    for step in facts["steps"]:
        levels = [size for _, size in step["levels"]]
        if len(levels) < 6:
            continue
        third = len(levels) // 3
        early, late = statistics.median(levels[:third]), statistics.median(levels[-third:])
        told.append(
            f"{step['name']}: {step['count']} steps; in use before a step {mib(early)} in the first third, {mib(late)} in the last, "
            f"{(late - early) / (step['count'] * 2 / 3) / MIB:+.3f} MiB a step" + (f"; a step adds up to {mib(step['rise'])} for its duration" if step["rise"] else "")
        )
    passes, number = facts["passes"], facts["number_of_passes"]
    if number > 2 and None not in passes:
        second, last = passes
        told.append(
            f"passes over data sets (epochs): {number}; in use at the begin of the second {mib(second)}, of the last {mib(last)}, "
            f"{(last - second) / (number - 2) / MIB:+.3f} MiB a pass"
        )
    return told


def _run_script(path, arguments):
    """In the arm: the script as `python path arguments` would run it."""
    sys.argv = [path, *arguments]
    sys.path[0:0] = [str(Path(path).resolve().parent)]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


def examine_script(path, arguments, budget, outside, make_plot, logical_devices=1):
    """Run a script under a budget with probes; an ArmResult for diagnose(). What it writes to the temporary folder stays."""
    env = {"TMPDIR": tempfile.gettempdir()}
    return watched(examine, (_run_script, (path, arguments)), budget, outside, Path(path).name, float("inf"), make_plot, env, logical_devices)


def command(options):
    """`python -m labsupport doctor`: 0 if the script finished without a suspect, 1 otherwise."""
    from rich.console import Console

    from labsupport.doctor.terminal import DoctorDisplay, report

    if not Path(options.script).is_file():
        raise ArmSetupError(f"there is no script {options.script}")
    budget = options.budget or "half of the free memory"
    result = examine_script(options.script, options.arguments, options.budget, options.outside, lambda: DoctorDisplay(options.script, budget), options.devices)
    diagnosis = diagnose(result)
    report(diagnosis, Console())
    return 1 if diagnosis.suspects or not result.ok else 0


def add_command(commands):
    """Describe the sub-command to argparse."""
    parser = commands.add_parser("doctor", help="run a training script under a memory budget and name what its memory goes to", description=__doc__, usage=_USAGE, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("script", help="the script, which runs unmodified, in the current folder")
    parser.add_argument("--budget", metavar="SIZE", help='what TensorFlow may use for tensors, such as "2 GiB"; half of the free memory if not given')
    parser.add_argument("--outside", metavar="SIZE", default="4 GiB", help='what the process may add beside its tensors (default "4 GiB")')
    parser.add_argument("--devices", metavar="N", type=int, default=1, help="into how many logical devices the CPU or GPU is split, for scripts with a tf.distribute strategy")
    parser.set_defaults(command=command)
