"""What a machine must have for the CUDA operators, and what is said where it has not: one sentence each.

Apart from the module that asks the driver, so that every sentence is tested where there is no GPU.
"""

from openinfer_kernels.errors import ArrayMismatchError, DeviceUnavailableError

OLDEST_CAPABILITY = (8, 0)
"""Ampere, the first with bfloat16 in its tensor cores."""
HEAD_DIMS = (32, 64, 128, 256)
"""Of attention."""
BLOCK_TOKENS = (16, 32, 64, 128, 256)
"""Tokens of a KV block, of attention."""
LATENT_ENTRY_DIM = 576
"""Of attention over latents: 512 values, and 64 of the key that all heads share."""
ENTRY_DIM = 512
"""Of compressed entries, and of the windows next to them."""
INDEX_DIM = 128
"""Of the index keys that entries are selected by."""
NO_DRIVER = "this machine has no NVIDIA driver: libcuda.so.1 cannot be loaded"
NO_GPU = "this machine has an NVIDIA driver but no GPU that it can use"


def require_driver(*, supported: int, needed: int) -> None:
    """Checks versions of CUDA as the driver's API numbers them: 13000 is 13.0.

    Args:
        supported: the newest that the driver supports.
        needed: that of the packages installed here.

    Raises:
        DeviceUnavailableError: the driver is older than the packages.
    """
    if supported // 1000 < needed // 1000:
        raise DeviceUnavailableError(
            f"the NVIDIA driver is too old: it supports CUDA {supported // 1000}.{supported % 1000 // 10}, "
            f"and the packages installed here need CUDA {needed // 1000}; "
            "update the driver, or make the environment anew with ./run install --fresh --cuda12"
        )


def require_index(index: int, *, count: int) -> None:
    """Checks the number of a GPU.

    Raises:
        DeviceUnavailableError: there is no such GPU.
    """
    if not 0 <= index < count:
        raise DeviceUnavailableError(f"GPU {index} was asked for; this machine has {count}, numbered from 0")


def require_capability(name: str, capability: tuple[int, int]) -> None:
    """Checks a GPU's compute capability.

    Raises:
        DeviceUnavailableError: it is too old.
    """
    if capability < OLDEST_CAPABILITY:
        raise DeviceUnavailableError(
            f"{name} has compute capability {_dotted(capability)}; "
            f"the operators need {_dotted(OLDEST_CAPABILITY)} (Ampere) or newer, for bfloat16"
        )


def require_attention(*, head_dim: int, block_tokens: int) -> None:
    """Checks the sizes that attention's kernels are compiled for.

    Raises:
        ArrayMismatchError: they serve no such head dimension, or no such blocks.
    """
    if head_dim not in HEAD_DIMS:
        raise ArrayMismatchError(f"attention over heads of {head_dim} values is not possible: one of {HEAD_DIMS}")
    if block_tokens not in BLOCK_TOKENS:
        raise ArrayMismatchError(f"blocks of {block_tokens} tokens are not possible: one of {BLOCK_TOKENS}")


def require_latents(*, entry_dim: int, block_tokens: int) -> None:
    """Checks the sizes of a cache that attention over latents has kernels for.

    Raises:
        ArrayMismatchError: they serve no such entries, or no such blocks.
    """
    if entry_dim != LATENT_ENTRY_DIM:
        raise ArrayMismatchError(
            f"attention over latents of {entry_dim} values with their key is not possible: {LATENT_ENTRY_DIM}, "
            "as every published model has them"
        )
    if block_tokens not in BLOCK_TOKENS:
        raise ArrayMismatchError(f"blocks of {block_tokens} tokens are not possible: one of {BLOCK_TOKENS}")


def require_entries(*, num_heads: int, entry_dim: int) -> None:
    """Checks the sizes of rows that stand for several tokens.

    Raises:
        ArrayMismatchError: no kernel serves them.
    """
    if num_heads != 1 or entry_dim not in (ENTRY_DIM, INDEX_DIM):
        raise ArrayMismatchError(
            f"compressed entries of {num_heads} x {entry_dim} values are not possible: one vector of {ENTRY_DIM}, or "
            f"an index key of {INDEX_DIM}, as every published model has them"
        )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
