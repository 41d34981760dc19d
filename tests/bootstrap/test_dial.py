"""Owns the tests of what a client that found nobody of ours says about the addresses where it looked."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from gfkernels.bootstrap.dial import Identity, dial
from gfkernels.bootstrap.network import listen, resolve
from gfkernels.bootstrap.server import StoreServer
from gfkernels.errors import BootstrapError


def test_what_a_listener_said_outlives_one_that_only_hangs_up(port: int) -> None:
    def another_job_then_one_that_hangs_up() -> None:
        server = StoreServer([listen(["127.0.0.1"], [port])], "mine", b"secret--", 2)
        server.start()
        time.sleep(0.8)
        server.close()
        with socket.create_server(("127.0.0.1", port)) as listener:
            listener.settimeout(5)
            listener.accept()[0].close()

    thread = threading.Thread(target=another_job_then_one_that_hangs_up)
    thread.start()
    endpoints = resolve("127.0.0.1", port)
    identity = Identity("yours", b"secret--", 1, 2)
    with pytest.raises(BootstrapError) as caught:
        dial(lambda: endpoints, "here", identity, "store", time.monotonic() + 4)
    thread.join()
    assert "it serves another job ('mine', not 'yours'); by now: Connection refused" in str(caught.value)
