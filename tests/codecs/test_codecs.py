"""Codecs: their laws, exact enumerations, and what must not happen with hostile bytes."""

import itertools
import sys
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simfbo import Point, UserError, checks, codecs
from simfbo.codecs import BadMessage, Codecs, _entropy, _lowrank, laws
from simfbo.codecs._shared_noise import dither, ordered_sum, random_bits, root_mean_square
from simfbo.codecs.codec import framed, read_varint, received, unframed, varint
from simfbo.codecs.messages import (
    code_message,
    code_payload,
    decode_message,
    decode_payload,
    encode_message,
    encode_payload,
    start_of,
)
from simfbo.core.ledger import PerClient

KEY = jax.random.key(5)
FAMILY = {
    "float32": codecs.float32(),
    "bfloat16": codecs.bfloat16(),
    "dithered": codecs.dithered(0.5),
    "coarse": codecs.dithered(4.0),
    "fixed": codecs.dithered(0.5, False),
    "eden": codecs.eden(2),
    "subset": codecs.random_subset(0.1),
    "top-k": codecs.top_k(0.05),
    "lowrank": codecs.lowrank(8, 0.3),
    "lowrank-fixed": codecs.lowrank(8, 0.3, False),
}


@pytest.fixture(autouse=True)
def single_precision():
    """Messages are float32, as they are outside of tests."""
    with jax.enable_x64(False):
        yield


LAWS = {law.name: law for law in laws.CODEC_LAWS}
# Programs are shared by those that differ in what is done with the bytes only.
ALIKE = {"fixed": ("size", "small", "hostile"), "lowrank-fixed": ("size", "hostile"),
         "coarse": ("unbiased", "variance")}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "law"), [(name, law) for name in FAMILY for law in ALIKE.get(name, LAWS)]
)
def test_every_codec_obeys_every_law(name, law):
    codec, law = FAMILY[name], LAWS[law]
    measured = law.measure(codec)
    if law.name == "unbiased" and not codec.unbiased:
        assert measured > 10 * law.limit  # the law can tell
    else:
        assert measured <= law.limit


def test_a_wrong_codec_breaks_laws():
    right = codecs.dithered(0.5)
    wrong = right._replace(
        variance=0.03,
        restore=lambda s, key, shape: 1.01 * right.restore(s, key, shape),
        size=lambda leaf, symbols, key: 2.0 * right.size(leaf, symbols, key),
        finer=None,
    )
    with pytest.raises(checks.CheckError) as error:
        checks.check_codec(wrong)
    broken = {line.partition(":")[0] for line in str(error.value).splitlines()}
    assert broken == {"unbiased", "variance", "size"}
    with pytest.raises(checks.CheckError, match="unbiased"):  # says that it is biased, and is not
        checks.check_codec(right._replace(unbiased=False))


class TestDithered:
    def test_unbiased_exactly_by_enumeration(self):
        # All 2^16 dithers of a number on the grid of dithers: the mean is the number itself.
        levels = np.arange(2**16)
        u = (levels + 0.5) / 2**16 - 0.5
        for z in (0.0, 0.25, -1.375, 3.0 + 2.0**-16):
            assert np.mean(np.round(z + u) - u) == pytest.approx(z, abs=2.0**-17)

    def test_dithers_are_uniform_symmetric_and_uncorrelated(self):
        u = np.asarray(dither(KEY, (200_000,)), float)
        assert abs(u).max() < 0.5
        counts = np.histogram(u, 64, (-0.5, 0.5))[0]
        assert ((counts - 3125) ** 2 / 3125).sum() < 110  # chi squared, 63 degrees: 0.0002
        for lag in (1, 2, 3, 1000):
            assert abs(np.mean(u[lag:] * u[:-lag])) < 4 / 12 / np.sqrt(len(u))
        other = np.asarray(dither(jax.random.key(6), (200_000,)), float)
        assert abs(np.mean(u * other)) < 4 / 12 / np.sqrt(len(u))

    def test_all_levels_come_up(self):
        bits = np.asarray(random_bits(KEY, 2_000_000))
        assert len(np.unique(bits)) == 2**16

    def test_the_error_is_uniform_and_independent_of_the_message(self):
        z = np.linspace(-3, 3, 50_000).astype(np.float32)
        found = np.asarray(_first(codecs.dithered(2.0), z, KEY), float)
        step = 2.0 * np.sqrt((z.astype(float) ** 2).mean())
        error = (found - z) / step
        assert abs(error).max() <= 0.5 + 1e-6
        assert error.var() == pytest.approx(1 / 12, rel=0.02)
        assert abs(np.corrcoef(error, z)[0, 1]) < 0.02
        assert abs(np.corrcoef(error, abs(z))[0, 1]) < 0.02

    def test_a_small_array_beside_a_large_one_is_coded_finer(self):
        large, small = np.ones((40, 100), np.float32), np.ones(10, np.float32)
        codec = codecs.dithered(1.0)
        found = codec.decode(codec.encode([large, small], KEY), KEY, [large, small])
        assert abs(found[0] - large).max() > 0.3
        assert abs(found[1] - small).max() <= 0.5 * (10 / 4000) ** 0.5

    def test_uneven_rows_cost_less_than_even_ones(self):
        rng = np.random.default_rng(0)
        even = rng.standard_normal((200, 100)).astype(np.float32)
        uneven = even * np.exp(2 * rng.standard_normal((200, 1))).astype(np.float32)
        codec = codecs.dithered(1.0)
        assert len(codec.encode(uneven, KEY)) < 0.5 * len(codec.encode(even, KEY))

    def test_refuses_a_step_that_is_none(self):
        for step in (0.0, -1.0, 1e-5, float("nan"), float("inf")):
            with pytest.raises(UserError, match=r"at least 0\.0001"):
                codecs.dithered(step)

    @pytest.mark.parametrize("ranged", [True, False])
    def test_numbers_that_are_too_large_to_code_travel_as_floats(self, ranged):
        z = np.zeros(100_000, np.float32)
        z[7] = 3.0
        codec = codecs.dithered(1e-4, ranged)
        data = codec.encode(z, KEY)
        found = codec.decode(data, KEY, z)
        assert abs(found - z).max() <= 0.5e-4 * 3 / 100_000**0.5 + 1e-6
        twin, encoded_bytes = laws._twin(codec, z, KEY)
        np.testing.assert_array_equal(twin, found)
        if ranged:
            assert float(encoded_bytes) + 4 + 3 == len(data) == 400_000 + 8


def test_random_subset_is_unbiased_exactly():
    # Of 2^16 equally likely draws, `level` are sent, times 2^16 / level.
    codec, z = codecs.random_subset(0.3), np.array([1.0, -2.0], np.float32)
    level = round(0.3 * 2**16)
    assert codec.variance == pytest.approx(2**16 / level - 1)
    found = np.asarray(laws._many(codec, z, jax.random.split(KEY, 500)))
    assert set(np.unique(found[:, 0])) == {0.0, np.float32(2**16 / level)}


def test_eden_would_be_biased_on_a_few_numbers_which_travel_as_they_are():
    from simfbo.codecs import _eden

    z = np.array([3.0, -1.0, 0.5, 0.1])
    signs = np.array(list(itertools.product([1, -1], repeat=4)))
    hadamard = np.asarray(_eden._hadamard(jnp.eye(4)))
    found = []
    for first, second in itertools.product(signs, signs):  # all there are
        rotated = hadamard @ (second * (hadamard @ (first * z)))
        q = 0.797885 * np.where(rotated > 0, 1, -1)
        scale = (rotated @ rotated) / 16 / (rotated @ q)
        found.append(scale * first * (hadamard @ (second * (hadamard @ q))))
        assert found[-1] @ z == pytest.approx(z @ z)  # exact along the message, always
    assert np.linalg.norm(np.mean(found, 0) - z) > 1
    few = z.astype(np.float32)
    assert (codecs.eden(1).decode(codecs.eden(1).encode(few, KEY), KEY, few) == few).all()


def test_top_k_keeps_the_largest():
    z = np.array([[0.1, -5.0, 0.2], [3.0, 0.3, -0.4]], np.float32)
    codec = codecs.top_k(0.34)
    found = codec.decode(codec.encode(z, KEY), KEY, z)
    assert found.tolist() == [[0.0, -5.0, 0.0], [3.0, 0.0, 0.0]]


class TestLowRank:
    def test_factors_are_the_best_approximation(self):
        rng = np.random.default_rng(1)
        values = 0.7 ** np.arange(40)
        left, _ = np.linalg.qr(rng.standard_normal((90, 40)))
        right, _ = np.linalg.qr(rng.standard_normal((60, 40)))
        matrix = ((left * values) @ right.T).astype(np.float32)
        factors = jax.jit(_lowrank.factors, static_argnums=1)
        found_left, found_right, found = map(np.asarray, factors(matrix, 6))
        np.testing.assert_allclose(found, values[:6], rtol=1e-3)
        gap = np.linalg.norm(np.asarray(matrix) - found_left @ found_right.T)
        assert gap == pytest.approx(np.linalg.norm(values[6:]), rel=1e-2)

    def test_dependent_columns_and_zeros_are_no_trouble(self):
        for matrix in (np.zeros((50, 40)), np.outer(np.arange(50), np.ones(40))):
            found = codecs.lowrank(6, 0.1)
            z = matrix.astype(np.float32)
            decoded = found.decode(found.encode(z, KEY), KEY, z)
            assert np.linalg.norm(decoded - z) <= 0.05 * np.linalg.norm(z)


class TestDeterminism:
    def test_sums_do_not_depend_on_the_program(self):
        z = np.random.default_rng(2).standard_cauchy((37, 411)).astype(np.float32)
        one = root_mean_square(jnp.asarray(z))
        two = jax.jit(jax.vmap(lambda a: jnp.sin(a).sum() + root_mean_square(a)))(
            jnp.stack([z, z])
        ) - jax.jit(jax.vmap(lambda a: jnp.sin(a).sum()))(jnp.stack([z, z]))
        assert float(one) == pytest.approx(np.sqrt((z.astype(float) ** 2).mean()), rel=1e-5)
        assert float(two[0]) == pytest.approx(float(one), rel=1e-3)
        inside = jax.jit(jax.vmap(root_mean_square))(jnp.stack([z, 2 * z]))
        assert float(inside[0]) == float(one)
        assert float(ordered_sum(jnp.arange(7.0))) == 21.0

    @pytest.mark.parametrize("name", ["dithered", "eden", "lowrank"])
    def test_the_twin_is_the_same_in_a_loop_and_under_vmap(self, name):
        codec, z = FAMILY[name], laws._examples()["uneven"]
        real = codec.decode(codec.encode(z, KEY), KEY, z)
        keys = jnp.stack([KEY, jax.random.key(9)])
        twin = partial(_first, codec)
        for program in (jax.vmap(twin), lambda z, k: jax.lax.map(lambda one: twin(*one), (z, k))):
            found = jax.jit(program)(np.stack([z, z]), keys)
            np.testing.assert_array_equal(np.asarray(found[0]), real)

    @pytest.mark.parametrize("name", ["dithered", "eden", "lowrank"])
    def test_the_twin_is_the_same_for_uneven_messages_of_all_kinds(self, name):
        codec, rng = FAMILY[name], np.random.default_rng(23)
        rows = np.exp(2 * rng.standard_normal((40, 64, 1)))
        z = (rows * rng.standard_normal((40, 64, 96)) ** 3).astype(np.float32)
        keys = jax.random.split(KEY, 40)
        found = np.asarray(jax.jit(jax.vmap(partial(_first, codec)))(z, keys))
        for one, key, twin in zip(z, keys, found):
            np.testing.assert_array_equal(codec.decode(codec.encode(one, key), key, one), twin)

    def test_bytes_are_little_endian_whatever_the_machine(self):
        z = laws._examples()["vector"]
        for codec in FAMILY.values():
            data = codec.encode(z, KEY)
            swapped = codec.encode(z.astype(">f4"), KEY)
            assert data == swapped
        assert codecs.float32().encode(z, KEY)[3:7] == z.astype("<f4").tobytes()[:4]


@partial(jax.jit, static_argnums=0)
def _first(codec, z, key):
    return received(codec, z, jax.random.fold_in(key, 0))[0]


class TestBytes:
    @pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**21, 2**31])
    def test_whole_numbers(self, number):
        assert read_varint(varint(number), 0) == (number, len(varint(number)))

    def test_frames(self):
        assert unframed(framed([b"", b"abc"]), 2) == [b"", b"abc"]
        for data, count in (
            (framed([b"abc"]), 2),
            (framed([b"abc"] * 2), 1),
            (b"", 0),
            (b"xyz", 1),
        ):
            with pytest.raises(BadMessage):
                unframed(data, count)

    def test_a_flipped_bit_is_noticed(self):
        data = bytearray(codecs.dithered(1.0).encode(np.ones(100, np.float32), KEY))
        for place in range(len(data)):
            wrong = bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
            with pytest.raises(BadMessage):
                codecs.dithered(1.0).decode(wrong, KEY, np.ones(100, np.float32))

    def test_a_range_coded_stream_has_the_length_that_is_computed(self):
        rng = np.random.default_rng(3)
        for scale in (0.1, 1.0, 30.0):
            noise = rng.random(50_000) - 0.5
            k = np.round(rng.laplace(0, scale, 50_000) + noise).astype(np.int32)
            writer = _entropy.Writer(True)
            e = int(_entropy.exponent(jnp.float32(scale)))
            writer.numbers(k, noise, _entropy.exact_scale(np.asarray(e)))
            bits = _entropy.laplace_bits(
                jnp.asarray(k - noise, jnp.float32), _entropy.scale_of(jnp.asarray(e))
            )
            assert len(writer.finish()) == pytest.approx(float(bits) / 8, rel=0.002, abs=8)

    def test_without_the_range_coder_numbers_have_a_fixed_length(self, monkeypatch):
        z = np.linspace(-1, 1, 300).astype(np.float32)
        ranged = codecs.dithered(0.75, True)
        data = ranged.encode(z, KEY)
        monkeypatch.setitem(sys.modules, "constriction", None)
        with pytest.raises(BadMessage, match=r"pip install 'simfbo\[codecs\]'"):
            ranged.decode(data, KEY, z)
        codec = codecs.dithered(0.5, False)
        np.testing.assert_allclose(codec.decode(codec.encode(z, KEY), KEY, z), z, atol=0.15)
        with pytest.raises(UserError, match=r"pip install 'simfbo\[codecs\]'"):
            ranged.encode(z, KEY)

    def test_scales_are_the_same_on_both_sides(self):
        e = np.arange(-12, 41)
        np.testing.assert_allclose(_entropy.exact_scale(e), 2.0 ** (e / 2), rtol=1e-15)
        np.testing.assert_allclose(_entropy.scale_of(jnp.asarray(e)), 2.0 ** (e / 2), rtol=1e-5)


class Simulated(NamedTuple):
    """What arrives in a simulation, and its bytes."""

    tree: object
    bytes: object


def simulated(code, both, *arguments):
    """Return what a simulation computes of a message or a payload, in one program."""

    @jax.jit
    def compute(*given):
        coded = code(both, *given)
        return Simulated(coded.tree, coded.count_bytes())

    return compute(*arguments)


class TestMessages:
    BOTH = Codecs(
        up=Point(x=codecs.dithered(0.5), v=codecs.eden(2)),
        down=Point(x=codecs.relative_to_start(codecs.dithered(0.5)), y=codecs.bfloat16()),
    )
    MESSAGE = (Point(x={"w": np.ones(300, np.float32)}, v=np.ones(3, np.float32)), np.float32(7))

    def test_what_belongs_to_no_channel_travels_as_it_is(self):
        coded = simulated(code_message, self.BOTH, self.MESSAGE, KEY)
        data = encode_message(self.BOTH, self.MESSAGE, KEY)
        found = decode_message(self.BOTH, data, KEY, self.MESSAGE)
        assert found[1] == 7
        jax.tree.map(np.testing.assert_array_equal, coded.tree, found)
        assert float(coded.bytes) == pytest.approx(len(data), abs=4)

    def test_payloads_are_coded_by_place_and_relative_to_the_start(self):
        start = Point(np.full(50, 100.0, np.float32), np.zeros(2, np.float32))
        payload = (start.x + np.linspace(0, 1, 50).astype(np.float32), np.ones(2, np.float32),
                   PerClient(np.ones((3, 2), np.float32)))  # fmt: skip
        base = start_of(self.BOTH, payload, start)
        assert [one is None for one in base] == [False, True, True]
        coded = simulated(code_payload, self.BOTH, payload, base, KEY)
        data = encode_payload(self.BOTH, payload, base, KEY)
        found = decode_payload(self.BOTH, data, base, KEY, payload)
        jax.tree.map(np.testing.assert_array_equal, coded.tree, found)
        assert abs(found[0] - payload[0]).max() < 0.25  # of the change, not of the hundred
        assert isinstance(found[2], PerClient)
        assert float(coded.bytes) == pytest.approx(len(data) + 8, abs=4)  # two numbers a client

    def test_whole_numbers_and_plain_ones_travel_as_they_are(self):
        both = Codecs(down=Point(codecs.dithered(2.0), codecs.dithered(2.0)))
        payload = jax.tree.map(jnp.asarray, (np.arange(5), np.ones(3, np.float32)))
        data = encode_payload(both, payload, [None, None], KEY)
        found = decode_payload(both, data, [None, None], KEY, payload)
        assert found[0].tolist() == [0, 1, 2, 3, 4]

    def test_a_start_must_be_known(self):
        with pytest.raises(UserError, match=r"federation\.start"):
            start_of(self.BOTH, self.MESSAGE[0], None)

    @pytest.mark.parametrize(
        "wrong",
        [Codecs(up=Point(x=codecs.relative_to_start(codecs.float32()))), Codecs(up=Point(3))],
    )
    def test_wrong_codecs_are_refused(self, wrong):
        from simfbo import SimulatedFederation
        from simfbo.tasks import quadratic

        with pytest.raises(UserError):
            SimulatedFederation(quadratic().data, codecs=wrong)


@pytest.mark.parametrize("name", FAMILY)
def test_hostile_bytes_end_in_a_refusal(name):
    codec, rng = FAMILY[name], np.random.default_rng(17)
    z = laws._examples()["vector"]
    for length in (0, 1, 5, 2000):
        assert laws.survives(codec, framed([rng.bytes(length)]), KEY, z)


def test_the_last_bits_of_a_message_do_not_decide_what_low_rank_decodes():
    """Engines compile client steps differently, so that messages differ by rounding.

    The sign of a singular vector is arbitrary and must not depend on that.
    """
    rng, codec = np.random.default_rng(0), codecs.lowrank(4, 0.3)
    left, right = (np.linalg.qr(rng.normal(size=(50, 50)))[0] for _ in range(2))
    one = ((left * 0.7 ** np.arange(50)) @ right).astype("float32")
    for seed in range(4):
        key = jax.random.key(seed)
        other = (one * (1 + 1e-7 * rng.normal(size=one.shape))).astype("float32")
        found = [np.asarray(_first(codec, z, key)) for z in (one, other)]
        assert np.linalg.norm(found[0] - found[1]) < 1e-2 * np.linalg.norm(found[1])
