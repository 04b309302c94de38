"""Every page of the dashboard by a name for its screenshots, as the tests' service has it."""

VARIANT = "mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl"
LACKED = "mla_prepare-h16-r512-d64-bf16-fp8-interleaved-i64-pdl"
TOKEN = "a-token-of-these-tests"
PAGES = {
    "variants": "/?model=kimi-k3",
    "variant": f"/variants/{VARIANT}?arch=sm_100a",
    "source": f"/variants/{VARIANT}?arch=sm_100a&view=source",
    "sass": f"/variants/{VARIANT}?arch=sm_100a&view=sass",
    "unbuilt": f"/variants/{VARIANT}?arch=sm_121a",
    "warmups": "/warmups",
    "misses": "/misses",
    "status": "/status",
    "problem": "/?num_heads=900",
}
