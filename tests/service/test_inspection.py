"""Machine code and resources over REST."""

import pytest
from service_kit import Client, ClientMaker

from mlaprep.service import disassembler
from mlaprep.service.disassembler import find_nvdisasm
from mlaprep.service.errors import DisassemblerUnavailable, DisassemblyFailed
from mlaprep.service.problems import problem_of

KERNEL = "/v1/kernels/sm_100a/mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl"


@pytest.fixture
def built(client: Client) -> Client:
    try:
        find_nvdisasm()
    except DisassemblerUnavailable as error:
        pytest.skip(str(error))
    assert client.put(KERNEL).status_code == 201
    return client


def test_sass_is_plain_text_with_a_tag(built: Client) -> None:
    reply = built.get(f"{KERNEL}/sass")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.text.startswith("mla_prepare:\n")
    assert " LDG.E.128 " in reply.text
    assert " ACQBULK\n" in reply.text
    head = built.request("HEAD", f"{KERNEL}/sass")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["etag"] == reply.headers["etag"]
    again = built.get(f"{KERNEL}/sass", headers={"if-none-match": reply.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_resources_are_those_of_the_manifest(built: Client) -> None:
    manifest = built.get(KERNEL).json()["manifest"]
    reply = built.get(f"{KERNEL}/resources").json()
    for name in ("variant_id", "arch", "registers", "stack_bytes", "spill_stores", "spill_loads", "shared_bytes"):
        assert reply[name] == manifest[name]
    assert reply["digest"] == manifest["cubin_sha256"]
    assert sum(reply["kinds"].values()) == reply["instructions"] > 50


def test_several_at_once_are_all_answered(built: Client) -> None:
    replies = built.together([("GET", f"{KERNEL}/{what}") for what in ("sass", "resources") for _ in range(4)])
    assert [reply.status_code for reply in replies] == [200] * 8
    assert len({reply.text for reply in replies}) == 2


@pytest.mark.parametrize("what", ["sass", "resources"])
def test_nothing_is_built_for_a_look(client: Client, what: str) -> None:
    reply = client.get(f"{KERNEL}/{what}")
    assert (reply.status_code, reply.json()["type"]) == (404, "urn:mlaprep:problem:kernel-not-built")
    assert client.get(KERNEL).status_code == 404
    assert client.get(f"/v1/kernels/sm_12/none/{what}").status_code == 422
    assert client.get(f"{KERNEL}/{what}?full=1").status_code == 422


@pytest.mark.parametrize("what", ["sass", "resources"])
def test_without_nvdisasm_the_rest_goes_on(
    what: str, make_client: ClientMaker, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    client = make_client()
    assert client.put(KERNEL).status_code == 201
    monkeypatch.setattr(disassembler, "_wheel_files", lambda: iter(()))
    monkeypatch.setenv("PATH", str(tmp_path))
    reply = client.get(f"{KERNEL}/{what}")
    assert reply.status_code == 503
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.json()["type"] == "urn:mlaprep:problem:disassembler-unavailable"
    assert "mlaprep[inspect]" in reply.json()["detail"]
    assert client.get(f"{KERNEL}/source").status_code == 200


def test_a_failure_says_when_to_ask_again() -> None:
    problem = problem_of(DisassemblyFailed("nvdisasm passed its deadline of 30 s and was killed"))
    assert (problem.status, problem.slug) == (503, "disassembly-failed")
    assert "retry-after" in problem.headers
    assert "retry-after" not in problem_of(DisassemblerUnavailable("nvdisasm is not installed")).headers
