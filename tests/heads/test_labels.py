"""Labels follow the odds they are drawn by; freezing spares what it is told to and undoes itself."""

import torch
from scipy.stats import chisquare

from attngap.heads.damage import ROWS, draw_labels, frozen


def test_labels_have_the_frequencies_of_their_odds():
    odds = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.15, 0.05, 0.0]).expand(2, ROWS + 3, -1)
    labels = draw_labels(odds, 50, torch.Generator().manual_seed(0))
    assert labels.shape == (2, ROWS + 3, 50)
    seen = torch.bincount(labels.flatten(), minlength=7)
    possible = odds[0, 0] > 0
    assert seen[~possible].sum() == 0
    expected = odds[0, 0, possible].double().numpy()
    assert chisquare(seen[possible].numpy(), labels.numel() * expected / expected.sum()).pvalue > 0.001


def test_every_row_is_drawn_by_its_own_odds():
    where = torch.randint(9, (1, ROWS + 40), generator=torch.Generator().manual_seed(1))
    odds = torch.nn.functional.one_hot(where, 9).float()
    assert torch.equal(draw_labels(odds, 1, torch.Generator().manual_seed(2))[..., 0], where)


def test_frozen_spares_some_weights_and_leaves_those_alone_that_were_frozen_before():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[2].requires_grad_(False)
    with frozen(model, but=model[0].parameters()):
        assert [p.requires_grad for p in model.parameters()] == [True, True, False, False, False, False]
    assert [p.requires_grad for p in model.parameters()] == [True, True, True, True, False, False]
