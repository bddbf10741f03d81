"""The model card of an estimator: its clients by name, what they agreed on, and its limits."""

import numpy as np
import pandas
import pytest

from simfbo import Point
from simfbo.estimators import FederatedLogistic, FederatedRidge

RNG = np.random.default_rng(0)
N = 40
QUICK = {"rounds": 3, "steps": Point(x=0.1, y=0.5, v=0.5), "random_state": 0, "tol": 0.0}
FRAME = pandas.DataFrame(
    {
        "age": [np.nan, 40.0, 50.0, 70.0] * 10,
        "ward": np.array(["a|b", "c", None, "c"] * 10, object),
        "hospital": np.array(["north"] * 25 + ["south"] * 15, object),
    }
)

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


@pytest.fixture(scope="module")
def model():
    return FederatedLogistic(**QUICK).fit(FRAME, np.arange(N) % 2 == 0, "hospital")


def test_what_only_the_estimator_knows(model, tmp_path):
    text = model.card(tmp_path / "card.md")
    assert (tmp_path / "card.md").read_text() == text
    assert text.startswith("# Model card: FederatedLogistic\n\nLogistic regression that learns ")
    assert "It predicts one of 2 classes (False, True) from 2 features." in text
    assert "40 rows, which both levels use." in text
    assert "| north | 25 |\n| south | 15 |\n" in text
    assert "| age | number | median 50 |\n" in text
    assert "| ward | text | 3 categories: a\\|b, c, (missing) |\n" in text
    assert "| `rounds` | 3 |" in text
    assert "`verbose`" not in text
    assert "scikit-learn 1." in text
    assert "use `score_clients` on rows that were kept back" in text


def test_scores_and_bytes_are_those_of_the_estimator(model):
    text = model.card()
    scores, ledger = model.score_clients_, model.ledger_
    worst, value = scores.worst("loss")  # the clients' ids are objects
    assert f"| loss | {scores.mean('loss'):.4g} | {value:.4g} | {worst} |" in text
    sent = ledger.evaluation.bytes_down + ledger.evaluation.bytes_up
    assert f"| in addition, for evaluations on clients | {sent} B |" in text
    assert f"\n{ledger.total.rounds} exchanges with clients." in text


def test_a_regressor_of_numbers():
    X = RNG.normal(size=(N, 1))
    text = FederatedRidge(**QUICK).fit(X, X[:, 0], np.arange(N) % 2).card()
    assert "It predicts a number from 1 feature.\n" in text
    assert "None but standardisation" in text
    assert "| metric | mean |" in text
    assert "\n| mse | " in text
