import json
import re
import shutil
import subprocess
import tempfile
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fakes.fake_run import EVIL, FakeRun
from headrace.records.run_store import RunError, RunReader, RunStore
from headrace.rollout.trajectory import Dispatch
from headrace.studies.markup import Html
from headrace.studies.report import Section, write_report
from headrace.studies.run_data import distinct_names, read_runs, sample


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return FakeRun(tmp_path_factory.mktemp("runs") / "evil-run", updates=12, batch=24, evil=True).write()


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    return FakeRun(tmp_path_factory.mktemp("runs") / "baseline", "grpo", updates=6, batch=16, seed=1, drops=False).write()


@pytest.fixture(scope="module")
def page(run):
    return write_report([run], run / "report.html").read_text(encoding="utf-8")


def attempts_of(page):
    return json.loads(re.search(r'<script type="application/json" id="attempt-data">(.*?)</script>', page, re.S).group(1))


class Balanced(HTMLParser):
    VOID = ("meta", "br", "hr", "img", "input", "link")

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text, self.ids = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def parsed(page):
    parser = Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def test_the_page_is_well_formed_and_needs_nothing_from_elsewhere(page):
    tags = parsed(page).tags
    assert not [tag for tag, _ in tags if tag in ("img", "link", "iframe", "object", "embed", "base")]
    assert not [attributes for _, attributes in tags if "src" in attributes]
    assert all(attributes["href"].startswith("#") for _, attributes in tags if "href" in attributes)
    assert "http://" not in page and "https://" not in page and "@import" not in page and "url(" not in page
    assert [attributes["content"] for _, attributes in tags if "default-src 'none'" in attributes.get("content", "")]


def test_text_of_the_world_is_never_markup(page):
    assert EVIL not in page
    assert "document.title = 'broken'" in json.dumps(attempts_of(page))
    scripts = [attributes for tag, attributes in parsed(page).tags if tag == "script"]
    assert len(scripts) == 2
    assert not any(name.startswith("on") for _, attributes in parsed(page).tags for name in attributes)


def test_the_page_says_what_came_of_the_run(page):
    text = " ".join(parsed(page).text)
    for expected in (
        "recipe spo++",
        "12 updates",
        "success, train",
        "30 → 65 %",
        "do not overlap",
        "success, unseen",
        "reward area",
        "C10",
    ):
        assert expected in text, expected
    for section in (
        "Learning curve",
        "Kinds of task",
        "Credit",
        "Optimizer",
        "Collection",
        "Time",
        "Dropped attempts",
        "Attempts",
        "Settings",
    ):
        assert section in text, section
    assert "environment deadline" in text and "the world did not answer in time" in text
    assert 'recipe = "spo++"' in text


def test_every_entry_at_the_top_leads_somewhere(page):
    tags = parsed(page).tags
    anchors = {attributes.get("id") for _, attributes in tags}
    links = [attributes["href"][1:] for tag, attributes in tags if tag == "a"]
    assert len(links) == 10 and set(links) <= anchors


def test_an_attempt_is_shown_with_what_the_log_says_of_it(run, page):
    data = attempts_of(page)
    with RunReader(run) as reader:
        receipts = {event.dispatch: event for _, event in reader.events() if type(event).__name__ == "Receipt"}
        used = {event.dispatch: event for _, event in reader.events() if type(event).__name__ == "Consumption"}
        for shown in data["attempts"][::10]:
            trajectory = reader.trajectory(shown["dispatch"])
            assert shown["task"] == trajectory.dispatch.task
            assert shown["outcome"] == receipts[shown["dispatch"]].outcome
            assert shown["value"] == pytest.approx(trajectory.dispatch.value, abs=1e-4)
            assert shown["update"] == used[shown["dispatch"]].batch + 1
            assert shown["advantage"] == pytest.approx(used[shown["dispatch"]].advantage, abs=1e-4)
            assert shown["turns"] == [[turn.observation, turn.action] for turn in trajectory.turns]


def test_the_token_view_marks_exactly_the_tokens_that_were_trained(run, page):
    data = attempts_of(page)
    shown = data["attempts"][3]
    with RunReader(run) as reader:
        (row,) = reader.trajectory(shown["dispatch"]).rows
    (drawn,) = shown["rows"]
    mask = [bool(i % 2) for i, length in enumerate(drawn["mask"]) for _ in range(length)]
    table = data["tokens"][0]
    assert tuple(mask) == row.action_mask
    assert tuple(table[place][0] for place in drawn["ids"]) == row.token_ids
    assert drawn["logprobs"] == [round(p, 3) for p, sampled in zip(row.logprobs, row.action_mask, strict=True) if sampled]
    written = "".join(table[place][1] for place, sampled in zip(drawn["ids"], mask, strict=True) if sampled)
    assert written == "".join(f"{action}<|end|>" for _, action in shown["turns"])
    assert {text: special for _, text, special in table}["<|end|>"] is True


def test_the_page_stays_small_and_says_what_it_leaves_out(run, tmp_path):
    small = write_report([run], tmp_path / "small.html", attempts=10).read_text(encoding="utf-8")
    shown = attempts_of(small)["attempts"]
    assert len(shown) == 10
    assert f"a sample of 10, spread over updates, task kinds, successes and failures, of {12 * 24} attempts" in small
    full = write_report([run], tmp_path / "full.html", attempts=10_000).read_text(encoding="utf-8")
    assert "Here: all 288 attempts" in full
    assert len(small) < 250_000


def test_a_sample_spans_the_run_its_kinds_and_its_results(run):
    (data,) = read_runs([run])
    chosen = sample(data.facts.used, 48)
    assert len(chosen) == 48 and len({one.dispatch.number for one in chosen}) == 48
    assert {one.consumption.batch for one in chosen} >= {0, 11}
    assert {one.dispatch.kind for one in chosen} == set(data.kinds())
    assert {one.receipt.success for one in chosen} == {True, False}
    assert sample(data.facts.used, 48) == chosen


def test_runs_stand_side_by_side(run, baseline, tmp_path):
    page = write_report([run, baseline], tmp_path / "two.html").read_text(encoding="utf-8")
    text = " ".join(parsed(page).text)
    assert "2 runs side by side" in text and "evil-run" in text and "baseline" in text
    assert "share of groups" in text  # grpo has groups, and some without spread
    data = attempts_of(page)
    assert data["runs"] == ["evil-run", "baseline"] and {attempt["run"] for attempt in data["attempts"]} == {0, 1}
    assert all(attempt["value"] is None for attempt in data["attempts"] if attempt["run"] == 1)


def test_sections_of_others_stand_after_the_learning_curve(run, tmp_path):
    extra = Section("paired", "Paired differences", Html("<p>here</p>"))
    page = write_report([run], tmp_path / "extra.html", title="A <study>", extra=[extra]).read_text(encoding="utf-8")
    assert page.index('id="learning"') < page.index('id="paired"') < page.index('id="kinds"')
    assert "<h1>A &lt;study&gt;</h1>" in page


def test_a_run_that_has_only_begun_has_a_report(tmp_path):
    with RunStore.create(tmp_path / "young", clock=time.monotonic) as store:
        store.append(Dispatch(0, "task", "pick", 0, 0.5, 0.5, None, 1))
        page = write_report([tmp_path / "young"], tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    text = " ".join(parsed(page).text)
    assert "No update has ended yet." in text and "No attempt has been trained on yet." in text
    assert "None of 1 attempts was dropped." in text


def test_a_run_without_a_tokenizer_shows_token_ids(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "policy")
    data = attempts_of(write_report([copy], tmp_path / "report.html").read_text(encoding="utf-8"))
    assert all(text is None for _, text, _ in data["tokens"][0])


def test_a_missing_run_is_named(tmp_path):
    with pytest.raises(RunError, match="no run in"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], tmp_path / "report.html")


def test_names_tell_runs_apart():
    assert distinct_names([Path("/a/x"), Path("/a/y")]) == ["x", "y"]
    assert distinct_names([Path("/a/x"), Path("/b/x")]) == ["a/x", "b/x"]
    assert distinct_names([Path("/a/x"), Path("/a/x")]) == ["x (1)", "x (2)"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the browser chromium")
def test_a_real_browser_shows_the_attempts_and_runs_nothing_of_the_worlds(run, page, tmp_path):
    probe = """<script>
      const buttons = [...document.querySelectorAll('.tabs button')]; buttons[1].click();
      const marked = document.querySelectorAll('.tokens .trained').length;
      const plot = document.querySelector('.plot'), box = plot.getBoundingClientRect();
      plot.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + box.width / 2, clientY: box.top + 5}));
      const result = document.querySelectorAll('.filters select')[2]; result.value = 'yes'; result.onchange();
      document.body.dataset.probe = JSON.stringify({marked, tip: document.querySelector('.tip').textContent,
        failures: document.querySelectorAll('.list .no').length,
        successes: document.querySelectorAll('.list .yes').length, title: document.title});
    </script></body>"""
    (tmp_path / "probe.html").write_text(page.replace("</body>", probe), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    options += ["--disable-sync", "--no-first-run", f"--user-data-dir={tempfile.mkdtemp(dir=tmp_path)}", "--dump-dom"]
    command = ["chromium", *options, (tmp_path / "probe.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    (found,) = [attributes["data-probe"] for tag, attributes in parsed(dom).tags if tag == "body"]
    found = json.loads(found)
    assert found["title"] == "evil-run · Headrace"
    assert found["failures"] == 0 and found["successes"] > 5
    assert found["tip"].startswith("update 6reward 0.")
    first = attempts_of(page)["attempts"][0]
    assert found["marked"] == first["actionTokens"]
