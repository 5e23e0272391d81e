"""What comes from outside is shown as the text it is, and tables never break a figure in two."""

import io

import pytest
from rich.padding import Padding
from rich.text import Text

from adaponder import terminal
from adaponder.terminal import Screen, by_depth, line, plain, table

HOSTILE = "a\x1b]0;owned\x07b\x1b[31m\x9b2Jc :smile: [/b] [red]d[/red] \u202egpj.exe \udcff"


@pytest.fixture
def screen(monkeypatch):
    """Returns a console of 80 columns, and its output."""
    monkeypatch.setenv("TERM", "xterm-256color")
    written = io.StringIO()
    console = Screen()
    console.file, console._force_terminal, console.is_interactive, console.width = written, True, True, 80
    monkeypatch.setattr(terminal, "console", console)
    return console, written


def obeyed(text: str) -> set[str]:
    """Returns the characters of ``HOSTILE`` that a terminal would obey and rich itself does not write."""
    ours = text.replace("\x1b[", "")  # rich's own colours and cursor moves
    return {character for character in "\x1b\x07\x9b\u202e\udcff" if character in ours} | (
        {"red"} if "\x1b[31m" in text else set()
    )


def show_what_moves(screen: Screen) -> None:
    with screen.status(HOSTILE):
        pass
    with terminal.counting(HOSTILE, 2) as advance:
        advance(1)


WAYS = {
    "a string": lambda screen: screen.print(HOSTILE),
    "a line": lambda screen: screen.print(line("in ", (HOSTILE, "bold"))),
    "a text": lambda screen: screen.print(Text(HOSTILE)),
    "a table": lambda screen: screen.print(table(HOSTILE, ("", HOSTILE), [(HOSTILE, HOSTILE)])),
    "by depth": lambda screen: screen.print(by_depth([HOSTILE], [1], 2)),
    "inside": lambda screen: screen.print(Padding(HOSTILE, (0, 0, 0, 4))),
    "a rule": lambda screen: screen.rule(HOSTILE),
    "what moves": show_what_moves,
}


@pytest.mark.parametrize("way", WAYS)
def test_text_from_outside_is_text(screen, way):
    console, written = screen
    WAYS[way](console)
    shown = written.getvalue()
    assert not obeyed(shown), shown
    assert ":smile:" in shown
    assert "[/b]" in shown


def test_plain_text_is_as_long_and_says_what_was_there():
    assert plain("a\tb\nc") == "a\tb\nc"
    assert plain("\x1b[0m\x7f") == "␛[0m␡"
    assert len(plain(HOSTILE)) == len(HOSTILE)
    plain(HOSTILE).encode()


SENTENCE = "there will be no validation loss, since the text is too short for a single window of it " * 3


def test_a_sentence_breaks_between_words_in_a_window_and_nowhere_in_a_pipe(screen):
    console, written = screen
    console.print(SENTENCE, soft_wrap=True)
    assert max(map(len, written.getvalue().splitlines())) <= 80
    assert written.getvalue().split() == SENTENCE.split()
    pipe = Screen()
    pipe.file, pipe.width = io.StringIO(), 80
    pipe.print(SENTENCE, soft_wrap=True)
    assert pipe.file.getvalue() == SENTENCE + "\n"


def drawn(width: int, *what) -> list[str]:
    screen = Screen()
    screen.file, screen.width = io.StringIO(), width
    screen.print(table(*what))
    return screen.file.getvalue().splitlines()


FIGURES = [[f"policy {i}", *(f"{i}.{column:04d} … 9.{column:04d}" for column in range(8))] for i in range(3)]
HEADS = ["", *(f"head of column {column}" for column in range(8))]


@pytest.mark.parametrize("width", [60, 80, 300])
def test_a_table_never_breaks_a_figure(width):
    lines = drawn(width, "Wide", HEADS, FIGURES)
    assert max(map(len, lines)) <= width
    for row in FIGURES:
        for cell in row:
            assert any(cell in shown for shown in lines), (width, cell)
    tables = sum("policy 0" in shown for shown in lines)
    assert tables == {60: 3, 80: 2, 300: 1}[width]


def test_words_stand_left_figures_right_and_a_column_without_any_value_nowhere():
    heads = ("", "loss", "95 %", "policy", "state", "", "empty")
    rows = [("a", "1.25", "1.2 … 1.3", "gate:0.1", "done", "12"), ("b", "out of memory", "–", "fixed:2", "open", "7")]
    rows += [("c", "+10.5*", "", "kl:1", "–", "a sentence"), ("d", "3 MB", "61.2 ± 1.3", "router", "", "1.5")]
    rows = [(*row, empty) for row, empty in zip(rows, ("–", "", " ", "–"), strict=True)]
    assert drawn(80, "Mixed", heads, rows) == [
        "Mixed",
        "            loss        95 %  policy    state            ",
        "a           1.25   1.2 … 1.3  gate:0.1  done   12        ",
        "b  out of memory           –  fixed:2   open   7         ",
        "c         +10.5*              kl:1      –      a sentence",
        "d           3 MB  61.2 ± 1.3  router           1.5       ",
    ]


def test_sentences_and_paths_break_only_where_there_is_no_room_and_lose_nothing():
    sentence = "config, generation config and tokenizer agree"
    assert sentence in drawn(80, "Facts", ("", ""), [("special tokens", sentence)])[1]
    narrow = drawn(50, "Facts", ("", ""), [("special tokens", sentence)])
    assert max(map(len, narrow)) <= 50
    assert " ".join(" ".join(narrow[1:]).split()) == f"special tokens {sentence}"
    path = "runs/" + "x" * 150
    lines = drawn(80, "Files", ("file", "bytes"), [(path, 12)])
    assert max(map(len, lines)) <= 80
    assert "".join(shown.replace("12", "").strip() for shown in lines[2:]) == path
