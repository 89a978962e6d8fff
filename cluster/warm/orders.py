"""What a node and its template tell each other: JSON objects on a socket that keeps messages apart."""

import json
import socket
from dataclasses import asdict, dataclass

TRAINING = "training"  # the template's forks run the training loop
COMMAND = "command"  # they run a command of the user's
MAX_MESSAGE_BYTES = 64 << 10


@dataclass(frozen=True)
class Order:
    """Asks the template for an agent."""

    number: int  # of the orders of this template
    log_dir: str
    generation: int


def send_order(channel: socket.socket, order: Order, secret: int) -> None:
    """Sends an order and the pipe that holds the generation's secret."""
    socket.send_fds(channel, [json.dumps(asdict(order)).encode()], [secret])


def tell(channel: socket.socket, **message: object) -> None:
    """Sends anything else."""
    channel.send(json.dumps(message).encode())
