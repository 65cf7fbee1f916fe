from kunserve.core.prefix import prefix_hashes
from kunserve.core.tokens import TokenIds


def test_each_full_block_has_a_name():
    assert len(prefix_hashes(TokenIds(range(11)), 4)) == 2
    assert prefix_hashes(TokenIds(range(3)), 4) == ()


def test_equal_beginnings_have_equal_names():
    one, other = TokenIds(range(12)), TokenIds([*range(8), 1, 2, 3, 4])
    names, others = prefix_hashes(one, 4), prefix_hashes(other, 4)
    assert names[:2] == others[:2]
    assert names[2] != others[2]


def test_the_same_block_after_another_beginning_has_another_name():
    names = prefix_hashes(TokenIds([1, 2, 1, 2]), 2)
    assert names[0] != names[1]


def test_salts_part_all_names():
    names = {prefix_hashes(TokenIds([1, 2]), 2, salt)[0] for salt in ("", "a", "b")}
    assert len(names) == 3


def test_known_names_are_gone_on_from():
    tokens = TokenIds(range(20))
    whole = prefix_hashes(tokens, 4, "salt")
    assert prefix_hashes(tokens, 4, "salt", whole[:3]) == whole
