"""What the tests of attention over a paged cache share."""

import numpy as np
import pytest

from openinfer_kernels import PagedCache

HEAD_DIMS = {"cpu": (1, 2, 5, 8, 16), "cuda": (64, 128, 256, 32)}
BLOCK_TOKENS = {"cpu": (1, 2, 3, 4, 16), "cuda": (16, 32, 64)}


@pytest.fixture(scope="session")
def bfloat16(ops) -> bool:
    return ops.name == "cuda"


@pytest.fixture(scope="session")
def head_dims(ops):
    """Head dimensions that the implementation has, odd ones as well where it has any."""
    return HEAD_DIMS[ops.name]


@pytest.fixture(scope="session")
def block_sizes(ops):
    """Tokens of a block that the implementation has."""
    return BLOCK_TOKENS[ops.name]


@pytest.fixture(scope="session")
def head_dim(ops):
    """The head dimension that a test means, or the next one that the implementation has."""
    return lambda wanted: wanted if ops.name == "cpu" else next(d for d in HEAD_DIMS["cuda"] if d >= wanted)


@pytest.fixture(scope="session")
def block_tokens(ops):
    """The tokens of a block that a test means, or the next number that the implementation has."""
    return lambda wanted: wanted if ops.name == "cpu" else next(b for b in BLOCK_TOKENS["cuda"] if b >= wanted)


@pytest.fixture(scope="session")
def prepared(paged_case, rounded):
    """Builds queries and a case as `paged_case` does, all values as the compute dtype holds them."""

    def build(rng, rows, *, num_heads, num_kv_heads, head_dim, block_tokens, num_layers=2):
        shape = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_tokens": block_tokens}
        case = paged_case(rng, rows, **shape, num_layers=num_layers)
        case.contexts = [rounded(context) for context in case.contexts]
        q = rounded(rng.normal(size=(case.num_tokens, num_heads, head_dim)).astype(np.float32))
        return q, case

    return build


@pytest.fixture(scope="session")
def check(bfloat16):
    """Equality with an expectation. BF16 rounds weights and results: 2e-3 in norm, and more where values cancel."""

    def compare(out, expected, *, rtol=1e-4, atol=1e-5):
        if not bfloat16:
            np.testing.assert_allclose(out, expected, rtol=rtol, atol=atol)
            return
        np.testing.assert_allclose(out, expected, rtol=2**-6, atol=2e-2)
        assert np.linalg.norm(out - expected) < 6e-3 * np.linalg.norm(expected)

    return compare


@pytest.fixture(scope="session")
def run(ops, upload, activation, host):
    def attend(q, case, *, layer, scale, sinks=None, **asked):
        if sinks is not None:
            asked["sinks"] = upload(sinks)
        cache = PagedCache(data=activation(case.kv_cache), layer=layer)
        return host(ops.paged_attention(activation(q), cache, batch=upload(case.batch), scale=scale, **asked))

    return attend
