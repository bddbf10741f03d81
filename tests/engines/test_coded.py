"""Coded messages in the engines: the same numbers everywhere, and bytes that are counted."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo import (
    DebugFederation,
    Gate,
    Point,
    SimulatedFederation,
    UserError,
    algorithms,
    codecs,
    cost,
    from_clients,
    privacy,
    run,
)
from simfbo.codecs.messages import REQUEST_BYTES, Codecs
from simfbo.core import sampling
from simfbo.core.exchange import EncodedBytes, Reason
from simfbo.core.gate import Reply
from simfbo.core.ledger import Traffic
from simfbo.engines import simulated
from simfbo.engines.base import estimated
from simfbo.robust.aggregation import median
from simfbo.tasks import quadratic

TASK = quadratic(clients=6, samples=6, noise=0.3, batch_size=2, seed=2)
STEPS = Point(x=0.05, y=0.2, v=0.1)


def every(codec):
    return Point(codec, codec, codec)


CODED = Codecs(
    up=every(codecs.dithered(0.5)), down=every(codecs.relative_to_start(codecs.dithered(0.2)))
)
FIXED = Codecs(up=every(codecs.dithered(0.5, False)), down=every(codecs.bfloat16()))


def simfbo():
    return algorithms.simfbo(TASK.problem, STEPS)


def ran(engine, rounds=4, method=None, task=TASK, **options):
    federation = engine(task.data, sampling.without_replacement(4), **options)
    method = method or simfbo()
    return run(method, federation, task.x0, task.y0, rounds=rounds, seed=3), federation


def variables(history):
    return np.concatenate([np.ravel(z) for z in jax.tree.leaves(history.state[:3])])


@pytest.mark.parametrize(
    "options",
    [
        {"codecs": CODED},
        pytest.param({"codecs": FIXED}, marks=pytest.mark.slow),
        pytest.param({"codecs": CODED, "aggregators": every(median())}, marks=pytest.mark.slow),
    ],
)
def test_all_engines_receive_the_same(options):
    blocks, simulated = ran(SimulatedFederation, **options)
    lanes, _ = ran(SimulatedFederation, strategy="lanes", **options)
    real, debug = ran(DebugFederation, **options)
    np.testing.assert_allclose(variables(lanes), variables(blocks), rtol=1e-6)
    np.testing.assert_allclose(variables(real), variables(blocks), rtol=1e-6)
    counted, computed = debug.ledger.total, simulated.ledger.total
    assert counted.estimated == 0
    assert computed.bytes_up == pytest.approx(counted.bytes_up, rel=0.02)
    assert computed.bytes_down == pytest.approx(counted.bytes_down, rel=0.02)
    if options["codecs"] is FIXED:
        assert computed == counted
    else:
        assert computed.estimated == computed.bytes_up + computed.bytes_down


def test_float32_is_bit_equal_to_no_codec(single_precision):
    task = quadratic(clients=6, samples=6, noise=0.3, batch_size=2, seed=2)
    same = Codecs(up=every(codecs.float32()), down=every(codecs.float32()))
    for options in ({}, {"strategy": "lanes"}):
        plain, before = ran(SimulatedFederation, task=task, **options)
        coded, after = ran(SimulatedFederation, task=task, codecs=same, **options)
        np.testing.assert_array_equal(variables(coded), variables(plain))
        # In 4 rounds with 4 clients: for each of three arrays two bytes, and a checksum.
        sent, more = after.ledger.total, 16 * (3 * 2 + 4)
        assert sent.bytes_up == before.ledger.total.bytes_up + more
        assert sent.bytes_down == before.ledger.total.bytes_down + more + 16 * REQUEST_BYTES


@pytest.mark.parametrize("options", [{}, {"strategy": "lanes"}])
def test_a_run_is_resumed_to_the_bit(tmp_path, options):
    whole, one = ran(SimulatedFederation, 6, codecs=CODED, **options)

    def part(rounds, **more):
        federation = SimulatedFederation(
            TASK.data, sampling.without_replacement(4), codecs=CODED, **options
        )
        history = run(
            simfbo(), federation, TASK.x0, TASK.y0, rounds=6, seed=3, directory=tmp_path,
            checkpoint_seconds=0.0, on_round=_stop_at(rounds), **more,
        )  # fmt: skip
        return history, federation

    with pytest.raises(_Stop):
        part(3)
    rest, two = part(9, resume=True)
    np.testing.assert_array_equal(variables(rest), variables(whole))
    assert two.ledger == one.ledger
    other = SimulatedFederation(TASK.data, sampling.without_replacement(4), codecs=FIXED, **options)
    with pytest.raises(UserError, match="codecs"):
        run(simfbo(), other, TASK.x0, TASK.y0, rounds=6, seed=3, directory=tmp_path, resume=True)


class _Stop(Exception):
    pass


def _stop_at(rounds):
    def on_round(t, record):
        if t == rounds:
            raise _Stop

    return on_round


class TestRefusals:
    def spoiled(self, change):
        federation = DebugFederation(TASK.data, codecs=CODED, gate=Gate(max_norm=1e3))
        federation.start = Point(TASK.x0, TASK.y0)
        federation.wire = lambda replies: [change(reply) for reply in replies]
        state = simfbo().init(TASK.x0, TASK.y0)
        simfbo().round(state, federation, jax.random.key(0))
        return federation

    @pytest.mark.parametrize(
        ("arrays", "text"),
        [
            (b"nothing of ours", "sent bytes whose checksum is wrong"),
            (b"", "sent bytes whose checksum is wrong"),
            (3, "sent a int in place of a coded message"),
        ],
    )
    def test_what_cannot_be_decoded_is_refused_with_a_reason(self, arrays, text):
        def change(reply):
            return reply._replace(arrays=arrays) if reply.client == 2 else reply

        (refusal,) = self.spoiled(change).refusals
        assert (refusal.client, refusal.reason, refusal.text) == (2, Reason.MALFORMED, text)

    def test_a_message_of_another_client_is_refused_or_gated(self):
        def change(reply):
            return Reply(2, reply.exchange, reply.arrays) if reply.client == 3 else reply

        reasons = {refusal.reason for refusal in self.spoiled(change).refusals}
        assert reasons == {Reason.DUPLICATE, Reason.NO_REPLY}

    def test_what_is_not_finite_is_refused_after_decoding(self):
        problem = TASK.problem._replace(
            upper=lambda x, y, batch: TASK.problem.upper(x, y, batch) / 0.0
        )
        method = algorithms.simfbo(problem, STEPS)
        federation = SimulatedFederation(TASK.data, codecs=CODED)
        federation.start = Point(TASK.x0, TASK.y0)
        with pytest.raises(Exception, match="not finite"):
            method.round(method.init(TASK.x0, TASK.y0), federation, jax.random.key(0))


def test_absent_clients_send_nothing():
    options = {"codecs": CODED, "absence": sampling.drop_out(0.25)}
    _, blocks = ran(SimulatedFederation, **options)
    _, lanes = ran(SimulatedFederation, strategy="lanes", **options)
    _, debug = ran(DebugFederation, **options)
    assert 0 < debug.ledger.total.floats_up < debug.ledger.total.floats_down
    for one in (blocks, lanes):
        assert one.ledger.total.floats_up == debug.ledger.total.floats_up
        assert one.ledger.total.bytes_up == pytest.approx(debug.ledger.total.bytes_up, rel=0.03)


class TestBytes:
    def test_a_sample_is_taken_of_those_who_reply(self):
        task = quadratic(clients=10)
        method, totals = algorithms.simfbo(task.problem, STEPS), []
        for engine, options in ((SimulatedFederation, {"strategy": "lanes"}),
                                (SimulatedFederation, {}), (DebugFederation, {})):  # fmt: skip
            federation = engine(task.data, codecs=CODED, absence=sampling.drop_out(0.5), **options)
            run(method, federation, task.x0, task.y0, rounds=8, seed=3)
            totals.append(federation.ledger.total)
        lanes, blocks, debug = totals
        assert lanes.floats_up == blocks.floats_up == debug.floats_up
        assert lanes.bytes_up == pytest.approx(debug.bytes_up, rel=0.03)
        assert blocks.bytes_up == pytest.approx(debug.bytes_up, rel=0.03)

    def test_replies_that_are_lost_on_the_way_are_not_counted(self):
        federation = DebugFederation(TASK.data, codecs=CODED)
        federation.start = Point(TASK.x0, TASK.y0)
        federation.wire = lambda replies: replies[:2]
        simfbo().round(simfbo().init(TASK.x0, TASK.y0), federation, jax.random.key(0))
        assert federation.ledger.total.bytes_up == federation.latest.coded.up
        assert federation.ledger.total.floats_up == federation.ledger.total.floats_down / 3

    def test_bytes_of_many_rounds_add_up_exactly(self, single_precision):
        task = quadratic(clients=4, dim_x=300, dim_y=3)
        same = Codecs(up=every(codecs.float32()), down=every(codecs.float32()))
        federation = SimulatedFederation(task.data, codecs=same)
        method = algorithms.simfbo(task.problem, Point(x=1e-5, y=1e-5, v=1e-5))
        run(method, federation, task.x0, task.y0, rounds=6000, seed=0)
        each = 4 * 306 + (3 + 2 + 2) + 4  # numbers, what frames them, checksum
        assert federation.ledger.total.bytes_up == 6000 * 4 * each > 2**24

    def test_a_sample_of_clients_stands_for_all_and_says_how_exact_that_is(self):
        found = estimated(np.array([90.0, np.nan, 110.0, np.nan]), 4, 400.0, True)
        # Two of four: variance of the sum 4^2 (1 - 2/4) 200 / 2.
        assert found == EncodedBytes(400.0, 400.0, 800.0, 800.0)
        traffic = Traffic(1, 0, 0, 400, 400, 800, 800.0)
        assert traffic.uncertainty == pytest.approx((0.005 * 800 + 2 * 800**0.5) / 800)
        assert estimated(np.array([90.0, 110.0]), 2, 50.0, False) == EncodedBytes(50.0, 200.0)
        assert Traffic().uncertainty == 0.0

    def test_two_clients_of_a_large_cohort_are_weighed_others_every_time(self, monkeypatch):
        jobs, threads = [], simulated.run_in_threads
        monkeypatch.setattr(
            simulated, "run_in_threads", lambda *a: jobs.append(a[0]) or threads(*a)
        )
        task = quadratic(clients=30)
        federation = SimulatedFederation(task.data, codecs=CODED, strategy="lanes")
        federation.start, method = Point(task.x0, task.y0), algorithms.simfbo(task.problem, STEPS)
        state, seen = method.init(task.x0, task.y0), set()
        for t in range(3):
            state = method.round(state, federation, jax.random.key(t))
            known = np.flatnonzero(jobs[-1].rows.measured)
            assert len(known) == 2
            seen |= set(known.tolist())
        assert len(seen) == 6

    def test_cost_counts_normal_messages(self):
        federation = SimulatedFederation(TASK.data, codecs=CODED)
        total = cost(simfbo(), federation, TASK.x0, TASK.y0).total
        plain = cost(simfbo(), SimulatedFederation(TASK.data), TASK.x0, TASK.y0).total
        assert total.estimated == total.bytes_up + total.bytes_down
        assert total.floats_up == plain.floats_up

    def test_records_say_how_exact_bytes_are(self):
        history, federation = ran(SimulatedFederation, codecs=CODED)
        assert history.records[-1]["bytes_uncertainty"] == pytest.approx(
            federation.ledger.total.uncertainty, abs=1e-6
        )
        assert "bytes_uncertainty" not in ran(SimulatedFederation)[0].records[-1]


def test_measuring_exchanges_are_not_coded():
    def build(plan):
        return algorithms.simfbo(TASK.problem, plan.local, plan.server)

    method = algorithms.auto_steps(build, TASK.problem, TASK.x0, 3)
    coarse = Codecs(up=every(codecs.dithered(4.0)), down=every(codecs.dithered(0.01)))
    _, coded = ran(SimulatedFederation, 3, method, codecs=coarse)
    _, plain = ran(SimulatedFederation, 3, method)
    measured = plain.ledger.by_step["curvature"]
    assert coded.ledger.by_step["curvature"].bytes_up == measured.bytes_up
    assert coded.ledger.by_step["curvature"].estimated == 0


class TestPrivacy:
    """Noise first, then coding; and what the server's noise is for stays clipped."""

    def messages(self, where):
        protected = privacy.private(
            simfbo(),
            privacy.Privacy(clip=every(1e-3), noise=every(1e-9), where=where),
        )
        coarse = Codecs(up=every(codecs.dithered(6.0)))
        federation = SimulatedFederation(TASK.data, codecs=coarse)
        (step,) = protected.client_steps.values()
        cohort = federation.cohort(jax.random.key(0))
        at = Point(TASK.x0 + 1, TASK.y0 + 1, TASK.y0)
        found = federation.gather(step, at, cohort, jax.random.key(0))
        return [np.linalg.norm(np.asarray(part).reshape(6, -1), axis=1) for part in found]

    def test_sensitivity_holds_after_decoding(self):
        assert max(norms.max() for norms in self.messages("server")) <= 1e-3 * (1 + 1e-6)

    def test_a_clients_own_noise_needs_no_second_clipping(self):
        assert max(norms.max() for norms in self.messages("client")) > 1.5e-3


class TestFixedPoint:
    """On quadratics directions are linear: unbiased codecs leave the mean iterate where it is."""

    @pytest.fixture(scope="class")
    @classmethod
    def task(cls):
        return quadratic(clients=8, heterogeneity=1.0, seed=4)

    def mean_x(self, task, coded, size, rounds):
        """Return the mean of x over the second half of a run."""

        class State(NamedTuple):
            base: tuple
            mean: np.ndarray
            count: np.ndarray
            x = property(lambda self: self.base.x)
            y = property(lambda self: self.base.y)
            v = property(lambda self: self.base.v)

        method = algorithms.simfbo(task.problem, STEPS, Point(*(size * s for s in STEPS)))

        def init(x, y):
            return State(method.init(x, y), jax.numpy.zeros_like(x), jax.numpy.zeros(()))

        def round(state, federation, key):
            base = method.round(state.base, federation, key)
            late = (state.count >= rounds / 2).astype(float)
            mean = state.mean + late * (base.x - state.mean) / jax.numpy.maximum(
                1.0, state.count + 1 - rounds / 2
            )
            return State(base, mean, state.count + 1)

        averaged = method._replace(init=init, round=round, tracing=None)
        federation = SimulatedFederation(task.data, codecs=coded)
        return run(averaged, federation, task.x0, task.y0, rounds=rounds, seed=1).state

    @pytest.mark.slow
    def test_dithered_on_all_channels_leaves_it(self, task):
        from simfbo.tasks._quadratic import random_quadratic

        best = random_quadratic(8, heterogeneity=1.0, seed=4).closed_form().x()
        fine = Codecs(
            up=every(codecs.dithered(0.25)),
            down=every(codecs.relative_to_start(codecs.dithered(0.1))),
        )
        state = self.mean_x(task, fine, 0.5, 60_000)
        assert np.linalg.norm(state.mean - best) < 1e-3
        biased = Codecs(up=every(codecs.top_k(0.4)))
        moved = self.mean_x(task, biased, 0.5, 4_000)
        assert np.linalg.norm(moved.mean - best) > 0.1


def product(payload, client):
    """Send a product, whose last bits depend on how it is compiled."""
    return Point(x=jnp.tanh(client.data.lower_batch(client.key)[0]) @ payload.x)


def test_low_rank_on_all_engines(single_precision):
    """Messages differ in their last bits, and what is decoded by hardly more: no sign may flip.

    For one and the same message it is equal to the bit (`CODEC_LAWS`).
    """
    rng = np.random.default_rng(0)
    bases = [np.linalg.qr(rng.normal(size=(80, 80)))[0] for _ in range(2)]
    falling = ((bases[0] * 0.7 ** np.arange(80)) @ bases[1]).astype("float32")
    samples = [rng.normal(size=(1, 80, 80)).astype("float32") for _ in range(6)]
    data, found = from_clients(samples, samples), []
    for engine in (SimulatedFederation, DebugFederation):
        federation = engine(data, codecs=Codecs(up=Point(x=codecs.lowrank(8, 0.3))))
        key = jax.random.key(1)
        payload = Point(x=jnp.asarray(falling))
        found.append(np.asarray(federation.sum(product, payload, federation.cohort(key), key).x))
    assert np.linalg.norm(found[0] - found[1]) < 1e-2 * np.linalg.norm(found[1])
