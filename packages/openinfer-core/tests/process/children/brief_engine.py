"""The main module of an engine process that ends when it has said where it would have listened."""

import sys

import msgspec

from openinfer_core.process.engine_process import Address

sys.stdin.readline()
sys.stdout.write(msgspec.json.encode(Address(unix_path="/nonexistent/engine.sock")).decode() + "\n")
sys.stdout.flush()
sys.exit(7)
