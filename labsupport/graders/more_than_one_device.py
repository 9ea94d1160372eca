"""Graders of the lab on more than one device."""

from labsupport.ground.budget import MIB
from labsupport.lesson.exercises import exercise, try_out, untouched


def _places(answer, shapes):
    """In the arm: for each kernel with its slots the (device, shape, bytes) of every variable, or what is wrong, in words."""
    import tensorflow as tf

    made = answer(shapes)
    if untouched(made):
        return "placed() returns nothing yet: return a list of (kernel, slot, slot)."
    made = [list(group) for group in made]
    for variable in (every := sum(made, [])):
        if not isinstance(variable, tf.Variable):
            return f"there is a {type(variable).__name__} among them: only a tf.Variable can be trained."
        if variable.dtype != tf.float32:
            return f"a variable is of {variable.dtype.name}: tf.zeros(shape) makes float32, and so it stays."
    if len({id(variable) for variable in every}) < len(every):
        return "a variable stands there twice: each slot is a variable of its own, which Adam fills with numbers of its own."
    one = lambda variable: [variable.device.rsplit(":", 2)[-1], list(variable.shape), variable.numpy().nbytes]
    return [[one(variable) for variable in group] for group in made]


@exercise(
    1,
    "tf.device is a context manager; what is made inside it lies there.",
    "Count bytes, not layers: keep a sum for each device, and give the next kernel to the one that holds less.",
    "What comes last and is large fits nowhere: in which order do you hand them out?",
)
def placed(answer, shapes, room):
    """answer(shapes) makes a kernel and two slots for each shape, spread over two devices of `room` MiB."""
    done = try_out(_places, answer, shapes, logical_devices=2, label="your answer to 1")
    assert [len(group) for group in done.value] == [3] * len(shapes), (
        f"for {len(shapes)} shapes there must be as many kernels, each with two slots; the lengths are "
        f"{[len(group) for group in done.value]}."
    )
    found = sorted(tuple(group[0][1]) for group in done.value)
    assert found == sorted(map(tuple, shapes)), f"the kernels have the shapes {found}."
    for group in done.value:
        assert all(shape == group[0][1] for _, shape, _ in group), "a slot has another shape than its kernel."
        places = sorted({place for place, *_ in group})
        assert len(places) == 1, (
            f"the slots of the kernel {group[0][1]} are not beside it but on CPU:{' and CPU:'.join(places)}: "
            "each update would send them from one device to the other."
        )
    for place in ("0", "1"):
        held = sum(size for group in done.value for where, _, size in group if where == place) / MIB
        assert held <= room, f"CPU:{place} holds {held:.0f} MiB, and has room for {room}."


def _parts(answer):
    """In the arm: the numbers of each device's part of a kernel 0, 1, 2, … of shape (4, 6), or what is wrong, in words."""
    import tensorflow as tf
    from tensorflow.experimental import dtensor

    mesh = dtensor.create_mesh([("model", 2)], devices=["CPU:0", "CPU:1"])
    layout = answer(dtensor, mesh)
    if untouched(layout):
        return "row_layout() returns nothing yet: return a dtensor.Layout."
    if not isinstance(layout, dtensor.Layout):
        return (
            f"you return a {type(layout).__name__}, which is no layout: dtensor.Layout takes such a list, and the mesh."
        )
    if layout.rank != 2:
        return (
            f"your layout is for a tensor with {layout.rank} axis, and a kernel has two: say of each whether it is cut."
        )
    kernel = tf.reshape(tf.range(24.0), (4, 6))
    on_mesh = dtensor.copy_to_mesh(kernel, dtensor.Layout.replicated(mesh, 2))
    return [part.numpy().tolist() for part in dtensor.unpack(dtensor.relayout(on_mesh, layout))]


@exercise(
    2,
    "A layout lists one entry an axis of the tensor, rows first.",
    "An entry is the name of the mesh axis that cuts there, or dtensor.UNSHARDED.",
)
def row_layout(answer):
    """answer(dtensor, mesh) is a layout that gives each of two devices half the rows of a kernel."""
    done = try_out(_parts, answer, logical_devices=2, label="your answer to 2")
    shapes = [(len(part), len(part[0])) for part in done.value]
    assert shapes != [(4, 6)] * 2, "each device has the whole kernel: nothing is cut."
    assert shapes != [(4, 3)] * 2, "you cut its columns: the second axis of the kernel, not the first."
    assert shapes == [(2, 6)] * 2, f"a kernel of shape (4, 6) is cut into {shapes}."
