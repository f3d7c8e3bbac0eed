"""The live page of real runs in a real Chromium: what a person sees."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import page_job
from tests.cluster.browser import Tab, browser, chromium
from tests.cluster.harness import Job
from tests.pure.status_runs import NOW_S, a_host, a_run, a_worker
from torchelastic.observe.ledger.accounts import STYLES
from torchelastic.observe.ledger.ledger_events import ComputesWrong, Join, StoreOutage, Straggler
from torchelastic.observe.page.document import About, document_of
from torchelastic.observe.page.feed import RunSnapshot
from torchelastic.observe.page.listening import listening
from torchelastic.observe.page.page_server import PageServer
from torchelastic.observe.status.event_lines import lines_of
from torchelastic.observe.status.run_status import EventLine, combined
from torchelastic.observe.status.status_format import run_to_plain
from torchelastic.rendezvous.records import KeptOut
from torchelastic.text import percent

CHROMIUM = chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
LIVE = "document.getElementById('link').dataset.state == 'live'"
HOSTILE = "<img src=x onerror=document.title='taken'>"


def in_a_browser(watch: Any) -> None:
    """Do this with a tab of a real browser; no script on the page may have failed meanwhile."""

    async def run() -> None:
        assert CHROMIUM is not None
        async with browser(CHROMIUM) as tab:
            await watch(tab)

    asyncio.run(asyncio.wait_for(run(), 100))


def rgb(colour: str) -> str:
    """A colour as a browser says it.

    >>> rgb("#43a56d")
    'rgb(67, 165, 109)'
    """
    return f"rgb({', '.join(str(int(colour[place : place + 2], 16)) for place in (1, 3, 5))})"


def own_addresses(tab: Tab, url: str) -> None:
    assert [one for one in tab.requests if not one.startswith(url)] == []


class PageJob(Job):
    script = Path(page_job.__file__)

    def pid(self, place: int) -> int:
        """The newest process in that place."""
        return int(
            max(self.folder.glob(f"pid-{place}-*"), key=lambda path: path.stat().st_mtime_ns).name.rpartition("-")[2]
        )


@pytest.fixture
def job(tmp_path: Path) -> Any:
    made = PageJob(tmp_path / "job", hostile=True)
    yield made
    made.stop()


@pytest.mark.long
def test_the_page_of_a_standalone_run_shows_its_members_its_ledger_a_kill_and_its_end(job: PageJob) -> None:
    agent = job.start("--standalone", "--rdzv-id=job7", nproc=2)
    url, token = job.page()

    async def watch(tab: Tab) -> None:
        await tab.open(f"{url}#token={token}")
        await tab.wait_for(f"{LIVE} && document.querySelectorAll('#workers-table tbody tr').length == 2")
        await tab.wait_for("document.getElementById('state').textContent == 'running'")
        await tab.wait_for("[...document.querySelectorAll('#workers-table .a-productive.swatch')].length == 2")
        assert await tab.text("h1") == "torchelastic job7"
        rows = await tab.text("#workers-table tbody")
        for place in (0, 1):
            assert str(job.pid(place)) in rows
        await tab.wait_for("/goodput/i.test(document.getElementById('tiles').innerText)")
        await tab.wait_for("document.querySelectorAll('#timeline .save').length > 0")
        assert "productive" in await tab.text("#ledger")
        assert "attainable" in await tab.text("#figures")

        # what was published, also under names that somebody has chosen with care
        tiles = await tab.wait_for("document.getElementById('tiles').innerText")
        assert "loss" in tiles
        await tab.wait_for("document.getElementById('tiles').textContent.includes('onerror')")
        await tab.wait_for("document.getElementById('tiles').textContent.includes('__proto__')")
        assert await tab.ask("document.querySelectorAll('img').length") == 0
        assert await tab.ask("({}).constructor === Object && Object.keys(Object.prototype).length === 0")

        killed = job.pid(1)
        os.kill(killed, signal.SIGKILL)
        bad = "[...document.querySelectorAll('#events li[data-kind=bad]')].map((one) => one.innerText).join()"
        await tab.wait_for(f"/lost, signal 9/.test({bad})")
        await tab.wait_for("document.querySelectorAll('#timeline .bad').length > 0")
        tile = "[...document.querySelectorAll('.tile')].find((one) => one.children[0].textContent == 'Failures')"
        await tab.wait_for(f"{tile}.innerText.includes('on these hosts 1 workers lost')")
        assert await tab.ask(f"{tile}.children[1].textContent") == "1"
        await tab.wait_for(f"!document.getElementById('workers-table').innerText.includes('{killed}')")
        again = "[...document.querySelectorAll('#workers-table tbody tr')].map((one) => one.innerText.split(/\\s+/))"
        await tab.wait_for(f"{again}.filter(([rank]) => rank == '0' || rank == '1').length == 2", 60)
        assert str(job.pid(1)) in await tab.text("#workers-table")
        assert await tab.ask("document.title") == "job7 · torchelastic"

        agent.send_signal(signal.SIGTERM)
        await tab.wait_for("document.getElementById('link').textContent.startsWith('the agent of this host has ended')")
        assert await tab.ask("document.getElementById('main').classList.contains('old')")
        # of a server that is gone the browser complains, and of nothing else
        assert [one for one in tab.problems if "ERR_CONNECTION_REFUSED" not in one] == []
        own_addresses(tab, url)

    in_a_browser(watch)
    assert agent.wait(30) == 128 + signal.SIGTERM
    assert job.output().count("live page") == 1


class Shown:
    """A page that shows what a test wants."""

    def __init__(self, at: str = "0", token_file: Path | None = None) -> None:
        self.status = a_run(a_host("node-1", 0, 1), a_host("node-2", 2))
        self.about = About("node-1", "1.0")
        self.options = listening(at, token_file)
        self.url = self.options.url
        self._server = PageServer(self.options, self.read)
        self._server.start()

    def read(self) -> RunSnapshot:
        return RunSnapshot(run_to_plain(self.status), document_of(self.status, self.about))

    def close(self) -> None:
        self._server.stop()


@pytest.fixture
def show() -> Iterator[Callable[..., Shown]]:
    """Makes pages, which end with the test whatever becomes of it."""
    with ExitStack() as pages:
        yield lambda *at, **options: pages.enter_context(closing(Shown(*at, **options)))


def test_the_page_connects_again_by_itself_and_says_how_old_its_picture_is(
    show: Callable[..., Shown], tmp_path: Path
) -> None:
    async def watch(tab: Tab) -> None:
        shown = show(token_file=tmp_path / "token")
        port = shown.options.socket.getsockname()[1]
        await tab.open(f"{shown.url}#token={shown.options.token}")
        await tab.wait_for(f"{LIVE} && document.querySelectorAll('#workers-table tbody tr').length == 3")
        shown.close()
        await tab.wait_for("/this is how it was \\d+ s ago/.test(document.getElementById('link').textContent)")
        await tab.wait_for("getComputedStyle(document.getElementById('main')).filter == 'grayscale(1)'")
        again = show(str(port), tmp_path / "token")
        again.status = a_run(a_host("node-1", 0))
        await tab.wait_for(f"{LIVE} && document.querySelectorAll('#workers-table tbody tr').length == 1")
        assert not await tab.ask("document.getElementById('main').classList.contains('old')")

    in_a_browser(watch)


def test_whatever_hosts_call_themselves_is_text_and_silent_hosts_and_an_outage_are_told(
    show: Callable[..., Shown],
) -> None:
    shown = show()
    event = EventLine(at_s=NOW_S - 5, host=HOSTILE, kind=HOSTILE, text=HOSTILE, worker=HOSTILE)
    late = a_host("__proto__", 3, at_s=NOW_S - 100)
    shown.status = a_run(
        a_host(HOSTILE, 0, incarnation=HOSTILE, journal=HOSTILE, address="javascript:document.title='taken'",
               version=HOSTILE, events=(event,)), late, because=HOSTILE,
    )  # fmt: skip
    shown.about = About(HOSTILE, HOSTILE, NOW_S)

    async def watch(tab: Tab) -> None:
        await tab.open(shown.options.url_to_open)
        await tab.wait_for(f"{LIVE} && document.querySelectorAll('#hosts-table tbody tr').length == 2")
        text = await tab.ask("document.body.textContent")
        assert text.count("onerror") >= 8
        assert await tab.ask("document.querySelectorAll('img, a[href^=javascript]').length") == 0
        assert await tab.ask("document.title") == "job7 · torchelastic"
        notes = await tab.text("#notes")
        assert "silent: __proto__ for" in notes
        assert "etcd does not answer since" in notes
        assert tab.problems == []
        own_addresses(tab, shown.url)

    in_a_browser(watch)


def test_who_computes_wrong_is_bad_on_the_page_as_on_a_terminal_and_who_is_kept_out_is_noted(
    show: Callable[..., Shown],
) -> None:
    where: dict[str, Any] = {"at_ns": 0, "worker": "node-1-aa/0.0", "rank": 0, "round": 3}
    events = lines_of(
        "node-1",
        [
            (NOW_S - 40, Join(**where, world_size=7, is_first=True, cause="world size 9 was too much")),
            (NOW_S - 30, StoreOutage(at_ns=0, is_over=True, away_ns=10**10)),
            (NOW_S - 20, ComputesWrong(**where, cause="the gradients differ")),
            (NOW_S - 10, Straggler(**where, relative_percent=50.0)),
        ],
    )
    shown = show()
    run = a_run(a_host("node-1", 0, events=events))
    out = {"node-9": KeptOut(NOW_S, "its health check failed")}
    shown.status = combined("job7", NOW_S, run.round, run.members, run.hosts, kept_out=out)

    async def watch(tab: Tab) -> None:
        await tab.open(shown.options.url_to_open)
        await tab.wait_for(f"{LIVE} && document.querySelectorAll('#events li').length == 5")
        grades = await tab.ask("[...document.querySelectorAll('#events li')].map((one) => one.dataset.kind)")
        assert grades == ["warning", "warning", "bad", "", ""], "newest first"
        assert await tab.ask("document.querySelectorAll('#timeline .bad').length") == 1
        titles = await tab.ask("[...document.querySelectorAll('#timeline g title')].map((one) => one.textContent)")
        assert [title for title in titles if title.startswith("round 3: 7 workers")], titles
        assert await tab.text("#notes") == "kept out of the run: node-9: its health check failed"
        shares = [0.0, 1e-5, 0.0005, 0.5, 0.9994, 0.99999, 1.0]
        shown_shares = await tab.ask(
            f"import('./draw.js').then(({{ percent }}) => {shares}.map((one) => percent(one)))"
        )
        assert shown_shares == [percent(share) for share in shares], "less than all never looks like all"
        assert tab.problems == []

    in_a_browser(watch)


def test_each_of_two_agents_of_a_host_has_its_own_workers_and_a_published_step_is_not_the_step_of_the_run(
    show: Callable[..., Shown],
) -> None:
    shown = show()
    first = (a_worker(0, "node-1", worker="node-1-aa/0.0", values={"Step": 77.0}),)
    second = tuple(a_worker(rank, "node-1", worker=f"node-1-bb/{rank}.0", values={}) for rank in (1, 2))
    shown.status = a_run(
        a_host("node-1", incarnation="aa", workers=first), a_host("node-1", incarnation="bb", workers=second)
    )

    async def watch(tab: Tab) -> None:
        await tab.open(shown.options.url_to_open)
        await tab.wait_for(f"{LIVE} && document.querySelectorAll('#hosts-table tbody tr').length == 2")
        workers = "[...document.querySelectorAll('#hosts-table tbody tr')].map((one) => one.cells[2].textContent)"
        assert await tab.ask(workers) == ["1", "2"]
        tiles = "[...document.querySelectorAll('.tile')].map((one) => [one.children[0], one.children[1]])"
        step = f"{tiles}.filter(([name]) => name.textContent == 'Step').map(([, value]) => value.textContent)"
        assert await tab.ask(step) == ["1,200", "77"]

    in_a_browser(watch)


def test_with_a_token_in_the_address_the_page_opens_and_without_it_asks_for_one(
    show: Callable[..., Shown], tmp_path: Path
) -> None:
    shown = show(token_file=tmp_path / "token")
    token = (tmp_path / "token").read_text().strip()

    async def watch(tab: Tab) -> None:
        await tab.open(shown.url)
        await tab.wait_for("!document.getElementById('ask').hidden")
        assert await tab.ask("document.getElementById('main').hidden")
        wrong = "document.getElementById('token').value = 'wrong'; document.querySelector('#ask button').click()"
        await tab.ask(wrong)
        await tab.wait_for("document.getElementById('link').textContent == 'a token is wanted'")
        await tab.ask(f"{wrong}; location.hash = 'token={token}'")  # the right one comes while the wrong one is asked
        await tab.wait_for(LIVE)
        assert await tab.ask("location.hash + location.search") == "", "it does not stay in the address"
        assert await tab.ask("document.querySelectorAll('#workers-table tbody tr').length") == 3
        await tab.call("Page.reload")
        await tab.wait_for(LIVE)

    in_a_browser(watch)


def test_the_page_is_light_or_dark_and_can_be_used_with_a_keyboard_and_a_screen_reader(
    show: Callable[..., Shown],
) -> None:
    shown = show()

    async def watch(tab: Tab) -> None:
        await tab.open(shown.options.url_to_open)
        await tab.wait_for(LIVE)
        paper = "getComputedStyle(document.body).backgroundColor"
        colours = "[...document.querySelectorAll('#ledger .bar i')].map((one) => getComputedStyle(one).backgroundColor)"
        await tab.prefer(dark=False)
        light = await tab.ask(paper)
        assert await tab.ask(colours) == [rgb(style.light) for style in STYLES.values()]
        await tab.prefer(dark=True)
        dark = await tab.ask(paper)
        assert light != dark
        assert await tab.ask(colours) == [rgb(style.dark) for style in STYLES.values()]
        await tab.ask("document.getElementById('theme').click()")
        assert await tab.ask(paper) == light
        assert await tab.ask("document.getElementById('theme').ariaLabel") == "Colours: light"
        await tab.ask("document.getElementById('theme').click()")
        assert await tab.ask(paper) == dark

        tree = (await tab.call("Accessibility.getFullAXTree"))["nodes"]
        seen = [one for one in tree if not one.get("ignored")]
        # newer versions of Chromium leave the space before what a label encloses
        named = {(one["role"]["value"], one.get("name", {}).get("value", "").strip()) for one in seen}
        for role, name in (
            ("heading", "Workers"), ("heading", "Where the time goes"), ("columnheader", "rank"),
            ("table", "Workers by rank"), ("table", "Hosts"), ("combobox", "of the last"), ("checkbox", "saves"),
        ):  # fmt: skip
            assert (role, name) in named, (role, name)
        pictures = [name for role, name in named if role in ("image", "img")]
        assert pictures
        assert "" not in pictures
        assert any("failures and losses" in name for name in pictures)
        reached = []
        for _ in range(12):
            for kind in ("keyDown", "keyUp"):
                await tab.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
            reached.append(await tab.ask("document.activeElement.id || document.activeElement.className"))
        assert {"skip", "theme", "window", "events", "with-saves"} <= set(reached), reached

    in_a_browser(watch)
