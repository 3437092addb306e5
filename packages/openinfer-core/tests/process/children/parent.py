"""A parent that starts an engine process, says so, and lives until it is killed.

Arguments: the behaviour of the engine (see faulty_engine.py).
"""

import sys
import threading
import time

import faulty_engine

from openinfer_core import GenerateRequest, RequestId, SamplingParams
from openinfer_core.process.child import EngineChild
from openinfer_core.process.engine_process import default_link
from openinfer_core.process.wire import FrameBuffer, Hello, Submit, encode_frame

spec = faulty_engine.Spec(sys.argv[1])
child = EngineChild("faulty_engine", spec, token="t", link=default_link())
connection = child.connect()
connection.sendall(encode_frame(Hello("t")))
if sys.argv[1] != "build forever":
    frames = FrameBuffer()
    while not frames.feed(connection.recv(4096)):
        pass
    request = GenerateRequest(
        request_id=RequestId(1), prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1_000_000)
    )
    connection.sendall(encode_frame(Submit(request)))
    threading.Thread(target=lambda: [None for _ in iter(lambda: connection.recv(1 << 16), b"")], daemon=True).start()
sys.stdout.write("ready\n")
sys.stdout.flush()
time.sleep(3600)
