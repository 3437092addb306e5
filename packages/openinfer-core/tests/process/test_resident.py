"""What is freed goes back to the system."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="of glibc's heaps"
)

# A thread's heap; the first block raises glibc's own thresholds to 32 and 64 MiB, as loading weights does.
MEASURED = """
import json, sys, threading
from openinfer_core.process.resident import resident_bytes, return_freed_memory

if json.loads(sys.argv[1]):
    return_freed_memory()
sizes = []

def use():
    bytes_of(31 << 20)
    blocks = [bytes_of(8 << 20) for _ in range(5)]
    sizes.append(resident_bytes())
    while blocks:
        blocks.pop()
    sizes.append(resident_bytes())

def bytes_of(size):
    return bytearray(b"x") * size

thread = threading.Thread(target=use)
thread.start()
thread.join()
print(json.dumps(sizes))
"""


@pytest.mark.parametrize("is_set", [True, False])
def test_large_arrays_go_back_when_they_are_freed(*, is_set: bool) -> None:
    said = subprocess.run(
        [sys.executable, "-c", MEASURED, json.dumps(is_set)], check=True, stdout=subprocess.PIPE, timeout=60
    )
    full, freed = json.loads(said.stdout)
    kept = 40 * 2**20 - (full - freed)
    assert (kept < 12 << 20) is is_set, (full, freed)
