"""Mean, worst client and quantiles of clients' metrics, against NumPy."""

import numpy as np
import pytest

from simfbo import ClientScores, UserError
from simfbo.runs.client_scores import columns_of, is_column

LOSS = [1.0, 4.0, np.nan, 2.0]
RIGHT = [0.9, 0.5, np.nan, 0.7]
SCORES = ClientScores.of(
    [0.1, 0.2, 0.3, 0.4],
    {"loss": LOSS, "accuracy": RIGHT},
    {"loss": "min", "accuracy": "max"},
)


def test_those_without_a_reply_count_nowhere():
    assert SCORES.mean("loss") == pytest.approx((0.1 * 1 + 0.2 * 4 + 0.4 * 2) / 0.7)
    assert SCORES.worst("loss") == (1, 4.0)
    assert SCORES.worst("accuracy") == (1, 0.5)
    np.testing.assert_allclose(SCORES.quantiles("loss"), np.quantile([1, 4, 2], [0.1, 0.5, 0.9]))
    assert SCORES.quantiles("loss", [0.0, 1.0]) == [1.0, 4.0]
    assert SCORES.missing == [2]


def test_the_first_metric_is_the_default():
    assert SCORES.mean() == SCORES.mean("loss")
    assert SCORES.worst() == SCORES.worst("loss")
    assert SCORES.summary() == "loss: mean 2.429, worst 4 (client 1), 10-90 %: 1.2 to 3.6"
    with pytest.raises(UserError, match="no metric 'auc'; they have loss, accuracy"):
        SCORES.mean("auc")


def test_nobody_replied():
    nobody = ClientScores.of([0.5, 0.5], {"loss": [None, None]}, {"loss": "min"})
    assert np.isnan([nobody.mean(), nobody.worst().value, *nobody.quantiles()]).all()
    assert nobody.worst().client is None
    assert nobody.missing == [0, 1]
    assert np.isnan([*nobody.columns.values()]).all()


def test_the_columns_of_a_record():
    found = SCORES.columns
    assert [*found] == [*columns_of("loss"), *columns_of("accuracy")]
    assert all(map(is_column, found))
    assert found["clients_worst_accuracy"] == 0.5
    assert found["clients_q50_loss"] == 2.0
    assert found["clients_mean_loss"] == SCORES.mean("loss")


def test_as_tables():
    frame = SCORES._replace(ids=np.array(list("abcd"))).frame()
    assert frame.loc["b"].to_dict() == {"weight": 0.2, "loss": 4.0, "accuracy": 0.5}
    named = SCORES._replace(ids=np.array(list("abcd")))
    assert named.worst() == ("b", 4.0)
    rows = [line.split() for line in str(named).splitlines()[2:]]
    assert [row[0] for row in rows] == ["client", "b", "d", "a", "c"]  # the unknown come last
    assert rows[1] == ["b", "0.2", "4", "0.5"]
    many = ClientScores.of(np.full(30, 1 / 30), {"loss": np.arange(30)}, {"loss": "min"})
    assert str(many).splitlines()[-1] == "... and 20 more"
    assert str(many).splitlines()[2].split()[0] == "29"


def test_for_programs():
    found = SCORES.as_json()
    assert found["missing"] == [2]
    assert found["loss"]["client"] == 1
    assert found["accuracy"]["worst"] == 0.5
    assert [*found["loss"]] == ["mean", "worst", "client", "q10", "q50", "q90"]
