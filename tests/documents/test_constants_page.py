"""``docs/constants.md`` tells of the numbers as they are."""

from pathlib import Path

from tests.documents.constants_page import constants_of, page

PAGE = Path(__file__).parents[2] / "docs" / "constants.md"
MOST_WORDS = 700


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), (
        "run: python -m tests.documents.constants_page docs/constants.md"
    )
    assert len(page().split()) <= MOST_WORDS, "a page that nobody reads in one go"


def test_what_is_told_of_a_number() -> None:
    source = '''
SHARE = 0.5
"""Of the memory that there is: the rest is kept, because. And more."""
MOST = 7
"""A whole number."""
LITTLE = 1 / 3, 0.5
"""Two."""
QUIET = 1.0
_OWN = 1.0
"""Nobody else's."""
'''
    assert list(constants_of(source)) == [
        ("SHARE", "0.5", "of the memory that there is"),
        ("LITTLE", "(1 / 3, 0.5)", "two"),
    ]
