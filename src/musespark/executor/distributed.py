"""How the ranks of one replica take the same steps.

The driver, on the last pipeline stage, sends each step's plan to the others over sockets, and every
rank builds its own tensors from it. With a pipeline the driver sends several plans ahead, so that
the first stage works on the next step while the last one finishes the one before. Without one, a
plan may name tokens that are only being sampled; those go from device to device.

A socket, and not a collective: it may stay silent for days, it buffers, and it ends with whoever is
at its other end.
"""

import contextlib
import json
import secrets
import socket
import threading
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from queue import SimpleQueue

import torch
from torch import Tensor

from musespark.engine.executor import Runner, StepOutput
from musespark.engine.inputs import InputBuilder, fill_in
from musespark.engine.messages import End, FromDriver, Step
from musespark.engine.step_plan import StepPlan
from musespark.engine.wire import decode, encode
from musespark.errors import EngineDeadError
from musespark.executor.world import World
from musespark.model.batch import ForwardBatch
from musespark.parallel.collectives import broadcast
from musespark.parallel.mesh import MeshAxis

# Two seconds of silence, then a question every second, and three without an answer are the end.
_KEEP_ALIVE = {
    "TCP_KEEPIDLE": 2,
    "TCP_KEEPINTVL": 1,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 5000,  # milliseconds, for what was sent and not acknowledged
}


class DriverExecutor:
    """The driver's side: an `Executor` whose steps the other ranks of its replica run too."""

    def __init__(
        self,
        runner: Runner,
        inputs: InputBuilder,
        others: "Sequence[Connection]",
        axis: MeshAxis,
        *,
        depth: int = 1,
        in_lockstep: bool = False,
        runs_ahead: bool = False,
    ) -> None:
        """`others`: from `accept_ranks`; `axis`: the tensor-parallel ranks of this stage, who get
        sampled tokens from this one where it `runs_ahead`."""
        assert depth == 1 or not runs_ahead
        assert axis.rank == 0
        self._runner, self._inputs, self._others = runner, inputs, others
        self._axis, self.runs_ahead = axis, runs_ahead
        self.depth, self.in_lockstep = depth, in_lockstep
        self._under_way: deque[tuple[StepPlan, ForwardBatch]] = deque()

    @property
    def device(self) -> torch.device:
        return self._runner.device

    def submit(self, plan: StepPlan) -> None:
        self._send(Step(plan))
        self._under_way.append((plan, self._inputs.build(plan)))

    def collect(self, sampled: Tensor | None = None) -> StepOutput:
        plan, batch = self._under_way.popleft()
        if sampled is not None:
            batch = fill_in(batch, broadcast(sampled[: plan.num_unknown], self._axis))
        return StepOutput(batch, *self._runner.run(batch))

    def end(self) -> None:
        """Let the other ranks go; nothing may be under way."""
        assert not self._under_way
        self._send(End())
        for connection in self._others:
            connection.close()

    def _send(self, message: FromDriver) -> None:
        data = encode(message)
        for connection in self._others:
            try:
                connection.send_bytes(data)
            except OSError:
                raise EngineDeadError("Another rank of this replica has gone.") from None


def follow(runner: Runner, inputs: InputBuilder, driver: Connection, axis: MeshAxis) -> None:
    """The other ranks' side: run what the driver sends, until it says that this was all.

    `axis`: as for `DriverExecutor`.

    Raises:
        EngineDeadError: the driver has gone without a word.
    """
    arrived: SimpleQueue[FromDriver | None] = SimpleQueue()
    reader = threading.Thread(
        target=_read, args=(driver, arrived), name="musespark-steps", daemon=True
    )
    reader.start()
    while not isinstance(message := arrived.get(), End):
        if message is None:
            raise EngineDeadError("The rank that plans this replica's steps has gone.")
        batch = inputs.build(message.plan)
        if count := message.plan.num_unknown:
            batch = fill_in(batch, broadcast(batch.token_ids.new_empty(count), axis))
        runner.run(batch)


def _read(driver: Connection, arrived: "SimpleQueue[FromDriver | None]") -> None:
    """Take plans off the socket at once: a driver that waits for room in it would hold up a stage
    that this rank may be waiting for."""
    message: FromDriver | None = None
    with contextlib.suppress(EOFError, OSError):
        while not isinstance(message, End):
            message = decode(driver.recv_bytes())  # type: ignore[assignment]
            arrived.put(message)
        return
    arrived.put(None)


def accept_ranks(world: World) -> list[Connection]:
    """On a driver: connections from all other ranks of its replica."""
    count = world.mesh.tensor.size * world.mesh.pipeline.size - 1
    if count == 0:
        return []
    assert world.store is not None
    key = secrets.token_bytes(32)
    with Listener((world.place.host, 0), family="AF_INET", backlog=count, authkey=key) as listener:
        host, port = listener.address
        note = {"host": host, "port": port, "key": key.hex()}
        world.store.set(_note_name(world), json.dumps(note))
        return [tuned(listener.accept()) for _ in range(count)]


def connect_to_driver(world: World) -> Connection:
    """On another rank: the connection from its driver."""
    assert world.store is not None
    note = json.loads(world.store.get(_note_name(world)))
    address = (note["host"], note["port"])
    return tuned(Client(address, family="AF_INET", authkey=bytes.fromhex(note["key"])))


def _note_name(world: World) -> str:
    return f"musespark-driver-{world.mesh.data.rank}"


def tuned(connection: Connection) -> Connection:
    """The TCP connection, told to hold no small message back, and to end soon after the machine at
    its other end is gone."""
    with socket.socket(fileno=connection.fileno()) as view:
        view.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        view.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            if hasattr(socket, option):  # Linux has them all
                view.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        view.detach()
    return connection
