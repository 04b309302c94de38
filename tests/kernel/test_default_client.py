"""The client that prepare asks: the one it is given, or the one default client of the process."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from mlaprep.clients import dispatch, fused_prepare, prepare


@pytest.mark.parametrize("client", ["http://kernels:8400", "", 0, object()])
@pytest.mark.parametrize("entry", [prepare, fused_prepare])
def test_what_is_no_client_is_named(entry: Any, client: object) -> None:
    source = torch.zeros(2, 3, 48, dtype=torch.bfloat16)
    cache, loc = torch.full((4, 48), 7, dtype=torch.uint8), torch.arange(2)
    operands = (source[..., :32], source[..., 32:], source[:, 0, :32], source[:, 0, 32:], cache, loc)
    with pytest.raises(TypeError, match=f"client is a {type(client).__name__}"):
        entry(*operands, client=client)
    assert (cache == 7).all()


def test_threads_that_ask_first_share_one_default_client(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    class Slow:
        def __init__(self) -> None:
            made.append(self)
            time.sleep(0.05)

        def forget(self) -> None:
            pass

    monkeypatch.setattr("mlaprep.clients.client.KernelClient", Slow)
    monkeypatch.setattr(dispatch, "_default", dispatch._DefaultClient())
    with ThreadPoolExecutor(16) as pool:
        clients = set(pool.map(lambda _: dispatch.default_client(), range(16)))
    assert clients == set(made)
    assert len(made) == 1


def test_a_forked_child_makes_a_default_client_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where another thread was making the parent's at the moment of the fork."""
    monkeypatch.setattr(dispatch, "_default", dispatch._DefaultClient())
    own = dispatch.default_client()
    with dispatch._default._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                os._exit(0 if dispatch.default_client() is not own else 1)
            finally:
                os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert dispatch.default_client() is own
