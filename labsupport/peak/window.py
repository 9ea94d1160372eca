"""How much a recording may hold: the memory that its trace takes, and the time after which it ends where nobody can tell."""

import ctypes
import threading
import time

from labsupport.ground.budget import MIB, mib

# Of the trace while it is recorded. What is made of it at its end (an XSpace, then Python's objects) was seen to take up to
# six times as much besides: 170 MiB of a loop of 400,000 small operations in a graph came to 1,240 in all. So a recording
# stays below 1 GiB. An eager operation leaves 1.5 KiB, a turn of that loop 2: enough for some 80,000 of either.
MOST_BYTES = 128 * MIB
MOST_SECONDS = 20.0  # where the C library does not tell; 20,000 eager operations a second leave 30 MiB in each
_LOOK_SECONDS = 0.1  # the loop above leaves 12 MiB in that time; a look takes a millisecond


class _Heap(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33 and later (man 3 mallinfo)."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def heap():
    """Bytes of this process in small pieces, as a trace takes them: no tensors, no large arrays, which have pages of their own.

    None where the C library does not tell (another system than Linux with glibc).
    """
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no library without a name
        return None
    ask.restype = _Heap
    return ask().uordblks


class Window:
    """Calls full(reason) once, from a thread of its own, when a recording that begins now has had its share."""

    def __init__(self, full, most_bytes=MOST_BYTES, most_seconds=MOST_SECONDS):
        self._full, self._bytes, self._seconds = full, most_bytes, most_seconds
        self._over, self._began, self._level = threading.Event(), time.monotonic(), heap()
        threading.Thread(target=self._watch, daemon=True, name="labsupport-window").start()

    def close(self):
        self._over.set()

    def _watch(self):
        while not self._over.wait(_LOOK_SECONDS):
            passed = time.monotonic() - self._began
            if self._level is not None:
                now = heap()
                # Whoever lets go of much at once would hide what is recorded meanwhile.
                self._level = min(self._level, now)
                if now - self._level > self._bytes:
                    self._full(f"the first {passed:.1f} s, until its trace had {mib(self._bytes)}")
                    return
            elif passed > self._seconds:
                self._full(f"the first {self._seconds:.0f} s")
                return
