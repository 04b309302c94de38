"""The dashboard in a real browser: what people read, filter, start and watch there."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from browser.pages import LACKED, PAGES, TOKEN, VARIANT
from playwright.sync_api import Page, expect
from service_kit import Server

SHORT = VARIANT.removeprefix("mla_prepare-")


@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing_and_a_phone_shows_all(
    open_page: Callable[..., Page], violations: Callable[..., list[str]], shots: Path, name: str
) -> None:
    """In light and dark colours and at the width of a phone, where nothing is to be scrolled sideways."""
    page = open_page(PAGES[name])
    page.screenshot(path=shots / f"{name}-light.png")
    assert violations(page) == []
    page.emulate_media(color_scheme="dark")
    page.screenshot(path=shots / f"{name}-dark.png")
    assert violations(page, "color-contrast") == []
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 360, "height": 780})
    page.screenshot(path=shots / f"{name}-phone.png")
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_the_matrix_shows_states_and_figures(open_page: Callable[..., Page]) -> None:
    page = open_page("/")
    expect(page).to_have_title("Variants · mlaprep")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name=SHORT, exact=True))
    built = row.get_by_role("cell").filter(has_text="built")
    expect(built).to_have_count(2)
    expect(row.get_by_role("cell").filter(has_text="missing")).to_have_count(2)
    assert re.search(r"\d\.\d KiB", row.inner_text())


def test_filters_make_the_url_and_the_url_makes_the_page(open_page: Callable[..., Page]) -> None:
    page = open_page("/")
    page.get_by_label("Model").select_option("kimi-k3")
    page.wait_for_url("**/?model=kimi-k3")
    expect(page.get_by_role("status")).to_have_text("5 variants, filtered")
    page.get_by_label("Heads on a rank").fill("12")
    page.get_by_role("button", name="Apply").click()
    page.wait_for_url("**/?model=kimi-k3&num_heads=12")
    page.get_by_label("State").select_option("built")
    page.wait_for_url("**/?model=kimi-k3&state=built&num_heads=12")
    address = page.url
    expect(page.locator("tbody tr")).to_have_count(1)
    again = open_page(address.removeprefix(address[: address.index("/?")]))
    expect(again.get_by_label("Model")).to_have_value("kimi-k3")
    expect(again.locator("tbody tr")).to_have_count(1)
    again.get_by_role("link", name="Reset").click()
    expect(again.get_by_role("status")).to_have_text(re.compile(r"^\d+ variants$"))


def test_a_sort_is_in_the_url_too(open_page: Callable[..., Page]) -> None:
    page = open_page("/")
    page.get_by_label("Order").select_option("most hits first")
    page.wait_for_url("**/?sort=hits")
    expect(page.locator("tbody th a").first).to_have_text(SHORT)
    page.get_by_label("Order").select_option("by shape")
    page.wait_for_url("**/")
    expect(page.locator("tbody th a").first).to_contain_text("h1-")


def test_pages_follow_one_another(open_page: Callable[..., Page]) -> None:
    page = open_page("/?model=kimi-k3&limit=2")
    seen = page.locator("tbody th a").all_inner_texts()
    while page.get_by_role("link", name="Next 2").count():
        page.get_by_role("link", name="Next 2").click()
        seen += page.locator("tbody th a").all_inner_texts()
    assert len(seen) == len(set(seen)) == 5
    page.get_by_role("link", name="First page").click()
    page.wait_for_url("**/?model=kimi-k3&limit=2")


def test_reading_needs_no_script(open_page: Callable[..., Page]) -> None:
    page = open_page("/", java_script_enabled=False)
    page.get_by_label("Model").select_option("kimi-k3")
    page.get_by_role("button", name="Apply").click()
    page.wait_for_url("**/?model=kimi-k3")  # without the fields that are empty
    expect(page.get_by_role("status")).to_have_text("5 variants, filtered")
    expect(page.locator("#theme")).to_be_hidden()


def test_every_page_reads_without_script(open_page: Callable[..., Page], server: Server) -> None:
    page = open_page("/", java_script_enabled=False)
    for path in PAGES.values():
        page.goto(server.url + path)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        expect(page.get_by_role("navigation", name="Dashboard")).to_be_visible()
        assert page.locator(".needs-script:visible").count() == 0
    page.goto(f"{server.url}/warmups")
    expect(page.get_by_text("Without JavaScript, start it from a terminal")).to_be_visible()


def test_a_keyboard_is_enough(open_page: Callable[..., Page]) -> None:
    page = open_page("/")
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to content")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.get_by_label("Model")).to_be_focused()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_colours_are_the_systems_until_chosen(open_page: Callable[..., Page]) -> None:
    page = open_page("/", dark=True)
    back = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(back)
    page.get_by_role("button", name="Colours: as the system").click()
    light = page.evaluate(back)
    assert light == "rgb(255, 255, 255)" != dark
    page.reload()
    assert page.evaluate(back) == light
    page.get_by_role("button", name="Colours: light").click()
    assert page.evaluate(back) == dark


def test_errors_are_pages(open_page: Callable[..., Page]) -> None:
    page = open_page("/?num_heads=900&bogus=1")
    expect(page.get_by_role("heading", level=1)).to_have_text("The request has values that are not allowed")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.get_by_role("link", name="Back").click()
    expect(page).to_have_title("Variants · mlaprep")


def test_a_variant_shows_its_kernel_and_the_lines_that_load_it(open_page: Callable[..., Page], server: Server) -> None:
    page = open_page(f"/variants/{VARIANT}?arch=sm_100a", permissions=["clipboard-read", "clipboard-write"])
    expect(page.get_by_role("heading", level=1)).to_have_text(VARIANT)
    page.get_by_role("button", name="Copy the lines that load it").click()
    assert page.evaluate("navigator.clipboard.readText()") == (
        "from mlaprep.clients import KernelClient\n"
        f'handle = KernelClient("{server.url}").load("{VARIANT}", arch="sm_100a")'
    )
    page.get_by_role("link", name="Source", exact=True).click()
    source = page.get_by_role("region", name="Source")
    text = page.request.get(f"{server.url}/v1/kernels/sm_100a/{VARIANT}/source").text()
    assert source.inner_text().rstrip() == text.rstrip()
    page.get_by_role("link", name="SASS").click()
    expect(page.get_by_role("region", name="Machine code")).to_contain_text("EXIT")
    expect(page.get_by_text("global stores")).to_be_visible()
    page.get_by_role("link", name="sm_90a").click()
    page.wait_for_url("**arch=sm_90a&view=sass")
    expect(page.get_by_role("region", name="Machine code")).to_contain_text("EXIT")


def test_looking_at_a_kernel_counts_as_no_hit(open_page: Callable[..., Page], server: Server) -> None:
    page = open_page("/misses")

    def hits() -> int:
        cells = page.request.get(f"{server.url}/v1/variants/{VARIANT}").json()["archs"]
        return sum(cell["hits"] for cell in cells)

    before = hits()
    for view in ("", "&view=source", "&view=sass"):
        page.goto(f"{server.url}/variants/{VARIANT}?arch=sm_100a{view}")
    assert hits() == before > 0


def test_a_kernel_that_is_lacking_can_be_built_from_its_page(open_page: Callable[..., Page]) -> None:
    page = open_page(f"/variants/{VARIANT}?arch=sm_100f")
    expect(page.get_by_role("heading", name="sm_100f: not built")).to_be_visible()
    page.get_by_role("button", name="Build it").click()
    page.wait_for_url("**/warmups/*")
    expect(page.get_by_role("status")).to_have_text("done")
    page.get_by_role("link", name=SHORT).click()
    expect(page.get_by_role("heading", name="Load it")).to_be_visible()


def test_a_warm_up_is_started_and_watched_to_its_end(
    open_page: Callable[..., Page], violations: Callable[..., list[str]], shots: Path
) -> None:
    page = open_page("/warmups")
    page.get_by_label("minicpm3-4b").check()
    for arch in ("sm_90a", "sm_103a", "sm_120a"):
        page.get_by_label(arch, exact=True).uncheck()
    command = page.locator("[data-command]")
    expect(command).to_contain_text("mlaprep warmup --preset minicpm3-4b --tp all --arch sm_100a --url http://")
    page.get_by_role("button", name="Start warm-up").click()
    page.wait_for_url("**/warmups/*")
    bar = page.get_by_role("progressbar")
    page.screenshot(path=shots / "warmup-running.png")
    expect(page.get_by_role("status")).to_have_text("done", timeout=30_000)
    expect(bar).to_have_attribute("aria-valuenow", "4")
    assert float(bar.locator("[data-bar=built]").get_attribute("width") or 0) == 100
    expect(page.get_by_role("listitem").filter(has_text="built").first).to_have_text("4 built")
    assert violations(page) == []
    page.get_by_role("link", name="Warm-ups").click()
    expect(page.get_by_role("progressbar").first).to_have_attribute("aria-valuenow", "4")


def test_a_bar_moves_while_its_job_goes_on_and_a_job_can_be_cancelled(open_page: Callable[..., Page]) -> None:
    page = open_page("/warmups")
    for model in ("deepseek-v3.2", "glm-4.7-flash", "mistral-small-4", "kimi-k2"):
        page.get_by_label(model, exact=True).check()
    page.get_by_role("button", name="Start warm-up").click()
    page.wait_for_url("**/warmups/*")
    expect(page.get_by_role("status")).to_have_text("running")
    page.evaluate("window.page_is_the_same = true")
    expect(page.get_by_role("progressbar")).not_to_have_attribute("aria-valuenow", "0")
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("status")).to_have_text("cancelled")
    page.get_by_role("button", name="Run again for what is left").click()
    expect(page.get_by_role("status")).to_have_text(re.compile("queued|running"))
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("status")).to_have_text("cancelled")
    assert page.evaluate("window.page_is_the_same")


def test_a_plan_that_is_refused_says_why(open_page: Callable[..., Page], violations: Callable[..., list[str]]) -> None:
    page = open_page("/warmups")
    page.get_by_label("glm-4.7-flash").check()
    page.get_by_label("Tensor-parallel degree").select_option("16")
    page.get_by_role("button", name="Start warm-up").click()
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("The plan is not valid, and nothing was started")
    expect(alert.get_by_role("listitem")).to_contain_text("kernels.0.tp")
    assert violations(page) == []


def test_what_workers_lacked_is_warmed_up(open_page: Callable[..., Page]) -> None:
    page = open_page("/misses")
    row = page.get_by_role("row").filter(has_text=LACKED.removeprefix("mla_prepare-"))
    expect(row).to_contain_text("412")
    page.get_by_role("button", name="Warm up what is missing").click()
    page.wait_for_url("**/warmups/*")
    expect(page.get_by_role("status")).to_have_text("done")
    page.get_by_role("link", name="Misses").click()
    expect(row.get_by_text("built", exact=True)).to_be_visible()


def test_where_reading_takes_a_token_a_page_asks_for_it_once(
    open_page: Callable[..., Page], broken_server: Server, violations: Callable[..., list[str]]
) -> None:
    page = open_page("/?model=kimi-k3", url=broken_server.url)
    expect(page.get_by_role("heading", level=1)).to_contain_text("token")
    assert violations(page) == []
    page.get_by_label("Token").fill("another-token")
    page.get_by_role("button", name="Show the page").click()
    expect(page.get_by_role("alert")).to_contain_text("does not let you read this")
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Show the page").click()
    expect(page.locator("tbody tr")).to_have_count(5)
    expect(page).to_have_title("Variants · mlaprep")
    page.get_by_role("link", name=SHORT).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(VARIANT)
    page.get_by_role("button", name="Colours: as the system").click()
    assert page.evaluate("JSON.stringify(localStorage)") == '{"theme":"light"}'
    assert page.context.cookies() == []


def test_without_a_compiler_every_page_says_so_and_a_job_lists_what_failed(
    open_page: Callable[..., Page], broken_server: Server, violations: Callable[..., list[str]], shots: Path
) -> None:
    page = open_page("/", url=broken_server.url)
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Show the page").click()
    expect(page.get_by_text("Not ready:")).to_be_visible()
    expect(page.get_by_text("cupy is missing or does not load")).to_be_visible()
    expect(page.get_by_text("None of these is built yet.")).to_be_visible()
    page.get_by_role("link", name="not ready").click()
    expect(page.locator("#status li.bad")).to_contain_text("no kernel can be built")
    assert violations(page) == []
    page.get_by_role("link", name="Warm-ups").click()
    expect(page.get_by_text("No warm-up has run on this cache yet.")).to_be_visible()
    page.evaluate("sessionStorage.clear()")
    page.get_by_label("kimi-k3").check()
    start = page.get_by_role("button", name="Start warm-up")
    start.click()
    expect(page.get_by_role("alert")).to_contain_text("token")
    token = page.get_by_label("Token")
    expect(token).to_be_focused()
    token.fill("")
    token.fill(TOKEN)
    start.click()
    page.wait_for_url("**/warmups/*")
    expect(page.get_by_role("status")).to_have_text("failed")
    failures = page.locator(".failures tbody tr")
    expect(failures).to_have_count(20)
    expect(failures.first).to_contain_text("cupy is missing")
    page.screenshot(path=shots / "warmup-failed.png")
    assert violations(page) == []
    page.set_viewport_size({"width": 360, "height": 780})
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_what_is_not_there_is_a_page(open_page: Callable[..., Page]) -> None:
    for path, told in (("/variants/none", "The kernel specification is not valid"), ("/warmups/0", "no such warm-up")):
        page = open_page(path)
        expect(page.get_by_role("heading", level=1)).to_contain_text(told)
        expect(page.get_by_role("navigation", name="Dashboard")).to_be_visible()
