"""Access to the page, and the command's errors if it cannot be served."""

import shutil
import socket
import subprocess
import sys
from contextlib import closing

import pytest
from measured_runs import train_line, with_loads, write_run

pytest.importorskip("dash")

from moebius_dashboard.command import main
from moebius_dashboard.curves import Runs
from moebius_dashboard.page import make_page
from moebius_dashboard.serve import guarded


@pytest.fixture
def runs(tmp_path):
    step = train_line(1, loss=3.25, left_s=1e15, passes=1.5, mfu=0.4)
    sample = {"kind": "samples", "time": 1001.0, "step": 1, "prompt": "The", "text": " [b]end"}
    write_run(tmp_path / "runs" / "two", step, sample)
    write_run(tmp_path / "runs" / "one", *(with_loads(step, [0.5, 0.5]) for step in range(1, 9)))
    return tmp_path / "runs"


@pytest.fixture
def visitor(runs):
    return guarded(make_page(Runs(runs)).server, "the-token").test_client()


@pytest.mark.parametrize("path", ["/", "/?token=other", "/_dash-layout", "/?token="])
def test_a_stranger_is_refused_whatever_he_asks_for(visitor, path):
    answer = visitor.get(path)
    assert answer.status_code == 403
    assert "address that `moebius dashboard` printed" in answer.text
    assert "Set-Cookie" not in answer.headers


def test_a_token_becomes_a_cookie_and_leaves_the_address(visitor):
    answer = visitor.get("/?token=the-token")
    assert (answer.status_code, answer.headers["Location"]) == (302, "/")
    assert "HttpOnly" in answer.headers["Set-Cookie"]
    assert "SameSite=Strict" in answer.headers["Set-Cookie"]
    assert visitor.get("/").status_code == 200
    assert '"one"' in visitor.get("/_dash-layout").text


def test_all_it_needs_comes_from_the_machine_itself(visitor):
    visitor.get("/?token=the-token")
    page = visitor.get("/").text
    assert "<script" in page
    assert "http://" not in page
    assert "https://" not in page


def test_the_figures_are_of_the_chosen_runs(visitor):
    visitor.get("/?token=the-token")
    [drawing] = [
        one for one in visitor.get("/_dash-dependencies").json if "loss.figure" in one["output"]
    ]
    values = {"chosen": ["two"], "axis": "step", "smoothing": 0, "load-of": "two", "clock": 1}
    outputs = [
        "loss.figure",
        "scores.figure",
        "throughput.figure",
        "rate.figure",
        "norm.figure",
        "imbalance.figure",
        "load.figure",
        "stand.children",
        "samples.children",
        "events.children",
    ]
    body = {
        "output": drawing["output"],
        "outputs": [dict(zip(("id", "property"), one.split("."), strict=True)) for one in outputs],
        "inputs": [one | {"value": values[one["id"]]} for one in drawing["inputs"]],
        "changedPropIds": ["clock.n_intervals"],
    }
    answer = visitor.post("/_dash-update-component", json=body)
    assert answer.status_code == 200
    drawn = answer.json["response"]
    assert drawn["loss"]["figure"]["data"][0]["y"] == [3.25]
    for told in ("3.2500", "277,777,777,777.78 h", "1.50", "40.0%"):
        assert told in str(drawn["stand"])
    assert " [b]end" in str(drawn["samples"])
    assert "RUNNING: first step" in str(drawn["events"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "taken"], "--port 0 for any free one"),
        (["--port", "99999"], "127.0.0.1:99999"),
        (["--host", "not.an.address"], "not.an.address"),
    ],
)
def test_an_address_that_cannot_be_had_is_an_error(runs, options, words):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        options = [port if word == "taken" else word for word in options]
        with pytest.raises(ValueError, match=words):
            main([str(runs), *options])


def test_a_folder_without_runs_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="there is no run in"):
        main([str(tmp_path / "nothing")])


def browser() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


@pytest.mark.slow
@pytest.mark.skipif(browser() is None, reason="no Chromium is installed")
def test_a_browser_draws_it_without_an_error(runs, tmp_path):
    """At the widths of a desktop and a phone."""
    playwright = pytest.importorskip("playwright.sync_api")
    code = "from moebius.cli.main import main; main()"
    program = subprocess.Popen(
        [sys.executable, "-c", code, "dashboard", str(runs), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    try:
        address = program.stdout.readline().split()[1]
        with playwright.sync_playwright() as tools:
            chromium = tools.chromium.launch(executable_path=browser(), args=["--no-sandbox"])
            for width in (1280, 500):
                page = chromium.new_page(viewport={"width": width, "height": 900})
                errors: list[object] = []
                page.on("pageerror", lambda error, told=errors: told.append(error))
                page.goto(address, timeout=120_000)
                for drawn in ("#load .heatmaplayer image", "#loss .scatterlayer .trace"):
                    page.wait_for_selector(drawn, state="attached", timeout=120_000)
                assert "token" not in page.url
                assert page.locator("#loss").bounding_box()["height"] > 200
                wide = page.evaluate("document.documentElement.scrollWidth")
                assert wide <= width
                assert page.locator("#stand tr").count() == 3
                assert not errors
                page.screenshot(path=tmp_path / f"{width}.png", full_page=True)
            chromium.close()
    finally:
        program.terminate()
        program.wait(60)
