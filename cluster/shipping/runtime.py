"""How shipped code reaches the nodes: through Ray's runtime environment of every connection.

The command that ships says so in this process's environment; `ray_session.connected` hands the
folder to Ray, which keeps it in the cluster's control store as long as the job's supervisor lives,
unpacks it once per node and puts it first on the path of every actor and task. What they start
(templates, agents, ranks as programs and as forks, the process that prepares data) inherits the
path. That process connects on its own account: the supervisor tells it what Ray calls the folder.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .wheel import Shipment, make_shipment

SHIPPED = "SHIPPED_MOEBIUS"  # a folder, or Ray's name for what it holds; not handed to ranks


@contextlib.contextmanager
def shipping(wheel: Path | None) -> Iterator[Shipment]:
    """Lets what is connected to while inside run the code of a wheel; None: of this checkout.

    Raises:
        JobError: there is no such wheel, or it cannot be built.
    """
    with tempfile.TemporaryDirectory(prefix="moebius-ship-") as folder:
        shipment = make_shipment(wheel, Path(folder))
        os.environ[SHIPPED] = str(shipment.folder)
        try:
            yield shipment
        finally:
            del os.environ[SHIPPED]


def runtime_env() -> dict[str, Any] | None:
    """Returns Ray's runtime environment for a connection of this process; None: nothing is shipped."""
    shipped = os.environ.get(SHIPPED)
    return {"py_modules": [shipped]} if shipped else None


def hand_on_shipment(ray: Any) -> None:
    """Lets processes that this actor starts, and that connect themselves, use the same code."""
    modules = ray.get_runtime_context().runtime_env.get("py_modules")
    if modules:
        os.environ[SHIPPED] = modules[0]
