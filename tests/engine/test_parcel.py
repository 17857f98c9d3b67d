import threading

import numpy as np
import pytest
import torch

from attngap.engine.parcel import pack, unpack, unpack_once
from attngap.errors import AttngapError
from tests.zoo import tiny


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(24.0).reshape(2, 3, 4),
        torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(24.0).reshape(4, 6)[1:3, ::2],
        torch.tensor(3.0),
        torch.zeros(0, 3),
        torch.ones(5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.ones(2, requires_grad=True),
        torch.ones(1, 4).expand(3, 4),
    ],
)
def test_tensors_come_out_as_they_went_in(x):
    found = unpack(pack({"x": x}))["x"]
    assert found.dtype == x.dtype
    assert found.requires_grad == x.requires_grad
    assert torch.equal(found, x)


def test_strides_are_kept_where_there_are_no_gaps():
    x = torch.randn(2, 3, 4).permute(2, 0, 1)
    assert unpack(pack(x)).stride() == x.stride()


def test_nothing_is_copied_and_tied_weights_stay_tied():
    model = tiny("gpt2")
    weights = model.get_input_embeddings().weight
    parcel = pack(model)
    assert any(np.shares_memory(array, weights.detach().numpy()) for array in parcel.arrays)
    found = unpack(parcel, lent=True)
    assert found.get_input_embeddings().weight is found.get_output_embeddings().weight
    assert found.get_input_embeddings().weight.data_ptr() == weights.data_ptr()
    tokens = torch.arange(1, 20)[None]
    assert torch.equal(found(tokens).logits, model(tokens).logits)
    assert len(parcel.pickled) < 0.5 * sum(x.nbytes for x in parcel.arrays)


def test_what_is_not_lent_may_be_written_to():
    """A job's own mechanism is fitted in place, and a cluster's memory is not writable."""
    x = torch.zeros(3)
    parcel = pack(x)
    unpack(parcel).add_(1.0)
    assert torch.equal(x, torch.zeros(3))
    assert torch.equal(unpack(parcel), torch.zeros(3))


def test_a_parcel_is_opened_once_in_a_process():
    parcel = pack([torch.ones(2)])
    assert unpack_once(parcel) is unpack_once(parcel)
    assert unpack_once(pack([torch.ones(2)])) is not unpack_once(parcel)


def test_what_cannot_be_sent_is_said():
    with pytest.raises(AttngapError, match=r"A dict cannot be sent to other machines: .*lock"):
        pack({"lock": threading.Lock()})
