"""One service and one browser for the tests of a module, and screenshots of what they see.

The service has a compiler; its cache holds one model's kernels and it knows of some misses. Screenshots go to
``.screenshots/`` in the repository, which git ignores: people look at them, no test does.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from browser.pages import LACKED, TOKEN, VARIANT
from playwright.sync_api import Browser, Page, sync_playwright
from service_kit import SERVE, Server, running_server, wait_for

WIDE, PHONE = {"width": 1280, "height": 860}, {"width": 360, "height": 780}
TAGS = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")

LATER_LINES = ".listing code > span:nth-child(n + 60)"
"""Of a listing; they are like those before, and to look at them all takes seconds."""

PageMaker = Callable[..., Page]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("browser"), MLAPREP_COMPILE_PROCESSES="1") as server:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            for arch in ("sm_90a", "sm_100a"):
                assert http.put(f"/v1/kernels/{arch}/{VARIANT}").status_code == 201
            assert http.get(f"/v1/kernels/sm_100a/{VARIANT}").status_code == 200
            lacked = [
                {"variant_id": LACKED, "arch": "sm_103a", "count": 412},
                {"variant_id": VARIANT, "arch": "sm_100a"},
            ]
            assert http.post("/v1/misses", json={"misses": lacked}).json()["recorded"] == 2
        yield server


@pytest.fixture(scope="module")
def broken_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service whose compile processes find no CuPy, and that asks for a token for everything."""
    child = "import sys; sys.modules['cupy'] = None; from mlaprep.service.compile_child import main; main(sys.argv[1:])"
    patch = (
        "import sys\nfrom mlaprep.service.compiler import Compiler\n"
        f"Compiler.__init__.__kwdefaults__['command'] = [sys.executable, '-c', {child!r}]\n"
    )
    folder = tmp_path_factory.mktemp("broken")
    settings = {"MLAPREP_TOKEN": TOKEN, "MLAPREP_READS_NEED_TOKEN": "on"}
    with running_server(folder, code=patch + SERVE, wait=False, **settings) as server:
        with httpx.Client(base_url=server.url) as http:
            wait_for(lambda: http.get("/readyz").json()["compiler"]["status"] == "unavailable", 30)
        yield server


# While it is open the thread has an event loop that runs, in which no other test could have one of its own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("needs chromium")
    with sync_playwright() as playwright:
        # The sandbox cannot be had as root, which CI is, and a container's shared memory is small; every page is ours.
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser, server: Server) -> Iterator[PageMaker]:
    """Opens a path in a context of its own. A page that logs an error, or loads from elsewhere, fails its test."""
    contexts, faults = [], []

    def open_page(path: str, *, url: str = server.url, phone: bool = False, dark: bool = False, **more: object) -> Page:
        context = browser.new_context(
            viewport=PHONE if phone else WIDE,  # type: ignore[arg-type]
            color_scheme="dark" if dark else "light",
            **more,  # type: ignore[arg-type]
        )
        contexts.append(context)
        context.set_default_timeout(15_000)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if "Content Security" in message.text else None)
        page.on("request", lambda request: None if request.url.startswith(url) else faults.append(request.url))
        page.goto(url + path)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture(scope="session")
def shots(root: Path) -> Path:
    folder = root / ".screenshots"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def violations() -> Callable[..., list[str]]:
    """What axe finds wrong with a page, a line each; by some rules, or by all of WCAG A and AA and good practice."""
    axe = Axe()

    def run(page: Page, *rules: str) -> list[str]:
        wanted = {"type": "rule", "values": list(rules)} if rules else {"type": "tag", "values": list(TAGS)}
        context = {"exclude": [[LATER_LINES]]}
        found = axe.run(page, context=context, options={"runOnly": wanted, "resultTypes": ["violations"]}).response[
            "violations"
        ]
        return [f"{each['id']}: {each['help']} {[node['html'][:160] for node in each['nodes']]}" for each in found]

    return run
