"""Graders of the lab on a device that somebody else holds."""

from labsupport.lesson.exercises import exercise, untouched

_CAUSES = ("in pieces", "another process", "too large")
# One process's line each, in no order; the second report is that of an idle device.
_REPORTS = (
    "pid, used_gpu_memory [MiB]\n71, 9 MiB\n8, [N/A]\n1290, 10410 MiB\n977, 880 MiB\n1404, 1100 MiB\n",
    "pid, used_gpu_memory [MiB]\n",
    "pid, used_gpu_memory [MiB]\n5, 2210 MiB\n",
    "pid, used_gpu_memory [MiB]\n12, [N/A]\n6, 2210 MiB\n",
)


def _size(mib):
    """A size as the allocator writes it."""
    return f"{mib:.2f}MiB" if mib < 1024 else f"{mib / 1024:.2f}GiB"


def _made_log(asked, in_use, limit):
    """The lines of two dumps as TensorFlow writes them, the last for these MiB; asked: text."""
    rows = []
    for size, used in (("8.00MiB", 1), (asked, in_use)):
        rows += [
            f"W0000 bfc_allocator.cc:502] Allocator (GPU_0_bfc) ran out of memory trying to allocate {size} (rounded)"
        ]
        rows += ["I0000 bfc_allocator.cc:1128] Stats: ", f"Limit: {_size(limit):>30}", f"InUse: {_size(used):>30}"]
        rows += [f"MaxInUse: {_size(limit):>27}", "NumAllocs: 6", "MaxAllocSize: 1.00MiB", ""]
    return "\n".join(rows)


# (asked for, MiB in use, limit, MiB of the device, cause)
_MADE = (
    ("300.00MiB", 700, 15000, 16000, "in pieces"),
    ("1.50GiB", 14000, 15000, 16000, "another process"),
    ("3.00GiB", 14000, 15000, 16000, "too large"),
    ("512.0KiB", 52, 52, 16000, "another process"),
    ("40.00MiB", 20, 52, 16000, "another process"),
    ("20.00GiB", 0, 52, 16000, "too large"),
)


@exercise(
    1,
    "What would be in use if it had been given? Compare that sum with the limit, then with the device.",
    "figures(log) gives all three in MiB. A limit is always a little below the device: that alone says nothing.",
)
def cause(answer, beside, device):
    """answer(log, MiB of the device) tells the cause, for the lab's log and made ones."""
    asked = [(beside, device, "another process")]
    asked += [(_made_log(*made), size, expected) for *made, size, expected in _MADE]
    for number, (log, size, expected) in enumerate(asked):
        found = answer(log, size)
        assert not untouched(found), "cause() returns nothing yet: return one of three texts."
        assert found in _CAUSES, f"you return {found!r}: one of {', '.join(map(repr, _CAUSES))} is wanted."
        told = "the log of the second notebook"
        if number:
            want, in_use, limit = _MADE[number - 1][:3]
            told = f"{want} asked for, {in_use} MiB in use, a limit of {limit} and a device of {size}"
        assert found == expected, f"{told}: {expected!r} is right; you say {found!r}."


@exercise(
    2,
    "The first line is a head. Which columns are numbers, and when are they not?",
    "sorted() cannot compare None with a number: give it a key in which None is less than all sizes.",
)
def others(answer, report):
    """answer(report, me) lists all processes but `me`, by size, in the lab's report and others."""
    for text in (report, *_REPORTS):
        rows = [line.split(", ") for line in text.splitlines()[1:]]
        sizes = {int(pid): None if "N/A" in size else int(size.removesuffix(" MiB")) for pid, size in rows}
        for me in [*sizes, 1]:
            found = answer(text, me)
            assert not untouched(found), "others() returns nothing yet: return a list of pairs."
            found = [tuple(one) for one in found]
            assert me not in dict(found), f"process {me} is your own, and is in your list."
            missing = sizes.keys() - {me} - dict(found).keys()
            assert not missing, (
                f"process {min(missing)} is missing: also one whose size the driver does not tell counts."
            )
            right = {(pid, size) for pid, size in sizes.items() if pid != me}
            assert set(found) == right, f"you return {found} for:\n{text}"
            order = [-1 if size is None else size for _, size in found]
            assert len(found) == len(right), f"a process is in your list twice: {found}."
            assert order == sorted(order, reverse=True), f"the largest first, None last: you return {found}."
