"""A Graph walked as TensorFlow's executor walks it: which blocks of memory are alive when, and when most are.

Pure, and the same at every call. The executor's rules (core/common_runtime/executor.cc): a thread runs light operations that
have become ready itself, one heavy one, too, and puts other heavy ones in front of its own queue, from whose end idle threads
take. An operation's inputs are released when it has ended. Which operations run side by side depends on how long each
takes and on the order of what becomes ready together, which passes behind Grappler change. In traces of VGG16 gradients of
weights came before those of inputs, so that updates met readers; in those of a GRU it was the other way round. Two runs of
one step can differ by half, so a step is walked several times with other durations and orders.
"""

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass

from labsupport.fits import kernels
from labsupport.fits.chunks import Chunks, Full

SPREAD = 2  # an operation takes up to so many times as long or as short as thought: those of a kind together, and each by itself
_THREADS = 2  # that run operations; more cores run more side by side, and hold a little more


@dataclass(slots=True, eq=False)
class Block:
    """A buffer: bytes asked for, who asked, when it was alive (in the walk's own time); chunk: bytes that it took."""

    size: int
    node: int
    tensor: object
    begin: float
    variable: object = None
    users: int = 0
    address: int | None = None
    chunk: int = 0
    end: float = float("inf")


class Wiring:
    """What all walks of a Graph share. readers: of each value the numbers of the nodes that read it; followers: of each node
    those that wait for it besides; waits: for how many each node waits; light: whether it is a light operation."""

    def __init__(self, graph):
        self._graph, self._efforts, self._kinds = graph, {}, {}
        self.readers = [[] for _ in graph.values]
        self.followers = [[] for _ in graph.nodes]
        self.waits = [len(node.inputs) + len(node.after) for node in graph.nodes]
        self.light = [node.op in kernels.LIGHT for node in graph.nodes]
        for number, node in enumerate(graph.nodes):
            for value in node.inputs:
                self.readers[value].append(number)
            for before in node.after:
                self.followers[before].append(number)

    def effort(self, number):
        """(a number for its kind, kernels.work()) of a node: of one kind are those that do the same with tensors of the same shapes."""
        if number not in self._efforts:
            node = self._graph.nodes[number]
            kind = node.op, node.outputs, tuple(self._graph.tensor(value) for value in node.inputs)
            self._efforts[number] = (
                self._kinds.setdefault(kind, len(self._kinds)),
                kernels.work(node, self._graph),
            )
        return self._efforts[number]


class Walk:
    """One walk. blocks: all Blocks; peak: the most bytes in use by chunks; at: when, as a number of the order of events."""

    def __init__(self, graph, memory=None, seed=0, threads=_THREADS, steps=1, wiring=None):
        self.graph, self.memory = graph, memory or Chunks()
        self.blocks, self.peak, self.at, self.now = [], 0, 0, 0
        self._random, self._threads, self._factors = random.Random(seed), threads, {}
        self._wiring = wiring or Wiring(graph)
        self._readers, self._light = self._wiring.readers, self._wiring.light
        self._buffers = [None] * len(graph.values)
        self._variables, self._returned, self._sparse = {}, graph.returned, set()
        self._prepare()
        self.peak, self.at = self.memory.in_use, self.now  # of the steps alone, as what is measured
        for _ in range(steps):
            self._run()
            for value in graph.returned:
                if self._buffers[value] is not None:
                    self._release(self._buffers[value])

    # --- memory

    def _take(self, size, node, tensor, variable=None):
        block = Block(size, node, tensor, self.now, variable)
        if size:
            block.address = self.memory.take(size)
            block.chunk = self.memory.size(block.address)
        self.blocks.append(block)
        self.now += 1
        if self.memory.in_use > self.peak:
            self.peak, self.at = self.memory.in_use, self.now
        return block

    def _release(self, block):
        block.users -= 1
        if block.users == 0:
            self._free(block)

    def _free(self, block):
        if block.address is not None:
            self.memory.free(block.address)
            block.address = None
        self.now += 1
        block.end = self.now

    def _prepare(self):
        """What is there before the step: variables, constants, inputs."""
        graph = self.graph
        for value, variable in graph.variables.items():
            others = [self.memory.take(size) for size in variable.makings[:-1] if size]
            block = self._take(variable.tensor.size, graph.maker(value), variable.tensor, variable)
            block.users = 1
            self._variables[value] = block
            for address in others:
                self.memory.free(address)
        for value in graph.held:
            self._buffers[value] = self._take(graph.tensor(value).size, graph.maker(value), graph.tensor(value))
            self._buffers[value].users = 1
        for number, node in enumerate(graph.nodes):
            if node.op == "Const":
                self._buffers[node.first] = self._take(node.outputs[0].size, number, node.outputs[0])
                self._buffers[node.first].users = 1

    def at_peak(self, block):
        """Whether a Block was alive at the peak, and took memory."""
        return block.begin < self.at <= block.end and block.chunk > 0

    # --- the executor

    def _run(self):
        graph, waits = self.graph, list(self._wiring.waits)
        ready = [number for number, count in enumerate(waits) if count == 0]
        shared = deque(ready)
        own = [deque() for _ in range(self._threads)]
        inline = [deque() for _ in range(self._threads)]
        idle, waiting, running, time, ticket = set(range(self._threads)), {}, [], 0.0, 0
        while True:
            for thread in sorted({*idle, *waiting}):
                number = waiting.pop(thread, None)
                number = self._next(thread, inline, own, shared) if number is None else number
                if number is None:
                    continue
                idle.discard(thread)
                try:
                    copied = self._begin(number)
                except Full:  # it waits for what others give back (allocator_retry.cc)
                    waiting[thread] = number
                    continue
                ticket += 1
                heapq.heappush(running, (time + self._lasts(number), ticket, thread, number, copied))
            if not running and waiting:
                raise Full(
                    f"{graph.nodes[min(waiting.values())].name} waits for memory, and nothing runs that could give some back"
                )
            if not running:
                break
            time, _, thread, number, copied = heapq.heappop(running)
            self._end(number, copied)
            self._schedule(self._now_ready(number, waits), inline[thread], own[thread])
            idle.add(thread)
        left = [graph.nodes[number].name for number, count in enumerate(waits) if count > 0]
        if left:
            raise ValueError(f"{len(left)} operations never became ready, {left[0]} first: the graph has a circle")

    def _lasts(self, number):
        if self._light[number]:
            return 0.2
        kind, work = self._wiring.effort(number)
        if kind not in self._factors:
            self._factors[kind] = self._factor()
        return work * self._factors[kind] * self._factor()

    def _factor(self):
        return math.exp(self._random.uniform(-1, 1) * math.log(SPREAD))

    def _next(self, thread, inline, own, shared):
        if inline[thread]:
            return inline[thread].popleft()
        if own[thread]:
            return own[thread].popleft()
        if shared:
            return shared.popleft()
        for other in own:
            if other:
                return other.pop()
        return None

    def _now_ready(self, number, waits):
        ready = []
        node = self.graph.nodes[number]
        for value in range(node.first, node.first + len(node.outputs)):
            for reader in self._readers[value]:
                waits[reader] -= 1
                if waits[reader] == 0:
                    ready.append(reader)
        for follower in self._wiring.followers[number]:
            waits[follower] -= 1
            if waits[follower] == 0:
                ready.append(follower)
        return ready

    def _schedule(self, ready, inline, own):
        heavy = None
        for number in ready if self._random.random() < 0.5 else reversed(ready):
            if self._light[number]:
                inline.append(number)
                continue
            if heavy is not None:
                own.appendleft(heavy)
            heavy = number
        if heavy is not None:
            if inline:
                own.appendleft(heavy)
            else:
                inline.append(heavy)

    def _begin(self, number):
        """Let a node take its memory; returns the Block that it copies, which stays until it has ended, or None."""
        graph, node = self.graph, self.graph.nodes[number]
        if node.op == "Const" or node.first in graph.held:
            self._buffers[node.first].users += len(self._readers[node.first])
            return None
        if node.op in kernels.UPDATES:
            return self._update(node, number)
        if node.op in kernels.SCATTER:
            self._sparse.add(node.inputs[0])
        if node.op == "ReadVariableOp":
            read = self._variables.get(node.inputs[0])
            if read is not None and node.inputs[0] in self._sparse:
                read = self._take(read.size, number, read.tensor)
            self._hand_out(node.first, read)
            return None
        for place, tensor in enumerate(node.outputs):
            try:
                block = self._buffer(node, number, place, tensor)
            except Full:
                for value in range(node.first, node.first + place):
                    self._take_back(value)
                raise
            self._hand_out(node.first + place, block)
        return None

    def _hand_out(self, value, block):
        self._buffers[value] = block
        if block is not None:
            block.users += self._users(value)

    def _users(self, value):
        return len(self._readers[value]) + self._returned.count(value)

    def _take_back(self, value):
        """What has been handed out to an operation that then found no memory for its next output."""
        block = self._buffers[value]
        if block is not None:
            block.users -= self._users(value) - 1
            self._release(block)

    def _buffer(self, node, number, place, tensor):
        graph = self.graph
        if tensor.dtype in ("resource", "variant"):
            return None
        if node.op == "IdentityN":
            return self._buffers[node.inputs[place]]
        if kernels.rows_of(node, graph):
            return self._buffers[node.inputs[1 if node.op == "Split" else 0]]
        view = kernels.view_of(node, graph) if place == 0 else None
        if view is not None:
            return self._buffers[node.inputs[view]]
        for over in self._may_write_into(node, place):
            block = self._buffers[node.inputs[over]]
            if block is not None and block.users == 1 and block.size == tensor.size:
                return block
        return self._take(tensor.size, number, tensor)

    def _may_write_into(self, node, place):
        return kernels.may_write_into(node, self.graph, place)

    def _update(self, node, number):
        """An assignment: the new value takes the variable's place; adding writes into it, or into a copy if it is being read.

        Returns the Block that is copied, which is the variable's until the copy is there, or None.
        """
        block, new = self._variables.get(node.inputs[0]), self._buffers[node.inputs[1]]
        if block is None or new is None:
            return None
        copies = node.op != "AssignVariableOp"
        if copies and block.users == 1:
            return None
        fresh = self._take(block.size, number, block.tensor) if copies else new
        fresh.users += 1
        fresh.variable = block.variable
        self._variables[node.inputs[0]] = fresh
        if copies:
            return block
        self._release(block)
        return None

    def _end(self, number, copied):
        node = self.graph.nodes[number]
        if copied is not None:
            self._release(copied)
        for value in node.inputs:
            if self._buffers[value] is not None:
                self._release(self._buffers[value])
        for value in range(node.first, node.first + len(node.outputs)):
            block = self._buffers[value]
            if block is not None and block.users == 0 and block.end == float("inf"):
                self._free(block)


class EagerWalk(Walk):
    """The walk of a step that runs eagerly: one operation after the other, as written; none writes into what it is given,
    since Python still names that while it runs."""

    def _run(self):
        for number in range(len(self.graph.nodes)):
            self._end(number, self._begin(number))

    def _may_write_into(self, node, place):
        return []
