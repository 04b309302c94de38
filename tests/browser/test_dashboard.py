"""The dashboard in a real browser: what people read, filter, start and watch there."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from browser.pages import PAGES, VARIANT
from playwright.sync_api import Page, expect

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
