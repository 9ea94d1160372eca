"""Values and records over a pipe: what goes in comes out, and nothing else does harm."""

import os
import random

import numpy as np
import pytest

from labsupport.ground.pipe import Garbled, Receiver, Sender
from labsupport.ground.record import Cause, End, Facts, Phase, Sample, Start
from labsupport.ground.values import NoValue, pack, unpack

PLAIN = [
    None,
    True,
    3,
    -(2**63),
    2**70,
    2.5,
    float("inf"),
    1 + 2j,
    "text",
    "\ud800",
    b"bytes",
    [1, [2]],
    (1, (2,)),
    {1, 2},
    frozenset("a"),
    {1: {"a": (2,)}, (1, 2): 3},
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_come_back_as_they_were(value):
    back = unpack(*pack(value))
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "complex64", "float16", "U3", "S3", "M8[s]"])
def test_arrays_come_back_as_they_were(dtype):
    for array in (
        np.arange(6).reshape(2, 3).astype(dtype),
        np.arange(6).reshape(2, 3).astype(dtype).T,
        np.zeros((0, 3), dtype),
        np.zeros((), dtype),
    ):
        back = unpack(*pack(array))
        assert back.dtype == array.dtype and back.shape == array.shape and np.array_equal(back, array)
    scalar = np.ones(1, dtype)[0]  # text and bytes come back as Python's own
    assert unpack(*pack(scalar)) == scalar and isinstance(scalar, type(unpack(*pack(scalar))))


def test_bfloat16_comes_back():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    back = unpack(*pack(np.array([1, 2.5], ml_dtypes.bfloat16)))
    assert back.dtype == ml_dtypes.bfloat16 and back.tolist() == [1, 2.5]


def endless():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value, words",
    [
        ({"a": [object()]}, "its return value\\['a'\\]\\[0\\] is a object"),
        (np.array([None]), "array of object"),
        (endless(), "nested more than"),
        (lambda: 1, "function"),
    ],
)
def test_what_holds_code_does_not_go(value, words):
    with pytest.raises(NoValue, match=words):
        pack(value)


@pytest.mark.parametrize(
    "tree",
    [
        ["array", "f4", [5], 0],
        ["array", "O", [1], 0],
        ["text", 5],
        ["no such"],
        ["dict", [[["dict", []], 1]]],
        ["int", "x"],
        [[]],
        [],
    ],
)
def test_a_damaged_value_is_no_value(tree):
    with pytest.raises(NoValue):
        unpack(tree, [np.zeros(8, np.uint8)])


@pytest.fixture
def pipe():
    read, write = os.pipe()
    yield Receiver(read), Sender(write), write
    os.close(read)
    os.close(write)


def test_records_arrive_in_order_with_their_arrays(pipe):
    receiver, sender, _ = pipe
    sent = [Start(1.0, 2, "CPU:0", 3), Sample(0.5, 7), Phase("a", 0.0, 1.0, 1, 5, 2), Facts(number_of_passes=4)]
    for record in sent:
        sender.send(record)
    tree, buffers = pack([np.arange(5), np.zeros(0), np.ones(3)])
    sender.send(End(1.0, {"peak": None}, value=tree, buffers=[len(b) for b in buffers]), buffers)
    found = receiver.read()
    assert [record for record, _ in found[:4]] == sent
    end, arrays = found[4]
    assert [a.tolist() for a in unpack(end.value, arrays)] == [[0, 1, 2, 3, 4], [], [1, 1, 1]]


def test_a_record_may_come_in_pieces(pipe):
    receiver, sender, write = pipe
    whole, inner = os.pipe()
    tree, buffers = pack(np.arange(100))
    Sender(inner).send(End(1.0, {}, value=tree, buffers=[len(b) for b in buffers]), buffers)
    data = os.read(whole, 2**16)
    os.close(whole), os.close(inner)
    found = []
    for at in range(0, len(data), 7):
        os.write(write, data[at : at + 7])
        found += receiver.read()
    ((end, arrays),) = found
    assert np.array_equal(unpack(end.value, arrays), np.arange(100))


def test_half_a_record_waits_without_holding_anybody(pipe):
    receiver, _, write = pipe
    os.write(write, b"arm1\x10\x00\x00\x00half")
    assert receiver.read() == [] and receiver.open


@pytest.mark.parametrize(
    "written", [b"no record at all", b"arm1\xff\xff\xff\xff", b"arm1\x01\x00\x00\x00\xc1", b"arm1\x03\x00\x00\x00abc"]
)
def test_what_is_no_record_is_refused(pipe, written):
    receiver, _, write = pipe
    os.write(write, written)
    with pytest.raises(Garbled):
        receiver.read()


def test_a_value_larger_than_the_machine_is_refused_before_memory_is_taken(pipe):
    receiver, sender, _ = pipe
    sender.send(End(1.0, {}, buffers=[2**50]))
    with pytest.raises(Garbled, match="larger than this machine"):
        receiver.read()


def test_noise_never_raises_anything_else():
    rng = random.Random(1)
    for _ in range(300):
        read, write = os.pipe()
        os.write(write, b"arm1" * rng.randint(0, 1) + rng.randbytes(rng.randint(0, 60)))
        os.close(write)
        receiver = Receiver(read)
        try:
            receiver.read()
        except Garbled:
            pass
        os.close(read)


def test_causes_say_whether_memory_ran_out():
    assert (
        Cause.OOM.of_memory and Cause.CRASH_OUT.of_memory and not Cause.KILLED.of_memory and not Cause.CRASH.of_memory
    )
