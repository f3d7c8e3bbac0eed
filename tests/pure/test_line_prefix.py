"""What a worker's line begins with on the screen."""

from __future__ import annotations

from torchelastic.agent.terminal import Terminal
from torchelastic.line_prefix import TORCHRUNS, LinePrefix, unknown_macros


def test_without_a_template_it_is_the_workers_number() -> None:
    assert LinePrefix().of(3) == "[worker 3] "


def test_a_template_has_torchruns_macros_and_keeps_what_is_none() -> None:
    prefix = LinePrefix("${hostname}:${rank}/$local_rank ${role_name} ${node} $$: ", host="n7", role="r", ranks={1: 9})
    assert prefix.of(1) == "n7:9/1 r ${node} $: "
    assert LinePrefix(TORCHRUNS, role="rank").of(0) == "[rank0]:"
    assert unknown_macros("${node} $rank $$x $local_rank") == ["node"]


def test_ranks_follow_the_group_and_a_worker_that_is_in_none_keeps_its_last() -> None:
    prefix = LinePrefix("[$rank] ")
    assert prefix.of(0) == "[?] "
    prefix.learn({0: 4, 1: 5})
    assert (prefix.of(0), prefix.of(1)) == ("[4] ", "[5] ")
    prefix.learn({1: 0})
    assert (prefix.of(0), prefix.of(1)) == ("[4] ", "[0] ")


def test_each_line_of_a_worker_on_the_screen_begins_with_it() -> None:
    written: list[str] = []
    terminal = Terminal(lambda _stream, text: written.append(text), prefix=LinePrefix("r$rank|", ranks={0: 2}))
    terminal.said(0, "stdout", "loss 0.1")
    terminal.asks(0, "stdout", "(Pdb) ")
    assert written == ["r2|loss 0.1\n", "r2|(Pdb) "]
