"""TensorFlow's best-fit-with-coalescing allocator, as it places blocks in its regions: what a tensor takes is its chunk.

The rules are those of tsl/framework/bfc_allocator.cc: sizes in units of 256 bytes; the smallest free chunk that is large
enough, sought bin by bin (a bin for each power of two); it is cut where it is twice as large as needed or 128 MiB larger;
a chunk that is freed joins its free neighbours.
"""

from bisect import bisect_left, insort

UNIT = 256
_WASTE = 128 * 2**20  # bytes beyond which a chunk is cut though it is not twice as large
# Bytes of the first region, as an arm has it (ground/budget.py). Small blocks go into it while it has room, so that they do not
# cut up the second, which is the rest of the budget.
_FIRST = 2 * 2**20


class Full(Exception):
    """No free chunk is large enough."""


def rounded(size):
    """Bytes that a block of `size` bytes takes at least; 0 for an empty one, which gets no memory."""
    return -(-size // UNIT) * UNIT


class Chunks:
    """The two regions of a budget of `room` bytes. in_use: bytes of all chunks that are handed out, as get_memory_info counts them."""

    def __init__(self, room=2**50, first=_FIRST):
        self.in_use = 0
        self._size = {}  # of each chunk, by its address
        self._before = {}  # address of the chunk that ends where this one begins, None at a region's begin
        self._taken = set()
        self._bins = [[] for _ in range(64)]
        for number, size in enumerate((min(first, room), max(0, room - first))):
            begin = 2**60 * (number + 1)  # far from each other
            self._size[begin], self._before[begin] = size, None
            self._add(begin)

    def take(self, size):
        """The address of a chunk for `size` bytes; raises Full."""
        size = rounded(max(size, 1))
        for free in self._bins[_bin(size) :]:
            place = bisect_left(free, (size, -1))
            if place < len(free):
                found, address = free.pop(place)
                break
        else:
            raise Full(size)
        if found >= 2 * size or found - size >= _WASTE:
            self._cut(address, size)
        self._taken.add(address)
        self.in_use += self._size[address]
        return address

    def size(self, address):
        """Bytes of the chunk at an address, which can be more than were asked for."""
        return self._size[address]

    def free(self, address):
        """Give a chunk back."""
        self._taken.discard(address)
        self.in_use -= self._size[address]
        after = address + self._size[address]
        if after in self._size and after not in self._taken:
            self._drop(after)
            self._join(address, after)
        before = self._before[address]
        if before is not None and before not in self._taken:
            self._drop(before)
            self._join(before, address)
            address = before
        self._add(address)

    def _cut(self, address, size):
        rest = address + size
        self._size[rest] = self._size[address] - size
        self._size[address] = size
        self._before[rest] = address
        if rest + self._size[rest] in self._size:
            self._before[rest + self._size[rest]] = rest
        self._add(rest)

    def _join(self, address, after):
        self._size[address] += self._size.pop(after)
        del self._before[after]
        if address + self._size[address] in self._size:
            self._before[address + self._size[address]] = address

    def _add(self, address):
        insort(self._bins[_bin(self._size[address])], (self._size[address], address))

    def _drop(self, address):
        free = self._bins[_bin(self._size[address])]
        free.pop(bisect_left(free, (self._size[address], address)))


def _bin(size):
    return (size // UNIT).bit_length()
