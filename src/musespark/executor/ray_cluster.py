"""Ranks as actors of a Ray cluster, one per GPU, on as many machines as it has.

Ray places the actors and tells why one has died; what ranks and front say to each other goes over
sockets of our own, as in one machine.
"""

import contextlib
import secrets
import threading
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from queue import Empty, SimpleQueue
from typing import Any

from musespark.config.parallel import Parallelism
from musespark.errors import ConfigError, EngineDeadError
from musespark.executor.distributed import tuned
from musespark.executor.rank import BuildPart, RankTask, run_rank
from musespark.executor.world import Place

# How long others on the cluster may take to free what this model needs.
_PLACEMENT_SECONDS = 300.0


class RankActor:
    """What runs in each actor."""

    def node(self) -> tuple[str, str]:
        """(its node's id, its node's address)."""
        ray = _import_ray()
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def run(self, front: tuple[str, int], key: bytes, task: RankTask) -> bool:
        """Live as a rank; whether it ended well."""
        connection = tuned(Client(front, family="AF_INET", authkey=key))
        connection.send_bytes(str(task.place.rank).encode())
        return run_rank(connection, task)


class RayRank:
    """An actor, seen from the front."""

    def __init__(self, ray: Any, actor: Any, life: Any, host: str, connection: Connection) -> None:
        """`life` is the reference to what `run` returns."""
        self._ray, self._actor, self._life = ray, actor, life
        self.host, self.connection = host, connection

    def how_it_ended(self) -> str:
        if not self._ray.is_initialized():  # or asking it would start another cluster
            return f"on {self.host} has ended with its cluster"
        try:
            self._ray.get(self._life, timeout=2.0)
        except Exception as error:  # whatever Ray knows of it
            # Its first line says what; then come ids and addresses.
            what = str(error).strip() or type(error).__name__
            return f"on {self.host} has ended: {what}"
        return f"on {self.host} has closed its connection"

    def end(self, seconds: float) -> None:
        if self._ray.is_initialized():
            with contextlib.suppress(Exception):  # it has died: that is what was wanted
                self._ray.wait([self._life], timeout=seconds)
            self._ray.kill(self._actor)


class RayLauncher:
    """Starts one actor per rank, with a GPU each, or a CPU each where there are no GPUs."""

    def __init__(
        self,
        build: BuildPart,
        parallelism: Parallelism,
        *,
        device_type: str | None = None,
        max_queue_len: int = 1024,
    ) -> None:
        """As for `LocalLauncher`; `device_type` None: GPUs if the cluster has any."""
        self._build, self._parallelism = build, parallelism
        self._device_type, self._max_queue_len = device_type, max_queue_len
        self._ray: Any = None
        self._placement: Any = None

    def start(self) -> Sequence[RayRank]:
        ray = self._ray = _import_ray()
        if not ray.is_initialized():
            _connect(ray)
        device_type = self._device_type
        if device_type is None:
            device_type = "cuda" if ray.cluster_resources().get("GPU", 0) else "cpu"
        self._placement = self._reserve(ray, device_type)
        actors = [
            self._new_actor(ray, index, device_type)
            for index in range(self._parallelism.world_size)
        ]
        nodes = ray.get([actor.node.remote() for actor in actors])
        # Neighbouring ranks talk most, so those of one machine are numbered in a row.
        order = list(dict.fromkeys(node for node, _ in nodes))
        placed = sorted(zip(actors, nodes, strict=True), key=lambda pair: order.index(pair[1][0]))
        ranks_on = Counter(node for node, _ in nodes)
        front = ray.util.get_node_ip_address()
        key = secrets.token_bytes(32)
        with Listener((front, 0), family="AF_INET", backlog=len(actors), authkey=key) as listener:
            lives = []
            for rank, (actor, (node, host)) in enumerate(placed):
                place = Place(rank, device_index=0, ranks_here=ranks_on[node], host=host)
                task = RankTask(
                    build=self._build,
                    parallelism=self._parallelism,
                    place=place,
                    device_type=device_type,
                    max_queue_len=self._max_queue_len,
                )
                lives.append(actor.run.remote(listener.address, key, task))
            connections = _accept(ray, listener, lives)
        return [
            RayRank(ray, actor, lives[rank], host, connections[rank])
            for rank, (actor, (_, host)) in enumerate(placed)
        ]

    def stop(self) -> None:
        if self._ray is None or not self._ray.is_initialized():
            return
        if self._placement is not None:
            self._ray.util.remove_placement_group(self._placement)
            self._placement = None
        # The process stays connected: ray.shutdown would take its handler of SIGTERM with it.

    def _reserve(self, ray: Any, device_type: str) -> Any:
        """Room for all ranks, on as few machines as possible."""
        count = self._parallelism.world_size
        bundle = {"CPU": 1.0, "GPU": 1.0} if device_type == "cuda" else {"CPU": 1.0}
        have = ray.cluster_resources()
        for name in bundle:
            if have.get(name, 0) < count:
                raise ConfigError(
                    f"executor: the layout {self._parallelism.layout_name} needs {count} {name}s, "
                    f"but the Ray cluster has {have.get(name, 0):g}. Lower the sizes, or add nodes "
                    "with ray start --address."
                )
        placement = ray.util.placement_group([bundle] * count, strategy="PACK")
        if not placement.wait(_PLACEMENT_SECONDS):
            ray.util.remove_placement_group(placement)
            raise ConfigError(
                f"executor: {count} {' and '.join(bundle)} bundles did not become free on the Ray "
                f"cluster within {_PLACEMENT_SECONDS:g} seconds. ray status shows who has them."
            )
        return placement

    def _new_actor(self, ray: Any, index: int, device_type: str) -> Any:
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._placement, placement_group_bundle_index=index
        )
        return (
            ray.remote(RankActor)
            .options(
                num_cpus=1,
                num_gpus=1 if device_type == "cuda" else 0,
                scheduling_strategy=strategy,
            )
            .remote()
        )


def _accept(ray: Any, listener: Listener, lives: Sequence[Any]) -> dict[int, Connection]:
    """Connections by rank.

    Raises:
        EngineDeadError: an actor has ended before it connected.
    """
    arrived: SimpleQueue[Connection] = SimpleQueue()

    def accept() -> None:
        for _ in lives:
            arrived.put(tuned(listener.accept()))

    threading.Thread(target=accept, name="musespark-accept", daemon=True).start()
    connections: dict[int, Connection] = {}
    while len(connections) < len(lives):
        try:
            connection = arrived.get(timeout=0.5)
        except Empty:
            ended, _ = ray.wait(list(lives), timeout=0)
            if ended:
                try:
                    ray.get(ended[0])
                except Exception as error:
                    raise EngineDeadError(f"A rank did not start: {error}") from None
        else:
            connections[int(connection.recv_bytes())] = connection
    return connections


def _connect(ray: Any) -> None:
    """Join the cluster of RAY_ADDRESS, one that runs on this machine, or a new one.

    Raises:
        ConfigError: there is no cluster at RAY_ADDRESS.
    """
    outcome: SimpleQueue[Exception | None] = SimpleQueue()

    def live() -> None:
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        except Exception as error:
            outcome.put(error)
        else:
            outcome.put(None)
            # A new cluster's processes end with the thread that started them, so it stays.
            threading.Event().wait()

    threading.Thread(target=live, name="musespark-ray", daemon=True).start()
    if (error := outcome.get()) is not None:
        raise ConfigError(f"executor: no Ray cluster could be reached or started: {error}")


def _import_ray() -> Any:
    try:
        # Here, not at the top: one machine needs no Ray.
        import ray
        import ray.util.scheduling_strategies
    except ModuleNotFoundError:
        raise ConfigError(
            "executor: ray needs the package ray: pip install 'musespark[ray]'."
        ) from None
    return ray
