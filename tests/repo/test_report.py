"""The size report counts what it says."""

from report import Size, prose_words, size_of


def test_code_lines_leave_out_blanks_comments_docstrings_and_imports():
    lines = ['"""Does', 'things."""', "import os", "from a import (", "    b,", ")", "", "# why"]
    lines += ["def f():", '    """Returns 1."""', "    return 1  # one"]
    source = "\n".join(lines)
    assert size_of(source) == Size(files=1, lines=11, code=2)


def test_words_of_tables_and_code_blocks_are_not_prose():
    assert prose_words("# Three words here\n| a | b |\n```\ncode = 1\n```\ntwo more") == 6
