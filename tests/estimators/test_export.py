"""Exported models predict what the estimators do, and need no simfbo for it."""

import pickle
import subprocess
import sys

import numpy as np
import pandas
import pytest
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import GammaRegressor, LogisticRegression, PoissonRegressor, Ridge
from sklearn.pipeline import Pipeline

from simfbo import Point, UserError
from simfbo.errors import MissingExtra
from simfbo.estimators import (
    FairRegressor,
    FederatedGLM,
    FederatedLogistic,
    FederatedRidge,
    FederatedTabular,
    LongTailClassifier,
)

RNG = np.random.default_rng(0)
N = 60
QUICK = {"rounds": 4, "steps": Point(x=0.1, y=0.5, v=0.5), "random_state": 0, "tol": 0.0}
X = RNG.normal(size=(N, 3)) * [1.0, 10.0, 1.0] + [0.0, 50.0, 0.0]
LABELS = RNG.choice(["no", "perhaps", "yes"], N)
AMOUNTS = np.exp(X[:, 0]) + 0.1
CLIENTS = np.arange(N) % 3
FRAME = pandas.DataFrame(
    {
        "blood pressure": np.where(RNG.random(N) < 0.2, np.nan, RNG.normal(120, 15, N)),
        "ward": RNG.choice(np.array(["surgery", "Ärzte", "missing", None], object), N),
        "smoker": RNG.random(N) < 0.3,
        "hospital": RNG.choice(["north", "south"], N),
        "grade": pandas.Categorical(RNG.choice([1, 2, 10], N)),
        "visits": pandas.array(RNG.choice([1, 2, None], N), dtype="Int64"),
    }
)
FRAME.loc[[7, 8], "ward"] = ["rare", "seldom"]
NEW = FRAME.iloc[:12].copy()
NEW["ward"] = ["new", np.nan, pandas.NA, None, "(missing)", *FRAME.ward[5:12]]

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@pytest.fixture(scope="module")
def logistic():
    return FederatedLogistic(**QUICK).fit(X, LABELS, CLIENTS)


@pytest.fixture(scope="module")
def on_frame():
    return FederatedLogistic(**QUICK).fit(FRAME, LABELS == "yes", "hospital")


def again(model):
    """Return what a file would bring back."""
    return pickle.loads(pickle.dumps(model))


def with_rare(model):
    """Return a fitted classifier whose table has rare categories, with any coefficients."""
    found = again(model)
    found.preprocessing_ = FederatedTabular(scale=False, min_rows=10).fit(FRAME, clients="hospital")
    width = len(found.preprocessing_.get_feature_names_out())
    found.coef_ = np.random.default_rng(1).normal(size=(1, width)) / 50
    return found


def test_a_classifier_of_three_classes(logistic):
    found = again(logistic.export())
    assert type(found) is LogisticRegression
    np.testing.assert_allclose(found.predict_proba(X), logistic.predict_proba(X), atol=1e-12)
    np.testing.assert_array_equal(found.predict(X), logistic.predict(X))
    np.testing.assert_array_equal(found.classes_, ["no", "perhaps", "yes"])
    assert found.n_iter_.tolist() == [4]
    assert found.n_features_in_ == 3
    assert not hasattr(found, "feature_names_in_")
    found.coef_[:] = 0  # the estimator keeps its own
    assert logistic.coef_.any()


def test_two_classes_and_the_names_of_features():
    frame = pandas.DataFrame(X, columns=["a", "b", "c"]).assign(client=CLIENTS)
    model = LongTailClassifier(**QUICK).fit(frame, LABELS == "yes", "client")
    found = again(model.export())
    assert found.feature_names_in_.tolist() == ["a", "b", "c"]
    given = frame[found.feature_names_in_]
    np.testing.assert_allclose(found.predict_proba(given), model.predict_proba(frame), atol=1e-12)
    np.testing.assert_array_equal(found.predict(given), model.predict(frame))
    with pytest.raises(ValueError, match="client"):
        found.predict(frame)


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (FederatedRidge(**QUICK), Ridge),
        (FairRegressor(**QUICK), Ridge),
        (FederatedGLM(**QUICK), PoissonRegressor),
        (FederatedGLM(family="gamma", **QUICK), GammaRegressor),
    ],
)
def test_regressors(model, kind):
    model.fit(X, AMOUNTS, CLIENTS)
    found = again(model.export())
    assert type(found) is kind
    np.testing.assert_allclose(found.predict(X), model.predict(X), rtol=1e-12)
    assert found.score(X, AMOUNTS) == pytest.approx(model.score(X, AMOUNTS))
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(model.export_onnx().SerializeToString())
    (values,) = session.run(None, {"X": X.astype(np.float32)})
    np.testing.assert_allclose(values[:, 0], model.predict(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rare", [False, True])
def test_a_table_with_text_and_gaps(on_frame, rare):
    model = with_rare(on_frame) if rare else on_frame
    found = again(model.export())
    assert isinstance(found, Pipeline)
    for rows in (
        FRAME,
        NEW,
        NEW[list(NEW)[::-1]],
        NEW.drop(columns="hospital"),
        NEW.astype(object),
    ):
        wanted = model.predict_proba(rows[list(FRAME)] if "hospital" in rows else rows)
        if rows.dtypes.astype(str).eq("object").all():
            rows = rows.assign(visits=rows.visits.where(rows.visits.notna(), None))
        np.testing.assert_allclose(found.predict_proba(rows), wanted, atol=1e-12)
        np.testing.assert_array_equal(found.predict(rows), wanted[:, 1] > 0.5)


@pytest.mark.parametrize(
    "settings", [{}, {"min_rows": 100}, {"min_rows": 10}, {"impute": "mean", "scale": False}]
)
def test_a_transformer(settings):
    tabular = FederatedTabular(**settings).fit(FRAME, clients="hospital")
    found = again(tabular.export())
    np.testing.assert_array_equal(found.transform(NEW), tabular.transform(NEW))
    assert len(found.get_feature_names_out()) == len(tabular.get_feature_names_out())


def test_arrays_without_names():
    rows = np.array(
        [[1.0, "a", None], [None, "b", "u"], [3.0, np.nan, "u"], [4.0, "a", "u"]], object
    )
    tabular = FederatedTabular().fit(rows, clients=[0, 0, 1, 1])
    np.testing.assert_array_equal(again(tabular.export()).transform(rows), tabular.transform(rows))


def test_categories_that_are_no_text():
    frame = pandas.DataFrame({"grade": pandas.Categorical([10, 2, 10, None])})
    tabular = FederatedTabular().fit(frame, clients=[0, 1, 0, 1])
    assert tabular.categories_["grade"] == ["10", "2", None]
    found = again(tabular.export())
    np.testing.assert_array_equal(found.transform(frame), tabular.transform(frame))
    days = pandas.to_datetime(["2024-01-02", "2024-01-01"])
    for values in (days, ["a", 1]):
        tabular.fit(pandas.DataFrame({"day": pandas.Categorical(values)}), clients=[0, 1])
        with pytest.raises(UserError, match="'day' are neither all text nor all numbers"):
            tabular.export()


@pytest.mark.parametrize("call", ["export", "export_onnx", "card"])
def test_nothing_is_exported_before_fit(call):
    with pytest.raises(NotFittedError):
        getattr(FederatedLogistic(), call)()
    if call == "export":
        with pytest.raises(NotFittedError):
            FederatedTabular().export()


@pytest.mark.slow
def test_simfbo_is_not_needed(on_frame, tmp_path):
    file = tmp_path / "model.pickle"
    file.write_bytes(pickle.dumps((on_frame.export(), FRAME)))
    code = ("import pickle, sys; sys.modules['simfbo'] = sys.modules['jax'] = None; "
            f"model, rows = pickle.load(open({str(file)!r}, 'rb')); "
            "print(model.predict(rows).sum())")  # fmt: skip
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) == on_frame.predict(FRAME).sum()


@pytest.mark.parametrize("classes", [2, 3])
def test_onnx_of_a_classifier(logistic, on_frame, classes, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    model = logistic
    if classes == 2:
        model = again(logistic)
        model.classes_, model.coef_, model.intercept_ = np.array([3, 7]), model.coef_[:1], [0.2]
    written = model.export_onnx(tmp_path / "model.onnx")
    assert written.SerializeToString() == (tmp_path / "model.onnx").read_bytes()
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    labels, shares = session.run(["label", "probabilities"], {"X": X.astype(np.float32)})
    np.testing.assert_allclose(shares, model.predict_proba(X), atol=1e-5)
    np.testing.assert_array_equal(labels, model.predict(X))


def fed(rows):
    """Return a frame as the inputs of an ONNX model."""
    texts = {name: rows[name].astype(object) for name in ("ward", "grade")}
    texts = {name: ["" if v is None or v != v else str(v) for v in texts[name]] for name in texts}
    rows = rows.rename(columns={"blood pressure": "blood_pressure"})
    numbers = ("blood_pressure", "smoker", "visits")
    return {
        **{name: rows[[name]].to_numpy(np.float32, na_value=np.nan) for name in numbers},
        **{name: np.array(texts[name], object)[:, None] for name in texts},
    }


@pytest.mark.parametrize("rare", [False, True])
def test_onnx_of_a_table(on_frame, rare):
    runtime = pytest.importorskip("onnxruntime")
    model = with_rare(on_frame) if rare else on_frame
    session = runtime.InferenceSession(model.export_onnx().SerializeToString())
    rows = FRAME.assign(ward=["new", *FRAME.ward[1:]])
    shares = session.run(["probabilities"], fed(rows))[0]
    np.testing.assert_allclose(shares, model.predict_proba(rows), atol=1e-5)
    named = {one.name for one in session.get_inputs()}
    assert named == {"blood_pressure", "ward", "smoker", "grade", "visits"}


def test_onnx_cannot_tell_missing_from_empty(on_frame):
    pytest.importorskip("skl2onnx")
    model = again(on_frame)
    model.preprocessing_.categories_["ward"][0] = ""
    with pytest.raises(UserError, match="'ward' has the category \"\", which stands for missing"):
        model.export_onnx()


def test_onnx_is_an_extra(logistic, monkeypatch):
    monkeypatch.setitem(sys.modules, "skl2onnx", None)
    with pytest.raises(MissingExtra, match=r"needs skl2onnx.*pip install 'simfbo\[onnx\]'"):
        logistic.export_onnx()
