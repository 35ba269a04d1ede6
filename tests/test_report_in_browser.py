"""The report as people see it: a headless Chromium opens that of a run, and that of a comparison (make test-all)."""

from dataclasses import replace

import pytest

import browser
import small_runs
import sparsevd

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(browser.path() is None, reason="no Chromium: as root, tests/set_up_browser.sh installs it"),
]
DRAWINGS = """[...document.querySelectorAll("svg[role=img]")].map(svg => {
  const box = svg.getBoundingClientRect(), style = getComputedStyle(svg);
  const text = svg.querySelector("text"), scale = box.width / svg.viewBox.baseVal.width;
  return {name: svg.getAttribute("aria-label"), left: box.left, right: box.right, width: box.width, height: box.height,
          shown: style.visibility == "visible" && svg.checkVisibility(),
          letters: text ? scale * parseFloat(getComputedStyle(text).fontSize) : 99};
})"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """LeNet-300-100 as it is trained by default, and from a trained network with a budget; and both side by side."""
    here = tmp_path_factory.mktemp("pages")
    given = {
        "model": "lenet-300-100",
        "data": "small_runs:large_data",
        "fit": replace(small_runs.FIT, learning_rate=4e-3),
    }
    plain = small_runs.train(here / "plain", **given)
    budget = small_runs.train(here / "budget", pretrain_epochs=2, max_error_increase=2.0, val_size=300, **given)
    return {
        "run": sparsevd.report(plain, here / "run.html", time=True),
        "comparison": sparsevd.report([plain, budget], here / "comparison.html"),
    }


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser.Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize("printed", [False, True], ids=["screen", "print"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("name", ["run", "comparison"])
def test_every_figure_is_seen(pages, chromium, name, width, dark, printed):
    chromium.open(pages[name], width=width, dark=dark, printed=printed)
    assert not chromium.complaints()
    assert [url for url in chromium.requests() if not url.startswith("data:")] == [pages[name].as_uri()]
    assert chromium.evaluate("document.scrollingElement.scrollWidth") <= width
    drawings = chromium.evaluate(DRAWINGS)
    assert len(drawings) >= (12 if name == "run" else 24)
    for each in drawings:
        assert each["shown"], each
        assert each["width"] > 40, each
        assert each["height"] > 10, each
        assert each["left"] >= 0, each
        assert each["right"] <= width + 1, each
        assert each["letters"] >= 10, each
    pictures = "[...document.querySelectorAll('image')].every(each => each.href.baseVal.startsWith('data:image/png'))"
    assert chromium.evaluate(pictures)
    background = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in background[4:-1].split(","))
    assert (brightness < 200) == (dark and not printed)


@pytest.mark.parametrize("name", ["run", "comparison"])
def test_small_and_quick(pages, chromium, name):
    assert pages[name].stat().st_size < 2_000_000
    took = []
    for _ in range(3):
        chromium.open(pages[name], width=1440)
        took.append(chromium.evaluate("performance.getEntriesByType('navigation')[0].duration"))
    assert min(took) < 1000, took


def test_the_page_alone_answers(pages, chromium):
    chromium.open(pages["run"], width=1440)
    answers = chromium.evaluate("[...document.querySelectorAll('.answers dd')].map(each => each.innerText)")
    largest, cost, lower = answers
    assert "holds" in largest
    assert "of the kept weights" in largest
    assert "points" in cost
    assert "Training took" in cost
    assert lower.split(".")[0] in ("Yes", "No", "Hardly")
    assert "measured on" in lower
    assert "ms" in chromium.evaluate("document.querySelector('.numbers').innerText")
