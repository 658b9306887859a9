"""Progress: a bar in a terminal; elsewhere nothing for five seconds, then at most a line in ten."""

from __future__ import annotations

import io
import threading

import pytest
from rich.errors import LiveError
from rich.progress import Progress as Bars

from nearfar._utils import progress
from nearfar._utils.console import Terminal
from nearfar._utils.progress import Progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plain() -> tuple[Terminal, io.StringIO]:
    stream = io.StringIO()
    return Terminal(file=stream, width=40), stream


def terminal() -> tuple[Terminal, io.StringIO]:
    stream = io.StringIO()
    return Terminal(file=stream, width=160, force_terminal=True, _environ={"TERM": "xterm"}), stream


def test_no_terminal_gets_a_line_after_five_seconds_and_then_one_in_ten():
    clock, (console, stream) = Clock(), plain()
    with Progress("embedding", 1000, console=console, clock=clock) as bar:
        for second in range(1, 31):
            clock.now = float(second)
            bar.advance(20)
    assert stream.getvalue().splitlines() == [
        "embedding: 100 of 1,000, 20/s, 45 s left",
        "embedding: 300 of 1,000, 20/s, 35 s left",
        "embedding: 500 of 1,000, 20/s, 25 s left",
    ]


def test_short_work_leaves_no_line_and_hidden_work_none_at_all():
    clock, (console, stream) = Clock(), plain()
    with Progress("reading", 10, console=console, clock=clock) as bar:
        clock.now = 4.9
        bar.to(10)
    with Progress("reading", 10, console=console, clock=clock, shown=False) as bar:
        clock.now = 99.0
        bar.to(10)
        bar.aside("scoring", 1, 2)
    assert stream.getvalue() == ""


def test_a_new_stage_counts_from_its_own_beginning():
    clock, (console, stream) = Clock(), plain()
    with Progress("evaluating", console=console, clock=clock, done=0) as bar:
        clock.now = 100.0
        bar("searching", 0, 50)
        clock.now = 110.0
        bar("searching", 10, 50)
    assert stream.getvalue().splitlines()[-1] == "searching: 10 of 50, 1.0/s, 40 s left"


def test_what_was_done_before_does_not_count_as_speed():
    clock, (console, stream) = Clock(), plain()
    with Progress("training", 100, done=90, console=console, clock=clock) as bar:
        clock.now = 6.0
        bar.to(92, "loss 0.5")
    assert stream.getvalue() == "training: 92 of 100, loss 0.5, 3.0 s each, 24 s left\n"


def test_preparation_does_not_count_as_speed():
    clock, (console, stream) = Clock(), plain()
    with Progress("training", 3200, done=100, console=console, clock=clock) as bar:
        clock.now = 45.0
        bar.begin(101)
        bar.to(101)
        clock.now = 57.0
        bar.to(107)
    assert stream.getvalue().splitlines() == [
        "training: 101 of 3,200",
        "training: 107 of 3,200, 2.0 s each, 1 h 43 min left",
    ]


def test_other_work_in_between_shares_the_lines():
    clock, (console, stream) = Clock(), plain()
    with Progress("training", 100, console=console, clock=clock) as bar:
        clock.now = 6.0
        bar.aside("embedding", 5, 10)
        bar.aside("embedding", 6, 10)
        bar.to(1)
    assert stream.getvalue() == "embedding: 5 of 10\n"


def test_work_that_reports_nothing_gives_a_sign_of_life(monkeypatch):
    monkeypatch.setattr(progress, "FIRST", 0.0)
    told = threading.Event()

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            told.set()
            return super().write(text)

    stream = Stream()
    with Progress("indexing", console=Terminal(file=stream)):
        assert told.wait(60)
    assert stream.getvalue().startswith("indexing: 0 s so far")


def test_a_terminal_gets_a_bar_with_count_rate_and_time_left():
    console, stream = terminal()
    with Progress("embedding", 4, console=console, stays=True) as bar:
        bar.advance(1)
        bar.advance(1, "loss 0.5")
        bar.aside("scoring", 1, 2)
        bar("searching", 3, 4)
        bar.aside("scoring", 2, 2)
    shown = stream.getvalue()
    assert "3 of 4" in shown
    assert "searching" in shown
    assert "left" in shown


def test_a_stage_of_unknown_length_forgets_the_count_of_the_one_before():
    console, stream = terminal()
    with Progress("ranking", 4, console=console, stays=True) as bar:
        bar("laying out", 0, 0)
    assert "of" not in stream.getvalue().rpartition("laying out")[2]


def test_a_bar_of_somebody_else_is_left_alone(monkeypatch):
    """Older releases of rich allow one live display at a time."""

    def refuse(self):
        raise LiveError("Only one live display may be active at once")

    monkeypatch.setattr(Bars, "start", refuse)
    console, stream = terminal()
    with Progress("ours", 2, console=console) as bar:
        bar.advance()
        bar.aside("scoring", 1, 2)
    assert stream.getvalue() == ""


@pytest.mark.parametrize("evil", ["a\x1b[2Jb", "[red]x[/red]"])
def test_names_are_shown_and_not_obeyed(evil):
    for console, stream in (plain(), terminal()):
        clock = Clock()
        with Progress(evil, 2, console=console, clock=clock, stays=True) as bar:
            clock.now = 9.0
            bar.advance()
        assert "\x1b[2Jb" not in stream.getvalue()
        assert evil.replace("\x1b", "\\x1b") in stream.getvalue()
