"""Columns: the names under which contenders stand in a record, and which of them are peers."""

CHAIN, COMPILED, SGLANG_PDL, SGLANG_NOPDL = "chain", "compiled", "sglang_pdl", "sglang_nopdl"
VLLM_PDL, TRITON_PDL = "vllm_structure_pdl", "triton_pdl"
FLASHINFER_SCATTER, FLASHINFER_APPEND = "flashinfer_scatter_pdl", "flashinfer_append_pdl"
OURS_PDL, OURS_GENERAL_PDL, OURS_NOPDL = "ours_pdl", "ours_general_pdl", "ours_nopdl"
FLOOR_PDL, FLOOR_NOPDL, GRID_PDL = "floor_pdl", "floor_nopdl", "grid_pdl"

PEERS = (
    CHAIN, COMPILED, SGLANG_PDL, SGLANG_NOPDL, VLLM_PDL, TRITON_PDL, FLASHINFER_SCATTER, FLASHINFER_APPEND,
)  # fmt: skip
OURS = (OURS_PDL, OURS_GENERAL_PDL, OURS_NOPDL)

SHORT = {
    CHAIN: "chain",
    COMPILED: "compiled",
    SGLANG_PDL: "SGLang",
    SGLANG_NOPDL: "SGL -PDL",
    VLLM_PDL: "vLLM*",
    TRITON_PDL: "Triton",
    FLASHINFER_SCATTER: "FI+scat",
    FLASHINFER_APPEND: "FI app",
    OURS_PDL: "ours",
    OURS_GENERAL_PDL: "general",
    OURS_NOPDL: "our -PDL",
    FLOOR_PDL: "floor",
    FLOOR_NOPDL: "fl -PDL",
    GRID_PDL: "grid",
}
"""Heads of a printed table, in its order."""

PLAIN = (
    CHAIN, COMPILED, SGLANG_PDL, SGLANG_NOPDL, VLLM_PDL, TRITON_PDL, OURS_PDL, OURS_GENERAL_PDL, OURS_NOPDL,
    FLOOR_PDL, FLOOR_NOPDL, GRID_PDL,
)  # fmt: skip
ROPE = (
    FLASHINFER_SCATTER, FLASHINFER_APPEND, OURS_PDL, OURS_GENERAL_PDL, OURS_NOPDL, FLOOR_PDL, FLOOR_NOPDL, GRID_PDL,
)  # fmt: skip
