"""How a pool's replicas are started and stopped: what a fleet file says of it, and what whoever does it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from msgspec import Meta, Struct

if TYPE_CHECKING:  # a fleet file is read without what a gateway needs
    from headway.gateway.fleet.replica import LiveReplica

_Seconds = Annotated[float, Meta(gt=0)]
_Port = Annotated[int, Meta(ge=1, le=65535)]


class Processes(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """For `headway serve`: replicas are processes on the gateway's machine. They end when the gateway does."""

    command: Annotated[tuple[str, ...], Meta(min_length=1)]
    """What starts one, word by word; no shell reads it. `{port}` stands for its port, `{index}` for its number (0 for
    the first port), `{gpus}` for the numbers of its GPUs (`0,1` for the first of two), `{tp}` and `{pp}` for its
    parallelism, which a `replan` may choose, `{role}` for its side of a combo (`prefill`, `decode`), and
    `{bootstrap_port}` for another port that is free."""
    ports: tuple[_Port, _Port]
    """The first and the last port that replicas may listen on, at 127.0.0.1; there are at most as many of them."""
    env: dict[str, str] = {}
    """Environment variables, in which `{port}` and the others stand for the same."""
    keep_env: tuple[str, ...] = ()
    """Those of the gateway's own environment that they see, too. Without: PATH, HOME and the like, and no secrets."""
    ready_s: _Seconds = 600.0
    """One that is not well by then is stopped, and started again."""
    tries: Annotated[int, Meta(ge=1)] = 3
    """After so many starts in a row that came to nothing, a replica counts as failed: it is tried on at growing
    intervals, up to a minute, but scaling does not wait for it."""
    stop_s: _Seconds = 30.0
    """From SIGTERM to SIGKILL."""
    log: str = ""
    """A folder for what they write, a file for each port. Without one, it goes to the gateway's log."""


class Kubernetes(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """For `headway serve`: replicas are a workload's pods; scaling sets how many it has."""

    name: str
    """Of the workload."""
    kind: Literal["Deployment", "StatefulSet"] = "Deployment"
    namespace: str = "default"
    port: _Port = 8000
    """That engines listen on."""
    context: str = ""
    """Of the kubeconfig. Without one: the cluster that the gateway runs in, else the kubeconfig's current one."""
    poll_s: _Seconds = 2.0
    """Time between two looks at the pods."""
    ready_s: _Seconds = 600.0
    """One that is not well by then, or is not there, counts as failed: its workload tries on, but scaling does not wait
    for it."""
    tries: Annotated[int, Meta(ge=1)] = 3
    """So does one whose containers have been started anew so many times before it was well."""


class Host(Protocol):
    """The gateway, as who starts replicas sees it."""

    def came(self, pool: str, url: str, is_awaited: bool = True) -> LiveReplica:
        """One will be there, or is: it counts as up when it has been seen to be well. Not awaited: it had failed."""

    def failed(self, pool: str, why: str) -> None:
        """One of those that are awaited does not start."""

    def mended(self, pool: str) -> None:
        """One that had failed is up, or is not tried any more."""

    def wants(self, pool: str) -> bool:
        """One that had failed is still wanted."""

    def has_room(self, pool: str) -> bool:
        """There are GPUs for it."""

    def lost(self, replica: LiveReplica) -> bool:
        """It is gone, and nobody asked for that. Whether there is to be another one in its place."""

    def asks(self, pool: str, num: int) -> None:
        """A cluster is to have so many of them in all."""

    def expect(self, pool: str, num: int) -> None:
        """So many will be up that are not yet."""

    def retire(self, replica: LiveReplica) -> None:
        """It has to go: it is drained, then given back by `Actuator.stop`."""


class Actuator(Protocol):
    """Starts and stops the replicas of one pool."""

    def begin(self) -> None:
        """Start those that are there at first, or find them."""

    def more(self) -> None:
        """Start one more."""

    def fewer(self, num: int) -> None:
        """So many of those that are nowhere yet, or do not start, are not wanted any more."""

    def up(self, replica: LiveReplica) -> None:
        """It has been seen to be well."""

    def stop(self, replica: LiveReplica) -> None:
        """It is empty, and not wanted any more. It may be somebody else's; then nothing happens."""

    async def close(self) -> None:
        """The gateway ends."""
