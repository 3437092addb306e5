"""The page's files as HTTP sends them; what a browser makes of them is in `page/`."""

import re
from importlib.resources import files

FOLDER = files("openinfer_server").joinpath("page")
NAMES = sorted(each.name for each in FOLDER.iterdir())


def path_of(name: str) -> str:
    return "/" if name == "index.html" else f"/page/{name}"


def test_files_are_served_with_a_policy_that_allows_nothing_else(shared, call):
    for name in NAMES:
        status, headers, body = call(shared, "GET", path_of(name))
        assert (status, body) == (200, FOLDER.joinpath(name).read_bytes()), name
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
        assert {policy[kind] for kind in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
        assert headers["x-content-type-options"] == "nosniff"


def test_page_is_whole_without_a_network():
    for name in NAMES:
        text = FOLDER.joinpath(name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", text), name


def test_page_has_no_inline_script_or_style_and_makes_no_markup_of_text():
    html = FOLDER.joinpath("index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", html)
    scripts = [FOLDER.joinpath(name).read_text(encoding="utf-8") for name in NAMES if name.endswith(".js")]
    assert not any(
        re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text) for text in scripts
    )


def test_files_that_the_page_names_exist():
    html = FOLDER.joinpath("index.html").read_text(encoding="utf-8")
    named = re.findall(r'(?:src|href)="page/([\w.]+)"', html)
    scripts = [FOLDER.joinpath(name).read_text(encoding="utf-8") for name in NAMES if name.endswith(".js")]
    named += [name for text in scripts for name in re.findall(r'from "\./([\w.]+)"', text)]
    assert {*named, "index.html"} == set(NAMES)


def test_metrics_that_the_page_reads_exist(shared, call):
    script = FOLDER.joinpath("status.js").read_text(encoding="utf-8")
    page = call(shared, "GET", "/metrics")[2].decode()
    read = set(re.findall(r"openinfer_\w+", script))
    assert len(read) > 5
    assert all(re.search(rf"^{name}[{{ ]", page, re.M) for name in read)


def test_small_enough_to_read():
    assert sum(len(FOLDER.joinpath(name).read_bytes()) for name in NAMES) < 72 * 1024
