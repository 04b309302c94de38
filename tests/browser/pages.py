"""Every page of the dashboard by a name for its screenshots, as the tests' service has it."""

VARIANT = "mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl"
PAGES = {
    "variants": "/?model=kimi-k3",
    "problem": "/?num_heads=900",
}
