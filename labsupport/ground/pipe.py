"""Records over a pipe: a mark, a length, the record as msgpack, then the arrays of an End byte by byte.

The reader never waits for a writer that stopped in the middle, and never runs what it reads.
"""

import os
import struct
import threading

import msgspec
import numpy as np

from labsupport.ground.budget import machine_memory
from labsupport.ground.record import End, Record

_HEAD = struct.Struct("<4sI")
_MARK = b"arm1"
_LARGEST = 2**26  # bytes of one record without its arrays; the doctor's facts, the largest, stay far below 1 MiB
_AT_ONCE = 2**26  # bytes read before the caller may look at its clock again: about 0.05 s
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class Garbled(ValueError):
    """What came through the pipe is no record."""


class Sender:
    """The arm's end. Only the process that made it may send: what an arm forks does not speak for it."""

    def __init__(self, descriptor):
        self._descriptor, self._lock, self._owner = descriptor, threading.Lock(), os.getpid()

    def send(self, record, buffers=()):
        """Write a record and the arrays (uint8) that belong to it. Raises OSError when nobody reads any more."""
        if os.getpid() != self._owner:
            return
        body = _encode(record)
        with self._lock:
            for block in (_HEAD.pack(_MARK, len(body)) + body, *buffers):
                view = memoryview(block)
                while view:
                    view = view[os.write(self._descriptor, view[: 2**20]) :]


class Receiver:
    """The watcher's end of the pipe."""

    def __init__(self, descriptor):
        os.set_blocking(descriptor, False)
        self.descriptor, self.open = descriptor, True
        self._data = bytearray()
        self._end, self._arrays, self._missing = None, [], []

    def read(self):
        """[(record, arrays)] that are complete, without waiting; arrays belong to an End. Raises Garbled."""
        found, budget = [], _AT_ONCE
        while budget > 0 and self.open:
            try:
                if self._missing:
                    got = os.readv(self.descriptor, self._missing[:1])
                    self._missing[0] = self._missing[0][got:]
                else:
                    block = os.read(self.descriptor, 2**16)
                    got = len(block)
                    self._data += block
            except BlockingIOError:
                break
            self.open, budget = got > 0, budget - max(got, 1)
            found += self._complete()
        return found

    def _complete(self):
        while True:
            if self._end is not None:
                self._fill()
                if self._missing:
                    return
                yield self._end, self._arrays
                self._end = None
            if len(self._data) < _HEAD.size:
                return
            mark, length = _HEAD.unpack_from(self._data)
            if mark != _MARK or length > _LARGEST:
                raise Garbled("something else than a record came through the pipe")
            if len(self._data) < _HEAD.size + length:
                return
            record = self._decoded(bytes(self._data[_HEAD.size : _HEAD.size + length]))
            del self._data[: _HEAD.size + length]
            if isinstance(record, End):
                self._expect(record)
            else:
                yield record, []

    @staticmethod
    def _decoded(body):
        try:
            return _decode(body)
        except msgspec.MsgspecError as error:
            raise Garbled(f"a record that is none came through the pipe: {error}") from None

    def _expect(self, end):
        if any(size < 0 for size in end.buffers) or sum(end.buffers) > machine_memory():
            raise Garbled("a return value larger than this machine came through the pipe")
        self._end = end
        self._arrays = [np.empty(size, np.uint8) for size in end.buffers]
        self._missing = [memoryview(array) for array in self._arrays]

    def _fill(self):
        """Move what was read already into the arrays, and forget those that are full."""
        while self._missing:
            part = len(self._missing[0])
            taken = self._data[:part]
            self._missing[0][: len(taken)] = taken
            del self._data[: len(taken)]
            if len(taken) < part:
                self._missing[0] = self._missing[0][len(taken) :]
                return
            self._missing.pop(0)
