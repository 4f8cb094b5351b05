"""What a report says is what audit and ledger say, in words, marks and tables, and nothing in data becomes markup."""

from __future__ import annotations

import html.parser
import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from shardstream.audit import audit
from shardstream.cli import main
from shardstream.consumed import ConsumedLog
from shardstream.errors import ShardStreamWarning
from shardstream.manifest import Manifest
from shardstream.mixing import Mixture
from shardstream.mixture_plan import MixturePlan, logged_ids
from shardstream.packing import Packing
from shardstream.plan import Plan
from shardstream.report import Figure, HeatMap, report_on_mixture, report_on_plan
from shardstream.report.binning import histogram
from tests.support.corpora import parquet_manifest, tokens_of
from tests.support.ledgers import write_ledger

EVIL = "<script>alert(1)</script>\"'&amp;{{ 7*7 }}"


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return parquet_manifest(tmp_path_factory.mktemp("report"), [40, 0, 25, 35], 10, tokens_column="tokens")


def figures_of(report) -> dict[str, Figure]:
    return {figure.name: figure for section in report.sections for figure in section.figures}


def run(*arguments):
    return CliRunner().invoke(main, ["report", *map(str, arguments)], prog_name="shardstream")


class Page(html.parser.HTMLParser):
    """Elements of a page, whether they are closed, and the text."""

    VOID = frozenset({"meta", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements, self.texts, self._open = [], [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_figures_of_the_data_count_everything(manifest):
    figures = figures_of(report_on_plan(Plan.make(manifest, batch_size=4)))
    assert sum(figures["data-shards"].chart.values) == 4
    assert sum(figures["data-block-rows"].chart.values) == manifest.num_blocks
    lengths = figures["data-tokens"]
    assert dict(zip(lengths.chart.labels, lengths.chart.values, strict=True)) == dict.fromkeys("01234", 20)
    assert f"{sum(len(tokens_of(uid)) for uid in range(100))} tokens in all" in lengths.summary
    assert lengths.table.rows == tuple(zip("01234", [20] * 5, strict=True))


@pytest.mark.parametrize("numbers", [[7], [0], [1, 10**15], [5, 6, 7, 900], list(range(1000)), [0] * 40 + [10**6]])
def test_bars_hold_every_number_once(numbers):
    figure = histogram("name", "Title", numbers, of="blocks", unit="rows")
    assert sum(figure.chart.values) == len(numbers)
    assert len(figure.chart.values) <= 64
    assert f"{sum(numbers):,} rows in all" in figure.summary


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"shuffle": "full"},
        {"shuffle": False},
        {"tail": "continue"},
        {"tail": "uneven"},
        {"accumulate": 3, "seed": 4},
    ],
)
def test_the_heat_map_counts_each_sample_once(manifest, settings):
    plan = Plan.make(manifest, batch_size=3, world_size=4, **settings)
    heat = figures_of(report_on_plan(plan))["order-heat"]
    assert isinstance(heat.chart, HeatMap)
    by_shard = [sum(row[1:]) for row in heat.table.rows]
    assert by_shard == [40, 0, 25, 35]
    assert [name for name, _ in heat.chart.panels] == [f"rank {rank}" for rank in range(4)]
    assert sum(count for _, rows in heat.chart.panels for row in rows for count in row) == 100


def test_the_heat_map_shows_where_packed_sequences_begin(manifest):
    plan = Plan.make(manifest, batch_size=2, world_size=2, packing=Packing(16, "tokens"))
    heat = figures_of(report_on_plan(plan))["order-heat"]
    assert sum(sum(row[1:]) for row in heat.table.rows) == plan.num_positions
    assert heat.chart.unit == "sequences that begin there"


def test_many_shards_ranks_and_steps_stay_a_small_page():
    manifest = Manifest.synthetic(num_shards=500, blocks_per_shard=2, rows_per_block=100)
    report = report_on_plan(Plan.make(manifest, batch_size=1, world_size=200))
    heat = figures_of(report)["order-heat"]
    assert len(heat.chart.panels) == 8
    assert "ranks 0, 28, 57, 85, 114, 142, 171, 199 of 200" in heat.summary
    assert len(report.to_html()) < 200_000


def test_what_audit_finds_is_what_is_shown(manifest):
    plan = Plan.make(manifest, batch_size=4, world_size=3, tail="drop")
    report, audited = report_on_plan(plan, num_workers=2, epochs=2), audit(plan, num_workers=2, epochs=2)
    assert report.details["audit"] == audited.to_dict()
    page = report.to_html()
    tails = next(section for section in report.sections if section.name == "tails")
    assert [row[4] for row in tails.tables[0].rows] == [epoch.num_dropped for epoch in audited.epochs] == [4, 4]
    assert f"{audited.reading.amplification:.4g}" in page
    assert "Sound" in page
    assert json.loads(json.dumps(report.to_dict()))["holds"] is True


def test_violations_are_shown(manifest, monkeypatch):
    audited = audit(Plan.make(manifest, batch_size=4))
    broken = replace(audited, violations=("sample 3 comes twice",), reading=None, quality=None)
    monkeypatch.setattr("shardstream.report.audit", lambda *_, **__: broken)
    report = report_on_plan(Plan.make(manifest, batch_size=4))
    assert not report.holds
    page = report.to_html()
    assert "Not sound" in page
    assert "sample 3 comes twice" in page


# ------------------------------------------------------------------------------------------------------------ a run


def test_a_run(manifest, tmp_path):
    plan = Plan.make(manifest, batch_size=5, world_size=2, seed=1)
    write_ledger(tmp_path, plan, step_s=0.5)
    report = report_on_plan(plan, ledger=tmp_path)
    assert report.holds, report.violations
    figures = figures_of(report)
    assert figures["run-throughput"].chart.series[0][1] == pytest.approx([20] * 9)  # the last step has no successor
    assert figures["run-between"].chart.values == pytest.approx((100 * 0.2 * 9 / (9 + 0.8),) * 2)
    assert figures["run-sums"].chart.values == pytest.approx((0, 100 * 0.1 * 10 / (9 + 0.8)))
    assert figures["run-denominators-0"].chart.series[0][1] == (21, 27) * 5
    assert figures["run-targets-0"].table.rows == ((0, 115, 47.92), (1, 125, 52.08))
    assert figures["run-losses"].chart.series[0][1] == pytest.approx([2] * 10)
    coverage = next(section for section in report.sections if section.name == "coverage")
    assert coverage.tables[0].rows[0][:4] == (0, True, 10, 100)
    assert "each sample was trained on exactly once in epoch(s) 0" in report.verdict


def test_a_run_that_is_not_exactly_once(manifest, tmp_path):
    plan = Plan.make(manifest, batch_size=5, world_size=2, seed=1)
    write_ledger(tmp_path, plan)
    log = tmp_path / "rank-00001.attempt-0000.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:5] + lines[7:]))
    report = report_on_plan(plan, ledger=tmp_path)
    assert not report.holds
    assert "did not log this window" in report.to_html()


def test_a_run_without_times(manifest, tmp_path):
    plan = Plan.make(manifest, batch_size=5, world_size=2)
    write_ledger(tmp_path, plan)
    for path in tmp_path.glob("*.rounds.jsonl"):
        path.unlink()
    page = report_on_plan(plan, ledger=tmp_path).to_html()
    assert "The ledger has no times" in page


def test_a_mixture(manifest):
    mixture = Mixture({"web": (manifest, 3), "<b>code</b>": (manifest, 1)})
    report = report_on_mixture(MixturePlan.make(mixture, batch_size=4, world_size=2))
    assert report.holds
    shares = figures_of(report)["mixture-shares"]
    assert "web 75 %" in shares.summary
    assert [section.title for section in report.sections] == ["Mixture", "Data of <b>code</b>", "Data of web"]
    assert "<b>" not in report.to_html()


def test_a_run_on_a_mixture(manifest, tmp_path):
    plan = MixturePlan.make(Mixture({"web": (manifest, 3), "code": (manifest, 1)}), batch_size=4, world_size=2)
    for rank in range(2):
        with ConsumedLog(tmp_path, rank, 2, 0, plan.cursor(), plan) as log:
            for window in range(5):
                mine = plan.windows(window * 8, 1)[0].reshape(2, -1)[rank]
                place = {"epoch": 0, "position": window * 8}
                log.window(**place, ids=logged_ids(plan, mine), targets={"lm": (30, 10 * (rank + 1))})
    report = report_on_mixture(plan, ledger=tmp_path)
    assert report.holds, report.violations
    assert figures_of(report)["run-targets-0"].table.rows == ((0, 50, 33.33), (1, 100, 66.67))
    coverage = next(section for section in report.sections if section.name == "coverage")
    assert dict(coverage.tables[0].rows) == pytest.approx({"web": 0.3, "code": 0.1})
    assert "The ledger has no times" in report.to_html()


@pytest.mark.parametrize("world_size", [1, 4000])
def test_a_plan_without_steps(world_size):
    manifest = Manifest.synthetic(num_shards=1, blocks_per_shard=1, rows_per_block=5)
    with pytest.warns(ShardStreamWarning, match="leaves no step"):
        plan = Plan.make(manifest, batch_size=8, world_size=world_size, lanes=world_size, tail="drop")
    assert "There is no step to show" in report_on_plan(plan).to_html()


# ---------------------------------------------------------------------------------------------------------- the page


def test_nothing_from_data_becomes_markup(manifest, tmp_path):
    evil = replace(manifest, urls=[f"{k}{EVIL}" for k in range(4)], root=f"s3://key:secret@bucket/{EVIL}", path=EVIL)
    plan = Plan.make(evil, batch_size=5, world_size=2)
    write_ledger(tmp_path, plan, head=EVIL)
    report = report_on_plan(plan, ledger=tmp_path)
    page = report.to_html()
    assert "secret" not in page
    assert "secret" not in json.dumps(report.to_dict())
    elements = Page(page).elements
    assert "script" not in {tag for tag, _ in elements}
    assert not [name for _, attributes in elements for name in attributes if name.startswith("on")]
    assert EVIL in "".join(Page(page).texts)  # and it is still there to read
    assert "49" not in "".join(text for text in Page(page).texts if "alert" in text)


def test_a_page_loads_nothing(manifest, tmp_path):
    plan = Plan.make(manifest, batch_size=5, world_size=2)
    write_ledger(tmp_path, plan)
    page = report_on_plan(plan, ledger=tmp_path).to_html()
    links = [a[name] for _, a in Page(page).elements for name in ("src", "href", "xlink:href", "action") if name in a]
    assert links
    assert all(link.startswith(("#", "data:,")) for link in links)
    assert "url(" not in page
    assert "@import" not in page
    assert page == report_on_plan(plan, ledger=tmp_path).to_html()


def test_every_figure_is_there_in_words_and_as_a_table(manifest, tmp_path):
    plan = Plan.make(manifest, batch_size=5, world_size=2)
    write_ledger(tmp_path, plan)
    report = report_on_plan(plan, ledger=tmp_path)
    elements = Page(report.to_html()).elements
    names = [attributes["aria-label"] for _, attributes in elements if attributes.get("role") == "img"]
    assert names == [f"{figure.title}. {figure.summary}" for figure in figures_of(report).values()]
    num_tables = sum(len(s.tables) + len(s.figures) for s in report.sections)
    assert [tag for tag, _ in elements].count("caption") == num_tables
    anchors = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(anchors) == len(set(anchors))
    for figure in figures_of(report).values():
        assert all(len(row) == len(figure.table.columns) for row in figure.table.rows)


# ------------------------------------------------------------------------------------------------------- the command


def test_the_command(manifest, tmp_path):
    manifest.save(tmp_path / "m")
    page = tmp_path / "report.html"
    done = run(tmp_path / "m", "--world-size", 2, "--batch-size", 4, "--label", "uid", "-o", page)
    assert done.exit_code == 0, done.output
    assert "Verdict: Every promise holds" in done.stdout
    assert "Classes in a micro-batch" in page.read_text("utf-8")
    done = run(tmp_path / "m", "--json")
    assert json.loads(done.stdout)["details"]["audit"]["settings"]["num_samples"] == 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--synthetic", "1x1x9"), "give -o FILE, or --json"),
        (("-o", "x"), "give either MANIFEST or --synthetic"),
        (("--synthetic", "1x1x9", "--windows", "3", "--json"), "--windows goes with a mixture"),
        (("m.yaml", "--lanes", "3", "--json"), "--lanes goes with one data set"),
    ],
)
def test_wrong_usage(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
