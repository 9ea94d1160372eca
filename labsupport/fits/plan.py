"""What to change so that a step fits: each change predicted by itself, the most saving first, each with the lab that shows it."""

from dataclasses import dataclass, replace

from labsupport.fits.lowered import CannotPredict
from labsupport.fits.prediction import Source


@dataclass(frozen=True)
class Change:
    """words: what to do; lab: the slug of the lab that shows it; level: bytes predicted then, None where why tells the reason."""

    words: str
    lab: str
    level: int | None
    why: str = ""


def changes(wanted):
    """[(words, slug of a lab, Wanted with that change)] that make sense for a training step."""
    half = max(1, wanted.batch // 2)
    found = [(f"a batch of {half}", "batch_size", wanted.with_batch(half))]
    if wanted.training:
        found += [
            (
                f"a batch of {half}, two for each update (gradient_accumulation_steps=2)",
                "gradient_accumulation",
                replace(wanted.with_batch(half), accumulate=2),
            ),
            ("plain SGD", "where_memory_goes", replace(wanted, optimizer="sgd")),
            (
                "all layers but the last frozen, where they have learnt already",
                "shapes_and_layers",
                replace(wanted, frozen=True),
            ),
        ]
    in_file = isinstance(wanted.what, str) and wanted.what.endswith(".keras")  # where each layer's dtype stands
    if wanted.precision is None and not in_file:
        found.append(("mixed_bfloat16 precision", "mixed_precision", replace(wanted, precision="mixed_bfloat16")))
    return found


def plan(prediction, progress=None):
    """[Change], the most saving first; those that cannot be predicted last."""
    done = []
    for words, lab, wanted in changes(prediction.wanted):
        if progress:
            progress(f"predicting {words}")
        try:
            level = prediction.at(wanted.batch) if lab == "batch_size" else Source(wanted).level(wanted.batch)
            done.append(Change(words, lab, level))
        except CannotPredict as error:
            done.append(Change(words, lab, None, str(error)))
    if prediction.wanted.training:
        why = "wrap blocks of the model in tf.recompute_grad, and ask again"
        done.append(Change("recomputation", "recomputation", None, why))
    return sorted(done, key=lambda change: (change.level is None, change.level or 0))
