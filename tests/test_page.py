"""The HTML report: what it says, that it is safe and complete without script, and that a real browser shows it."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from passlora import PassloraError, train
from passlora.analysis import page
from passlora.analysis.run_folder import read_run, read_runs
from passlora.analysis.sections import methods
from passlora.config import Config
from passlora.display import figures

EVIL = '<script>alert("x")</script>'


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A real run with a comparison, drift and corruptions; and one of two seeds to show beside it."""
    root = tmp_path_factory.mktemp("report")
    base = {
        "dataset_name": "digits",
        "task_sizes": [4, 3, 3],
        "max_train_per_class": 8,
        "max_test_per_class": 5,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 8,
        "crop_padding": 0,
        "model_name_or_path": "test_vit",
        "pretrained": False,
        "image_size": 32,  # tiny
    }
    main = {"extra_inference": ["single"], "compare": ["ncm"], "measure_drift": True, "output_dir": str(root / "main")}
    train(Config.make(**base, **main))
    (root / "main" / "eval").mkdir()
    learnt = json.loads((root / "main" / "passlora.json").read_text())["tasks"][-1]["learnt"]
    found = {"severity": 2, "clean": 61.0, "accuracy": {"fog": 33.0, "snow": 44.0}, "mean": 38.5}
    found |= {"images": 50, "learnt": learnt}
    (root / "main" / "eval" / "robustness.json").write_text(json.dumps(found))
    other = {"preset": "finetune", "seeds": [0, 1], "output_dir": str(root / "other")}
    train(Config.make(**base, **other))
    return root


@pytest.fixture(scope="module")
def html(runs):
    return page.render(read_runs([runs / "main", runs / "other"]))


class Reader(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.addresses, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.addresses += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.words.append(data)


def test_it_says_what_the_run_says(runs, html):
    results = json.loads((runs / "main" / "results.json").read_text())
    other = json.loads((runs / "other" / "results.json").read_text())
    words = " ".join(Reader(html).words)
    for value in (results["last"], results["avg"], results["forgetting"], results["compare"]["ncm"]["last"]):
        assert f"{value:.1f}" in words
    assert f"{other['last']:.1f} ± {other['std']['last']:.1f}" in words
    old, new = results["bias"][2]
    assert f"{old:.1f}" in words and f"{new:.1f}" in words
    assert f"{results['drift'][2][0]:.2f}" in words
    assert "33.0" in words and "least under fog" in words
    assert "passlora train --config" in words and "dataset_name" in words and "digits" in words


def test_the_numbers_of_a_class_are_those_of_the_confusion_matrix(runs, html):
    run = read_run(runs / "main")
    table = html[html.index("class-search") :]
    rows = re.findall(
        r"<tr><th scope=row class=text>(.*?)</th><td>(\d+)</td><td>(\d+)</td><td[^>]*>([\d.]+)</td>", table
    )
    assert len(rows) == 10
    for i, (name, task, images, accuracy) in enumerate(rows):
        assert (name, int(task), int(images)) == (str(i), [0, 0, 0, 0, 1, 1, 1, 2, 2, 2][i], 5)
        assert float(accuracy) == pytest.approx(100 * run.confusion[i, i] / 5, abs=0.05)
    whole = np.diagonal(run.confusion).sum() / run.confusion.sum()
    assert 100 * whole == pytest.approx(run.results["last"]), "the matrix is the last task's"


def test_it_is_one_file_that_loads_nothing(html):
    reader = Reader(html)
    assert all(address.startswith(("#", "data:")) for address in reader.addresses)
    assert "http://" not in html and "https://" not in html.replace("https://www.w3.org", "")
    policy = next(
        a["content"] for tag, a in reader.tags if tag == "meta" and "content" in a and "default-src" in a["content"]
    )
    assert "default-src 'none'" in policy and "unsafe-inline'; script" in policy and "script-src 'sha256-" in policy


def test_every_picture_has_words_and_every_link_a_target(html):
    reader = Reader(html)
    for tag, attributes in reader.tags:
        if tag == "svg":
            assert attributes["role"] == "img" and len(attributes["aria-label"]) > 30
        if tag == "img":
            assert len(attributes["alt"]) > 30
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids)), "charts share no identifier"
    links = [attributes["href"] for tag, attributes in reader.tags if tag == "a"]
    used = re.findall(r"url\(#(\w+)\)", html)
    assert len(links) == 10 and used
    assert {address[1:] for address in reader.addresses if address.startswith("#")} | set(used) <= set(ids)


def test_names_from_a_stranger_are_text(runs, tmp_path):
    folder = tmp_path / "evil"
    shutil.copytree(runs / "main", folder)
    results = json.loads((folder / "results.json").read_text())
    results["classes"][0] = EVIL
    results["preset"] = results["version"] = EVIL
    results["compare"] = {EVIL: results["compare"]["ncm"]}
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "config.yaml").write_text(json.dumps({"dataset_name": EVIL, EVIL: "x"}))
    text = page.render([read_run(folder)])
    assert EVIL not in text and text.count("&lt;script&gt;alert") >= 5
    assert text.count("<script") == 1, "its own"


def charts_of(text):
    return re.findall(r"<svg.*?</svg>", text, re.S)


def test_charts_take_their_colours_from_the_page_and_are_the_same_every_time(runs, html):
    charts = charts_of(html)
    assert len(charts) == 3
    for chart in charts:
        assert "var(--c0)" in chart and "currentColor" in chart
        assert not re.search(r"#[0-9a-f]{6}\b|<style|<metadata|xmlns", chart), "a colour that dark mode cannot change"
    assert page.render(read_runs([runs / "main", runs / "other"])) == html


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("$\\nonsense$ $x^2$", "$\\nonsense$ $x^2$"),  # no formula
        ("_hidden", "_hidden"),
        ("<b>&\"'", "&lt;b&gt;&amp;\"'"),
        ("two\nlines \x00\x1b", "two lines"),
        ("猫", "猫"),
        ("x" * 500, "x" * 45 + "..."),
    ],
)
def test_a_method_of_any_name_is_in_the_chart(runs, name, shown, recwarn):
    run = read_run(runs / "main")
    run.results |= {"preset": name, "compare": {}, "inference_modes": {}}
    chart = charts_of(page.render([run]))[0]
    label = next(words for words in re.findall(r">([^<]*)</text>", chart) if "(last " in words)
    assert label.strip().startswith(f"{shown} (last"), label
    assert not recwarn.list


def test_a_class_of_any_name_is_in_the_pictures(tmp_path):
    path = tmp_path / "confusion.svg"
    figures.confusion_matrix(["$\\nonsense$", "_b"], np.eye(2), path)
    assert path.stat().st_size


def test_many_classes_and_tasks_become_pictures(runs, tmp_path):
    run = read_run(runs / "main")
    run.results |= {
        "task_sizes": [2] * 30,
        "classes": [f"class {i}" for i in range(60)],
        "accuracy_matrix": [[50.0] * (i + 1) + [None] * (29 - i) for i in range(30)],
        "stage_accuracy": [50.0] * 30,
    }
    run.results |= {"inference_modes": {}, "compare": {}}
    run.confusion = np.eye(60, dtype=int) * 4 + np.eye(60, k=1, dtype=int)
    text = page.render([run])
    pictures = re.findall(r"data:image/png;base64,([^\"]+)", text)
    assert len(pictures) == 2 and "class 3 taken for class 4: 1 of 5 images" in text
    matrix, confusion = (np.asarray(Image.open(io.BytesIO(base64.b64decode(picture)))) for picture in pictures)
    step = len(matrix) // 30
    assert (matrix[0, 0] == matrix[29 * step, 29 * step]).all(), "50% is one colour, in whatever row"
    assert (matrix[0, -1] == 255).all(), "nothing is known of tasks to come"
    step = len(confusion) // 60
    assert confusion[0, 0].sum() < confusion[0, step].sum() < 3 * 255, "four of five images are darker than one"
    assert len(text) < 200_000


def test_runs_of_the_same_name_and_of_other_tasks_side_by_side(runs, tmp_path, cli):
    for name, last, sizes in (("a", 80.0, [4, 3, 3]), ("b", 40.0, [2, 2, 2, 2, 2])):
        folder = tmp_path / name / "seed_0"
        shutil.copytree(runs / "main", folder)
        results = json.loads((folder / "results.json").read_text())
        stages = [100.0] * (len(sizes) - 1) + [last]
        results |= {"last": last, "task_sizes": sizes, "stage_accuracy": stages, "compare": {}, "inference_modes": {}}
        (folder / "results.json").write_text(json.dumps(results))
    found = methods(read_runs([tmp_path / "a" / "seed_0", tmp_path / "b" / "seed_0"]))
    assert {name: part["last"] for name, part in found.items()} == {"a/seed_0: pass++": 80, "b/seed_0: pass++": 40}
    flags = ["--compare", tmp_path / "b" / "seed_0", "--html", tmp_path / "r.html", "--plots", tmp_path / "plots"]
    code, _, err = cli("report", tmp_path / "a" / "seed_0", *flags)
    assert code == 0, err
    text = (tmp_path / "r.html").read_text()
    heads = re.findall(r"<th scope=col>(\d+)</th>", text[text.index('id="curves"') : text.index('id="matrix"')])
    assert heads == ["2", "4", "6", "7", "8", "10"], "each curve at its own numbers of classes"


def test_orders_of_classes_are_not_mixed(runs, tmp_path):
    folder = tmp_path / "orders"
    shutil.copytree(runs / "other", folder)
    results = json.loads((folder / "results.json").read_text())
    results["runs"]["seed_1"]["classes"].reverse()
    (folder / "results.json").write_text(json.dumps(results))
    assert read_run(folder).confusion is None and read_run(runs / "other").confusion.sum() == 100
    page.render([read_run(folder)])
    results["runs"] = {"../../secret": results["runs"]["seed_0"]}
    (folder / "results.json").write_text(json.dumps(results))
    with pytest.raises(PassloraError, match="cannot be read"):
        read_run(folder)


def test_corruptions_of_another_state_of_the_model_are_not_shown(runs, tmp_path):
    folder = tmp_path / "taught"
    shutil.copytree(runs / "main", folder)
    manifest = json.loads((folder / "passlora.json").read_text())
    manifest["tasks"][-1]["learnt"] = "2001-01-01T00:00:00+00:00"
    (folder / "passlora.json").write_text(json.dumps(manifest))
    text = page.render([read_run(folder)])
    assert "Not measured" in text and f"passlora robustness {folder} --data" in text and "least under fog" not in text


def test_runs_that_cannot_be_shown(runs, tmp_path, cli):
    code, _, err = cli("report", tmp_path / "nothing")
    assert code == 2 and "is no run" in err and "Traceback" not in err
    folder = tmp_path / "broken"
    shutil.copytree(runs / "main", folder)
    (folder / "results.json").write_text('{"finished": true}')
    with pytest.raises(PassloraError, match="cannot be read"):
        page.render([read_run(folder)])
    for name, value in (
        *(("seconds", "x"), ("bias", [1, 2, 3]), ("task_sizes", {}), ("task_sizes", [4, 3, 10**18])),
        *(("stage_accuracy", ["10", "20", "30"]), ("stage_accuracy", [1.0, 2.0]), ("accuracy_matrix", [["<b>"]])),
        *(("last", None), ("compare", []), ("preset", 5), ("calibration", [["a", "b", "c"]])),
        ("classes", ["\ud800", *"123456789"]),  # half a letter, which no file can hold
    ):
        results = json.loads((runs / "main" / "results.json").read_text())
        (folder / "results.json").write_text(json.dumps({**results, name: value}))
        code, _, err = cli("report", folder, "--html", tmp_path / "x.html")
        assert not (tmp_path / "x.html").exists() and "cannot be shown" in err, (name, value)
        assert code == 2 and "Traceback" not in err and len(err.splitlines()) == 1, err
    (folder / "results.json").write_text(json.dumps({**results, "finished": False}))
    with pytest.raises(PassloraError, match="not finished"):
        read_run(folder)


def test_the_command_writes_page_and_plots(runs, tmp_path, cli):
    out, plots = tmp_path / "r.html", tmp_path / "plots"
    flags = ["--compare", runs / "other", "--html", out, "--plots", plots]
    code, said, err = cli("report", runs / "main", *flags)
    assert code == 0 and str(out) in said, err
    assert out.read_text().startswith("<!doctype html>")
    names = {"accuracy", "accuracy_matrix", "confusion_matrix", "reliability", "robustness"}
    assert {path.name for path in plots.iterdir()} == {
        f"{name}.{kind}" for name in names for kind in ("png", "svg", "pdf")
    }


# --- in a real browser -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    path = find_chromium()
    if path is None:
        pytest.skip("no chromium, and none could be installed: apt-get install chromium")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=path, args=flags)
        yield opened
        opened.close()


def find_chromium():
    """Debian's, installed where it is missing and that is possible."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None and shutil.which("apt-get") and hasattr(os, "geteuid") and os.geteuid() == 0:
        for command in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
            subprocess.run(["apt-get", "-q", *command], capture_output=True, timeout=400)
        found = shutil.which("chromium")
    return found


@pytest.fixture
def show(browser, html, tmp_path):
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    opened = []

    def open_page(**options):
        context = browser.new_context(offline=True, **options)
        opened.append(context)
        shown = context.new_page()
        shown.problems = []
        shown.on("pageerror", lambda error: shown.problems.append(str(error)))
        shown.on("console", lambda message: shown.problems.append(message.text))
        shown.goto((tmp_path / "page.html").as_uri())
        return shown

    yield open_page
    for context in opened:
        context.close()


def class_names(shown):
    return shown.locator("table.sortable tbody tr:visible th").all_inner_texts()


def test_search_and_sorting(show):
    shown = show()
    assert class_names(shown) == [str(digit) for digit in range(10)]
    accuracy = "table.sortable th:nth-child(4)"
    shown.click(f"{accuracy} button")
    values = [float(v) for v in shown.locator("table.sortable tbody td:nth-child(4)").all_inner_texts()]
    assert values == sorted(values) and shown.get_attribute(accuracy, "aria-sort") == "ascending"
    shown.keyboard.press("Enter")  # the button has the focus
    values = [float(v) for v in shown.locator("table.sortable tbody td:nth-child(4)").all_inner_texts()]
    assert values == sorted(values, reverse=True) and shown.get_attribute(accuracy, "aria-sort") == "descending"
    shown.click("table.sortable th:nth-child(1) button")
    shown.fill("#class-search", "7")
    assert "7" in class_names(shown) and len(class_names(shown)) < 10
    shown.fill("#class-search", "")
    assert class_names(shown) == [str(digit) for digit in range(10)]
    assert not shown.problems, "no error, nothing blocked by the page's own policy"


def test_the_essentials_without_script(show):
    shown = show(java_script_enabled=False)
    assert class_names(shown) == [str(digit) for digit in range(10)]
    assert not shown.locator("#class-search").is_visible(), "no search box that would do nothing"
    assert shown.locator("svg").first.is_visible() and shown.locator("dl.tiles dd").first.is_visible()
    shown.click("text=The numbers >> nth=0")
    assert shown.locator("#curves ~ details table").first.is_visible(), "details open without script"


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_overflows(show, width):
    shown = show(viewport={"width": width, "height": 800})
    assert shown.evaluate("document.documentElement.scrollWidth") <= width, "wide tables scroll inside themselves"
    sizes = shown.evaluate(
        "[...document.querySelectorAll('p, li, td')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 14


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_in_both_schemes(show, scheme):
    """WCAG AA: 4.5 between text and what lies behind it, also on the coloured cells and in charts."""
    shown = show(color_scheme=scheme)
    for selector in ("p", ".soft", "a", "dl.tiles dt", "td[style]", "svg text"):
        for ratio in contrasts(shown, selector):
            assert ratio >= 4.5, (selector, ratio)
    background = luminance(shown.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert background > 0.9 if scheme == "light" else background < 0.1


def contrasts(shown, selector):
    script = """elements => elements.map(e => {
        const style = getComputedStyle(e);
        const text = e instanceof SVGElement ? style.fill : style.color;
        let behind = e;
        while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
        return [text, getComputedStyle(behind).backgroundColor];
    })"""
    pairs = shown.locator(selector).evaluate_all(script)
    assert pairs, selector
    for text, behind in pairs:
        high, low = sorted((luminance(text), luminance(behind)), reverse=True)
        yield (high + 0.05) / (low + 0.05)


def luminance(colour):
    parts = [float(number) for number in re.findall(r"[\d.]+(?:e-?\d+)?", colour.replace("srgb", ""))[:3]]
    scale = 1 if colour.startswith("color(") else 255
    linear = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in (p / scale for p in parts)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
