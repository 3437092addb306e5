"""See that there is a browser for the tests of the server's page; on Debian, as root, install one.

    ./run browser

The tests use Chromium or Chrome from PATH, playwright's own, or what OPENINFER_TEST_BROWSER names
(packages/openinfer-server/tests/page/conftest.py), and are skipped where there is none. This says which of it is so,
loudly; it ends with 0 all the same, as everything else can be tested without a browser.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
CACHES_OF_PLAYWRIGHT = (".cache/ms-playwright", "Library/Caches/ms-playwright", "AppData/Local/ms-playwright")
HOW = """no Chromium: the page's tests WILL BE SKIPPED. To run them, one of
    apt-get install chromium                  (Debian; Ubuntu: its own `chromium-browser` is a snap, take Google's deb)
    dnf install chromium, brew install --cask chromium, or any Chrome
    .run/test/bin/playwright install chromium (where playwright's download is reachable)
    OPENINFER_TEST_BROWSER=/path/to/chrome"""


def main() -> int:
    found = find_browser()
    if found is None and can_install():
        install()
        found = find_browser()
    print(f"browser of the page's tests: {found}" if found else HOW, flush=True)
    return 0


def find_browser() -> str | None:
    given = os.environ.get("OPENINFER_TEST_BROWSER")
    if given and Path(given).exists():
        return given
    on_path = next((path for path in map(shutil.which, NAMES) if path), None)
    folders = [Path(given)] if (given := os.environ.get("PLAYWRIGHT_BROWSERS_PATH")) else []
    folders += [Path.home() / cache for cache in CACHES_OF_PLAYWRIGHT]
    own = next((str(found) for folder in folders for found in sorted(folder.glob("chromium-*"))), None)
    return on_path or own


def can_install() -> bool:
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    return is_root and Path("/etc/debian_version").exists() and shutil.which("apt-get") is not None


def install() -> None:
    """Try with the lists of packages that are there, then with new ones: a machine that was just made has none."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    command = ("apt-get", "install", "--yes", "--quiet", "--no-install-recommends", "chromium")
    print("no Chromium: " + " ".join(command), flush=True)
    for attempt in (command, ("apt-get", "update", "--quiet"), command):
        done = subprocess.run(attempt, env=environment, check=False, capture_output=True, text=True)
        if attempt is command and done.returncode == 0:
            return
    print(f"apt-get failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
