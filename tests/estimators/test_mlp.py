"""A network with learnt L2 weights: what it learns, predicts and keeps."""

import pickle

import numpy as np
import pytest
from sklearn.metrics import log_loss

from simfbo import Point, UserError
from simfbo.estimators import FederatedLogistic, FederatedMLPClassifier

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 4)) * [1.0, 100.0, 1.0, 1.0] + [0.0, 1000.0, 0.0, 0.0]
CLIENTS = np.arange(200) % 5
LABELS = np.where(X[:, 0] * (X[:, 1] - 1000) + 10 * RNG.normal(size=200) > 0, "like", "unlike")

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@pytest.fixture(scope="module")
def fitted():
    return FederatedMLPClassifier(
        hidden_layer_sizes=6, rounds=300, folds=2, floor=0.01, spread=np.inf, random_state=0
    ).fit(X, LABELS, CLIENTS)


def test_it_learns_what_no_linear_model_can(fitted):
    assert fitted.score(X, LABELS) > 0.9
    linear = FederatedLogistic(rounds=20, steps=Point(x=0.1, y=0.5, v=0.5), folds=2)
    assert linear.fit(X, LABELS, CLIENTS).score(X, LABELS) < 0.65


def test_features_that_matter_are_regularised_less(fitted):
    assert fitted.regularisation_.shape == (4,)
    assert fitted.layer_regularisation_.shape == (1,)
    assert 100 * fitted.regularisation_[:2].max() < fitted.regularisation_[2:].min()


def test_networks_are_kept_in_the_users_units(fitted):
    state, Z = fitted.history_.state, (X - X.mean(0)) / X.std(0)
    s = np.sqrt(1 / (1 + np.exp(np.asarray(state.x, float))))
    (first, bias), (last, end) = (map(np.asarray, layer) for layer in state.y)
    found = []
    for k in (0, 1):
        scores = np.tanh(Z @ (s[:4, None] * first[k]) + bias[k]) @ (s[4] * last[k]) + end[k]
        found.append(1 / (1 + np.exp(scores[:, 0] - scores[:, 1])))
    mean = np.mean(found, axis=0)
    np.testing.assert_allclose(fitted.predict_proba(X)[:, 1], mean, atol=1e-5)
    np.testing.assert_array_equal(fitted.predict(X), np.where(mean > 0.5, "unlike", "like"))


def test_clients_are_scored_by_the_mean_of_the_networks(fitted):
    scores = fitted.score_clients(X, LABELS, CLIENTS)
    for i in range(5):
        own = i == CLIENTS
        wanted = log_loss(LABELS[own], fitted.predict_proba(X[own]))
        assert scores.values["loss"][i] == pytest.approx(wanted, rel=1e-9)
    assert scores.mean("accuracy") == pytest.approx(fitted.score(X, LABELS))
    # After fit, by networks that did not see the rows.
    assert fitted.score_clients_.mean("loss") > scores.mean("loss")


def test_one_weight_for_every_layer():
    model = FederatedMLPClassifier(
        hidden_layer_sizes=(4, 3), regularise="layers", rounds=3, folds=2, random_state=0,
        steps=Point(x=0.1, y=0.3, v=0.3),
    ).fit(X, LABELS, CLIENTS)  # fmt: skip
    assert model.regularisation_.shape == (1,)
    assert model.layer_regularisation_.shape == (2,)
    assert [coef.shape for coef in model.coefs_] == [(2, 4, 4), (2, 4, 3), (2, 3, 2)]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"regularise": "all"}, "regularise must be 'features' or 'layers', got 'all'"),
        ({"hidden_layer_sizes": ()}, "hidden_layer_sizes must be such as 16"),
        ({"hidden_layer_sizes": "16"}, "hidden_layer_sizes must be such as 16"),
        ({"hidden_layer_sizes": (4, 0)}, "hidden_layer_sizes == 0, must be >= 1"),
    ],
)
def test_wrong_parameters_are_sentences(wrong, sentence):
    with pytest.raises((UserError, ValueError), match=sentence):
        FederatedMLPClassifier(**wrong).fit(X, LABELS, CLIENTS)


@pytest.mark.parametrize("labels", [LABELS, np.array(["a", "b", "c"])[np.arange(200) % 3]])
@pytest.mark.usefixtures("random_models")
def test_exported_networks_predict_the_same(labels):
    model = FederatedMLPClassifier(hidden_layer_sizes=(3, 2), random_state=0)
    model.fit(X, labels, CLIENTS)
    plain = pickle.loads(pickle.dumps(model.export()))
    np.testing.assert_allclose(plain.predict_proba(X), model.predict_proba(X), atol=1e-12)
    np.testing.assert_array_equal(plain.predict(X), model.predict(X))


@pytest.mark.usefixtures("random_models")
def test_networks_in_onnx():
    pytest.importorskip("skl2onnx")
    runtime = pytest.importorskip("onnxruntime")
    Z = (X - X.mean(0)) / X.std(0)  # single precision: no large means
    model = FederatedMLPClassifier(hidden_layer_sizes=3, random_state=0).fit(Z, LABELS, CLIENTS)
    session = runtime.InferenceSession(model.export_onnx().SerializeToString())
    label, found = session.run(None, {"X": Z.astype(np.float32)})
    np.testing.assert_allclose(found, model.predict_proba(Z), atol=1e-5)
    np.testing.assert_array_equal(label, model.predict(Z))
