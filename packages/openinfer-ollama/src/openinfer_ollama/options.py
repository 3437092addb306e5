"""`options` of a request: what each does, or why it changes nothing."""

from collections.abc import Mapping
from typing import ClassVar

from openinfer_server import ANY, Int64, Neutral, RequestFields, Rule

ONE_MODEL = Neutral(ANY, "the server's own options say how its one model is loaded")
NO_MIROSTAT = Neutral(ANY, "it tunes mirostat, which is off")


class Options(RequestFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to sample, and how Ollama would load the model."""

    temperature: float | None = None
    top_k: Int64 | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    stop: list[str] | None = None
    num_predict: Int64 | None = None
    num_ctx: Int64 | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Int64 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    f16_kv: object = None
    logits_all: object = None
    low_vram: object = None
    main_gpu: object = None
    mirostat_eta: object = None
    mirostat_tau: object = None
    num_batch: object = None
    num_gpu: object = None
    num_keep: object = None
    num_thread: object = None
    numa: object = None
    use_mlock: object = None
    use_mmap: object = None

    embedding_only: object = None
    mirostat: object = None
    penalize_newline: object = None
    tfs_z: object = None
    typical_p: object = None
    vocab_only: object = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "embedding_only": Neutral((False,), "this server generates text"),
        "f16_kv": ONE_MODEL,
        "logits_all": ONE_MODEL,
        "low_vram": ONE_MODEL,
        "main_gpu": ONE_MODEL,
        "mirostat": Neutral((0,), "0 is what is always so; there is no mirostat here"),
        "mirostat_eta": NO_MIROSTAT,
        "mirostat_tau": NO_MIROSTAT,
        "num_batch": ONE_MODEL,
        "num_gpu": ONE_MODEL,
        "num_keep": Neutral(ANY, "it says what stays when a context is shifted, and none is"),
        "num_thread": ONE_MODEL,
        "numa": ONE_MODEL,
        "penalize_newline": Neutral((True,), "penalties count every token"),
        "tfs_z": Neutral((1,), "1 is what is always so; there is no tail-free sampling here"),
        "typical_p": Neutral((1,), "1 is what is always so; there is no typical sampling here"),
        "use_mlock": ONE_MODEL,
        "use_mmap": ONE_MODEL,
        "vocab_only": Neutral((False,), "the whole model is loaded"),
    }
