"""KV events: what the prefix cache holds, told to routers over ZeroMQ as it changes.

`opening.py` is where the engine begins; `publisher.py` alone needs pyzmq.
"""
