"""Ports for tests that run side by side."""
import random
import socket

CLAIMS = []


def free_port():
    """A TCP port that no test of this machine gets a second time while this process lives, and that nobody listens on.

    A port that the kernel chose is free again once its socket is closed, and may be given to the next test before the program
    that should listen on it has started. So each port is claimed by an abstract Unix socket of that number, which the kernel releases
    when this process ends (tests/unit/free_port.h does the same), and lies below those that outgoing connections take.
    """
    for port in random.SystemRandom().sample(range(20000, 32000), 12000):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind("\0megatron_test_port_%d" % port)
            with socket.socket() as listener:
                listener.bind(("", port))
        except OSError:
            claim.close()
            continue
        CLAIMS.append(claim)
        return port
    raise RuntimeError("no port from 20000 to 31999 is free")
