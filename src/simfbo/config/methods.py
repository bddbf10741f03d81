"""The library's methods: the record of each in the catalogue."""

from typing import Any

from simfbo.config.catalogue import METHODS, MethodRecord
from simfbo.config.fields import MethodSettings
from simfbo.runs.palette import COLOURS, GREY


def steps_table(settings: MethodSettings) -> str:
    """Return the name of the table with a method's step sizes; the server's if given."""
    if hasattr(settings, "steps"):
        return "steps"
    return "local" if getattr(settings, "server", None) is None else "server"


def _record(place: int, name: str, title: str, **more: Any) -> MethodRecord:
    factory = f"simfbo.algorithms:{name}"
    return MethodRecord(name, title, factory, colour=COLOURS[place], **more)


_SIMFBO = "Yang, Xiao, Ji, NeurIPS 2023"
_FEDNEST = "Tarzanagh, Li, Thrampoulidis, Oymak, ICML 2022"
_RADIUS = {"radius": 10.0}
_FEDBIO = "Li, Huang, Huang, NeurIPS 2023"

# The options under `laws` choose series so long that truncation does not affect the laws.
METHODS.add(
    _record(0, "simfbo", "SimFBO", defaults=_RADIUS, one_exchange=True, adds_up_work=True,
            when="clients do about the same amount of local work: the default",
            theory=r"$\frac{n-P}{n} \sqrt{\bar\tau / (P T)} + 1 / \sqrt{P \bar\tau T} + "
                   r"1 / (\bar\tau T)$: linear speed-up, clients sampled without replacement",
            paper=_SIMFBO),
    _record(1, "shrofbo", "ShroFBO", defaults=_RADIUS, one_exchange=True,
            when="clients do unequal amounts of local work, in small local steps",
            theory="SimFBO's speed-up, and the right solution under unequal local work",
            paper=_SIMFBO),
    _record(2, "fednest", "FedNest",
            laws={"": {"v": 0.45, "neumann_terms": 16}, "-as-released": {"mode": "as_released"}},
            when="you need the method that most papers compare with",
            sampled="the step of $y$", theory="rates under heterogeneous data", paper=_FEDNEST),
    _record(3, "lfednest", "LFedNest",
            laws={"": {"v": 0.3, "neumann_terms": 10}},
            when="clients are alike, and nothing but $x$ and $y$ may travel",
            sampled="the step of $y$", paper=_FEDNEST),
    _record(4, "aggitd", "FBO-AggITD", laws={"": {"v": 0.45, "lower_rounds": 12}},
            when="you compare with the literature, and $y$ takes many rounds anyway",
            sampled="the step of $y$", paper="Xiao, Ji, ICML 2023",
            theory="the sample complexity of earlier methods, in fewer rounds"),
    _record(5, "fedbio", "FedBiO", defaults=_RADIUS, sampling="everyone", one_exchange=True,
            adds_up_work=True, when="everyone takes part and the server should only average",
            theory=r"$O(\epsilon^{-1.5})$ rounds, linear speed-up", paper=_FEDBIO),
    _record(6, "fedmbo", "FedMBO", sampling="with-replacement",
            laws={"": {"v": 0.3, "neumann_terms": 12}},
            when="the hypergradient must be unbiased although clients are sampled",
            sampled="all, but for the truncation of the series",
            theory=r"$1 / \sqrt{P T} + 1 / T + \sqrt{P} / T^{3/2}$: linear speed-up, clients "
                   "sampled with replacement",
            paper="Huang, Zhang, Ji, ICML 2023"),
    _record(7, "memfbo", "MemFBO", one_exchange=True, adds_up_work=True,
            laws={"": {"penalty": 1e4}, "-order-2": {"penalty": 100.0, "order": 2}},
            when="second derivatives are too slow, too large, or not available",
            theory="linear speed-up under milder assumptions, with everyone or sampled clients",
            paper="Yang, Xiao, Ma, Ji, AAAI 2025"),
    _record(8, "fedmsa", "FedMSA", defaults=_RADIUS,
            when="gradients are noisy, local work is unequal, and a second round is affordable",
            sampled="all, with one local step", theory="near-optimal number of rounds",
            paper="Tarzanagh, Li, Sharma, Oymak, 2023", from_abstract=True),
    _record(9, "fedbioacc", "FedBiOAcc", defaults=_RADIUS, sampling="everyone", one_exchange=True,
            adds_up_work=True, when="everyone takes part and gradients are noisy",
            theory=r"$O(\epsilon^{-1})$ rounds, $O(\epsilon^{-1.5})$ samples, linear speed-up",
            paper=_FEDBIO, from_abstract=True),
    _record(10, "mimefbo", "MimeFBO", defaults=_RADIUS, one_exchange=True,
            laws={"": {}, "-storm": {"control": "storm", "theta": 0.5},
                  "-memory": {"control": "memory"}},
            when="clients differ and take several or unequal local steps; with "
                 '`control = "memory"`, also where few take part',
            theory="no rate; the exact solution is its fixed point", paper="ours"),
    _record(11, "fedbioacc_local", "FedBiOAcc-Local", defaults=_RADIUS, sampling="everyone",
            one_exchange=True, adds_up_work=True, private=True,
            when="every client has a lower problem of its own, such as a personal head",
            theory="FedBiOAcc's rate", paper=_FEDBIO, from_abstract=True),
    MethodRecord("fedavg", "FedAvg", "simfbo.algorithms:fedavg", one_exchange=True,
           adds_up_work=True, baseline=True, colour=GREY,
           paper="McMahan, Moore, Ramage, Hampson, Aguera y Arcas, AISTATS 2017"),
)  # fmt: skip
