"""Mixtures of experts: `csrc/moe/experts.cu` plans and combines, `grouped_gemm.py` multiplies. No host ever counts."""

import ctypes

import numpy as np

from openinfer_kernels.cuda.common.arrays import fits_vectors, require
from openinfer_kernels.cuda.common.device import Device
from openinfer_kernels.cuda.common.libraries import bfloat16, cupy
from openinfer_kernels.cuda.gemm.grouped_gemm import Epilogue, GroupedGemm, Plan
from openinfer_kernels.cuda.gemm.grouped_gemm_hopper import GroupedGemmHopper
from openinfer_kernels.cuda.lowbit.lowbit_experts import LowbitExperts
from openinfer_kernels.cuda.lowbit.lowbit_experts import tile_tokens as lowbit_tile_tokens
from openinfer_kernels.cuda.lowbit.lowbit_tiles import TiledWeight
from openinfer_kernels.errors import ArrayMismatchError
from openinfer_kernels.ops import Array, ExpertChoice, LinearWeight, QuantisedWeight

_MOST_EXPERTS = 1024
"""And threads of a plan, of which each has an expert and some choices."""
_THREADS = 256
_WARP = 32
_LINE_UP_BLOCKS = 16
"""That copy the tokens of one tile."""
_WIDTH = 8
"""Values of a thread."""
_QUANTISED_WIDTH = 32
"""What the inner size of a quantised weight is a multiple of."""
_FLOAT32, _INT32 = np.dtype(np.float32), np.dtype(np.int32)


class Experts:
    """The experts of one device, and what goes with them."""

    def __init__(self, device: Device, gemm: GroupedGemm, lowbit: LowbitExperts | None = None) -> None:
        """`lowbit` multiplies quantised experts in tiles; None: there are none in tiles."""
        self._gemm = gemm
        self._lowbit = lowbit
        self._hopper = GroupedGemmHopper(device)
        self._line_up = device.kernel("experts", "permute_tokens")
        self._plan = device.kernel("experts", "plan_experts")
        self._combine = device.kernel("experts", "combine_experts")
        self._swiglu_vectors = device.kernel("experts", "limited_swiglu_vectors")
        self._swiglu_singles = device.kernel("experts", "limited_swiglu_singles")

    def experts(
        self,
        x: Array,
        choice: ExpertChoice,
        gate_up: LinearWeight,
        down: LinearWeight,
        *,
        first_expert: int = 0,
        limit: float | None = None,
        shared: Array | None = None,
    ) -> Array:
        """At most 1,024 experts of this rank, `h` and `F` multiples of 8 (32 with four bits)."""
        _check(x, choice, gate_up, down, shared)
        (num_tokens, h), per_token, num_experts = x.shape, choice.ids.shape[1], gate_up.shape[0]
        out = cupy.empty((num_tokens, h), np.float32)
        if not num_tokens:
            return out
        num_slots = num_tokens * per_token
        in_tiles = isinstance(gate_up, TiledWeight) and isinstance(down, TiledWeight)
        plan = self._planned(choice, num_experts, first_expert, in_tiles=in_tiles)
        gated = cupy.empty((num_slots, gate_up.shape[1] // 2), bfloat16)
        products = cupy.empty((num_slots, h), bfloat16)
        # Down's products are written last: until then their array may hold the tokens in the plan's order.
        self._gate(x, gate_up, gated, plan, scratch=products, limit=float("inf") if limit is None else limit)
        if self._lowbit is not None and isinstance(down, TiledWeight):
            self._lowbit.multiply(gated, down, products, epilogue=Epilogue.STORE, plan=plan)
        elif not isinstance(down, QuantisedWeight) and self._hopper.serves(down, plan, limit=float("inf")):
            self._hopper.multiply(gated, down, products, epilogue=Epilogue.STORE, plan=plan)
        else:
            self._gemm.multiply(gated, down, products, epilogue=Epilogue.STORE, plan=plan)
        arguments = [products, plan.positions, choice.weights, shared, out, ctypes.c_int(h), ctypes.c_int(per_token)]
        threads = min(_THREADS, -(-h // _WIDTH // _WARP) * _WARP)
        self._combine((num_tokens, -(-h // (_WIDTH * threads)), 1), (threads, 1, 1), arguments, overlap=True)
        return out

    def swiglu(self, gate_up: Array, *, limit: float | None = None) -> Array:
        require(gate_up, bfloat16, ndim=2, what="gate and up")
        num_tokens, width = len(gate_up), gate_up.shape[1] // 2
        out = cupy.empty((num_tokens, width), bfloat16)
        vectors = width % _WIDTH == 0 and fits_vectors(gate_up)
        kernel, accesses = (self._swiglu_vectors, width // _WIDTH) if vectors else (self._swiglu_singles, width)
        arguments = [gate_up, out, ctypes.c_int(width), ctypes.c_float(float("inf") if limit is None else limit)]
        if out.size:
            kernel((num_tokens, -(-accesses // _THREADS), 1), (_THREADS, 1, 1), arguments, overlap=True)
        return out

    def _gate(self, x: Array, gate_up: LinearWeight, gated: Array, plan: Plan, *, scratch: Array, limit: float) -> None:
        """Writes `silu(gate x) * up x` of every position into `gated`; `scratch [positions, h]` may be overwritten."""
        if self._lowbit is not None and isinstance(gate_up, TiledWeight):
            self._put_in_order(x, scratch, plan)
            self._lowbit.multiply(
                scratch, gate_up, gated, epilogue=Epilogue.SWIGLU, plan=plan, weights_first=False, limit=limit
            )
            return
        if isinstance(gate_up, QuantisedWeight) or not self._hopper.serves(gate_up, plan, limit=limit):
            # The plan says which weights are read and is made just ahead on the stream, so weights cannot come first.
            gemm, epilogue = self._gemm, Epilogue.SWIGLU
            gemm.multiply(
                x,
                gate_up,
                gated,
                epilogue=epilogue,
                plan=plan,
                sorted_tokens=plan.sorted_tokens,
                weights_first=False,
                limit=limit,
            )
            return
        self._put_in_order(x, scratch, plan)
        self._hopper.multiply(scratch, gate_up, gated, epilogue=Epilogue.SWIGLU, plan=plan)

    def _put_in_order(self, x: Array, out: Array, plan: Plan) -> None:
        """Writes the tokens of all positions of a plan, `out [positions, h]`."""
        arguments = [x, plan.sorted_tokens, plan.tiles, out, ctypes.c_int(x.shape[1])]
        blocks = min(_LINE_UP_BLOCKS, plan.tile_tokens)
        self._line_up((len(plan.tiles), blocks, 1), (_THREADS, 1, 1), arguments, overlap=True)

    def _planned(self, choice: ExpertChoice, num_experts: int, first_expert: int, *, in_tiles: bool) -> Plan:
        """The choices of each expert in tiles, as many as there may be at most."""
        ids, num_slots = choice.ids, choice.ids.size
        choose = lowbit_tile_tokens if in_tiles else self._gemm.tile_tokens
        tokens = choose(num_slots, choice.num_experts or num_experts)
        # The host does not know the choices: there are tiles for the worst case, and blocks without one end at once.
        most_tiles = min(num_experts, num_slots) + num_slots // tokens
        tiles = cupy.empty((most_tiles, 4), np.int32)
        sorted_tokens, positions = cupy.empty(num_slots, np.int32), cupy.empty(num_slots, np.int32)
        sizes = [ctypes.c_int(size) for size in (num_slots, ids.shape[1], first_expert, num_experts, tokens)]
        arguments = [ids, *sizes, tiles, ctypes.c_int(most_tiles), sorted_tokens, positions]
        threads = min(_MOST_EXPERTS, -(-max(num_experts, num_slots) // _WARP) * _WARP)
        self._plan((1, 1, 1), (threads, 1, 1), arguments, overlap=True)
        of_layer = choice.num_experts or num_experts
        # By this number a kernel is chosen: the worst case would say that the device is busy when it is idle.
        expected = max(1, min(of_layer, num_slots) * num_experts // of_layer)
        return Plan(
            tiles=tiles,
            sorted_tokens=sorted_tokens,
            positions=positions,
            tile_tokens=tokens,
            expected_tiles=expected,
            expected_tokens=-(-num_slots // min(of_layer, num_slots)),
        )


def check_weight(weight: LinearWeight, *, ndim: int, what: str) -> None:
    """Refuses a weight that the products do not take."""
    inner = _QUANTISED_WIDTH if isinstance(weight, QuantisedWeight) else _WIDTH
    if not isinstance(weight, QuantisedWeight):
        require(weight, bfloat16, ndim=ndim, what=what)
    rows, columns = weight.shape[-2:]
    if len(weight.shape) != ndim or columns % inner or rows % _WIDTH or not rows * columns:
        raise ArrayMismatchError(
            f"{what} {list(weight.shape)} has no kernel: {ndim} axes, the last two multiples of {_WIDTH} and {inner}"
        )


def _check(x: Array, choice: ExpertChoice, gate_up: LinearWeight, down: LinearWeight, shared: Array | None) -> None:
    require(x, bfloat16, ndim=2, what="x")
    require(choice.ids, _INT32, ndim=2, what="the ids of experts")
    require(choice.weights, _FLOAT32, ndim=2, what="the weights of experts")
    check_weight(gate_up, ndim=3, what="gate and up")
    check_weight(down, ndim=3, what="down")
    if shared is not None:
        require(shared, bfloat16, ndim=2, what="what shared experts made")
    (num_tokens, h), (num_experts, rows, _) = x.shape, gate_up.shape
    fits = (
        gate_up.shape[2] == h
        and down.shape == (num_experts, h, rows // 2)
        and choice.ids.shape == choice.weights.shape
        and len(choice.ids) == num_tokens
        and (shared is None or shared.shape == x.shape)
        and num_experts <= _MOST_EXPERTS
        and rows % (2 * _WIDTH) == 0
        and fits_vectors(x, *(() if shared is None else (shared,)))
    )
    if not fits:
        raise ArrayMismatchError(
            f"x {x.shape}, choices {choice.ids.shape}, gate and up {list(gate_up.shape)}, down {list(down.shape)} do "
            f"not fit each other, or are too many: at most {_MOST_EXPERTS} experts"
        )
