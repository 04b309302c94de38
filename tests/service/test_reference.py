"""/docs: a page that needs no network, no script and no other file, and has everything of the document."""

import html
import json
import re

from service_kit import Client

from mlaprep.service.routes.reference import reference_page


def test_it_loads_nothing_and_runs_nothing(client: Client) -> None:
    reply = client.get("/docs")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["content-security-policy"].startswith("default-src 'none'")
    page = reply.text
    assert not re.search(r"<script|<iframe|<img|javascript:|@import|url\(", page)
    assert set(re.findall(r'(?:href|src)="([^"#][^"]*)"', page)) == {"/openapi.json", "data:,"}
    assert "://" not in re.sub(r"<pre.*?</pre>", "", page, flags=re.DOTALL)
    assert "prefers-color-scheme: dark" in page
    for elsewhere in ("/redoc", "/docs/oauth2-redirect"):
        assert client.get(elsewhere).status_code == 404


def test_it_has_every_call_parameter_reply_and_schema(client: Client) -> None:
    page = html.unescape(client.get("/docs").text)
    document = client.get("/openapi.json").json()
    for path, item in document["paths"].items():
        for method, operation in item.items():
            section = page.partition(f'<details id="{operation["operationId"]}"')[2].partition("<details id=")[0]
            assert f"{method.upper()}</span> <code>{path}</code>" in section
            assert operation["summary"] in section
            for parameter in operation.get("parameters", ()):
                assert f"<code>{parameter['name']}</code>" in section
                assert parameter["description"] in section
            for status, reply in operation["responses"].items():
                assert f"<code>{status}</code> {reply['description']}" in section
    body = document["paths"]["/v1/kernels/{arch}/{variant_id}"]["put"]["requestBody"]["content"]["application/json"]
    assert json.dumps(body["example"], indent=2) in page
    for name in document["components"]["schemas"]:
        assert f'id="schema-{name}"' in page
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(re.findall(r'id="([^"]+)"', page))


def test_what_a_document_says_is_text_and_no_markup() -> None:
    hostile = '<b onclick="x">&'
    document = {
        "info": {"title": hostile, "version": "1", "description": hostile},
        "paths": {
            "/x": {"get": {"operationId": "x", "summary": hostile, "description": hostile, "responses": {}}},
        },
    }
    page = reference_page(document)
    assert "<b " not in page
    assert page.count("&lt;b onclick=&#34;x&#34;&gt;&amp;") >= 4


def test_every_query_parameter_and_health_reply_shows_an_example(client: Client) -> None:
    document = client.get("/openapi.json").json()
    for path, item in document["paths"].items():
        for operation in item.values():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "query" and parameter["name"] != "cursor":
                    assert parameter["example"] is not None, (path, parameter["name"])
    page = html.unescape(client.get("/docs").text)
    for words in ('"status": "ok"', '"nvrtc_version": "12.9.86"', '"quarantined": 0', '"compiles": 2'):
        assert words in page
