"""What a method is: fields that are numbers or static, client steps, names, and wrappers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functional import Changed, unchanged

from simfbo import Method, Point, SimulatedFederation, UserError, client_step
from simfbo.algorithms import fedbioacc_local, mimefbo, simfbo, with_momenta
from simfbo.core.method import Parts, WrappedStep, as_module, is_uncoded, marked
from simfbo.flower.node import with_numbers
from simfbo.privacy import Privacy, private
from simfbo.tasks import quadratic

TASK = quadratic(clients=3, dim_x=2, dim_y=2)
STEPS = Point(x=0.1, y=0.2, v=0.3)
PERSONAL = TASK.problem._replace(lower_level="private")


class Mine(Method):
    size: float = 0.1
    loss: object = eqx.field(static=True, default=None)

    def init(self, x, y):
        return Point(x, y)

    def round(self, state, federation, key):
        return state

    @client_step
    def first(self, payload, client):
        return self.size * payload

    @client_step
    def second(self, payload, client):
        return payload


class Other(Mine):
    pass


class Named(Mine):
    name = "A name"


class Heir(Named):
    pass


def test_the_name_is_that_of_the_class_unless_one_is_given():
    found = [kind().name for kind in (Mine, Other, Named, Heir)]
    assert found == ["Mine", "Other", "A name", "A name"]
    assert Changed(Heir(), unchanged).name == "A name"


def test_marked_methods_are_client_steps():
    steps = Mine(0.5).client_steps
    assert {name: step.__name__ for name, step in steps.items()} == {
        "first": "first", "second": "second",
    }  # fmt: skip
    assert float(steps["first"](4.0, None)) == 2.0
    assert marked(Mine()).keys() == steps.keys()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"size": lambda: 1}, r"Mine\.size is not a number: declare the field with eqx\.field"),
        ({"size": "a lot"}, r"Mine\.size is not a number"),
        ({"size": True}, r"Mine\.size is not a number"),
        ({"size": {"a": 1.0, "b": TASK.problem.upper}}, r"Mine\.size\['b'\] is not a number"),
        ({"size": np.ones(2)}, r"Mine\.size is an array: put it into the state"),
        ({"loss": jnp.ones(2)}, r"Mine\.loss is an array: put it into the state"),
    ],
)
@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_fields_are_numbers_or_static(fields, sentence):
    with pytest.raises(UserError, match=sentence):
        Mine(**fields)


class Steps(eqx.Module):
    weights: object

    @client_step
    def weigh(self, payload, client):
        return payload


@pytest.mark.parametrize("weights", [np.ones(2), "text", print])
def test_a_client_step_of_something_else_needs_numbers_too(weights):
    federation = SimulatedFederation(TASK.data)
    key = jax.random.key(0)
    with pytest.raises(UserError, match=r"^Steps\.weights is (an array|not a number)"):
        federation.sum(Steps(weights).weigh, jnp.ones(2), federation.cohort(key), key)


def test_parts_are_the_structure_and_the_numbers():
    one, other = (Parts.of(Mine(size)) for size in (1, np.float32(0.25)))
    assert one.structure == other.structure != Parts.of(Mine(loss=print)).structure
    assert (one.numbers, other.numbers) == ((1.0,), (0.25,))
    assert all(type(number) is float for number in (*one.numbers, *other.numbers))
    assert other.joined().size == 0.25


def test_a_wrapper_is_like_the_method_inside():
    inner = mimefbo(TASK.problem, STEPS, control="memory")
    outer = Changed(inner, unchanged)
    for name in ("name", "known_violations", "residuals", "needs_unmodified_sums", "has_memory",
                 "is_personal", "asks_again"):  # fmt: skip
        assert getattr(outer, name) == getattr(inner, name)
    assert outer.has_memory
    assert outer.needs_unmodified_sums
    personal = with_momenta(fedbioacc_local(PERSONAL, STEPS), 0.5)
    assert personal.is_personal
    memory = personal.client_memory(np.zeros(2), np.arange(2.0))
    np.testing.assert_array_equal(personal.client_y(memory), [0.0, 1.0])


def test_a_wrapped_step_keeps_the_name_and_whether_it_is_coded():
    def measure(payload, client):
        return payload

    measure.uncoded = True
    assert WrappedStep(measure).__name__ == as_module(measure).__name__ == "measure"
    assert is_uncoded(WrappedStep(measure))
    assert not is_uncoded(WrappedStep(Mine().first))


def test_a_request_brings_the_numbers_of_a_step_and_nothing_else():
    step = simfbo(TASK.problem, STEPS).simfbo_step
    numbers = [0.5 * number for number in Parts.of(step).numbers]
    assert Parts.of(with_numbers(step, numbers)) == (Parts.of(step).structure, tuple(numbers))
    with pytest.raises(UserError, match="has 2 numbers, this node's 6: deploy the same app"):
        with_numbers(step, [1.0, 2.0])
    # A server cannot raise the bounds of a client: they are not among the numbers.
    protected = private(simfbo(TASK.problem, STEPS), Privacy()).client_steps["simfbo_step"]
    assert Parts.of(protected).numbers == Parts.of(step).numbers
