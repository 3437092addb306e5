"""Several tokens per step: what `--speculative` says, and the drafter that needs no weights."""

from openinfer_engine.speculation.setting import Speculation, parse_speculative

__all__ = ["Speculation", "parse_speculative"]
