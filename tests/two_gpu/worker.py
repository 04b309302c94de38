"""A worker process: loads a kernel on one device, calls it, and tells what that left on every device.

``python -m two_gpu.worker DEVICE`` prints one JSON object a stage and reads a line between two of them.
"""

import ctypes
import json
import sys
import time
from typing import Any

import torch
from two_gpu.batches import Batch, batch_spec

from mlaprep.clients import KernelClient, KernelHandle, prepare
from mlaprep.clients.dispatch import default_client


def contexts() -> list[bool]:
    """For every device that this process sees, whether its primary context is active here."""
    cuda = ctypes.CDLL("libcuda.so.1")
    count, flags = ctypes.c_int(), ctypes.c_uint()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
    found = []
    for ordinal in range(count.value):
        device, active = ctypes.c_int(), ctypes.c_int()
        assert cuda.cuDeviceGet(ctypes.byref(device), ordinal) == 0
        assert cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        found.append(bool(active.value))
    return found


def tell(**report: Any) -> None:
    print(json.dumps(report), flush=True)
    sys.stdin.readline()


def main(device: int) -> None:
    tell(stage="imported", contexts=contexts())
    started = time.monotonic()
    # The device is the argument alone: nothing here makes it current.
    with KernelClient() as client:
        handle = client.load(batch_spec(), device=device)
        ready_s, loaded = time.monotonic() - started, contexts()
        batch = Batch(torch.device("cuda", device))
        right = [batch.right(handle(*batch.operands()))]
        batch.cache.fill_(0x5A)
        right.append(batch.right(prepare(*batch.operands(), client=client)))
        called = contexts()
        tell(
            stage="called",
            ready_s=ready_s,
            loaded=loaded,
            contexts=called,
            right=right,
            compiled=client.stats().compiled,
            digest=handle.artifact.digest,
            current=torch.cuda.current_device(),
            reserved=[torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count())],
            uuid=str(torch.cuda.get_device_properties(device).uuid),
        )


def call_handle(handle: KernelHandle, device: int) -> dict[str, Any]:
    """For a spawned child: call a handle that was pickled, on a device that is not made current."""
    batch = Batch(torch.device("cuda", device))
    right = batch.right(handle(*batch.operands()))
    return {"right": right, "contexts": contexts(), "compiled": default_client().stats().compiled}


if __name__ == "__main__":
    main(int(sys.argv[1]))
