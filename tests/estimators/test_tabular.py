"""Tables with text and gaps: against scikit-learn on all rows, what is sent, and bad input."""

import datetime
import math
from fractions import Fraction

import numpy as np
import pandas
import pytest
from sklearn import config_context
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.model_selection import cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from simfbo import Ledger, UserError
from simfbo.estimators import (
    FairClassifier,
    FederatedLogistic,
    FederatedTabular,
    NoisyLabelClassifier,
    _agreement,
)

RNG = np.random.default_rng(0)
N = 61


def gaps(values, share=0.2):
    return np.where(RNG.random(N) < share, None, values)


FRAME = pandas.DataFrame(
    {
        "age": gaps(RNG.normal(50, 10, N)).astype(float),
        "ward": gaps(RNG.choice(["surgery", "Ärzte", "medicine"], N)),
        "hospital": RNG.choice(["north", "south", "west"], N),
        "pressure": RNG.normal(120, 15, N),
        "smoker": RNG.random(N) < 0.3,
        "insurer": RNG.choice(["a", "b"], N),
    }
)
FRAME.loc[FRAME.hospital == "west", "age"] = np.nan  # one client has no ages
NUMBERS, TEXTS = ["age", "pressure", "smoker"], ["ward", "insurer"]
LABEL = RNG.random(N) < 0.5


@pytest.fixture(scope="module")
def fitted():
    return FederatedTabular().fit(FRAME, clients="hospital")


@pytest.mark.parametrize("impute", ["median", "mean"])
def test_it_equals_scikit_learn_on_all_rows(impute):
    numbers = make_pipeline(SimpleImputer(strategy=impute), StandardScaler())
    theirs = ColumnTransformer([("n", numbers, NUMBERS), ("t", OneHotEncoder(), TEXTS)])
    wanted = theirs.fit_transform(FRAME.fillna({"ward": np.nan}))
    ours = FederatedTabular(impute=impute).set_output(transform="pandas")
    found = ours.fit_transform(FRAME, clients="hospital")
    assert list(found) == ["age", "ward_medicine", "ward_surgery", "ward_Ärzte", "ward_missing",
                           "pressure", "smoker", "insurer_a", "insurer_b"]  # fmt: skip
    order = NUMBERS + [name for name in found if name.startswith(tuple(TEXTS))]
    np.testing.assert_allclose(found[order], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", [9, 10])
def test_medians_are_exact(count):
    """Of ties, of both signs and of all magnitudes, of odd and even counts, with gaps."""
    rng = np.random.default_rng(1)
    wide = rng.choice([-1.0, 1.0], (count, 40)) * 10.0 ** rng.uniform(-300, 300, (count, 40))
    some = np.hstack([rng.normal(size=(count, 20)), rng.integers(-2, 3, (count, 20)), wide])
    some[rng.random(some.shape) < 0.3] = np.nan
    some[0] = 0.0
    parts = [np.array([0, 5]), np.array([1]), np.delete(np.arange(count), [0, 1, 5])]
    found = _agreement.agree_on_medians(_agreement.federated_numbers(some, parts, Ledger()))
    np.testing.assert_array_equal(found, np.nanmedian(some, 0))


def test_units_of_large_numbers_are_those_of_exact_arithmetic():
    """Scikit-learn's mean is off by an ulp here; the differences from the fill are small."""
    rows = 1e6 + np.random.default_rng(2).normal(size=(11, 2))
    rows[:, 1] = 0.1  # whose sum is rounded
    exact = [Fraction(value) for value in rows[:, 0].tolist()]
    mean = sum(exact) / 11
    deviation = math.sqrt(sum((value - mean) ** 2 for value in exact) / 11)
    clients = _agreement.federated_numbers(rows, [np.arange(4), np.arange(4, 11)], Ledger())
    for agree in (_agreement.agree_on_medians, _agreement.agree_on_means):
        found = _agreement.agree_on_units(clients, agree(clients))
        assert abs(Fraction(found.mean[0]) - mean) <= np.spacing(1e6) / 2
        assert found.deviation[0] == pytest.approx(deviation, rel=1e-14)
        assert found.deviation[1] == 1


def test_who_holds_the_rows_makes_no_difference(fitted):
    other = FederatedTabular().fit(FRAME.drop(columns="hospital"), clients=np.arange(N) % 3)
    assert other.categories_ == fitted.categories_
    np.testing.assert_array_equal(other.fill_, fitted.fill_)
    np.testing.assert_allclose(other.scale_, fitted.scale_, rtol=1e-12)


def test_every_exchange_is_counted(fitted):
    sent = fitted.ledger_.by_step
    assert {step: one.rounds for step, one in sent.items()} == {
        "kinds": 1, "categories": 1, "digits": 8, "filled_moments": 1}  # fmt: skip
    assert sent["kinds"].floats_up == 3 * 3 * 5
    # Of two columns, 3 categories of up to 8 bytes each, their counts, and that of the missing.
    assert sent["categories"].floats_up == 3 * 2 * (3 * 8 + 3 + 1)
    assert sent["categories"].bytes_up == 3 * 2 * (3 * 8 * 2 + (3 + 1) * 8)
    assert sent["digits"].floats_up == 3 * 8 * 2 * 3 * 256
    assert sent["digits"].floats_down == 3 * 8 * (2 * 3 + 1)
    assert sent["filled_moments"].floats_up == 3 * 2 * 3


def test_unknown_categories_are_zeros_and_rare_ones_share_a_column():
    ward = ["a"] * 3 + ["b", "c", None] + ["missing"] * 2
    clients = [0, 1] * 4
    rare = FederatedTabular(min_rows=2).fit(pandas.DataFrame({"ward": ward}), clients=clients)
    assert rare.categories_ == {"ward": ["a", "missing"]}
    assert rare.infrequent_ == {"ward": ["b", "c", None]}
    new = pandas.DataFrame({"ward": ["a", "b", None, "unknown"]})
    assert rare.transform(new).tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 1], [0, 0, 0]]
    assert rare.get_feature_names_out().tolist() == ["ward_a", "ward_missing", "ward_infrequent"]
    every = FederatedTabular().fit(pandas.DataFrame({"ward": ward}), clients=clients)
    names = every.get_feature_names_out().tolist()
    assert names == ["ward_a", "ward_b", "ward_c", "ward_missing", "ward_missing_2"]
    never = FederatedTabular().fit([["", 1], ["", 2]], clients=[0, 1])
    assert never.transform([[None, 1], ["", None]]).tolist() == [[0, -1], [1, 0]]


def test_types_of_pandas():
    frame = pandas.DataFrame(
        {
            "whole": pandas.array([1, None, 3], "Int64"),
            "yes": pandas.array([True, None, False], "boolean"),
            "code": pandas.Categorical([10, 2, None]),
            "mixed": np.array([1, 2.5, None], object),
            "text": pandas.array(["u", None, "v"], "string"),
        }
    )
    tabular = FederatedTabular(scale=False).set_output(transform="pandas")
    found = tabular.fit_transform(frame, clients=[0, 0, 1])
    assert found.to_dict("list") == {
        "whole": [1, 2, 3], "yes": [1, 0.5, 0],
        "code_10": [1, 0, 0], "code_2": [0, 1, 0], "code_missing": [0, 0, 1],
        "mixed": [1, 2.5, 1.75], "text_u": [1, 0, 0], "text_v": [0, 0, 1],
        "text_missing": [0, 1, 0],
    }  # fmt: skip
    numbers = frame.assign(code=[10.0, 2.0, np.nan])  # the same codes, read another way
    np.testing.assert_array_equal(tabular.transform(numbers), found)


@pytest.mark.parametrize(
    ("values", "error", "sentence"),
    [
        ([1.0, "a", None], UserError, "Column 'c' holds numbers and text, perhaps at different"),
        ([np.nan] * 3, UserError, "Column 'c' has no values at any client: drop it"),
        ([None] * 3, UserError, "Column 'c' has no values at any client: drop it"),
        ([1.0, np.inf, 2.0], UserError, "Column 'c' contains infinity"),
        ([datetime.date(2024, 1, 1)] * 3, UserError, "'c' holds dates: convert them to numbers"),
        (pandas.to_datetime(["2024"] * 3), UserError, "'c' holds dates: convert them to numbers"),
        ([{}, 1.0, 2.0], TypeError, "Column 'c' holds a dict"),
    ],
)
def test_columns_that_cannot_be_used_are_named(values, error, sentence):
    frame = pandas.DataFrame({"c": values, "d": [1.0, 2.0, np.nan]})
    with pytest.raises(error, match=sentence):
        FederatedTabular().fit(frame, clients=[0, 1, 1])
    with pytest.raises(error, match=sentence):
        FederatedLogistic().fit(frame, [0, 1, 1], clients=[0, 1, 1])


@pytest.mark.parametrize(
    ("X", "clients", "sentence"),
    [
        (FRAME, "hospitl", "X has no column 'hospitl': .* such as 'hospital'"),
        (FRAME, "zzz", "such as 'age', 'ward', 'hospital', 'pressure', 'smoker', 'insurer'"),
        (np.ones((3, 2)), "hospital", "clients='hospital' names a column, but X has no names"),
        (np.array([[1e200], [1.0], [2.0]]), [0, 1, 1], "numbers too large to be squared"),
        (np.array([["2024"]], "datetime64[ns]"), [0], "Column 'x0' holds dates"),
        (FRAME[["hospital"]], "hospital", "X has 61 rows and 0 features"),
        (FRAME.set_axis([*"aabcde"], axis=1), "b", "several columns named 'a'"),
    ],
)
def test_tables_that_cannot_be_used(X, clients, sentence):
    with pytest.raises(UserError, match=sentence):
        FederatedTabular().fit(X, clients=clients)


def test_bad_parameters_and_new_rows(fitted):
    with pytest.raises(UserError, match="impute must be 'median' or 'mean', got 'mode'"):
        FederatedTabular(impute="mode").fit(FRAME, clients="hospital")
    with pytest.raises(ValueError, match="min_rows"):
        FederatedTabular(min_rows=0).fit(FRAME, clients="hospital")
    with pytest.raises(UserError, match="Column 'age' held numbers in fit"):
        fitted.transform(FRAME.assign(age="old"))
    with pytest.raises(ValueError, match="now missing:\n- age"):
        fitted.transform(FRAME.drop(columns="age"))


# The estimators


@pytest.mark.usefixtures("random_models")
def test_a_frame_in_one_line():
    model = FederatedLogistic(random_state=0).fit(FRAME, LABEL, clients="hospital")
    tabular = FederatedTabular(scale=False).fit(FRAME, clients="hospital")
    numbers, hospital = tabular.transform(FRAME), FRAME.hospital
    other = FederatedLogistic(random_state=0).fit(numbers, LABEL, hospital)
    np.testing.assert_array_equal(model.coef_, other.coef_)
    names = model.get_feature_names_out().tolist()
    assert names == tabular.get_feature_names_out().tolist()
    assert model.coef_.shape == (1, len(names))
    assert model.clients_.tolist() == hospital.unique().tolist()
    assert model.feature_names_in_.tolist() == [*FRAME.columns.drop("hospital")]
    for rows in (FRAME, FRAME.drop(columns="hospital")):
        np.testing.assert_array_equal(model.predict(rows), other.predict(numbers))
    assert model.ledger_ == tabular.ledger_
    assert model.preprocessing_.ledger_ is not model.ledger_
    with pytest.raises(ValueError, match="now missing:\n- age"):
        model.predict(FRAME.drop(columns="age"))


@pytest.mark.usefixtures("random_models")
def test_numbers_without_gaps_need_no_preprocessing():
    frame = FRAME[["pressure", "smoker", "hospital"]]
    model = FederatedLogistic(random_state=0).fit(FRAME, LABEL, clients="hospital")
    model.fit(frame, LABEL, clients="hospital")
    assert model.preprocessing_ is None
    assert model.ledger_ == Ledger()
    assert model.get_feature_names_out().tolist() == ["pressure", "smoker"]
    array = model.fit(frame[["pressure"]].to_numpy(), LABEL, frame.hospital)
    assert array.get_feature_names_out().tolist() == ["x0"]
    with pytest.raises(UserError, match="X has text or missing values, of which fit saw none"):
        array.predict([[np.nan]])
    holes = array.fit([[1.0], [np.nan], [2.0], [4.0]], [0, 1, 0, 1], [0, 0, 1, 1])
    assert holes.preprocessing_.fill_.tolist() == [2.0]
    assert np.isfinite(holes.predict_proba([[np.nan]])).all()


@pytest.mark.usefixtures("random_models")
def test_groups_and_trusted_rows_may_be_columns():
    frame = FRAME.assign(checked=np.arange(N) % 4 == 0)
    fair = FairClassifier(random_state=0).fit(FRAME, LABEL, "hospital", groups="insurer")
    assert set(fair.groups_) == {"a", "b"}
    assert fair.n_features_in_ == 4
    clean = NoisyLabelClassifier(random_state=0).fit(frame, LABEL, "hospital", trusted="checked")
    assert (clean.trust_[frame.checked] == 1).all()
    assert clean.feature_names_in_.tolist() == [*FRAME.columns.drop("hospital")]
    with pytest.raises(UserError, match=r"pass groups as one value per row .* 'insurer'"):
        fair.fit(FRAME, LABEL, "hospital", groups="insurers")


@pytest.mark.usefixtures("random_models")
def test_without_clients_there_is_a_warning_at_the_line_of_the_call():
    for fit in (FederatedTabular().fit, FederatedLogistic().fit):
        with pytest.warns(UserWarning, match="Without clients, all rows belong to one") as caught:
            fit(FRAME, LABEL)
        assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.usefixtures("random_models")
def test_pipelines_and_cross_validation_with_metadata_routing():
    hospital, rows = FRAME.hospital.to_numpy(), FRAME.drop(columns="hospital")
    with config_context(enable_metadata_routing=True):
        model = FederatedLogistic(random_state=0).set_fit_request(clients=True)
        tabular = FederatedTabular().set_fit_request(clients=True)
        both = make_pipeline(tabular, model).fit(rows, LABEL, clients=hospital)
        some = ColumnTransformer([("all", tabular, ["age", "ward"])])
        some.fit(rows, clients=hospital)
        scores = cross_validate(model, FRAME, LABEL, cv=2, params={"clients": "hospital"},
                                return_estimator=True)  # fmt: skip
    assert both[0].clients_.tolist() == both[1].clients_.tolist() == [*dict.fromkeys(hospital)]
    assert both.predict(rows).shape == (N,)
    assert some.get_feature_names_out()[:2].tolist() == ["all__age", "all__ward_medicine"]
    assert [len(one.clients_) for one in scores["estimator"]] == [3, 3]


def test_a_column_of_identifiers_is_warned_of():
    frame = pandas.DataFrame({"name": [f"patient {i}" for i in range(30)], "ward": ["a", "b"] * 15})
    with pytest.warns(UserWarning, match="Column 'name' has 30 categories in 30 rows"):
        FederatedTabular().fit(frame, clients=[0, 1] * 15)
