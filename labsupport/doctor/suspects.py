"""Suspects: kinds of trouble as a person would say them, with the labs that explain them, what to change and what that saves."""

import os
from dataclasses import dataclass

from labsupport.ground.budget import MIB, mib
from labsupport.ground.result import short

LABS = {  # kind: the lab that explains it first, then others that help
    "input copy": ("image_stacking", "arrays_into_datasets", "large_files"),
    "buffer": ("pipeline_buffers", "workers"),
    "batch-bound activations": (
        "batch_size",
        "gradient_accumulation",
        "loop_accumulation",
        "recomputation",
        "shapes_and_layers",
    ),
    "retained tensors": ("leaks_over_epochs",),
    "retracing": ("retracing",),
    "models kept alive": ("a_model_per_trial",),
    "optimizer state": ("where_memory_goes", "mixed_precision", "pruning"),
    "replicas": ("more_than_one_device",),
    "fragmentation": ("reading_an_oom",),
    "weights": ("where_memory_goes", "mixed_precision", "pruning"),
    "constants in graphs": ("retracing", "arrays_into_datasets"),
    "old optimizers": ("what_a_process_keeps", "a_model_per_trial"),
    "garbage that waits for the collector": ("leaks_over_epochs",),
    "one operation's large output": ("shapes_and_layers", "vocabularies_and_pairs"),
    "work on a whole table": ("vocabularies_and_pairs",),
    "data converted whole": ("preparing_data", "arrays_into_datasets"),
    "cache behind repeat()": ("pipeline_buffers",),
    "copies in child processes": ("workers",),
    "growth outside TensorFlow": ("leaks_over_epochs", "what_a_process_keeps"),
    "programs that XLA keeps": ("xla",),
    "copy on the host while saving": ("replay_and_saving",),
}
CHANGES = {  # kind: what to change
    "input copy": "read the data batch by batch (from_generator, TFRecord files, a memory map), work on a batch at a time in map(), and keep it in its own dtype, such as uint8",
    "batch-bound activations": "halve the batch until it fits, with gradient_accumulation_steps=2, 4, … if the updates shall stay as they are",
    "buffer": "give shuffle(), prefetch() and the queue of workers (max_queue_size) a part of their sizes, such as an eighth, and shuffle before what makes elements large: map(), batch()",
    "retained tensors": "keep numbers, such as float(loss), in place of tensors and arrays",
    "retracing": "pass tensors in place of Python values, and apply tf.function once",
    "models kept alive": "let go of each model before the next one is made",
    "optimizer state": "take an optimizer with fewer slots (Adafactor, SGD), or train fewer of the weights",
    "replicas": "each device holds all variables: take fewer devices, or a smaller model",
    "fragmentation": "pad to few sizes, so that freed pieces fit again",
    "weights": "the model alone fills the budget: take narrower layers, fewer of them, or float16 weights where it only answers",
    "constants in graphs": "give the array as an argument of the function, as a tensor",
    "old optimizers": "make one optimizer, compile once, and set its learning_rate afterwards; where it shall begin anew, set its slots and its iterations to zero",
    "garbage that waits for the collector": "break the cycle of references, or call gc.collect() between epochs",
    "work on a whole table": "look rows up before anything else is done with the table, with no regularizer and no common norm on it, or take a smaller one",
    "one operation's large output": "work in pieces: the output of this operation need not exist whole",
    "data converted whole": "convert a batch at a time, in map() of a pipeline or in a generator",
    "cache behind repeat()": "put cache() before repeat()",
    "growth outside TensorFlow": "let go of what the named line keeps, or keep less of it: numbers, a smaller dtype (uint8 for pictures), a largest length (maxlen); what no name holds, in a process that ends",
    "programs that XLA keeps": "let XLA compile once: one function for all models, tensors of one shape; else train each model in a process that ends",
    "copies in child processes": "take fewer workers, or threads, and keep in a worker only what it needs",
    "copy on the host while saving": "set large arrays as weights in place of an initializer's constant",
}
# kind: how much of what a suspect accounts for the change saves. An eighth of a buffer leaves an eighth; of the rest all of
# it goes, but what a batch or a step needs for itself. Other kinds: not known before it is tried, as of a step that died
# before all that it needs was in use.
SAVES = {
    "buffer": 7 / 8,
    "input copy": 1,
    "retained tensors": 1,
    "models kept alive": 1,
    "constants in graphs": 1,
    "old optimizers": 1,
    "garbage that waits for the collector": 1,
    "data converted whole": 1,
    "cache behind repeat()": 1,
}
# Batches drawn while one tape is open: a step on several parts of a batch draws few. Uses of each weight under one tape: a
# network for pairs or triplets has two or three, a GAN's discriminator two.
_MANY_IN_TAPE, MANY_USES = 4, 8
IN_TAPES_OF_THEIR_OWN = (
    "open a tape for each pass, take its gradients before the next, and add the gradients up in place of the losses; where a pass "
    "needs the one before (a recurrent step), let one tape hold fewer of them"
)
# Of the growth: a name that holds less is not where it goes.
WORTH_NAMING = 1 / 4
# Bytes, and a share of the level: smaller growth over a whole run is left to noise, Python objects and a history of
# numbers.
GROWTH_LEAST, GROWTH_SHARE = MIB, 0.02


@dataclass(frozen=True)
class Suspect:
    """kind: a key of LABS. evidence: sentences. place: "train.py:41", where one line of the script is known.

    size: bytes it accounts for, None where it lies outside TensorFlow's allocator. to_change: what, where it is not that of
    its kind in CHANGES.
    """

    kind: str
    size: int | None
    evidence: list
    place: str = ""
    to_change: str = ""

    @property
    def labs(self):
        return LABS[self.kind]

    @property
    def change(self):
        """What to change, as the end of a sentence, and where it can be told, what that saves."""
        share = SAVES.get(self.kind) if self.size else None
        expected = f" (to expect, from this run's figures: about {mib(share * self.size)} less)" if share else ""
        return f"{self.to_change or CHANGES[self.kind]}{expected}"


def died_of_memory(result):
    """Whether an arm ended because memory ran out."""
    return result.error is not None and result.error.cause.of_memory


def place_of(result):
    """The line of the script where an error arose, as "train.py:41"; "" where it is not known."""
    frames = result.error.frames if result.error else []
    return _short(frames[-1], result) if frames else ""


def _short(line, result):
    file = os.path.basename(line.place)
    return short(file if file == result.label else line.place, line.number)


def called_at(result):
    """The same for what a layer or model of the script's own computes: the line that calls it, which tells how much it is given."""
    frames = result.error.frames if result.error else []
    calls = [line for line in frames if line.function not in ("call", "__call__")]
    return _short(calls[-1], result) if calls else place_of(result)


def in_cycles(holder):
    """What garbage is of, in words."""
    return f"{holder.number:,} objects of {holder.name} ({holder.place})"


def buffered(facts):
    """The two stages of pipelines that were seen to buffer most."""
    return [
        f"{buffer.name}, {buffer.elements} elements: {mib(buffer.size)}"
        for buffer in facts.buffers[:2]
        if buffer.size >= GROWTH_LEAST
    ]


def passes_under_tape(facts):
    """A sentence on passes through a model that one tape keeps; "" where there were few."""
    failing = facts.failing
    if facts.in_tape >= _MANY_IN_TAPE:
        return (
            f"up to {facts.in_tape} batches were drawn while one tape was open, which keeps what each of them computed"
        )
    if failing.uses >= MANY_USES and failing.loop:
        return (
            f"each weight was used some {failing.uses} times while one tape was open, in the loop at {failing.loop}: the tape keeps what "
            "each time computed until gradients are taken, and with persistent=True until the tape is let go"
        )
    return ""
