"""The loopback address, which this machine alone reaches: where the servers listen."""

import socket

from finetune.errors import ConfigError

HOST = "127.0.0.1"


def listening(port: int) -> socket.socket:
    """Return a socket on the loopback address.

    Args:
        port: 0 takes any that is free.

    Raises:
        ConfigError: The port is in use, or may not be had.
    """
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((HOST, port))
        found.listen()
    except OSError as error:
        found.close()
        raise ConfigError(
            f"port {port} of {HOST} cannot be had: {error.strerror}",
            limit="one program listens on a port",
            hint="`--port 0` takes one that is free, or end the program that has it",
        ) from error
    return found
