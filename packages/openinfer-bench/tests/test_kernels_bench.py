import dataclasses
import importlib.util

import pytest

from openinfer_bench.kernels import run
from openinfer_bench.kernels.cases import QWEN3_4B, Case, Filler, cases
from openinfer_bench.kernels.expert_cases import SHAPES, expert_cases
from openinfer_bench.kernels.report import Row, header, line
from openinfer_bench.kernels.sparse_cases import sparse_cases
from openinfer_bench.kernels.variant_cases import GEMMA_3_27B, GPT_OSS, variant_cases
from openinfer_kernels.cpu import CpuOps


def test_bench_without_a_gpu_says_so_in_one_line(capsys):
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("CuPy is installed: there may be a GPU")
    assert run([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("openinfer bench kernels: ")
    assert captured.err.count("\n") == 1
    assert "./run install --cuda13" in captured.err


def test_cases_cover_every_operator_that_computes():
    operators = {case.operator for case in cases(QWEN3_4B, tokens=[1, 1024], context=512)}
    assert operators == {
        "add_rms_norm",
        "embedding",
        "linear",
        "linear_swiglu",
        "logits",
        "logprobs",
        "paged_attention",
        "qk_norm_rope_append",
        "residual_embedding",
        "rms_norm",
        "sample",
    }


def test_cases_of_windows_and_streams_run_and_count_by_hand():
    made = {case.shape: case for case in sparse_cases(tokens=[2], context=1000) if case.operator == "window_attention"}
    keys = {"window": 128, "heavy": 128 + 7, "sparse": 128 + 250}
    for kind, count in keys.items():
        case = made[f"2 x 1 of 1000, {kind}"]
        assert case.flops == 2 * 4 * 64 * 512 * count
        assert case.bytes == 2 * 512 * 2 * (count + 2 * 64)
    fill = Filler(CpuOps())
    for case in sparse_cases(tokens=[2], context=40):
        case.prepare(CpuOps(), fill)()


def test_cases_of_windows_and_caps_count_what_a_window_reaches():
    made = {case.shape: case for case in variant_cases([GEMMA_3_27B], tokens=[2, 2000], context=300)}
    short, long = (made[f"Gemma-3 27B, 2 rows x 1 of {context}, window 1024"] for context in (300, 2400))
    assert short.bytes == 2 * 128 * (2 * 16 * 2 * 300 + 2 * 32 * 2)
    assert long.bytes == 2 * 128 * (2 * 16 * 2 * 1024 + 2 * 32 * 2)
    assert long.flops == 4 * 32 * 128 * 2 * 1024
    prompt = made["Gemma-3 27B, 1 rows x 2000 of 2000, window 1024"]
    assert prompt.flops == 4 * 32 * 128 * (sum(range(1, 1025)) + 976 * 1024)
    assert prompt.bytes == 2 * 128 * (2 * 16 * 2000 + 2 * 32 * 2000)


def test_cases_of_windows_and_caps_run():
    fill = Filler(CpuOps())
    for case in variant_cases([GPT_OSS], tokens=[2], context=20):
        case.prepare(CpuOps(), fill)()


def find(operator: str, shape: str, **options) -> Case:
    return next(case for case in cases(QWEN3_4B, **options) if case.operator == operator and case.shape == shape)


def test_case_of_a_product_counts_bytes_and_flops_by_hand():
    case = find("linear", "2 x 9728 -> 2560", tokens=[2], context=1)
    assert case.bytes == 2 * (2 * 9728 + 2560 * 9728 + 2 * 2560)
    assert case.flops == 2 * 2 * 9728 * 2560


def test_case_of_attention_counts_bytes_and_flops_by_hand():
    decode = find("paged_attention", "3 rows x 1 of 100", tokens=[3], context=100)
    assert decode.bytes == 2 * (3 * 100 * 2 * 8 * 128 + 2 * 3 * 32 * 128)
    assert decode.flops == 3 * 100 * 32 * 128 * 4
    prompt = find("paged_attention", "1 rows x 300 of 300", tokens=[300], context=1)
    assert prompt.flops == sum(range(1, 301)) * 32 * 128 * 4


@pytest.mark.parametrize(("tflops", "floor_us"), [(1.0, 50.0), (100.0, 2.0)])
def test_row_has_the_floor_of_the_unit_that_is_slower(tflops, floor_us):
    case = Case(operator="x", shape="y", tokens=1, bytes=4_000_000, flops=50_000_000, prepare=lambda ops, fill: list)
    row = Row.of(case, time_s=100e-6, tbytes=2.0, tflops=tflops)
    assert row.floor_us == pytest.approx(floor_us)
    assert row.as_json()["roofline"] == pytest.approx(floor_us / 100)
    assert len(line(row)) == len(header())
    assert line(row).split()[-2:] == ["0.04", "0.5"]


def test_experts_count_the_bytes_of_those_that_were_hit():
    lite = next(case for case in expert_cases(SHAPES, tokens=[1]) if case.operator == "experts")
    assert lite.shape == "V2-Lite BF16: 1, 6.0 hit"
    assert lite.bytes == 6 * 3 * 2048 * 1408 * 2 + 2048 * 6
    assert lite.flops == 6 * 2 * 3 * 2048 * 1408
    assert all(len(case.shape) <= 30 for case in expert_cases(SHAPES, tokens=[8192]))
    eighth = [case for case in expert_cases(SHAPES[1:2], tokens=[64]) if case.operator == "experts"]
    assert 0.7 < eighth[0].bytes / (48 * (1 - (1 - 8 / 384) ** 64) * 3 * 7168 * 2048 * 4.5 / 8) < 1.3


def test_cases_of_experts_run_on_the_cpu():
    small = [dataclasses.replace(each, h=256, f=128, num_experts=16, num_local=8) for each in SHAPES]
    for case in expert_cases(small, tokens=[3]):
        case.prepare(CpuOps(), Filler(CpuOps()))()
