"""A further worker joins the engine before it serves, and its event loop goes on meanwhile."""

import asyncio
import os
import socket
import sys
import threading
from contextlib import closing
from io import BytesIO, FileIO

import pytest

from openinfer_core import Refused
from openinfer_core.process.engine_process import Address
from openinfer_core.process.remote import EngineAccess
from openinfer_core.process.wire import StartRefusal, encode_frame
from openinfer_server import ServerOptions
from openinfer_server.limits.worker_table import TableAccess
from openinfer_server.testing import DEADLINE_S
from openinfer_server.workers.wire import WorkerLaunch
from openinfer_server.workers.worker import serve_launch


@pytest.fixture(autouse=True)
def switch_interval():
    """A worker changes it for its whole process."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_the_loop_of_a_worker_goes_on_while_an_engine_does_not_answer():
    """As one does that is short of memory or descriptors: it accepts the link when it has some again."""
    turned, came_in_time = threading.Event(), []

    def be_an_engine(listener, loop):
        link, _ = listener.accept()
        with closing(link):
            loop.call_soon_threadsafe(turned.set)
            came_in_time.append(turned.wait(DEADLINE_S))  # an answer that waits for a turn of the loop
            link.sendall(encode_frame(StartRefusal("no room")))

    async def join(listener):
        engine = threading.Thread(target=be_an_engine, args=(listener, asyncio.get_running_loop()))
        engine.start()
        read, write = os.pipe()
        access = EngineAccess(address=Address(tcp_port=listener.getsockname()[1]), token="token")
        table = TableAccess(descriptor=0, num_workers=2, worker=1, key=b"")
        launch = WorkerLaunch(engine=access, model_dir="", table=table, options=ServerOptions())
        try:
            with pytest.raises(Refused, match="no room"):
                await serve_launch(launch, FileIO(read), BytesIO())
        finally:
            os.close(write)
            await asyncio.to_thread(engine.join)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        asyncio.run(join(listener))
    assert came_in_time == [True]
