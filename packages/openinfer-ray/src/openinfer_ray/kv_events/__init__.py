"""Routing by what the replicas' caches hold: digests of prompts, and KV events over encrypted links.

`relay.py` is a replica's end, `subscription.py` a server's; these two alone need pyzmq.
"""
