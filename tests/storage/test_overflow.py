"""What is kept beyond the limit is in files, reads the same, and leaves nothing behind."""

import pytest
import torch

from attngap.errors import AttngapError
from attngap.storage.overflow import Overflow


def test_beyond_the_limit_tensors_are_in_files_and_the_same(tmp_path):
    kept = Overflow(tmp_path, limit=1000)
    given = [torch.randn(5, 20).half(), torch.randn(3, 4, 50).half(), torch.randn(2, 8).mT]
    found = [kept.keep(x) for x in given]
    assert found[0] is given[0]
    assert kept.written == sum(x.nbytes for x in given[1:])
    for x, y in zip(given, found, strict=True):
        assert torch.equal(x, y)
    assert found[1].data_ptr() != given[1].data_ptr()
    assert not list(tmp_path.iterdir())
    assert torch.equal(found[1][:, 1:3].float(), given[1][:, 1:3].float())


def test_no_room_is_told_in_a_line(tmp_path):
    with pytest.raises(AttngapError, match=r"No room for 0 MB in '.*gone'") as caught:
        Overflow(tmp_path / "gone", limit=0).keep(torch.ones(9))
    assert "\n" not in str(caught.value)
