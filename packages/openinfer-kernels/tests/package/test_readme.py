import re
from importlib.metadata import metadata
from pathlib import Path


def readme() -> str:
    """The file beside the tests, or, where only a wheel is installed, the text in its metadata."""
    beside = Path(__file__).parents[2] / "README.md"
    return beside.read_text("utf-8") if beside.exists() else str(metadata("openinfer-kernels").get_payload())


def test_readme_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", readme(), re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    tokens, ranks = re.fullmatch(r"\[(.*)\] \[(.*)\]\n", capsys.readouterr().out).groups()
    assert all(0 <= int(token) < 1000 for token in tokens.split())
    assert len(ranks.split()) == 2
    assert 1 <= int(ranks.split()[1]) <= 20
