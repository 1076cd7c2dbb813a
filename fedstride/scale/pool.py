"""Workers as Ray actors, on this machine or on a cluster; Ray is started and stopped here where nobody else did."""

import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedstride.errors import FedstrideError
from fedstride.inputs import whole

STORE = 16 << 30  # bytes of Ray's object store at most, where it is started here
PATIENCE = 120.0  # seconds for workers to be there
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # tells nobody outside
    "RAY_enable_metrics_collection": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # the first mistake ends the run; those of other workers need not be told
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",  # goes to standard output; ours goes to the other one
}


class Pool:
    """So many workers, each with a device of its own: a GPU, or its share of a machine's cores.

    workers: how many; None: one a GPU of the cluster, or one a machine where there are none.
    ray: None starts Ray on this machine and stops it at the end; "auto" or an address joins a cluster.
    """

    def __init__(self, workers: int | None = None, ray: str | None = None):
        self._count = None if workers is None else whole("workers", workers)
        if self._count is None and ray is None:
            raise FedstrideError("say how many workers, such as 2, or which Ray cluster to join")
        self._ray, self._address, self._folder = _ray(), ray, ""
        self.handles: list[Any] = []
        self.machines: list[str] = []  # every worker's
        self.neighbours: list[int] = []  # workers on the same machine, itself among them
        self.sharing: list[int] = []  # workers with the same GPU, or with the same machine where there is none

    def open(self) -> "Pool":
        """Start the workers, and Ray if need be."""
        self._before = signal.getsignal(signal.SIGTERM)
        try:
            self._connect(self._address, self._count)
            self._hire(self._count)
        except BaseException:
            self.close()
            raise
        return self

    def _connect(self, address: str | None, count: int | None) -> None:
        """Join the cluster, or start one: dashboard off, store bounded, files in a folder that goes with it."""
        self._mine = not self._ray.is_initialized()
        if not self._mine:
            return
        common = dict(include_dashboard=None, log_to_driver=False, configure_logging=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            if address is not None:
                try:
                    if address != "auto":  # Ray itself would go on trying for minutes
                        host, _, port = address.rpartition(":")
                        socket.create_connection((host, int(port)), timeout=10).close()
                    self._ray.init(address=address, **common)
                except (OSError, RuntimeError, ValueError) as error:
                    raise FedstrideError(
                        f"cannot join a Ray cluster at {address!r}: {str(error).split('. ')[0]}; give auto or "
                        "HOST:PORT, on a machine that `ray start` has made part of it"
                    ) from None
                return
            self._folder = tempfile.mkdtemp(prefix="fedstride-", dir="/tmp")  # sockets need a short path
            room = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else STORE
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
            path = os.environ.get("PYTHONPATH")
            # What can be imported here can be imported there.
            os.environ["PYTHONPATH"] = os.pathsep.join(part for part in sys.path if part)
            self._ray.init(
                address="local", num_cpus=max(count or 1, _cores()), _temp_dir=self._folder,
                object_store_memory=int(min(STORE, memory // 3, 0.9 * room)),
                **common | {"include_dashboard": False},
            )  # fmt: skip
            os.environ.pop("PYTHONPATH")
            os.environ |= {"PYTHONPATH": path} if path is not None else {}

    def _hire(self, count: int | None) -> None:
        from fedstride.scale.worker import Worker

        gpus = int(self._ray.cluster_resources().get("GPU", 0))
        count = count or gpus or len([node for node in self._ray.nodes() if node["Alive"]])
        share = 0.0 if not gpus else 1.0 if count <= gpus else gpus / count
        if 0 < share < 1:
            share = 1 / -(-count // gpus)  # a worker cannot have parts of two GPUs
        kind = self._ray.remote(Worker).options(
            num_cpus=1, num_gpus=share, max_restarts=-1, max_task_retries=0, scheduling_strategy="SPREAD"
        )
        self.handles = [kind.remote() for _ in range(count)]
        asked = [handle.where.remote() for handle in self.handles]
        there, missing = self._ray.wait(asked, num_returns=count, timeout=PATIENCE)
        if missing:
            raise FedstrideError(
                f"the cluster has room for {len(there)} of {count} workers, which need a core each"
                + (f" and {share:g} of a GPU" if share else "")
                + "; ask for fewer"
            )
        try:
            places = self._ray.get(asked)
        except self._ray.exceptions.RayError as error:
            raise FedstrideError(
                f"a worker cannot start: {str(error).strip().splitlines()[-1]}; fedstride must be installed on every "
                "machine of the cluster"
            ) from None
        self.machines = [machine for machine, _ in places]
        on = Counter(self.machines)
        self.neighbours = [on[machine] for machine in self.machines]
        self.sharing = [round(1 / share)] * count if share else self.neighbours

    def __len__(self) -> int:
        return len(self.handles)

    def processes(self) -> list[int]:
        """Process numbers of the workers; waits for those that are being started again."""
        found: list[int] = []
        while len(found) < len(self):
            try:
                found.append(self._ray.get(self.handles[len(found)].where.remote())[1])
            except self._ray.exceptions.ActorUnavailableError:
                time.sleep(0.2)
        return found

    def close(self) -> None:
        """Let the workers go, and Ray with them if it was started here."""
        for handle in self.handles:
            self._ray.kill(handle)
        self.handles = []
        if self._mine and self._ray.is_initialized():
            self._ray.shutdown()
            signal.signal(signal.SIGTERM, self._before)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "Pool":
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def hired(workers: int | Pool | None) -> Iterator[Pool | None]:
    """Workers for a while: those of a pool that is open, or of one that is opened for the purpose; None: none."""
    if workers is None or (isinstance(workers, Pool) and workers.handles):
        yield workers
        return
    with workers if isinstance(workers, Pool) else Pool(workers) as pool:
        yield pool


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _ray() -> Any:
    for name, value in SETTINGS.items():  # some are read when Ray is imported
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise FedstrideError("workers need Ray: pip install 'fedstride[scale]'") from None
    return ray
