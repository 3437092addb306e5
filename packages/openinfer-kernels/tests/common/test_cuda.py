"""What only the CUDA module promises: captures, refusals, measured algorithms."""

import importlib.util
import json

import numpy as np
import pytest

from openinfer_kernels import ArrayMismatchError, DeviceUnavailableError, KernelBuildError, PagedCache
from openinfer_kernels.testing.paged import make_batch

BATCH = make_batch(1)
"""Products do not look at it."""


@pytest.fixture
def cuda(ops):
    if ops.name != "cuda":
        pytest.skip("of the CUDA module only")
    return ops


def test_without_cupy_the_error_says_what_to_install():
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("CuPy is installed here")
    with pytest.raises(DeviceUnavailableError, match=r"cupy.*\./run install --cuda13"):
        importlib.import_module("openinfer_kernels.cuda").CudaOps  # noqa: B018 - what a lookup raises


@pytest.mark.gpu
def test_device_that_is_not_there_raises(cuda):
    with pytest.raises(DeviceUnavailableError, match="GPU 99 was asked for"):
        type(cuda.device).open(99)


@pytest.mark.gpu
def test_arrays_that_a_kernel_would_misread_are_refused(cuda, activation):
    x, weight = activation(np.ones((4, 16), np.float32)), activation(np.ones((8, 16), np.float32))
    norm = activation(np.ones(16, np.float32))
    with pytest.raises(ArrayMismatchError, match="contiguous array of bfloat16 with 2 axes on the GPU, not float64"):
        cuda.rms_norm(cuda.upload(np.ones((4, 16))), norm, eps=1e-6)
    with pytest.raises(ArrayMismatchError, match="the residual must be a contiguous array of float32"):
        cuda.add_rms_norm(x, x, norm, eps=1e-6)
    with pytest.raises(ArrayMismatchError, match=r"not numpy\.ndarray"):
        cuda.linear(np.ones((4, 16), np.float32), weight, BATCH)
    with pytest.raises(ArrayMismatchError, match="strides"):
        cuda.linear(activation(np.ones((4, 32), np.float32))[:, ::2], weight, BATCH)
    with pytest.raises(ArrayMismatchError, match="inner size"):
        cuda.linear(activation(np.ones((4, 24), np.float32)), weight, BATCH)
    with pytest.raises(ArrayMismatchError, match="bias"):
        cuda.linear(x, weight, BATCH, norm)
    with pytest.raises(ArrayMismatchError, match="40000"):
        cuda.rms_norm(activation(np.ones((1, 40000), np.float32)), activation(np.ones(40000, np.float32)), eps=1e-6)


@pytest.mark.gpu
def test_captured_operators_replay_on_new_inputs(cuda, upload, activation, host, paged_case):
    """A layer without attention, captured once and replayed on other tokens, equals the same calls made one by one."""
    from openinfer_kernels import RopeParameters, rope_table
    from openinfer_kernels.cuda.common.libraries import cupy

    rng = np.random.default_rng(0)
    case = paged_case(rng, [(20, 1), (3, 1), (33, 1)], num_kv_heads=2, head_dim=128, block_tokens=16)
    table, down = activation(rng.normal(size=(50, 256)).astype(np.float32)), activation(np.eye(256, dtype=np.float32))
    qkv_proj = activation(rng.normal(size=(8 * 128, 256)).astype(np.float32) / 16)
    gate_up = activation(rng.normal(size=(512, 256)).astype(np.float32) / 16)
    norm, head_norm = activation(np.ones(256, np.float32)), activation(np.ones(128, np.float32))
    rope = upload(rope_table(RopeParameters(theta=1e4), head_dim=128, positions=64))
    ids, batch = cuda.zeros((3,), np.int32), upload(case.batch)

    def layer(cache):
        residual = cuda.residual_embedding(ids, table)
        x = cuda.rms_norm(residual, norm, eps=1e-6)
        q = cuda.qk_norm_rope_append(
            cuda.linear(x, qkv_proj, batch),
            q_norm=head_norm,
            k_norm=head_norm,
            eps=1e-6,
            rope=rope,
            cache=PagedCache(data=cache, layer=1),
            batch=batch,
        )
        x = cuda.linear(cuda.linear_swiglu(x, gate_up, batch), down, batch)
        return q, cuda.add_rms_norm(x, residual, norm, eps=1e-6), residual

    cupy.cuda.Device().synchronize()  # the stream does not wait for the one that made the inputs
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cache = activation(case.kv_cache)
        layer(cache)
        stream.begin_capture()
        outputs = layer(cache)
        graph = stream.end_capture()
        for tokens in ([1, 2, 3], [49, 0, 7]):
            ids.set(np.array(tokens, np.int32))
            expected_cache = activation(case.kv_cache)
            expected = [host(array) for array in layer(expected_cache)]
            cache.set(cuda.download(activation(case.kv_cache)))
            graph.launch()
            for array, other in zip(outputs, expected, strict=True):
                np.testing.assert_array_equal(host(array), other)
            np.testing.assert_array_equal(host(cache), host(expected_cache))


@pytest.mark.gpu
def test_tuning_keeps_its_choices_for_the_next_start(cuda, activation, host, tmp_path, monkeypatch):
    from openinfer_kernels.cuda.gemm.library_products import LibraryProducts

    monkeypatch.setenv("OPENINFER_CACHE_DIR", str(tmp_path))
    rng = np.random.default_rng(0)
    x, weight = (activation(rng.normal(size=(rows, 1024)).astype(np.float32)) for rows in (300, 512))

    def multiplied(products: LibraryProducts) -> np.ndarray:
        out = cuda.zeros((300, 512))
        products.multiply(x, weight, None, out)
        return host(out)

    first = LibraryProducts(cuda.device)
    untuned = multiplied(first)
    with first.tuning():
        tuned = multiplied(first)
    np.testing.assert_array_equal(multiplied(first), tuned)
    assert np.linalg.norm(tuned - untuned) < 5e-3 * np.linalg.norm(untuned)
    (file,) = tmp_path.glob("*/*.json")
    (key,) = json.loads(file.read_text())
    assert key.startswith("384 512 1024 ")
    second = LibraryProducts(cuda.device)
    np.testing.assert_array_equal(multiplied(second), tuned)
    before = file.read_bytes()
    with second.tuning():
        multiplied(second)
    assert file.read_bytes() == before
    first.close()
    second.close()
    file.write_text(json.dumps({key: "beef"}))
    with pytest.raises(KernelBuildError, match="delete it"):
        LibraryProducts(cuda.device)


@pytest.mark.gpu
def test_classes_of_tokens_cover_every_number_and_are_few(cuda):
    from openinfer_kernels.cuda.gemm.algorithms import class_of

    classes = [class_of(count) for count in range(1, 8193)]
    assert all(count <= found < count + 128 for count, found in enumerate(classes, 1))
    assert classes == sorted(classes)
    assert classes[0] == 1
    assert len(set(classes)) < 100
    assert all(class_of(found) == found for found in classes)


@pytest.mark.gpu
def test_linear_of_every_class_of_tokens_is_right(cuda, activation, host):
    """An algorithm that was recommended for a class must serve every number of tokens in it."""
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=(rows, 256)).astype(np.float32) for rows in (700, 136))
    x_device, weight_device = activation(x), activation(weight)
    expected = host(x_device).astype(np.float64) @ host(weight_device).astype(np.float64).T
    for count in (*range(1, 140), *range(150, 700, 23)):
        out = host(cuda.linear(x_device[:count], weight_device, BATCH))
        assert np.linalg.norm(out - expected[:count]) < 3e-3 * np.linalg.norm(expected[:count]), count
