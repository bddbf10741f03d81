"""Estimators and their clients: what is counted, what does not matter, and bad input."""

import numpy as np
import pandas
import pytest
from sklearn.base import clone
from sklearn.model_selection import cross_val_score

import simfbo
from simfbo import (
    FairClassifier,
    FederatedLogistic,
    FederatedRidge,
    NoisyLabelClassifier,
    Steps,
    UserError,
)
from simfbo.estimators import _reuse as compiled
from simfbo.estimators import _scaling as scaling
from simfbo.estimators._validation import InputError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4))
Y = X @ [1.0, 2.0, 0.0, 0.0] + 0.1 * RNG.normal(size=60)
CLIENTS = RNG.permutation(np.repeat(["a", "b", "c"], [10, 20, 30]))


def same(one, two):
    np.testing.assert_array_equal(one.coef_, two.coef_)
    assert one.intercept_ == two.intercept_


@pytest.fixture(scope="module")
def fitted():
    return FederatedRidge(rounds=20, random_state=0).fit(X, Y, CLIENTS)


def test_every_exchange_is_counted(fitted):
    counts = {name: sent.rounds for name, sent in fitted.ledger_.by_work.items()}
    assert counts == {"moments": 1, "curvature": 15, "simfbo_step": 20}
    assert fitted.ledger_.total.rounds == 36
    assert fitted.ledger_.by_work["moments"].floats_up == 3 * 2 * (4 + 1)
    assert fitted.history_.records[-1]["communication_rounds"] == 36
    assert fitted.n_iter_ == 20
    losses = fitted.history_.column("upper_loss")
    assert losses[-1] < 0.1 * losses[0]


def test_the_clients_names_do_not_matter(fitted):
    other = clone(fitted).fit(X, Y, pandas.Series(CLIENTS).map({"a": 9, "b": 5, "c": 7}))
    same(fitted, other)
    assert fitted.clients_.tolist() == [{9: "a", 5: "b", 7: "c"}[k] for k in other.clients_]


def test_no_clients_are_one_client_and_a_fit_can_be_repeated(fitted):
    alone = clone(fitted).fit(X, Y)
    same(alone, clone(fitted).fit(X, Y, np.zeros(60)))
    same(alone, alone.fit(X, Y))
    # A full batch does not ask who holds it, but for the order of summation.
    np.testing.assert_allclose(alone.coef_, fitted.coef_, atol=1e-4)


def test_cohorts_minibatches_and_local_steps_train_too():
    drawn = FederatedRidge(rounds=60, cohort=2, local_steps=3, batch_size=8, random_state=0)
    assert drawn.fit(X, Y, CLIENTS).score(X, Y) > 0.9
    assert drawn.ledger_.by_work["simfbo_step"].floats_down == 60 * 2 * (3 + 4 + 2 * 5 * 5)


def test_moments_are_those_of_all_rows():
    columns = np.hstack([X, 1e6 + X[:, :1], np.full((60, 1), 0.1)])
    units, ledger = scaling.measure(columns, [np.arange(7), np.arange(7, 60)])
    np.testing.assert_allclose(units.mean, columns.mean(0), rtol=1e-12)
    np.testing.assert_allclose(units.deviation[:5], columns.std(0)[:5], rtol=1e-3)
    assert 0 < units.deviation[5] < 1e-7
    assert ledger.total.rounds == 1


def test_fits_of_one_shape_are_compiled_once(fitted, monkeypatch):
    clone(fitted).fit(X, Y, CLIENTS)
    monkeypatch.setattr(compiled, "_workshop", None)  # nothing new can be made
    again = clone(fitted).set_params(random_state=1).fit(X, Y, CLIENTS)
    assert (again.coef_ != fitted.coef_).all()


def test_frames_strings_and_cross_validation():
    frame = pandas.DataFrame(X, columns=list("pqrs"))
    labels = np.where(Y > 0, "up", "down")
    model = FederatedLogistic(rounds=20, steps=Steps(0.5, 0.5, 0.1), random_state=0)
    assert model.fit(frame, labels, CLIENTS).feature_names_in_.tolist() == list("pqrs")
    assert model.classes_.tolist() == ["down", "up"]
    assert model.coef_.shape == (1, 4)
    np.testing.assert_allclose(model.predict_proba(frame).sum(1), 1)
    assert cross_val_score(model, X, labels, cv=3).mean() > 0.8


def test_progress_is_printed_on_demand_only(capsys):
    model = FederatedRidge(rounds=4, steps=Steps(0.5, 0.5, 0.1), random_state=0).fit(X, Y)
    assert capsys.readouterr().out == ""
    model.set_params(verbose=1).fit(X, Y)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[-1].startswith("round 4 of 4: upper loss 0.")


@pytest.mark.parametrize(
    ("model", "given", "sentence"),
    [
        (FederatedRidge(), {"clients": [1, 2]}, "clients must hold one value for each of the 60"),
        (FairClassifier(), {"groups": X}, r"groups .* got an array of shape \(60, 4\)"),
        (NoisyLabelClassifier(), {"trusted": [True]}, "trusted must hold one value for each of"),
        (NoisyLabelClassifier(), {"trusted": np.ones(60)}, "trusted must hold True or False"),
        (NoisyLabelClassifier(), {"trusted": np.ones(60, bool)}, "True for some rows and False"),
        (FederatedRidge(), {"clients": [np.nan] * 60}, "clients lacks values or mixes types"),
        (FederatedRidge(), {"clients": [None, *"ab" * 29, 1]}, "clients lacks values or mixes"),
        (FederatedRidge(cohort=2), {}, "A cohort of 2 cannot be drawn from 1 clients"),
        (FederatedRidge(steps=0.1), {}, "steps must be 'auto' or simfbo.Steps"),
        (NoisyLabelClassifier(trust="all"), {}, "trust must be 'network' or 'clients'"),
    ],
)
def test_bad_input_ends_in_a_sentence(model, given, sentence):
    target = Y if isinstance(model, FederatedRidge) else Y > 0
    with pytest.raises(InputError, match=sentence):
        model.fit(X, target, **given)


@pytest.mark.parametrize(
    "wrong", [{"rounds": 0}, {"folds": 1}, {"floor": 0.0}, {"batch_size": 0}, {"sparsity": -1.0}]
)
def test_bad_parameters_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FederatedRidge(**wrong).fit(X, Y)


def test_divergence_says_what_to_do():
    wild = FederatedRidge(rounds=60, steps=Steps(50.0, 50.0, 50.0), random_state=0)
    with pytest.raises(UserError, match=r"diverged in round \d+: .*steps='auto'"):
        wild.fit(X, Y)
    assert not hasattr(wild, "coef_")


def test_two_rows_are_enough():
    model = FederatedLogistic(rounds=5, steps=Steps(0.5, 0.5, 0.1), random_state=0)
    assert model.fit([[0.0], [1.0]], ["b", "a"]).predict([[0.0], [1.0]]).shape == (2,)


def test_the_package_offers_them_lazily():
    assert simfbo.FederatedRidge is FederatedRidge
    assert "FederatedRidge" in simfbo.__all__
