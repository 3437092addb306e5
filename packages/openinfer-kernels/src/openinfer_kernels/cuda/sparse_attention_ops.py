"""`CudaSparseAttentionOps`: attention over windows and compressed entries, and hyper-connections, on a GPU."""

from openinfer_kernels.missing import missing_on_gpu


class CudaSparseAttentionOps:
    """`openinfer_kernels.ops.SparseAttentionOps` and `HyperConnectionOps`; none has a kernel so far."""

    norm_rope_tail = missing_on_gpu("norm_rope_tail")
    rope_tail = missing_on_gpu("rope_tail")
    compress_windows = missing_on_gpu("compress_windows")
    compress_overlapping_windows = missing_on_gpu("compress_overlapping_windows")
    index_scores = missing_on_gpu("index_scores")
    select_entries = missing_on_gpu("select_entries")
    window_attention = missing_on_gpu("window_attention")
    grouped_linear = missing_on_gpu("grouped_linear")
    hyper_streams = missing_on_gpu("hyper_streams")
    hyper_read = missing_on_gpu("hyper_read")
    hyper_write = missing_on_gpu("hyper_write")
    hyper_head = missing_on_gpu("hyper_head")
