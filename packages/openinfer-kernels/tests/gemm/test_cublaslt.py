"""Our layer over cuBLASLt: structures as the library has them, and refusals by their name."""

import numpy as np
import pytest

pytestmark = pytest.mark.gpu


def test_heuristic_result_is_as_long_as_the_librarys():
    from openinfer_kernels.cuda.gemm import cublaslt

    assert cublaslt.HEURISTIC_RESULT.itemsize == 96
    assert cublaslt.get_version() >= 120_000


def test_refused_call_is_named():
    from openinfer_kernels.cuda.gemm import cublaslt

    description, value = cublaslt.matmul_desc_create(68, 0), np.array(1, np.int32)
    cublaslt.matmul_desc_set_attribute(
        description, cublaslt.MatmulDescAttribute.TRANSA, value.ctypes.data, value.nbytes
    )
    with pytest.raises(cublaslt.CublasLtError, match="SetAttribute answered CUBLAS_STATUS_INVALID_VALUE"):
        cublaslt.matmul_desc_set_attribute(description, 99, value.ctypes.data, value.nbytes)
    cublaslt.matmul_desc_destroy(description)
