"""The page of a server: what it shows to whom, and how a browser shows it."""

import asyncio
import json
import re
import socket

import pytest
import uvicorn
from support.serve import browser
from support.serve.front import KEYS, Server, losses, run, step

from isoloss.tools.serve.front import page


def test_the_page_shows_the_owner_of_a_key_what_is_theirs(tmp_path):
    async def talk(server: Server):
        model = await server.client(rank=4)
        for seq in (1, 3):
            await server.result(await server.post("forward_backward", losses(model, seq)))
            await server.result(await server.post("optim_step", step(model, seq + 1)))
        path = await server.saved(model, 5, "<b>one")
        asked = await server.post("/", b"", method="GET")
        wrong = await server.post("/", b"key=tml-wrong")
        right = await server.post("/", f"key={KEYS[0]}".encode())
        pages = [(await server.post("/", b"", method="GET", cookie=f"isoloss_key={key}"))[1].decode() for key in KEYS]
        return model, path, asked, wrong, right, pages

    model, path, asked, wrong, right, (mine, of_another) = run(Server(tmp_path / "s"), talk)
    assert [status for status, _ in (asked, wrong, right)] == [401, 401, 303]
    assert b"none of the server" in wrong[1] and b"none of the server" not in asked[1]
    assert b"tml-" not in wrong[1]
    assert model in mine and path.replace("<", "&lt;").replace(">", "&gt;") in mine and "<polyline" in mine
    assert model not in of_another and "No training client yet" in of_another


def test_a_curve_goes_from_the_first_value_to_the_last():
    assert page.curve([1.0]) == ""
    assert page.curve([3.0, 1.0, 2.0]) == "2.0,2.0 80.0,34.0 158.0,18.0"
    assert page.curve([1.0, 1.0]) == "2.0,34.0 158.0,34.0"
    assert len(page.curve([*range(1000)]).split()) < 200


@pytest.mark.full
@pytest.mark.skipif(browser.PROGRAM is None, reason="Chromium is missing")
def test_a_browser_shows_the_page(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/"

    async def talk(server: Server):
        model = await server.client(rank=4)
        for seq in range(1, 13, 2):
            server.ranks.loss = 8 / seq
            await server.result(await server.post("forward_backward", losses(model, seq)))
            await server.result(await server.post("optim_step", step(model, seq + 1)))
        path = await server.saved(model, 13, "a-checkpoint-with-a-name-that-is-too-long-for-one-line-of-a-telephone")
        http = uvicorn.Server(uvicorn.Config(server.app, port=int(url.split(":")[2][:-1]), log_level="warning"))
        serving = asyncio.create_task(http.serve())
        await asyncio.to_thread(look, model, path)
        http.should_exit = True
        await serving

    def look(model: str, path: str) -> None:
        with browser.Browser() as page:
            page.open(url)
            page.resize(400, 800)
            assert page.evaluate("document.querySelector('input').labels.length") == 1
            enter(page, "tml-wrong")
            page.wait("document.querySelector('[role=alert]')?.innerText.includes('none of the server')")
            # A page of status 401 is noted as a failed load. Nothing else may be.
            assert all("401" in problem for problem in page.problems), page.problems
            page.problems.clear()
            enter(page, KEYS[0])
            page.wait("document.querySelectorAll('h2').length == 3")
            assert page.evaluate("document.cookie") == ""  # scripts cannot read the key
            shown = page.evaluate("document.body.innerText")
            assert model in shown and path in shown and "0.7273" in shown and KEYS[0] not in shown
            for width, scheme in ((400, "light"), (1280, "light"), (1280, "dark")):
                page.resize(width, 800, scheme)
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                line = page.evaluate("JSON.stringify(document.querySelector('polyline').getBoundingClientRect())")
                assert json.loads(line)["width"] > 100 and json.loads(line)["height"] > 20
                colors = page.evaluate("(c => c.color + c.backgroundColor)(getComputedStyle(document.body))")
                assert contrast(colors) > 7, (scheme, colors)
                page.screenshot(tmp_path / f"{scheme}{width}.png")
            assert page.problems == []
            page.call("Network.clearBrowserCookies")
            page.open(url)
            enter(page, KEYS[1])
            page.wait("document.querySelectorAll('.none').length == 4")
            assert model not in page.evaluate("document.body.innerText")

    run(Server(tmp_path / "s"), talk)


def enter(page: browser.Browser, key: str) -> None:
    """Type a key into the form of the page, and send it."""
    page.evaluate("document.querySelector('input').focus()")
    page.call("Input.insertText", text=key)
    page.evaluate("document.querySelector('button').click()")


def contrast(colors: str) -> float:
    """Return the contrast of two colours rgb(r, g, b) (WCAG 2.2)."""
    rgb = [int(number) / 255 for number in re.findall(r"\d+", colors)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in rgb]
    dark, light = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (linear[:3], linear[3:]))
    return (light + 0.05) / (dark + 0.05)
